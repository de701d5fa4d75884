"""`store.json`: what a store holds, how it was made, and whether this code may read it.

Enters: JSON text from disk, or facts from the packer. Leaves: a frozen, checked `Manifest`.
Costs: one small file; nothing of the data is touched.

Policy: `format_version` rises whenever older code would misread a store. Newer code reads all
older versions; older code refuses newer ones and says what to install.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import xxhash
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError

from stoker.bounds import CHUNK, MANIFEST
from stoker.display import command, look_for
from stoker.errors import CorruptError, StoreError, StoreVersionError
from stoker.report import LOG_NAME
from stoker.store.fields import PARTS, TIMED_PARTS, FieldData, FieldKind, Ragged, Series
from stoker.strict_json import exact_text, finite, json_text, parse_json

FORMAT_VERSION = 2
"""Newest version that this code reads. 2 has fields of encoded pictures; stores without one are still written as 1."""
MANIFEST_NAME = "store.json"
REFUSED_NAME = "refused.jsonl"
PAGE_NAME = "samples.html"
"""Page with samples of the store, which `stoker pack` draws when the store is done."""
WORK_SUFFIX = ".partial"  # a store is built in the folder of its name with this suffix
REPLACED_NAME = "replaced"
"""Name in that folder of the old store, while the new one takes its place."""
_EXCHANGE_TRIES, _EXCHANGE_PAUSE_SECONDS = 50, 0.01
_SEAL = "manifest_checksum"
BLOCK_BYTES = 1 << 20
"""Bytes under one checksum: large enough to hash at memory speed, small enough that the first
random row costs 0.2 ms."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class FieldInfo(_Frozen):
    """One field of a store; see `stoker.store.fields` for the three kinds."""

    kind: FieldKind
    dtype: str
    shape: list[int] = Field(description="Shape of one row of the values, without the first axis.")
    columns: list[str] | None = None
    window: int | None = None
    duration_ns: int | None = None
    encoding: Literal["utf8", "picture"] | None = None

    @property
    def parts(self) -> dict[str, str | None]:
        """Datasets of the field: suffix of the name, and dtype; None is the field's own."""
        left_out = TIMED_PARTS if self.kind == "series" and self.duration_ns is None else ()
        return {part: dtype for part, dtype in PARTS[self.kind].items() if part not in left_out}

    @classmethod
    def of(cls, data: FieldData) -> FieldInfo:
        """Describe a field that is about to be written."""
        return cls(
            kind=data.kind,
            dtype=data.values.dtype.str,
            shape=list(data.values.shape[1:]),
            columns=None if data.columns is None else list(data.columns),
            window=data.window if isinstance(data, Series) else None,
            duration_ns=data.duration_ns if isinstance(data, Series) else None,
            encoding=data.encoding if isinstance(data, Ragged) else None,
        )


class ShardInfo(_Frozen):
    """One HDF5 file of a store.

    `checksum` is the digest of the shard's own block checksums, so a shard that was swapped,
    renamed or left over from another pack does not pass for this one. `offsets` say where the bytes
    of each dataset lie: a reader needs no HDF5 structures of the shard, which may be damaged in ways
    that crash the HDF5 library.
    """

    file: str
    label: str
    num_samples: int
    size_bytes: int
    checksum: str
    rows: dict[str, int] = Field(description="Dataset path to length of its first axis.")
    offsets: dict[str, int | None] = Field(
        default={}, description="Dataset path to its first byte; None when it has none."
    )


class SourceFile(_Frozen):
    """One input file or folder, as it was when it was packed."""

    path: str
    size_bytes: int
    mtime_ns: int
    digest: str


class Provenance(_Frozen):
    """How a store came to be; decides whether it is stale."""

    kind: str
    source_version: int
    options: dict[str, Any]
    files: list[SourceFile]
    stoker_version: str


