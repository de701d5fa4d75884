"""A Python dataset as a source of `pack`: see `stoker.pack_from`.

Enters: a Dataset or list with indexed samples, arrays with one row per sample, or any iterable of samples. Leaves:
parts of a store. Costs: 64 samples are read first; then each sample is read once, in worker processes if the dataset
can be pickled. Samples of an iterable are written to disk twice.

The dataset is pickled once, into the pack's own folder, and each worker loads it from there. Parts of an interrupted
pack are used again if the dataset pickles to the same bytes and the 64 samples are the same.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import sys
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path
from types import CodeType
from typing import Any, ClassVar, NamedTuple

import cloudpickle
import numpy as np
import xxhash

from stoker.display import nearest
from stoker.errors import InputError, Refusal
from stoker.ownership import always, writing
from stoker.sources.arrays import PART_BYTES
from stoker.sources.contract import (
    Json,
    Part,
    PartContext,
    PartData,
    PlainSource,
    Preparation,
    cut_rows,
)
from stoker.sources.samples import (
    as_array,
    collect,
    field_names,
    named_values,
    plain_column,
    plain_data,
)
from stoker.store.fields import Array, Dense, Ragged
from stoker.store.manifest import FieldInfo

_PICKLE = "dataset.pickle"
_PARTS, _LEAST_ROWS, _MOST_ROWS = 16, 64, 1 << 16
_PROBES = 64


class _Live(NamedTuple):
    """Samples in this process, and their pickle for worker processes; None if they cannot be pickled."""

    samples: Any
    code: bytes | None


_live: dict[str, _Live] = {}


@dataclass(frozen=True)
class _Script:
    """Settings of the script's process that decide what its samples are, in worker processes too.

    `torch.tensor([0.5])` has the default type of torch, and a division by zero is an error if numpy was told so.
    """

    dtype: str | None  # torch's default type; None if torch is not loaded
    # of `numpy.seterr`, without the kinds that call a function of this process
    errors: Mapping[str, Any]

    @classmethod
    def here(cls) -> _Script:
        torch = sys.modules.get("torch")
        dtype = None if torch is None else str(torch.get_default_dtype()).removeprefix("torch.")
        kinds = {name: kind for name, kind in np.geterr().items() if kind not in ("call", "log")}
        return cls(dtype, kinds)

    @contextlib.contextmanager
    def set(self) -> Iterator[None]:
        """Context with these settings."""
        with np.errstate(**self.errors):
            torch = sys.modules.get("torch")
            before = None if torch is None else torch.get_default_dtype()
            if torch is None or self.dtype is None:
                yield
                return
            torch.set_default_dtype(getattr(torch, self.dtype))
            try:
                yield
            finally:
                torch.set_default_dtype(before)


class Columns:
    """Arrays with one row per sample, presented as a sequence of samples."""

    def __init__(self, arrays: Mapping[str, Array | list[Any]]) -> None:
        self._arrays = arrays

    def __len__(self) -> int:
        return min(map(len, self._arrays.values()))

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {name: values[number] for name, values in self._arrays.items()}


@dataclass(frozen=True)
class SamplesSource(PlainSource):
    """Samples that Python makes, as a source of `pack`."""

    fields: Mapping[str, FieldInfo]  # the fields of every sample
    digest: str  # digest of fields, samples read first, and pickle; random without a pickle
    num_samples: int | None  # None for an iterable
    name: str  # name of the dataset's class, for messages
    ragged: tuple[str, ...]  # fields that the user has named as ragged
    # key of the samples in `_live`: they are not part of this object's pickle, which goes to every worker
    token: str
    sample_bytes: int  # mean size of one sample
    sample_seconds: float  # mean time to read one sample
    script: _Script

    kind: ClassVar[str] = "samples"

    def options(self) -> Mapping[str, Json]:
        """Return the digest and the ragged fields: they decide what the shards hold."""
        count = "any number of" if self.num_samples is None else f"{self.num_samples:,}"
        return {
            "dataset": f"{self.name} of {count} samples ({self.digest})",
            "ragged": sorted(self.ragged),
        }

    def prepare(self, scratch: Path) -> Preparation:
        """Cut the samples into parts. The samples of an iterable are written to `scratch` first."""
        if self.num_samples is None:
            return self._spool(scratch)
        code = _live[self.token].code
        if code is not None:
            _write(scratch / _PICKLE, code)
        rows = self._part_rows(self.num_samples)
        parts = cut_rows(self.num_samples, rows, f"{self.name} samples", self.name)
        return Preparation(parts, self.num_samples * self.sample_bytes + (1 << 20))

    def _part_rows(self, num_samples: int) -> int:
        """Return the samples per part: a 16th of all, but at least 64, and at most 65,536 or 256 MB."""
        by_bytes = PART_BYTES // max(1, self.sample_bytes)
        return max(1, min(by_bytes, _MOST_ROWS, max(_LEAST_ROWS, -(-num_samples // _PARTS))))

    def _spool(self, scratch: Path) -> Preparation:
        """Write the samples of an iterable to `scratch`, one file per part."""
        rows = self._part_rows(_MOST_ROWS * _PARTS)
        samples = iter(_live[self.token].samples)
        parts: list[Part] = []
        first = total = 0
        while block := list(islice(samples, rows)):
            fields = collect(block, range(first, first + len(block)), self.fields)
            spooled = scratch / f"samples-{len(parts):05d}.pickle"
            _write(spooled, pickle.dumps(fields, protocol=5))
            total += sum(data.values.nbytes for data in fields.values())
            label = f"{self.name} samples {first}-{first + len(block)}"
            parts.append(Part(len(parts), label, len(block), first, self.name, first))
            first += len(block)
        return Preparation(parts, total + (1 << 20))

    def build(self, part: Part, context: PartContext) -> PartData:
        """Read the samples of one part. A sample that raises or is None is refused, with its number."""
        if self.num_samples is None:
            return PartData(_read(context.scratch / f"samples-{part.index:05d}.pickle"))
        live = _live.get(self.token)
        samples = live.samples if live else _load(context.scratch / _PICKLE, self.token)
        refused: list[Refusal] = []
        taken: dict[int, Any] = {}
        with self.script.set():
            for number in range(part.payload, part.payload + part.num_samples):
                try:
                    sample, reason = samples[number], "it is None"
                except Exception as error:  # noqa: BLE001  somebody else's code may raise anything
                    sample, reason = None, f"{type(error).__name__}: {error}"
                if sample is None:
                    refused.append(Refusal(self.name, number, reason, unit="sample"))
                else:
                    taken[number] = sample
        return PartData(collect(taken.values(), taken, self.fields), refused)


def _by_number(samples: Any) -> Any:
    """Wrap a dict or tuple of arrays as a sequence of samples; return anything else unchanged."""
    if not isinstance(samples, Mapping | tuple):
        return samples
    field_names(samples)  # or raises
    columns = {name: plain_column(value) for name, value in named_values(samples)}
    arrays = {n: v if isinstance(v, list) else as_array(v, repr(n)) for n, v in columns.items()}
    counts = {n: len(a) for n, a in arrays.items() if isinstance(a, list) or np.ndim(a)}
    if len(set(counts.values())) != 1 or len(counts) != len(arrays):
        raise InputError(
            f"the arrays have these rows: {counts}.",
            "one row per sample in each",
            f"{max(counts, key=lambda n: counts[n])}[:{min(counts.values())}]" if counts else "",
        )
    return Columns({n: a for n, a in arrays.items() if not isinstance(a, str)})


@contextlib.contextmanager
def samples_source(
    samples: Any, ragged: Sequence[str] = ()
) -> Iterator[tuple[SamplesSource, bool]]:
    """Read up to 64 samples; yield the source, and whether worker processes can load its samples.

    `samples` is a Dataset or list, a dict or tuple of arrays, or any iterable of samples. `ragged` names fields whose
    number of rows varies, in case the samples read here do not show it.
    """
    name = type(samples).__name__
    if hasattr(samples, "dataset") and hasattr(samples, "batch_sampler"):
        raise InputError(
            f"pack_from was given a {name}, which yields batches.",
            "a Dataset, or anything that yields samples",
            "stoker.pack_from(dataloader.dataset, 'made')",
        )
    samples = _by_number(plain_data(samples))
    is_indexed = hasattr(samples, "__getitem__") and hasattr(samples, "__len__")
    if not is_indexed and not isinstance(samples, Iterable):
        raise InputError(
            f"pack_from was given a {name}.",
            "a Dataset, a list or generator of samples, or a dict of arrays",
            "stoker.pack_from([{'x': np.zeros(3)}], 'made')",
        )
    count = len(samples) if is_indexed else None
    began, failed = time.perf_counter(), None
    if is_indexed:
        looked: dict[int, Any] = {}
        for number in np.unique(np.linspace(0, count - 1, _PROBES, dtype=int)) if count else ():
            try:
                sample = samples[int(number)]
            except Exception as error:  # noqa: BLE001  refused when its part is built
                failed = failed or error
            else:
                if sample is not None:
                    looked[int(number)] = sample
    else:
        rest = iter(samples)
        looked = dict(enumerate(islice(rest, _PROBES)))
        samples = chain(looked.values(), rest)
    if failed is not None and not looked:
        raise failed
    if not looked:
        raise InputError(f"{name} has no samples.", "one sample or more", "")
    seconds = (time.perf_counter() - began) / len(looked)
    shown = collect(looked.values(), looked)
    fields = _describe_fields(shown, ragged)
    digest = xxhash.xxh3_128(repr(fields).encode())
    for data in shown.values():
        digest.update(np.ascontiguousarray(data.values).data)
    code = None
    if is_indexed:
        # A dataset that holds an open file, a lock or a socket is read in this process alone.
        with contextlib.suppress(Exception):
            code = pickled(samples)
    # Without a pickle a change cannot be noticed, so nothing of an earlier pack is reused.
    digest.update(uuid.uuid4().bytes if code is None else _lasting(samples, code))
    token = uuid.uuid4().hex
    each_bytes = -(-sum(data.values.nbytes for data in shown.values()) // len(looked))
    source = SamplesSource(
        fields, digest.hexdigest(), count, name, tuple(ragged), token, each_bytes, seconds,
        _Script.here(),
    )  # fmt: skip
    _live[token] = _Live(samples, code)
    try:
        yield source, code is not None
    finally:
        del _live[token]


def _describe_fields(
    shown: Mapping[str, Dense | Ragged], ragged: Sequence[str]
) -> dict[str, FieldInfo]:
    """Return the fields of the samples in `shown`; those named in `ragged` become ragged."""
    of_arrays = [n for n, data in shown.items() if data.kind == "ragged" or data.values.ndim > 1]
    unknown = [each for each in ragged if each not in of_arrays]
    if unknown:
        near = nearest(unknown[0], of_arrays)
        raise InputError(
            f"ragged names {unknown[0]!r}.",
            "fields whose values are arrays",
            f"ragged=[{near!r}]" if near else "leave ragged out",
        )
    fields = {each: FieldInfo.of(data) for each, data in shown.items()}
    for each in ragged:
        if shown[each].kind == "dense":
            inner = list(shown[each].values.shape[2:])
            made_ragged = {"kind": "ragged", "shape": inner, "columns": None}
            fields[each] = fields[each].model_copy(update=made_ragged)
    return fields


def pickled(value: Any) -> bytes:
    """Return a pickle for another process: functions and classes of the user's script are stored by value.

    cloudpickle does so for a script that is called `__main__`. In a process that `multiprocessing` has started, and not
    forked, the same script is called `__mp_main__`, and no further process would find it.
    """
    script = sys.modules.get("__mp_main__")
    if script is not None and script.__name__ == "__mp_main__":
        cloudpickle.register_pickle_by_value(script)
    code: bytes = cloudpickle.dumps(value)
    return code


class _LastingPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickler that omits what differs between two runs of a script: addresses of tensors, order of sets in code."""

    def reducer_override(self, obj: Any) -> Any:
        """Reduce code and tensors to their parts. The result only feeds a digest and is never unpickled."""
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(obj, torch.Tensor):
            # Sparse, quantized: as torch pickles them.
            with contextlib.suppress(RuntimeError, TypeError):
                values = obj.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
                return bytes, (str(obj.dtype), tuple(obj.shape), values)
        if not isinstance(obj, CodeType):
            return super().reducer_override(obj)
        sets = (sorted(map(repr, each)) for each in obj.co_consts if isinstance(each, frozenset))
        others = [each for each in obj.co_consts if not isinstance(each, frozenset)]
        return bytes, (obj.co_code, obj.co_names, obj.co_freevars, *sets, *others)


def _lasting(samples: Any, code: bytes) -> bytes:
    """Return a pickle of the dataset that is identical in every run of a script.

    cloudpickle gives each class of the script itself a random number per process, and torch pickles a tensor with its
    address. With those bytes an interrupted pack could never resume, and a finished one would be repeated.
    """
    drawn = getattr(cloudpickle.cloudpickle, "_DYNAMIC_CLASS_TRACKER_BY_CLASS", {})
    numbers = [n.encode() for n in drawn.values() if n.encode() in code]
    if not numbers and b"torch.storage" not in code:
        return code
    file = io.BytesIO()
    _LastingPickler(file).dump(samples)
    lasting = file.getvalue()
    for number in numbers:
        lasting = lasting.replace(number, b"")
    return lasting


def _write(path: Path, code: bytes) -> None:
    with writing(path, always) as temporary, temporary.open("xb") as file:
        file.write(code)


def _read(path: Path) -> Any:
    """Unpickle a file that `prepare` of this same pack wrote."""
    with path.open("rb") as file:
        return pickle.load(file)  # noqa: S301


@lru_cache(maxsize=1)
def _load(path: Path, token: str) -> Any:  # noqa: ARG001  the token separates packs in the cache
    return _read(path)
