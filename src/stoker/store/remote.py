"""Stores that stand behind a URL, read through a local copy of their shards.

Enters: a URL. Leaves: a folder of the cache that is a store like any other, whose missing shards are
fetched when they are first used. Costs: opening reads the manifest, a few kilobytes; the first use
of a shard reads it once over the network and once from the disk, to check it; later uses cost what
a local store costs.

Every version of a store has a folder of its own, named by the digest of its manifest, with the manifest and
`remote.json` (where it came from). So a process that has opened one version never meets shards of another: when
the remote store is packed anew, the next opening sees it, and a process that reads the old one gets an error
when it needs a shard that it has not fetched. Without a connection the version that was last seen is opened,
with a note.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import xxhash

from stoker import ownership
from stoker.address import has_secret, slow_digest
from stoker.display import command
from stoker.errors import CorruptError, StoreError
from stoker.ownership import always, refused, write_text
from stoker.store.manifest import MANIFEST_NAME, ShardInfo, parse_manifest, read_manifest
from stoker.store.remote_cache import (
    ORIGIN_NAME,
    Cache,
    cache_root,
    claimed_part,
    make_folder,
    open_copy,
    part_of,
    read_origin,
)
from stoker.store.remote_fetch import AbsentError, Remote, UnreachableError
from stoker.store.shard import Shard
from stoker.strict_json import json_text
from stoker.units import format_bytes, local_time

_TRIES = 4
_PAUSE_SECONDS = 0.5
_HELD: weakref.WeakSet[Shard] = weakref.WeakSet()
"""Shards of this process that read copies: they can be closed when the cache needs room."""
_HELD_LOCK = threading.Lock()

Check = Callable[[Path], None]


def update_mirror(url: str) -> tuple[Path, tuple[str, ...]]:
    """Return the cache folder of the version that stands at `url` now, and notes for the user.

    Raises:
        StoreError: The server does not answer and no version was seen before, or there is no store.
        CorruptError: What stands there is not a manifest.
    """
    remote, cache = Remote(url), Cache.here()
    home = cache.root / _label(url)
    try:
        text = _read_manifest(remote)
    except UnreachableError as error:
        seen = [origin for origin in home.glob(f"*/{ORIGIN_NAME}") if cache.owns(origin.parent)]
        if not seen:
            raise
        newest = max(seen, key=lambda origin: origin.stat().st_mtime)
        when = f"{local_time(newest.stat().st_mtime):%Y-%m-%d %H:%M}"
        return newest.parent, (f"offline: {error.given} The version of {when} is used.",)
    folder = home / xxhash.xxh3_64_hexdigest(text)
    is_there = False
    with contextlib.suppress(OSError):
        is_there = (folder / MANIFEST_NAME).read_bytes() == text
    if not is_there or not cache.owns(folder):
        _write_version(cache, folder, text, remote)
    with contextlib.suppress(OSError):  # a cache that may only be read
        os.utime(folder / ORIGIN_NAME)
    _forget_empty_versions(cache, home, folder)
    return folder, _size_notes(cache, folder, remote)


def _read_manifest(remote: Remote) -> bytes:
    """Return the manifest, in up to three tries: a reset connection or a busy gateway may recover."""
    for pause in (_PAUSE_SECONDS, 2 * _PAUSE_SECONDS):
        try:
            return remote.read(MANIFEST_NAME)
        except UnreachableError:
            time.sleep(pause)
    return remote.read(MANIFEST_NAME)


def _label(url: str) -> str:
    """Return a folder name that people recognise and that no two URLs share."""
    words = re.sub(r"[^A-Za-z0-9.]+", "-", Remote(url).name).strip("-.")[-60:]
    encoded = url.encode(errors="surrogatepass")
    digest = slow_digest(url) if has_secret(url) else xxhash.xxh3_64_hexdigest(encoded)
    return f"{words}-{digest[:8]}"


def _write_version(cache: Cache, folder: Path, text: bytes, remote: Remote) -> None:
    """Write a manifest into its folder, whole or not at all, after its seal and names were checked."""
    try:
        for shard in parse_manifest(text, f"{remote.name}/{MANIFEST_NAME}").shards:
            # Another name could be that of one of the cache's own files.
            if not re.fullmatch(r"\w[\w.-]*\.h5", shard.file, re.ASCII):
                raise CorruptError(
                    f"{remote.name}: shard {shard.file!r} has a strange name.", "shard-00000.h5"
                )
    except StoreError as error:
        again = "copy or pack the remote store again"
        raise type(error)(error.given, error.allowed, again) from error
    private = has_secret(remote.url)
    make_folder(folder.parent, private=private)
    try:
        folder.mkdir(exist_ok=True)
        # Another process may be writing the same version now. Its temporary files are ours; its finished files
        # are confirmed by its origin file, which is therefore read after the names.
        held = [each for each in folder.iterdir() if not ownership.is_temporary(each.name)]
        # Older versions wrote the same without the cache's id.
        if held and read_origin(folder).get("manifest") != folder.name:
            raise refused(folder, f"stoker needs this name for a copy of {remote.name}")
        origin = {"url": remote.url, "manifest": folder.name, "cache": cache.id}
        write_text(folder / ORIGIN_NAME, json_text(origin) + "\n", always, private=private)
        write_text(folder / MANIFEST_NAME, text.decode(), always)
    except OSError as error:
        raise _disk_error(folder, error) from error


def _forget_empty_versions(cache: Cache, home: Path, current: Path) -> None:
    """Remove versions without copies; one that holds any other file stays."""
    for origin in home.glob(f"*/{ORIGIN_NAME}"):
        other = origin.parent
        if other == current or not cache.owns(other):
            continue
        with contextlib.suppress(OSError):
            if {path.name for path in other.iterdir()} <= {MANIFEST_NAME, ORIGIN_NAME}:
                ownership.remove_file(other / MANIFEST_NAME, always)
                ownership.remove_file(origin, always)
                ownership.remove_empty_folder(other)


def _size_notes(cache: Cache, folder: Path, remote: Remote) -> tuple[str, ...]:
    note = f"a copy of {remote.name}, in {folder}"
    total = sum(shard.size_bytes for shard in read_manifest(folder).shards)
    limit = cache.limit_bytes()
    slow = (
        f"slow: the store has {format_bytes(total)} and the cache may take {format_bytes(limit)}, "
        "so shards are fetched again and again; STOKER_CACHE_LIMIT allows more"
    )
    return (note,) if total <= limit else (note, slow)


# -- shards --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mirror:
    """A version's folder in the cache, and where its shards come from."""

    folder: Path
    remote: Remote
    cache: Cache

    @classmethod
    def of(cls, folder: Path) -> Mirror | None:
        """Return the mirror that `folder` is; None for a store of its own.

        A folder is a mirror by its place in the cache and the cache's id in its `remote.json`, not
        because a file of that name lies there: such a file may come with anybody's store.
        """
        folder = folder.absolute()
        if folder.parent.parent != cache_root() or not (folder / ORIGIN_NAME).exists():
            return None
        cache = Cache.here()
        origin = read_origin(folder)
        if not cache.owns(folder) or "url" not in origin:
            raise CorruptError(
                f"{folder / ORIGIN_NAME} is damaged.",
                "a cache folder as it was written",
                f"{command('rm', '-r', folder)}, then open the store by its URL again",
            )
        return cls(folder, Remote(origin["url"]), cache)

    def adopt(self, shard: Shard) -> None:
        """Remember a shard that reads a copy, so that it can be closed when the cache needs room."""
        with _HELD_LOCK:
            _HELD.add(shard)

    def open_shard(self, info: ShardInfo, check: Check) -> int:
        """Return an open descriptor of a shard's copy; fetch the copy if it is not there.

        The copy cannot be removed until the descriptor is closed. Of several threads or processes that want the
        same shard, one fetches and the others wait. After a failure or a kill the received bytes stay in
        the `.part`, and the next call continues there.

        `check` gets the path of a fetched file, and raises if that is not the shard.
        """
        whole = self.folder / info.file
        make_folder(self.folder)  # `_forget_empty_versions` may have removed it since
        try:
            for _ in range(_TRIES):
                if (descriptor := open_copy(whole, info.size_bytes)) is not None:
                    return descriptor
                with claimed_part(whole, info.size_bytes) as part:
                    if part is not None:
                        self._fetch(info, check, part)
        except StoreError:
            raise
        except OSError as error:
            raise _disk_error(whole, error) from error
        raise StoreError(
            f"{whole} was fetched {_TRIES} times, and removed before it could be read.",
            "a cache with room for all processes that use it",
            "STOKER_CACHE_LIMIT=200GB, or fewer processes",
        )

    def _fetch(self, info: ShardInfo, check: Check, part: int) -> None:
        """Fill the claimed part, verify its checksums, and rename it; a damaged one is fetched once more."""
        whole = self.folder / info.file
        named = part_of(whole, info.size_bytes)
        self.cache.make_room(named, info.size_bytes, _release_one)
        for last_try in (False, True):
            self._download(info, part)
            os.fsync(part)
            try:
                check(named)
                break
            except CorruptError as error:
                ownership.empty_file(part)
                if last_try:
                    damaged = CorruptError(
                        f"{self.remote.name}/{info.file} is damaged; it was fetched twice, and then: {error.given}",
                        "the bytes that were packed",
                        "copy this shard to the server again, or pack again",
                    )
                    raise self._unless_replaced(info, damaged) from error
        ownership.rename_over(named, whole, always)

    def _download(self, info: ShardInfo, part: int) -> None:
        """Append the missing bytes, from where an earlier try ended."""
        failures = most = 0
        while (start := os.fstat(part).st_size) < info.size_bytes:
            try:
                self._append(info, part, start)
            except AbsentError as error:
                ownership.empty_file(part)
                gone = StoreError(
                    f"{error.given} The manifest there names it.",
                    "every shard beside store.json",
                    "copy the whole store to the server again",
                )
                raise self._unless_replaced(info, gone) from error
            except UnreachableError as error:
                now = os.fstat(part).st_size
                failures = 1 if now > max(start, most) else failures + 1
                most = max(most, now)
                if failures == _TRIES:
                    came = f"{format_bytes(now)} of {format_bytes(info.size_bytes)}"
                    broken = UnreachableError(
                        f"{error.given} Kept of {info.file}: {came}.",
                        error.allowed,
                        "the same command goes on from there",
                    )
                    raise self._unless_replaced(info, broken) from error
                time.sleep(_PAUSE_SECONDS * 2**failures)

    def _append(self, info: ShardInfo, part: int, start: int) -> None:
        for piece in self.remote.pieces(info.file, start, info.size_bytes):
            if not piece:  # the server cannot begin in the middle
                ownership.empty_file(part)
                start = 0
            view = memoryview(piece)
            while view:
                try:
                    done = os.pwrite(part, view, start)
                except OSError as error:
                    ownership.empty_file(part)  # free the space again: the disk may be full
                    raise _disk_error(self.folder / info.file, error) from error
                start, view = start + done, view[done:]

    def _unless_replaced(self, info: ShardInfo, error: StoreError) -> StoreError:
        """Return the error, or another one where the remote store was packed anew since it was opened."""
        try:
            text = self.remote.read(MANIFEST_NAME)
        except StoreError:
            return error
        if xxhash.xxh3_64_hexdigest(text) == self.folder.name:
            return error
        return StoreError(
            f"{self.remote.name} was replaced by another store after it was opened; "
            f"{info.file} of the one that was opened is not there any more.",
            "one version of a store for a whole run",
            "open the store again; a training run starts again, on the new data",
        )


def _release_one() -> bool:
    """Close the shard of this process that was opened longest ago; False when none is open."""
    with _HELD_LOCK:
        held = sorted(_HELD, key=lambda shard: shard.opened_at)
    return any(shard.release() for shard in held)


def _disk_error(path: Path, error: OSError) -> StoreError:
    return StoreError(
        f"the cache cannot hold {path}: {error.strerror or error}.",
        "a disk with room, and a folder that may be written",
        "STOKER_CACHE=FOLDER for another disk, or STOKER_CACHE_LIMIT=20GB for less of this one",
    )
