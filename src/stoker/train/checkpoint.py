"""Checkpoints of a run: the newest and the best. They load without running code, and resume only the same run.

Enters: a state of tensors, numbers, texts, lists, tuples and dicts, with its step, epoch, metrics and the
identity of the run. Leaves: `step-000000120.pt` files, `best.pt` (a second name of one of them, not a
second copy), and the state back, bit for bit. Costs: one write of the bytes (see `checkpoint_file`); a
list reads 64 KiB per file.

A kill, a full disk or a power cut leaves the older checkpoints: a file is written under a temporary name,
forced to the disk and renamed, and only then are older ones removed.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from stoker.address import masked_values
from stoker.errors import CorruptError, InputError, StoreError, unwritable
from stoker.ownership import (
    fsync,
    mark_once,
    name_again,
    refused,
    remove_file,
    remove_temporaries,
)
from stoker.strict_json import exact_text, parse_json
from stoker.train.checkpoint_file import (
    Saved,
    is_checkpoint,
    loadable,
    read_description,
    read_file,
    write_file,
)
from stoker.train.generators import capture_rng, restore_rng
from stoker.train.settings import present_names

__all__ = [
    "BEST_NAME",
    "Checkpoints",
    "Loaded",
    "Saved",
    "capture_rng",
    "differences",
    "load_checkpoint",
    "restore_rng",
]

FORMAT = 1
BEST_NAME = "best.pt"
_NAME = re.compile(r"step-(\d{9,})\.pt")
_RUN = "run"


@dataclass(frozen=True)
class Loaded:
    """A checkpoint in memory.

    Attributes:
        saved: Description of the checkpoint.
        state: The saved state; its tensors are on the CPU, or where `map_location` put them.
        identity: Identity of the run that saved it.
        changes: Allowed differences from the identity of the run that loads it, with both values.
    """

    saved: Saved
    state: Mapping[str, Any]
    identity: Mapping[str, Any]
    changes: tuple[str, ...] = ()


def load_checkpoint(path: str | Path, map_location: str | torch.device = "cpu") -> Loaded:
    """Read and verify one checkpoint file, in any folder.

    Raises:
        CorruptError: Bytes are missing or changed; the file and the one before it are named.
        StoreError: There is no such file.
    """
    path = Path(path)
    try:
        saved, payload = read_file(path, map_location)
    except CorruptError as error:
        raise _corrupt(path, error.given) from error
    return Loaded(saved, payload["state"], payload["identity"])


class Checkpoints:
    """The checkpoints of one run, in one folder. One process saves (see `RunLock`); any may read.

    Args:
        folder: Made at the first save.
        keep_last: Newest checkpoints that are kept, besides the best.
        monitor: The metric that decides the best; a checkpoint without it is never the best.
        maximise: Whether more of it is better.
    """

    def __init__(
        self,
        folder: str | Path,
        keep_last: int = 2,
        monitor: str = "loss",
        maximise: bool = False,
    ) -> None:
        if keep_last < 1:
            raise InputError(f"keep_last is {keep_last}.", "1 or more", "keep_last=2")
        self.folder = Path(folder)
        self.keep_last = keep_last
        self.monitor = monitor
        self.maximise = maximise

    def save(
        self,
        state: Mapping[str, Any],
        step: int,
        epoch: int,
        metrics: Mapping[str, float] | None = None,
        identity: Mapping[str, Any] | None = None,
    ) -> Saved:
        """Write a checkpoint, then remove those that are no longer kept. Blocks until it is on disk.

        Args:
            state: Tensors of any dtype and device, numbers, texts, None, lists, tuples and dicts.
            step: Number in the file's name; an older file of the same step is replaced.
            epoch: For the description.
            metrics: Metrics of validation, if there was one.
            identity: Facts that must be equal to resume (config, model, data); `load_for` compares them.

        Raises:
            InputError: An entry of the state could not be loaded again without running code; its place is named.
            StoreError: The disk is full or not writable; the older checkpoints are untouched.
        """
        if step < 0:
            raise InputError(f"step is {step}.", "0 or more", "the number of updates done")
        payload = {
            "format": FORMAT,
            "identity": _as_json(identity or {}),
            "state": loadable(state),
        }
        run_id = self._make_room()
        described = {
            "format": FORMAT,
            "run_id": run_id,
            "number": 1 + max((saved.number for saved in self.list()), default=0),
            "step": int(step),
            "epoch": int(epoch),
            "metrics": {name: float(value) for name, value in (metrics or {}).items()},
            "saved_at": round(time.time(), 3),
        }
        path = self.folder / f"step-{step:09d}.pt"
        write_file(path, payload, described)
        self._tidy(run_id)
        return read_description(path)

    def list(self) -> tuple[Saved, ...]:
        """Return the checkpoints from oldest to newest; damaged files are in `damaged()`."""
        found = (_described_or_none(path) for path in _files(self.folder))
        return tuple(sorted((saved for saved in found if saved), key=lambda saved: saved.number))

    def damaged(self) -> tuple[Path, ...]:
        """Return the files whose end is missing or unreadable, by step."""
        return tuple(path for path in _files(self.folder) if _described_or_none(path) is None)

    def latest(self) -> Saved | None:
        """Return the newest checkpoint, or None where there is none.

        Raises:
            CorruptError: The file of a later step is damaged: the user must decide whether to resume from
                an older one.
        """
        saved, damaged = self.list(), self.damaged()
        if damaged and (not saved or _step_of(damaged[-1]) > saved[-1].step):
            raise _corrupt(damaged[-1], "its end is missing or unreadable")
        return saved[-1] if saved else None

    def best(self) -> Saved | None:
        """Return the checkpoint with the best monitored metric; of equal ones, the earlier."""
        return self._best_of(self.list())

    def load(
        self, path: str | Path | None = None, map_location: str | torch.device = "cpu"
    ) -> Loaded:
        """Read a checkpoint and verify its bytes; the latest one if no path is given.

        Raises:
            CorruptError: Bytes are missing or changed; the file and the one before it are named.
            StoreError: There is none.
        """
        if path is None:
            latest = self.latest()
            if latest is None:
                raise StoreError(
                    f"no checkpoint in {self.folder}.",
                    "the folder of a run that saved",
                    "train first",
                )
            path = latest.path
        return load_checkpoint(path, map_location)

    def load_for(
        self,
        identity: Mapping[str, Any],
        path: str | Path | None = None,
        map_location: str | torch.device = "cpu",
        free: Collection[str] = (),
    ) -> Loaded:
        """Like `load`, but refuse a checkpoint with another identity.

        Args:
            identity: Identity of the run that loads the checkpoint.
            path: The latest checkpoint by default.
            map_location: Device of the loaded tensors.
            free: Dotted keys of the identity that may differ, such as "settings.epochs".

        Raises:
            InputError: Another run saved it; every differing key is shown with both values.
        """
        loaded = self.load(path, map_location)
        changes = differences(masked_values(present_names(loaded.identity)), _as_json(identity))
        refused = [
            str(change)
            for change in changes
            if change.place not in free and not _is_new_fact(change)
        ]
        if refused:
            raise InputError(
                f"{loaded.saved.path} is of another run:",
                "a checkpoint of the same config, model and data",
                "change these back, or train in a new run directory",
                refused,
            )
        # Older checkpoints do not have all that may differ.
        known = tuple(str(change) for change in changes if change.old is not _ABSENT)
        return replace(loaded, changes=known)

    def check_names(self) -> None:
        """Raise if the folder of a new run has files with the names of checkpoints that are not checkpoints.

        Raises:
            InputError: There is a `best.pt` or `step-*.pt` that stoker did not write.
        """
        best = self.folder / BEST_NAME
        others = [path.name for path in self.damaged()]
        if os.path.lexists(best) and not is_checkpoint(best):
            others.append(BEST_NAME)
        if others:
            raise refused(self.folder, "a run needs these names for its checkpoints", others)

    def _make_room(self) -> str:
        """Create and mark the folder, and return its id; remove leftovers of an interrupted save.

        On a full disk, the space of these leftovers may be needed for the next checkpoint.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            mark = mark_once(self.folder, _RUN)
        except OSError as error:
            raise unwritable(self.folder, error) from error
        remove_temporaries(
            self.folder, lambda name: name == BEST_NAME or _NAME.fullmatch(name) is not None
        )
        return mark.id

    def _best_of(self, saved: tuple[Saved, ...]) -> Saved | None:
        sign = -1 if self.maximise else 1
        scores = [
            (sign * entry.metrics[self.monitor], entry.number, entry)
            for entry in saved
            if not math.isnan(entry.metrics.get(self.monitor, math.nan))
        ]
        return min(scores)[2] if scores else None

    def _tidy(self, run_id: str) -> None:
        """Link `best.pt` to the best checkpoint, then remove those of this run that are neither new nor best."""
        saved = self.list()
        best = self._best_of(saved)
        kept = {entry.path for entry in saved[-self.keep_last :]}
        if best is not None:
            kept.add(best.path)
            if not name_again(best.path, self.folder / BEST_NAME, is_checkpoint):
                # The disk has no hard links: the best one is kept under its step's name only.
                with contextlib.suppress(OSError):
                    remove_file(self.folder / BEST_NAME, is_checkpoint)
        for entry in saved:
            # Files of other runs, which the user has copied here, are not removed.
            if entry.path not in kept and entry.run_id == run_id:
                # A file that cannot be removed takes space, but must not end the run.
                with contextlib.suppress(OSError):
                    remove_file(entry.path, is_checkpoint)
        fsync(self.folder)


