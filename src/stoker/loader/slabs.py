"""Batches from pageable host memory to the device, through a few pinned slabs that are reused.

Enters: a batch of any nesting. Leaves: the same batch with device tensors, and marks (events) to wait for.
Costs: one copy in host memory at memory speed; at most `num_slabs` slabs of pinned memory, whatever
the size of a batch. Measured: `prefetch.py`.

Contract of `Stager.stage`:

    success   every copy is queued; the batch is complete after all its marks. The source may be
              overwritten at once, or after `settle` if its owner had pinned it
    failure   the error is raised; slabs that were filled stay valid, because each is reused only after the
              mark of its last copy
    cancel    nothing runs in the background: there is nothing to cancel
    threads   one thread at a time

The ordering rules are plain Python in this file. CUDA is behind `CudaEngine`, so that a test can replace it with
one that performs every copy as late as the rules allow.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch

from stoker.errors import InputError

MAX_SLAB_BYTES = 16 << 20
NUM_SLABS = 4
_MIN_SLAB_BYTES = 64 << 10
_SMALL_PIECE_BYTES = 4 << 10
_ALIGNMENT = 256


def usable_device(device: str | int | torch.device | None = None) -> torch.device:
    """Return a CPU or CUDA device that exists here, with its index. None: torch's current GPU, else the CPU."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if isinstance(device, bool):  # as `DataLoader(dataset, 64, True)`
        raise InputError(
            f"{device} is no device, which is the third argument of a Loader.",
            "'cuda', 'cuda:0' or 'cpu'; the order by its name",
            f"shuffle={device}",
        )
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InputError(
            f"{device!r} is no device.", "'cuda', 'cuda:0' or 'cpu'", "device='cpu' (--device cpu)"
        ) from error
    if wanted.type == "cpu":
        return torch.device("cpu")
    if wanted.type != "cuda":
        raise InputError(
            f"device is {device!r}.", "'cuda', 'cuda:0' or 'cpu'", "device='cpu' (--device cpu)"
        )
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index: int | None = wanted.index
    if index is None and num_gpus:
        index = torch.cuda.current_device()
    if index is None or index >= num_gpus:
        raise InputError(
            f"device {device!r} was asked for, but torch sees {num_gpus} CUDA devices.",
            "'cpu'" if not num_gpus else f"'cpu' or 'cuda:0' to 'cuda:{num_gpus - 1}'",
            "device='cpu' (--device cpu), or `stoker machine` to see what is there",
        )
    return torch.device("cuda", index)


class Mark(Protocol):
    """A point in a stream's work; on CUDA an event."""

    def query(self) -> bool:
        """Whether the work before it is done."""

    def synchronize(self) -> None:
        """Wait, on the host, until the work before it is done."""


def wait_for(mark: Mark) -> None:
    """Wait on the host. Queries first: a thread that sleeps and is woken loses 50 µs."""
    if not mark.query():
        mark.synchronize()


class CudaEngine:
    """The operations that staging needs from a device; the only connection between this file and CUDA.

    Args:
        device: A CUDA device.
        copies: Stream for the copies.
    """

    def __init__(self, device: torch.device, copies: torch.cuda.Stream) -> None:
        self._device = device
        self._copies = copies
        self._home = self._outside = torch.cuda.current_stream(device)

    def home(self) -> contextlib.AbstractContextManager[Any]:
        """Work inside goes to the consumer's stream, on its device."""
        return torch.cuda.stream(self._home)

    def pin(self, num_bytes: int) -> torch.Tensor:
        """Return pinned uint8 memory."""
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether copies from it need no staging."""
        return tensor.is_pinned()

    def is_here(self, tensor: torch.Tensor) -> bool:
        """Whether it is on the device already."""
        return tensor.device == self._device

    def copying(self) -> contextlib.AbstractContextManager[Any]:
        """Work inside goes to the copy stream."""
        self._outside = torch.cuda.current_stream(self._device)
        return torch.cuda.stream(self._copies)

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Inside `copying`: return device memory of this shape, type and layout."""
        return torch.empty_like(tensor, device=self._device)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Inside `copying`: queue a copy from pinned memory."""
        target.copy_(source, non_blocking=True)

    def mark_copies(self) -> Mark:
        """Mark the end of the copies queued so far."""
        return self._mark(self._copies)

    def mark_user(self) -> Mark:
        """Mark the end of the work queued so far on the calling thread's stream."""
        return self._mark(torch.cuda.current_stream(self._device))

    def move(self, thing: Any) -> Any:
        """Inside `copying`: move by its own `.to`, on the stream that was current before it."""
        with torch.cuda.stream(self._outside):
            return thing.to(self._device)

    def receive(self, tensors: list[torch.Tensor], marks: list[Mark]) -> None:
        """Make the calling thread's stream wait for the marks, and keep the tensors' memory until it is done."""
        stream = torch.cuda.current_stream(self._device)
        for mark in marks:
            stream.wait_event(mark)  # type: ignore[arg-type]
        # Made on the copy stream: without this the allocator could hand the memory out while the consumer reads it.
        for tensor in tensors:
            tensor.record_stream(stream)

    @staticmethod
    def _mark(stream: torch.cuda.Stream) -> Mark:
        event = torch.cuda.Event(blocking=True)  # a waiting thread sleeps instead of spinning
        event.record(stream)
        return event


