"""One checkpoint file: written atomically, and verified before it is loaded.

Enters: a payload of tensors and plain values, and a description (step, metrics). Leaves: a zip archive as
torch writes it, which plain `torch.load(weights_only=True)` reads. The description is the archive's comment, so
that no second file can disagree with it. Costs: one write of the bytes, one hash at about 10 GB/s, two fsyncs;
reading goes over the bytes twice, the second time in the page cache.

The digest is needed: of 200 files with one flipped bit, torch 2.13 itself loaded 142 without an error.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch
import xxhash

from stoker.display import look_for
from stoker.errors import (
    CorruptError,
    InputError,
    StokerError,
    StoreError,
    refuse_special,
    unwritable,
)
from stoker.ownership import writing
from stoker.stalls import Waiting
from stoker.strict_json import exact_text, parse_json

_END = struct.Struct("<4s4H2LH")  # zip's end record; its last number is the length of the comment
_END_MAGIC = b"PK\x05\x06"
_COMMENT_LIMIT = 0xFFFF
_PIECE_BYTES = 8 << 20


@dataclass(frozen=True)
class Saved:
    """The description of a checkpoint, read from its last bytes without loading it.

    Attributes:
        path: The file.
        number: Number of the save in its folder; it rises even if `step` goes back.
        step: Steps done; a `Trainer` counts batches, also when several make one update.
        epoch: Number of the epoch, as the trainer counts.
        metrics: Metrics that were given to `Checkpoints.save`.
        saved_at: Seconds since 1970.
        size_bytes: Size of the file.
        run_id: Id of the folder it was saved in; "" in checkpoints of older versions.
    """

    path: Path
    number: int
    step: int
    epoch: int
    metrics: Mapping[str, float]
    saved_at: float
    size_bytes: int
    run_id: str = ""


# -- writing ---------------------------------------------------------------------------------------


def write_file(path: Path, payload: Mapping[str, Any], described: Mapping[str, Any]) -> None:
    """Write one file atomically. Blocks until it is on the disk.

    Raises:
        StoreError: The disk is full or not writable; an older file of this name is untouched.
    """
    try:
        with writing(path, is_checkpoint) as temporary, temporary.open("xb") as file:
            hashed = _HashedFile(file)
            torch.save(dict(payload), cast("IO[bytes]", hashed))
            hashed.finish(described)
    except OSError as error:
        raise unwritable(path, error) from error


def is_checkpoint(path: Path) -> bool:
    """Whether stoker wrote a file, by the description at its end. Its other bytes may be damaged."""
    try:
        read_description(path)
    except StoreError:
        return False
    return True


class _HashedFile:
    """The file object that torch writes to: hashes all but the archive's end record, and delays a write error.

    If a write raised inside torch's writer, the writer's destructor would write again. So the first error is
    kept, later writes are ignored, and `finish` raises the error.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._digest = xxhash.xxh3_128()
        self._held = b""
        self._size = 0
        self._error: OSError | None = None

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if self._error is None:
            try:
                self._take(view)
            except OSError as error:
                self._error = error
        return len(view)

    def _take(self, view: memoryview) -> None:
        """Write everything but the last bytes, which may be the end record."""
        if len(view) >= _END.size:
            self._put(self._held)
            self._put(view[: -_END.size])
            self._held = bytes(view[-_END.size :])
        else:
            both = self._held + bytes(view)
            self._put(both[: -_END.size])
            self._held = both[-_END.size :]

    def _put(self, data: bytes | memoryview) -> None:
        self._digest.update(data)
        self._size += len(data)
        self._file.write(data)

    def flush(self) -> None:
        """Do nothing: the caller flushes after `finish`."""

    def finish(self, described: Mapping[str, Any]) -> None:
        """Write the end record with the description as the archive's comment."""
        if self._error is not None:
            raise self._error
        *record, comment_length = _END.unpack(self._held)
        assert record[0] == _END_MAGIC, "torch wrote no zip archive"
        assert comment_length == 0, "torch wrote a comment of its own"
        described = {**described, "bytes": self._size, "digest": self._digest.hexdigest()}
        comment = _sealed(described, self._held)
        self._file.write(_END.pack(*record, len(comment)) + comment)


