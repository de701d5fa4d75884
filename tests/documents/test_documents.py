"""The mission documents' YAML, commands and code, as written, with only file names changed (docs/documents.md)."""

from __future__ import annotations

import logging
import textwrap

import h5py
import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import stoker
from run_makers import make_store
from stoker.cli.main import app
from stoker.config import load_config, resolve
from stoker.recipes.catalogue import choose_recipe

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = ["--set", "training.epochs=1", "--set", "training.precision=fp32", "--device", "cpu"]


def typed(*words: object) -> str:
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    return done.output


def write_yaml(path, text: str):
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return path


# -- S0: the chunk loader ------------------------------------------------------------------------


@pytest.fixture
def aligned(tmp_path):
    """The document's HDF5 file: `features` (N, T, F), `targets`, attributes."""
    path = tmp_path / "aligned_train.h5"
    rng = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        file["features"] = rng.normal(size=(96, 12, 5)).astype("f4")
        file["targets"] = rng.normal(size=(96, 4)).astype("f4")
        file.attrs.update(num_samples=96, sequence_length=12, feature_count=5)
    return path


def test_s0_the_loader_in_the_training_loop(aligned):
    loader = stoker.ChunkDataLoader(
        hdf5_path=str(aligned), batch_size=16, chunk_size_gb=12.0, device="cpu", shuffle=False,
        drop_last=False,
    )  # fmt: skip
    model = nn.Sequential(nn.Flatten(), nn.Linear(60, 4))
    criterion, optimizer = nn.MSELoss(), torch.optim.AdamW(model.parameters())
    seen = 0
    for batch_features, batch_targets in loader:
        optimizer.zero_grad()
        loss = criterion(model(batch_features), batch_targets)
        loss.backward()
        optimizer.step()
        seen += len(batch_features)
    assert seen == 96
    assert str(loader.hdf5_path) == str(aligned)


GPU_OPTIMIZATION = """
    gpu_optimization:
      use_chunk_loader: true
      chunk_size_gb: 12.0
      batch_size: 128
      num_workers: 0
      pin_memory: true
      use_amp: true
      gradient_accumulation_steps: 1
      empty_cache_every_n_epochs: 1
      log_gpu_stats_every_n_batches: 100
"""


def test_s0_the_yaml_trains(tmp_path):
    store = make_store("forex", tmp_path / "store")
    config = write_yaml(tmp_path / "training.yaml", GPU_OPTIMIZATION)
    out = typed(
        "train", "--config", config, "--store", store.path, "--run-dir", tmp_path / "run", *SMALL,
        "--set", "recipe.name=forex", "--set", "recipe.options.d_model=8", "--set", "recipe.options.heads=2",
        "--set", "recipe.options.layers=1",
    )  # fmt: skip
    assert "best:" in out
    settings = resolve(load_config(config))
    assert settings.training.batch_size == 128


def test_s0_int8_for_inference():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.head = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, 3)

        def forward(self, rows):
            return self.head(self.lstm(rows)[0][:, -1])

    model, rows = Net().eval(), torch.randn(2, 5, 4)
    want = model(rows)
    for small in (
        stoker.quantize_dynamic(model, {nn.LSTM, nn.Linear}, dtype=torch.qint8),
        stoker.quantize_dynamic(model, dtype=torch.qint8),
        stoker.quantize_dynamic(model, {nn.Linear}, torch.qint8),
    ):
        assert (small(rows) - want).abs().max() < 0.1
    with pytest.raises(stoker.InputError, match=r"dtype is torch\.float16"):
        stoker.quantize_dynamic(model, dtype=torch.float16)


def test_s0_gpu_statistics_without_a_gpu_say_nothing(logged):
    stoker.log_gpu_stats(logging.getLogger("document"))
    assert torch.cuda.is_available() or not logged


# -- S1: mass spectra in 32 GB -------------------------------------------------------------------