@dataclasses.dataclass
class _Slab:
    """Pinned memory. The first `used` bytes are filled; `free` is the mark of its last copy, once it is full."""

    memory: torch.Tensor
    used: int = 0
    free: Mark | None = None


@dataclasses.dataclass(frozen=True)
class Staged:
    """A batch whose copies are queued; it is complete after all marks."""

    batch: Any
    tensors: list[torch.Tensor]
    marks: list[Mark]


class Stager:
    """Copies batches through a few pinned slabs. Not thread safe.

    Every batch begins in an empty slab. A large batch uses several, so that the host fills one while the
    device copies the one before. A slab's size is a power of two, to which torch's host allocator rounds up
    anyway, and grows with the batches up to `max_slab_bytes`.
    """

    def __init__(
        self,
        engine: CudaEngine | None = None,
        max_slab_bytes: int = MAX_SLAB_BYTES,
        num_slabs: int = NUM_SLABS,
    ) -> None:
        if engine is not None:
            self.engine = engine
        self._max_slab_bytes = max_slab_bytes
        self._slab_bytes = min(_MIN_SLAB_BYTES, max_slab_bytes)
        self._slabs: list[_Slab | None] = [None] * num_slabs
        self._current = 0
        self._batch_bytes = 0
        self._borrowed: list[torch.Tensor] = []
        self._lent: Mark | None = None

    engine: CudaEngine

    @property
    def pinned_bytes(self) -> int:
        """Bytes of all slabs."""
        return sum(slab.memory.nbytes for slab in self._slabs if slab is not None)

    def stage(self, batch: Any) -> Staged:
        """Queue the copies of every tensor in `batch`; its memory may be overwritten afterwards.

        Memory that its owner had pinned is copied from directly: call `settle` before it is overwritten.
        """
        # The last batch is the best guess for this one: a slab is replaced between batches, not within one.
        self._grow(self._batch_bytes)
        self._batch_bytes = 0
        tensors: list[torch.Tensor] = []
        at_home: list[Any] = []
        with torch.no_grad(), self.engine.copying():
            moved = map_batch(batch, lambda leaf: self._move(leaf, tensors, at_home))
        marks: list[Mark] = []
        if tensors:
            marks.append(self.engine.mark_copies())
            self._seal(marks[0])
            # Kept alive until its copy is done: the batch may be dropped at once.
            if self._borrowed:
                self._lent = marks[0]
        if at_home:
            marks.append(self.engine.mark_user())
        return Staged(moved, [*tensors, *filter(_is_plain, at_home)], marks)

    def settle(self) -> None:
        """Wait for the copies that read memory which the batch's owner had pinned."""
        if self._lent is not None:
            wait_for(self._lent)
            self._lent = None
            self._borrowed.clear()

    def _move(self, leaf: Any, tensors: list[torch.Tensor], at_home: list[Any]) -> Any:
        if not _is_plain(leaf):
            # Sparse, nested, quantised, with gradient, a subclass, or an object with its own `to`: rare,
            # and only its own method knows how to copy it. That copy blocks the host.
            with torch.enable_grad():
                at_home.append(self.engine.move(leaf))
            return at_home[-1]
        if self.engine.is_here(leaf):
            at_home.append(leaf)
            return leaf
        if leaf.device.type != "cpu":
            at_home.append(self.engine.move(leaf))
            return at_home[-1]
        source = leaf.resolve_conj().resolve_neg()  # lazy views: their bytes are not their values
        if not _is_dense(source):
            source = source.contiguous()
        target = self.engine.empty_like(source)
        tensors.append(target)
        if source.numel():
            self._copy(target, source)
        return target

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target, source = _as_bytes(target), _as_bytes(source)
        if self.engine.is_pinned(source):
            self._borrowed.append(source)
            self.engine.copy(target, source)
            return
        self._batch_bytes += source.nbytes
        self._grow(source.nbytes)
        low = 0
        while low < source.nbytes:
            piece = self._room(source.nbytes - low)
            high = low + piece.nbytes
            piece.copy_(source[low:high])
            self.engine.copy(target[low:high], piece)
            low = high

    def _room(self, wanted: int) -> torch.Tensor:
        """Return up to `wanted` free bytes of the current slab, or of the next one when it is full."""
        slab = self._slabs[self._current]
        if slab is not None and slab.free is None:
            # A small rest is left unused: many small copies cost more than the bytes that they would save.
            if slab.memory.nbytes - slab.used < min(wanted, _SMALL_PIECE_BYTES):
                self._seal(self.engine.mark_copies())
                slab = self._open()
        else:
            slab = self._open()
        count = min(wanted, slab.memory.nbytes - slab.used)
        piece = slab.memory[slab.used : slab.used + count]
        slab.used = min(slab.memory.nbytes, -(-(slab.used + count) // _ALIGNMENT) * _ALIGNMENT)
        return piece

    def _open(self) -> _Slab:
        """Empty the current slab, which may wait for its last copy, and replace it if it is too small."""
        slab = self._slabs[self._current]
        if slab is not None and slab.free is not None:
            wait_for(slab.free)
        if slab is None or slab.memory.nbytes < self._slab_bytes:
            slab = _Slab(self.engine.pin(self._slab_bytes))
            self._slabs[self._current] = slab
        slab.used, slab.free = 0, None
        return slab

    def _seal(self, mark: Mark) -> None:
        """Close the current slab if anything is in it: it may be filled again after `mark`."""
        slab = self._slabs[self._current]
        if slab is not None and slab.free is None and slab.used:
            slab.free = mark
            self._current = (self._current + 1) % len(self._slabs)

    def _grow(self, num_bytes: int) -> None:
        if num_bytes > self._slab_bytes:
            self._slab_bytes = min(self._max_slab_bytes, 1 << (num_bytes - 1).bit_length())


def _is_plain(leaf: Any) -> bool:
    return (
        type(leaf) is torch.Tensor
        and leaf.layout is torch.strided
        and not (leaf.requires_grad or leaf.is_quantized or leaf.is_nested)
    )


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill one block of memory, in whatever order of axes."""
    expected = 1
    for stride, size in sorted(
        (stride, size)
        for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
        if size != 1
    ):
        if stride != expected:
            return False
        expected *= size
    return True


def _as_bytes(dense: torch.Tensor) -> torch.Tensor:
    """View a dense tensor as its bytes in memory order."""
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


def map_batch(batch: Any, move: Callable[[Any], Any]) -> Any:
    """Rebuild `batch` with `move(leaf)` for every tensor and every object that has a `to` method.

    Walks through dicts, lists, tuples, named tuples and dataclasses, and keeps their types. A container
    without anything to move is returned as it is. `batch` is never modified.

    A user's own class keeps its type and attributes, and its constructor is not called again. If an object
    cannot be rebuilt this way (it refuses to be copied, or computes its items), its items are returned in
    a plain dict, list or tuple.
    """
    if isinstance(batch, torch.Tensor):
        return move(batch)
    if isinstance(batch, type):  # a class has a function `to`, but nothing to move
        return batch
    if callable(getattr(batch, "to", None)):
        return move(batch)
    if isinstance(batch, Mapping):
        items = dict(batch.items())
        moved = {key: map_batch(value, move) for key, value in items.items()}
        same = _all_same(moved.values(), items.values())
        return batch if same else _with_items(batch, items, moved)
    if isinstance(batch, list | tuple):
        parts = [map_batch(part, move) for part in batch]
        return batch if _all_same(parts, batch) else with_parts(batch, parts)
    if dataclasses.is_dataclass(batch):
        return _with_fields(batch, move)
    return batch


def _all_same(these: Iterable[Any], those: Iterable[Any]) -> bool:
    return all(this is that for this, that in zip(these, those, strict=True))


def _with_items(
    batch: Mapping[Any, Any], items: dict[Any, Any], moved: dict[Any, Any]
) -> Mapping[Any, Any]:
    """Return a mapping of the same class with `moved` instead of `items`, or `moved` itself."""
    if type(batch) is dict:
        return moved
    try:
        made = _remade(batch, items, moved)
        held = dict(made.items())
    except Exception:  # noqa: BLE001  a user's class may raise anything
        return moved
    # Checked again: a class that computes its items would return the old ones, on the wrong device.
    changed = [key for key, value in moved.items() if value is not items[key]]
    is_right = held.keys() == moved.keys() and all(held[key] is moved[key] for key in changed)
    return made if is_right else moved


def _remade(
    batch: Mapping[Any, Any], items: dict[Any, Any], moved: dict[Any, Any]
) -> Mapping[Any, Any]:
    clone = _own_copy(batch)
    if clone is None:
        has_more = getattr(batch, "__dict__", None)  # attributes that a constructor would lose
        return moved if has_more else type(batch)(moved)  # type: ignore[call-arg]
    # Not `clone[key] = value`: a shallow copy may keep its items in a container that the original shares.
    # A dict's own memory is not shared, and attributes get new containers below.
    if isinstance(clone, dict):
        dict.update(clone, moved)
    _swap_attributes(clone, items, moved)
    return clone  # type: ignore[no-any-return]


def with_parts(batch: list[Any] | tuple[Any, ...], parts: list[Any]) -> Any:
    """Return a list or tuple of the same class with other items, or a plain one."""
    if type(batch) is list:
        return parts
    if type(batch) is tuple:
        return tuple(parts)
    clone: Any
    if isinstance(batch, list):
        clone = _own_copy(batch)
        if clone is None:
            return parts
        list.__setitem__(clone, slice(None), parts)
    else:
        try:
            clone = tuple.__new__(type(batch), parts)  # its own __new__ may take something else
        except TypeError:  # a type in C, such as torch.return_types.max
            return _constructed(type(batch), parts)
        getattr(clone, "__dict__", {}).update(getattr(batch, "__dict__", {}))
    _swap_attributes(clone, dict(enumerate(batch)), dict(enumerate(parts)))
    return clone


def _constructed(kind: type[tuple[Any, ...]], parts: list[Any]) -> tuple[Any, ...]:
    plain = tuple(parts)
    try:
        made = kind(plain)
    except Exception:  # noqa: BLE001  a user's class may raise anything
        return plain
    return made if len(made) == len(plain) and _all_same(made, plain) else plain


def _with_fields(batch: Any, move: Callable[[Any], Any]) -> Any:
    names = [field.name for field in dataclasses.fields(batch) if hasattr(batch, field.name)]
    before = [getattr(batch, name) for name in names]
    after = [map_batch(value, move) for value in before]
    if _all_same(after, before):
        return batch
    clone = _own_copy(batch)
    if clone is None:
        clone = object.__new__(type(batch))
        getattr(clone, "__dict__", {}).update(getattr(batch, "__dict__", {}))
    for name, value in zip(names, after, strict=True):
        object.__setattr__(clone, name, value)  # frozen ones too
    return clone


def _own_copy(batch: Any) -> Any | None:
    """Return a shallow copy with attributes of its own; None if the class does not allow one."""
    try:
        clone = copy.copy(batch)
    except Exception:  # noqa: BLE001  a user's class may raise anything
        return None
    own = getattr(clone, "__dict__", None)
    is_shared = clone is batch or (own is not None and own is getattr(batch, "__dict__", None))
    return None if is_shared or type(clone) is not type(batch) else clone


def _swap_attributes(clone: Any, items: dict[Any, Any], moved: dict[Any, Any]) -> None:
    """Replace moved items in the clone's attributes, and in dicts, lists and tuples among them."""
    swaps = {id(old): moved[key] for key, old in items.items() if moved[key] is not old}

    def swap(key: Any, value: Any) -> Any:
        is_item = key in items and items[key] is value  # one object may be two items
        return moved[key] if is_item else swaps.get(id(value), value)

    attributes = getattr(clone, "__dict__", {})
    for name, value in list(attributes.items()):
        new = swap(name, value)
        if new is value and isinstance(value, dict):
            values = {key: swap(key, item) for key, item in value.items()}
            if not _all_same(values.values(), value.values()):
                new = _with_items(value, value, values)
        elif new is value and isinstance(value, list | tuple):
            parts = [swap(number, part) for number, part in enumerate(value)]
            if not _all_same(parts, value):
                new = with_parts(value, parts)
        if new is not value:
            attributes[name] = new
