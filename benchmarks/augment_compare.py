"""Measuring augmentation: ours, the peers and the limit, in one run, on this machine.

Enters: a `Work` (see augment_peers.py) and how often to repeat. Leaves: a `Comparison`, one row per way
with the median and the spread, or the reason why it could not be measured. Costs: about half a minute
on a GPU; on a CPU some minutes at 32 x 512 x 512.

Every way is warmed up, then timed by the wall clock over at least `SLICE_SECONDS` of back-to-back
calls that end with a synchronisation, so that launches, parameter drawing and idle gaps are counted.
The ways take turns in each repeat: a noisy moment hits all of them.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch

import augment_peers as peers
from augment_peers import Augment, Inputs, UnavailableError, Work
from stoker.units import format_count

WARMUP_CALLS = 3
SLICE_SECONDS = 0.02
MAX_CALLS = 2000
# More than the 50 MB of an H100's or H200's L2, so that inputs come from memory as in training.
SPREAD_BYTES = 160_000_000

Kind = Literal["cpu", "peer", "ours", "limit"]
Call = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """Milliseconds per batch; `spread` is (max - min) / median over the repeats."""

    median_ms: float
    spread: float
    repeats: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing:
        """Sum up repeated measurements of one batch."""
        median = statistics.median(seconds)
        return cls(median * 1e3, (max(seconds) - min(seconds)) / median, len(seconds))


@dataclass(frozen=True)
class Row:
    """One way to augment.

    Attributes:
        name: As printed.
        kind: Who it is.
        timing: None when it could not be measured.
        reason: Why not; or a remark.
    """

    name: str
    kind: Kind
    timing: Timing | None
    reason: str = ""


@dataclass(frozen=True)
class Comparison:
    """All ways at the same work.

    Attributes:
        title: What was done.
        work: The batch and what was done to it.
        rows: In the order to print.
    """

    title: str
    work: Work
    rows: tuple[Row, ...]

    def times_faster_than(self, name: str, row: Row) -> float | None:
        """Return how many times less time `row` takes than the row called `name`."""
        other = self._ms(name)
        return None if other is None or row.timing is None else other / row.timing.median_ms

    def times_the_limit(self, row: Row) -> float | None:
        """Return how many times the copy limit a row takes."""
        limit = self._ms(LIMIT)
        return None if limit is None or row.timing is None else row.timing.median_ms / limit

    def images_per_second(self, row: Row) -> float | None:
        """Return the rate of a row; None when it was not measured."""
        return None if row.timing is None else self.work.batch / row.timing.median_ms * 1e3

    def row(self, name: str) -> Row | None:
        """Return a row by its name."""
        return next((row for row in self.rows if row.name == name), None)

    def _ms(self, name: str) -> float | None:
        row = self.row(name)
        return row.timing.median_ms if row is not None and row.timing is not None else None

    def to_json(self) -> dict[str, Any]:
        """Return plain values; what was not measured is null, with its reason."""
        rows = [
            {
                "name": row.name,
                "kind": row.kind,
                "ms": row.timing and row.timing.median_ms,
                "spread": row.timing.spread if row.timing and row.timing.repeats > 1 else None,
                "images_per_second": self.images_per_second(row),
                "times_faster_than_kornia": self.times_faster_than(KORNIA, row),
                "times_the_limit": self.times_the_limit(row),
                "reason": row.reason or None,
            }
            for row in self.rows
        ]
        work = asdict(self.work) | {
            "device": str(self.work.device),
            "input_dtype": dtype_name(self.work.input_dtype),
            "output_dtype": dtype_name(self.work.output_dtype),
        }
        return {"title": self.title, "work": work, "rows": rows}


KORNIA = "Kornia"
TORCHVISION_BATCH = "torchvision v2, one draw per batch"
TORCHVISION_SAMPLES = "torchvision v2, one draw per image"
DALI = "DALI"
OURS_TORCH = "stoker torch"
OURS_FUSED = "stoker fused"
OURS_GRAPH = "stoker fused, CUDA graph"
LIMIT = "limit: copy in to out"
_BUILDERS: Mapping[str, tuple[Kind, Callable[[Work], Augment]]] = {
    KORNIA: ("peer", peers.kornia),
    TORCHVISION_BATCH: ("peer", peers.torchvision_batch),
    TORCHVISION_SAMPLES: ("peer", peers.torchvision_samples),
    OURS_TORCH: ("ours", peers.stoker_torch),
    OURS_FUSED: ("ours", peers.stoker_fused),
    LIMIT: ("limit", peers.copy_limit),
}
_ORDER = (
    KORNIA, TORCHVISION_BATCH, TORCHVISION_SAMPLES, DALI, OURS_TORCH, OURS_FUSED, OURS_GRAPH, LIMIT,
)  # fmt: skip


def dtype_name(dtype: torch.dtype) -> str:
    """Return "float16" for `torch.float16`."""
    return str(dtype).removeprefix("torch.")


def cases(work: Work) -> list[tuple[str, Work]]:
    """Return the three pieces of work of the part `workers`, with their titles."""
    base = "flip, rotate ±15°, brightness"
    return [
        (f"{base}, normalise", work),
        (f"{base}, contrast, normalise", replace(work, contrast=True)),
        (f"{base}, contrast, normalise, with a mask", replace(work, contrast=True, mask=True)),
    ]


def compare(
    title: str,
    work: Work,
    *,
    workers: Sequence[int] = (),
    repeats: int = 7,
    ways: Sequence[str] = _ORDER,
) -> Comparison:
    """Measure every way at one piece of work. Blocking; the device should be otherwise idle.

    Args:
        title: What is done, in words.
        work: The batch.
        workers: Numbers of DataLoader workers for augmentation on the CPU; empty for none.
        repeats: Measurements per way.
        ways: Which of the other rows, by their names.
    """
    # First: workers are forked, and a process that has not yet run its threads forks safely.
    rows = [row for count in workers for row in _worker_rows(work, count, min(repeats, 3))]
    rows += _device_rows(work, ways, repeats)
    return Comparison(title, work, tuple(rows))


def _worker_rows(work: Work, workers: int, bursts: int) -> list[Row]:
    name = f"CPU, {format_count(workers, 'worker')}: torchvision v2"
    try:
        seconds = peers.loader_seconds(work, workers, bursts, peers.torchvision_batch)
        return [Row(name, "cpu", Timing.of(seconds))]
    except UnavailableError as error:
        return [Row(name, "cpu", None, str(error)), _stand_in(work, workers, bursts)]


def _stand_in(work: Work, workers: int, bursts: int) -> Row:
    """Measure our own reference in the workers: what CPU augmentation costs without torchvision."""
    name = f"CPU, {format_count(workers, 'worker')}: stoker torch (stand-in)"
    try:
        seconds = peers.loader_seconds(work, workers, bursts, peers.stoker_torch)
    except UnavailableError as error:
        return Row(name, "cpu", None, str(error))
    return Row(name, "cpu", Timing.of(seconds))


def _device_rows(work: Work, ways: Sequence[str], repeats: int) -> list[Row]:
    inputs = work.make_inputs(num_buffers(work))
    calls: dict[str, Call] = {}
    reasons: dict[str, str] = {}
    for name in ways:
        try:
            calls[name] = _prepare(name, work, inputs)
        except UnavailableError as error:
            reasons[name] = str(error)
    timings = time_calls(calls, work.device, repeats)
    return [Row(name, _kind(name), timings.get(name), reasons.get(name, "")) for name in ways]


def _kind(name: str) -> Kind:
    if name in _BUILDERS:
        return _BUILDERS[name][0]
    return "peer" if name == DALI else "ours"


def _prepare(name: str, work: Work, inputs: list[Inputs]) -> Call:
    """Return a call that has run; a peer that fails is a row without a number, never our crash."""
    try:
        call = _build(name, work, inputs)
        warm_up(call, work.device)
    except UnavailableError:
        raise
    except Exception as error:
        if _kind(name) != "peer":
            raise
        first = (str(error).splitlines() or [""])[0][:200]
        raise UnavailableError(f"it failed: {type(error).__name__}: {first}") from error
    return call


def num_buffers(work: Work) -> int:
    """Return how many inputs to cycle through, so that no cache holds them all."""
    if work.device.type != "cuda":
        return 2
    batch_bytes = work.batch * 3 * math.prod(work.size) * work.input_dtype.itemsize
    return max(2, min(64, math.ceil(SPREAD_BYTES / batch_bytes)))


def _build(name: str, work: Work, inputs: list[Inputs]) -> Call:
    if name == DALI:
        return peers.dali(work, inputs)
    if name == OURS_GRAPH:
        return captured(peers.stoker_fused(work), inputs)
    return eager(_BUILDERS[name][1](work), inputs)


def eager(augment: Augment, inputs: list[Inputs]) -> Call:
    """Return a call that augments the next input, over and over."""
    turn = itertools.cycle(inputs)

    def call() -> object:
        given = next(turn)
        return augment(given.images, given.masks)

    return call


def captured(augment: Augment, inputs: list[Inputs]) -> Call:
    """Return a call that replays a CUDA graph of one batch: drawing and pixels, no Python."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for given in (inputs[0], inputs[0], inputs[0]):
            augment(given.images, given.masks)
    torch.cuda.current_stream().wait_stream(stream)
    graphs: list[torch.cuda.CUDAGraph] = []
    for given in inputs:
        graph = torch.cuda.CUDAGraph()
        pool = graphs[0].pool() if graphs else None
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            augment(given.images, given.masks)
        graphs.append(graph)
    turn = itertools.cycle(graphs)
    return lambda: next(turn).replay()


