"""The evaluation of a run's best checkpoint: one value for the log, the command line, JSON and the page.

Enters: numbers that a recipe counted over the test samples. Leaves: `Evaluation`, as plain values and back; the verdict
on whether the model beats its baselines. Costs nothing: no torch, no data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, TypeVar

from stoker.report import as_mapping, as_mappings, as_number
from stoker.strict_json import exact_text, parse_json
from stoker.units import format_count

Worth = Literal["better", "unclear", "worse", "few", "unknown"]
ExampleKind = Literal["text", "image", "spectrum", "series"]
_MOST_EXAMPLES = 24
_FEWEST = 10
"""Test samples below which no model is judged: the interval of so few is not to be trusted."""
T = TypeVar("T")


@dataclass(frozen=True)
class Confusion:
    """How often samples of each class were answered as each class."""

    names: tuple[str, ...]  # of the classes, in the order of the counts
    # one list per true class: how many samples were answered as each class
    counts: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Curve:
    """A chart of an evaluation, such as a calibration or the earnings of a strategy."""

    title: str
    along: str
    unit: str
    lines: Mapping[str, Sequence[tuple[float, float]]]


@dataclass(frozen=True)
class Example:
    """One sample with its truth and the model's answer, to be drawn."""

    # How: "text" shows `truth` and `answer` alone; "image" shows `pictures` (name to a PNG as a data URL);
    # "spectrum" draws `lines` "truth" up and "answer" down; "series" draws `lines` over x
    kind: ExampleKind
    key: str  # key of the sample: its row, file name or time
    truth: str = ""  # in words
    answer: str = ""  # in words
    pictures: Mapping[str, str] = field(default_factory=dict)  # name to `data:image/png;base64,...`
    # name to (x, y) points
    lines: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Evaluation:
    """The best weights on the test samples, beside the baselines of the same run.

    Attributes:
        num_samples: Test samples that were counted.
        compared_by: The metric that the model and the baselines are compared by, and whether more is better.
        metrics: Of the model, over all test samples.
        intervals: Metric to its 95 % confidence interval.
        baselines: Name ("majority", "gradient boosting") to its metrics on the same samples. Chance, or what needs no
            fit, first; the strong simple one last.
        groups: What the rows are ("class", "side", "horizon") to name of the row to its metrics, in order.
        confusion: Of a classifier.
        curves: More to draw.
        importance: Input to the loss of `compared_by` when its values are permuted; largest first.
        examples: At most 24.
        notes: What a reader should know: how baselines were fitted, what was left out.
        colours: Class to its colour in the pictures of examples, as `#rrggbb`.
    """

    num_samples: int
    compared_by: tuple[str, bool]
    metrics: Mapping[str, float]
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    baselines: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    groups: Mapping[str, Mapping[str, Mapping[str, float]]] = field(default_factory=dict)
    confusion: Confusion | None = None
    curves: tuple[Curve, ...] = ()
    importance: Mapping[str, float] = field(default_factory=dict)
    examples: tuple[Example, ...] = ()
    notes: tuple[str, ...] = ()
    colours: Mapping[str, str] = field(default_factory=dict)

    @property
    def best_baseline(self) -> tuple[str, float] | None:
        """The best baseline by `compared_by`, with its value; None where there is none to compare with."""
        name, more = self.compared_by
        known = [
            (who, metrics[name])
            for who, metrics in self.baselines.items()
            if math.isfinite(metrics.get(name, math.nan))
        ]
        return (max if more else min)(known, key=lambda pair: pair[1]) if known else None

    @property
    def worth(self) -> Worth:
        """Whether the model beats every baseline: "better" only if its whole confidence interval does."""
        name, more = self.compared_by
        best, reached = self.best_baseline, self.metrics.get(name, math.nan)
        if best is None or not math.isfinite(reached):
            return "unknown"
        if self.num_samples < _FEWEST:
            return "few"
        if not (reached > best[1] if more else reached < best[1]):
            return "worse"
        low, high = self.intervals.get(name, (reached, reached))
        return "better" if (low > best[1] if more else high < best[1]) else "unclear"

    @property
    def verdict(self) -> str:
        """`worth` in a sentence, with the numbers."""
        name, _ = self.compared_by
        best, reached = self.best_baseline, self.metrics.get(name, math.nan)
        if best is None or self.worth == "unknown":
            return f"There is no baseline to compare {name} with."
        span = spell_interval(self.intervals.get(name), "{:.4g}".format)
        shown = f"{name} {reached:.4g}" + (f" ({span})" if span not in ("", "n/a") else "")
        samples = format_count(self.num_samples, "test sample")
        against = f"{shown} on {samples}, {best[0]} {best[1]:.4g}"
        return {
            "few": f"A model is judged by at least {_FEWEST} test samples: {against}.",
            "better": f"The model is better than its baselines: {against}.",
            "unclear": f"The model may be no better than its baseline {best[0]}, which is in its interval: {against}.",
            "worse": f"The model is not worth training: its baseline {best[0]} is as good or better: {against}.",
        }[self.worth]

    def to_json(self) -> dict[str, Any]:
        """Return plain values; the verdict is among them."""
        name, more_is_better = self.compared_by
        values: dict[str, Any] = {
            **asdict(replace(self, examples=self.examples[:_MOST_EXAMPLES])),
            "compared_by": name,
            "more_is_better": more_is_better,
            "worth": self.worth,
            "verdict": self.verdict,
        }
        plain: dict[str, Any] = parse_json(exact_text(values))  # lists for tuples
        return plain

    @classmethod
    def from_json(cls, values: Any) -> Evaluation | None:
        """Return the evaluation in a log of any version; None where there is none.

        Parts in another form than that of `to_json` are left out.
        """
        data = as_mapping(values)
        count = as_number(data.get("num_samples"))
        if count is None or not isinstance(data.get("compared_by"), str):
            return None
        confusion = as_mapping(data.get("confusion"))
        names = _texts(confusion.get("names"))
        counts = tuple(
            tuple(int(as_number(cell) or 0) for cell in row)
            for row in confusion.get("counts") or []
            if isinstance(row, list) and len(row) == len(names)
        )
        return cls(
            num_samples=int(count),
            compared_by=(data["compared_by"], bool(data.get("more_is_better"))),
            metrics=known_numbers(data.get("metrics")),
            intervals=_known(data.get("intervals"), _pair),
            baselines=_known(data.get("baselines"), known_numbers),
            groups=_known(data.get("groups"), lambda rows: _known(rows, known_numbers)),
            confusion=Confusion(names, counts) if names and len(counts) == len(names) else None,
            curves=tuple(
                Curve(
                    _text(each, "title"),
                    _text(each, "along"),
                    _text(each, "unit"),
                    _known(each.get("lines"), _points),
                )
                for each in as_mappings(data.get("curves"))
            ),
            importance=known_numbers(data.get("importance")),
            examples=tuple(
                Example(
                    each["kind"],
                    _text(each, "key"),
                    _text(each, "truth"),
                    _text(each, "answer"),
                    _known(each.get("pictures"), str),
                    _known(each.get("lines"), _points),
                )
                for each in as_mappings(data.get("examples"))[:_MOST_EXAMPLES]
                if each.get("kind") in ("text", "image", "spectrum", "series")
            ),
            notes=_texts(data.get("notes")),
            colours=_known(data.get("colours"), str),
        )


