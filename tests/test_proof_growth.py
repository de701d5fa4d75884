"""What a run keeps in memory as it goes on: 8 bytes per step and a report per epoch, found by the soak."""

from __future__ import annotations

import gc
import tracemalloc
import weakref

import pytest
import torch
from torch import nn

from stoker.loader.loader import Loader
from stoker.report import Silent
from stoker.train.trainer import Trainer
from training_makers import make_model, write_rows

EPOCHS, FIRST, LAST = 6, 2, 5


class Weighed(Silent):
    """Takes the bytes that stoker's modules hold on Python's heap when an epoch begins."""

    def __init__(self) -> None:
        self.heap_bytes: list[int] = []

    def start(self, label: str, total: int | None, unit: str) -> None:
        gc.collect()
        own = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, "*/stoker/*")])
        self.heap_bytes.append(sum(trace.size for trace in own.traces))


def grown_per_epoch(train, held, folder) -> float:
    """Return by how many bytes a run grows in an epoch; the first ones fill caches."""
    model, weighed = make_model(), Weighed()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    config = {"epochs": EPOCHS, "precision": "fp32", "checkpoint_every_steps": 100}
    trainer = Trainer(
        model, train, held, nn.functional.mse_loss, optimizer, None, config, "cpu", run_dir=folder, progress=weighed
    )  # fmt: skip
    tracemalloc.start()
    try:
        trainer.fit()
    finally:
        tracemalloc.stop()
    assert len(weighed.heap_bytes) == EPOCHS
    return (weighed.heap_bytes[LAST] - weighed.heap_bytes[FIRST]) / (LAST - FIRST)


def test_a_step_keeps_one_number_of_eight_bytes(tmp_path):
    batches = [(torch.randn(2, 6), torch.randn(2, 1)) for _ in range(100)]
    grown = grown_per_epoch(batches, None, tmp_path / "run")
    assert 100 * 8 <= grown < 100 * 12 + 1000  # a list of floats takes 100 × 32


@pytest.mark.parametrize("chunked", [False, True])
def test_an_epoch_of_a_loader_with_validation_keeps_its_report_alone(tmp_path, chunked):
    path = write_rows(tmp_path)
    options = {"data_bytes": 4096} if chunked else {}
    with (
        Loader(path, 20, "cpu", order="shuffled", **options) as train,
        Loader(path, 20, "cpu", **options) as held,
    ):
        assert grown_per_epoch(train, held, tmp_path / "run") < 1500


def test_a_run_that_is_over_leaves_memory_without_the_garbage_collector(tmp_path):
    """Hundreds of short runs in one process would keep their models, on the GPU too, until a full collection."""
    path = write_rows(tmp_path)
    gc.collect()
    gc.disable()
    try:
        with Loader(path, 20, "cpu") as train, Loader(path, 20, "cpu") as held:
            model = make_model()
            optimizer = torch.optim.AdamW(model.parameters(), 0.01)
            trainer = Trainer(
                model, train, held, nn.functional.mse_loss, optimizer, None, {"epochs": 1}, "cpu",
                run_dir=tmp_path / "run",
            )  # fmt: skip
            trainer.fit(quiet=True)
        gone = [weakref.ref(one) for one in (trainer, model, optimizer, train, held)]
        del trainer, model, optimizer, train, held
        assert [one() for one in gone] == [None] * 5
    finally:
        gc.enable()


def test_loaders_leave_nothing_that_only_the_garbage_collector_finds(tmp_path):
    """Each looked torch up and started NVML, whose libraries leave 32 objects in cycles: 4 KiB a run in a soak."""
    path = write_rows(tmp_path)

    def read() -> None:
        for options in ({}, {"data_bytes": 4096}):
            with Loader(path, 20, "cpu", order="shuffled", **options) as loader:
                for _ in loader:
                    pass

    read()
    gc.collect()
    gc.disable()
    try:
        read()
        assert gc.collect() == 0
    finally:
        gc.enable()
