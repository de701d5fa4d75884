"""A run that is resumed over other data than it was begun with: refused, or noted, by what a checkpoint keeps of it."""

from __future__ import annotations

import os
import shutil

import h5py
import numpy as np
import pytest

from stoker.errors import InputError
from stoker.loader.loader import Loader
from stoker.store.fields import Dense
from stoker.store.identity import identify
from stoker.store.reader import open_store
from store_makers import write_store
from training_makers import make_trainer, write_rows


def write_plain(path, rows=5000, width=64):
    with h5py.File(path, "w") as file:
        file["x"] = np.arange(rows * width, dtype="f4").reshape(rows, width)
    return path


def state_of(path):
    with Loader(path, 20, "cpu") as loader:
        next(iter(loader))
        return loader.state_dict()


def resumed(path, state):
    with Loader(path, 20, "cpu") as loader:
        return loader.load_state_dict(state)


def change(path, at, keep_times=True):
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))
    if keep_times:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("share", [0.05, 0.5, 0.99])
def test_one_bit_of_a_small_plain_file_is_noticed_although_size_and_time_are_the_same(
    tmp_path, share
):
    path = write_plain(tmp_path / "x.h5", rows=2000)
    assert path.stat().st_size < 1 << 20
    state = state_of(path)
    assert resumed(path, state) is None
    change(path, int(share * path.stat().st_size))
    with pytest.raises(InputError, match=r"x\.h5 holds other data than when the state was saved"):
        resumed(path, state)


def test_a_change_between_the_blocks_of_a_large_file_is_noted_by_its_time(tmp_path):
    path = write_plain(tmp_path / "x.h5", rows=20_000)
    state = state_of(path)
    change(path, 150_000, keep_times=False)  # the second block begins at 340 kB
    assert "was written to or copied since" in resumed(path, state)
    change(path, path.stat().st_size - 10, keep_times=False)
    with pytest.raises(InputError, match="other data"):
        resumed(path, state)


def test_a_copy_goes_on_with_a_note_and_a_copy_with_its_times_without(tmp_path):
    path = write_plain(tmp_path / "x.h5")
    state = state_of(path)
    assert resumed(shutil.copy2(path, tmp_path / "same.h5"), state) is None
    shutil.copyfile(path, tmp_path / "copy.h5")
    os.utime(tmp_path / "copy.h5", ns=(1, 1))
    assert "copied since" in resumed(tmp_path / "copy.h5", state)


def test_a_packed_store_is_known_by_its_checksums(tmp_path):
    rows = np.arange(400, dtype="f4")
    for name, values in (("a", rows), ("b", rows), ("c", rows[::-1].copy())):
        write_store(tmp_path / name, [{"x": Dense(values)}]).close()
    state = state_of(tmp_path / "a")
    assert resumed(tmp_path / "b", state) is None
    with pytest.raises(InputError, match="other data"):
        resumed(tmp_path / "c", state)


def test_states_of_older_versions_and_arrays_in_memory_have_no_identity(tmp_path):
    path = write_plain(tmp_path / "x.h5")
    state = state_of(path)
    state.pop("data")
    assert resumed(path, state) is None
    in_memory = {"x": np.arange(60, dtype="f4")}
    assert "data" not in state_of(in_memory)
    with open_store(path) as store:
        path.unlink()
        assert identify(store) is None


def test_a_trainer_refuses_to_resume_over_a_changed_file(tmp_path):
    path = write_rows(tmp_path)
    make_trainer(path, epochs=1, run_dir=tmp_path / "run").fit(quiet=True)
    change(path, path.stat().st_size - 100)
    with pytest.raises(InputError, match=r"rows\.h5 holds other data"):
        make_trainer(path, epochs=2, run_dir=tmp_path / "run").fit(resume=True, quiet=True)
