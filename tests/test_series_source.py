"""`pack series`: windows of any numbers, each row stored once; a small GPT trains from them and resumes exactly."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import csv, parquet
from torch import nn

from kept_commands import invoke
from stoker import Loader, PackOptions, pack
from stoker.errors import InputError, SourceError
from stoker.sources.series import SeriesSource
from stoker.store.reader import open_store

ONE = PackOptions(jobs=1)


def windows_of(values, window, stride):
    starts = range(0, len(values) - window + 1, stride)
    return np.stack([values[start : start + window] for start in starts])


@given(
    length=st.integers(1, 90),
    window=st.integers(1, 20),
    stride=st.integers(1, 25),
    part_rows=st.integers(1, 30),
    two=st.booleans(),
)
def test_every_window_comes_once_whatever_the_parts(
    tmp_path_factory, length, window, stride, part_rows, two
):
    folder = tmp_path_factory.mktemp("s")
    shape = (length, 2) if two else (length,)
    values = np.arange(np.prod(shape), dtype=np.uint16).reshape(shape)
    np.save(folder / "x.npy", values)
    source = SeriesSource((folder / "x.npy",), window, stride, part_bytes=2 * part_rows)
    if length < window:
        with pytest.raises(SourceError, match="fewer than a window"):
            source.prepare(folder)
        return
    pack(source, folder / "out", ONE)
    with open_store(folder / "out") as store:
        made = [store.read_window("series", number) for number in range(store.num_samples)]
        assert store.fields["series"].dtype == "<u2"
        assert set(store.manifest.shards[0].rows) == {"series/rows", "series/ends"}
    np.testing.assert_array_equal(np.stack(made), windows_of(values, window, stride))


def test_the_loader_gives_windows_and_no_gap(tmp_path):
    tokens = np.random.default_rng(0).integers(0, 65_536, 1000).astype(np.uint16)
    tokens.tofile(tmp_path / "x.bin")
    source = SeriesSource((tmp_path / "x.bin",), 9, 8, "uint16", name="tokens")
    pack(source, tmp_path / "out", ONE)
    with Loader(tmp_path / "out", 16) as loader:
        got = torch.cat([batch["tokens"] for batch in loader]).numpy()
        assert sorted(next(iter(loader))) == ["tokens"]
    np.testing.assert_array_equal(got.astype(np.uint16), windows_of(tokens, 9, 8))


@pytest.mark.parametrize("kind", ["csv", "parquet", "npz", "h5", "bytes"])
def test_all_kinds_of_files_give_the_same_windows(tmp_path, kind):
    values = np.arange(50, dtype=np.uint8)
    path = tmp_path / f"x.{kind}"
    options = {}
    if kind == "csv":
        path.write_text("a,b\n" + "\n".join(f"{value},{value / 2}" for value in values))
        options = {"columns": ("a",)}
    elif kind == "parquet":
        parquet.write_table(pa.table({"a": values, "b": values / 2}), path)
        options = {"columns": ("a",)}
    elif kind == "npz":
        np.savez(path, a=values, b=np.zeros(3))
        options = {"columns": ("a",)}
    elif kind == "h5":
        h5py = pytest.importorskip("h5py")
        with h5py.File(path, "w") as file:
            file["a"] = values
    else:
        path.write_bytes(values.tobytes())
        options = {"dtype": "uint8"}
    pack(SeriesSource((path,), 10, 5, **options), tmp_path / "out", ONE)
    with open_store(tmp_path / "out") as store:
        made = np.stack([store.read_window("series", n) for n in range(store.num_samples)])
        assert made.dtype == (np.float32 if kind == "csv" else np.uint8)
    np.testing.assert_array_equal(made, windows_of(values, 10, 5))


def test_times_are_stored_where_they_are_asked_for(tmp_path):
    lines = [f"2020-01-0{1 + n // 24 + (n >= 30)} {n % 24:02d}:00,{n}" for n in range(60)]
    (tmp_path / "x.csv").write_text("\n".join(["when,value", *lines]))
    source = SeriesSource((tmp_path / "x.csv",), 8, 1, columns=("value",), time_column="when")
    pack(source, tmp_path / "out", ONE)
    with open_store(tmp_path / "out") as store:
        assert store.fields["series"].duration_ns == 3600 * 10**9
        gap = store.read_series("series", "gap")
        assert np.flatnonzero(gap).tolist() == [30]
        assert store.fields["series"].columns == ["value"]


def test_windows_over_a_boundary_are_purged_and_rows_balance(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(103, dtype=np.float32))
    words = ("pack", "series", tmp_path / "x.npy", tmp_path / "out", "--window", 10, "--stride", 5)
    done = invoke(*words, "--split", "0.5,0.3,0.2")
    assert done.exit_code == 0, done.output
    assert "103 rows found = 100 packed + 0 refused + 3 ignored" in done.output
    with open_store(tmp_path / "out") as store:
        split = store.read_rows("split", 0, store.num_samples)
    begins = np.arange(0, 94, 5)
    for begin, number in zip(begins.tolist(), split.tolist(), strict=True):
        inside = [
            low <= begin and begin + 10 <= high for low, high in ((0, 52), (52, 82), (82, 103))
        ]
        assert number == (inside.index(True) if any(inside) else 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "1 row or more"),
        ({"stride": 0}, "1 row or more"),
        ({"dtype": "uint12"}, "uint16"),
        ({"split": (0.5, 0.5)}, "add up to 1"),
    ],
)
def test_options_that_cannot_be_are_refused(tmp_path, options, message):
    with pytest.raises(InputError, match=message):
        SeriesSource((tmp_path / "x.npy",), **{"window": 4, **options})


@pytest.mark.parametrize(
    ("name", "content", "options", "message"),
    [
        ("x.txt", b"hello", {}, "--dtype uint8"),
        ("x.bin", "добро".encode(), {}, "--dtype uint8"),
        (
            "x.bin",
            np.arange(9, dtype="<u2").tobytes(),
            {},
            "--dtype uint16",
        ),  # as nanoGPT has tokens
        ("x.bin", b"hello", {"dtype": "uint16"}, "no whole uint16"),
        ("x.bin", b"", {"dtype": "uint8"}, "no whole uint8"),
        ("x.csv", b"a,b\n1,2\n3,4\n", {"columns": ("q",)}, "no column 'q'"),
        ("x.csv", b"a,b\n1,u\n3,v\n", {}, "column 'b' holds 'u'"),
        ("x.csv", b"a,b\n1,2\n3\n5,6\n7,8\n", {}, "1 cells instead of 2"),
        ("x.csv", b"a,b\n1,2\n3,4\n", {"time_column": "b", "columns": ("a",)}, "dates"),
    ],
)
def test_files_that_cannot_be_read_say_what_to_type(tmp_path, name, content, options, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SourceError) as caught:
        SeriesSource((tmp_path / name,), 2, **options).prepare(tmp_path)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "dtype"), [("x.csv", "uint8"), ("x.csv", "int16"), ("x.txt", "int16")]
)
def test_the_letters_of_numbers_are_no_numbers(tmp_path, name, dtype):
    """--dtype, typed to choose the type of a table's numbers, made windows of its letters."""
    (tmp_path / name).write_text("".join(f"{n}.5\n" for n in range(10, 50)))
    source = SeriesSource((tmp_path / name,), window=4, dtype=dtype)
    with pytest.raises(SourceError, match="its bytes are letters") as refused:
        pack(source, tmp_path / "store", ONE)
    assert refused.value.fix == "leave --dtype out"
    with open_store(pack(replace(source, dtype=None), tmp_path / "store", ONE).path) as store:
        assert store.num_samples == 10


