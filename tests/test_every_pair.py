"""Every loader, place of augmentation, loop, order and precision, captured and eager: the same numbers.

The reference is a plain loop over tensors in memory, in the order in which the loader deals its samples. What cannot be
paired is refused with what to type. `make test` trains enough cells that every two values of any two axes meet;
the full product is slow. On a CPU the graphs are made of paper (`paper_graphs.py`).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from importlib.util import find_spec

import h5py
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

import stoker
from pair_loops import CLIP, EPOCHS, autocast, loops, make_network, make_optimizer
from paper_graphs import Jitter, use_paper_graphs
from stoker.compat.chunk_loader import ChunkDataLoader
from stoker.loader.columns import column_facts, make_columns
from stoker.loader.loader import Loader
from stoker.loader.prefetch import prefetch
from stoker.plan import make_plan
from stoker.store.fields import Dense
from stoker.train.step import Step
from stoker.train.trainer import Trainer
from stoker.units import GIB
from store_makers import write_store
from training_makers import out_of_memory

pytestmark = [
    pytest.mark.usefixtures("one_thread", "own_cache"),
    # Of a CPU without bfloat16, once.
    pytest.mark.filterwarnings("ignore:mkldnn_matmul failed"),
]
SAMPLES, BATCH = 96, 16
SAMPLE_BYTES = 3 * 4 * 4 * 4 + 8


@functools.cache
def pixels():
    rng = np.random.default_rng(0)
    return rng.random((SAMPLES, 3, 4, 4), dtype=np.float32) * 255, rng.integers(0, 4, SAMPLES)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The same samples as a store of images and labels, and as an HDF5 file of features and targets."""
    folder = tmp_path_factory.mktemp("pairs")
    images, labels = pixels()
    write_store(folder / "store", [{"images": Dense(images), "labels": Dense(labels)}]).close()
    with h5py.File(folder / "chunks.h5", "w") as file:
        file["features"], file["targets"] = images, labels
    return folder


def brightened(image, number):
    """What a Dataset does to its own images: a function of the sample alone, so that workers cannot repeat it."""
    return image * (0.5 + 0.5 * (number % 3))


class Samples(Dataset):
    def __init__(self, augments):
        self.augments = augments

    def __len__(self):
        return SAMPLES

    def __getitem__(self, number):
        images, labels = pixels()
        image = torch.from_numpy(images[number])
        return brightened(image, number) if self.augments else image, int(labels[number])


LOADERS = (
    "resident", "chunked", "streamed", "ChunkDataLoader", "ChunkDataLoader in chunks", "DataLoader",
    "DataLoader with 2 workers", "prefetch", "list",
)  # fmt: skip
OWN = LOADERS[:3]
PLACES = ("none", "loader", "loop", "dataset")
LOOPS = ("Trainer", "by hand", "Lightning", "Accelerate", "Hugging Face")
ORDERS = ("sequential", "shuffled", "weighted")
AXES = (LOADERS, PLACES, LOOPS, ("captured", "eager"), ORDERS)
WEIGHTS = 1.0 + np.arange(SAMPLES) % 5


class Order(Sampler):
    """An order for torch's DataLoader; every iteration is the next epoch."""

    def __init__(self, order):
        self.order, self.epochs = order, itertools.count()

    def __len__(self):
        return SAMPLES

    def __iter__(self):
        rng = np.random.default_rng(next(self.epochs))
        if self.order == "weighted":
            return iter(rng.choice(SAMPLES, SAMPLES, p=WEIGHTS / WEIGHTS.sum()).tolist())
        return iter(
            range(SAMPLES) if self.order == "sequential" else rng.permutation(SAMPLES).tolist()
        )


