"""numpy's files and samples as others have them: kept exactly, or refused with what to type."""

from __future__ import annotations

import shlex
import subprocess
import sys

import h5py
import numpy as np
import pytest
from typer.testing import CliRunner

from stoker import Loader
from stoker.cli.main import app
from stoker.errors import InputError, StokerError
from stoker.sources.samples import collect
from stoker.store.reader import open_store


@pytest.mark.parametrize(
    "other",
    [np.array(3), np.array(["a", "b", "c"]), np.array(["a", 1, None], dtype=object),
     np.zeros(3, [("a", "f4")]), np.ones(3, complex)],
    ids=["scalar", "text", "objects", "table", "complex"],
)  # fmt: skip
def test_an_archive_with_an_array_that_is_no_field_says_which_to_take(tmp_path, other):
    path, out = tmp_path / "x.npz", tmp_path / "out"
    np.savez(path, x=np.arange(3), y=np.arange(3.0), other=other)
    run = CliRunner().invoke
    failed = run(app, ["pack", "arrays", str(path), str(out), "-j1"])
    assert isinstance(failed.exception, StokerError)
    assert failed.exception.fix == "--fields x,y"
    done = run(app, ["pack", "arrays", str(path), str(out), "-j1", *failed.exception.fix.split()])
    assert done.exit_code == 0, done.output
    with open_store(out) as store:
        assert {name: info.dtype for name, info in store.fields.items()} == {"x": "<i8", "y": "<f8"}


@pytest.mark.parametrize(
    ("given", "name", "wanted"),
    [
        (np.array([(1.5, 2), (3.5, 4)], [("a", "f4"), ("b", "i4")]), "a", [1.5, 3.5]),
        (np.array(["1970-01-01", "1970-01-02"], "M8[D]"), "seconds", [0, 86400]),
        (np.array([1 + 2j, 3 + 4j]), "values", [[1, 2], [3, 4]]),
        (np.array(["dog", "cat"]), "labels", [1, 0]),
    ],
)
def test_the_command_that_makes_numbers_of_an_array_works_as_typed(tmp_path, given, name, wanted):
    np.save(tmp_path / "x.npy", given)
    run = CliRunner().invoke
    failed = run(app, ["pack", "arrays", str(tmp_path / "x.npy"), str(tmp_path / "out"), "-j1"])
    first, second = failed.exception.fix.split("; stoker ")
    subprocess.run([sys.executable, *shlex.split(first)[1:]], check=True)
    typed = shlex.split(second)
    assert run(app, [*typed[:-1], str(tmp_path / "out"), "-j1"]).exit_code == 0
    with open_store(tmp_path / "out") as store:
        assert store.gather(name, np.arange(2)).tolist() == wanted


def test_bytes_of_a_sample_are_kept_or_refused():
    assert collect([{"x": b"a\0"}])["x"].values.tobytes() == b"a\0"
    with pytest.raises(InputError, match="3 bytes that are no text") as error:
        collect([{"x": b"\xff\xd8\0"}])
    assert error.value.fix == "np.frombuffer(value, np.uint8)"


def test_values_that_are_arrays_are_rows_of_them(tmp_path):
    path = tmp_path / "x.h5"
    values = np.random.default_rng(0).random((7, 2, 3)).astype("f4")
    with h5py.File(path, "w") as file:
        file.create_dataset("x", (7,), np.dtype((">f4", (2, 3))))
        file["x"][...] = values
    for batch in Loader(path, 3, "cpu", shuffle=True):
        assert (batch["x"].numpy() == values[batch.sample_ids]).all()


def test_a_file_of_tokens_is_answered_with_the_way_to_pack_it(tmp_path):
    np.arange(500, dtype=np.uint16).tofile(tmp_path / "train.bin")
    with pytest.raises(StokerError, match="to be packed first") as error:
        Loader(tmp_path / "train.bin", 4)
    assert "stoker pack series" in error.value.fix


@pytest.mark.parametrize(
    ("name", "content", "what", "typed"),
    [
        ("a.jpg", b"\xff\xd8\xff\xe0", "a picture", "stoker pack images"),
        ("a.h5.gz", b"\x1f\x8b\x08", "compressed by gzip", "gzip --decompress --keep"),
        ("a.nc", b"CDF\x01", "netCDF of version 3", "nccopy -k nc4"),
        ("a.mat", b"MATLAB 5.0 MAT-file", "a MATLAB file of before 7.3", "scipy.io.loadmat"),
        ("a.pt", b"PK\x03\x04", "an archive or a pickle", "torch.load"),
        ("a.pkl", b"\x80\x04", "an archive or a pickle", "your own code"),
    ],
)
def test_a_file_of_another_kind_is_named_and_not_called_damaged(
    tmp_path, name, content, what, typed
):
    (tmp_path / name).write_bytes(content + bytes(600))
    with pytest.raises(StokerError, match=f"is {what}, no HDF5 file") as error:
        Loader(tmp_path / name, 4)
    assert typed in error.value.fix
