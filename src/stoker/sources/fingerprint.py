"""Whether a store is up to date with its sources: hashes of inputs, and the difference in words.

Enters: a source and perhaps an older `Provenance`. Leaves: the new `Provenance`, and the reason
why the old one is stale. Costs: a stat per file; the content is hashed (at disk speed) only for
files whose size or time changed since.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any

import xxhash

import stoker
from stoker.address import masked_values, slow_digest
from stoker.display import look_for
from stoker.errors import SourceError, file_error, refuse_special
from stoker.sources.contract import Source
from stoker.stalls import Waiting
from stoker.store.manifest import Provenance, SourceFile
from stoker.strict_json import exact_text, parse_json

_PIECE_BYTES = 8 << 20


def fingerprint(
    source: Source, extra: Mapping[str, Any], known: Provenance | None = None
) -> Provenance:
    """Return the provenance of a store that would be packed now.

    `extra` has options of the packer itself. Files whose size and time are those in `known` keep their digest there.
    """
    old = {entry.path: entry for entry in known.files} if known else {}
    files = [_describe(Path(path), old) for path in source.files()]
    # Through JSON and back, so that a fresh provenance equals one read from disk.
    text = exact_text({**source.options(), **extra}, sort_keys=True)
    options = masked_values(parse_json(text))
    if options != parse_json(text):  # addresses that differ only in their secrets stay different
        options["secrets"] = slow_digest(text)
    return Provenance(
        kind=source.kind,
        source_version=source.version,
        options=options,
        files=files,
        stoker_version=stoker.__version__,
    )


def difference(old: Provenance, new: Provenance) -> str:
    """Return in words what changed, or "" if the old store is up to date."""
    if old.kind != new.kind:
        return f"it was packed from {old.kind}, not {new.kind}"
    if old.source_version != new.source_version:
        versions = f"version {old.source_version} to {new.source_version}"
        return f"the {new.kind} reader changed ({versions})"
    for name in sorted({*old.options, *new.options}):
        before, after = old.options.get(name), new.options.get(name)
        # An empty option that an older stoker did not have changes nothing.
        if before != after and not (name not in old.options and after in ({}, [])):
            return f"option {name} changed from {before!r} to {after!r}"
    before_files = {entry.path: entry.digest for entry in old.files}
    after_files = {entry.path: entry.digest for entry in new.files}
    for path in sorted({*before_files, *after_files}):
        if path not in after_files:
            return f"source {path} is not among the sources any more"
        if path not in before_files:
            return f"source {path} was not among the sources"
        if before_files[path] != after_files[path]:
            return f"source {path} changed"
    return ""


def _describe(path: Path, old: Mapping[str, SourceFile]) -> SourceFile:
    if not path.exists():
        raise SourceError(
            f"source {str(path)!r} does not exist.", "an existing file or folder", look_for(path)
        )
    if path.is_dir():
        return _describe_folder(path)
    refuse_special(path, "source")
    found = path.stat()
    before = old.get(str(path))
    if before and (before.size_bytes, before.mtime_ns) == (found.st_size, found.st_mtime_ns):
        return before
    digest = xxhash.xxh3_128()
    try:
        with Waiting(path, is_work=True), path.open("rb") as file:
            while piece := file.read(_PIECE_BYTES):
                digest.update(piece)
    except OSError as error:
        # The system's error names the file if opening failed, but not if reading failed.
        if (known := file_error(error, path)) is not None:
            raise known from error
        raise
    size, time = found.st_size, found.st_mtime_ns
    return SourceFile(path=str(path), size_bytes=size, mtime_ns=time, digest=digest.hexdigest())


def _describe_folder(folder: Path) -> SourceFile:
    """Describe a folder by its files' names, sizes and times.

    Hashing 300,000 small files would take longer than packing them.
    """
    digest = xxhash.xxh3_128()
    size = newest = 0
    for name, found in sorted(_walk(folder), key=itemgetter(0)):
        entry = f"{name}\0{found.st_size}\0{found.st_mtime_ns}\0"
        digest.update(entry.encode(errors="surrogateescape"))
        size += found.st_size
        newest = max(newest, found.st_mtime_ns)
    return SourceFile(path=str(folder), size_bytes=size, mtime_ns=newest, digest=digest.hexdigest())


def _walk(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the files below a folder by their names in it; a path object for each would take 0.1 ms of a core.

    Links to folders are followed, because the readers of pictures follow them.
    """
    root = os.fspath(folder)
    seen: set[tuple[int, int]] = set()
    for here, subfolders, files in os.walk(root, followlinks=True):
        place = os.stat(here)  # noqa: PTH116  see above
        if (
            place.st_dev,
            place.st_ino,
        ) in seen:  # a link that leads back, or another to the same folder
            subfolders.clear()
            continue
        seen.add((place.st_dev, place.st_ino))
        subfolders.sort()  # which of two links is followed must not depend on the disk
        prefix = "" if here == root else os.path.relpath(here, root) + "/"
        for name in files:
            try:
                found = os.stat(f"{here}/{name}")  # noqa: PTH116  see above
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                    continue  # a broken link, or a file removed meanwhile
                raise
            if stat.S_ISREG(found.st_mode):
                yield prefix + name, found