def test_s1_the_estimate_needs_no_data():
    out = typed("bench", "memory", "--mode", "estimate", "--ram-gb", "32")
    for line in ("NEIMS v2.0 Memory Benchmark", "System RAM: 32GB", "Recommendations for 32GB RAM System",
                 "300,000 samples (Full NIST17):", "100,000 samples (Large subset):", "50,000 samples"):  # fmt: skip
        assert line in out
    assert "RECOMMENDED" in out


def test_s1_the_dataset_prints_its_lines(tmp_path, capsys, monkeypatch):
    pytest.importorskip("rdkit")
    from test_compat_massspec import SMALL as SMILES
    from test_compat_massspec import write_library

    monkeypatch.chdir(tmp_path)
    msp, mols = write_library(tmp_path, SMILES)
    dataset = stoker.LazyMassSpecDataset(
        msp_file=str(msp), mol_files_dir=str(mols), max_mz=500, cache_dir="data/processed/lazy_cache",
        use_functional_groups=True, precompute_graphs=False, max_samples=None,
    )  # fmt: skip
    first = capsys.readouterr().out
    assert "Parsing MSP file..." in first
    assert "Cache built:" in first
    train, val, test = stoker.NISTDataLoader.create_dataloaders(
        dataset, batch_size=32, num_workers=0, train_ratio=0.8, val_ratio=0.1
    )
    assert sum(len(each.dataset) for each in (train, val, test)) == len(dataset)
    stoker.LazyMassSpecDataset(msp_file=str(msp), mol_files_dir=str(mols))
    assert "Loading metadata from cache:" in capsys.readouterr().out


MEMORY_EFFICIENT = """
    data:
      memory_efficient_mode:
        enabled: true
        use_lazy_loading: true
        lazy_cache_dir: data/processed/lazy_cache
        precompute_graphs: false
        ram_32gb_mode:
          max_training_samples: null
          gradient_accumulation: 2
          empty_cache_frequency: 50
"""


def test_s1_the_yaml_is_read(tmp_path):
    config = write_yaml(tmp_path / "config.yaml", MEMORY_EFFICIENT)
    settings = resolve(load_config(config, ["recipe.name=massspec"]))
    assert settings.training.gradient_accumulation_steps == 2
    assert choose_recipe(settings).recipe.name == "massspec"


def test_s1_a_distillation_without_a_teacher_is_refused(tmp_path):
    config = write_yaml(
        tmp_path / "config.yaml",
        """
    training:
      student_distill:
        batch_size: 32
        num_workers: 4
        gradient_accumulation_steps: 2
""",
    )
    settings = resolve(load_config(config, ["recipe.name=massspec"]))
    with pytest.raises(
        stoker.ConfigError, match="a distillation, and no teacher is named"
    ) as error:
        choose_recipe(settings)
    assert error.value.fix == "--set recipe.options.teacher=runs/massspec-teacher/best.pt"
    settings = resolve(
        load_config(config, ["recipe.name=massspec", "recipe.options.teacher=teacher.pt"])
    )
    assert choose_recipe(settings).options.teacher == "teacher.pt"


# -- S2: data loading from first principles --------------------------------------------------------


def test_s2_the_loader_of_the_chapter():
    from stoker.basics import CustomDataset, DataLoader

    dataset = CustomDataset(torch.randn(100, 3, 32, 32), torch.randint(0, 10, (100,)))
    loader = DataLoader(dataset, batch_size=32, shuffle=True, num_workers=0, pin_memory=True)
    assert [len(labels) for _, labels in loader] == [32, 32, 32, 4]
    image, _ = dataset.get(0)
    image.zero_()  # a copy
    assert dataset.get(0)[0].abs().sum() > 0


