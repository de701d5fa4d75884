"""Arguments of a `Loader`: data of many kinds, keywords of torch's DataLoader, misspelt names.

Enters: the arguments as typed. Leaves: a `Store`, sample numbers, names; or an error that says what to type.
Costs: nothing for stores and files; arrays in memory are used as they are, and a Dataset is read once.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import h5py
import numpy as np
import torch
from torch import distributed
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from stoker.bounds import require_memory
from stoker.display import nearest
from stoker.errors import InputError, StoreError
from stoker.loader.drawing import Mixture
from stoker.loader.gather import Augments
from stoker.sources.dataset import SamplesSource
from stoker.sources.samples import (
    are_arrays,
    as_array,
    collect,
    field_names,
    form_of,
    named_values,
    plain_column,
    plain_data,
    tuple_names,
)
from stoker.store.fields import Dense, FieldData
from stoker.store.memory import memory_store
from stoker.store.reader import Store, open_store

NEEDLESS = {
    "num_workers": "batches are gathered on the device, without worker processes",
    "pin_memory": "batches are on the device already, and what is copied goes through pinned memory",
    "pin_memory_device": "batches are on the device already",
    "persistent_workers": "there are no worker processes",
    "prefetch_factor": "the next chunk is loaded ahead by itself",
    "timeout": "there are no worker processes to wait for",
    "multiprocessing_context": "there are no worker processes",
    "worker_init_fn": "there are no worker processes to prepare",
    "in_order": "batches come in order",
}
_INSTEAD = {
    "sampler": "an order that is known before the epoch: order=, samples= or weights=",
    "batch_sampler": "an order that is known before the epoch: order=, batch_size=, samples= or weights=",
    "collate_fn": "batches by name, or tuples of fields by as_tuple=; your own code goes into the loop",
    "generator": "a seed: seed=0",
    "transform": "an augmentation on the device: augment=, with a Compose of stoker.augment",
}  # fmt: skip
_SAMPLERS = {
    "RandomSampler": "shuffle=True",
    "SubsetRandomSampler": "shuffle=True, samples=np.sort(sampler.indices)",
    "WeightedRandomSampler": "weights=sampler.weights",
    "DistributedSampler": "rank=sampler.rank, world_size=sampler.num_replicas",
}
_MEANT = {
    "samples": "split subset indices idx index sample_ids rows_to_load",
    "fields": "columns keys names variables datasets",
    "batch_size": "bs batchsize batch batch_sz",
    "seed": "random_seed random_state rng",
    "store": "dataset data path file filename h5",
    "world_size": "num_replicas num_ranks",
    "group": "key h5_group",
}
_RENAMED = {word: name for name, words in _MEANT.items() for word in words.split()}
_OWN_ORDER = "loader.set_epoch(epoch) begins another epoch, and loader.samples are its samples"
_ATTRIBUTES = {
    "dataset": "len(loader.samples) counts its samples, and loader.store holds them",
    "sampler": _OWN_ORDER,
    "batch_sampler": _OWN_ORDER,
    "drop_last": "len(loader) counts its batches",
    "collate_fn": "batches are gathered as tensors; next(iter(loader)) shows one",
    "generator": "its draws are those of the seed= that it was made with",
    "shuffle": "its order is named by repr(loader)",
    "to": "its batches are on the device= that it was made with, loader.device",
    "reset": "each `for batch in loader` is an epoch from its first batch, and loader.set_epoch(0) begins anew",
}

_OF_THE_LOOP = frozenset({"epochs", "num_epochs", "max_epochs", "max_steps", "num_steps"})
_MOST_TYPED, _LONGEST_TYPED, _FEW_ARRAYS, _MOST_EPOCHS = 20, 60, 8, 100

_told: set[str] = set()


def tell_once(text: str) -> None:
    """Warn about something once in this process, at the line of the caller's own code."""
    if text in _told:
        return
    _told.add(text)
    level, frame = 2, sys._getframe(1)
    while (above := frame.f_back) and str(frame.f_globals.get("__name__")).split(".")[
        0
    ] == "stoker":
        level, frame = level + 1, above
    warnings.warn(text, stacklevel=level)


