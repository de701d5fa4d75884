"""Decides where the data is kept, and lists every byte of the plan with its reason.

Enters: facts of a store, free bytes, the cost of a model. Leaves: a frozen `Plan`. Costs
microseconds; the same question always gives the same plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import Any

from stoker.arguments import explained
from stoker.display import table_html
from stoker.errors import DoesNotFitError, InputError
from stoker.plan.budget import MIN_CHUNK_BATCHES, PlanLine, Question, Tier, Where
from stoker.plan.facts import FieldFacts, ModelCost, StoreFacts
from stoker.units import GIB, format_bytes

GPU_SHARE, FALLBACK_SHARE = 0.75, 0.60
"""Shares of the device's memory for data; the second if the rest does not fit beside the first."""
BATCH_PER_GB = 8
CPU_BATCH = 128
_SMALLEST_BATCH = 8


@explained("stoker plan data.h5", "a Plan is what make_plan returns, and loader.plan")
@dataclass(frozen=True)
class Plan:
    """Where the data is kept, and what that takes. Made by `make_plan`.

    Attributes:
        tier: "resident", "chunked" or "streamed".
        batch_size: Samples per batch.
        chunk_rows: Most samples of a chunk; chunks differ by one at most. None when all data is one chunk.
        num_slots: Chunks on the device at once: 1 when resident, 0 when streamed to a GPU.
        slot_bytes: Of one slot: what is allocated, when the facts are exact (`column_facts`).
        staging_bytes: Pinned host memory in all, in `num_slabs` slabs of a power of two each.
        num_slabs: Pinned slabs; when streamed, batches on their way.
        threads: Reader threads.
        data_budget_bytes: Most that data may take on the device.
        gpu_memory_bytes: The cap on the GPU; None on a machine without one.
        ram_bytes: The cap on RAM.
        lines: Every byte that is counted.
        reasons: Every choice in words.
        host: Streamed to a GPU only: the plan for host memory, from which batches are built.
    """

    tier: Tier
    batch_size: int
    chunk_rows: int | None
    num_slots: int
    slot_bytes: int
    staging_bytes: int
    num_slabs: int
    threads: int
    data_budget_bytes: int
    gpu_memory_bytes: int | None
    ram_bytes: int
    lines: tuple[PlanLine, ...]
    reasons: tuple[str, ...]
    host: Plan | None = None

    def __repr__(self) -> str:
        return f"Plan({self.reasons[0]}; batch size {self.batch_size})"

    def _repr_html_(self) -> str:
        rows = ((f"{line.where}: {line.what}", format_bytes(line.num_bytes)) for line in self.lines)
        return table_html(f"Plan: {self.reasons[0]}", rows)

    @property
    def data_bytes(self) -> int:
        """Bytes of data on the device, all slots together."""
        return self.num_slots * self.slot_bytes

    @property
    def totals(self) -> dict[Where, int]:
        """Bytes on the GPU and in RAM; never above the caps."""
        kinds: tuple[Where, ...] = ("gpu", "ram")
        return {w: sum(line.num_bytes for line in self.lines if line.where == w) for w in kinds}

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        host = None if self.host is None else self.host.to_json()
        return {**asdict(self), "totals": self.totals, "host": host}