def _text(values: Mapping[str, Any], name: str) -> str:
    return str(values.get(name, ""))


def _texts(values: Any) -> tuple[str, ...]:
    return tuple(map(str, values)) if isinstance(values, list) else ()


def _known(values: Any, read: Callable[[Any], T | None]) -> dict[str, T]:
    """Return the values of a mapping that `read` accepts, by name."""
    found = {str(name): read(value) for name, value in as_mapping(values).items()}
    return {name: value for name, value in found.items() if value is not None}


def known_numbers(values: Any) -> dict[str, float]:
    """Return the numbers of a mapping, by name."""
    return _known(values, as_number)


def _pair(values: Any) -> tuple[float, float] | None:
    if not isinstance(values, list) or len(values) != 2 or None in map(as_number, values):
        return None
    return float(values[0]), float(values[1])


def _points(values: Any) -> list[tuple[float, float]] | None:
    if not isinstance(values, list):
        return None
    return [pair for pair in map(_pair, values) if pair is not None]


def spell_interval(
    span: tuple[float, float] | None, spell: Callable[[float], str], to: str = " to "
) -> str:
    """Return the ends of an interval; n/a for ends that are not finite, "" where there is none."""
    if span is None:
        return ""
    return to.join(map(spell, span)) if all(map(math.isfinite, span)) else "n/a"


def metric_words(metric: str) -> str:
    """Return a metric's name with spaces: a narrow column breaks it there."""
    return metric.replace("_", " ")
