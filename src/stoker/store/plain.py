"""Any plain HDF5 file as a one-shard store, opened in place; nothing is converted.

Enters: an `.h5` with arrays of equal first dimension (`features`, `targets`), and what the caller chose of it.
Leaves: a `Manifest` of dense and ragged fields, the dataset behind each, and notes on what was left aside.
Costs: a walk over the file's directory; no data is read. What a file only claims (chunks of gigabytes, rows
that were never written, groups without end) is refused by `stoker.bounds` before memory is taken for it.

Which dimension counts samples is never guessed: arrays of several lengths are refused with the candidates,
unless one is called `features`, or one length is the longest and has 99 % of the bytes. Files of other programs,
whose first dimension means something else, are recognised (`recognise`).
"""

from __future__ import annotations

import math
import os
import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np

from stoker import bounds
from stoker.display import command, first_names, nearest
from stoker.errors import StoreError
from stoker.store.foreign import unused_beside
from stoker.store.hdf5 import (
    check_claims,
    check_readable,
    find_node,
    has_fill,
    is_written,
    listing,
    named_damage,
    open_hdf5,
)
from stoker.store.manifest import FieldInfo, Manifest, ShardInfo

_MOST_BYTES = 8  # per number: torch has no longer types
_CLEAR_SHARE = 0.99
"""The longest arrays are the samples if they have at least this share of the bytes."""
_MOST_NAMES = 4
_MOST_LENGTHS = 6
_FEW = 8  # values that an attribute may have for other reasons: one for each dimension, for example
_PACKED = ("scale_factor", "add_offset", "_FillValue", "missing_value")
"""Attributes by which netCDF says what a stored number means."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Selection:
    """The part of a file that the caller chose."""

    group: str | None = None  # only datasets in this group, by their names there
    fields: tuple[str, ...] = ()  # only these arrays; they must have the same number of rows
    rows: int | None = None  # only arrays with this many rows

    @property
    def is_explicit(self) -> bool:
        """Whether it says which dimension counts samples."""
        return bool(self.fields) or self.rows is not None


class PlainFile(NamedTuple):
    """A plain file as a store; `notes` tell what else a user should know.

    `paths` maps each dataset of the shard to that of the file; `aside` says why other datasets are no fields.
    """

    manifest: Manifest
    paths: dict[str, str]
    aside: dict[str, str]
    notes: tuple[str, ...]


def describe_plain_file(path: Path, chosen: Selection = Selection()) -> PlainFile:  # noqa: B008
    """Return what a plain file holds; reads no data.

    Raises:
        StoreError: The file has no numeric array, or it is unclear which dimension counts samples.
    """
    with open_hdf5(path) as file, named_damage(path):
        arrays, aside, aliases = _find_arrays(file)
        matrices = find_sparse(file, arrays)
        foreign = recognise(path, file, arrays, matrices, chosen.group)
        first_names, others = _add_aliases(path, arrays, aliases, chosen)
        made = select(path, file, arrays, aside | others, matrices, chosen, foreign)
        paths = {part: first_names.get(name, name) for part, name in made.paths.items()}
        made = made._replace(paths=paths)
        notes = []
        for node in dict.fromkeys(find_node(file, name)[0] for name in made.paths.values()):
            check_readable(path, node)
            check_claims(path, node)
            notes += _value_notes(node)
            notes += _attribute_notes(node, made.manifest.num_samples)
        notes += _attribute_notes(file, made.manifest.num_samples)
        stated, num_samples = file.attrs.get("num_samples"), made.manifest.num_samples
        if stated is not None and not np.array_equal(stated, num_samples):
            notes.append(
                f"the attribute num_samples says {stated}, but the data has {num_samples} rows"
            )
    return made._replace(notes=(*notes, *made.notes))


def _value_notes(dataset: h5py.Dataset) -> list[str]:
    """Return what a user should know about the values of a dataset."""
    name, notes = dataset.name.lstrip("/"), []
    if not has_fill(dataset) and not is_written(dataset):
        notes.append(
            f"rows of dataset {name!r} that were never written have no fill value, and are read as 0"
        )
    said = {key: np.ravel(dataset.attrs[key])[:1] for key in _PACKED if key in dataset.attrs}
    if shown := [f"{key} {value[0]}" for key, value in said.items() if len(value)]:
        notes.append(
            f"dataset {name!r} says {', '.join(shown)} (netCDF): its values come as they are stored, without that"
        )
    return notes


def _attribute_notes(node: Any, num_samples: int) -> list[str]:
    """Return which attributes have a value for each sample, such as labels."""
    what = f"dataset {node.name.lstrip('/')!r}" if isinstance(node, h5py.Dataset) else "the file"
    return [
        f"attribute {key!r} of {what} has a value for each of the {num_samples:,} samples: left aside"
        for key in node.attrs
        if num_samples > _FEW and (node.attrs.get_id(key).shape or ())[:1] == (num_samples,)
    ]


def select(
    path: Path,
    file: Any,
    arrays: Arrays,
    aside: dict[str, str],
    matrices: Sequence[Sparse],
    chosen: Selection,
    foreign: Foreign | None = None,
) -> PlainFile:
    """Return the arrays that become fields, as a store of one shard.

    Attributes of groups are looked up in `file`: an h5py file, or what has the same methods. `arrays` has shape and
    dtype of every array of numbers, `aside` why other datasets are no fields, `matrices` the sparse ones among the
    arrays. A `foreign` file must not be opened without an explicit choice.
    """
    sparse = {part: each for each in matrices for part in (each.data, each.indices)}
    by_columns = {name for name, each in sparse.items() if each.by_columns}
    aside = aside | {
        name: f"dataset {name!r} is of a matrix stored by columns (csc): left aside"
        for name in by_columns
    }
    lengths = {
        name: sparse[name].num_rows if name in sparse else shape[0]
        for name, (shape, _) in arrays.items()
        if name not in by_columns and name not in {each.indptr for each in matrices}
    }
    if not lengths:
        raise _no_arrays(path, list(aside.values()))
    prefix = "" if chosen.group is None else group_prefix(path, chosen.group, lengths)
    if lost := [why for name in chosen.fields if (why := aside.get(prefix + name))]:
        raise StoreError(
            f"{path}: {lost[0].removesuffix(': left aside')}.",
            f"arrays of numbers: {first_names([name.removeprefix(prefix) for name in lengths])}",
            "convert it with h5py and numpy, into an array of numbers",
        )
    inside = {name: rows for name, rows in lengths.items() if name.startswith(prefix)}
    sizes = {
        name: math.prod(arrays[name][0]) * np.dtype(arrays[name][1]).itemsize for name in inside
    }
    own = own_rows(file, arrays, matrices, prefix)
    taken = choose(path, inside, sizes, chosen, prefix, own, foreign)
    bounds.MEMBERS.check(len(taken), str(path), listing(path), StoreError)
    fields: dict[str, FieldInfo] = {}
    paths: dict[str, str] = {}
    for name in taken:
        shape, dtype = arrays[name]
        short = name.removeprefix(prefix)
        if name in sparse:
            fields[short] = FieldInfo(kind="ragged", dtype=dtype, shape=[])
            paths |= {f"{short}/values": name, f"{short}/offsets": sparse[name].indptr}
        else:
            fields[short] = FieldInfo(kind="dense", dtype=dtype, shape=list(shape[1:]))
            paths[short] = name
    num_samples = lengths[taken[0]]
    hints = own is None and not chosen.is_explicit
    for name, rows in inside.items():
        short = name.removeprefix(prefix)
        if name in taken:
            continue
        why = f"has {rows} rows, not {num_samples}"
        if rows == num_samples:
            why = "was not chosen" if chosen.fields else "is not of the samples' own groups"
        hint = ""
        if rows != num_samples and hints and "/" in short:
            hint = f" (group={name.rpartition('/')[0]!r} loads it)"
        aside[name] = f"dataset {short!r} {why}: left aside{hint}"
    shard = ShardInfo(
        file=path.name,
        label=path.name,
        num_samples=num_samples,
        size_bytes=path.stat().st_size,
        checksum="",
        rows={part: arrays[name][0][0] for part, name in paths.items()},
    )
    return PlainFile(
        Manifest(num_samples=num_samples, fields=fields, shards=[shard]),
        paths,
        {name.removeprefix(prefix): why for name, why in aside.items() if name.startswith(prefix)},
        tuple(each.note() for each in matrices if each.data in taken or each.indices in taken),
    )


def choose(
    path: Path,
    lengths: Mapping[str, int],
    sizes: Mapping[str, int],
    chosen: Selection,
    prefix: str = "",
    own: OwnRows | None = None,
    foreign: Foreign | None = None,
) -> list[str]:
    """Return the arrays that are fields: all with the same number of rows; pure.

    By the first dimension and the bytes of every array, what the caller chose (names leave out the `prefix` of the
    group), and what counts samples in a file of a known kind (`own`). A `foreign` file needs an explicit choice.
    """
    if not lengths:
        raise _no_arrays(path)
    by_length: dict[int, list[str]] = {}
    for name, rows in lengths.items():
        by_length.setdefault(rows, []).append(name)

    def unclear(why: str, fix: str = "") -> StoreError:
        """Return the error that lists the candidates, those with most bytes first."""
        order = sorted(by_length, key=lambda rows: -sum(sizes[name] for name in by_length[rows]))
        listed = [
            f"{rows:,} rows: {first_names([name.removeprefix(prefix) for name in by_length[rows]])}"
            for rows in order[:_MOST_LENGTHS]
        ]
        if len(order) > len(listed):
            listed.append(f"and {len(order) - len(listed)} other lengths")
        groups = {name.removeprefix(prefix).partition("/")[0] for name in sizes if "/" in name}
        if not fix:
            fix = _advice(path, chosen, "rows", order[0])
            if len(groups) > 1 and chosen.group is None:
                fix += f", or {_advice(path, chosen, 'group', min(groups))}"
        allowed = f"one first dimension; here are {'; '.join(listed)}"
        return StoreError(f"{path}: {why}.", allowed, fix)

    if chosen.fields:
        return _chosen_fields(path, lengths, chosen, prefix)
    if chosen.rows is not None:
        if chosen.rows not in by_length:
            raise unclear(f"no array has {chosen.rows} rows")
        return by_length[chosen.rows]
    if foreign is not None:
        raise unclear(foreign.why, foreign.fix)
    if own is not None and own.num_rows in by_length:
        same = by_length[own.num_rows]
        return [name for name in same if name.startswith(own.prefixes)]
    if f"{prefix}features" in lengths:
        return by_length[lengths[f"{prefix}features"]]
    longest = max(by_length)
    if len(by_length) > 1:
        share = sum(sizes[name] for name in by_length[longest]) / max(1, sum(sizes.values()))
        if share < _CLEAR_SHARE:
            why = "its arrays have different numbers of rows, and which counts samples is not clear"
            raise unclear(why)
    if longest == 1:
        raise unclear("its arrays have one row each")
    return by_length[longest]


def _no_arrays(path: Path, aside: Sequence[str] = ()) -> StoreError:
    here = f"; here {'; '.join(aside[:_MOST_NAMES])}" if aside else ""
    return StoreError(
        f"{path} holds no numeric array.",
        f"at least one dataset of numbers, for example 'features'{here}",
        listing(path),
    )


def _chosen_fields(
    path: Path, lengths: Mapping[str, int], chosen: Selection, prefix: str
) -> list[str]:
    known = {name.removeprefix(prefix): name for name in lengths}
    if unknown := [name for name in chosen.fields if name not in known]:
        near = nearest(unknown[0], known) or next(iter(known))
        raise StoreError(
            f"{path} has no numeric array {unknown[0]!r}.",
            f"one of {first_names(known)}",
            _advice(path, chosen, "fields", [near]),
        )
    counts = {name: lengths[known[name]] for name in chosen.fields}
    if chosen.rows is not None:
        counts["--rows"] = chosen.rows
    if len(set(counts.values())) > 1:
        first = chosen.fields[0]
        same = [name for name in chosen.fields if counts[name] == counts[first]]
        raise StoreError(
            f"{path}: the chosen arrays have different numbers of rows: {counts}.",
            "arrays with the same number of rows",
            _advice(path, chosen, "fields", same),
        )
    return [known[name] for name in dict.fromkeys(chosen.fields)]


def _advice(path: Path, chosen: Selection, option: str, value: object) -> str:
    """Return a choice to type: in Python where `open_store` takes the file, and in a shell."""
    group = () if chosen.group is None else ("--group", chosen.group)
    listed = ",".join(value) if isinstance(value, list) else value
    shell = command("stoker", "inspect", path, *group, f"--{option}", listed)
    if path.suffix.lower() in (".npz", ".npy"):
        return shell
    return f"{option}={value!r}, or {shell}"


def group_prefix(path: Path, group: str, names: Mapping[str, int]) -> str:
    """Return how the names of a group's datasets begin."""
    prefix = group.strip("/") + "/"
    if any(name.startswith(prefix) for name in names):
        return prefix
    groups = sorted({name.rpartition("/")[0] for name in names if "/" in name})
    near = nearest(group, groups) or next(iter(groups), None)
    raise StoreError(
        f"{path} has no numeric array in a group {group!r}.",
        f"one of {', '.join(groups)}" if groups else "no group=: the file has no groups",
        _advice(path, Selection(), "group", near) if near else "leave group out",
    )