def tell_of_ranks() -> None:
    """Warn once if several ranks run and no `world_size` was given: each rank then gets all samples."""
    if distributed.is_available() and distributed.is_initialized():
        size = distributed.get_world_size()
        if size > 1:
            tell_once(
                f"{size} ranks train together, and this Loader gives all samples to each of them. To share them type "
                "Loader(..., rank=torch.distributed.get_rank(), world_size=torch.distributed.get_world_size()); "
                "world_size=1 if every rank is to have all."
            )


def check_keywords(given: Mapping[str, Any], known: Sequence[str], batch_size: Any) -> None:
    """Check keywords that a Loader does not have: warn if they are needless, else raise.

    `batch_size` is checked too: in `Loader(x, y, 64)` it is an array.
    """
    if getattr(batch_size, "shape", ()):
        raise InputError(
            f"batch_size is a {type(batch_size).__name__} of shape {tuple(batch_size.shape)}.",
            "several arrays as one tuple or dict, then a number of samples",
            "Loader((x, y), 64)",
        )
    for name in given:
        if name in NEEDLESS:
            tell_once(f"stoker.Loader needs no {name}: {NEEDLESS[name]}")
            continue
        if name in _INSTEAD:
            raise InputError(
                f"a Loader has no {name}.", _INSTEAD[name], _instead(name, given[name])
            )
        if name in _OF_THE_LOOP:
            raise InputError(
                f"a Loader has no argument {name!r}.",
                "one pass over a Loader is an epoch; the loop or the Trainer counts them",
                f"leave {name} out",
            )
        near = _RENAMED.get(name) or nearest(name, (*known, *NEEDLESS))
        raise InputError(
            f"a Loader has no argument {name!r}.",
            ", ".join(known),
            f"{near}={_typed(given[name])}" if near else f"leave {name} out",
        )


def _typed(value: Any) -> str:
    """Return the `repr` of a value, or "..." if it is long."""
    shown = repr(value)
    return shown if len(shown) <= _LONGEST_TYPED else "..."


def _instead(name: str, value: Any) -> str:
    """Return what to type for an argument of torch's DataLoader."""
    if isinstance(value, torch.Generator):
        return f"seed={value.initial_seed() % 2**32}"
    if name == "sampler" and isinstance(value, list | range) and len(value) <= _MOST_TYPED:
        return f"samples={sorted(set(value))}"
    advice = _SAMPLERS.get(type(value).__name__, f"leave {name} out")
    if isinstance(value, DistributedSampler) and value.shuffle:
        advice = f"shuffle=True, {advice}"
    if isinstance(value, RandomSampler | WeightedRandomSampler):
        data = value.data_source if isinstance(value, RandomSampler) else value.weights
        # Scripts that count steps ask for an endless epoch; with a Loader, one epoch follows another.
        if len(value) != len(data) and len(value) <= _MOST_EPOCHS * len(data):
            advice += f", epoch_samples={len(value)}"
    return advice


