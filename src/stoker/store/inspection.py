"""Looking at all values once: statistics per field, and the quality gate's findings.

Enters: a store, or fields in memory as a source builds them. Leaves: an `Inspection`. Costs: one
read, scanned at about 0.3 GB/s a core; memory for a piece of 32 MB and the bounded statistics.

Looked at: float fields of every kind, and whole-number tables that have column names. Labels,
packed bits and text are not measurements: "constant" or "repeated" says nothing of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from stoker.bounds import require_memory
from stoker.errors import StoreError
from stoker.report import Progress, Silent
from stoker.store.fields import PARTS, Array, ShardData
from stoker.store.manifest import FieldInfo
from stoker.store.quality import (
    Finding,
    judge,
    judge_time,
    sorted_findings,
)
from stoker.store.reader import Store
from stoker.store.table_stats import TableStats

_PIECE_BYTES = 32 << 20
_ROW_COPIES = 4  # as read, in native order, as floats, and the temporaries of a block
_VALUES = {kind: next(iter(parts)) for kind, parts in PARTS.items()}
_TARGET_FIELD, _TIME_FIELD = "targets", "time"
_FIXED = ("conditions",)
"""Fields whose columns do not depend on the data: most are constant, and no user can drop them."""


@dataclass(frozen=True)
class Inspection:
    """The result of an inspection: statistics by field (labels, packed bits and text have none), and what is wrong."""

    stats: Mapping[str, TableStats]
    findings: tuple[Finding, ...]

    @property
    def refused(self) -> list[Finding]:
        """The findings that the gate does not let pass."""
        return [finding for finding in self.findings if finding.severity == "refuse"]

    def lines(self, only_refused: bool = False) -> list[str]:
        """Return one line per finding, for people."""
        return list(map(str, sorted_findings(self.refused if only_refused else self.findings)))

    def summary(self) -> dict[str, Any]:
        """Return what the manifest records of it."""
        return {
            "fields": {name: {"rows": stats.num_rows} for name, stats in self.stats.items()},
            "findings": [finding.to_json() for finding in self.findings],
        }


class _Piece(NamedTuple):
    field: str
    first_row: int
    values: Array
    columns: list[str] | None

    def scan(self) -> TableStats:
        first_row, field = self.first_row, self.field
        return TableStats.scan(self.values, self.columns, first_row=first_row, field=field)


def inspect_store(store: Store, progress: Progress | None = None) -> Inspection:
    """Look at every value of a store (or of a plain HDF5 file), in two threads or more."""
    progress = progress or Silent()
    wanted = {name: info for name, info in store.fields.items() if _worth_a_look(info)}
    num_bytes = sum(
        shard.rows[name + _VALUES[info.kind]] * _row_bytes(info)
        for name, info in wanted.items()
        for shard in store.manifest.shards
    )
    progress.start("inspecting", num_bytes, "bytes")
    stats: dict[str, TableStats] = {}
    largest = max((_row_bytes(info) for info in wanted.values()), default=0)
    fix = "store smaller rows: the first dimension counts samples"
    require_memory(_ROW_COPIES * largest, f"inspecting one row of {store.name}", fix, StoreError)
    depth = max(0, min(store.threads, store.threads * _PIECE_BYTES // max(1, largest)))
    # numpy releases the GIL in the scan's long loops: threads, no copies between processes.
    with ThreadPoolExecutor(store.threads) as pool:
        for piece, part in _ahead(pool, _store_pieces(store, wanted), depth):
            _merge(stats, part)
            progress.advance(piece.values.nbytes)
    findings = [*_judge(stats), *_judge_store_time(store)]
    return Inspection(stats, tuple(findings))


def inspect_parts(parts: Iterable[ShardData]) -> Inspection:
    """Look at fields that are not in a store yet, part by part."""
    stats: dict[str, TableStats] = {}
    for fields in parts:
        for name, data in fields.items():
            if not _worth_a_look(FieldInfo.of(data)):
                continue
            first = stats[name].num_rows if name in stats else 0
            _merge(stats, TableStats.scan(data.values, data.columns, first_row=first, field=name))
    return Inspection(stats, tuple(_judge(stats)))


def _worth_a_look(info: FieldInfo) -> bool:
    kind = np.dtype(info.dtype).kind
    return kind == "f" or (kind in "iu" and info.columns is not None)


def _row_bytes(info: FieldInfo) -> int:
    return math.prod(info.shape) * np.dtype(info.dtype).itemsize


def _store_pieces(store: Store, wanted: Mapping[str, FieldInfo]) -> Iterator[_Piece]:
    for name, info in wanted.items():
        first = 0
        for shard in store.shards:
            array = shard.arrays[name + _VALUES[info.kind]]
            for low, high in array.pieces(_PIECE_BYTES):
                yield _Piece(name, first + low, array.read(low, high), info.columns)
            first += len(array)
        if first == 0:
            empty = np.empty((0, *info.shape), dtype=np.dtype(info.dtype).newbyteorder("="))
            yield _Piece(name, 0, empty, info.columns)


def _ahead(
    pool: ThreadPoolExecutor, pieces: Iterator[_Piece], depth: int
) -> Iterator[tuple[_Piece, TableStats]]:
    """Scan pieces in threads, and yield results in order, with at most `depth` pieces waiting in memory.

    A scan that fails raises here, in its turn; scans that were submitted before it end with the pool.
    """
    waiting = []
    for piece in pieces:
        waiting.append((piece, pool.submit(piece.scan)))
        if len(waiting) > depth:
            first, future = waiting.pop(0)
            yield first, future.result()
    for first, future in waiting:
        yield first, future.result()


def _merge(stats: dict[str, TableStats], part: TableStats) -> None:
    known = stats.get(part.field)
    stats[part.field] = part if known is None else known.merge(part)


def _judge(stats: Mapping[str, TableStats]) -> list[Finding]:
    target = stats.get(_TARGET_FIELD)
    if target is not None and len(target.columns) != 1:
        target = None
    findings: list[Finding] = []
    for name, about in stats.items():
        # Label leaks are searched for where the target is one column over the same rows.
        is_alike = target is not None and about.num_rows == target.num_rows
        found = judge(about, target=target if is_alike and name != _TARGET_FIELD else None)
        unusual = ("constant", "duplicate-rows") if name in _FIXED else ()
        findings += [finding for finding in found if finding.name not in unusual]
    return sorted_findings(findings)


def _judge_store_time(store: Store) -> list[Finding]:
    """Time must rise within each shard: a shard is one symbol or one file."""
    findings: list[Finding] = []
    info = store.fields.get(_TIME_FIELD)
    if info is None or info.kind != "dense" or info.shape or np.dtype(info.dtype).kind != "i":
        return findings
    first = 0
    for shard in store.shards:
        time = shard.whole(_TIME_FIELD)
        findings += judge_time(time, first_row=first, field=_TIME_FIELD)
        first += len(time)
    return findings