# -- what is in the file ---------------------------------------------------------------------------


def _find_arrays(
    file: h5py.File,
) -> tuple[dict[str, tuple[Shape, str]], dict[str, str], dict[str, str]]:
    """Return shape and dtype of every array of numbers, why other datasets are none, and second names."""
    arrays: dict[str, tuple[Shape, str]] = {}
    aside: dict[str, str] = {}
    aliases: dict[str, str] = {}
    for raw_name, found in _walk(file):
        try:
            name = raw_name.decode()
        except UnicodeDecodeError:
            aside[repr(raw_name)] = f"dataset {raw_name!r} has a name that is not text: left aside"
            continue
        if isinstance(found, bytes):
            aliases[name] = found.decode(errors="surrogateescape")
        elif isinstance(found, str):
            aside[name] = f"{name!r} {found}: left aside"
        else:
            for column, fact in _describe(found).items():
                if isinstance(fact, str):
                    aside[name + column] = f"dataset {name + column!r} {fact}: left aside"
                else:
                    arrays[name + column] = fact
    return arrays, aside, aliases


def _add_aliases(
    path: Path, arrays: dict[str, tuple[Shape, str]], aliases: Mapping[str, str], chosen: Selection
) -> tuple[dict[str, str], dict[str, str]]:
    """Add the arrays that the chosen group or fields have by a second name: a soft link, or a second hard link.

    Returns:
        First names of those by their second ones; and why other second names are no fields.
    """
    below: dict[str, list[str]] = {name: [name] for name in arrays} if aliases else {}
    for name in arrays if aliases else ():
        for at, letter in enumerate(name):
            if letter == "/":
                below.setdefault(name[:at], []).append(name)
    prefix = "" if chosen.group is None else chosen.group.strip("/") + "/"
    asked = {prefix + name for name in chosen.fields}
    first_names: dict[str, str] = {}
    aside: dict[str, str] = {}
    for alias, target in aliases.items():
        if target not in below:
            aside[alias] = f"{alias!r} is a link to {target!r}: left aside"
        for first in below.get(target, ()):
            name = alias + first.removeprefix(target)
            if name in asked or (prefix and name.startswith(prefix)):
                first_names[name] = first
            else:
                hint = "" if prefix else f" (fields={[name]!r} loads it by this name)"
                aside[name] = f"dataset {name!r} is a second name of {first!r}: left aside{hint}"
        bounds.OBJECTS.check(len(aside), str(path), listing(path), StoreError)
    arrays |= {name: arrays[first] for name, first in first_names.items()}
    return first_names, aside


