"""Passes over built shards: repairs, and the removal of quarantined samples.

Enters: a stage (a folder of finished shards). Leaves: another stage beside it; the first one is
only read. Costs: one read and one write of every shard, in parallel; fitting reads at most
200,000 rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from stoker.errors import InputError, QualityError, Refusal
from stoker.packing.cluster import ClusterWorkers
from stoker.packing.workers import Poison, Workers
from stoker.report import Progress
from stoker.store.fields import Dense, ShardData
from stoker.store.inspection import Inspection
from stoker.store.manifest import BLOCK_BYTES, FieldInfo, Manifest, ShardInfo
from stoker.store.quality import bad_rows, limits_of
from stoker.store.reader import Store, assemble_store
from stoker.store.repairs import apply_repairs, fit_repairs, parse_repair
from stoker.store.shard import load_shard, write_shard
from stoker.strict_json import exact_text, parse_json

_FIT_ROWS = 200_000
_FIT_BYTES = 256 << 20
_TRAIN = 0


@dataclass(frozen=True)
class StagedPart:
    """One part of a stage: its shard on disk, with its facts; `job` is the job's digest."""

    index: int
    label: str
    file: str
    first_row: int
    shard: ShardInfo
    fields: dict[str, FieldInfo]
    refused: tuple[Refusal, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)
    job: str = ""
    ignored: dict[str, int] = field(default_factory=dict)

    def to_text(self) -> str:
        """Serialise, for a job that is resumed."""
        return exact_text(_STAGED_PART.dump_python(self))

    @classmethod
    def from_text(cls, text: str) -> StagedPart:
        """Read back what `to_text` wrote."""
        return _STAGED_PART.validate_python(parse_json(text))


_STAGED_PART = TypeAdapter(StagedPart)
Change = Callable[[StagedPart, ShardData], tuple[ShardData, Sequence[Refusal]]]
"""Takes a part and its fields; returns the changed fields, and refusals for what was left out."""


@dataclass(frozen=True)
class Stage:
    """A folder of finished shards on the way to a store."""

    folder: Path
    parts: Sequence[StagedPart]

    @property
    def num_samples(self) -> int:
        """Samples in all parts."""
        return sum(part.shard.num_samples for part in self.parts)


def open_stage(stage: Stage) -> Store:
    """Open a stage like the store that it will become."""
    manifest = Manifest(
        num_samples=stage.num_samples,
        fields=dict(stage.parts[0].fields),
        shards=[part.shard for part in stage.parts],
        block_bytes=BLOCK_BYTES,
    )
    return assemble_store(stage.folder, manifest)


def change_stage(
    stage: Stage,
    change: Change,
    folder: Path,
    label: str,
    *,
    workers: Workers | ClusterWorkers,
    progress: Progress,
) -> tuple[Stage, list[Refusal]]:
    """Write a changed copy of every shard into `folder`; return them, and refusals for what was left out."""
    progress.start(label, stage.num_samples, "samples")
    source = stage.folder  # `work` is pickled: without the list of all parts

    def work(part: StagedPart, _poison: Poison) -> StagedPart:
        with open_stage(Stage(source, [part])) as store:
            fields, refused = change(part, load_shard(store.shards[0], part.fields))
        return replace(
            part,
            shard=write_shard(folder / part.shard.file, fields, part.label),
            fields={name: FieldInfo.of(data) for name, data in fields.items()},
            refused=(*part.refused, *refused),
        )

    done: dict[int, StagedPart] = {}
    for index, part in workers.run(work, stage.parts):
        done[index] = part
        progress.advance(part.shard.num_samples)
    parts = [done[part.index] for part in stage.parts]
    pairs = zip(stage.parts, parts, strict=True)
    left_out = [refusal for old, new in pairs for refusal in new.refused[len(old.refused) :]]
    return Stage(folder, parts), left_out


# -- repairs -------------------------------------------------------------------------------


def fit_stage(
    stage: Stage, repairs: Sequence[str]
) -> tuple[Change, dict[str, list[dict[str, Any]]]]:
    """Fit the named repairs on evenly spaced rows of the training split; of everything when there is no split.

    Returns:
        The change that applies them to the features, and per field the fitted repairs as the manifest records them.
    """
    name = "features"
    info = stage.parts[0].fields.get(name)
    is_table = info is not None and info.kind == "dense" and len(info.shape) == 1
    if info is None or not is_table or np.dtype(info.dtype).kind != "f":
        raise InputError(
            f"--repair {repairs[0]} was given, but the store has no float table 'features'.",
            "repairs on `pack table` and `pack arrays` with features of shape (rows, columns)",
            "leave --repair out",
        )
    columns = info.columns or [str(number) for number in range(info.shape[0])]
    with open_stage(stage) as store:
        rows = np.arange(store.num_samples)
        if "split" in store.fields:
            rows = np.flatnonzero(store.read_rows("split", 0, store.num_samples) == _TRAIN)
        row_bytes = max(1, info.shape[0] * np.dtype(info.dtype).itemsize)
        limit = max(1, min(_FIT_ROWS, _FIT_BYTES // row_bytes))
        if len(rows) > limit:
            rows = rows[np.linspace(0, len(rows) - 1, limit).astype(np.int64)]
        sample = store.gather(name, rows)
    fitted = fit_repairs(list(map(parse_repair, repairs)), sample, columns)

    def repair(_part: StagedPart, fields: ShardData) -> tuple[ShardData, Sequence[Refusal]]:
        data = fields[name]
        assert isinstance(data, Dense)
        values = apply_repairs(data.values, fitted, columns).astype(data.values.dtype)
        return {**fields, name: Dense(values, data.columns)}, ()

    return repair, {name: [each.to_json() for each in fitted]}


# -- quarantine ----------------------------------------------------------------------------


def quarantine(inspection: Inspection) -> Change:
    """Return the change that leaves out every sample with a refused value, each with its reason."""
    stuck = [finding for finding in inspection.refused if finding.field not in inspection.stats]
    if stuck:
        raise QualityError(f"{stuck[0]}", "rows that rise in time", stuck[0].remedy)
    names: dict[str, set[str]] = {}
    for finding in inspection.refused:
        names.setdefault(finding.field, set()).add(finding.name)
    bad = {
        name: (limits_of(inspection.stats[name]), ", ".join(sorted(what)))
        for name, what in names.items()
    }

    def keep(part: StagedPart, fields: ShardData) -> tuple[ShardData, Sequence[Refusal]]:
        dropped = np.zeros(part.shard.num_samples, dtype=bool)
        reasons: dict[int, str] = {}
        for name, (limits, what) in bad.items():
            touched = fields[name].touching(bad_rows(fields[name].values, limits))
            for row in np.flatnonzero(touched & ~dropped):
                reasons[int(row)] = f"{name}: {what}"
            dropped |= touched
        gone = {each.line for each in part.refused if each.unit == "row" and each.line is not None}
        total = part.shard.num_samples + len(gone)
        rows = [row for row in range(part.first_row, part.first_row + total) if row not in gone]
        file = part.file or part.label
        refused = [
            Refusal(file, rows[row], why, "row", kind=f"quality gate: {why}")
            for row, why in sorted(reasons.items())
        ]
        return {name: data.keep(~dropped) for name, data in fields.items()}, refused

    return keep
