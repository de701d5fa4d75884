"""A named pipe, a socket or a device where a file is expected: every verb refuses it, and none waits for it."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from stoker.cli.main import app
from stoker.errors import StokerError, refuse_special, require_file, special_kind
from stoker.runs.follow import RunFollower

pytestmark = pytest.mark.timeout(30)
WORDS = [
    ["pack", "arrays", "x.npy", "out"],
    ["pack", "arrays", "x.h5", "out"],
    ["pack", "arrays", "x.npz", "out"],
    ["pack", "table", "x.csv", "out"],
    ["pack", "table", "x.csv.gz", "out"],
    ["pack", "table", "x.parquet", "out"],
    ["pack", "images", "x.jpg", "out"],
    ["pack", "bars", "EURUSD_M1.csv", "out"],
    ["pack", "series", "x.npy", "out", "--window", "2"],
    ["pack", "series", "x.csv", "out", "--window", "2"],
    ["pack", "massspec", "--msp", "x.msp", "out"],
    ["pack", "massspec", "--msp", "x.mgf", "out"],
    ["pack", "massspec", "--msp", "x.mzML", "out"],
    ["inspect", "x.npy"],
    ["inspect", "x.csv"],
    ["inspect", "x.h5"],
    ["inspect", "x.msp"],
    ["verify", "x.h5"],
    ["plan", "x.h5"],
    ["train", "--config", "x.yaml"],
    ["train", "--config", "tabular", "--store", "x.h5"],
    ["tune", "--config", "x.yaml"],
    ["doctor", "--config", "x.yaml"],
    ["doctor", "compare", "x.json", "x.json"],
    ["config", "check", "x.yaml"],
    ["config", "show", "x.yaml"],
    ["config", "migrate", "x.yaml", "new.yaml"],
    ["predict", "x.pt", "store", "out.csv"],
    ["export", "x.pt", "out.onnx"],
    ["report", "run.jsonl"],
    ["augment", "preview", "x.png", "out.png"],
]


def name_in(words: list[str]) -> str:
    return next(word for word in words if word.startswith(("x.", "EURUSD", "run.")))


@pytest.mark.parametrize("words", WORDS, ids=" ".join)
def test_a_verb_names_the_pipe_that_it_was_given(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo(name_in(words))
    with pytest.raises(StokerError) as raised:
        app(words, standalone_mode=False)
    assert raised.value.exit_code == 2
    assert name_in(words) in str(raised.value)
    if words[0] not in ("pack", "report", "augment"):
        assert "is a named pipe" in str(raised.value)


@pytest.mark.parametrize("more", [[], ["--keep-encoded"]])
def test_a_pipe_among_pictures_is_a_picture_that_cannot_be_read(tmp_path, monkeypatch, more):
    monkeypatch.chdir(tmp_path)
    Path("cats/tom").mkdir(parents=True)
    os.mkfifo("cats/tom/a.jpg")
    with pytest.raises(StokerError, match=r"a\.jpg(.|\n)*a named pipe|a named pipe(.|\n)*a\.jpg"):
        app(["pack", "images", "cats", "out", "--jobs", "1", *more], standalone_mode=False)


def test_what_stands_in_a_files_place_is_told_apart(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("pipe")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(tmp_path / "s"))
        assert special_kind(tmp_path / "s") == "a socket"
    kinds = {name: special_kind(tmp_path / name) for name in ("pipe", "link", "file", ".", "none")}
    assert kinds == {"pipe": "a named pipe", "link": "a named pipe"} | dict.fromkeys(
        ("file", ".", "none")
    )
    with pytest.raises(StokerError, match="is a device"):
        require_file("/dev/null", "the series")


def test_what_is_read_once_may_come_from_a_shell(monkeypatch):
    """As `stoker config check <(make-config)` gives it: /dev/fd/N is a pipe whose writer is there."""
    read, write = os.pipe()
    try:
        refuse_special(f"/dev/fd/{read}", "config", is_read_once=True)
        with pytest.raises(StokerError, match="a named pipe"):
            refuse_special(f"/dev/fd/{read}", "the table")
    finally:
        os.close(read)
        os.close(write)


def test_a_pipe_in_the_place_of_a_run_log_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "run.jsonl")
    assert RunFollower(tmp_path).look() is not None