def _files(folder: Path) -> list[Path]:
    try:
        found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)]
    except OSError:
        return []
    return sorted(found, key=_step_of)


def _step_of(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else -1


def _described_or_none(path: Path) -> Saved | None:
    try:
        return read_description(path)
    except StoreError:
        return None


def _corrupt(path: Path, what: str) -> CorruptError:
    others = [other for other in _files(path.parent) if other.name != path.name]
    usable = [other for other in others if _described_or_none(other)]
    earlier = [other for other in usable if _step_of(other) < _step_of(path)]
    return CorruptError(
        f"{path} is not a whole checkpoint: {what}.",
        "the bytes as they were saved",
        f"resume from {(earlier or usable)[-1]}, or remove the damaged file"
        if usable
        else "best.pt or step-*.pt of a run; there is no other checkpoint beside it",
    )


# -- identity --------------------------------------------------------------------------------------


def _as_json(identity: Mapping[str, Any]) -> Any:
    """Return the identity after a round trip through JSON, which turns tuples into lists.

    Secrets in URLs are left out, so that a run can be resumed after a password was changed.
    """
    try:
        return masked_values(parse_json(exact_text(identity, default=_path_text)))
    except (TypeError, ValueError) as error:
        raise InputError(
            f"the identity of the run cannot be written as JSON: {error}.",
            "a mapping of names to plain values",
            "settings.to_json()",
        ) from error


def _path_text(value: Any) -> str:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{value!r} is a {type(value).__name__}")


_ABSENT = object()


@dataclass(frozen=True)
class Difference:
    """A key that differs between the identities of a checkpoint and of a run.

    Attributes:
        place: The key, dotted.
        old: Its value in the checkpoint; `_ABSENT` if the checkpoint has none.
        new: Its value in the run.
    """

    place: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.place}: {_shown(self.old)} in the checkpoint, {_shown(self.new)} now"


def _is_new_fact(change: Difference) -> bool:
    """Whether a change is a fact of the data that older checkpoints lack; a digest compares the data itself."""
    return change.old is _ABSENT and change.place.startswith("facts.")


def differences(old: Any, new: Any, place: str = "") -> list[Difference]:
    """Return the keys that differ between two identities, with both values."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        return [
            change
            for key in sorted({*old, *new})
            for change in differences(
                old.get(key, _ABSENT), new.get(key, _ABSENT), f"{place}.{key}" if place else key
            )
        ]
    # As in JSON, 1 equals 1.0 but not true. NaN equals NaN here.
    alike = isinstance(old, bool) == isinstance(new, bool) and old == new
    # A recipe names only the files that it has; older checkpoints have null for missing ones.
    unsaid = all(value is None or value is _ABSENT for value in (old, new))
    if alike or unsaid or repr(old) == repr(new):
        return []
    return [Difference(place, old, new)]


def _shown(value: Any) -> str:
    return "absent" if value is _ABSENT else exact_text(value)
