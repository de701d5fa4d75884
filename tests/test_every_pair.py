"""Every loader with every place of augmentation, in both loops, captured and eager: the same numbers.

The reference is a plain loop over tensors in memory. All loaders go over the same 96 images in order, so that every
cell must give the reference's losses. What cannot be paired is refused with what to type. On a CPU the graphs are made
of paper (`paper_graphs.py`).
"""

from __future__ import annotations

import contextlib
import functools
import itertools

import h5py
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import stoker
from paper_graphs import Jitter, use_paper_graphs
from stoker.compat.chunk_loader import ChunkDataLoader
from stoker.errors import InputError
from stoker.loader.columns import column_facts, make_columns
from stoker.loader.loader import Loader
from stoker.loader.prefetch import prefetch
from stoker.plan import make_plan
from stoker.store.fields import Dense
from stoker.train.step import Step
from stoker.train.trainer import Trainer
from stoker.units import GIB
from store_makers import write_store
from training_makers import DEVICES, out_of_memory

SAMPLES, BATCH, EPOCHS = 96, 16, 2
SAMPLE_BYTES = 3 * 4 * 4 * 4 + 8


@pytest.fixture(autouse=True)
def forgetful(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(params=DEVICES)
def device(request, monkeypatch):
    if request.param == "cpu":
        use_paper_graphs(monkeypatch)
    return request.param


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


def make_network(device):
    torch.manual_seed(0)
    return nn.Sequential(Scale(), nn.Flatten(), nn.Linear(48, 16), nn.Tanh(), nn.Linear(16, 4)).to(
        device
    )


class Scale(nn.Module):
    def forward(self, images):
        return images.float() / 64


@functools.cache
def reference(where, device):
    """Return the losses of a plain loop over tensors in memory."""
    images, labels = (torch.from_numpy(part).to(device) for part in pixels())
    if where == "dataset":
        images = torch.stack([brightened(image, number) for number, image in enumerate(images)])
    model, jitter, losses = make_network(device), Jitter(device), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(EPOCHS):
        jitter.seek(epoch)
        for start in range(0, SAMPLES, BATCH):
            batch = images[start : start + BATCH]
            batch = jitter(batch) if where in ("loader", "trainer") else batch
            loss = nn.functional.cross_entropy(model(batch), labels[start : start + BATCH])
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
    return losses


LOADERS = (
    "resident", "chunked", "streamed", "ChunkDataLoader", "ChunkDataLoader in chunks", "DataLoader",
    "DataLoader with 2 workers", "prefetch", "list",
)  # fmt: skip
PLACES = ("none", "loader", "trainer", "dataset")
OWN = LOADERS[:3]


def make_loader(kind, where, device, files):
    augment = Jitter(device) if where == "loader" else None
    if kind in OWN:
        options = {}
        if kind == "chunked":
            options = {"data_bytes": SAMPLE_BYTES * SAMPLES // 2}
        elif kind == "streamed" and device == "cuda":
            with stoker.open_store(files / "store") as store:
                options = {"plan": plan_streamed(store)}
        return Loader(files / "store", BATCH, device, augment=augment, **options)
    if kind.startswith("ChunkDataLoader"):
        size = SAMPLE_BYTES * SAMPLES / GIB
        return ChunkDataLoader(
            files / "chunks.h5", BATCH, size / 2 if "chunks" in kind else 2 * size, device
        )
    samples = Samples(where == "dataset")
    workers = 2 if "workers" in kind else 0
    batches = DataLoader(samples, BATCH, num_workers=workers)
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


CELLS = [
    (kind, where)
    for kind, where in itertools.product(LOADERS, PLACES)
    if (kind in OWN and where != "dataset")
    or (kind.startswith("ChunkDataLoader") and where == "none")
    or (kind not in OWN and not kind.startswith("Chunk") and where != "loader")
]


@pytest.mark.parametrize("capture", ["auto", "off"])
@pytest.mark.parametrize(("kind", "where"), CELLS)
def test_the_trainer_gives_the_reference_losses(kind, where, capture, device, files):
    model = make_network(device)
    loader = make_loader(kind, where, device, files)
    with contextlib.ExitStack() as stack:
        if hasattr(loader, "__exit__"):
            stack.enter_context(loader)
        trainer = Trainer(
            model,
            loader,
            None,
            nn.functional.cross_entropy,
            torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
            None,
            {"epochs": EPOCHS, "precision": "fp32", "capture": capture},
            device,
            Jitter(device) if where == "trainer" else None,
        )
        history = trainer.fit(quiet=True)
        assert history.losses == pytest.approx(reference(where, device), rel=1e-3, abs=1e-5)
        if capture == "auto":
            assert trainer._captured.active, trainer._captured.reason
        else:
            assert history.fallback is None


@pytest.mark.parametrize("capture", ["auto", "off"])
@pytest.mark.parametrize(("kind", "where"), CELLS)
def test_a_loop_by_hand_gives_the_reference_losses(kind, where, capture, device, files):
    model, jitter = make_network(device), Jitter(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def train(batch):
        images, labels = batch
        images = jitter(images) if where == "trainer" else images
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step, losses = train, []
    if capture == "auto":
        step = stoker.capture(train, model=model, optimizer=optimizer)
    loader = make_loader(kind, where, device, files)
    with contextlib.ExitStack() as stack:
        if hasattr(loader, "__exit__"):
            stack.enter_context(loader)
        for epoch in range(EPOCHS):
            jitter.seek(epoch)
            for batch in loader:
                pair = (batch["images"], batch["labels"]) if isinstance(batch, dict) else batch
                losses.append(step(tuple(part.to(device) for part in pair)))
    found = [float(loss) for loss in losses]
    assert found == pytest.approx(reference(where, device), rel=1e-3, abs=1e-5)
    assert capture == "off" or step.is_captured, step.reason


def test_every_cell_is_trained_or_named_here():
    """A new loader or place needs its cells."""
    refused = set(itertools.product(LOADERS, PLACES)) - set(CELLS)
    assert (
        refused
        == {
            *((kind, "dataset") for kind in OWN),  # a Loader has no Dataset
            *((kind, where) for kind in LOADERS[3:5] for where in PLACES[1:]),
            *((kind, "loader") for kind in LOADERS[5:]),  # a DataLoader has no such option
        }
    )


@pytest.mark.parametrize("kind", LOADERS[3:5])
def test_features_without_images_are_not_augmented(kind, device, files):
    model = make_network(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = make_loader(kind, "none", device, files)
    with loader, pytest.raises(InputError, match="the loader has no images") as error:
        Trainer(
            model,
            loader,
            None,
            nn.functional.cross_entropy,
            optimizer,
            None,
            None,
            device,
            Jitter(device),
        )
    assert "stoker pack images" in error.value.fix


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
