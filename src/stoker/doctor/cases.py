"""The input of every rule: the measurements, the pace of the step, and the wording that rules share.

Enters: `Measurements`. Leaves: a `Case`, findings, and lines of evidence. Costs nothing; pure.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from stoker.display import command
from stoker.doctor.findings import Finding, Gain, Patch
from stoker.doctor.gains import Pace, gain, is_starved, pace_of
from stoker.doctor.measurements import HostCall, LoaderFacts, Measurements
from stoker.units import format_seconds

WORTHWHILE = 1.1
"""A remedy is advised only if its likely gain is at least this; smaller gains are within most machines' noise."""


@dataclass(frozen=True)
class Case:
    """The input of a rule."""

    measured: Measurements  # all measurements

    @cached_property
    def pace(self) -> Pace | None:
        """The pace of the step; None if no step was measured."""
        return pace_of(self.measured)

    @property
    def on_gpu(self) -> bool:
        """Whether the step computes on a GPU."""
        return self.measured.machine.device == "cuda"

    @property
    def cores(self) -> int:
        """Cores that the job may use; if unknown, 2, for which predicted gains are smallest."""
        return self.measured.machine.cores or 2

    @property
    def loader(self) -> LoaderFacts:
        """The loader that feeds the step; one of which nothing is known if there is none."""
        return self.measured.loader or LoaderFacts()

    @property
    def feeding(self) -> tuple[LoaderFacts, Pace] | None:
        """The loader and the pace if the step waits for data; None otherwise."""
        loader = self.measured.loader
        if self.pace is None or loader is None or not is_starved(self.measured):
            return None
        return loader, self.pace

    def share_of_step(self, seconds: float) -> float:
        """Return `seconds` as a share of the median step."""
        step = self.measured.step_seconds
        return seconds / step.median if step and step.median > 0 else 0.0

    def wait_line(self) -> str:
        """Return the first line of evidence of every finding about loading."""
        step, wait = self.measured.step_seconds, self.measured.wait_seconds
        assert step is not None
        assert wait is not None
        return (
            f"of a step of {milliseconds(step.median)}, {milliseconds(wait.median)} "
            f"({self.share_of_step(wait.median):.0%}) is waiting for data"
        )

    def work_line(self) -> str | None:
        """Return a line of evidence with the parts of loading one batch, the largest first; None if none is known."""
        work = self.loader.work
        parts = sorted(((s or 0.0, name) for name, s in work.parts.items()), reverse=True)
        known = [f"{name} {milliseconds(s)}" for s, name in parts if work.share(s) > 0.02]
        if not known:
            return None
        return (
            f"loading one batch takes {milliseconds(work.total)} of one process: {', '.join(known)}"
        )

    def busiest_line(self) -> str | None:
        """Return the line of code in which most loading time was sampled, or the line of the dataset."""
        loader = self.loader
        if loader.busiest_line is None or (loader.busiest_share or 0) < 0.25:
            made = loader.dataset_where
            return f"the dataset is defined at {made}" if made else None
        return f"{loader.busiest_share:.0%} of it was spent at {loader.busiest_line}"

    def cpu_words(self) -> str:
        """Return how busy a worker is, as a clause to append to a line of evidence; "" if unknown."""
        shares = self.loader.worker_cpu_shares
        return f"; a worker keeps {sum(shares) / len(shares):.0%} of a core busy" if shares else ""

    def packed_instead(self) -> tuple[str, str]:
        """Return the command that packs the HDF5 file, and a call of stoker's Loader that reads the store.

        Both are "" where `loader_instead` is.
        """
        call = self.loader_instead()
        if not call:
            return "", ""
        file = self.measured.hdf5[0].name.rpartition(":")[0]
        store = str(Path(file).with_suffix("")) + "-store"
        pack = command("stoker", "pack", "arrays", file, store)
        return pack, call.replace(repr(file), repr(store), 1)

    def loader_instead(self) -> str:
        """Return a call of stoker's Loader that reads the same HDF5 file; "" if no such call is known.

        The datasets must be in one file and have one row per sample.
        """
        read = [data.name.rpartition(":") for data in self.measured.hdf5]
        files = {file for file, _, _ in read}
        lengths = {data.shape[0] for data in self.measured.hdf5 if data.shape}
        names = sorted({name.strip("/") for _, _, name in read})
        flat = all("/" not in name for name in names)
        if self.loader.kind != "torch" or len(files) != 1 or len(lengths) != 1 or not flat:
            return ""
        fields = ", ".join(repr(name) for name in names)
        taken = f"as_tuple=({fields},)" if len(names) == 1 else f"as_tuple=({fields})"
        order = ", order='sequential'" if self.loader.in_order else ""
        return f"stoker.Loader({files.pop()!r}, {self.loader.batch_size or 32}, {taken}{order})"

    def finding(
        self,
        name: str,
        title: str,
        evidence: Iterable[str | None],
        remedy: str,
        gain: Gain,
        ends_the_run: bool = False,
        **patch: Any,
    ) -> Finding:
        """Return a finding; None and empty lines of evidence are left out."""
        return Finding(
            name=name,
            title=title,
            evidence=tuple(line for line in evidence if line),
            remedy=remedy,
            gain=gain,
            samples_per_second=self.measured.samples_per_second,
            patch=Patch(**patch),
            ends_the_run=ends_the_run,
        )

    def advise(self, *args: Any, **kwargs: Any) -> Finding | None:
        """Return what `finding` returns if its likely gain is at least `WORTHWHILE`, else None."""
        found = self.finding(*args, **kwargs)
        return found if found.gain.likely >= WORTHWHILE else None


Rule = Callable[[Case], Finding | None]


def rule_name(rule: Rule) -> str:
    """Return the name of a rule's finding: its function's name with dashes."""
    return rule.__name__.replace("_", "-")


def while_waiting(rule: Callable[[Case, LoaderFacts, Pace], Finding | None]) -> Rule:
    """Turn a function into a rule that applies only if the step waits for its loader."""

    @functools.wraps(rule)
    def asked(case: Case) -> Finding | None:
        return None if case.feeding is None else rule(case, *case.feeding)

    return asked


def milliseconds(seconds: float) -> str:
    """Return a duration such as "12.3 ms", or in seconds from 1 s; three digits, so that similar steps differ."""
    if seconds >= 1:
        return format_seconds(seconds)
    return f"{seconds * 1e3:.3g} ms"


def saved(pace: Pace, seconds: float, low: float = 0.5, likely: float = 0.95) -> Gain:
    """Return the gain if the host saves the share `low`, `likely` or all of `seconds` (high estimate)."""
    return gain(
        pace, pace.saving(seconds * likely), pace.saving(seconds * low), pace.saving(seconds)
    )


def call_lines(calls: Sequence[HostCall]) -> list[str]:
    """Return the three costliest lines of code as evidence."""
    return [
        f"{call.where}: {call.call}, {call.calls_per_step:.3g} times and "
        f"{milliseconds(call.seconds_per_step)} per step{f', in {call.library}' if call.library else ''}"
        for call in calls[:3]
    ]


def at(where: str | None) -> str:
    """Return " at file:line", or nothing."""
    return f" at {where}" if where else ""
