"""The doctor inside a Lightning run: what its steps wait for, and the predicted gain of a remedy.

Enters: a Lightning `Trainer` that fits. Leaves: a `Consultation` by the doctor's own rules, logged at the end and
written to `doctor.json` if a run folder is given. Costs about 0.25 ms of the host per step.

The probe of `stoker doctor -- python train.py` measures, in this process: DataLoaders and their workers,
backward passes and updates, `.item()` and pageable copies, by file and line. Its hooks are in torch from the
begin of the fit to its end. Of a stoker loader the waits are measured. What the probe can only do from outside
(torch's profiler over some steps, h5py, workers that are spawned) only the command does.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import DataLoader

from stoker.display import command, printable
from stoker.doctor import attach
from stoker.doctor.findings import Consultation
from stoker.doctor.findings_page import gain_text, spread_text
from stoker.doctor.measurements import Measurements
from stoker.doctor.probe import clocks, fetching, hooks, loading, recorder, sampling, steps
from stoker.doctor.rules import consult
from stoker.doctor.transcript import read_folder
from stoker.doctor.transcript_measures import measure
from stoker.frameworks.adapted import AdaptedLoader, count_samples
from stoker.frameworks.lightning_watch import (
    UNTOLD,
    WaitClock,
    pl,
    rank_zero_info,
    require_adapted,
)
from stoker.ownership import SIGNATURE, temporary_folder, write_text
from stoker.runs.reading import DOCTOR_NAME
from stoker.strict_json import json_text
from stoker.train.batches import iterate_tensors


@contextlib.contextmanager
def probing(folder: Path) -> Iterator[recorder.Recorder]:
    """Yield a recorder of this process; the probe's hooks are in torch inside the block."""
    seen = recorder.Recorder(str(folder))
    before, recorder._RECORDER = recorder._RECORDER, seen
    handles = [
        register_optimizer_step_pre_hook(steps._before_update),
        register_optimizer_step_post_hook(steps._after_update),
    ]
    try:
        with hooks.lent():
            loading.install(torch)
            fetching.install(torch)
            steps._torch = torch
            hooks.replace(torch.autograd, "backward", steps._timed_backward)
            yield seen
    finally:
        for handle in handles:
            handle.remove()
        seen.finish()
        sampling._pid = 0  # ends the thread that looks at what is loaded
        recorder._RECORDER = before if before is not None else seen  # a thread may still read it