def _sealed(described: Mapping[str, Any], record: bytes) -> bytes:
    """Return the description with a checksum over itself and the end record before it."""
    sealed = exact_text({"seal": _seal(described, record), "is": described}).encode()
    if len(sealed) > _COMMENT_LIMIT:
        raise InputError(
            f"the metrics of a checkpoint take {len(sealed):,} bytes of text.",
            f"{_COMMENT_LIMIT:,} bytes: about a thousand metrics",
            "put long lists into the run log, and save their means",
        )
    return sealed


def _seal(described: Mapping[str, Any], record: bytes) -> str:
    text = exact_text(described).encode()
    return str(xxhash.xxh3_64_hexdigest(record[: _END.size - 2] + text))


# -- reading ---------------------------------------------------------------------------------------


def read_description(path: Path) -> Saved:
    """Return the description of a checkpoint; reads its last 64 KiB.

    Raises:
        CorruptError: The end is missing or changed, or the file is not a checkpoint of stoker.
    """
    with _opened(path) as file:
        described, _ = _read_end(file)
        return _saved(path, described, file)


def read_file(path: Path, map_location: str | torch.device) -> tuple[Saved, dict[str, Any]]:
    """Read and verify one file; return its description and its payload.

    Raises:
        CorruptError: Bytes are missing or changed.
    """
    with _opened(path) as file:
        described, end = _read_end(file)
        if _digest(file, end) != described["digest"]:
            raise CorruptError("its bytes do not match their digest")
        file.seek(0)
        payload = torch.load(file, map_location=map_location, weights_only=True)
        return _saved(path, described, file), payload


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    refuse_special(path, "the checkpoint", StoreError)
    try:
        with Waiting(path, is_work=True), path.open("rb") as file:
            yield file
    except StokerError:
        raise
    except OSError as error:
        raise StoreError(
            f"cannot read the checkpoint {path}: {error.strerror}.",
            "an existing file",
            look_for(path, "-l"),
        ) from error


def _read_end(file: IO[bytes]) -> tuple[dict[str, Any], int]:
    """Return the description, and the offset of the end record."""
    size = file.seek(0, os.SEEK_END)
    start = max(0, size - _END.size - _COMMENT_LIMIT)
    file.seek(start)
    tail = file.read()
    place = tail.rfind(_END_MAGIC)
    record, comment = tail[place : place + _END.size], tail[place + _END.size :]
    try:
        length = _END.unpack(record)[-1] if place >= 0 else -1
        sealed = parse_json(comment) if length else {}
        described = sealed.get("is", {})
        whole = (
            length == len(comment)
            and described["bytes"] == start + place
            and sealed["seal"] == _seal(described, record)
        )
    except (ValueError, KeyError, TypeError, AttributeError, struct.error):
        whole = False
    if not whole:
        raise CorruptError("its end is missing or unreadable, or stoker did not write it")
    return described, start + place


def _digest(file: IO[bytes], num_bytes: int) -> str:
    digest = xxhash.xxh3_128()
    file.seek(0)
    while num_bytes and (piece := file.read(min(num_bytes, _PIECE_BYTES))):
        digest.update(piece)
        num_bytes -= len(piece)
    return digest.hexdigest()


def _saved(path: Path, described: Mapping[str, Any], file: IO[bytes]) -> Saved:
    return Saved(
        path,
        described["number"],
        described["step"],
        described["epoch"],
        described["metrics"],
        described["saved_at"],
        os.fstat(file.fileno()).st_size,
        str(described.get("run_id", "")),
    )


