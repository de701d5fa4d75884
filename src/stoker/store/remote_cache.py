"""The local copies of remote shards: their places, the limit of their size, their locks.

Enters: the size of a shard that is about to be fetched. Leaves: room for it, made by removing the
copies that were used longest ago. Costs: a look at every file of the cache (a few microseconds each)
per shard that is fetched; none per read.

What is ours: the root holds a mark (`ownership.Mark`) with an id; every version's folder holds `remote.json`
with the same id and the name of that folder, and a sealed manifest. Only files that such a manifest names
are copies. Everything else below the root is not ours: neither counted nor touched.

Contract, for any number of processes and threads:
- A copy is under its name only when it is whole and was verified against its checksums.
- A reader of a copy holds a shared lock on it; a copy in use is never removed.
- A process that fetches a copy holds an exclusive lock on its `.part`, whose name says how many
  bytes it will have, so that the same room is not promised twice.
- Locks belong to open files: they end with their process, however it ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from stoker.display import command
from stoker.errors import InputError, StoreError
from stoker.ownership import always, mark_once, open_own_file, read_own_json, remove_file
from stoker.store.manifest import read_manifest
from stoker.units import format_bytes, format_count, parse_bytes, parse_share

ORIGIN_NAME = "remote.json"
_ORIGIN_BYTES = 1 << 16
_KIND = "cache"
_NO_HOME = Path("/dev/null/home-folder-unknown")
_DEFAULT_LIMIT = "50%"
_ROOM_SECONDS = 20.0
_PATIENCE_SECONDS = 300.0


def cache_root() -> Path:
    """Return where copies lie: $STOKER_CACHE, else `stoker/stores` in the user's cache folder."""
    if given := os.environ.get("STOKER_CACHE"):
        return _with_home(Path(given)).absolute()
    return user_cache_folder() / "stores"


def user_cache_folder() -> Path:
    """Return stoker's folder in the user's cache: in $XDG_CACHE_HOME, else in ~/.cache."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says that a relative path is to be ignored.
    root = Path(given) if Path(given).is_absolute() else _with_home(Path("~/.cache"))
    return root / "stoker"


def _with_home(path: Path) -> Path:
    """Return `path` with `~` expanded.

    Without a home folder it is a path that cannot be created: commands that need the cache fail with this name,
    others work.
    """
    try:
        return path.expanduser()
    except RuntimeError:
        return _NO_HOME / path.name


@dataclass(frozen=True)
class Cache:
    """A folder of copies, `root/STORE/VERSION/FILE`, and the id of its mark."""

    root: Path
    id: str

    @classmethod
    def here(cls) -> Cache:
        """Return the current cache; its folder is made if it is missing."""
        root = cache_root()
        make_folder(root)
        try:
            return cls(root, mark_once(root, _KIND).id)
        except OSError as error:
            raise _no_folder(root, error) from error

    def owns(self, version: Path) -> bool:
        """Whether `version` is a folder of this cache: at its place, and with the same id."""
        is_link = version.is_symlink() or version.parent.is_symlink()
        if version.parent.parent != self.root or is_link:
            return False
        origin = read_origin(version)
        return origin.get("cache") == self.id and origin.get("manifest") == version.name

    def limit_bytes(self) -> int:
        """Return the most that copies may take: $STOKER_CACHE_LIMIT, a size or a share.

        A share is of what the disk would have free without them.
        """
        text = os.environ.get("STOKER_CACHE_LIMIT") or _DEFAULT_LIMIT
        try:
            if not text.strip().endswith("%"):
                return parse_bytes(text)
            share = parse_share(text)
        except InputError as error:
            raise InputError(
                f"STOKER_CACHE_LIMIT: {error.given}",
                "a size or a share",
                "STOKER_CACHE_LIMIT=200GB, or STOKER_CACHE_LIMIT=50%",
            ) from error
        return int(share * (shutil.disk_usage(self.root).free + self.used_bytes()))

    def used_bytes(self) -> int:
        """Return the bytes of all copies."""
        return sum(size for _, size, _ in self._copies())

    def _copies(self) -> list[tuple[float, int, Path]]:
        """Return `(last use, bytes, path)` of every copy, those under way counted whole; the least recent first."""
        found = []
        for origin in self.root.glob(f"*/*/{ORIGIN_NAME}"):
            if not self.owns(origin.parent):
                continue
            for path, promised in _named_copies(origin.parent):
                with contextlib.suppress(FileNotFoundError):
                    state = path.stat(follow_symlinks=False)
                    found.append((state.st_mtime, max(state.st_size, promised), path))
        return sorted(found)

    def make_room(self, part: Path, num_bytes: int, release: Callable[[], bool]) -> None:
        """Remove copies until `num_bytes` more fit, for `part`, which the caller has locked.

        `release` lets go of a copy that this process uses; False when there is none left.
        """
        limit = self.limit_bytes()
        if num_bytes > limit:
            raise self._too_small(num_bytes, limit, 0)
        deadline = time.monotonic() + _ROOM_SECONDS
        while (num_in_use := self._remove_until(part, num_bytes, limit)) is not None:
            if release():
                continue
            if num_in_use == 0 or time.monotonic() > deadline:
                raise self._too_small(num_bytes, limit, num_in_use)
            time.sleep(0.1)

    def _remove_until(self, part: Path, num_bytes: int, limit: int) -> int | None:
        """Remove copies until there is room, and return None; or the number of copies in use, if these prevent it."""
        with self._locked():
            copies = [copy for copy in self._copies() if copy[2] != part]
            used = sum(size for _, size, _ in copies)
            missing = num_bytes - part.stat().st_size
            num_in_use = 0

            def fits() -> bool:
                return used + num_bytes <= limit and shutil.disk_usage(self.root).free >= missing

            for _, size, path in copies:
                if fits():
                    return None
                if _remove_unused(path):
                    used -= size
                else:
                    num_in_use += 1
            return None if fits() else num_in_use

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock under which copies are removed: one process at a time, for milliseconds."""
        path, what = self.root / "lock", "the cache's lock"
        lock = open_own_file(path, os.O_RDWR, lambda file: os.fstat(file).st_size == 0, what)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def _too_small(self, num_bytes: int, limit: int, num_in_use: int) -> StoreError:
        free = shutil.disk_usage(self.root).free
        return StoreError(
            f"no room for {format_bytes(num_bytes)} in the cache {self.root}: it may take "
            f"{format_bytes(limit)}, its disk has {format_bytes(free)} free, in use: "
            f"{format_count(num_in_use, 'file')}.",
            "room for the shards that are read at the same time",
            "STOKER_CACHE_LIMIT=200GB (or 80%) for more, STOKER_CACHE=FOLDER for another disk",
        )


