"""Computes what fits into memory at a given batch size.

Enters: facts, memory limits, shares. Leaves: lines of bytes with reasons, and whether a tier fits. Pure.

More memory never gives a worse tier, because every bound rises with the memory: memory is counted in whole pages,
reserves are at most a sixteenth of it, and the shares leave at least a tenth.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from stoker.plan.facts import ModelCost, StoreFacts, even_chunks, most_chunks_per_batch
from stoker.units import MIB, format_bytes, format_count

Tier = Literal["resident", "chunked", "streamed"]
Where = Literal["gpu", "ram"]
TIERS: tuple[Tier, ...] = ("resident", "chunked", "streamed")

MIN_CHUNK_BATCHES = 4
"""Chunks of fewer batches are no better than streaming: they hardly shuffle, and hide no loading time."""
_PAGE = 4096
_ACTIVATION_FACTOR = 8
SLAB_BYTES = 8 * MIB
"""Measured on an H200 with a quiet host: 50 GB/s, 45 the first time; 4 MB: 33 GB/s; 16 MB: 51, 40 the first time."""
MAX_READERS = 10
"""More readers do not help, and are slower on a busy machine: 45 GB/s with 10, 40 with 12, 37 with 16, of 16 cores."""
SPARE_SLABS = 2  # slabs that are being copied while every reader fills one
_STREAM_DEPTH, _LEAST_DEPTH = 4, 2
_THREAD_BYTES = 8 * MIB  # for a decoded chunk, or a piece that is being verified
_CONTEXT_BYTES, _PROCESS_BYTES = 512 * MIB, 1536 * MIB


@dataclass(frozen=True)
class PlanLine:
    """One amount of memory in a plan: where it is, what it holds, its size and the reason."""

    where: Where
    what: str
    num_bytes: int
    reason: str


@dataclass(frozen=True)
class Question:
    """The arguments of `make_plan`, with methods that compute what fits at a batch size."""

    facts: StoreFacts
    gpu: int | None
    ram: int
    model: ModelCost | None
    share: float
    fallback: float
    num_slots: int
    threads: int
    ranks_per_host: int = 1
    data_bytes: int | None = None
    chunk_bytes: int | None = None
    streamed: bool = False

    @property
    def is_told(self) -> bool:
        """Whether the user gave the amount of memory for data; it is then used exactly, or refused."""
        return self.data_bytes is not None or self.chunk_bytes is not None

    @property
    def where(self) -> Where:
        """The kind of the device's memory: "gpu", or "ram" without a GPU."""
        return "ram" if self.gpu is None else "gpu"

    @cached_property
    def cap(self) -> int:
        """Device memory, rounded down to whole pages, so that every bound below rises with it."""
        nominal = self.ram if self.gpu is None else self.gpu
        return nominal - nominal % _PAGE

    @property
    def share_bytes(self) -> int:
        """Most bytes for data, if the rest fits beside them."""
        return int(self.cap * self.share)

    def rest(self, batch: int) -> tuple[PlanLine, ...]:
        """Return the lines of everything that the device holds beside the data."""
        each, count = self.facts.sample_bytes, min(batch, self.facts.num_samples)
        why = f"one in use, one being built: 2 x {count:,} x {format_bytes(each)}"
        batches = PlanLine(self.where, "batches", 2 * count * each, why)
        device = (*self._model_lines(batch), batches)
        if self.gpu is None:
            return (*device, *self.host())
        reserve = min(_CONTEXT_BYTES, self.cap // 16)
        why = "kernels, cuDNN and cuBLAS workspaces, fragments, coming batches; estimated"
        return (*device, PlanLine("gpu", "CUDA context", reserve, why))

    def rest_bytes(self, batch: int) -> int:
        """Return the bytes of all lines of `rest`."""
        return sum(line.num_bytes for line in self.rest(batch))

    def _model_lines(self, batch: int) -> Iterator[PlanLine]:
        if self.model is None:
            return
        model, here = self.model, self.where
        yield PlanLine(here, "model", model.parameter_bytes, "parameters")
        yield PlanLine(here, "gradients", model.gradient_bytes, "one per parameter")
        yield PlanLine(here, "optimizer", model.optimizer_bytes, "its state per parameter")
        each, why = model.activation_bytes_per_sample, "as given"
        if each is None:
            each = _ACTIVATION_FACTOR * self.facts.sample_bytes
            why = f"estimated as {_ACTIVATION_FACTOR} x the sample itself; better measured"
        count = min(batch, self.facts.num_samples)
        text = f"{format_count(count, 'sample')} x {format_bytes(each)}, {why}"
        yield PlanLine(here, "activations", count * each, text)

    def host(self) -> tuple[PlanLine, ...]:
        """Return the lines of RAM that every tier needs, without the staging memory."""
        process = min(_PROCESS_BYTES, self.ram // _PAGE * _PAGE // 16)
        readers = f"{format_count(self.threads, 'thread')} x {format_bytes(_THREAD_BYTES)}"
        return (
            PlanLine("ram", "process", process, "Python, torch and its libraries; estimated"),
            PlanLine("ram", "readers", self.threads * _THREAD_BYTES, f"{readers} to decode and check"),
            PlanLine("ram", "indices", self.facts.index_bytes, "order, offsets and window ends"),
        )  # fmt: skip

    def staging(self, tier: Tier, batch: int) -> tuple[int, int]:
        """Return (number of slabs, bytes of each), limited by use and by RAM; at least two slabs with a GPU."""
        if self.gpu is None:
            return 0, 0
        left = self.ram - sum(line.num_bytes for line in self.host())
        if tier == "streamed":
            slab = _power_of_two(min(batch, self.facts.num_samples) * self.facts.sample_bytes)
            return (_STREAM_DEPTH if _STREAM_DEPTH * slab <= left else _LEAST_DEPTH), slab
        largest = max((field.row_bytes for field in self.facts.fields), default=1)
        least = _power_of_two(max(largest, _PAGE))
        count = min(self.threads, MAX_READERS) + SPARE_SLABS
        slab = max(least, min(SLAB_BYTES, _power_of_two(-(-self.facts.device_bytes // count))))
        allowed = min(left, self.ram // 8)
        while slab > least and count * slab > allowed:
            slab //= 2
        return max(2, min(count, allowed // slab)), slab

    def budget(self, batch: int) -> int:
        """Return the most bytes that data may take beside the rest."""
        if self.data_bytes is not None:
            return self.data_bytes
        rest = self.rest_bytes(batch)
        for share in (self.share, self.fallback):
            if rest <= self.cap - int(self.cap * share):
                return int(self.cap * share)
        return max(0, self.cap - rest)

    def ring(self, batch: int) -> tuple[int, int] | None:
        """Return (slots, most samples of a chunk) at this batch size; None if chunks would be too small.

        Three slots are usual: one loads and one is full while the third is in use. Batches cross the edges of
        chunks, so with two slots the next load would begin only after the last one has ended. If the user gave
        the memory, two or four slots are tried too, for chunks that are hardly larger than a batch.
        """
        count = self.facts.num_samples
        if self.chunk_bytes is not None:
            rows = max(min(batch, count), self.facts.chunk_positions(self.chunk_bytes))
            rows = -(-count // -(-count // rows))
            return max(2, self.num_slots, self._most_touched(rows, batch)), rows
        budget = self.budget(batch)
        least = batch if self.data_bytes is not None else MIN_CHUNK_BATCHES * batch
        for num_slots in (3, 2, 4) if self.data_bytes is not None else (self.num_slots,):
            most = self.facts.chunk_positions(budget // num_slots)
            if most < least:
                continue
            # The loader cuts even chunks, so the largest one is what counts.
            rows = -(-count // -(-count // most))
            if self._most_touched(rows, batch) <= num_slots:
                return num_slots, rows
        return None

    def _most_touched(self, rows: int, batch: int) -> int:
        chunks = even_chunks(self.facts.num_samples, rows)
        return most_chunks_per_batch([stop - start for start, stop in chunks], batch)

    def is_one_chunk(self, batch: int) -> bool:
        """Return whether all data fits into the memory for data, or into one chunk of the given size."""
        if self.chunk_bytes is not None:
            return self.facts.chunk_bytes(self.facts.num_samples) <= self.chunk_bytes
        most = self.share_bytes if self.data_bytes is None else self.budget(batch)
        return self.facts.device_bytes <= most

    def fits(self, tier: Tier, batch: int) -> bool:
        """Return whether `tier` fits into GPU memory and RAM at this batch size."""
        if self.streamed and tier != "streamed":
            return False
        count, slab = self.staging(tier, batch)
        host = sum(line.num_bytes for line in self.host()) + count * slab
        rest = self.rest_bytes(batch)
        if host > self.ram or rest > self.cap:
            return False
        if tier == "resident":
            return self.is_one_chunk(batch) and self.facts.device_bytes + rest <= self.cap
        if tier == "streamed":
            # Batches are built from two chunks of a batch each, in host memory.
            chunks = 2 * self.facts.chunk_bytes(min(batch, self.facts.num_samples))
            beside = rest if self.gpu is None else host
            return not self.is_told and chunks + beside <= self.ram
        if self.is_told and self.is_one_chunk(batch):
            return False  # the given memory holds all data: the tier is resident, or the request is refused
        ring = self.ring(batch)
        if ring is None:
            return False
        return ring[0] * self.facts.chunk_bytes(ring[1]) + rest <= self.cap

    def best(self, batch: int) -> Tier | None:
        """Return the best tier that fits at this batch size; None if none does."""
        return next((tier for tier in TIERS if self.fits(tier, batch)), None)


def _power_of_two(num_bytes: int) -> int:
    """Round up to a power of two, as torch does for pinned memory: 1.1 GB takes 2 GB."""
    return 1 << max(0, num_bytes - 1).bit_length()