def test_s2_samplers_and_transforms_of_ones_own():
    from stoker.basics import (
        BatchSampler,
        Compose,
        CustomDataset,
        DataLoader,
        Normalize,
        RandomCrop,
        RandomHorizontalFlip,
        Sampler,
        ToTensor,
        Transform,
    )  # fmt: skip

    class Backwards(Sampler):
        def sample(self, n):
            return list(range(n))[::-1]

        def __len__(self):
            return 6

    class Plain:
        def sample(self, n):
            return list(range(n))

        def __len__(self):
            return 6

    assert BatchSampler(Backwards(), 4, drop_last=False).batches() == [[5, 4, 3, 2], [1, 0]]
    assert BatchSampler(Plain(), 4, drop_last=True).batches() == [[0, 1, 2, 3]]
    numbers = CustomDataset(torch.arange(6.0), torch.arange(6))
    loader = DataLoader(numbers, batch_size=4, sampler=Backwards())
    assert next(iter(loader))[1].tolist() == [5, 4, 3, 2]

    class Double(Transform):
        def apply(self, image):
            return 2 * image

    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    image = torch.randn(3, 32, 32)  # any range
    chain = Compose(
        [RandomHorizontalFlip(0.5), RandomCrop(32, padding=4), Double(), Normalize(mean, std)]
    )
    assert isinstance(chain, Transform)
    assert chain.apply(image).shape == (3, 32, 32)
    as_numpy = image.numpy()
    flipped = RandomHorizontalFlip(1.0).apply(as_numpy)
    assert isinstance(flipped, np.ndarray)
    np.testing.assert_array_equal(flipped, as_numpy[:, :, ::-1])
    want = (as_numpy - np.array(mean)[:, None, None]) / np.array(std)[:, None, None]
    np.testing.assert_allclose(Normalize(mean, std).apply(as_numpy), want, rtol=1e-4, atol=1e-5)
    made = ToTensor()(np.full((4, 5, 3), 255, np.uint8))
    assert made.shape == (3, 4, 5)
    assert float(made.max()) == 1.0
    ours = Compose([RandomHorizontalFlip(0.5), Normalize(mean, std)])
    assert isinstance(ours, stoker.augment.Compose)
    assert ours.apply(torch.rand(3, 8, 8)).shape == (3, 8, 8)


def test_s2_the_rest_of_the_family():
    from stoker.basics import (
        CustomDataset,
        DataLoader,
        GradientAccumulator,
        ParallelDataLoader,
        PinnedMemoryAllocator,
        PipelinedDataLoader,
        PrefetchingDataLoader,
    )  # fmt: skip

    dataset = CustomDataset(torch.arange(10.0), torch.arange(10))
    assert len(list(ParallelDataLoader(dataset, 4, num_workers=2, prefetch_factor=2).iter())) == 3
    buffer = PinnedMemoryAllocator("cpu").alloc_pinned(8)
    assert buffer.dtype == torch.float32
    assert len(buffer) == 8
    ahead = PrefetchingDataLoader(dataloader=DataLoader(dataset, 4), prefetch_size=2)
    assert len(list(ahead)) == 3
    accumulator = GradientAccumulator(accumulation_steps=4)
    assert [accumulator.should_update() for _ in range(4)] == [False, False, False, True]
    pipeline = PipelinedDataLoader("cpu", num_streams=2)
    assert pipeline.load_batch_async(0, torch.ones(3)).shape == (3,)
    assert pipeline.synchronize(0).sum() == 3


# -- S3: augmentation on the GPU -------------------------------------------------------------------

PRESETS = {
    "best": (
        32, 4,
        "horizontal_flip_prob: 0.5\n      rotation_degrees: 15\n      brightness: 0.2\n      contrast: 0.2",
    ),
    "low_memory": (16, 2, "horizontal_flip_prob: 0.5"),
}  # fmt: skip


@pytest.mark.parametrize("preset", PRESETS)
def test_s3_the_presets_are_read(preset, tmp_path):
    batch, workers, ops = PRESETS[preset]
    config = write_yaml(
        tmp_path / "lmsa_gpu_aug.yaml",
        f"""
    data:
      batch_size: {batch}
      num_workers: {workers}
    training:
      use_gpu_augmentation: true
      use_amp: true
    gpu_augmentation:
      {ops}
""",
    )
    settings = resolve(load_config(config, ["recipe.name=segmentation"]))
    chosen = choose_recipe(settings)
    assert chosen.settings is not None
    assert chosen.settings.training.batch_size == batch