def make_loader(kind, where, device, files, order="sequential"):
    augment = Jitter(device) if where == "loader" else None
    if kind in OWN:
        options = {"weights": WEIGHTS} if order == "weighted" else {"order": order}
        if kind == "chunked":
            options |= {"data_bytes": SAMPLE_BYTES * SAMPLES // 2}
        elif kind == "streamed" and device == "cuda":
            with stoker.open_store(files / "store") as store:
                options |= {"plan": plan_streamed(store)}
        return Loader(files / "store", BATCH, device, augment=augment, seed=4, **options)
    if kind in LOADERS[3:5]:
        size = SAMPLE_BYTES * SAMPLES / GIB
        size = size / 2 if "chunks" in kind else 2 * size
        shuffle = order == "shuffled"
        return ChunkDataLoader(files / "chunks.h5", BATCH, size, device, shuffle=shuffle, seed=4)
    workers = 2 if "workers" in kind else 0
    samples = Samples(where == "dataset")
    batches = DataLoader(samples, BATCH, sampler=Order(order), num_workers=workers)
    if kind == "prefetch":
        return prefetch(batches, device)
    return list(batches) if kind == "list" else batches


def plan_streamed(store):
    columns = make_columns(store, None, np.arange(SAMPLES))
    return make_plan(
        column_facts(store, columns, SAMPLES),
        gpu_memory_bytes=8 * GIB,
        ram_bytes=8 * GIB,
        batch_size=BATCH,
        streamed=True,
    )


@functools.cache
def dealt(kind, order, device, files):
    """Return the samples of every batch of every epoch, as the loader deals them."""
    if kind in LOADERS[:5]:
        with make_loader(kind, "none", device, files, order) as loader:
            own = getattr(loader, "stoker_loader", loader)
            return [batch.positions for _ in range(EPOCHS) for batch in own]
    sampler = Order(order)
    epochs = [list(sampler) for _ in range(EPOCHS)]
    epochs = [epochs[0]] * EPOCHS if kind == "list" else epochs
    return [
        np.array(one[start : start + BATCH]) for one in epochs for start in range(0, SAMPLES, BATCH)
    ]


@functools.cache
def reference(kind, where, order, precision, device, files):
    """Return the losses of a plain loop over tensors in memory."""
    images, labels = (torch.from_numpy(part).to(device) for part in pixels())
    if where == "dataset":
        images = torch.stack([brightened(image, number) for number, image in enumerate(images)])
    model, jitter, losses = make_network(device), Jitter(device), []
    optimizer = make_optimizer(model)
    for number, samples in enumerate(dealt(kind, order, device, files)):
        if number % (SAMPLES // BATCH) == 0:
            jitter.seek(number // (SAMPLES // BATCH))
        rows = torch.from_numpy(samples).to(device)
        batch = jitter(images[rows]) if where in ("loader", "loop") else images[rows]
        with autocast(device, precision):
            outputs = model(batch)
        loss = nn.functional.cross_entropy(outputs.float(), labels[rows])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def is_offered(kind, where, order):
    """Whether a loader has such a place of augmentation, and such an order."""
    if kind in OWN:
        return where != "dataset"  # a Loader has no Dataset
    if kind in LOADERS[3:5]:  # a documented signature, without augmentation and weights
        return where in ("none", "loop") and order != "weighted"
    return where != "loader"  # a DataLoader has no such option


def all_cells(precisions):
    return [
        (*cell, precision)
        for cell in itertools.product(*AXES)
        for precision in precisions
        if is_offered(cell[0], cell[1], cell[4])
    ]


def pairs_of(cell):
    return set(itertools.combinations(enumerate(cell), 2))


def choose_cells(cells):
    """Return cells in which every two values of any two axes meet that meet in any cell; greedily."""
    pairs = {cell: pairs_of(cell) for cell in cells}
    missing = set().union(*pairs.values())
    chosen = []
    while missing:
        chosen.append(max(cells, key=lambda cell: len(pairs[cell] & missing)))
        missing -= pairs[chosen[-1]]
    return chosen


CELLS = choose_cells(all_cells(("fp32", "bf16")))
GPU_CELLS = choose_cells(all_cells(("fp32", "bf16", "fp16")))
NEEDS = {"Lightning": "lightning", "Accelerate": "accelerate", "Hugging Face": "transformers"}


def train_cell(cell, device, files, folder):
    kind, where, loop, capture, order, precision = cell
    if loop in NEEDS and find_spec(NEEDS[loop]) is None:
        pytest.skip(f"{NEEDS[loop]} is not installed")
    loader = make_loader(kind, where, device, files, order)
    with contextlib.ExitStack() as stack:
        if hasattr(loader, "__exit__"):
            stack.enter_context(loader)
        losses, is_captured, reason = loops(folder)[loop](
            loader, device, where == "loop", capture == "captured", precision
        )
    expected = reference(kind, where, order, precision, device, files)
    rough = 1e-3 if precision == "fp32" else 2e-2
    assert losses == pytest.approx(expected, rel=rough, abs=rough / 100)
    if capture == "captured" and precision == "fp16" and loop in NEEDS:
        assert "bf16" in reason  # what to type
    else:
        assert is_captured == (capture == "captured"), reason


@pytest.mark.parametrize("cell", CELLS, ids="-".join)
def test_a_cell_gives_the_reference_losses(cell, files, tmp_path, monkeypatch):
    use_paper_graphs(monkeypatch)
    train_cell(cell, "cpu", files, tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("cell", GPU_CELLS, ids="-".join)
def test_a_cell_on_a_gpu_gives_the_reference_losses(cell, files, tmp_path):
    train_cell(cell, "cuda", files, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "loop"), [*itertools.product(LOADERS, LOOPS)])
def test_every_other_cell_too(kind, loop, files, tmp_path, monkeypatch):
    use_paper_graphs(monkeypatch)
    for cell in all_cells(("fp32", "bf16")):
        if (cell[0], cell[2]) == (kind, loop):
            train_cell(cell, "cpu", files, tmp_path)


def test_every_two_values_meet():
    """A new loader, place, loop or order needs its cells; those that no loader offers are named here."""
    met = set().union(*map(pairs_of, CELLS))
    axes = (*AXES, ("fp32", "bf16"))
    wanted = {
        ((i, one), (j, other))
        for (i, left), (j, right) in itertools.combinations(enumerate(axes), 2)
        for one, other in itertools.product(left, right)
    }
    assert {(one, other) for (_, one), (_, other) in wanted - met} == {
        *((kind, "dataset") for kind in OWN),
        *((kind, where) for kind in LOADERS[3:5] for where in ("loader", "dataset")),
        *((kind, "loader") for kind in LOADERS[5:]),
        *((kind, "weighted") for kind in LOADERS[3:5]),
    }


# -- ChunkDataLoader: what holds for a Loader holds for it -------------------------------------------


def train_chunks(files, device, run_dir=None, size=0.5, resume=False, unpack=None, **options):
    model = make_network(device)
    bytes_in_all = SAMPLE_BYTES * SAMPLES / GIB
    loader = ChunkDataLoader(
        files / "chunks.h5", BATCH, size * bytes_in_all, device, shuffle=True, seed=4
    )
    trainer = Trainer(
        model,
        loader,
        ChunkDataLoader(files / "chunks.h5", BATCH, 2 * bytes_in_all, device),
        nn.functional.cross_entropy,
        torch.optim.AdamW(model.parameters(), lr=0.01),
        None,
        {"epochs": EPOCHS, "precision": "fp32", **options},
        device,
        run_dir=run_dir,
        unpack=unpack,
    )
    return trainer, loader, trainer.fit(resume=resume, quiet=True)


def test_a_chunk_loader_is_resumed_within_an_epoch(files, device, tmp_path):
    whole, _, expected = train_chunks(files, device)
    options = {"run_dir": tmp_path / "run"}
    _, loader, begun = train_chunks(files, device, max_steps=9, **options)
    assert loader.state_dict()["batch"] == 3
    digest = loader.order_digest()
    _, loader, rest = train_chunks(files, device, resume=True, **options)
    assert begun.losses + rest.losses == pytest.approx(expected.losses, rel=1e-3)
    assert loader.order_digest() != digest
    assert loader.order_digest() == whole._train.loader.order_digest()
    assert whole._captured.active
    assert rest.epochs[-1].metrics == pytest.approx(expected.epochs[-1].metrics, rel=1e-3)


def test_a_chunk_loader_gives_chunks_back_when_memory_runs_out(files, device, monkeypatch):
    _, _, expected = train_chunks(files, device, capture="off")
    original, calls = Step.forward_backward, []

    def short(self, *given, **named):
        calls.append(1)
        if len(calls) == 8:
            raise out_of_memory()
        return original(self, *given, **named)

    monkeypatch.setattr(Step, "forward_backward", short)
    trainer, loader, history = train_chunks(files, device, capture="off")
    assert trainer._update.level.chunk_share == 0.6
    assert not trainer._update.is_lowered
    assert any("of chunks given back" in note for note in history.notes)
    assert history.losses == pytest.approx(expected.losses, rel=1e-3)
    assert loader.device_bytes < SAMPLE_BYTES * SAMPLES / 2


def test_a_chunk_loader_hands_pairs_to_unpack(files, device):
    def unpack(pair):
        features, targets = pair
        return features * 1.0, targets

    _, _, history = train_chunks(files, device, unpack=unpack)
    assert history.losses == pytest.approx(train_chunks(files, device)[2].losses, rel=1e-3)


def test_the_plan_of_a_chunk_loader_is_that_of_its_loader(files, device):
    trainer, loader, _ = train_chunks(files, device)
    assert trainer._train.loader is loader.stoker_loader
    assert trainer._train.loader.plan.tier == trainer._train.loader.tier == "chunked"
    assert loader.reason == trainer._train.loader.reason


# -- NISTDataLoader ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def spectra(tmp_path_factory):
    pytest.importorskip("rdkit")
    from molecule_makers import SMILES, write_library
    from stoker.compat.massspec import LazyMassSpecDataset

    folder = tmp_path_factory.mktemp("spectra")
    msp, mols = write_library(folder, SMILES[:24])
    return LazyMassSpecDataset(msp, mols, cache_dir=folder / "cache", jobs=1)


def unpack_spectra(batch):
    return batch["spectrum"], batch["mol_weight"].reshape(-1, 1) / 100


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("capture", ["auto", "off"])
def test_mass_spectra_train_alike_by_trainer_and_by_hand(spectra, device, capture, workers):
    from stoker.compat.massspec import NISTDataLoader

    def begin():
        torch.manual_seed(0)
        model = nn.Linear(501, 1).to(device)
        loader, *_ = NISTDataLoader.create_dataloaders(spectra, 4, workers, 0.9, 0.05)
        return model, torch.optim.SGD(model.parameters(), lr=0.01), loader

    model, optimizer, loader = begin()
    config = {"epochs": 4, "precision": "fp32", "capture": capture, "clip_norm": None}
    trainer = Trainer(
        model,
        loader,
        None,
        nn.functional.mse_loss,
        optimizer,
        None,
        config,
        device,
        unpack=unpack_spectra,
    )
    history = trainer.fit(quiet=True)
    model, optimizer, loader = begin()
    losses = []
    for _ in range(4):
        for batch in loader:
            inputs, targets = (part.to(device) for part in unpack_spectra(batch))
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
    assert history.losses == pytest.approx(losses, rel=1e-3)
    assert capture == "off" or trainer._captured.active, trainer._captured.reason
