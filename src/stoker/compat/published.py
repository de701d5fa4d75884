"""The figures the documents publish (S0-8, S0-10, S0-11), computed by the plan instead of copied.

Enters: nothing. Leaves: rows of figures and remarks. Costs a millisecond.

The documents write GB and compute GiB in code (2^30). Both are given where it matters.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from stoker.plan.decision import FALLBACK_SHARE, GPU_SHARE, make_plan
from stoker.plan.facts import StoreFacts, array_facts, store_facts
from stoker.store.manifest import FieldInfo, Manifest, ShardInfo
from stoker.units import GB, GIB, format_bytes

CARDS_GB = (8, 12, 16, 24)
TIMEFRAMES = {"M1": (480, 1), "M5": (288, 5), "M15": (192, 15), "H1": (96, 60), "H4": (48, 240)}
"""Window and minutes per bar (S0-11); a sample is a close of M5."""
_BASE_MINUTES, _FEATURES = 5, 128
_PLENTY = 10**8


@dataclass(frozen=True)
class CardRow:
    """One line of S0-10: a card with this much free memory."""

    gpu_memory_bytes: int
    data_bytes: int
    fallback_bytes: int
    batch_size: int


@dataclass(frozen=True)
class CountRow:
    """How many samples of one kind fit into a memory budget."""

    what: str
    sample_bytes: float
    budget: str
    num_samples: int
    remark: str


def published_cards() -> tuple[CardRow, ...]:
    """S0-10: the memory for data and the batch size, by card; computed by `make_plan`."""
    facts, rows = one_series_windows(_PLENTY), []
    for memory in (size * GIB for size in CARDS_GB):
        plans = [
            make_plan(
                facts, gpu_memory_bytes=memory, ram_bytes=32 * GIB, gpu_share=share,
                fallback_share=FALLBACK_SHARE,
            )
            for share in (GPU_SHARE, FALLBACK_SHARE)
        ]  # fmt: skip
        data, fallback = (plan.data_budget_bytes for plan in plans)
        rows.append(CardRow(memory, data, fallback, plans[0].batch_size))
    return tuple(rows)


def published_counts() -> tuple[CountRow, ...]:
    """S0-8 and S0-11: samples that fit, with the documents' figures beside ours."""
    one, five = one_series_windows(_PLENTY), five_timeframe_windows(_PLENTY)
    stored = one_series_windows(51_779)
    features = stored.fields[0].device_bytes
    chunks = -(-stored.num_samples // one.chunk_positions(12 * GIB))
    example = (
        f"its 51,779 samples are {features / GB:.2f} GB = {features / GIB:.2f} GiB of features: "
        f"{chunks} chunk"
    )
    series = five_timeframe_series(1_000_000)
    each = series.device_bytes / series.num_samples
    loose = 12 * GIB // (565 * 1024)
    windows = "1104 x 128, 36 targets", five.sample_bytes
    return (
        CountRow("360 x 167, 36 targets", one.sample_bytes, "12 GiB", one.chunk_positions(12 * GIB), example),
        CountRow(*windows, "12 GiB", five.chunk_positions(12 * GIB),
                 f"the document says 21,000; its 565 KB read as KiB gives {loose:,}"),
        CountRow(*windows, "12 GB", five.chunk_positions(12 * GB),
                 "close to the document's 21,000, but its code computes GiB"),
        CountRow("1104 x 128 stored as series", each, "12 GiB", int(12 * GIB / each),
                 f"each row once: {five.sample_bytes / each:.0f} x more samples in the same bytes"),
    )  # fmt: skip


def one_series_windows(num_samples: int) -> StoreFacts:
    """S0-8: windows of 360 x 167 float32 and 36 targets, written out."""
    return array_facts(num_samples, {"features": ("<f4", (360, 167)), "targets": ("<f4", (36,))})


def five_timeframe_windows(num_samples: int) -> StoreFacts:
    """S0-11: five windows of 128 float32 features and 36 targets, written out."""
    arrays = {name: ("<f4", (steps, _FEATURES)) for name, (steps, _) in TIMEFRAMES.items()}
    return array_facts(num_samples, {**arrays, "targets": ("<f4", (36,))})


def five_timeframe_series(num_samples: int) -> StoreFacts:
    """S0-11 as `stoker pack bars` stores it: the rows of each timeframe once."""
    fields = {
        name: FieldInfo(kind="series", dtype="<f4", shape=[_FEATURES], window=steps)
        for name, (steps, _) in TIMEFRAMES.items()
    }
    rows = {
        f"{name}/rows": num_samples * _BASE_MINUTES // minutes + steps
        for name, (steps, minutes) in TIMEFRAMES.items()
    }
    shard = ShardInfo(
        file="shard-00000.h5", label="", num_samples=num_samples, size_bytes=0, checksum="", rows=rows
    )  # fmt: skip
    fields["targets"] = FieldInfo(kind="dense", dtype="<f4", shape=[36])
    return store_facts(Manifest(num_samples=num_samples, fields=fields, shards=[shard]))


def published_json() -> dict[str, Any]:
    """Return both tables as plain values."""
    return {
        "cards": [asdict(row) for row in published_cards()],
        "counts": [asdict(row) for row in published_counts()],
    }


def describe_cards() -> str:
    """Return the assumptions of the first table, in words."""
    sample = format_bytes(one_series_windows(1).sample_bytes)
    return (
        f"as if all of the card were free; {GPU_SHARE:.0%} for data, {FALLBACK_SHARE:.0%} after an "
        f"out-of-memory; windows of {sample}. In the ring the data share is split over the slots."
    )