def _describe(identifier: Any) -> dict[str, tuple[Shape, str] | str]:
    """Return shape and dtype of an array of numbers, or why it is none; of a table, of every column."""
    node = h5py.Dataset(identifier)
    try:
        dtype = node.dtype
    except (TypeError, ValueError, KeyError) as error:  # of 24 or 128 bits, or a VAX
        return {"": f"has a type that numpy has not ({error})"}
    if node.shape is None or len(node.shape) == 0:
        return {"": "is a single value"}
    if "MATLAB_empty" in node.attrs:
        return {"": "is an empty MATLAB array, of which the file holds the size"}
    columns = {f"/{name}": dtype[name] for name in dtype.names or ()} or {"": dtype}
    shape = tuple(map(int, node.shape))
    return {name: _number_type(shape, each) for name, each in columns.items()}


def _number_type(shape: Shape, dtype: np.dtype[Any]) -> tuple[Shape, str] | str:
    base = dtype.base
    if base.names is not None:
        return (
            f"is a table of the columns {first_names(base.names)} (a compound type) within a table"
        )
    if h5py.check_string_dtype(base) is not None:
        return f"is text (dtype {base})"
    if (inner := h5py.check_vlen_dtype(base)) is not None:
        return f"has rows of different lengths (dtype {base} of {inner})"
    if base.kind not in "biuf" or base.itemsize > _MOST_BYTES:
        return f"has dtype {base}"
    return (*shape, *dtype.shape), base.str


