"""Python samples (dicts, tuples or single arrays) as fields of a store; also for `stoker.pack_from`.

Enters: samples as a torch Dataset returns them, one by one: numbers, numpy arrays, tensors, pictures, text. Leaves:
dense fields where all samples have the same shape, ragged fields where the first axis differs, text as UTF-8. Costs:
the samples of one part in memory, twice. torch is not imported: tensors are recognised by their methods.

Names: a dict has its keys. A tuple is (features, targets, field_2, ...), a named tuple has its own names, and a single
array is `features`. Any other difference between samples is refused, with the number of the sample.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import Any, Literal

import numpy as np

from stoker.errors import InputError
from stoker.store.fields import Array, Dense, Ragged, offsets_of
from stoker.store.manifest import FieldInfo

Form = Literal["dict", "tuple", "single"]
"""Form of a sample; a batch has the same form."""

_FIRST_NAMES = ("features", "targets")
_NUMBERS = "numbers, arrays, tensors or text, of the same kind in every sample"


def field_names(sample: Any) -> tuple[str, ...]:
    """Return the names of a sample's fields."""
    if isinstance(sample, Mapping):
        names = tuple(sample)
        odd = [name for name in names if not isinstance(name, str) or not name or "/" in name]
        if odd or not names:
            raise InputError(
                f"a sample has the field {odd[0]!r}." if odd else "a sample is an empty dict.",
                "names that are text, without '/'",
                "{'features': x, 'targets': y}",
            )
        return names
    if isinstance(sample, tuple | list):
        if not sample:
            raise InputError("a sample is empty.", "one value or more", "")
        own = getattr(sample, "_fields", None)
        return tuple(own) if own else tuple_names(len(sample))
    return _FIRST_NAMES[:1]


def tuple_names(length: int) -> tuple[str, ...]:
    """Return the fields of a tuple of `length` values."""
    return (*_FIRST_NAMES, *(f"field_{number}" for number in range(2, length)))[:length]


def form_of(sample: Any) -> Form:
    """Return the form of a sample."""
    if isinstance(sample, Mapping):
        return "dict"
    return "tuple" if isinstance(sample, tuple | list) else "single"


def plain_data(data: Any) -> Any:
    """Return a table as a dict of columns, a column as an array, and anything else unchanged.

    Tables and columns of pandas, polars, pyarrow and xarray are recognised by their methods. Some of them read
    `data[3]` as the label 3, which a sorted or filtered column has at another position or not at all.
    """
    if isinstance(data, type):
        name = data.__name__
        raise InputError(f"{name} is a class.", "an object of it", f"{name}(...)")
    if hasattr(data, "tocsr"):
        raise InputError(
            f"{type(data).__name__} is a sparse matrix.", "dense arrays", "x.toarray()"
        )
    if hasattr(data, "column_names") and hasattr(data, "column"):  # pyarrow
        names, columns = list(data.column_names), list(data.columns)
    elif hasattr(data, "columns") and hasattr(data, "to_numpy"):  # pandas, polars
        names = [str(name) for name in data.columns]
        columns = [data[name] for name in data.columns] if len(set(names)) == len(names) else []
    elif hasattr(data, "to_numpy") and hasattr(data, "__len__"):
        return plain_column(data)
    else:
        return data
    if twice := [name for name in names if names.count(name) > 1]:
        raise InputError(
            f"the table has {names.count(twice[0])} columns called {twice[0]!r}.",
            "a name of its own for each column",
            "table.columns = [f'column_{n}' for n in range(table.shape[1])]",
        )
    return dict(zip(names, map(plain_column, columns), strict=True))


def plain_column(value: Any) -> Any:
    """Return one column of a table, or a value of a dict of arrays: as an array, or as a list if it holds text."""
    if hasattr(value, "to_numpy"):
        value = np.asarray(value)
    if isinstance(value, np.ndarray) and value.dtype.kind in "UO" and value.ndim == 1:
        return value.tolist()  # text, as numpy and pandas hold it
    return value


