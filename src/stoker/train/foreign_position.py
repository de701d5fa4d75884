"""The position of a foreign loader (not stoker's) in its epoch, and how to resume there.

Enters: a torch DataLoader, or anything that yields batches. Leaves: its position in plain values for a
checkpoint, and from that an iteration over the remaining batches of the epoch. Costs: some µs per epoch. A
resume draws the order again; the batches before the position are loaded only if that cannot be avoided.

A DataLoader draws its order when an epoch begins, from its own generators or torch's global one. Their states at
that moment are saved, so that the same order can be drawn again. The batches that were trained on are then
skipped, and the generators are set to their states at the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from stoker.errors import InputError
from stoker.train.generators import capture_host_rng, restore_rng

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
            return None
        if again and isinstance(self.loader, Iterator):
            return None  # an iterator continues after its last batch
        assert self._start is not None
        arrive = partial(restore_rng, capture_host_rng())
        restore_rng(self._start)
        self._set_own(self._start["own"])
        if _can_skip(self.loader):
            return _skipping_loader(self.loader, skip, arrive)
        return _Dropping(self.loader, skip, arrive)

    def state_dict(self, loader_state: Any = None) -> dict[str, Any]:
        """Return the position in plain values.

        Args:
            loader_state: `state_dict` of the loader, if it has one.
        """
        return {
            "epoch": self.epoch,
            "taken": self.num_taken,
            "start": self._start if self.num_taken else self._capture(),
            "loader": loader_state,
            "made": _facts(self.loader),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> str | None:
        """Continue from a position; return a sentence on what that costs, or None."""
        self.end()
        self.epoch, self.num_taken = state["epoch"], int(state["taken"])
        if self.knows_itself:
            return None
        if self.num_taken:  # between epochs, batch size and order may change
            _check_same(state.get("made") or {}, _facts(self.loader))
        self._set_own(state["start"]["own"])
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
        return {**capture_host_rng(), "own": self._own_states()}

    def _own_states(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in _generators(self.loader)]

    def _set_own(self, states: list[torch.Tensor]) -> None:
        generators = _generators(self.loader)
        if len(generators) != len(states):
            raise InputError(
                f"the loader has {len(generators)} random generators of its own, the one that was saved "
                f"had {len(states)}.",
                "a loader made as it was when the run was saved",
                "DataLoader(dataset, generator=torch.Generator()) as before",
            )
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state.cpu())


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


def _generators(loader: Any) -> list[torch.Generator]:
    """Return the generators that a loader and its samplers draw from, each once."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    samplers = (getattr(loader, "sampler", None), getattr(batch_sampler, "sampler", None))
    found: dict[int, torch.Generator] = {}
    for part in (loader, batch_sampler, *samplers):
        generator = getattr(part, "generator", None)
        if isinstance(generator, torch.Generator):
            found[id(generator)] = generator
    return list(found.values())


def _can_skip(loader: Any) -> bool:
    """Whether batches are lists of indices, so that skipping them loads nothing."""
    return (
        type(loader) is DataLoader
        and loader.batch_sampler is not None
        and not isinstance(loader.dataset, IterableDataset)
    )


def _skipping_loader(loader: Any, skip: int, arrive: Callable[[], object]) -> DataLoader[Any]:
    """Return a DataLoader like this one without its first batches, for one iteration."""
    options = {name: getattr(loader, name) for name in _COPIED if hasattr(loader, name)}
    batches = _Dropping(loader.batch_sampler, skip, arrive)
    return DataLoader(loader.dataset, batch_sampler=batches, **options)


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
