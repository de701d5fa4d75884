"""Samples as strangers have them: tables in memory, lists that may be empty, samples that are missing or differ."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from stoker import Loader, open_store, pack_from
from stoker.errors import InputError
from stoker.loader import arguments
from stoker.packing import PackOptions
from stoker.sources.samples import collect


class Labelled:
    """As a sorted column of pandas: `column[3]` is the value with the label 3, wherever it stands."""

    def __init__(self, values: np.ndarray, labels: list[int]) -> None:
        self._values, self._labels = values, labels
        self.dtype = values.dtype

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, label: int) -> Any:
        return self._values[self._labels.index(label)]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self._values

    def to_numpy(self) -> np.ndarray:
        return self._values


def frame(**columns: Any) -> Any:
    """As a table of pandas that was sorted."""
    made = {name: Labelled(np.asarray(values), [2, 0, 1]) for name, values in columns.items()}

    class Frame(SimpleNamespace):
        def __getitem__(self, name: str) -> Labelled:
            return made[name]

        def __len__(self) -> int:
            return 3

    return Frame(columns=list(made), to_numpy=None)


def test_a_column_is_read_by_position_whatever_its_labels(tmp_path: Path) -> None:
    column = Labelled(np.array([30.0, 10.0, 20.0]), [2, 0, 1])
    (batch,) = Loader(column, 3)
    assert batch.tolist() == [30, 10, 20]
    pack_from(column, tmp_path / "s")
    assert open_store(tmp_path / "s").read_rows("features", 0, 3).tolist() == [30, 10, 20]


@pytest.mark.parametrize("kind", ["pandas", "pyarrow"])
def test_a_table_in_memory_becomes_a_store_by_columns(tmp_path: Path, kind: str) -> None:
    columns = {"a": [3, 1, 2], "t": ["x", "y", "é"], "b": [True, False, True]}
    table = frame(**columns) if kind == "pandas" else pa.table(columns)
    pack_from(table, tmp_path / "s")
    with open_store(tmp_path / "s") as store:
        assert store.read_rows("a", 0, 3).tolist() == columns["a"]
        assert [store.read_text("t", row) for row in range(3)] == columns["t"]
    (batch,) = Loader(table, 3, fields=["a", "b"])
    assert batch["a"].tolist() == columns["a"]
    assert batch["b"].tolist() == columns["b"]


def test_a_dict_of_lists_becomes_a_store(tmp_path: Path) -> None:
    pack_from({"ids": [[1, 2], [], [3]], "t": np.array(["a", "b", "c"])}, tmp_path / "s")
    with open_store(tmp_path / "s") as store:
        assert store.read_ragged("ids", 0, 3)[0].tolist() == [1, 2, 3]
        assert store.read_text("t", 2) == "c"


def test_a_sparse_matrix_is_refused_with_what_to_type(tmp_path: Path) -> None:
    matrix = SimpleNamespace(tocsr=None, shape=(3, 3))
    for use in (lambda: Loader(matrix, 2), lambda: pack_from(matrix, tmp_path / "s")):
        with pytest.raises(InputError, match=r"x\.toarray\(\)"):
            use()


@pytest.mark.parametrize("first", [0, 1])
def test_an_empty_list_takes_the_type_and_shape_of_the_others(first: int) -> None:
    samples = [{"ids": [1, 2], "boxes": np.ones((2, 4), "f4")}, {"ids": [], "boxes": []}]
    fields = collect(samples if first == 0 else samples[::-1])
    assert fields["ids"].values.dtype == np.int64
    assert fields["boxes"].values.dtype == np.float32
    assert fields["boxes"].values.shape == (2, 4)
    lengths = np.diff(fields["ids"].offsets).tolist()  # type: ignore[union-attr]
    assert lengths == ([2, 0] if first == 0 else [0, 2])


class Odd:
    """A hundred samples, one of which is other."""

    def __init__(self, number: int, sample: Any) -> None:
        self._odd = (number, sample)

    def __len__(self) -> int:
        return 100

    def __getitem__(self, number: int) -> Any:
        if number == 5:
            raise OSError("cannot be read")
        return self._odd[1] if number == self._odd[0] else {"x": np.zeros((2, 2), "f4"), "y": 1}


@pytest.mark.parametrize("number", [80, 81])  # among the 64 that are looked at, and not
@pytest.mark.parametrize(
    "sample",
    [
        {"x": np.zeros((2, 3), "f4"), "y": 1},
        {"x": np.zeros((2, 2), "f8"), "y": 1},
        {"x": np.zeros((2, 2), "f4")},
        {"x": np.zeros((2, 2), "f4"), "y": "a"},
        {"x": None, "y": 1},
    ],
)
def test_the_sample_that_differs_is_named_by_its_own_number(
    tmp_path: Path, number: int, sample: Any
) -> None:
    options = PackOptions(on_bad="quarantine", bad_budget="50%")
    with pytest.raises(InputError, match=rf"\b{number}\b"):
        pack_from(Odd(number, sample), tmp_path / "s", options=options)


@pytest.mark.parametrize("number", [80, 81])
def test_a_sample_that_is_none_is_left_out_like_one_that_raises(
    tmp_path: Path, number: int
) -> None:
    options = PackOptions(on_bad="quarantine", bad_budget="50%")
    made = pack_from(Odd(number, None), tmp_path / "s", options=options)
    assert made.manifest.num_samples == 98
    told = (tmp_path / "s" / "refused.jsonl").read_text()
    assert "it is None" in told
    assert f'"line": {number}' in told
    dataset = [None if n == number else 1 for n in range(100)]
    with pytest.raises(InputError, match=f"sample {number} is None") as refused:
        Loader(dataset, 8)
    assert len(eval(refused.value.fix, {"torch": torch, "dataset": dataset})) == 99


def test_text_that_batches_leave_out_is_told_for_a_store_of_samples_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack_from([{"y": 1, "words": "a b"}, {"y": 2, "words": "c"}], tmp_path / "s")
    monkeypatch.setattr(arguments, "_told", set())
    with pytest.warns(UserWarning, match="leaves text out of its batches: words"):
        Loader(tmp_path / "s", 2)


def test_a_path_as_bytes_is_not_data() -> None:
    with pytest.raises(InputError, match=r"Loader\('a.h5', 64\)"):
        Loader(b"a.h5", 64)


def test_a_script_that_is_run_again_finds_its_own_store(tmp_path: Path) -> None:
    script = tmp_path / "own.py"
    script.write_text(
        "import sys, stoker\n"
        "class Base:\n    def __len__(self): return 70\n"
        "class Own(Base):\n    def __init__(self): self.double = lambda x: 2 * x\n"
        "    def __getitem__(self, i): return {'x': self.double(i) + SHIFT * (str(i) in {'5', '7', '9', '77'})}\n"
        "SHIFT = int(sys.argv[1])\n"
        "print(stoker.pack_from(Own(), 'made').reason)\n"
    )

    def run(shift: str, seed: str) -> str:
        environ = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, str(script), shift]
        return subprocess.run(
            command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=True
        ).stdout

    assert "does not exist" in run("0", "1")
    assert "up to date" in run("0", "2")
    assert "dataset changed" in run("1", "2")


class Graph:
    def __init__(self, number):
        self.x, self.y = np.full(3, number, np.float32), number

    def detach(self):
        return self


class Record(Graph):
    def keys(self):
        return ["x", "y"]

    def to_dict(self):
        return {"x": self.x, "y": self.y}


@pytest.mark.parametrize("kind", [Graph, Record])
def test_samples_that_are_objects_are_answered_with_their_attributes(kind):
    samples = [kind(number) for number in range(4)]
    with pytest.raises(InputError) as refused:
        Loader(samples, 2, "cpu")
    advised = refused.value.fix.removesuffix(", as the sample itself")
    assert advised != refused.value.fix
    made = [eval(advised, {"value": value}) for value in samples]
    (batch, _) = Loader(made, 2, "cpu", order="sequential")
    assert batch["y"].tolist() == [0, 1]