def warm_up(call: Call, device: torch.device) -> None:
    """Compile, fill caches, allocate; a call of seconds has done all that the first time."""
    began = time.perf_counter()
    for _ in range(WARMUP_CALLS):
        call()
        synchronize(device)
        if time.perf_counter() - began > 1.0 and device.type == "cpu":
            return


def time_calls(calls: Mapping[str, Call], device: torch.device, repeats: int) -> dict[str, Timing]:
    """Time every call, in turns.

    Args:
        calls: Already warmed up.
        device: Synchronised before and after each measurement.
        repeats: Measurements of each.
    """
    counts = {name: _calls_per_slice(call, device) for name, call in calls.items()}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            seconds[name].append(_slice(call, counts[name], device))
    return {name: Timing.of(times) for name, times in seconds.items()}


def _calls_per_slice(call: Call, device: torch.device) -> int:
    once = _slice(call, 1, device)
    if once >= SLICE_SECONDS:
        return 1
    few = _slice(call, min(10, math.ceil(SLICE_SECONDS / once)), device)
    return max(1, min(MAX_CALLS, math.ceil(SLICE_SECONDS / few)))


def _slice(call: Call, count: int, device: torch.device) -> float:
    """Return seconds per call of `count` calls, synchronised at both ends."""
    synchronize(device)
    began = time.perf_counter()
    for _ in range(count):
        call()
    synchronize(device)
    return (time.perf_counter() - began) / count