@explained("stoker plan data.h5")
def make_plan(
    facts: StoreFacts,
    *,
    gpu_memory_bytes: int | None,
    ram_bytes: int,
    batch_size: int | None = None,
    model: ModelCost | None = None,
    gpu_share: float = GPU_SHARE,
    fallback_share: float = FALLBACK_SHARE,
    num_slots: int = 3,
    threads: int = 8,
    ranks_per_host: int = 1,
    data_bytes: int | None = None,
    chunk_bytes: int | None = None,
    streamed: bool = False,
) -> Plan:
    """Decide where the data is kept.

    Args:
        facts: Facts of the store.
        gpu_memory_bytes: Free bytes, not the nominal size; None on a machine without GPU.
        ram_bytes: Free bytes of RAM of the machine, which its ranks share.
        batch_size: None lets the plan choose: 8 per GiB of GPU memory, fewer if a better tier then fits.
        model: Cost of the model; None keeps the share beside the data free for one.
        gpu_share: Largest share of the device for data.
        fallback_share: The same if the rest does not fit beside `gpu_share`.
        num_slots: Ring slots of the chunked tier.
        threads: Reader threads of the machine, shared by its ranks.
        ranks_per_host: Number of processes with such a plan on one machine, each with its own GPU.
        data_bytes: Device memory for data, all chunks together (`chunk_size_gb` in a config); None is
            `gpu_share` of the device. A given value is used, or refused with an error.
        chunk_bytes: Size of one chunk instead, `num_slots` of which are on the device.
        streamed: Keep no data on the device.

    Raises:
        InputError: An argument is not allowed, or nothing fits; the message says what to change.
    """
    if ranks_per_host < 1:
        raise InputError(f"{ranks_per_host} ranks per host.", "1 or more", "ranks_per_host=1")
    question = Question(
        facts,
        gpu_memory_bytes,
        ram_bytes // ranks_per_host,
        model,
        gpu_share,
        fallback_share,
        num_slots,
        max(1, threads // ranks_per_host) if threads > 0 else threads,
        ranks_per_host,
        data_bytes,
        chunk_bytes,
        streamed,
    )
    _check(question, batch_size)
    tier, batch, reason = _choose(question, batch_size)
    return _write(question, tier, batch, reason)


def _check(question: Question, batch_size: int | None) -> None:
    def refuse(given: str, allowed: str, fix: str) -> None:
        raise InputError(given, allowed, fix)

    if question.facts.num_samples < 1:
        refuse("the store holds no samples.", "1 or more", "stoker inspect STORE")
    for memory, name in ((question.gpu, "GPU memory"), (question.ram, "RAM")):
        if memory is not None and memory < 1:
            refuse(f"{name} of {memory} bytes.", "more than 0", "the free bytes, such as 16GB")
    if batch_size is not None and batch_size < 1:
        refuse(f"a batch size of {batch_size}.", "1 or more", "--batch-size 128, or batch_size=128")
    if not 0 < question.fallback <= question.share <= 0.9:
        refuse(
            f"shares of {question.share} and {question.fallback} for data.",
            "0 < fallback <= share <= 0.9: the model needs room too",
            f"{GPU_SHARE} and {FALLBACK_SHARE}",
        )
    least = 2 if question.chunk_bytes is None else 1
    if question.num_slots < least:
        refuse(
            f"num_slots is {question.num_slots}.",
            f"{least} or more: one trains while the next loads",
            "num_slots=3",
        )
    for name in ("data_bytes", "chunk_bytes"):
        size = getattr(question, name)
        if size is not None and size < 1:
            refuse(f"{name} is {size}.", "1 or more", f"{name}=2**28")
    if question.is_told and question.streamed:
        refuse(
            "memory for data was given, and nothing of it is to stay on the device.",
            "one of them",
            "streamed=False",
        )
    if question.threads < 1:
        refuse(f"{question.threads} reader threads.", "1 or more", "threads=8")


def recommended_batch_size(gpu_memory_bytes: int | None) -> int:
    """Return 8 samples per GiB, at least 8 and at most 4096, in steps of 32 or powers of two below; 128 on a CPU."""
    if gpu_memory_bytes is None:
        return CPU_BATCH
    asked = BATCH_PER_GB * gpu_memory_bytes // GIB
    if asked >= 32:
        return min(4096, asked - asked % 32)
    return max(_SMALLEST_BATCH, 1 << (asked.bit_length() - 1) if asked else 0)


def _ladder(top: int) -> list[int]:
    """Return batch sizes from `top` down: multiples of 32, then 16 and 8."""
    steps = chain(range(32, 4097, 32), (16, 8))
    return sorted({top, *(size for size in steps if size < top)}, reverse=True)


def _choose(question: Question, asked: int | None) -> tuple[Tier, int, str]:
    """Return (tier, batch size, reason for that batch size).

    The tier is the best one for the smallest batch; then the batch grows as long as that tier fits.
    If the batch were chosen first, more memory could give a larger batch and a worse tier.
    """
    if asked is not None:
        tier = question.best(asked)
        if tier is None:
            raise _does_not_fit(question, asked)
        return tier, asked, "as asked"
    num_samples = question.facts.num_samples
    top = min(recommended_batch_size(question.gpu), num_samples)
    least = min(_SMALLEST_BATCH, num_samples)
    tier = question.best(least)
    if tier is None:
        for size in (*_ladder(least), 4, 2, 1):
            if size <= least and question.fits("streamed", size):
                return "streamed", size, "the most that fits: memory is very short"
        raise _does_not_fit(question, 1)
    fitting = [size for size in _ladder(top) if size >= least and question.best(size) == tier]
    # Without a given model, the memory beside the data is reserved for one: keep all of it.
    share = question.share if question.model is None else question.fallback
    roomy = [size for size in fitting if question.budget(size) >= int(question.cap * share)]
    preferred = roomy if tier == "chunked" or question.model is None else fitting
    batch = (preferred or fitting or [least])[0]
    return tier, batch, _batch_reason(question, tier, batch, top)


def _batch_reason(question: Question, tier: Tier, batch: int, top: int) -> str:
    if batch < top:
        return (
            f"{top} would be usual, but leaves too little to stay {tier}; "
            f"accumulate {-(-top // batch)} steps for the same effective size"
        )
    if batch == question.facts.num_samples:
        return "all samples there are"
    if question.gpu is None:
        return "no GPU to size it by: the usual start"
    if batch == _SMALLEST_BATCH:
        return "the smallest that is chosen without being asked for"
    return f"{BATCH_PER_GB} per GiB of free GPU memory, in steps of 32"


def _does_not_fit(question: Question, batch: int) -> DoesNotFitError:
    if question.is_told and question.rest_bytes(batch) <= question.cap:
        return _told_does_not_fit(question, batch)
    host = question.host()
    count, slab = question.staging("streamed", batch)
    need_host = sum(line.num_bytes for line in host) + count * slab
    need, cap = question.rest_bytes(batch), question.cap
    if need > cap:
        lines = sorted(question.rest(batch), key=lambda line: -line.num_bytes)[:3]
        memory = "GPU memory" if question.where == "gpu" else "RAM"
    else:
        staging = PlanLine("ram", "pinned staging", count * slab, "")
        lines = sorted((*host, staging), key=lambda line: -line.num_bytes)[:3]
        need, cap, memory = need_host, question.ram, "RAM"
    parts = ", ".join(f"{line.what} {format_bytes(line.num_bytes)}" for line in lines)
    given = (
        f"batch size {batch} needs {format_bytes(need)} of {memory} before any data, and "
        f"{format_bytes(cap)} is free ({parts})."
    )
    smaller = [size for size in (*_ladder(batch), 4, 2, 1) if size < batch]
    best = next((size for size in smaller if question.best(size)), None)
    if best is not None:
        return DoesNotFitError(given, f"at most {best} here", f"--batch-size {best}")
    return DoesNotFitError(
        given,
        f"what fits into {format_bytes(cap)}",
        "a smaller model, optimizer sgd, fewer reader threads, or close what holds the memory",
    )


def _told_does_not_fit(question: Question, batch: int) -> DoesNotFitError:
    """Return the error for `data_bytes` or `chunk_bytes`: too much for the device, or too little for batches."""
    facts, free = question.facts, question.cap - question.rest_bytes(batch)
    ring = None if question.is_one_chunk(batch) else question.ring(batch)
    needed = facts.device_bytes if ring is None else ring[0] * facts.chunk_bytes(ring[1])
    memory = "GPU memory" if question.where == "gpu" else "RAM"
    if question.is_one_chunk(batch) or ring is not None:
        least = 2 * facts.chunk_bytes(min(batch, facts.num_samples))
        fits = max(least, int(0.75 * free))
        return DoesNotFitError(
            f"the data needs {format_bytes(needed)} on the device, and {format_bytes(max(0, free))} of "
            f"{format_bytes(question.cap)} {memory} is free beside the rest.",
            "what is free now, less what the model will take",
            f"data_bytes={fits} (chunk_size_gb={fits / GIB:.2g} of a ChunkDataLoader)",
        )
    one = facts.chunk_bytes(min(batch, facts.num_samples))
    sizes = (times * one for times in (2, 3, 4, 6, 8, 16))
    fitting = (size for size in sizes if replace(question, data_bytes=size).ring(batch) is not None)
    least = next(fitting, facts.device_bytes)
    return DoesNotFitError(
        f"{format_bytes(question.budget(batch))} is asked for data, and all of it is "
        f"{format_bytes(facts.device_bytes)} ({facts.num_samples:,} samples).",
        f"room for all, or for chunks of a batch of {batch} ({format_bytes(least)})",
        f"data_bytes={least} (chunk_size_gb={math.ceil(1000 * least / GIB) / 1000:g} of a ChunkDataLoader), "
        "or a smaller batch_size",
    )


# -- writing it down -------------------------------------------------------------------------


def _write(question: Question, tier: Tier, batch: int, batch_reason: str) -> Plan:
    facts = question.facts
    count, slab = question.staging(tier, batch)
    slots, chunk_rows, slot = _layout(question, tier, batch)
    budget = question.share_bytes if tier == "resident" else question.budget(batch)
    if question.data_bytes is not None:
        budget = question.data_bytes
    elif question.chunk_bytes is not None:
        budget = slots * slot
    host = _host_plan(question, batch, count * slab) if tier == "streamed" else None
    plan = Plan(
        tier, batch, chunk_rows, slots, slot, count * slab, count, question.threads, budget,
        question.gpu, question.ram, (), (f"batch size {batch}: {batch_reason}",), host,
    )  # fmt: skip
    lines = [*_data_lines(facts, question.where, plan), *question.rest(batch)]
    if question.model is None:
        free = question.cap - sum(line.num_bytes for line in lines)
        # In RAM, memory beyond the share is left to the page cache.
        room = free if question.gpu is not None else min(free, question.cap - budget)
        why = "no model was given: for it, its gradients, optimizer and activations"
        lines.append(PlanLine(question.where, "room for the model", room, why))
    if question.gpu is not None:
        what = "batches on their way" if tier == "streamed" else "slabs between disk and GPU"
        why = f"{count} {what} x {format_bytes(slab)}, pinned once, powers of two"
        lines += [*question.host(), PlanLine("ram", "pinned staging", count * slab, why)]
    if host is not None:
        lines += _data_lines(facts, "ram", host)
    plan = replace(plan, lines=tuple(lines))
    return replace(
        plan,
        reasons=(
            *_tier_reasons(question, plan),
            *plan.reasons,
            *_notes(plan, facts, question.ranks_per_host),
        ),
    )


def _layout(question: Question, tier: Tier, batch: int) -> tuple[int, int | None, int]:
    """Return (slots on the device, most samples of a chunk, bytes of a slot)."""
    if tier == "resident":
        return 1, None, question.facts.device_bytes
    if tier == "chunked":
        ring = question.ring(batch)
        assert ring is not None, "a tier that fits has a ring"
        return *ring, question.facts.chunk_bytes(ring[1])
    if question.gpu is not None:
        return 0, None, 0
    # Streamed without a GPU: host memory is the device, and holds two chunks of a batch each.
    rows = min(batch, question.facts.num_samples)
    return 2, rows, question.facts.chunk_bytes(rows)


def _host_plan(question: Question, batch: int, staging_bytes: int) -> Plan | None:
    """Return the plan for host memory if batches are streamed to a GPU; None without a GPU."""
    if question.gpu is None:
        return None
    beside = replace(
        question,
        gpu=None,
        ram=question.ram - staging_bytes,
        streamed=False,
        num_slots=3,
        model=None,
    )
    tier = beside.best(batch) or "streamed"
    return _write(beside, tier, batch, "as on the device")


def _data_lines(facts: StoreFacts, here: Where, plan: Plan) -> Iterator[PlanLine]:
    if plan.tier == "resident":
        for field in facts.fields:
            yield PlanLine(here, f"data: {field.name}", field.device_bytes, _field_reason(field))
    elif plan.num_slots:
        what = f"{plan.num_slots} slots x {format_bytes(plan.slot_bytes)}"
        halo = (
            " with the rows before their first windows"
            if any(field.kind == "series" for field in facts.fields)
            else ""
        )
        why = f"{what}: up to {plan.chunk_rows:,} samples each{halo}; one trains, the next loads"
        yield PlanLine(here, "ring slots", plan.num_slots * plan.slot_bytes, why)


def _field_reason(field: FieldFacts) -> str:
    rows = f"{field.num_rows:,} x {format_bytes(field.row_bytes)}"
    if field.kind == "ragged":
        return f"{rows} and where each sample begins"
    if field.kind == "series":
        return f"{rows}, each row once; windows of {field.window} are cut on the device"
    return f"{rows}, a row per sample"


def _tier_reasons(question: Question, plan: Plan) -> Iterator[str]:
    facts, data = question.facts, format_bytes(question.facts.device_bytes)
    device = "GPU memory" if question.where == "gpu" else "RAM"
    free = question.ram if question.gpu is None else question.gpu
    budget = f"{format_bytes(plan.data_budget_bytes)} of {format_bytes(free)} {device}"
    least = MIN_CHUNK_BATCHES * plan.batch_size
    num_chunks = -(-facts.num_samples // (plan.chunk_rows or facts.num_samples))
    if question.is_told and plan.tier == "resident":
        yield f"resident: one chunk holds all {facts.num_samples:,} samples ({data})"
    elif question.is_told:
        yield (
            f"chunked: {format_bytes(plan.data_bytes)} for data was asked for, {plan.num_slots} slots of up "
            f"to {plan.chunk_rows:,} samples; all data is {data}, so an epoch is {num_chunks:,} chunks"
        )
    elif question.streamed:
        yield "streamed: asked for; no data stays on the device"
    elif plan.tier == "resident":
        yield f"resident: all data is {data}, and {budget} may hold data"
    elif plan.tier == "chunked":
        yield (
            f"chunked: all data is {data}, more than fits beside the rest; {budget} hold "
            f"{plan.num_slots} slots, so an epoch is {num_chunks:,} chunks"
        )
        if plan.data_budget_bytes < question.share_bytes:
            yield (
                f"data gets {plan.data_budget_bytes / question.cap:.0%} instead of "
                f"{question.share:.0%}: the rest does not fit into {1 - question.share:.0%}"
            )
    else:
        each = format_bytes(facts.chunk_bytes(least))
        yield (
            f"streamed: {question.num_slots} chunks of {MIN_CHUNK_BATCHES} batches ({each} each) do "
            f"not fit into {budget}, and smaller ones are no better than batches"
        )


def _notes(plan: Plan, facts: StoreFacts, ranks: int) -> Iterator[str]:
    if ranks > 1:
        yield (
            f"{ranks} ranks share this machine's {format_bytes(ranks * plan.ram_bytes)} of RAM: each plans "
            f"with {format_bytes(plan.ram_bytes)}; the page cache is common, and counted once"
        )
    if plan.gpu_memory_bytes is None:
        yield "no GPU: the data and the model live in RAM, nothing is pinned or copied"
    if plan.tier != "resident":
        left = ranks * max(0, plan.ram_bytes - plan.totals["ram"])
        share = min(1.0, left / max(1, facts.device_bytes))
        yield (
            f"every epoch reads the data again; the page cache can keep {share:.0%} of it in the "
            f"{format_bytes(left)} of RAM left, and gives way to programs, so it is not counted"
        )
    for field in facts.fields:
        if field.series_bytes is not None and field.series_bytes < field.device_bytes:
            saved = field.device_bytes - field.series_bytes
            yield (
                f"{field.name!r} looks like windows written out: if they overlap, each row is there about "
                f"{field.device_bytes / max(1, field.series_bytes):.0f} times; as a series it would take "
                f"{format_bytes(field.series_bytes)} and save {format_bytes(saved)} (stoker pack bars)"
            )
    if series := [field for field in facts.fields if field.kind == "series"]:
        written = facts.num_samples * sum(field.sample_bytes for field in series)
        stored = sum(field.device_bytes for field in series)
        yield (
            f"{', '.join(field.name for field in series)}: windows written out would take "
            f"{format_bytes(written)}; as series they take {format_bytes(stored)}"
        )
    if facts.left_out:
        yield f"text stays on disk: {', '.join(facts.left_out)}"