class FixedOption:
    """An option that a Loader reads only in its constructor: setting it later raises, as it would change nothing."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, loader: Any, owner: type) -> Any:
        """Raise: the loader has no attribute of this name."""
        if loader is None:
            return self
        raise no_attribute(self._name)

    def __set__(self, loader: Any, value: Any) -> None:
        """Raise; the error says how to make a Loader with another value."""
        raise fixed_option(self._name, value)


class Habits:
    """Base class of `Loader`: attributes that users know from other loaders."""

    _batch_size: int
    _augment: Augments | None

    def __dir__(self) -> list[str]:
        kind = type(self)
        return [
            name
            for name in super().__dir__()
            if not isinstance(getattr(kind, name, None), FixedOption)
        ]

    @property
    def batch_size(self) -> int:
        """Samples per batch and rank."""
        return self._batch_size

    @batch_size.setter
    def batch_size(self, batch_size: int) -> None:
        raise fixed_option("batch_size", batch_size)

    @property
    def augment(self) -> Augments | None:
        """The augmentation of the images on the device, or None. A new one applies from the next batch on."""
        return self._augment

    @augment.setter
    def augment(self, augment: Augments | None) -> None:
        self.use_augmentation(augment)

    def use_augmentation(self, augment: Augments | None) -> None:
        """Augment from the next batch on; None stops it."""
        raise NotImplementedError

    def __getitem__(self, number: object) -> Any:
        """Raise: batches are not numbered."""
        raise TypeError(
            f"a Loader is iterated, not indexed (asked for [{number!r}]): next(iter(loader)) is its first batch, "
            "and a torch DataLoader around it is not needed"
        )

    if not TYPE_CHECKING:  # a type checker would accept every name

        def __getattr__(self, name: str) -> Any:
            raise no_attribute(name)


def fix_options(loader: type[Habits], names: Iterable[str]) -> None:
    """Make options without an attribute of their own raise when they are set on an existing loader."""
    has = {"store", "device", "samples", "as_tuple", "plan"}
    for name in names:
        if name not in has and not hasattr(loader, name):
            setattr(loader, name, FixedOption(name))


def fixed_option(name: str, value: Any) -> InputError:
    """Return the error for an option that is set on an existing loader."""
    return InputError(
        f"{name} was set on a Loader that exists.",
        "options that are given when a Loader is made",
        f"Loader(store, batch_size={value!r}), and its load_state_dict(loader.state_dict()) to go on from here"
        if name == "batch_size"
        else f"Loader(store, batch_size, {name}={value!r})",
    )


def no_attribute(name: str) -> AttributeError:
    """Return the error for an attribute that a Loader does not have; it names the substitute, if any."""
    instead = _ATTRIBUTES.get(name) or NEEDLESS.get(name)
    return AttributeError(
        f"a Loader has no attribute {name!r}" + (f": {instead}" if instead else "")
    )


def check_names(
    names: Any, known: Sequence[str] | None = None, example: Sequence[str] = ()
) -> tuple[str, ...]:
    """Return the names of `as_tuple`, or raise.

    Args:
        names: The value of `as_tuple`, as given.
        known: Names of a batch's tensors; None checks only that `names` are names.
        example: Names to suggest if none were given.
    """
    is_list = isinstance(names, Sequence) and not isinstance(names, str)
    if not is_list or not names or not all(isinstance(name, str) for name in names):
        typed = (names,) if isinstance(names, str) else tuple(known or example)
        raise InputError(f"as_tuple is {names!r}.", "names of fields", f"as_tuple={typed}")
    unknown = [name for name in names if known is not None and name not in known]
    if known is not None and unknown:
        spare = [name for name in known if name not in names] or list(known)
        near = nearest(unknown[0], known) or spare[0]
        raise InputError(
            f"as_tuple names {unknown[0]!r}, which is not loaded.",
            ", ".join(known),
            f"as_tuple={tuple(near if name == unknown[0] else name for name in names)}",
        )
    return tuple(names)


class Opened(NamedTuple):
    """Data as a store, and the form of its batches: a tuple of these fields, one field alone, or a `Batch`."""

    store: Store
    as_tuple: tuple[str, ...] | str | None = None
    is_own: bool = True
    mixture: Mixture | None = None


def open_data(
    data: Any,
    group: str | None = None,
    rows: int | None = None,
    fields: Sequence[str] | None = None,
) -> Opened:
    """Open any data that a Loader accepts as a store.

    Args:
        data: A store, a path or URL, arrays or tensors (one, a tuple, or a dict of them), or a Dataset.
        group: Group that holds the arrays, in a plain HDF5 file.
        rows: Number of samples, in a plain HDF5 file.
        fields: Fields to load. They decide what counts samples if a plain file alone does not tell.
    """
    if isinstance(data, str | Path):
        named = None if not fields or isinstance(fields, str) else fields
        try:
            store = open_store(data, group=group, rows=rows)
        except StoreError:
            if named is None or not Path(data).is_file():
                raise
            return Opened(open_store(data, group=group, rows=rows, fields=named))
        if named and any(store.left_aside(name) for name in named):
            with suppress(StoreError):  # `make_columns` reports why this is not a field
                chosen = open_store(data, group=group, rows=rows, fields=named)
                store.close()
                return Opened(chosen)
        made_of = store.manifest.provenance
        if fields is None and made_of is not None and made_of.kind == SamplesSource.kind:
            _tell_of_text(store)
        return Opened(store)
    for name, value in (("group", group), ("rows", rows)):
        if value is not None:
            raise InputError(
                f"{name}={value!r} with {type(data).__name__}.",
                f"{name}= with the path of a plain HDF5 file",
                f"leave {name} out",
            )
    if isinstance(data, Store):
        return Opened(data, is_own=False)
    if isinstance(data, Mixture):
        return Opened(data.store, is_own=False, mixture=data)
    if isinstance(data, h5py.HLObject):
        group_name = data.name if isinstance(data, h5py.Group) else data.parent.name
        inside = "" if group_name == "/" else f", group={group_name.strip('/')!r}"
        raise InputError(
            f"an open h5py {type(data).__name__}, which would be read into memory whole.",
            "the path of its file",
            f"Loader({data.file.filename!r}, batch_size{inside})",
        )
    opened = _from_memory(data)
    if fields is None:
        _tell_of_text(opened.store)
    return opened


def _tell_of_text(store: Store) -> None:
    """Warn once which text fields of the user's own samples batches leave out. Nobody misses packed files' names."""
    text = [name for name, info in store.fields.items() if info.encoding == "utf8"]
    if text:
        tell_once(
            f"stoker.Loader leaves text out of its batches: {', '.join(text)} (batch.sample_ids are the rows, "
            f"to look it up; fields={text} loads its bytes)"
        )


def _from_memory(data: Any) -> Opened:
    if isinstance(data, TensorDataset):
        data = data.tensors
    elif isinstance(data, list) and data and all(isinstance(each, str | Path) for each in data):
        raise InputError(
            f"a Loader was given a list of {len(data)} paths.",
            "one store, or several with their shares",
            f"mix({dict.fromkeys(map(str, data[:4]), 1)})",
        )
    if isinstance(data, list):
        _check_list(data)
    if isinstance(data, Habits):
        raise InputError(
            "a Loader was given a Loader.",
            "a store, a file, arrays or a Dataset; a Loader is iterated as it is",
            "Loader(loader.store, 64)",
        )
    if isinstance(data, bytes):
        raise InputError(
            "a Loader was given bytes.", "a path as text", f"Loader({os.fsdecode(data)!r}, 64)"
        )
    data = plain_data(data)
    if isinstance(data, Mapping):
        return Opened(_from_arrays(data, "a dict in memory"))
    if isinstance(data, tuple):
        names = getattr(data, "_fields", None) or tuple_names(len(data))
        store = _from_arrays(dict(zip(names, data, strict=True)), "a tuple in memory")
        return Opened(store, _without_text(store))
    if isinstance(data, torch.Tensor | np.ndarray):
        return Opened(_from_arrays({"features": data}, "an array in memory"), "features")
    if isinstance(data, DataLoader):
        raise InputError(
            "a Loader was given a DataLoader.",
            "a store, a file, arrays, or the Dataset itself; stoker.prefetch keeps a DataLoader",
            "Loader(dataloader.dataset, 64)",
        )
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return _from_dataset(data)
    if isinstance(data, IterableDataset | Iterable):
        raise InputError(
            f"a Loader was given {type(data).__name__}, whose samples come one after the other.",
            "data with a length, whose samples can be asked for by number",
            "stoker.pack_from(dataset, 'made')",
        )
    raise InputError(
        f"a Loader was given {type(data).__name__}.",
        "a store folder, an HDF5 file, arrays or tensors (a tuple or a dict of them), or a Dataset",
        "Loader({'features': x, 'targets': y}, 64)",
    )


def _check_list(data: Sequence[Any]) -> None:
    """Warn that a list of a few long arrays is read as samples; raise if their kinds differ, so that they cannot be."""
    few = 1 < len(data) <= _FEW_ARRAYS
    if not few or not all(
        isinstance(each, torch.Tensor | np.ndarray) and each.ndim for each in data
    ):
        return
    lengths = {len(each) for each in data}
    if len(lengths) > 1 or min(lengths) <= len(data):
        return
    what, typed = f"a list of {len(data)} arrays of {min(lengths):,} rows", "Loader((x, y), 64)"
    if len({(str(each.dtype), tuple(each.shape)) for each in data}) > 1:
        raise InputError(
            f"{what} and different kinds.",
            "a list of samples, or a tuple with an array for each field",
            typed,
        )
    tell_once(
        f"stoker.Loader takes {what} for {len(data)} samples; a tuple, {typed}, has an array for each field"
    )


def _from_arrays(arrays: Mapping[str, Any], name: str) -> Store:
    fields: dict[str, FieldData] = {}
    names = field_names(arrays)
    for field in names:
        value = plain_column(arrays[field])
        if isinstance(value, list):
            fields[field] = collect([{field: each} for each in value])[field]
            continue
        array = as_array(value, f"{field!r}")
        if isinstance(array, str) or array.ndim == 0:
            raise InputError(
                f"{field!r} is a single value.",
                "an array with a row per sample",
                f"np.atleast_1d({field})",
            )
        fields[field] = Dense(array)
    counts = {field: data.num_samples for field, data in fields.items()}
    if len(set(counts.values())) > 1 or not all(counts.values()):
        longest, least = max(counts, key=lambda field: counts[field]), min(counts.values())
        raise InputError(
            f"the arrays have different or no rows: {counts}.",
            "one row per sample in each, and one sample at least",
            f"{longest}[:{least}]" if least else "look at what chose the rows",
        )
    return memory_store(fields, name)


def _without_text(store: Store) -> tuple[str, ...]:
    return tuple(name for name, info in store.fields.items() if info.encoding != "utf8")


def _samples(dataset: Any, count: int) -> Iterator[Any]:
    for number in range(count):
        try:
            yield dataset[number]
        except Exception as error:
            error.add_note(
                f"in sample {number} of {type(dataset).__name__}, which says that it has {count}"
            )
            raise


def _from_dataset(dataset: Any) -> Opened:
    count = len(dataset)
    if not count:
        raise InputError("the dataset is empty.", "one sample or more", "look at what chose them")
    sample = dataset[0]
    form, kind = form_of(sample), type(dataset).__name__
    each = sum(data.values.nbytes for data in collect([sample]).values())
    require_memory(
        2 * count * each,
        f"reading the {count:,} samples of {kind}",
        "stoker.pack_from(dataset, 'made')",
        InputError,
    )
    if not isinstance(dataset, list):
        tell_once(
            f"stoker.Loader reads the {count:,} samples of {kind} into memory once: what its __getitem__ draws at "
            "random stays the same in every epoch (draw with augment= instead)"
        )
    for name, value in named_values(sample):
        if isinstance(value, list | tuple) and value and not isinstance(value[0], str):
            what = "arrays" if are_arrays(value) else "numbers"
            tell_once(
                f"stoker.Loader stacks the {len(value)} {what} that {name!r} has in every sample: a batch is one "
                f"tensor (batch, {len(value)}{', ...' if what == 'arrays' else ''}), where a DataLoader gives a list "
                f"of {len(value)}. A sample with a field for each gives them apart"
            )
    fields = collect(_samples(dataset, count))
    store = memory_store(fields, f"{kind} in memory")
    loaded = _without_text(store)
    if form == "dict" or not loaded:
        return Opened(store)
    ragged = [name for name in loaded if store.fields[name].kind == "ragged"]
    if ragged:
        whole = tuple(
            f for name in loaded for f in (name, f"{name}/offsets")[: 1 + (name in ragged)]
        )
        tell_once(
            f"{', '.join(ragged)} of {kind} has another length in every sample: a batch holds all values one after "
            f"the other; as_tuple={whole} adds where each sample begins"
        )
    return Opened(store, loaded[0] if form == "single" else loaded)