def _walk(file: h5py.File) -> Iterator[tuple[bytes, Any]]:
    """Yield path and identifier of every dataset once, and path and target of other links.

    Instead of an identifier, bytes are the path that a second name leads to, and text is a remark on a link that is
    not followed. h5py's own walk recurses in C, and groups 20,000 deep end the process.
    """
    h5o, name = h5py.h5o, file.filename
    seen = {h5o.get_info(file.id).addr: b""}
    waiting = [(b"", file.id, iter(_links(file.id, name)))]
    while waiting:
        prefix, group, links = waiting[-1]
        link = next(links, None)
        if link is None:
            waiting.pop()
            continue
        if isinstance(link, tuple):
            link, place = link
            if isinstance(place, bytes):
                start = b"" if place.startswith(b"/") else prefix
                place = posixpath.normpath(b"/" + start + place).lstrip(b"/")
            yield prefix + link, place
            continue
        address = h5o.get_info(group, link).addr
        if address in seen:  # a second name, or a group within itself
            if not (prefix + link).startswith(seen[address] + b"/") and seen[address]:
                yield prefix + link, seen[address]
            continue
        seen[address] = prefix + link
        bounds.OBJECTS.check(len(seen), name, listing(file.filename), StoreError)
        child = h5o.open(group, link)
        if isinstance(child, h5py.h5d.DatasetID):
            yield prefix + link, child
        elif isinstance(child, h5py.h5g.GroupID):
            bounds.DEPTH.check(len(waiting), name, listing(file.filename), StoreError)
            waiting.append((prefix + link + b"/", child, iter(_links(child, name))))


