"""What the best checkpoint of a run is worth: one value for the log, the command line, JSON and the page.

Enters: numbers that a recipe counted over the test samples. Leaves: `Evaluation`, as plain values and back; the verdict
on whether the model is worth having. Costs nothing: no torch, no data.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from stoker.runs.record import as_mapping, as_mappings, as_number
from stoker.strict_json import exact_text, parse_json
from stoker.units import format_count

Worth = Literal["better", "unclear", "worse", "unknown"]
ExampleKind = Literal["text", "image", "spectrum", "series"]
_MOST_EXAMPLES = 24


@dataclass(frozen=True)
class Confusion:
    """How often each class was taken for which."""

    names: tuple[str, ...]  # of the classes, in the order of the counts
    # one list per true class: how many samples were answered as each class
    counts: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Curve:
    """A line of an evaluation, such as a calibration or what a strategy earned."""

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
    key: str  # of the sample: its row, file name or time
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
        """The baseline that does best by `compared_by`; None where there is none to compare with."""
        name, more = self.compared_by
        known = [
            (who, metrics[name])
            for who, metrics in self.baselines.items()
            if math.isfinite(metrics.get(name, math.nan))
        ]
        return (max if more else min)(known, key=lambda pair: pair[1]) if known else None

    @property
    def worth(self) -> Worth:
        """Whether the model does better than every baseline, by more than the test samples leave open."""
        name, more = self.compared_by
        best, reached = self.best_baseline, self.metrics.get(name, math.nan)
        if best is None or not math.isfinite(reached):
            return "unknown"
        if not (reached > best[1] if more else reached < best[1]):
            return "worse"
        low, high = self.intervals.get(name, (reached, reached))
        return "better" if (low > best[1] if more else high < best[1]) else "unclear"

    @property
    def verdict(self) -> str:
        """The same in a sentence, with the numbers."""
        name, _ = self.compared_by
        best, reached = self.best_baseline, self.metrics.get(name, math.nan)
        if best is None or self.worth == "unknown":
            return f"There is no baseline to compare {name} with."
        span = self.intervals.get(name)
        shown = f"{name} {reached:.4g}"
        if span is not None and all(map(math.isfinite, span)):
            shown += f" ({span[0]:.4g} to {span[1]:.4g})"
        against = (
            f"{shown} on {format_count(self.num_samples, 'test sample')}, {best[0]} {best[1]:.4g}"
        )
        return {
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
        """Return what a log says, whoever wrote it; None where there is no evaluation in it.

        Whatever has another form than `to_json` gives it is left out.
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
            metrics=_numbers(data.get("metrics")),
            intervals={
                str(name): (float(span[0]), float(span[1]))
                for name, span in as_mapping(data.get("intervals")).items()
                if isinstance(span, list) and len(span) == 2 and None not in map(as_number, span)
            },
            baselines={
                str(name): _numbers(each)
                for name, each in as_mapping(data.get("baselines")).items()
            },
            groups={
                str(kind): {str(name): _numbers(each) for name, each in as_mapping(rows).items()}
                for kind, rows in as_mapping(data.get("groups")).items()
            },
            confusion=Confusion(names, counts) if names and len(counts) == len(names) else None,
            curves=tuple(
                Curve(
                    str(each.get("title", "")),
                    str(each.get("along", "")),
                    str(each.get("unit", "")),
                    _lines(each.get("lines")),
                )
                for each in as_mappings(data.get("curves"))
            ),
            importance=_numbers(data.get("importance")),
            examples=tuple(
                Example(
                    each["kind"],
                    str(each.get("key", "")),
                    str(each.get("truth", "")),
                    str(each.get("answer", "")),
                    {str(name): str(url) for name, url in as_mapping(each.get("pictures")).items()},
                    _lines(each.get("lines")),
                )
                for each in as_mappings(data.get("examples"))[:_MOST_EXAMPLES]
                if each.get("kind") in ("text", "image", "spectrum", "series")
            ),
            notes=_texts(data.get("notes")),
            colours={
                str(name): str(colour) for name, colour in as_mapping(data.get("colours")).items()
            },
        )


def _texts(values: Any) -> tuple[str, ...]:
    return tuple(map(str, values)) if isinstance(values, list) else ()


def _numbers(values: Any) -> dict[str, float]:
    found = {str(name): as_number(value) for name, value in as_mapping(values).items()}
    return {name: value for name, value in found.items() if value is not None}


def _lines(values: Any) -> dict[str, list[tuple[float, float]]]:
    return {
        str(name): [
            (float(point[0]), float(point[1]))
            for point in points
            if isinstance(point, list) and len(point) == 2 and None not in map(as_number, point)
        ]
        for name, points in as_mapping(values).items()
        if isinstance(points, list)
    }


def metric_words(metric: str) -> str:
    """Return a metric's name with spaces: a narrow column breaks it there."""
    return metric.replace("_", " ")