# -- values that can be saved -----------------------------------------------------------------------------

# Exact types: a subclass (np.float64 is a float) would be loaded as another type, or not at all.
# Not bytes: torch 2.13 cannot load b"" again.
_PLAIN = {type(None), bool, float, complex, str, torch.dtype, torch.device, torch.Size}
_LONGEST_INT_BITS = 8 * 254  # torch cannot load the longer kind of pickled integers
_MAPPINGS = {dict, OrderedDict, Counter}


def loadable(value: Any) -> Any:
    """Return a copy of the containers, with the tensors detached and without unused storage.

    Raises:
        InputError: `weights_only` would refuse to load an entry; the message names its place.
    """
    return _compacted(_checked(value, "state"))


def _checked(value: Any, place: str) -> Any:
    kind = type(value)
    if kind in _PLAIN or (kind is int and value.bit_length() < _LONGEST_INT_BITS):
        return value
    if kind in (torch.Tensor, torch.nn.Parameter) and value.device.type != "meta":
        return value.detach()
    if kind in (list, tuple):
        return kind(_checked(entry, f"{place}[{index}]") for index, entry in enumerate(value))
    if isinstance(value, Mapping) and (kind in _MAPPINGS or not isinstance(value, dict)):
        return _checked_mapping(value, place)
    on_meta = " on the meta device" if isinstance(value, torch.Tensor) and value.is_meta else ""
    raise InputError(
        f"{place} is a {kind.__module__}.{kind.__qualname__}{on_meta}.",
        "tensors, numbers, texts, None, lists, tuples and dicts: what loads without running code",
        "float(x) for a numpy scalar, torch.as_tensor(x) for an array, x.state_dict() for an object, "
        "dict(x) for a kind of dict",
    )


def _checked_mapping(value: Mapping[Any, Any], place: str) -> Any:
    made: Any = type(value)() if type(value) in _MAPPINGS else {}
    for key, entry in value.items():
        if type(key) not in (str, int):
            if isinstance(key, torch.Tensor):
                raise InputError(
                    f"{place} has tensors as keys, which are others in the next process.",
                    "a state_dict that numbers its parameters, as those of torch's optimizers do",
                    "Trainer(...) without run_dir, or a state_dict() of your class with texts or numbers as keys",
                )
            raise InputError(
                f"{place} has the key {key!r}, a {type(key).__name__}.",
                "keys that are texts or whole numbers",
                "str(key)",
            )
        made[key] = _checked(entry, f"{place}.{key}")
    if hasattr(value, "_metadata"):  # versions of modules, beside the entries of a state_dict
        made._metadata = _checked(value._metadata, f"{place}._metadata")
    return made


def _compacted(state: Any) -> Any:
    """Copy tensors that use less than half of their storage: torch would save all of the storage.

    Tensors that together fill a storage (the weights of a cuDNN LSTM, tied weights) stay as they are.
    """
    used: dict[tuple[str, int], dict[int, int]] = {}

    def count(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout == torch.strided:
            views = used.setdefault(_storage_key(tensor), {})
            offset = int(tensor.storage_offset())
            views[offset] = max(views.get(offset, 0), tensor.nbytes)
        return tensor

    def compact(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout != torch.strided:
            return tensor
        num_used = sum(used[_storage_key(tensor)].values())
        return tensor.clone() if 2 * num_used < tensor.untyped_storage().nbytes() else tensor

    _for_tensors(state, count)
    return _for_tensors(state, compact)


def _storage_key(tensor: torch.Tensor) -> tuple[str, int]:
    return str(tensor.device), tensor.untyped_storage().data_ptr()


def _for_tensors(value: Any, do: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return do(value)
    if type(value) in (list, tuple):
        return type(value)(_for_tensors(entry, do) for entry in value)
    if isinstance(value, dict):
        for key, entry in value.items():
            value[key] = _for_tensors(entry, do)
    return value