class Manifest(_Frozen):
    """The whole of `store.json`."""

    format_version: int = 1
    num_samples: int
    fields: dict[str, FieldInfo]
    shards: list[ShardInfo]
    checksum_algorithm: Literal["xxh3-64"] = "xxh3-64"
    block_bytes: int = BLOCK_BYTES
    provenance: Provenance | None = None
    attributes: dict[str, Any] = {}
    repairs: dict[str, list[dict[str, Any]]] = {}
    quality: dict[str, Any] = {}
    num_refused: int = 0
    counts: dict[str, Any] = Field(
        default={}, description="found = packed + refused + ignored, the last two by reason."
    )
    _checksum: str = PrivateAttr("")

    def model_post_init(self, _context: Any) -> None:
        """Raise the version of a store that older code could not read."""
        if any(info.encoding == "picture" for info in self.fields.values()):
            object.__setattr__(self, "format_version", FORMAT_VERSION)

    def to_text(self) -> str:
        """Serialise; the same manifest always gives the same bytes."""
        return seal(self._document())

    @property
    def checksum(self) -> str:
        """The checksum that `store.json` is, or would be, sealed with."""
        return self._checksum or _digest(self._document())

    def _document(self) -> dict[str, Any]:
        document: dict[str, Any] = finite(self.model_dump(mode="json"))
        return document


def seal(document: dict[str, Any]) -> str:
    """Return the text of `store.json`: the document and, as its last key, its own checksum.

    Raises:
        StoreError: It would be longer than what `read_manifest` takes.
    """
    text = json_text({**document, _SEAL: _digest(document)}, indent=1) + "\n"
    fix = "pack fewer files into one store, or larger parts"
    MANIFEST.check(len(text), "the manifest of this store", fix, StoreError)
    return text


def _digest(document: dict[str, Any]) -> str:
    return str(xxhash.xxh3_64_hexdigest(exact_text(document).encode()))


def read_manifest(folder: Path) -> Manifest:
    """Read and check `folder/store.json`.

    Raises:
        StoreError: The folder is missing or is not a finished store.
        StoreVersionError: It was written by newer code.
        CorruptError: The text is not a manifest.
    """
    path = folder / MANIFEST_NAME
    if path.exists() and not path.is_file():  # a folder; or a pipe, which would be waited for
        raise _not_a_store(folder)
    try:
        with path.open("rb") as file:
            raw = file.read(MANIFEST.most + 1)
            size = max(len(raw), os.fstat(file.fileno()).st_size)
        MANIFEST.check(size, str(path), "pack again, or copy the store again", CorruptError)
    except (FileNotFoundError, NotADirectoryError):
        raise _not_a_store(folder) from None
    return parse_manifest(raw, str(path))