def _links(group: Any, name: str) -> list[Any]:
    """Return the names of what lies in a group; of links to other places a pair: the name, and where it leads to."""
    found: list[bytes] = []

    def take(link: bytes) -> bool | None:
        found.append(link)
        return len(found) > bounds.OBJECTS.most or None  # anything but None ends the walk

    group.links.iterate(take)
    bounds.OBJECTS.check(len(found), name, listing(name), StoreError)
    kinds = {link: group.links.get_info(link).type for link in found}
    return [
        link if kind == h5py.h5l.TYPE_HARD else (link, _led_to(group, link, kind))
        for link, kind in sorted(kinds.items())
    ]


def _led_to(group: Any, link: bytes, kind: int) -> bytes | str:
    """Return the target of a soft link, as bytes; for other links a remark, as text."""
    if kind == h5py.h5l.TYPE_SOFT:
        return bytes(group.links.get_val(link))
    if kind == h5py.h5l.TYPE_EXTERNAL:
        other, inside = (os.fsdecode(part) for part in group.links.get_val(link))
        return f"is a link into another file, {inside!r} of {other!r}"
    return "is a link of a kind that only its own program follows"


# -- files of other programs ------------------------------------------------------------------------
# Read: AnnData (.h5ad) and 10x, dense or stored by rows (csr). Refused by name, unless the caller says with `fields`
# or `rows` what counts samples: MATLAB 7.3 (dimensions in reverse order), Keras (weights), pandas (values without
# their columns), NeXus (a measurement of many lengths), sparse matrices stored by columns.


