"""The three kinds of field, as arrays in memory on their way into a shard.

Enters: numpy arrays made by a source. Leaves: checked, contiguous, little-endian arrays with
the dataset names they will have inside the HDF5 shard. Costs: one pass over the offsets; the
values are not copied unless their layout forces it.

dense    `(n, ...)`, one row per sample, dataset `/<field>`.
ragged   `values` and `offsets`, dataset group `/<field>`; sample i owns
         `values[offsets[i]:offsets[i + 1]]`.
series   `rows` of a series stored once, and per sample the exclusive `ends` of its window: sample i is
         `rows[ends[i] - window : ends[i]]`. A time series has the open `time` of each row and a `gap` flag as well;
         a stream of tokens has neither. Windows are never stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from stoker.errors import InputError

Array = np.ndarray[Any, np.dtype[Any]]
FieldKind = Literal["dense", "ragged", "series"]
PARTS: Mapping[str, Mapping[str, str | None]] = {
    "dense": {"": None},
    "ragged": {"/values": None, "/offsets": "<i8"},
    "series": {"/rows": None, "/time": "<i8", "/gap": "|u1", "/ends": "<i8"},
}
"""Kind of field to its datasets: suffix of the name, and dtype; None is the field's own."""
TIMED_PARTS = ("/time", "/gap")  # those that only a series with a time has


def attribute_of(part: str) -> str:
    """Return the name of the field's attribute that holds the dataset with this suffix."""
    return part.removeprefix("/") or "values"


class SplitCodes(np.ndarray[Any, np.dtype[Any]]):
    """One number per sample: 0 train, 1 val, 2 test, 3 purged. A `Loader` takes the samples of one of them.

    Attributes:
        train: The sorted numbers of the samples for training.
        val: Those for validation.
        test: Those for the test.
    """

    @property
    def train(self) -> Array:  # noqa: D102
        return np.flatnonzero(np.asarray(self) == 0)

    @property
    def val(self) -> Array:  # noqa: D102
        return np.flatnonzero(np.asarray(self) == 1)

    @property
    def test(self) -> Array:  # noqa: D102
        return np.flatnonzero(np.asarray(self) == 2)


def _stored(values: Array, what: str) -> Array:
    """Return `values` little-endian and C-contiguous; refuse what HDF5 cannot hold plainly."""
    values = np.asarray(values)
    if values.dtype.kind not in "biuf":
        raise InputError(
            f"{what} has dtype {values.dtype}.",
            "bool, integers and floats",
            "np.stack([values.real, values.imag], -1)"
            if values.dtype.kind == "c"
            else "store text as a ragged uint8 field: stoker.store.Ragged.from_strings(texts)",
        )
    return np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<"))


class _Field:
    kind: FieldKind

    def arrays(self, name: str) -> dict[str, Array]:
        """Datasets of the shard, by path."""
        found = {name + part: getattr(self, attribute_of(part)) for part in PARTS[self.kind]}
        return {dataset: values for dataset, values in found.items() if values is not None}


@dataclass(frozen=True)
class Dense(_Field):
    """One row per sample.

    Attributes:
        values: `(n, ...)`.
        columns: Names of the last axis, where it has names.
    """

    values: Array
    columns: tuple[str, ...] | None = None
    kind: Literal["dense"] = field(default="dense", init=False)

    def __post_init__(self) -> None:
        if np.ndim(self.values) == 0:
            raise InputError(
                "a dense field was given a scalar.",
                "an array of shape (n, ...)",
                "wrap it in a list",
            )
        object.__setattr__(self, "values", _stored(self.values, "a dense field"))
        _check_columns(self.columns, self.values)

    @property
    def num_samples(self) -> int:
        """Rows of the field."""
        return int(self.values.shape[0])

    def keep(self, mask: Array) -> Dense:
        """Return the field with only the samples where `mask` is true."""
        return Dense(self.values[mask], self.columns)

    def touching(self, bad: Array) -> Array:
        """Return which samples touch a bad row."""
        return bad