class DoctorCallback(pl.Callback):
    """Measures a fit on the first rank, and says at its end what would make it faster.

    Args:
        run_dir: Folder for `doctor.json`, which `stoker report` shows; None writes nothing.
        say: Told the findings, line by line; Lightning's own log by default.

    Attributes:
        consultation: Measurements and findings, once the fit is over.
    """

    def __init__(
        self,
        run_dir: str | Path | None = None,
        *,
        say: Callable[[str], None] = rank_zero_info,
    ) -> None:
        self.consultation: Consultation | None = None
        self._run_dir = None if run_dir is None else Path(run_dir)
        self._say = say
        self._stack: contextlib.ExitStack | None = None
        self._folder = Path()
        self._seen: recorder.Recorder | None = None
        self._clock: WaitClock | None = None
        self._stoker: AdaptedLoader | None = None
        self._facts: dict[str, Any] = {}
        self._delay = 0.0

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin to measure."""
        if not trainer.is_global_zero:
            return
        with contextlib.ExitStack() as stack:
            self._folder = stack.enter_context(temporary_folder("stoker-doctor-"))
            self._seen = stack.enter_context(probing(self._folder))
            self._clock = stack.enter_context(WaitClock(trainer, self._note_wait))
            self._stack = stack.pop_all()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Find out which kind of loader feeds the run."""
        require_adapted(trainer)
        loader = trainer.train_dataloader
        self._stoker = loader if isinstance(loader, AdaptedLoader) else None
        self._facts = {} if isinstance(loader, DataLoader) else _facts_of(loader)
        if self._seen is not None and self._facts:
            self._seen.loaders["lightning"] = self._facts

    def _note_wait(self, began: float, ended: float) -> None:
        """Count a wait for a loader that the probe does not see: one that is no DataLoader."""
        seen, delay = self._seen, clocks.run_delay()
        queued, self._delay = delay - self._delay, delay
        if seen is not None and self._facts:
            loading._add_wait(seen, began, ended, min(queued, ended - began))
            seen.loader_of_step = self._facts["number"]

    def on_train_batch_start(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Count the samples of a loader that is no DataLoader."""
        if self._seen is not None and self._facts:
            self._seen.batches += 1
            self._seen.samples += count_samples(batch)
            if self._facts["batch_bytes"] is None:
                self._facts["batch_bytes"] = sum(t.nbytes for t in iterate_tensors(batch))
        self._delay = clocks.run_delay()

    def on_train_batch_end(self, *_: Any) -> None:
        """Count the time queued for a core from now on as part of the wait."""
        self._delay = clocks.run_delay()

    def on_validation_start(self, *_: Any) -> None:
        """Leave this step and the next one out of the measurement: they include the validation."""
        if self._seen is not None:
            self._seen.disturb(2)

    def on_train_end(self, *_: Any) -> None:
        """Report the findings."""
        self._judge()

    def on_exception(self, *_: Any) -> None:
        """Report the findings of the steps before the error."""
        self._judge()

    def _judge(self) -> None:
        stack, seen, self._stack, self._seen = self._stack, self._seen, None, None
        if stack is None or seen is None:
            return
        with stack:
            seen.finish()
            ran = command("python", *sys.argv)
            measured = measure(read_folder(self._folder), ran, attach.machine_facts())
        if self._facts and self._clock is not None and not self._clock.num_waits:
            measured = replace(measured, wait_seconds=None, notes=(*measured.notes, UNTOLD))
        self.consultation = consult(self._with_loader(measured))
        if self._run_dir is not None:
            self._run_dir.mkdir(parents=True, exist_ok=True)
            document = {"generator": SIGNATURE, **self.consultation.to_json()}
            write_text(self._run_dir / DOCTOR_NAME, json_text(document, indent=1) + "\n")
        for line in describe(self.consultation):
            self._say(printable(line))

    def _with_loader(self, measured: Measurements) -> Measurements:
        """Return the measurements with the facts of a stoker loader."""
        if self._stoker is None or measured.loader is None:
            return measured
        loader = self._stoker.loader
        facts = replace(
            measured.loader,
            kind="stoker",
            workers=loader.store.threads,
            tier=loader.tier,
            where=loader.store.name,
        )
        return replace(measured, loader=facts)


def _facts_of(loader: Any) -> dict[str, Any]:
    """Return the facts that the probe records of a DataLoader, for another kind of loader."""
    return {
        "number": 0,
        "workers": 0,
        "batch_size": getattr(loader, "batch_size", None),
        **dict.fromkeys(("pin_memory", "persistent_workers", "prefetch_factor", "start_method")),
        **dict.fromkeys(("where", "dataset_where", "collate_where", "batch_bytes")),
        "batches": 0,
        "epochs": [],
        "ends": [],
        "length": loading._length(loader),
    }


def describe(consultation: Consultation) -> list[str]:
    """Return the doctor's report as lines."""
    measured = consultation.measurements
    if measured.step_seconds is None:
        return [f"doctor: {line}" for line in (consultation.verdict, *measured.notes)]
    rate, share = measured.samples_per_second, measured.wait_share
    first = f"doctor: a step takes {spread_text(measured.step_seconds)}"
    first += "" if rate is None else f", {rate:,.0f} samples/s"
    first += "" if share is None else f", {share:.0%} of it waiting for data"
    lines = [f"{first}; {measured.steps:,} steps measured"]
    for number, finding in enumerate(consultation.findings, 1):
        lines.append(f"doctor: {number}. {finding.name}  {gain_text(finding)}  {finding.title}")
        lines += [f"doctor:    - {line}" for line in finding.evidence]
        lines.append(f"doctor:    remedy: {finding.remedy}")
    if not consultation.findings:
        lines.append(f"doctor: {consultation.verdict}")
    return [*lines, *(f"doctor: note: {note}" for note in measured.notes)]