def as_array(value: Any, what: str) -> Array | str:
    """Return a value of a sample (a number, an array, a tensor on any device, a picture, text) as an array, or as text.

    `what` is its name in an error: "'label' of sample 3".
    """
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):  # numpy would cut zeros off its end
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise InputError(
                f"{what} is {len(value)} bytes that are no text.",
                _NUMBERS,
                "np.frombuffer(value, np.uint8)",
            ) from None
    if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
        raise InputError(
            f"{what} has masked values.", "values without a mask", "np.ma.filled(value, 0)"
        )
    # A tensor has both methods; a PyG graph has only one of them.
    if hasattr(value, "detach") and hasattr(value, "numpy"):
        try:
            return np.asarray(value.detach().cpu().numpy())
        except (TypeError, RuntimeError) as error:  # bfloat16, sparse, nested
            raise InputError(
                f"{what} is a {getattr(value, 'dtype', '')} tensor that numpy cannot hold ({error}).",
                _NUMBERS,
                "value.to_dense()" if getattr(value, "is_sparse", False) else "value.float()",
            ) from None
    try:
        made = np.asarray(value)
    except (ValueError, TypeError, RuntimeError):  # lists of different lengths
        made = np.empty(0, object)
    if made.dtype.kind in "US" and made.ndim == 0:
        return made.item().decode() if made.dtype.kind == "S" else str(made)
    if made.dtype.kind not in "biuf" or made.dtype.itemsize > 8:
        dtype = made.dtype if made.size and not isinstance(value, Mapping) else ""
        raise InputError(
            f"{what} is {type(value).__name__} {dtype}".rstrip() + ".",
            _NUMBERS,
            _advise(value, made.dtype.kind),
        )
    return made


def are_arrays(value: Any) -> bool:
    """Whether a value of a sample is several arrays or tensors in a list or tuple, such as two views of an image."""
    is_list = isinstance(value, list | tuple) and bool(value)
    return is_list and all(getattr(each, "shape", ()) != () for each in value)


def _advise(value: Any, kind: str) -> str:
    """Return lossless code to write instead of a value that no field can hold."""
    if hasattr(value, "file") and hasattr(value, "keys"):  # a group of h5py
        group = "" if value.name == "/" else f", group={value.name.strip('/')!r}"
        return f"Loader({str(value.file.filename)!r}, 64{group})"
    if isinstance(value, Mapping):
        names = ", ".join(f"{str(key)!r}: value[{key!r}]" for key in list(value)[:3])
        return f"{{{names}}}, as fields of the sample itself"
    if are_arrays(value):
        names = ", ".join(f"'view_{number}': value[{number}]" for number in range(len(value)))
        return f"{{{names}}}, as fields of the sample itself"
    if columns := getattr(getattr(value, "dtype", None), "names", None):  # a structured array
        return f"{{name: value[name] for name in {list(columns)}}}, as fields of the sample itself"
    if hasattr(value, "to_dict") and hasattr(value, "keys"):
        return "value.to_dict(), as the sample itself"
    if kind == "O" and getattr(value, "__dict__", None):
        return "vars(value), as the sample itself"
    if kind == "c":
        return "np.stack([np.real(value), np.imag(value)], -1)"
    if kind in "mM":
        return "np.asarray(value).astype('int64')"
    return "np.asarray(value, dtype=np.float32)"