def test_s3_the_classes_and_the_swap_during_training():
    images = torch.rand(4, 3, 16, 16)
    masks = torch.zeros(4, 16, 16, dtype=torch.long)
    for aug in (
        stoker.GPUAugmentation(horizontal_flip_prob=0.5, rotation_degrees=15, brightness=0.2, contrast=0.2),
        stoker.MinimalGPUAugmentation(horizontal_flip_prob=0.5),
        stoker.StrongGPUAugmentation(),
    ):  # fmt: skip
        made, cut = aug(images, masks)
        assert made.shape == images.shape
        assert cut.dtype == torch.long
    flips = stoker.MinimalGPUAugmentation(horizontal_flip_prob=1.0)
    torch.testing.assert_close(flips(images, masks)[0], images.flip(-1))  # flips only


def test_s3_minimal_for_fifty_epochs_and_strong_from_then_on_is_a_key(tmp_path):
    from stoker.recipes.segmentation.recipe import SegmentationOptions, make_augmentation

    def drawn(augmentation) -> list[str]:
        return [type(op).__name__ for op in augmentation.ops]

    options = SegmentationOptions(augmentation="progressive")
    made = make_augmentation(options, [0.5] * 3, [0.2] * 3, seed=1)
    made.set_epoch(49)
    assert drawn(made) == ["RandomHorizontalFlip", "Normalize"]
    assert drawn(made.validation()) == ["Normalize"]
    made.set_epoch(50)
    assert {"RandomRotation", "GaussianBlur"} <= {
        name.replace("RandomGaussianBlur", "GaussianBlur") for name in drawn(made)
    }
    store = make_store("segmentation", tmp_path / "store")
    config = write_yaml(
        tmp_path / "lmsa_gpu_aug.yaml",
        """
    recipe:
      name: segmentation
      options:
        augmentation: progressive
        strong_from_epoch: 1
        widths: [8, 8, 8, 8]
        depths: [1, 1, 1, 1]
        heads: [1, 1, 1, 1]
        head_width: 8
    training:
      use_gpu_augmentation: true
""",
    )
    out = typed(
        "train", "--config", config, "--store", store.path, "--run-dir", tmp_path / "run",
        "--set", "training.epochs=2", "--device", "cpu",
    )  # fmt: skip
    assert "augmentation: minimal, from epoch 1 on strong" in out


def test_s3_the_targets_are_all_named():
    from stoker.cli.monitor import _targets_line  # shown where a GPU is read

    assert "busy 85 to 95 %, SM 80 to 95 %, memory 70 to 90 %, below 80 °C" in _targets_line()


# -- S4: the report on a slow GPU ------------------------------------------------------------------


def test_s4_the_yaml_trains_and_new_rows_are_answered(tmp_path):
    """Batch 512 x 2, workers, gain and bounds as in the report; then a prediction for new rows."""
    store = make_store("tabular", tmp_path / "store")
    config = write_yaml(
        tmp_path / "s4.yaml",
        """
    data:
      num_workers: 8
      persistent_workers: true
      pin_memory: true
      prefetch_factor: 4
    training:
      batch_size: 512
      gradient_accumulation_steps: 2
      init_gain: 0.5
      output_bound: 10
      lr: 1.0e-4
""",
    )
    typed(
        "train", "--config", config, "--store", store.path, "--run-dir", tmp_path / "run", *SMALL,
        "--set", "recipe.name=tabular", "--set", "recipe.options.hidden=[16]",
    )  # fmt: skip
    out = typed("predict", tmp_path / "run" / "best.pt", store.path, tmp_path / "out.csv")
    assert "200 rows of class, probability" in out
