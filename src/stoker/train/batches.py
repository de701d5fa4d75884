"""One epoch as the training step sees it, whatever loader it comes from.

Enters: a stoker `Loader`, a torch DataLoader, or anything that yields batches. Leaves: `Work`: inputs
and targets on the device, and which samples they are. Costs: nothing for a stoker loader, whose
batches are on the device already; other loaders are wrapped with `stoker.prefetch` on a GPU.

If an iteration ends with an error, a new one begins with the batch that failed: no batch is lost. Only one thread
may iterate; `Prefetcher` and `Loader` have their own threads.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any, Protocol

import numpy as np
import torch
import xxhash
from torch.utils.data import Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from stoker.augment.guard import check_loss
from stoker.errors import InputError
from stoker.loader.batch import Batch, IndexBatch
from stoker.loader.columns import batch_names
from stoker.loader.gather import Augments, check_augment
from stoker.loader.loader import Loader
from stoker.loader.prefetch import Prefetcher, prefetch, tell_epoch
from stoker.loader.slabs import with_parts
from stoker.store.fields import Array
from stoker.train.foreign_position import ForeignPosition
from stoker.train.ranks import Ranks, as_ranks, check_alike

Unpack = Callable[[Any], tuple[Any, Any]]
_SHARED = ("num_samples", "order", "seed", "drop_last", "batch_size", "chunks", "weights")
_CPU = torch.device("cpu")
_PAIRS = (("features", "targets"), ("images", "masks"), ("images", "labels"))


@dataclass(slots=True)  # frozen would cost 2 us a batch
class Work:
    """One batch, ready for the model.

    Attributes:
        inputs: Inputs of the model.
        targets: The criterion's second argument.
        num_samples: Rows that hold a sample.
        positions: Positions of the samples in the loader's list; None if the loader does not tell.
        batch: The stoker batch that it comes from, if any.
        index: Indices of a batch that is not assembled yet, in a captured run.
        num_together: Rows that hold a sample, over all ranks; None if there is one rank.
    """

    inputs: Any
    targets: Any
    num_samples: int
    positions: Array | None = None
    batch: Batch | None = None
    index: IndexBatch | None = None
    num_together: int | None = None

    @property
    def reset(self) -> torch.Tensor | None:
        """Rows whose recurrent state starts from the initial one; None without lanes."""
        return None if self.batch is None else self.batch.reset

    @property
    def rows(self) -> torch.Tensor | None:
        """Rows that hold a sample; None if all do. Only lanes that have ended leave rows without one."""
        if self.batch is None or self.positions is None or self.batch.reset is None:
            return None
        if self.num_samples == len(self.positions):
            return None
        held = torch.from_numpy(np.flatnonzero(self.positions >= 0))
        return held.to(self.batch.reset.device)

    @property
    def can_cut(self) -> bool:
        """Whether the batch can run in several passes: every tensor has a row per sample, and there are no lanes."""
        if self.reset is not None or any(map(_resists_cutting, (self.inputs, self.targets))):
            return False
        return all(
            tensor.dim() and tensor.shape[0] == self.num_samples
            for tensor in iterate_tensors((self.inputs, self.targets))
        )

    def part(self, start: int, stop: int) -> Work:
        """Return samples `start` to `stop` as views."""

        def cut(tensor: torch.Tensor) -> torch.Tensor:
            return tensor[start:stop]

        return replace(
            self,
            inputs=map_tensors(cut, self.inputs),
            targets=map_tensors(cut, self.targets),
            num_samples=min(stop, self.num_samples) - start,
        )


class WrapsLoader(Protocol):
    """A loader that yields a stoker loader's batches in another form, such as `ChunkDataLoader`.

    A trainer uses it like the loader inside: steps are captured, runs resumed, and chunks freed if memory is short.

    Attributes:
        stoker_loader: The wrapped loader.
    """

    stoker_loader: Loader

    def present(self, batch: Batch) -> Any:
        """Return a batch in the form that the wrapper yields."""


class Feed:
    """Iterates over the batches of one epoch as `Work`.

    Args:
        loader: A stoker `Loader`, a wrapper of one (`WrapsLoader`), or any iterable of batches.
        device: Device of the model.
        unpack: Maps a batch to (inputs, targets); by default batches are pairs, or have the usual names of fields.
        augmentation: Applied to images on the device; for validation, `Augments.validation()`.
        ranks: The ranks that share the epoch; a stoker Loader knows its own.

    Attributes:
        notes: What the user should know about the batches.
    """

    def __init__(
        self,
        loader: Any,
        device: torch.device,
        unpack: Unpack | None = None,
        augmentation: Augments | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        if isinstance(loader, Dataset) and not isinstance(loader, IterableDataset):
            raise InputError(
                f"a loader that is a {type(loader).__name__}, which has samples, not batches.",
                "a Loader, a DataLoader, or batches; DataLoader(dataset, batch_size=None) yields batches of a dataset",
                "stoker.Loader(dataset, 64)",
            )
        self.given_unpack: Unpack = unpack or unpack_by_name
        self.unpack = self.given_unpack if unpack is None else _checked(unpack)
        is_wrapped = isinstance(getattr(loader, "stoker_loader", None), Loader)
        if is_wrapped:
            loader, self.unpack = loader.stoker_loader, _unpack_presented(loader, self.unpack)
        self.loader = loader
        self._ranks = ranks or Ranks()
        self.device = device
        self.is_stoker = isinstance(loader, Loader)
        self._told_broken: set[int] = set()
        self._keys: tuple[Any, Any] | None = (0, 1) if unpack is None else None
        pair = loader.as_tuple if self.is_stoker else None
        self.notes: list[str] = []
        if unpack is None and isinstance(pair, tuple) and len(pair) == 2:
            self.given_unpack = self.unpack = itemgetter(*pair)
            self._keys = pair
        elif unpack is None and isinstance(pair, tuple) and len(pair) > 2:
            raise _several_inputs(f"a loader that yields {len(pair)} tensors.", map(repr, pair))
        elif unpack is None and self.is_stoker and not is_wrapped:
            used = self._keys = _usual_pair(names := batch_names(loader.columns))
            unused = [name for name in names if used and name.partition("/")[0] not in used]
            if unused:
                self.notes.append(
                    f"neither input nor target: {', '.join(unused)}; unpack= takes them, fields= of the Loader leaves "
                    "them out"
                )
        check_augment(augmentation, "resident", "gpu_augmentation")
        self._augmentation = augmentation
        self._unchecked_loss: Any = None
        self._position = ForeignPosition(
            loader.loader if isinstance(loader, Prefetcher) else loader
        )
        self._failed: list[Any] = []
        self._may_be_there = False
        if self.is_stoker:
            _check_device(loader.device, device)
            if augmentation is not None and loader.augment not in (None, augmentation):
                raise InputError(
                    "the loader augments its images, and the trainer was given an augmentation too.",
                    "one of the two",
                    "Trainer(...) without gpu_augmentation, or Loader(...) without augment",
                )
            if augmentation is not None:
                loader.use_augmentation(augmentation)
        elif device.type == "cuda" and not hasattr(loader, "pinned_bytes"):
            self.loader = prefetch(loader, device)
            self._may_be_there = not (
                self._position.knows_itself or isinstance(loader, torch.utils.data.DataLoader)
            )

    @property
    def augmentation(self) -> Augments | None:
        """Augmentation of the images on the device, or None; for a stoker loader, the loader's own."""
        return self.loader.augment if self.is_stoker else self._augmentation

    @property
    def augments_itself(self) -> bool:
        """Whether the loader is a stoker loader with an augmentation of its own, not one that was given here."""
        return self.augmentation is not None and self.augmentation is not self._augmentation

    def new_broken(self) -> dict[str, str]:
        """Return the samples whose pictures could not be decoded since the last call, with the reasons."""
        found = self.loader.broken if self.is_stoker else {}
        new = {str(number): found[number] for number in found.keys() - self._told_broken}
        self._told_broken |= found.keys()
        return new

    def pair_words(self) -> tuple[str, str] | None:
        """Return inputs and targets as source text for an `unpack`; None if the user gave an `unpack`."""
        return self._keys and (f"batch[{self._keys[0]!r}]", f"batch[{self._keys[1]!r}]")

    def use_augmentation(self, augmentation: Augments | None) -> None:
        """Use another augmentation from the next batch on; None stops augmenting."""
        check_augment(augmentation, "resident", "gpu_augmentation")
        self._augmentation = augmentation
        if self.is_stoker:
            self.loader.use_augmentation(augmentation)
        elif augmentation is not None:
            augmentation.seek(self._position.epoch or 0, self._position.num_taken)

    def check_ranks(self) -> None:
        """Check that the ranks' training loaders share one epoch. Every rank must call it.

        Raises:
            InputError: A stoker loader was made for other ranks than those that train, or they differ.
        """
        if not self._ranks.are_several or not self.is_stoker:
            return
        state = self.loader.state_dict()
        ranks = self._ranks
        with ranks.shared_fate():
            if (state["rank"], state["world_size"]) != (ranks.rank, ranks.world_size):
                raise InputError(
                    f"the training loader is for rank {state['rank']} of {state['world_size']}, and this is "
                    f"rank {ranks.rank} of {ranks.world_size}.",
                    "a part of every batch on each rank",
                    f"Loader(..., rank={ranks.rank}, world_size={ranks.world_size})",
                )
        chunks = state["chunks"]
        if chunks is not None:
            chunks = f"{len(chunks)} ({xxhash.xxh3_64_hexdigest(repr(chunks).encode())})"
        facts = {name: state[name] for name in _SHARED} | {"chunks": chunks}
        check_alike(ranks, {f"the training loader's {name}": fact for name, fact in facts.items()})

    @property
    def num_batches(self) -> int | None:
        """Batches of an epoch; None if the loader does not know."""
        if self.is_stoker:
            return int(self.loader.num_batches)
        try:
            return len(self.loader)
        except TypeError:
            return None

    @property
    def is_shared(self) -> bool:
        """Whether each rank has its own part of the samples. If not, every rank has all of them."""
        if self.is_stoker:
            return int(self.loader.world_size) > 1
        inner = getattr(getattr(self.loader, "batch_sampler", None), "sampler", None)
        samplers = (getattr(self.loader, "sampler", None), inner)
        return any(isinstance(sampler, DistributedSampler) for sampler in samplers)

    @property
    def batch_size(self) -> int | None:
        """Samples of a full batch; None if the loader does not tell."""
        sampler = getattr(self.loader, "batch_sampler", None)
        return getattr(self.loader, "batch_size", None) or getattr(sampler, "batch_size", None)

    def state_dict(self) -> Any:
        """Return the loader's position in its epoch; for loaders other than stoker's, that of every rank."""
        if self.is_stoker:
            return self.loader.state_dict()
        own = self.loader.state_dict() if self._position.knows_itself else None
        state = self._position.state_dict(own)
        return self._ranks.gather(state) if self._ranks.are_several else state

    def load_state_dict(self, state: Any) -> str | None:
        """Continue from a saved position; return a note for the user if that costs something or differs."""
        self._failed.clear()
        if self.is_stoker:
            words: str | None = self.loader.load_state_dict(state)
            return words
        state = self._own_state(as_ranks(state))
        if self._position.knows_itself:
            self.loader.load_state_dict(state["loader"])
        return self._position.load_state_dict(state)

    def _own_state(self, states: list[Any]) -> Any:
        """Return the state that this rank saved. Between two epochs, the number of ranks may change."""
        if len(states) == self._ranks.world_size:
            return states[self._ranks.rank]
        taken = max(int(state["taken"]) for state in states)
        if taken:
            raise InputError(
                f"{len(states)} ranks had taken {taken} batches of the epoch from loaders of their own, and "
                f"{self._ranks.world_size} are to go on.",
                f"{len(states)} ranks until the epoch ends: only a stoker Loader can share the rest of one",
                f"torchrun --nproc-per-node {len(states)}, or stoker.Loader(rank=, world_size=)",
            )
        return states[0]

    def shrink(self, share: float) -> int:
        """Keep a share of the chunks on the device; return the bytes that were freed."""
        return int(self.loader.shrink(share)) if self.is_chunked else 0

    @property
    def can_begin_again(self) -> bool:
        """Whether a new iteration can continue after an error; not if prefetched batches would be lost."""
        wrapped = self.loader.loader if isinstance(self.loader, Prefetcher) else None
        return not isinstance(wrapped, Iterator)

    @property
    def is_chunked(self) -> bool:
        """Whether the data is in chunks on the device, some of which can be freed."""
        return self.is_stoker and self.loader.tier == "chunked"

    def __iter__(self) -> Iterator[Work]:
        """Yield the remaining work of the loader's epoch."""
        yield from map(self._retry, list(self._failed))
        batches = (
            self.loader.remaining_batches()
            if self.is_stoker
            else self._counted(self._foreign_batches())
        )
        for batch in batches:
            self._failed.append(batch)
            work = self.make_work(batch)
            self._take()
            yield work
        if not self.is_stoker:
            self._position.end()

    def _counted(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield batches while every rank has one. Loaders other than stoker's may end at different steps.

        If one rank stopped alone, the others would wait in a collective. So the ranks compare at every step.
        """
        if not self._shares_epoch:
            yield from batches
            return
        source = iter(batches)
        while True:
            batch = next(source, None)
            num_ended, num_going = self._ranks.total(batch is None, batch is not None)
            if num_ended and num_going:
                raise InputError(
                    f"after {self._position.num_taken} batches the loaders of {num_ended:.0f} of "
                    f"{self._ranks.world_size} ranks have ended, and the others have not.",
                    "the same number of batches on every rank",
                    "DistributedSampler(dataset, drop_last=True), or stoker.Loader(rank=, world_size=)",
                )
            if batch is None:
                return
            yield batch

    @property
    def _shares_epoch(self) -> bool:
        return self._ranks.are_several and not self.is_stoker

    def _retry(self, batch: Any) -> Work:
        """Make work from a batch that failed before, with the same draws of the augmentation."""
        if not self.is_stoker and self.augmentation is not None:
            self.augmentation.seek(self._position.epoch or 0, self._position.num_taken)
        work = self.make_work(batch)
        self._take()
        return work

    def _take(self) -> None:
        self._failed.clear()
        self._position.num_taken += 1

    def _foreign_batches(self) -> Any:
        """Return an iterable over the remaining batches of the epoch."""
        if self._position.knows_itself and self._position.is_under_way:
            self.loader.load_state_dict(
                self.loader.state_dict()
            )  # a new iterator of it would start the epoch again
        source = self._position.begin(also_taken=len(self._failed))
        if source is None:
            return self._look_at_first() if self._may_be_there else self.loader
        if isinstance(self.loader, Prefetcher):
            self.loader.close()
            return prefetch(source, self.device, depth=self.loader.depth)
        return source

    def _look_at_first(self) -> Iterable[Any]:
        """Return the epoch's batches. If the first one is on the device already, prefetching ends for good.

        A prefetching thread with nothing to copy still takes the interpreter's lock: 0.1 ms of a step.
        """
        self._may_be_there = False
        batches = iter(self.loader.loader)
        first = list(itertools.islice(batches, 1))
        batches = itertools.chain(first, batches)
        if all(tensor.device == self.loader.device for tensor in iterate_tensors(first)):
            self.loader = self.loader.loader
            return batches
        return prefetch(batches, self.device, depth=self.loader.depth)

    def make_work(self, batch: Any) -> Work:
        """Turn a loader's batch into work; the host does not wait for the device."""
        if isinstance(batch, Batch):
            inputs, targets = self.unpack(batch)
            places = batch.positions
            # Only lanes have rows without a sample.
            count = len(places) if batch.valid is None else int((places >= 0).sum())
            together = batch.num_together if self._ranks.are_several else None
            return Work(inputs, targets, count, places, batch, num_together=together)
        if not self._is_prefetched:
            batch = map_tensors(self._bring, batch)
        inputs, targets = self.unpack(batch)
        if self._keys is not None and isinstance(batch, Mapping):
            self._keys = _usual_pair(batch)
        if self.augmentation is not None:
            if self._unchecked_loss is not None and _are_masks(targets):
                check_loss(self._unchecked_loss, self.augmentation)
                self._unchecked_loss = None
            inputs, targets = _augment(self.augmentation, inputs, targets)
        count = _count_samples(inputs, targets)
        together = int(self._ranks.total(count)[0]) if self._shares_epoch else None
        return Work(inputs, targets, count, num_together=together)

    @property
    def _is_prefetched(self) -> bool:
        return isinstance(self.loader, Prefetcher) and self.loader.device == self.device != _CPU

    def _bring(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device, non_blocking=True)

    def expect_loss(self, criterion: Any) -> None:
        """Check that a loss accepts the values that the augmentation writes into masks: now, or at the first masks."""
        self._unchecked_loss = criterion
        if self.is_stoker:
            fields = {values.name for column in self.loader.columns for values in column.values}
            if "masks" in fields:
                check_loss(criterion, self.augmentation or self.loader.augment)

    def set_epoch(self, epoch: int) -> None:
        """Pass the number of the next epoch to the loader or its samplers and dataset, and to the augmentation.

        After a resume in the middle of this epoch the position stays.
        """
        if self.is_stoker:
            if self.loader.epoch != epoch:
                self.loader.set_epoch(epoch)
            return
        self._position.set_epoch(epoch)
        tell_epoch(self.loader, epoch)
        if self.augmentation is not None:
            self.augmentation.seek(epoch, self._position.num_taken)

    def begin_anew(self) -> None:
        """Go to the start of epoch 0."""
        self._failed.clear()
        self._position.end()
        if self.is_stoker:
            self.loader.set_epoch(0)
        else:
            self.set_epoch(0)

    @property
    def position(self) -> int:
        """Batches of the epoch that are done."""
        return (
            int(self.loader.state_dict()["batch"]) if self.is_stoker else self._position.num_taken
        )


def _checked(unpack: Unpack) -> Unpack:
    """Return a user's `unpack`, with an error where it returns anything but a pair."""

    def unpack_pair(batch: Any) -> tuple[Any, Any]:
        made: Any = unpack(batch)
        if isinstance(made, tuple | list) and len(made) == 2:
            return made[0], made[1]
        count = f" of {len(made)}" if isinstance(made, tuple | list | dict) else ""
        raise InputError(
            f"unpack returned a {type(made).__name__}{count}.",
            "a pair (inputs, targets); both may be tuples or dicts",
            "Trainer(..., unpack=lambda batch: (batch[0], batch[1]))",
        )

    return unpack_pair


def _unpack_presented(wrapper: WrapsLoader, unpack: Unpack) -> Unpack:
    def unpack_presented(batch: Any) -> tuple[Any, Any]:
        return unpack(wrapper.present(batch))

    return unpack_presented


def unpack_by_name(batch: Any) -> tuple[Any, Any]:
    """Return (inputs, targets) of a batch that is a pair, or a mapping with the usual names."""
    if type(batch) in (tuple, list) and len(batch) == 2:  # most often
        return batch[0], batch[1]
    if isinstance(batch, Mapping):
        pair = _usual_pair(batch)
        if pair is not None:
            return batch[pair[0]], batch[pair[1]]
        given, names = f"a batch with {', '.join(map(str, batch))}.", [*batch, *batch][:2]
        # By order it would be given to other arguments of the model.
        if "input_ids" in batch and len(batch) > 2:
            raise InputError(
                given,
                "inputs that a Hugging Face model takes by name; with labels among them its outputs have the loss",
                "Trainer(..., unpack=lambda batch: (batch, None)), with the criterion lambda outputs, _: outputs.loss",
            )
        if len(batch) > 2:
            raise _several_inputs(given, map(repr, sorted(batch, key=_is_target)))
        raise InputError(
            given,
            " or ".join(f"{inputs} and {targets}" for inputs, targets in _PAIRS),
            f"Trainer(..., unpack=lambda batch: (batch[{names[0]!r}], batch[{names[-1]!r}]))"
            if names
            else "batches with fields",
        )
    if isinstance(batch, Sequence) and len(batch) == 2:
        return batch[0], batch[1]
    if isinstance(batch, Sequence) and len(batch) > 2:
        raise _several_inputs(f"a batch of {len(batch)} tensors.", map(str, range(len(batch))))
    raise InputError(
        f"a batch that is a {type(batch).__name__}.",
        "a pair (inputs, targets), or a mapping with named fields",
        f"Trainer(..., unpack=lambda batch: ({_advise_pair(batch)}))",
    )


def _advise_pair(batch: Any) -> str:
    """Return source text that takes inputs and targets from a batch that is neither a pair nor a mapping."""
    if isinstance(batch, torch.Tensor):
        return "batch, batch"
    named = (name for name in ("y", "labels", "label", "targets", "target") if hasattr(batch, name))
    if (name := next(named, None)) is not None:  # a graph of PyG, a batch of torchtext
        return f"batch, batch.{name}"
    return "batch[0], batch[0]"


def _usual_pair(names: Collection[Any]) -> tuple[str, str] | None:
    return next((pair for pair in _PAIRS if pair[0] in names and pair[1] in names), None)


def _is_target(name: object) -> bool:
    return str(name).lower().rstrip("s") in ("label", "target", "y", "clas", "mask")


def _several_inputs(given: str, keys: Iterable[str]) -> InputError:
    """Return the error for a batch of more than two entries; its advice takes the last one as the targets."""
    *inputs, targets = (f"batch[{key}]" for key in keys)
    return InputError(
        given,
        "a pair (inputs, targets); inputs that are a tuple become the arguments of a model that needs several",
        f"Trainer(..., unpack=lambda batch: (({', '.join(inputs)}), {targets}))",
    )


def map_tensors(
    change: Callable[[torch.Tensor], torch.Tensor], value: Any, *, in_records: bool = False
) -> Any:
    """Return a nested value (mappings, named tuples, tuples, lists) with every tensor changed.

    Subclasses of dict, list and tuple keep their class. Other objects are returned as they are, because the
    caller may compare them by identity.

    Args:
        change: Applied to each tensor.
        value: The nested value.
        in_records: Whether to change dataclasses too, such as a model's outputs. A dataclass in which no
            tensor changes is returned as it is.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    again = partial(map_tensors, change, in_records=in_records)
    if type(value) in (tuple, list):  # most often
        return type(value)(map(again, value))
    if isinstance(value, Mapping):
        made = {name: again(item) for name, item in value.items()}
        return made if type(value) is dict else _with_items(value, made)
    if isinstance(value, tuple | list):
        return with_parts(value, list(map(again, value)))
    if in_records and _is_record(value):
        return _with_fields(value, change)
    return value


def _with_items(value: Mapping[Any, Any], made: dict[Any, Any]) -> Any:
    """Return a mapping of the same class with other items; a plain dict if its class does not allow that."""
    if not isinstance(value, dict):  # a copy of another kind of mapping may share its items
        return made
    try:
        clone = copy.copy(value)
        if clone is value:  # an immutable one
            return made
        for name, item in made.items():
            clone[name] = item
    except Exception:  # noqa: BLE001 (a user's class may raise anything)
        return made
    attributes = getattr(clone, "__dict__", {})
    for name in attributes.keys() & made.keys():  # copies of items, as in `self.__dict__ = self`
        if attributes[name] is value[name]:
            attributes[name] = made[name]
    return clone


def _with_fields(record: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a dataclass instance with its tensors changed; the same object if no tensor changed."""
    num_changed = 0

    def counted(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal num_changed
        made = change(tensor)
        num_changed += made is not tensor
        return made

    names = [field.name for field in dataclasses.fields(record) if field.init]
    made = {name: map_tensors(counted, getattr(record, name), in_records=True) for name in names}
    if not num_changed:  # so that its __post_init__ is not run again for every batch
        return record
    try:
        return dataclasses.replace(record, **made)
    except (TypeError, ValueError):  # an InitVar, or an __init__ of its own
        clone = copy.copy(record)
        for name, item in made.items():
            object.__setattr__(clone, name, item)  # frozen ones too
        return clone


def _is_record(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def iterate_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a nested value."""
    if isinstance(value, torch.Tensor):
        yield value
    else:
        for item in _items(value):
            yield from iterate_tensors(item)


def _items(value: Any) -> Iterable[Any]:
    """Return the items of a mapping, tuple or list; an empty tuple for any other value."""
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, tuple | list) else ()


def is_plain(value: Any) -> bool:
    """Whether a nested value consists of tensors and constants in tuples, lists and dicts only."""
    if isinstance(value, dict):
        return all(map(is_plain, value.values()))
    if isinstance(value, tuple | list):
        return all(map(is_plain, value))
    return isinstance(value, torch.Tensor | str | bytes | bool | int | float | type(None))


def is_equal(one: Any, other: Any) -> bool:
    """Whether two values are equal; False if `==` gives no single answer, as for arrays."""
    try:
        return bool(one == other)
    except (ValueError, TypeError, RuntimeError):
        return False


def alike(one: Any, other: Any) -> bool:
    """Whether two nested values have the same structure, shapes and types, and equal constants."""
    if isinstance(one, torch.Tensor):
        same = isinstance(other, torch.Tensor)
        return same and one.shape == other.shape and one.dtype == other.dtype
    if isinstance(one, dict):
        return (
            isinstance(other, dict)
            and one.keys() == other.keys()
            and all(alike(value, other[name]) for name, value in one.items())
        )
    if isinstance(one, tuple | list):
        same = isinstance(other, type(one)) and len(one) == len(other)
        return same and all(map(alike, one, other))
    return is_equal(one, other)


def copy_into(target: Any, source: Any) -> None:
    """Copy the tensors of `source` into those of `target`, without waiting for the device."""
    if isinstance(target, torch.Tensor):
        target.copy_(source, non_blocking=True)
    elif isinstance(target, dict):
        for name, item in target.items():
            copy_into(item, source[name])
    elif isinstance(target, tuple | list):
        for item, other in zip(target, source, strict=True):
            copy_into(item, other)


def count_rows(value: Any) -> int | None:
    """Return the number of samples in a nested value; None if it has no tensor.

    It is the length of the first tensor. A list of mappings, as in object detection, has one mapping per sample.
    """
    if isinstance(value, torch.Tensor):
        return value.shape[0] if value.dim() else 1
    if _is_per_sample(value):
        return len(value)
    counts = map(count_rows, _items(value))
    return next((count for count in counts if count is not None), None)


def _is_per_sample(value: Any) -> bool:
    """Whether a value is a list or tuple of mappings, one per sample."""
    if not isinstance(value, tuple | list) or hasattr(value, "_fields") or not value:
        return False
    return all(isinstance(item, Mapping) for item in value)


def _resists_cutting(value: Any) -> bool:
    """Whether a nested value has objects that cannot be cut with the batch, besides tensors.

    These are a list with one mapping per sample, a dataclass, or an object with its own `to` method, such as
    a graph.
    """
    if isinstance(value, torch.Tensor):
        return False
    if _is_per_sample(value) or _is_record(value):
        return True
    if isinstance(value, Mapping | tuple | list):
        return any(map(_resists_cutting, _items(value)))
    return callable(getattr(value, "to", None))


def _count_samples(inputs: Any, targets: Any) -> int:
    """Return the number of samples in the targets, or in the inputs if the targets have no tensor."""
    count = count_rows(targets) or count_rows(inputs)
    if count is None:
        raise InputError(
            f"a batch whose inputs are a {type(inputs).__name__} and whose targets are a "
            f"{type(targets).__name__}: neither has a tensor.",
            "tensors with a row per sample, at least in the inputs",
            "Trainer(..., unpack=lambda batch: (batch['images'], None))",
        )
    return count


def _are_masks(targets: Any) -> bool:
    """Whether targets are masks: integers with a height and a width."""
    return (
        isinstance(targets, torch.Tensor) and targets.dim() >= 3 and not targets.is_floating_point()
    )


def _augment(augmentation: Augments, inputs: Any, targets: Any) -> tuple[Any, Any]:
    if _are_masks(targets):
        return tuple(augmentation(inputs, targets))
    return augmentation(inputs), targets


def _check_device(have: torch.device, want: torch.device) -> None:
    if have.type != want.type or (want.index is not None and have.index not in (None, want.index)):
        raise InputError(
            f"the loader's batches are on {have}, the model is on {want}.",
            "one device for both",
            f"Loader(..., device='{want}')",
        )