def parse_manifest(raw: bytes, name: str) -> Manifest:
    """Check the bytes of a `store.json`; `name` is their origin, for messages. See `read_manifest`."""
    try:
        document = parse_json(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _damaged(f"{name} is not UTF-8 text: byte {error.start}.") from error
    except (ValueError, RecursionError) as error:  # ValueError: a number of 5,000 digits
        raise _damaged(f"{name} is not JSON: {error}.") from error
    version = document.get("format_version") if isinstance(document, dict) else None
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise StoreVersionError(
            f"{name} has format version {version}.",
            f"1 to {FORMAT_VERSION} with this stoker",
            "git pull in the checkout of stoker, or pack the data again",
        )
    checksum = document.pop(_SEAL, None) if isinstance(document, dict) else None
    if checksum is None or checksum != _digest(document):
        given = f"{name} fails its own checksum: it was damaged or edited."
        raise _damaged(given, "a manifest as it was written")
    try:
        manifest = Manifest.model_validate_json(exact_text(document))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "document"
        raise _damaged(f"{name}: {where}: {first['msg']}.") from error
    for what, allowed in _contradictions(manifest):
        raise _damaged(f"{name}: {what}.", allowed)
    # As it was written: an older manifest has fewer keys than one that is written now.
    manifest._checksum = checksum
    return manifest


def find_store(folder: Path) -> Path:
    """Return the folder to read the store `folder` from.

    It is another one only where a pack was killed in the middle of an exchange in two steps: for that
    moment the old store lies in the work folder. A pack that is still running needs microseconds.
    """
    whole = folder.absolute()  # '.' has no name
    replaced = whole.with_name(whole.name + WORK_SUFFIX) / REPLACED_NAME
    for _ in range(_EXCHANGE_TRIES):
        if (folder / MANIFEST_NAME).exists() or not replaced.is_dir():
            return folder
        time.sleep(_EXCHANGE_PAUSE_SECONDS)
    return replaced if (replaced / MANIFEST_NAME).exists() else folder


def run_error(folder: Path) -> StoreError | None:
    """Return the error for the folder of a run that was given as data; None for anything else."""
    if not (folder / LOG_NAME).is_file() or (folder / MANIFEST_NAME).exists():
        return None
    return StoreError(
        f"{folder} is the folder of a run, no store.",
        "a folder made by `stoker pack`, or a plain .h5 file",
        command("stoker", "report", folder),
    )


def _not_a_store(folder: Path) -> StoreError:
    if not folder.exists():
        return StoreError(
            f"{folder} does not exist.", "a store folder, an HDF5 file or a URL", look_for(folder)
        )
    if (error := run_error(folder)) is not None:
        return error
    return StoreError(
        f"{folder} has no {MANIFEST_NAME}, so it is not a finished store.",
        "a folder made by `stoker pack`, or a plain .h5 file",
        "stoker pack --help shows how to make one",
    )


def _damaged(given: str, allowed: str = "a manifest") -> CorruptError:
    return CorruptError(given, allowed, "pack again")


def _contradictions(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Yield contradictions that the types cannot exclude, such as counts that differ, each with what is allowed."""
    total = sum(shard.num_samples for shard in manifest.shards)
    if total != manifest.num_samples or any(shard.num_samples < 0 for shard in manifest.shards):
        yield (
            f"the shards hold {total} samples but num_samples is {manifest.num_samples}",
            "equal counts",
        )
    for field, info in manifest.fields.items():
        if min(info.shape, default=0) < 0 or not _is_number(info.dtype):
            yield (
                f"field {field!r} has dtype {info.dtype!r} and shape {info.shape}",
                "numbers of at most 8 bytes, and lengths of 0 or more",
            )
        if info.kind == "series" and (info.window is None or info.window < 0):
            yield f"series {field!r} has window {info.window}", "0 rows or more"
    for shard in manifest.shards:
        for what, allowed in _contradictions_of(shard, manifest.fields):
            yield f"shard {shard.file!r} {what}", allowed
    if not 4096 <= manifest.block_bytes <= CHUNK.most:
        yield f"block_bytes is {manifest.block_bytes}", f"4096 to {CHUNK.most}"


def _is_number(dtype: str) -> bool:
    try:
        kind = np.dtype(dtype)
    except (TypeError, ValueError, SyntaxError):
        return False
    return kind.kind in "biuf" and 0 < kind.itemsize <= 8


def _contradictions_of(
    shard: ShardInfo, fields: Mapping[str, FieldInfo]
) -> Iterator[tuple[str, str]]:
    """Compare name, offsets and counts of one shard with each other and with its size."""
    if Path(shard.file).name != shard.file:
        yield "is not a file name", "a name beside the manifest"
    if {f"_checksums/{dataset}" for dataset in shard.rows} | set(shard.rows) != set(shard.offsets):
        yield "misses offsets", "one per dataset"
    # A sample has at least one byte, so no file has more samples than bytes.
    if shard.num_samples > max(0, shard.size_bytes):
        yield (
            f"claims {shard.num_samples} samples in {shard.size_bytes} bytes",
            "samples that have bytes",
        )
    wanted = {"": 0, "/offsets": 1, "/ends": 0}
    for dataset, part in [
        (name + part, part) for name, info in fields.items() for part in info.parts
    ]:
        rows = shard.rows.get(dataset, -1)
        if rows < 0 or (part in wanted and rows != shard.num_samples + wanted[part]):
            counts = f"{max(rows, 0)} rows of {dataset!r} for {shard.num_samples} samples"
            yield f"has {counts}", "equal counts"
    if any(offset is not None and offset < 0 for offset in shard.offsets.values()):
        yield "has an offset below 0", "a place in the file"