def read_origin(version: Path) -> dict[str, str]:
    """Return the content of a version's `remote.json`; empty if it is missing or unreadable."""
    found = read_own_json(version / ORIGIN_NAME, _ORIGIN_BYTES)
    return found if all(isinstance(value, str) for value in found.values()) else {}


def _named_copies(version: Path) -> list[tuple[Path, int]]:
    """Return the files of a version's folder that its sealed manifest names, and their parts, with their full size."""
    try:
        shards = read_manifest(version).shards
    except StoreError:
        return []
    wholes = [(version / shard.file, shard.size_bytes) for shard in shards]
    found = [(path, size) for whole, size in wholes for path in (whole, part_of(whole, size))]
    return [(path, size) for path, size in found if path.is_file() and not path.is_symlink()]


def part_of(whole: Path, size: int) -> Path:
    """Return the file that a copy is fetched into; its name promises its size."""
    return whole.with_name(f"{whole.name}.{size}.part")


def make_folder(folder: Path, private: bool = False) -> None:
    """Make a folder of the cache; private where a store's address holds a password."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700 if private else 0o777)
    except OSError as error:
        raise _no_folder(folder, error) from error


def _no_folder(folder: Path, error: OSError) -> StoreError:
    return StoreError(
        f"the cache folder {folder} cannot be made: {error.strerror}.",
        "a folder that may be written",
        "STOKER_CACHE=FOLDER",
    )


def open_copy(path: Path, size: int) -> int | None:
    """Return a descriptor of a whole copy, locked against removal; None when there is none."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    state = os.fstat(descriptor)
    if state.st_nlink == 0 or state.st_size != size:  # removed before the lock, or cut short
        os.close(descriptor)
        return None
    with contextlib.suppress(OSError):  # a cache that may only be read
        os.utime(path)
    return descriptor


@contextlib.contextmanager
def claimed_part(whole: Path, size: int) -> Iterator[int | None]:
    """Yield a locked descriptor of a copy's `.part`, or None if another process completed the copy meanwhile.

    Waits for another process as long as it makes progress. On any exit the lock is released; bytes that came stay
    for the next try, and a part that is empty or no longer needed is removed.
    """
    part = part_of(whole, size)
    seen, since = -1, time.monotonic()
    while (descriptor := _try_claim(part)) is None:
        if (now := _size(part)) != seen:
            seen, since = now, time.monotonic()
        if time.monotonic() - since > _PATIENCE_SECONDS:
            raise StoreError(
                f"another process has been fetching {whole} without progress for {_PATIENCE_SECONDS:g} s.",
                "a process that goes on",
                f"{command('fuser', part)} names it",
            )
        time.sleep(0.05)
    try:
        yield None if _size(whole) == size else descriptor
    finally:
        if _size(whole) == size or os.fstat(descriptor).st_size == 0:
            remove_file(part, always)
        os.close(descriptor)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return -1


def _try_claim(part: Path) -> int | None:
    descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    with contextlib.suppress(BlockingIOError, FileNotFoundError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_ino == part.stat().st_ino:  # else it was renamed or removed
            return descriptor
    os.close(descriptor)
    return None


def _remove_unused(path: Path) -> bool:
    """Remove a copy unless it is locked by a reader or a fetch; return whether it was removed."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return remove_file(path, always)
    except OSError:  # in use
        return False
    finally:
        os.close(descriptor)