@dataclass(frozen=True)
class Ragged(_Field):
    """A different number of values per sample."""

    values: Array  # `(m, ...)`, all samples one after the other
    offsets: Array  # `(n + 1,)` int64, from 0 to m, never falling
    # "utf8" when the values are text, "picture" when they are the bytes of picture files, else None
    encoding: Literal["utf8", "picture"] | None = None
    kind: Literal["ragged"] = field(default="ragged", init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", _stored(self.values, "a ragged field"))
        offsets = np.ascontiguousarray(self.offsets, dtype="<i8")
        object.__setattr__(self, "offsets", offsets)
        total = len(self.values)
        if offsets.ndim != 1 or len(offsets) < 1 or offsets[0] != 0 or offsets[-1] != total:
            raise InputError(
                f"ragged offsets of shape {offsets.shape} do not span {total} values.",
                f"n + 1 numbers from 0 to {total}",
                "np.concatenate([[0], np.cumsum(lengths)])",
            )
        if len(offsets) > 1 and (np.diff(offsets) < 0).any():
            row = int(np.argmax(np.diff(offsets) < 0))
            raise InputError(f"ragged offsets fall after row {row}.", "offsets that never fall")

    @classmethod
    def from_strings(cls, texts: list[str]) -> Ragged:
        """Store text as utf-8 bytes, one string per sample."""
        encoded = [text.encode() for text in texts]
        lengths = np.fromiter(map(len, encoded), dtype=np.int64, count=len(encoded))
        return cls(np.frombuffer(b"".join(encoded), dtype=np.uint8), offsets_of(lengths), "utf8")

    @property
    def num_samples(self) -> int:
        """Samples of the field."""
        return len(self.offsets) - 1

    @property
    def columns(self) -> None:
        """Values have no columns."""
        return None

    def keep(self, mask: Array) -> Ragged:
        """Return the field with only the samples where `mask` is true."""
        lengths = np.diff(self.offsets)
        values = self.values[np.repeat(mask, lengths)]
        return Ragged(values, offsets_of(lengths[mask]), self.encoding)

    def touching(self, bad: Array) -> Array:
        """Return which samples touch a bad value."""
        return _any_between(bad, self.offsets[:-1], self.offsets[1:])


@dataclass(frozen=True)
class Series(_Field):
    """Windows over a series that is stored once."""

    rows: Array  # `(r, features)` values, in time order; `(r,)` where a row is one number
    # `(r,)` int64, open time of each row in nanoseconds since 1970; None for a series without times
    time: Array | None
    ends: Array  # `(n,)` int64, exclusive end row of each sample's window; `ends >= window`
    window: int  # rows per window
    # `(r,)` uint8, 1 where rows are missing right before this one; None without times
    gap: Array | None
    columns: tuple[str, ...] | None  # names of the features; None where they have none
    # time from a row's open to its close: a row is known at `time + duration_ns`; None without times
    duration_ns: int | None
    kind: Literal["series"] = field(default="series", init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", _stored(self.rows, "a series"))
        object.__setattr__(self, "ends", np.ascontiguousarray(self.ends, dtype="<i8"))
        num_rows = len(self.rows)
        if (self.time is None) != (self.gap is None) or (self.time is None) != (
            self.duration_ns is None
        ):
            raise InputError(
                "a series has only some of time, gap and duration_ns.", "all of them, or none"
            )
        if self.time is not None and self.gap is not None:
            time = np.ascontiguousarray(self.time, dtype="<i8")
            gap = np.ascontiguousarray(self.gap, dtype=np.uint8)
            object.__setattr__(self, "time", time)
            object.__setattr__(self, "gap", gap)
            if self.rows.ndim != 2 or time.shape != (num_rows,) or gap.shape != (num_rows,):
                raise InputError(
                    f"a series has rows {self.rows.shape}, time {time.shape}, gap {gap.shape}.",
                    "rows (r, features), time (r,), gap (r,)",
                )
            if num_rows > 1 and (np.diff(time) <= 0).any():
                row = int(np.argmax(np.diff(time) <= 0)) + 1
                raise InputError(
                    f"series time goes backwards or repeats at row {row}.", "strictly rising time"
                )
        elif self.rows.ndim not in (1, 2):
            raise InputError(f"a series has rows {self.rows.shape}.", "rows (r,) or (r, features)")
        if len(self.ends) and not (self.window <= self.ends.min() and self.ends.max() <= num_rows):
            raise InputError(
                f"window ends run from {self.ends.min()} to {self.ends.max()}.",
                f"{self.window} (the window) to {num_rows} (the rows)",
            )
        _check_columns(self.columns, self.rows)

    @property
    def num_samples(self) -> int:
        """Samples, not rows."""
        return len(self.ends)

    @property
    def values(self) -> Array:
        """The rows, as other kinds call them."""
        return self.rows

    def keep(self, mask: Array) -> Series:
        """Return the windows where `mask` is true; rows all stay."""
        return replace(self, ends=self.ends[mask])

    def touching(self, bad: Array) -> Array:
        """Return which samples have a bad row in their window."""
        return _any_between(bad, self.ends - self.window, self.ends)


FieldData = Dense | Ragged | Series
ShardData = Mapping[str, FieldData]


def _any_between(bad: Array, starts: Array, stops: Array) -> Array:
    counts = np.concatenate([[0], np.cumsum(bad)])
    touched: Array = counts[stops] > counts[starts]
    return touched


def offsets_of(lengths: Array) -> Array:
    """Return the n + 1 offsets of n lengths."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _check_columns(columns: tuple[str, ...] | None, values: Array) -> None:
    if columns is not None and len(columns) != values.shape[-1]:
        raise InputError(
            f"{len(columns)} column names for {values.shape[-1]} columns.", "one name per column"
        )
