"""Compares two examinations, to check in CI if a change made a job slower (`stoker doctor compare`).

Enters: two JSON documents of `stoker doctor --out`. Leaves: a `Comparison`: figures side by side, and the reasons why
the second is worse. Costs milliseconds. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.display import command
from stoker.doctor.cases import WORTHWHILE, milliseconds
from stoker.doctor.findings import Finding
from stoker.doctor.measurements import Measurements
from stoker.errors import InputError, refuse_special
from stoker.strict_json import parse_json


@dataclass(frozen=True)
class Examination:
    """One document of `stoker doctor --out`."""

    path: Path  # the file
    measurements: Measurements  # what was measured
    findings: tuple[Finding, ...]  # what was found
    verdict: str  # the result in one sentence


@dataclass(frozen=True)
class Comparison:
    """The result of comparing two examinations."""

    figures: tuple[tuple[str, str, str], ...]  # (name, before, after) as text
    worse: tuple[str, ...]  # why the second is worse; empty if it is not
    notes: tuple[str, ...]  # why the comparison may be misleading: other commands, devices or cores

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "is_worse": bool(self.worse),
            "worse": list(self.worse),
            "figures": [
                {"name": name, "before": before, "after": after}
                for name, before, after in self.figures
            ],
            "notes": list(self.notes),
        }


def read_examination(path: str | Path) -> Examination:
    """Read a document that `stoker doctor --out FILE` wrote.

    Raises:
        InputError: There is no such file, or it holds something else.
        CorruptError: Its measurements are of another version.
    """
    again = command("stoker", "doctor", "--out", "after.json", "--", "python", "train.py")
    wanted = "a file that `stoker doctor --out FILE` wrote"
    refuse_special(path, "the examination", InputError, is_read_once=True)
    try:
        document = parse_json(Path(path).read_bytes())
        measured, listed = document["measurements"], list(document["findings"])
        findings = tuple(map(Finding.from_json, listed))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}.", wanted, again) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path} is something else.", wanted, again) from error
    return Examination(
        Path(path), Measurements.from_json(measured), findings, str(document.get("verdict", ""))
    )


def compare(before: Examination, after: Examination, tolerance: float) -> Comparison:
    """Compare a new examination of a job with the reference `before`.

    `tolerance` is the share of the rate that may be lost. A smaller loss does not count, nor one where the quartiles of
    the steps overlap.

    Raises:
        InputError: The first examination measured no step.
    """
    old, new = before.measurements, after.measurements
    if old.step_seconds is None:
        raise InputError(
            f"{before.path} measured no step.",
            "an examination of a job that trains",
            command("stoker", "doctor", "--out", "before.json", "--", "python", "train.py"),
        )
    worse = []
    if new.step_seconds is None:
        worse.append(f"no step was measured in {after.path.name}")
    else:
        was, is_now = old.samples_per_second, new.samples_per_second
        if was is None or is_now is None:
            was, is_now = 1 / old.step_seconds.median, 1 / new.step_seconds.median
        lost = 1 - is_now / was if was else 0.0
        if lost > tolerance and new.step_seconds.low > old.step_seconds.high:
            worse.append(f"{lost:.0%} of the rate is lost, and {tolerance:.0%} may be")
    known = {finding.name for finding in before.findings}
    worse += [
        f"new: {finding.name}: {finding.title}"
        for finding in after.findings
        if finding.name not in known and (finding.ends_the_run or finding.gain.likely >= WORTHWHILE)
    ]
    return Comparison(_figures(before, after), tuple(worse), tuple(_notes(old, new)))


def _figures(before: Examination, after: Examination) -> tuple[tuple[str, str, str], ...]:
    def shown(one: Examination) -> list[str]:
        measured = one.measurements
        rate, share = measured.samples_per_second, measured.wait_share
        step = measured.step_seconds
        return [
            "n/a" if rate is None else f"{rate:,.0f}",
            "n/a" if step is None else milliseconds(step.median),
            "n/a" if share is None else f"{share:.0%}",
            ", ".join(finding.name for finding in one.findings) or one.verdict,
        ]

    names = ("samples/s", "step", "waiting for data", "findings")
    return tuple(zip(names, shown(before), shown(after), strict=True))


def _notes(old: Measurements, new: Measurements) -> list[str]:
    notes = []
    if old.subject != new.subject:
        notes.append(f"different commands: {old.subject} and {new.subject}")
    for name, was, is_now in (
        ("devices", old.machine.device_name, new.machine.device_name),
        ("numbers of cores", old.machine.cores, new.machine.cores),
    ):
        if was != is_now:
            notes.append(f"different {name}: {was or 'n/a'} and {is_now or 'n/a'}")
    return notes