def synchronize(device: torch.device) -> None:
    """Wait until the device has done everything; nothing to wait for on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# -- words ---------------------------------------------------------------------------------------


def verdict(comparisons: Sequence[Comparison]) -> str:
    """Return the one sentence that the tables are about."""
    for comparison in comparisons:
        ours = [row for row in comparison.rows if row.kind == "ours" and row.timing is not None]
        if not ours:
            continue
        best = min(ours, key=lambda row: row.timing.median_ms)
        said = f"{best.name}: {milliseconds(best)} per batch of {comparison.work.batch}"
        faster = comparison.times_faster_than(KORNIA, best)
        limit = comparison.times_the_limit(best)
        if faster is not None:
            said += f", {faster:.1f} times as fast as Kornia"
        if limit is not None:
            said += f", {limit:.1f} times the copy limit"
        return f"{said} ({comparison.title})."
    return "Nothing of ours could be measured here."


def milliseconds(row: Row) -> str:
    """Return "0.104 ms"; n/a when it was not measured."""
    if row.timing is None:
        return "n/a"
    ms = row.timing.median_ms
    return f"{ms:.3g} ms" if ms < 100 else f"{ms:,.0f} ms"


def cells(comparison: Comparison, row: Row) -> list[str]:
    """Return a row's numbers as text: ms, spread, images/s, × Kornia, × the limit."""
    if row.timing is None:
        return ["n/a"] * 5
    rate = comparison.images_per_second(row)
    faster = comparison.times_faster_than(KORNIA, row)
    limit = comparison.times_the_limit(row)
    return [
        milliseconds(row).removesuffix(" ms"),
        f"{row.timing.spread * 100:.0f} %" if row.timing.repeats > 1 else "n/a",
        format_count(round(rate)) if rate is not None else "n/a",
        "n/a" if faster is None else f"{faster:.3g}",
        "n/a" if limit is None else f"{limit:,.3g}" if limit < 1000 else f"{limit:,.0f}",
    ]
