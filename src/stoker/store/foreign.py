"""HDF5 files of other programs: what counts samples in them, or why they cannot be opened as they are.

Enters: an open file and the shapes of its arrays. Leaves: sparse matrices that can be read as ragged fields, the
rows of an AnnData or 10x file, or the name of the program with a way out. Costs: some attributes are read, no data.

Right: AnnData (`.h5ad`) and 10x, dense or stored by rows (csr). Refused by name, unless the caller says with
`fields` or `rows` what counts samples: MATLAB 7.3 (dimensions in reverse order), Keras (weights), pandas (values
without their columns), NeXus (a measurement of many lengths), sparse matrices stored by columns.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import h5py

from stoker.display import command

_MATLAB = b"MATLAB 7.3 MAT-file"
_MOST_GROUPS = 200
"""Groups whose attributes are looked at: the mark of a program stands near the beginning."""
_OBS = ("X", "layers/", "obsm/", "obs/")
"""Where AnnData keeps what has one row per observation. `obsp` and `raw` are taken when they are asked for."""

Arrays = Mapping[str, tuple[tuple[int, ...], str]]


@dataclass(frozen=True)
class Sparse:
    """A compressed sparse matrix: row i owns `data[indptr[i]:indptr[i + 1]]`, and `indices` likewise.

    Attributes:
        group: Where it is; "" for the file itself.
        data: Dataset of the values; `indices` of their columns, `indptr` of the offsets.
        num_rows: Of the compressed dimension.
        shape: As the file says, or None.
        by_columns: Whether the file says that columns are compressed (csc).
    """

    group: str
    data: str
    indices: str
    indptr: str
    num_rows: int
    shape: tuple[int, ...] | None
    by_columns: bool

    def note(self) -> str:
        """Return how the matrix is read, for people."""
        size = "" if self.shape is None else f" of {' x '.join(f'{n:,}' for n in self.shape)}"
        return (
            f"{self.group or 'the file'} is a sparse matrix{size}: {self.data!r} and {self.indices!r} are "
            "ragged fields, the values of a row and their columns"
        )


class Foreign(NamedTuple):
    """Why a file of another program is not opened as it is, and a command that converts it, or ""."""

    why: str
    fix: str = ""


class OwnRows(NamedTuple):
    """The rows that are samples in a file of a known kind, and how the names of their arrays begin."""

    num_rows: int
    prefixes: tuple[str, ...]


def find_sparse(file: h5py.File, arrays: Arrays) -> list[Sparse]:
    """Return the sparse matrices of a file."""
    found = []
    for indptr, (shape, dtype) in arrays.items():
        group, _, own = indptr.rpartition("/")
        inside = f"{group}/" if group else ""
        data, indices = f"{inside}data", f"{inside}indices"
        if own != "indptr" or len(shape) != 1 or shape[0] < 1 or dtype[1] not in "iu":
            continue
        if data not in arrays or indices not in arrays or arrays[indices][1][1] not in "iu":
            continue
        if len(arrays[data][0]) != 1 or arrays[data][0] != arrays[indices][0]:
            continue
        node = file[group or "/"]
        form = _text(node.attrs.get("encoding-type", node.attrs.get("h5sparse_format", "")))
        stated = node.attrs.get("shape", node.attrs.get("h5sparse_shape"))
        if stated is None and f"{inside}shape" in arrays and arrays[f"{inside}shape"][0] == (2,):
            stated = file[f"{inside}shape"][:]
        size = None if stated is None else tuple(int(length) for length in stated)
        found.append(
            Sparse(group, data, indices, indptr, shape[0] - 1, size, form.startswith("csc"))
        )
    return found


def own_rows(
    file: h5py.File, arrays: Arrays, sparse: Sequence[Sparse], prefix: str
) -> OwnRows | None:
    """Return what counts samples in a file, or a group, with observations or a sparse matrix; else None."""
    if not prefix and _is_anndata(file):
        matrix = next((each for each in sparse if each.group == "X"), None)
        if matrix is not None:
            return OwnRows(matrix.num_rows, _OBS)
        if "X" in arrays:
            return OwnRows(arrays["X"][0][0], _OBS)
    lengths = {matrix.num_rows for matrix in sparse if matrix.data.startswith(prefix)}
    return OwnRows(lengths.pop(), ("",)) if len(lengths) == 1 else None


def recognise(
    path: Path, file: h5py.File, arrays: Arrays, sparse: Sequence[Sparse], group: str | None
) -> Foreign | None:
    """Recognise a file of another program whose arrays would be read wrongly; None for a plain file."""
    is_anndata = _is_anndata(file)
    by_columns = next((matrix for matrix in sparse if matrix.by_columns), None)
    if by_columns is not None and (by_columns.group == "X" or not is_anndata):
        copy = path.with_name(f"{path.stem}-csr{path.suffix}")
        code = f"import anndata; a = anndata.read_h5ad({str(path)!r}); a.X = a.X.tocsr(); "
        why = f"its sparse matrix {by_columns.group!r} is stored by columns (csc), not by samples"
        return Foreign(why, command("python3", "-c", f"{code}a.write({str(copy)!r})"))
    if len(sparse) > 1 and group is None and not is_anndata:
        fix = command("stoker", "inspect", path, "--group", sparse[0].group)
        return Foreign("it holds several sparse matrices, each with samples of its own", fix)
    if _is_matlab(path, file):
        copy = path.with_suffix(".npz")
        code = (
            f"import h5py, numpy; f = h5py.File({str(path)!r}); numpy.savez({str(copy)!r}, "
            "**{n: d[()].T for n, d in f.items() if getattr(d, 'dtype', None) and d.dtype.kind in 'biuf'})"
        )
        why = "it is a MATLAB 7.3 file, whose arrays have their dimensions in reverse order"
        return Foreign(why, command("python3", "-c", code))
    named = any(re.search(r"(^|/)vars/\d+$", name) for name in arrays)  # Keras 3
    if named or {"keras_version", "layer_names"} & set(file.attrs) or "model_weights" in file:
        return Foreign("it holds the weights of a Keras model, no samples")
    for inner in _some_groups(file, arrays):
        attributes = file[inner].attrs
        if "pandas_type" in attributes:
            copy = path.with_suffix(".parquet")
            code = f"import pandas; pandas.read_hdf({str(path)!r}, {inner!r}).to_parquet({str(copy)!r})"
            why = (
                f"it is a pandas file: the values of {inner!r} are apart from their columns' names"
            )
            return Foreign(why, command("python3", "-c", code))
        if "NX_class" in attributes and group is None:
            return Foreign("it is a NeXus file, and which of its arrays are samples is not said")
    return None


def _some_groups(file: h5py.File, arrays: Arrays) -> list[str]:
    """Return the first groups of a file, those at the top before those below."""
    # All groups above an array: the mark of pandas stands above the groups of an index.
    below = {name[:at] for name in arrays for at, letter in enumerate(name) if letter == "/"}
    top = {name.partition("/")[0] for name in below}
    hard = [name for name in file if isinstance(file.get(name, getlink=True), h5py.HardLink)]
    groups = [name for name in hard if isinstance(file[name], h5py.Group)]
    return [*groups[:_MOST_GROUPS], *sorted(below - top - {""})[:_MOST_GROUPS]]


def _is_anndata(file: h5py.File) -> bool:
    named = _text(file.attrs.get("encoding-type", "")) == "anndata"
    return named or all(name in file for name in ("X", "obs", "var"))


def _is_matlab(path: Path, file: h5py.File) -> bool:
    if file.userblock_size < len(_MATLAB):
        return False
    with path.open("rb") as raw:
        return raw.read(len(_MATLAB)) == _MATLAB


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
