"""Memory levels: what to try next when memory runs out. `update.py` carries it out.

Enters: the current level (chunk share, samples per pass, recomputation), or an error. Leaves: the next
`LowerLevel` with its reason, or None below the last one. The level that fitted is kept in the user's cache
folder. Costs: one small file per model, GPU and free memory.

    chunk 75 % -> 60 %    fewer chunks on the device: the order and the training stay the same
    batch 128 -> 96 -> 64 samples in one pass; more passes per update keep the effective batch
    recompute activations about a third more time, a fraction of the memory
    batch 48 -> 32 -> ... -> 1

A batch is cut, not replaced: a batch of 128 goes through as 96 + 32, weighted by their samples, so that the update is
that of the 128 (except for BatchNorm, whose statistics are those of a pass). Precision is never changed here, because
that would change results.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
import xxhash

from stoker.errors import InputError
from stoker.ownership import always, mark_once, read_mark, remove_file, write_text
from stoker.plan import FALLBACK_SHARE
from stoker.store.remote_cache import user_cache_folder
from stoker.strict_json import json_text, parse_json
from stoker.units import GIB

LevelKind = Literal["chunk share", "batch", "activation checkpointing"]


# -- is it? ----------------------------------------------------------------------------------------

_KIND = "memory"
_TEXTS = (
    "CUDA out of memory",
    "CUDA error: out of memory",
    "HIP out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
)
_CUDA_ERROR_MEMORY_ALLOCATION = 2


def is_oom(error: BaseException) -> bool:
    """Whether the device's memory ran out, so that a lower level can help.

    True for torch.OutOfMemoryError, for a torch.AcceleratorError or RuntimeError with a message of the driver,
    cuBLAS or cuDNN that says so, for torch's CPU allocator (in a run on the CPU), and for an error that was raised
    from one of these, as the stages of a loader do. False for Python's MemoryError: that is host memory in reading
    or packing, which a smaller batch on the device would not free.
    """
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, torch.OutOfMemoryError):
            return True
        if isinstance(seen, torch.AcceleratorError) and _says_memory(seen):
            return True
        if isinstance(seen, RuntimeError) and any(text in str(seen) for text in _TEXTS):
            return True
        seen = seen.__cause__
    return False


def _says_memory(error: torch.AcceleratorError) -> bool:
    return getattr(error, "error_code", None) == _CUDA_ERROR_MEMORY_ALLOCATION


def forget_frames(error: BaseException) -> None:
    """Clear the tracebacks of an error and its causes: their frames keep the tensors of the failed step alive."""
    seen: BaseException | None = error
    while seen is not None:
        seen.__traceback__ = None
        seen = seen.__cause__ or seen.__context__


def let_go(device: torch.device) -> None:
    """Free unreferenced memory, reference cycles and the allocator's cache included; waits for the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def bytes_in_use(device: torch.device) -> int:
    """Return the bytes that torch has allocated on the device; on a CPU, the process's resident memory."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return int(psutil.Process().memory_info().rss)


# -- levels ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MemoryLevel:
    """How much memory a run uses: samples per pass, chunks on the device, recomputed activations.

    Attributes:
        batch_size: Samples of a batch as the loader yields it; never changes.
        pass_size: Most samples that go through the model at once; at first the whole batch.
        accumulation_steps: Batches per update, as configured.
        chunk_share: Share of the device's memory that chunks may take: 0.75, later 0.60; None when the
            data is not chunked.
        is_checkpointed: Whether activations are recomputed.
        can_checkpoint: Whether the model has blocks to recompute.
    """

    batch_size: int
    pass_size: int
    accumulation_steps: int = 1
    chunk_share: float | None = None
    is_checkpointed: bool = False
    can_checkpoint: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.pass_size <= self.batch_size or self.accumulation_steps < 1:
            raise InputError(
                f"pass_size is {self.pass_size}, batch_size {self.batch_size}, accumulation_steps "
                f"{self.accumulation_steps}.",
                "1 <= pass_size <= batch_size, and 1 or more steps",
                "MemoryLevel(batch_size=128, pass_size=128)",
            )

    @property
    def effective_batch(self) -> int:
        """Samples per update; the same at every level."""
        return self.batch_size * self.accumulation_steps

    @property
    def num_passes(self) -> int:
        """Passes through the model per update."""
        return self.accumulation_steps * len(cut(self.batch_size, self.pass_size))


@dataclass(frozen=True)
class LowerLevel:
    """The next level down.

    Attributes:
        kind: What is reduced or recomputed.
        level: The level itself; its effective batch is that of the level above.
        reason: Text for the log.
    """

    kind: LevelKind
    level: MemoryLevel
    reason: str


def cut(num_samples: int, pass_size: int) -> tuple[int, ...]:
    """Return the sizes of the passes of a batch: full passes, then the rest."""
    full, rest = divmod(num_samples, pass_size)
    return (pass_size,) * full + ((rest,) if rest else ())


def next_level(level: MemoryLevel, can_cut: bool = True) -> LowerLevel | None:
    """Return the level to try after memory ran out at `level`; None when there is none.

    Args:
        level: The current level.
        can_cut: Whether batches can be run in several passes.
    """
    if level.chunk_share is not None and level.chunk_share > FALLBACK_SHARE:
        return LowerLevel(
            "chunk share",
            replace(level, chunk_share=FALLBACK_SHARE),
            f"fewer chunks are on the device at once, in the ratio of {level.chunk_share:.0%} to "
            f"{FALLBACK_SHARE:.0%}; their order stays",
        )
    smaller = smaller_pass(level.batch_size, level.pass_size) if can_cut else None
    may_checkpoint = level.can_checkpoint and not level.is_checkpointed
    # Recomputing costs a third of the time, so it comes after half the batch, which costs less.
    if may_checkpoint and (smaller is None or smaller < level.batch_size // 2):
        return LowerLevel(
            "activation checkpointing",
            replace(level, is_checkpointed=True),
            "activations are computed again in the backward pass: about a third more time",
        )
    if smaller is None:
        return None
    sizes = " + ".join(map(str, cut(level.batch_size, smaller)[:4]))
    more = " + …" if level.batch_size > 4 * smaller else ""
    below = replace(level, pass_size=smaller)
    return LowerLevel(
        "batch",
        below,
        f"{level.pass_size} samples at once, now {smaller}: a batch goes through as {sizes}{more}, "
        f"{below.num_passes} passes per update keep the effective batch at {below.effective_batch}",
    )


def smaller_pass(batch_size: int, pass_size: int) -> int | None:
    """Return the next of 3/4, 1/2, 3/8, 1/4, ... of the batch below `pass_size`; None below 1."""
    whole = batch_size
    while whole:
        for size in (whole, whole * 3 // 4):
            if 1 <= size < pass_size:
                return size
        whole //= 2
    return None


def exhausted(level: MemoryLevel, can_cut: bool = True) -> InputError:
    """Return the error for a run that has no lower level to go to."""
    recomputed = "recomputed" if level.is_checkpointed else "kept: no block can be recomputed"
    count = level.pass_size if can_cut else level.batch_size
    whole = "" if can_cut else ", which cannot go through in parts,"
    return InputError(
        f"the device's memory ran out with {count} sample{'s' * (count > 1)} at once{whole} and "
        f"activations {recomputed}.",
        f"a model whose weights, optimizer state and {'one sample' if can_cut else 'one batch'} fit",
        f"{'' if can_cut else 'a smaller batch size, '}precision=bf16, a smaller model, shorter windows or "
        "smaller images, or a larger GPU",
    )


# -- what was learned ------------------------------------------------------------------------------


def sign_model(model: torch.nn.Module, *details: object) -> str:
    """Return a key for what needs memory: parameters by name, shape and dtype, and `details`.

    Args:
        model: On any device.
        details: Other facts that decide how much is needed, such as precision and the optimizer's class.
    """
    digest = xxhash.xxh3_64(type(model).__qualname__.encode())
    for name, parameter in model.named_parameters():
        digest.update(f"\n{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
    for detail in details:
        digest.update(f"\n{detail}".encode())
    return f"{type(model).__name__}-{digest.hexdigest()}"


@dataclass(frozen=True)
class Circumstances:
    """Key of the cache of memory levels: a remembered level is used for the same model, GPU and free memory only.

    Attributes:
        model: From `sign_model`.
        gpu: The device's name.
        free_gib: Free memory rounded down to a multiple of 2 GiB, so that small changes still match.
    """

    model: str
    gpu: str
    free_gib: int

    @classmethod
    def of(cls, model: str, gpu: str, free_bytes: int) -> Circumstances:
        """Return the circumstances for a number of free bytes."""
        return cls(model, gpu, free_bytes // (2 * GIB) * 2)


class Remembered:
    """Cache of the memory levels that fitted, kept between runs: one small file per circumstances.

    A file that cannot be read or written does not end a run: the problem is added to `notes`.

    Attributes:
        notes: Problems with files of the cache, in words.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = (folder or user_cache_folder()) / "memory"
        self.notes: list[str] = []

    def recall(self, circumstances: Circumstances, asked: MemoryLevel) -> MemoryLevel | None:
        """Return the level that fitted when `asked` was configured in these circumstances; None if unknown."""
        path = self._path(circumstances)
        try:
            found = parse_json(path.read_text(encoding="utf-8"))
            if found["circumstances"] != asdict(circumstances) or found["asked"] != asdict(asked):
                return None
            return _level(found["learned"], asked)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            self.notes.append(f"{path} is ignored, it cannot be read: {error}")
            return None

    def remember(
        self, circumstances: Circumstances, asked: MemoryLevel, learned: MemoryLevel
    ) -> None:
        """Keep a level; it replaces the one that was kept for the same circumstances."""
        path = self._path(circumstances)
        document = {
            "circumstances": asdict(circumstances),
            "asked": asdict(asked),
            "learned": asdict(learned),
            "saved_at": round(time.time()),
        }
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            mark_once(self.folder, _KIND)
            write_text(path, json_text(document, indent=1) + "\n", always)
        except OSError as error:
            self.notes.append(f"the setting that fits is not remembered: {path}: {error.strerror}")

    def forget(self, circumstances: Circumstances) -> None:
        """Remove the level that was kept for these circumstances: memory ran out even at the lowest level."""
        try:
            if read_mark(self.folder, _KIND) is not None:
                remove_file(self._path(circumstances), always)
        except OSError as error:
            self.notes.append(f"{self._path(circumstances)} cannot be removed: {error.strerror}")

    def _path(self, circumstances: Circumstances) -> Path:
        digest = xxhash.xxh3_64_hexdigest(json_text(asdict(circumstances)).encode())
        return self.folder / f"{digest}.json"


def _level(found: Mapping[str, Any], asked: MemoryLevel) -> MemoryLevel:
    """Return the stored level; ValueError if it is none of the levels from `asked` down.

    A file may have been edited, or written by another version: only levels that this version reaches are valid.
    """
    for can_cut in (True, False):
        level, lower = asked, next_level(asked, can_cut)
        while asdict(level) != found and lower is not None:
            level = lower.level
            lower = next_level(level, can_cut)
        if asdict(level) == found:
            return level
    raise ValueError("it is none of the levels below the configured one")