_MATLAB = b"MATLAB 7.3 MAT-file"
_MOST_GROUPS = 200
"""Groups whose attributes are looked at: the mark of a program stands near the beginning."""
_OBS = ("X", "layers/", "obsm/", "obs/")
"""Where AnnData keeps what has one row per observation. `obsp` and `raw` are taken when they are asked for."""

Arrays = Mapping[str, tuple[tuple[int, ...], str]]


@dataclass(frozen=True)
class Sparse:
    """A compressed sparse matrix: row i owns `data[indptr[i]:indptr[i + 1]]`, and `indices` likewise."""

    group: str  # where it is; "" for the file itself
    data: str  # dataset of the values; `indices` of their columns, `indptr` of the offsets
    indices: str
    indptr: str
    num_rows: int  # length of the compressed dimension
    shape: tuple[int, ...] | None  # as stated in the file, or None
    by_columns: bool  # whether the file says that columns are compressed (csc)

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
        made = unused_beside(path, ".npz")
        code = (
            f"import h5py, numpy; f = h5py.File({str(path)!r}); numpy.savez({made!r}, "
            "**{n: d[()].T for n, d in f.items() if getattr(d, 'dtype', None) and d.dtype.kind in 'biuf' "
            "and 'MATLAB_empty' not in d.attrs})"
        )
        why = "it is a MATLAB 7.3 file, whose arrays have their dimensions in reverse order"
        if all("/" in name for name in arrays):
            lost = "; they lie in structs, cells or sparse matrices"
            return Foreign(why + lost, "save('x.mat', 'x', '-v7.3') in MATLAB, with x a full array")
        return Foreign(why, command("python3", "-c", code))
    named = any(re.search(r"(^|/)vars/\d+$", name) for name in arrays)  # Keras 3
    if named or {"keras_version", "layer_names"} & set(file.attrs) or "model_weights" in file:
        return Foreign("it holds the weights of a Keras model, no samples")
    for inner in _some_groups(file, arrays):
        attributes = file[inner].attrs
        if "pandas_type" in attributes:
            made = unused_beside(path, ".parquet")
            code = f"import pandas; pandas.read_hdf({str(path)!r}, {inner!r}).to_parquet({made!r})"
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
    links = file.id.links  # h5py's own `get(getlink=True)` fails on a user's kind of link
    hard = [name for name in file if links.get_info(os.fsencode(name)).type == h5py.h5l.TYPE_HARD]
    groups = [name for name in hard if isinstance(file[name], h5py.Group)]
    # A table's column may have a "/" in its name.
    inner = (name for name in sorted(below - top - {""}) if isinstance(file.get(name), h5py.Group))
    return [*groups[:_MOST_GROUPS], *islice(inner, _MOST_GROUPS)]


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