def test_inspect_shows_the_windows(tmp_path):
    (tmp_path / "x.txt").write_bytes(bytes(range(97, 123)) * 5)
    words = ("inspect", tmp_path / "x.txt", "--window", 13, "--dtype", "uint8")
    page = tmp_path / "p.html"
    facts = json.loads(invoke(*words, "--json", "--html", page).stdout)["facts"]
    assert facts["windows"] == "series 13 rows"
    assert "97 98 99 100" in page.read_text()


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.token, self.place = nn.Embedding(32, 16), nn.Parameter(torch.zeros(12, 16))
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.head = nn.Linear(16, 32)
        self.mask = torch.ones(12, 12).triu(1).bool()

    def forward(self, tokens):
        seen = self.token(tokens) + self.place
        return self.head(seen + self.attention(seen, seen, seen, attn_mask=self.mask)[0])


def train(loader, model, optimizer, losses, stop=None):
    for batch in loader:
        tokens = batch["tokens"].long()
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if len(losses) == stop:
            return loader.state_dict()
    return loader.state_dict()


def test_a_small_gpt_trains_from_windows_and_resumes_exactly(tmp_path):
    text = np.tile(np.arange(24, dtype=np.uint8), 60)
    text.tofile(tmp_path / "x.bin")
    source = SeriesSource((tmp_path / "x.bin",), 13, 5, "uint8", name="tokens")
    pack(source, tmp_path / "out", ONE)
    whole: list[float] = []
    with Loader(tmp_path / "out", 16, order="shuffled", seed=3) as loader:
        model = Gpt()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        for _ in range(2):
            train(loader, model, optimizer, whole)
    assert whole[-1] < 0.5 * whole[0]
    stop, parted = len(whole) // 2 - 3, []
    with Loader(tmp_path / "out", 16, order="shuffled", seed=3) as loader:
        model = Gpt()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        state = train(loader, model, optimizer, parted, stop)
        saved = (state, model.state_dict(), optimizer.state_dict())
    with Loader(tmp_path / "out", 16, order="shuffled", seed=3) as loader:
        other = Gpt()
        other.load_state_dict(saved[1])
        again = torch.optim.AdamW(other.parameters(), 1e-2)
        again.load_state_dict(saved[2])
        loader.load_state_dict(saved[0])
        while len(parted) < len(whole):
            train(loader, other, again, parted)
    assert parted == whole


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_column_of_times_is_named_as_such_and_its_order_is_kept(tmp_path, kind):
    """Left out by --columns, rows in no order became windows without a word; typed times were a fault of ours."""
    order = np.random.default_rng(0).permutation(60)
    when = np.datetime64("2021-01-01", "s") + 3600 * order
    table = pa.table({"when": pa.array(when, pa.timestamp("s")), "load": order.astype(float)})
    path = tmp_path / f"x.{kind}"
    csv.write_csv(table, path) if kind == "csv" else parquet.write_table(table, path)
    source = SeriesSource((path,), 8, 8)
    with pytest.raises(SourceError, match="column 'when' holds") as told:
        pack(source, tmp_path / "store", PackOptions(jobs=1))
    assert told.value.fix == "--time-column when"
    source = replace(source, time_column="when")
    with pytest.raises(SourceError, match="time goes from") as told:
        pack(source, tmp_path / "store", PackOptions(jobs=1))
    subprocess.run([sys.executable, *shlex.split(told.value.fix)[1:]], check=True)
    source = replace(source, paths=(tmp_path / "x-sorted.parquet",))
    with open_store(pack(source, tmp_path / "store", PackOptions(jobs=1)).path) as store:
        assert store.read_window("series", 0)[:, 0].tolist() == list(range(8))
