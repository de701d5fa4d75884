"""Lines of which `make mutate` found that no test noticed their change."""

from __future__ import annotations

import io
import os
import pickle
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stoker.loader import device_data
from stoker.loader.loader import Loader
from stoker.store.fields import Dense
from stoker.train import ranks
from stoker.train.ranks import Ranks
from stoker.train.run_folder import RunLock
from stoker.train.trainer import Trainer
from store_makers import write_store


class Evil:
    def __reduce__(self):
        return (os.mkdir, ("evil",))


def test_nothing_that_another_rank_sends_is_run(tmp_path, monkeypatch):
    sent = io.BytesIO()
    torch.save({"metrics": Evil()}, sent)

    def gather(gathered, own):
        gathered[:] = [own, sent.getvalue()]

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ranks.distributed, "all_gather_object", gather)
    with pytest.raises(pickle.UnpicklingError):
        Ranks(0, 2, joined=True).gather({"metrics": 1.0})
    assert not (tmp_path / "evil").exists()


@given(st.lists(st.integers(1, 40_000), max_size=60), st.integers(1, 8))
def test_blocks_of_batches_are_whole_and_hold_no_more_samples_than_they_may(sizes, most):
    batches = [SimpleNamespace(chunks=(0,), positions=range(size)) for size in sizes]
    blocks = list(device_data._blocks(iter(batches), most))
    assert [batch for block in blocks for batch in block] == batches
    for block in blocks:
        held = sum(len(batch.positions) for batch in block)
        assert held <= device_data._BLOCK_SAMPLES or len(block) == 1


def test_a_process_two_forks_away_from_a_run_has_no_lock_to_close(tmp_path):
    with RunLock(tmp_path):
        child = os.fork()
        if child == 0:
            sys.unraisablehook = lambda found: os._exit(3)
            grandchild = os.fork()
            if grandchild == 0:
                os._exit(0)
            os._exit(os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1]))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_the_samples_of_a_bad_validation_batch_are_those_of_the_batch_that_was_bad(tmp_path):
    """With a shuffled validation loader, whose next epoch has another order."""
    values = np.random.default_rng(0).normal(size=(64, 3)).astype("f4")
    values[17] = np.nan
    write_store(tmp_path / "bad", [{"x": Dense(values)}]).close()
    write_store(tmp_path / "good", [{"x": Dense(np.nan_to_num(values))}]).close()
    model = torch.nn.Linear(3, 1)
    with (
        Loader(tmp_path / "good", 8, "cpu") as train,
        Loader(tmp_path / "bad", 8, "cpu", shuffle=True, seed=3) as validation,
    ):
        history = Trainer(
            model, train, validation, lambda output, target: (output - target).square().mean(),
            torch.optim.SGD(model.parameters(), 1e-3), None,
            {"epochs": 2, "precision": "fp32", "capture": "off"}, "cpu",
            unpack=lambda batch: (batch["x"], batch["x"][:, :1]),
        ).fit(quiet=True)  # fmt: skip
    told = [note for note in history.notes if "validation batch" in note]
    assert told
    assert all("17" in note.partition("Try:")[0] for note in told), told


def test_findings_that_are_not_listed_are_counted_and_numbers_stand_to_the_right(monkeypatch):
    from stoker.store import quality_page
    from stoker.store.quality import judge
    from stoker.store.table_stats import TableStats

    values = np.full((300, 3), np.nan, np.float32)
    stats = TableStats.scan(values, ["a", "b", "c"])
    findings = [*judge(stats)] * 5
    monkeypatch.setattr(quality_page, "MAX_FINDINGS_SHOWN", 2)
    text = quality_page.quality_page("s", {"features": stats}, findings, {})
    assert f"{len(findings) - 2} findings more, not listed." in text
    heads = ("rows", "columns", "values per column and row")
    assert [f'<th scope="col" class="number">{head}</th>' in text for head in heads] == [True] * 3


@pytest.mark.parametrize("lengths", [((7,), (9,)), ((7, 1), (7, 1))])
def test_arrays_that_do_not_belong_together_are_no_sparse_matrix(tmp_path, lengths):
    import h5py

    from stoker.store.plain import find_sparse

    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_group("m")
        data, indices = lengths
        arrays = {"m/data": (data, "<f4"), "m/indices": (indices, "<i4"), "m/indptr": ((5,), "<i8")}
        assert find_sparse(file, arrays) == []
        arrays |= {"m/data": ((7,), "<f4"), "m/indices": ((7,), "<i4")}
        assert [found.num_rows for found in find_sparse(file, arrays)] == [4]


@pytest.mark.timeout(60)
def test_chunks_are_loaded_when_they_are_asked_for_and_not_at_the_next_look(tmp_path, monkeypatch):
    from stoker.loader import ring

    monkeypatch.setattr(ring, "_POLL_SECONDS", 1000.0)
    write_store(tmp_path / "s", [{"x": Dense(np.arange(600, dtype="f4").reshape(300, 2))}]).close()
    for order in ("shuffled", "sequential"):
        with Loader(tmp_path / "s", 10, "cpu", order=order, chunk_bytes=400) as loader:
            for _ in range(3):
                assert sum(len(batch["x"]) for batch in loader) == 300


def test_a_folder_keeps_its_two_newest_checkpoints_unless_told_otherwise(tmp_path):
    from stoker.train.checkpoint import Checkpoints

    for step in range(1, 5):
        Checkpoints(tmp_path).save({"step": step}, step, 0)
    assert [saved.step for saved in Checkpoints(tmp_path).list()] == [3, 4]


def test_a_disk_that_does_not_answer_is_waited_for_before_hdf5_keeps_the_interpreter(
    tmp_path, monkeypatch
):
    from stoker.store import hdf5

    write_store(tmp_path / "s", [{"x": Dense(np.zeros((3, 2), "f4"))}]).close()
    (path,) = (tmp_path / "s").rglob("*.h5")
    order, read, opened = [], os.read, hdf5.h5py.File
    monkeypatch.setattr(os, "read", lambda *given: order.append("read") or read(*given))
    monkeypatch.setattr(
        hdf5.h5py, "File", lambda *given, **named: order.append("HDF5") or opened(*given, **named)
    )
    hdf5.open_hdf5(path).close()
    assert order == ["read", "HDF5"]
