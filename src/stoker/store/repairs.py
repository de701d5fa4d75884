"""Named repairs of values: parsed from text, fitted once, replayed for ever.

Enters: texts such as "clip:0.001,0.999@Flow Bytes/s", and a sample of *training* rows. Leaves:
fitted repairs whose numbers are in the manifest, so that the same change is made at inference,
bit for bit. Costs: fitting sorts the sample; applying is one pass, 16 MB of temporaries.

| text | what it does to x | NaN | inf |
|---|---|---|---|
| `clip` or `clip:0.001,0.999` | limits x to these quantiles | stays | becomes the quantile |
| `robust` or `robust:0.25,0.75` | (x - median) / (distance of the quantiles) | stays | stays |
| `asinh` or `asinh:scale=1` | asinh(x / scale); scale: median non-zero magnitude | stays | stays |
| `fill:median`, `fill:0` | puts the median or the number where x is NaN | filled | stays |
| `min-denominator:r=a/b,min=0.01` | r becomes a / b with b kept 0.01 or more from 0 | if a or b | if a |

`@name,name` after any of the first four limits it to these columns; there a backslash goes before
`,` and backslash inside a name, and in min-denominator before `@`, `/`, `:` and `=` too. Repairs
apply in the order given, and each is fitted on the result of those before. Only finite values are used
for fitting. No repair invents a value for NaN, except `fill`, whose name says so.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from stoker.display import nearest, quoted
from stoker.errors import InputError
from stoker.store.fields import Array

Json = Any

_EXAMPLES = {
    "clip": "clip or clip:0.001,0.999",
    "robust": "robust or robust:0.25,0.75",
    "asinh": "asinh or asinh:scale=1",
    "fill": "fill:median or fill:0",
    "min-denominator": "min-denominator:ratio=close/vwap,min=0.01",
}
REPAIRS = tuple(_EXAMPLES)
_BLOCK_VALUES = 2**20


def escape_name(name: str) -> str:
    """Return a column name as it is written after `@`."""
    return re.sub(r"([\\,])", r"\\\1", name)


def _unescape(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text, flags=re.DOTALL)


def _split(text: str, mark: str, times: int = -1) -> list[str]:
    """Split at `mark` where no backslash stands before it; keeps the backslashes."""
    marks = [
        match.start() for match in re.finditer(r"\\.|" + mark, text, re.DOTALL) if match[0] == mark
    ]
    cuts = [-1, *(marks if times < 0 else marks[:times]), len(text)]
    return [text[first + 1 : last] for first, last in pairwise(cuts)]


@dataclass(frozen=True)
class RepairSpec:
    """A repair as it was asked for. `str()` gives back a text that parses to the same."""

    name: str  # one of `REPAIRS`
    # its numbers: two quantiles, the scale, the fill value, the least denominator. Empty if they are fitted
    # (asinh, `fill:median`).
    numbers: tuple[float, ...] = ()
    # the columns it is for; None for all. For min-denominator the ratio, the numerator and the denominator.
    columns: tuple[str, ...] | None = None

    @property
    def is_fitted(self) -> bool:
        """Whether its numbers come from rows of the data: not `fill:0`, `asinh:scale=1` and `min-denominator`."""
        return self.name in ("clip", "robust") or not self.numbers

    def __str__(self) -> str:
        """Return the text form."""
        numbers = ",".join(repr(number) for number in self.numbers)
        columns = self.columns or ()
        if self.name == "min-denominator":
            ratio, numerator, denominator = (
                re.sub(r"([\\,@/:=])", r"\\\1", column) for column in columns
            )
            ratio = f"\\{ratio}" if ratio.strip() == "min" else ratio
            return f"{self.name}:{ratio}={numerator}/{denominator},min={numbers}"
        if self.name == "asinh" and numbers:
            numbers = f"scale={numbers}"
        if self.name == "fill" and not numbers:
            numbers = "median"
        text = f"{self.name}:{numbers}" if numbers else self.name
        return text if self.columns is None else f"{text}@{','.join(map(escape_name, columns))}"


def parse_repair(text: str) -> RepairSpec:
    """Read one repair as typed after `--repair`."""
    # Names keep their spaces: the columns of CICIDS2017 begin with one.
    body, *rest = _split(text, "@", 1)
    head, *tail = _split(body, ":", 1)
    name, options = head.strip(), tail[0] if tail else ""
    if name not in REPAIRS:
        raise InputError(
            f"there is no repair {name!r} in {text!r}.",
            ", ".join(REPAIRS),
            f"--repair {quoted(nearest(name, REPAIRS) or 'clip')}",
        )
    columns = None
    if rest:
        columns = tuple(_unescape(name) for name in _split(rest[0], ","))
        if not all(columns):
            raise _refusal(text, "a column name after '@' is empty.")
        if len(set(columns)) < len(columns):
            raise _refusal(text, "a column is named twice after '@'.")
    if name == "min-denominator":
        if columns is not None:
            raise _refusal(text, "min-denominator names its columns itself; it takes no '@'.")
        return _parse_min_denominator(text, options)
    options = options.strip()
    numbers: tuple[float, ...] = ()
    if name in ("clip", "robust"):
        numbers = (0.001, 0.999) if name == "clip" else (0.25, 0.75)
        if options:
            numbers = tuple(_parse_number(text, part) for part in options.split(","))
        if len(numbers) != 2 or not 0 <= numbers[0] < numbers[1] <= 1:
            raise _refusal(text, "it takes two rising quantiles between 0 and 1.")
    elif name == "asinh" and options:
        key, _, number = options.partition("=")
        if key.strip() != "scale":
            raise _refusal(text, f"{key.strip()!r} is not an option; 'scale' is the only one.")
        numbers = (_parse_number(text, number),)
        if numbers[0] <= 0:
            raise _refusal(text, "the scale must be above zero.")
    elif name == "fill" and options != "median":
        numbers = (_parse_number(text, options),)
    return RepairSpec(name, numbers, columns)


def _refusal(text: str, why: str) -> InputError:
    name = text.strip().split(":")[0].split("@")[0].strip()
    example = _EXAMPLES.get(name, "clip")
    typed = example.rpartition(" or ")[2]
    return InputError(
        f"cannot read the repair {text!r}: {why}", example, f"--repair {quoted(typed)}"
    )


def _parse_number(text: str, number: str) -> float:
    try:
        value = float(number)
    except ValueError:
        raise _refusal(text, f"{number!r} is not a number.") from None
    if not math.isfinite(value):
        raise _refusal(text, f"{number!r} is not a finite number.")
    return value


def _parse_min_denominator(text: str, options: str) -> RepairSpec:
    least: float | None = None
    names: tuple[str, ...] = ()
    for option in _split(options, ","):
        key, *value = _split(option, "=", 1)
        if not value:
            raise _refusal(text, f"{option!r} is not of the form name=value.")
        if key.strip() == "min":
            least = _parse_number(text, value[0])
            continue
        names = tuple(_unescape(part) for part in (key, *_split(value[0], "/", 1)))
        if len(names) != 3 or not all(names):
            raise _refusal(text, f"{value[0]!r} is not of the form numerator/denominator.")
    if not names or least is None or least <= 0:
        raise _refusal(text, "it takes ratio=numerator/denominator and min=number above zero.")
    return RepairSpec("min-denominator", (least,), names)


@dataclass(frozen=True)
class FittedRepair:
    """A repair with its numbers: all that replaying it needs."""

    spec: RepairSpec  # what was asked for
    # the columns it changes (min-denominator: ratio, numerator, denominator)
    columns: tuple[str, ...]
    low: tuple[float, ...] = ()  # per column: lower bound, centre, or fill value; () where unused
    high: tuple[float, ...] = ()  # per column: upper bound or scale; () where unused
    notes: tuple[str, ...] = ()  # what a user should know about the fit

    def to_json(self) -> Json:
        """Return the repair as JSON; numbers keep every bit."""
        return {
            "repair": str(self.spec),
            "columns": list(self.columns),
            "low": list(self.low),
            "high": list(self.high),
            "notes": list(self.notes),
        }

    @classmethod
    def from_json(cls, json: Mapping[str, Json]) -> FittedRepair:
        """Read what `to_json` wrote."""
        return cls(
            parse_repair(json["repair"]),
            tuple(json["columns"]),
            tuple(float(number) for number in json["low"]),
            tuple(float(number) for number in json["high"]),
            tuple(json["notes"]),
        )


def fitted_among(repairs: Sequence[Mapping[str, Json]]) -> str:
    """Return the names of the repairs of a manifest whose numbers come from rows of the data, or ""."""
    specs = [parse_repair(each["repair"]) for each in repairs]
    return ", ".join(dict.fromkeys(str(spec) for spec in specs if spec.is_fitted))


def fit_repairs(
    specs: Sequence[RepairSpec], sample: Array, columns: Sequence[str]
) -> list[FittedRepair]:
    """Fit repairs in order, each on the result of those before.

    The sample must have training rows only; anything else leaks.
    """
    sample = _checked(sample, columns)
    fitted: list[FittedRepair] = []
    for spec in specs:
        repair = _fit(spec, sample, columns)
        fitted.append(repair)
        sample = apply_repairs(sample, [repair], columns)
    return fitted


def _checked(values: Array, columns: Sequence[str]) -> Array:
    values = np.asarray(values)
    if values.dtype.kind != "f":
        raise InputError(
            f"repairs were asked for values of dtype {values.dtype}.",
            "float16, float32 or float64: repairs never change a dtype silently",
            "values.astype(np.float32)",
        )
    if values.ndim < 2 or values.shape[-1] != len(columns):
        raise InputError(
            f"{len(columns)} column names for values of shape {values.shape}.",
            "values (rows, ..., columns) with one name per column",
        )
    return values


def _fit(spec: RepairSpec, sample: Array, columns: Sequence[str]) -> FittedRepair:
    # Tables are packed without the spaces around their names, which a user may have typed.
    there = set(columns)
    chosen = tuple(
        name.strip() if name not in there and name.strip() in there else name
        for name in spec.columns or columns
    )
    places = _places(chosen, columns, str(spec))
    if spec.name == "min-denominator":
        return FittedRepair(spec, chosen)
    low: list[float] = []
    high: list[float] = []
    notes: list[str] = []
    for name, place in zip(chosen, places, strict=True):
        values = sample[..., place].astype(np.float64).ravel()
        values = values[np.isfinite(values)]
        if len(values) == 0:
            raise InputError(
                f"column {name!r} has no finite value to fit {str(spec)!r} on.",
                "a column with at least one number",
                drop_option(name, place) or "leave the column out of the array",
            )
        least, most, note = _fit_column(spec, values)
        low.append(least)
        high.append(most)
        notes += [f"{name}: {note}"] if note else []
    return FittedRepair(spec, chosen, tuple(low), tuple(high), tuple(notes))


def drop_option(name: str, column: int) -> str | None:
    """Return the option of `stoker pack` that drops a column; arrays have numbers for names, and no such option."""
    return None if name == str(column) else f"--drop {quoted(name)}"


def _fit_column(spec: RepairSpec, values: Array) -> tuple[float, float, str]:
    """Return the two numbers of one column, and a note where the fit is poor."""
    if spec.name == "clip":
        # Values that occur, rounded inwards: interpolating towards 1e15 would let it in.
        low = float(np.quantile(values, spec.numbers[0], method="higher"))
        high = float(np.quantile(values, spec.numbers[1], method="lower"))
        low, high = min(low, high), max(low, high)
        flat = low == high and values.min() < values.max()
        return low, high, f"clip leaves one value, {low:g}; use asinh instead" if flat else ""
    if spec.name in ("asinh", "fill") and spec.numbers:
        (number,) = spec.numbers
        return (0.0, number, "") if spec.name == "asinh" else (number, 0.0, "")
    if spec.name == "asinh":
        values = np.abs(values[values != 0])
        if len(values) == 0:
            return 0.0, 1.0, "asinh found only zeros; scale 1 is used"
    median = float(np.quantile(values, 0.5, method="lower"))
    if spec.name == "asinh":
        return 0.0, median, ""
    if spec.name == "fill":
        return median, 0.0, ""
    low, high = (float(q) for q in np.quantile(values, spec.numbers, method="lower"))
    if not 0 < high - low < math.inf:
        return median, 1.0, "robust found no spread between its quantiles; scale 1 is used"
    return median, high - low, ""


def _places(chosen: Sequence[str], columns: Sequence[str], what: str) -> list[int]:
    where = {name: place for place, name in enumerate(columns)}
    missing = [name for name in chosen if name not in where]
    if missing:
        near = nearest(missing[0], columns)
        shown = ", ".join(repr(name) for name in columns[:8])
        raise InputError(
            f"the repair {what!r} names the column {missing[0]!r}, which is not there.",
            f"{len(columns)} columns: {shown}{' …' if len(columns) > 8 else ''}",
            f"--repair {quoted(what.replace(missing[0], near))}"
            if near
            else r"a backslash before , @ / : = inside a name",
        )
    return [where[name] for name in chosen]


def apply_repairs(values: Array, fitted: Sequence[FittedRepair], columns: Sequence[str]) -> Array:
    """Return repaired values: a new array of the same shape and dtype.

    The result of a row depends on that row alone, so that parts give what the whole gives.
    Arithmetic is float64, rounded once per repair.
    """
    values = _checked(values, columns)
    repaired = np.array(values, order="C", copy=True)
    table = repaired.reshape(-1, len(columns))
    step = max(1, _BLOCK_VALUES // max(1, len(columns)))
    for repair in fitted:
        places = _places(repair.columns, columns, str(repair.spec))
        for start in range(0, len(table), step):
            with np.errstate(all="ignore"):
                _apply(repair, table[start : start + step], places)
    return repaired


def _apply(repair: FittedRepair, block: Array, places: list[int]) -> None:
    """Repair a block of rows in place."""
    name = repair.spec.name
    x = block[:, places].astype(np.float64)
    if name == "min-denominator":
        denominator = np.maximum(np.abs(x[:, 2]), repair.spec.numbers[0])
        denominator = np.where(x[:, 2] < 0, -denominator, denominator)
        block[:, places[0]] = x[:, 1] / denominator
        return
    low, high = np.array(repair.low), np.array(repair.high)
    if name == "clip":
        # A bound that the dtype cannot hold would turn back into the infinity it replaces.
        top = float(np.finfo(block.dtype).max)
        x = np.clip(x, np.maximum(low, -top), np.minimum(high, top))
    elif name == "robust":
        x = (x - low) / high
    elif name == "asinh":
        x = np.arcsinh(x / high)
    else:
        x = np.where(np.isnan(x), low, x)
    block[:, places] = x