def collect(
    samples: Iterable[Any],
    numbers: Iterable[int] | None = None,
    like: Mapping[str, FieldInfo] | None = None,
) -> dict[str, Dense | Ragged]:
    """Return the fields of samples, one row per sample. Errors name a sample by `numbers`, or count from 0.

    `like` has the fields that earlier samples decided; None decides here and needs at least one sample.
    """
    names = tuple(like or ())
    values: dict[str, list[Array | str]] = {name: [] for name in names}
    taken: list[int] = []
    for sample, number in zip(samples, count() if numbers is None else numbers, strict=False):
        if sample is None:
            raise InputError(
                f"sample {number} is None.",
                "a sample for every number",
                "torch.utils.data.Subset(dataset, [n for n in range(len(dataset)) if dataset[n] is not None])",
            )
        if not names:
            names = field_names(sample)
            values = {name: [] for name in names}
        if set(field_names(sample)) != set(names):
            raise InputError(
                f"sample {number} has the fields {', '.join(field_names(sample))}, and those before it "
                f"{', '.join(names)}.",
                "the same fields in every sample",
                "",
            )
        taken.append(number)
        for name, value in named_values(sample):
            values[name].append(as_array(value, f"{name!r} of sample {number}"))
    return {
        name: _as_field(name, column, taken, (like or {}).get(name))
        for name, column in values.items()
    }


def named_values(sample: Any) -> Iterable[tuple[str, Any]]:
    """Return the fields of a sample with their values."""
    if isinstance(sample, Mapping):
        return sample.items()
    if isinstance(sample, tuple | list):
        return zip(field_names(sample), sample, strict=True)
    return [(_FIRST_NAMES[0], sample)]


def _as_field(
    name: str, column: Sequence[Array | str], numbers: Sequence[int], like: FieldInfo | None
) -> Dense | Ragged:
    def differs(one: int, other: int, how: str, dtype: str = "float32") -> InputError:
        kinds = [
            "text" if isinstance(value, str) else f"{value.dtype} {value.shape}" for value in column
        ]
        told = (f"{kinds[place]} in sample {numbers[place]}" for place in (one, other))
        return InputError(
            f"{name!r} is {how}: {', '.join(told)}.",
            "one type in all samples, and one shape but for the first axis",
            f"np.asarray({name}, dtype=np.{dtype})"
            if dtype
            else f"np.ravel({name}), with np.shape({name}) as a field of its own",
        )

    texts = [value for value in column if isinstance(value, str)]
    rows = [value for value in column if not isinstance(value, str)]
    if texts and rows:
        first = isinstance(column[0], str)
        other = next(n for n, value in enumerate(column) if isinstance(value, str) != first)
        raise differs(0, other, "text in some samples and numbers in others")
    if texts or (like is not None and like.encoding == "utf8" and not rows):
        return Ragged.from_strings(texts)
    # The first non-empty row decides: [] has no type of its own and no number of columns.
    lead = next((n for n, row in enumerate(rows) if row.size), 0)
    dtype = (rows[lead].dtype if like is None else np.dtype(like.dtype)).newbyteorder("=")
    for n, row in enumerate(rows):
        if row.size and row.dtype.newbyteorder("=") != dtype:
            # The advised type changes no value of any sample.
            widest = np.result_type(dtype, *{row.dtype for row in rows if row.size})
            raise differs(lead, n, f"not {dtype} in all samples", str(widest))
    rows = [row if row.size else row.astype(dtype) for row in rows]
    shapes = {row.shape for row in rows}
    kind = like.kind if like is not None else "dense" if len(shapes) == 1 else "ragged"
    if kind == "dense":
        shape = rows[0].shape if like is None else tuple(like.shape)
        for number, row in zip(numbers, rows, strict=True):
            if row.shape != shape:
                raise InputError(
                    f"{name!r} has the shape {row.shape} in sample {number}, and {shape} before.",
                    "one shape in all samples, or a field that is named as ragged",
                    f"ragged=[{name!r}]",
                )
        return Dense(np.stack(rows) if rows else np.empty((0, *shape), dtype))
    inner = rows[lead].shape[1:] if like is None else tuple(like.shape)
    rows = [row.reshape(0, *inner) if row.shape == (0,) else row for row in rows]
    for n, row in enumerate(rows):
        if not row.ndim or row.shape[1:] != inner:
            raise differs(lead, n, "not of one shape", "")
    lengths = np.array([len(row) for row in rows], np.int64)
    values = np.concatenate(rows) if rows else np.empty((0, *inner), dtype)
    return Ragged(values, offsets_of(lengths))
