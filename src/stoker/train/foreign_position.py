"""The position of a foreign loader (not stoker's) in its epoch, and how to resume there.

Enters: a torch DataLoader, or anything that yields batches. Leaves: its position in plain values for a
checkpoint, and from that an iteration over the remaining batches of the epoch. Costs: some µs per epoch. A
resume draws the order again; the batches before the position are loaded only if that cannot be avoided.

A DataLoader draws its order when an epoch begins, from its own generators or torch's global one. Their states at
that moment are saved, so that the same order can be drawn again. The batches that were trained on are then
skipped, and the generators are set to their states at the checkpoint. Every iterator of a DataLoader draws a seed for
its workers before the order, but persistent workers keep their iterator for all epochs: whether a seed was drawn is
saved too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils.data import DataLoader, IterableDataset

from stoker.errors import InputError
from stoker.train.generators import Generator, capture_host_rng, restore_rng, set_state, state_of

_COPIED = (
    "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context",
    "generator", "prefetch_factor", "in_order",
)  # fmt: skip


class ForeignPosition:
    """Counts the batches of an epoch, and resumes after them.

    Attributes:
        knows_itself: Whether the loader has `state_dict` and `load_state_dict`, which are then used.
        epoch: Number of the current epoch; None between two epochs.
        num_taken: Batches of the epoch that are done.
        is_under_way: Whether an iteration over the epoch has begun in this process.
    """

    epoch: int | None
    num_taken: int
    is_under_way: bool
    _start: dict[str, Any] | None

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._has_begun = getattr(loader, "_iterator", None) is not None
        self._first = {name: _digest(value) for name, value in _numbers_of(loader).items()}
        self.knows_itself = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        self.end()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch; the position stays if `epoch` is the current one already."""
        if epoch != self.epoch:
            self.end()
        self.epoch = epoch

    def end(self) -> None:
        """End the epoch: the next one begins with its first batch."""
        self.epoch, self.num_taken, self._start = None, 0, None
        self.is_under_way = False

    def begin(self, also_taken: int = 0) -> Iterable[Any] | None:
        """Return an iterable over the remaining batches; None if that is the loader itself.

        Args:
            also_taken: Number of further batches to skip, because the caller still holds them.
        """
        skip = self.num_taken + also_taken
        again, self.is_under_way = self.is_under_way, True
        if self.knows_itself:
            return None
        if not skip:
            self._start = self._capture()
            self._has_begun = True
            is_new = getattr(self.loader, "_iterator", None) is None
            return _Seedless(self.loader) if is_new and self._start["has_begun"] else None
        if again and isinstance(self.loader, Iterator):
            return None  # an iterator continues after its last batch
        assert self._start is not None
        arrive = partial(restore_rng, capture_host_rng())
        restore_rng(self._start)
        self._set_own(self._start)
        seedless = bool(self._start.get("has_begun"))  # checkpoints of older versions do not say
        if _can_skip(self.loader):
            return _skipping_loader(self.loader, skip, arrive, seedless)
        return _Dropping(_Seedless(self.loader) if seedless else self.loader, skip, arrive)

    def state_dict(self, loader_state: Any = None) -> dict[str, Any]:
        """Return the position in plain values.

        Args:
            loader_state: `state_dict` of the loader, if it has one.
        """
        return {
            "epoch": self.epoch,
            "taken": self.num_taken,
            "start": self._start if self.num_taken else self._capture(),
            "has_begun": self._has_begun,
            "loader": loader_state,
            "made": _facts(self.loader),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> str | None:
        """Continue from a position; return a sentence on what that costs, or None."""
        self.end()
        self.epoch, self.num_taken = state["epoch"], int(state["taken"])
        self._has_begun = self._has_begun or bool(state.get("has_begun"))
        if self.knows_itself:
            return None
        if self.num_taken:  # between epochs, batch size and order may change
            _check_same(state.get("made") or {}, _facts(self.loader))
        self._set_own(state["start"])
        if not self.num_taken:
            return None
        self._start = dict(state["start"])
        kind, batches = (
            type(self.loader).__name__,
            f"the first {self.num_taken} batches of the epoch",
        )
        if _can_skip(self.loader):
            return f"{kind} continues after {batches}: its sampler draws the same order, nothing is loaded twice"
        return (
            f"{kind} has no place to go to: {batches} are read again and left out, which is right where "
            "it yields the same batches in every run"
        )

    # -- inside ----------------------------------------------------------------------------

    def _capture(self) -> dict[str, Any]:
        keeps_workers = bool(getattr(self.loader, "persistent_workers", False))
        numbers = _numbers_of(self.loader).items()
        return {
            **capture_host_rng(),
            "own": [state_of(generator) for generator in _generators(self.loader)],
            # Only those that an iteration changes: others may be made differently for the next epoch.
            "numbers": {n: value for n, value in numbers if self._first.get(n) != _digest(value)},
            "has_begun": self._has_begun and keeps_workers,
        }

    def _set_own(self, start: Mapping[str, Any]) -> None:
        _set_numbers(self.loader, start.get("numbers") or {})
        generators, states = _generators(self.loader), start["own"]
        if len(generators) != len(states):
            raise InputError(
                f"the loader has {len(generators)} random generators of its own, the one that was saved "
                f"had {len(states)}.",
                "a loader made as it was when the run was saved",
                "DataLoader(dataset, generator=torch.Generator()) as before",
            )
        for generator, state in zip(generators, states, strict=True):
            # Older checkpoints have torch's generators only, as tensors.
            set_state(generator, {"torch": state} if isinstance(state, torch.Tensor) else state)


def _facts(loader: Any) -> dict[str, Any]:
    """Return the facts that decide which samples the first batches hold; None for each that is unknown."""
    sampler = getattr(loader, "batch_sampler", None)
    of_samples = getattr(loader, "sampler", None) if sampler is None else sampler
    of_samples = getattr(of_samples, "sampler", of_samples)
    size = getattr(loader, "batch_size", None) or getattr(sampler, "batch_size", None)
    return {
        "batch size": size if isinstance(size, int) else None,
        "samples": _length(getattr(loader, "dataset", None)),
        # Only without a batch size: `drop_last` changes the number of batches, but not their samples.
        "batches": _length(loader) if size is None else None,
        "order": None if of_samples is None else type(of_samples).__name__,
    }


def _length(thing: Any) -> int | None:
    try:
        return len(thing)
    except (TypeError, NotImplementedError):
        return None


def _check_same(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise if the batches to skip would not hold the samples that were trained on."""
    for name, value in now.items():
        before = saved.get(name)  # older checkpoints have none
        if before is None or value is None or before == value:
            continue
        raise InputError(
            f"the loader's {name} is {value}, and was {before} in the middle of the epoch that was saved: its first "
            "batches are not those that were trained on.",
            "a loader made as before until the epoch ends; a stoker.Loader goes on with any batch size",
            f"batch_size={before}"
            if name == "batch size"
            else "the data and the order as before, or a new run_dir",
        )


def _attributes(loader: Any) -> Iterator[tuple[str, dict[str, Any], str, Any]]:
    """Yield the attributes of a loader and of its samplers: a name, the container, the key, and the value."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    samplers = (getattr(loader, "sampler", None), getattr(batch_sampler, "sampler", None))
    for place, part in enumerate((loader, batch_sampler, *samplers)):
        held = getattr(part, "__dict__", {})
        yield from ((f"{place}.{key}", held, key, value) for key, value in list(held.items()))


def _generators(loader: Any) -> list[Generator]:
    """Return the generators that a loader and its samplers draw from, each once."""
    values = (value for _, _, _, value in _attributes(loader))
    return list({id(value): value for value in values if isinstance(value, Generator)}.values())


def _numbers_of(loader: Any) -> dict[str, Any]:
    """Return the numbers, and the lists and arrays of integers, that a loader and its samplers hold.

    Many samplers count their epochs, or shuffle a list of indices in place.
    """
    found: dict[str, Any] = {}
    for name, _, _, value in _attributes(loader):
        if isinstance(value, bool | int | float):
            found[name] = value
        elif (integers := _integers(value)) is not None:
            found[name] = integers
    return found


def _integers(value: Any) -> torch.Tensor | None:
    """Return a copy of a list or array of integers in host memory; None for any other value."""
    if isinstance(value, list) and value and isinstance(value[0], int | np.integer):
        with contextlib.suppress(ValueError, TypeError, OverflowError):
            value = np.array(value)
    if isinstance(value, torch.Tensor) and value.device.type == "cpu":
        value = value.detach().numpy() if value.dtype == torch.int64 else None
    if not isinstance(value, np.ndarray) or value.ndim != 1 or value.dtype.kind not in "iu":
        return None
    return torch.from_numpy(value.astype(np.int64))


def _digest(value: Any) -> Any:
    """Return a number itself, and the digest of a tensor."""
    if not isinstance(value, torch.Tensor):
        return value
    return xxhash.xxh3_128_hexdigest(value.numpy().data)


def _set_numbers(loader: Any, numbers: Mapping[str, Any]) -> None:
    """Set attributes to values of `_numbers_of`; one that is of another kind or length now is left alone."""
    for name, held, key, value in _attributes(loader):
        saved = numbers.get(name)
        if saved is None:
            continue
        if not isinstance(saved, torch.Tensor):
            held[key] = saved if isinstance(value, bool | int | float) else value
        elif (now := _integers(value)) is not None and len(now) == len(saved):
            value[:] = (
                saved.tolist()
                if isinstance(value, list)
                else saved.cpu()
                if isinstance(value, torch.Tensor)
                else saved.cpu().numpy()
            )


def _can_skip(loader: Any) -> bool:
    """Whether batches are lists of indices, so that skipping them loads nothing."""
    return (
        type(loader) is DataLoader
        and loader.batch_sampler is not None
        and not isinstance(loader.dataset, IterableDataset)
    )


def _skipping_loader(
    loader: Any, skip: int, arrive: Callable[[], object], seedless: bool
) -> DataLoader[Any]:
    """Return a DataLoader like this one without its first batches, for one iteration; `seedless` as in `_Seedless`."""
    options = {name: getattr(loader, name) for name in _COPIED if hasattr(loader, name)}
    if seedless:
        options["generator"] = _like_torchs()
    batches = _Dropping(loader.batch_sampler, skip, arrive)
    return DataLoader(loader.dataset, batch_sampler=batches, **options)


def _like_torchs() -> torch.Generator:
    """Return a generator in the state of torch's own, which then need not draw."""
    generator = torch.Generator()
    generator.set_state(torch.get_rng_state())
    return generator


class _Seedless:
    """A DataLoader with persistent workers. A new iterator of it draws its seed from a generator of its own."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        if getattr(self._loader, "_iterator", None) is not None:  # that draws none
            return iter(self._loader)
        own = self._loader.generator
        self._loader.generator = _like_torchs()
        try:
            return iter(self._loader)
        finally:
            self._loader.generator = own


class _Dropping:
    """Batches, or lists of indices, without the first ones; calls `arrive` after skipping them."""

    def __init__(self, batches: Iterable[Any], skip: int, arrive: Callable[[], object]) -> None:
        self._batches = batches
        self._skip = skip
        self._arrive = arrive

    def __len__(self) -> int:
        return max(0, len(self._batches) - self._skip)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        rest = iter(self._batches)
        for _ in range(self._skip):
            next(rest, None)
        self._arrive()
        yield from rest
