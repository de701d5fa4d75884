"""The folder beside the target where a store is made, and how the store gets into its place.

Enters: the target path and the provenance of the store to be made. Leaves: the finished folder under the
target's name. Costs: the store's size on the same disk while it is being made.

`OUT.partial/` carries our mark and holds `job.json` (what is being made), `lock`, `scratch/` (the source's
own files), and one folder per stage, named by the job's digest: a worker of another job writes into
another folder. Built parts are kept for the next try, later stages are not. A second packer on the same
target is refused by the lock; a job with another provenance removes the leftovers and says so. Anything in
there, or in an old store, that stoker did not write is refused by its name before any work.

The commit, and what a kill leaves at each moment:
1. The stage becomes a whole store, manifest last. Before that, and until 2, the old store is in place.
2. The two folders change places in one step (`renameat2`). Readers always find a store.
3. The old store, now in the work folder, is removed with it. After a kill the next pack removes it.
Where the kernel or the disk cannot exchange, 2 takes two steps: the old store moves to
`OUT.partial/replaced`, then the new one into its place. Between the two a reader waits for a moment, then
reads `replaced` (`store.manifest.find_store`); the next pack finishes the commit before anything else.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Self

import xxhash

from stoker import ownership
from stoker.address import as_url, shown
from stoker.bounds import LINE
from stoker.display import command, quoted
from stoker.errors import InputError, StoreError, is_full_disk, require_utf8, unwritable
from stoker.ownership import MARK_NAME, IsOurs, Mark, always, read_mark, refused, write_text
from stoker.sources.fingerprint import difference
from stoker.store.manifest import (
    MANIFEST_NAME,
    PAGE_NAME,
    REFUSED_NAME,
    REPLACED_NAME,
    WORK_SUFFIX,
    Manifest,
    Provenance,
    read_manifest,
)
from stoker.store.reader import assemble_store
from stoker.store.shard import Shard
from stoker.strict_json import parse_json

_PACK, _STORE = "pack", "store"
_LOCK, _JOB = "lock", "job.json"
_SHARD = r"shard-\d{5,}\.h5"
_OURS = re.compile(
    rf"{_LOCK}|{_JOB}|scratch/.*"
    rf"|(?:(?:built|repaired|kept-\d+)-[0-9a-f]{{16}}|{REPLACED_NAME})/"
    rf"(?:{_SHARD}|part-\d{{5,}}\.json|{re.escape(MANIFEST_NAME)}|{re.escape(REFUSED_NAME)}|{re.escape(PAGE_NAME)}|{re.escape(MARK_NAME)})?"
)


def _is_work(name: str) -> bool:
    """Whether an entry of a work folder is one that stoker makes there."""
    return _OURS.fullmatch(name) is not None or ownership.is_temporary(name.rpartition("/")[2])


# -- before any work -------------------------------------------------------------------------------


def check_target(out: Path, inputs: Sequence[Path]) -> Path:
    """Return the real folder that a store is packed into, or refuse it before any work.

    A link to a folder is followed, and stays a link. `inputs` are read by the pack.
    """
    if (url := as_url(out)) is not None:
        raise InputError(
            f"OUT is {shown(url)}, and stores are packed onto a disk.",
            "a folder of this machine, or of a disk that it mounts",
            "pack into a folder, copy it to the server, and read it there by its URL (docs/remote.md)",
        )
    for path in (out, *inputs):
        require_utf8(path)  # the manifest names them
    ownership.check_home(out)
    if out.is_symlink() and not out.exists():
        raise InputError(
            f"{out} is a link to {out.readlink()}, which does not exist.",
            "a new folder name, or a link to a folder",
            command("mkdir", "-p", out.resolve()),
        )
    target = out.resolve()
    if target.exists() and not target.is_dir():
        raise InputError(
            f"{out} is a file.", "a new folder name, or an existing store", "choose another OUT"
        )
    if target.exists() and ownership.is_mount_point(target):
        raise InputError(
            f"{out} is a mount point, which cannot be replaced by another folder.",
            "a folder on that disk",
            f"OUT {quoted(out / 'store')}",
        )
    for given in inputs:
        _check_apart(out, target, given)
    recover_interrupted(target)
    if target.is_dir() and any(target.iterdir()):
        _store_files(out, target)
    return target


def _check_apart(out: Path, target: Path, given: Path) -> None:
    """Refuse an OUT that is an input, lies in one, or holds one."""
    source = Path(os.path.realpath(given))  # `resolve` raises for links in a circle
    places = (target, work_folder_of(target))
    if any(place == source or source in place.parents for place in places):
        where = "is" if target == source else "lies in"
        raise InputError(
            f"OUT {out} {where} {given}, which is read.",
            "a folder outside of what is packed",
            f"OUT {quoted(source.parent / (target.name + '-store'))}",
        )
    if any(place in source.parents for place in places):
        raise InputError(
            f"OUT {out} holds {given}, which is read: the pack would replace it.",
            "a folder that holds none of the inputs",
            f"OUT {quoted(target.parent / (target.name + '-2'))}",
        )


def _store_files(out: Path, target: Path) -> tuple[str, ...]:
    """Return the names of the files of the store in `target`, by its mark or its sealed manifest.

    Raises:
        InputError: It is not a store of ours.
    """
    mark = read_mark(target, _STORE)
    try:
        manifest = read_manifest(target)
    except StoreError:
        manifest = None
    if mark is None and manifest is not None and os.path.lexists(target / MARK_NAME):
        # A file of that name, and no mark.
        raise refused(out, "a pack replaces the whole folder", [MARK_NAME])
    if manifest is not None and (mark is None or mark.id == manifest.checksum):
        # A store without a mark is an older version's, or was copied without hidden files: `_foreign_by_content`.
        return _names(manifest)
    if mark is not None and manifest is None:  # damaged, but its mark names the files
        return mark.files
    raise InputError(
        f"{out} is a folder with other things in it.",
        "a new folder name, or an existing store",
        "choose another OUT",
    )


def _names(manifest: Manifest) -> tuple[str, ...]:
    return (*(shard.file for shard in manifest.shards), MANIFEST_NAME, REFUSED_NAME, PAGE_NAME)


def check_replaceable(out: Path, target: Path) -> None:
    """Refuse to replace a store that holds anything which stoker did not write."""
    if not target.is_dir() or not any(target.iterdir()):
        return
    names = set(_store_files(out, target))
    if foreign := ownership.foreign_entries(
        target, lambda name: name in names or ownership.is_temporary(name)
    ):
        raise refused(out, "a pack replaces the whole folder", foreign)
    if changed := list(_foreign_by_content(target)):
        why = "the name is stoker's, the content is not, and a pack replaces the whole folder"
        raise refused(out, why, changed)


def _foreign_by_content(target: Path) -> Iterator[str]:
    """Yield the files that have names of the store's files, but content that stoker did not write.

    The mark covers the files that the store was made with, damaged or not. It does not cover the page, which is drawn
    later or never. Without a mark only the manifest is sealed, and may have been copied to a user's own files.
    """
    if not _passes(target / PAGE_NAME, ownership.has_signature):
        yield PAGE_NAME
    if read_mark(target, _STORE) is not None:
        return
    if not _passes(target / REFUSED_NAME, _lists_refusals):
        yield REFUSED_NAME
    with assemble_store(target, read_manifest(target)) as store:
        for shard in store.shards:
            # Opening it compares size and checksums with the manifest; the data is not read.
            if not _passes(shard.path, partial(_opens, shard)):
                yield shard.path.name
            shard.close()


def _opens(shard: Shard, path: Path) -> bool:
    return shard.path == path and shard.arrays is not None


def _passes(path: Path, is_ours: IsOurs) -> bool:
    """Whether the path does not exist, or is a readable file of ours."""
    try:
        return not os.path.lexists(path) or (path.is_file() and is_ours(path))
    except OSError:  # a StoreError is one
        return False


def _lists_refusals(path: Path) -> bool:
    with path.open("rb") as file:
        first = file.readline(LINE.most)
    try:
        return not first or {"file", "line", "reason"} <= parse_json(first).keys()
    except (ValueError, AttributeError):
        return False


def work_folder_of(target: Path) -> Path:
    """Return where the store `target` is made."""
    return target.with_name(target.name + WORK_SUFFIX)


def recover_interrupted(target: Path) -> None:
    """Put the newest whole store in place after a commit in two steps that was killed between them."""
    folder = work_folder_of(target)
    replaced = folder / REPLACED_NAME
    if target.exists() or not replaced.is_dir() or read_mark(folder, _PACK) is None:
        return
    lock = _take_lock(folder, target)
    try:
        stages = [path for path in folder.iterdir() if _is_whole_store(path)]
        newest = next((stage for stage in stages if stage != replaced), replaced)
        if not target.exists() and newest.is_dir():
            ownership.move_folder(newest, target)
            ownership.fsync(target.parent)
    finally:
        os.close(lock)


def remove_leftovers(target: Path) -> None:
    """Remove the work folder of a pack that was killed after its commit.

    A folder that another packer uses stays, and so do entries that are not ours.
    """
    folder = work_folder_of(target)
    mark = read_mark(folder, _PACK)
    if mark is None or folder.is_symlink():
        return
    with contextlib.suppress(StoreError, OSError):
        lock = _take_lock(folder, target)
        try:
            ownership.remove_folder(folder, mark, _is_work)
        finally:
            os.close(lock)


def _is_whole_store(folder: Path) -> bool:
    mark = read_mark(folder, _STORE)
    try:
        return mark is not None and read_manifest(folder).checksum == mark.id
    except StoreError:
        return False


def _take_lock(folder: Path, target: Path) -> int:
    lock = ownership.open_own_file(
        folder / _LOCK, os.O_RDWR, lambda _: True, "the lock of the pack"
    )
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(lock).st_nlink == 0:  # its packer has just finished, and removed it
            raise BlockingIOError
    except BlockingIOError:
        os.close(lock)
        raise StoreError(
            f"another process is packing {target} right now.",
            "one packer per store",
            "wait, or choose another OUT",
        ) from None
    return lock


# -- at work ---------------------------------------------------------------------------------------


class WorkFolder:
    """A context manager around one pack job."""

    def __init__(self, target: Path, provenance: Provenance, say: Callable[[str], None]) -> None:
        self.target = target  # as `check_target` returned it
        self.folder = work_folder_of(target)
        self._provenance = provenance  # of the store to be made
        # digest of the provenance; every part carries it
        self.job: str = xxhash.xxh3_64_hexdigest(provenance.model_dump_json().encode())
        # called with messages: leftovers that were removed, and entries that stay because they are not ours
        self._say = say
        self._lock = -1

    scratch = property(lambda self: self._made("scratch"), doc="The source's own files.")

    def stage(self, name: str) -> Path:
        """Return the folder of one stage's shards."""
        return self._made(f"{name}-{self.job}")

    def _made(self, name: str) -> Path:
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        return folder

    def __enter__(self) -> Self:
        try:
            self._mark = ownership.claim_folder(
                self.folder, _PACK, f"the unfinished parts of {self.target}"
            )
            self._lock = _take_lock(self.folder, self.target)
        except OSError as error:
            raise unwritable(self.folder, error) from error
        try:
            if foreign := ownership.foreign_entries(self.folder, _is_work):
                raise refused(self.folder, "it is removed when the pack is done", foreign)
            reason = self._difference_to_leftovers()
            keep = ["scratch/", f"built-{self.job}/"] if reason == "" else []
            if reason:
                self._say(f"dropped the leftovers of an earlier pack: {reason}")
            self._clear(keep=[*keep, _LOCK, _JOB])
            if keep and (built := self.folder / keep[1]).is_dir():
                ownership.remove_temporaries(built)
            if reason != "":
                write_text(self.folder / _JOB, self._provenance.model_dump_json(), always)
        except BaseException:
            os.close(self._lock)
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is not None and is_full_disk(error):
                # The next try makes the other files again; until then they would fill the disk.
                self._clear(keep=[f"built-{self.job}/", _LOCK, _JOB])
        finally:
            os.close(self._lock)

    def _difference_to_leftovers(self) -> str | None:
        """Return how the job that left files here differs; "" if it does not, None if there is no such job."""
        try:
            old = Provenance.model_validate_json((self.folder / _JOB).read_text())
        except FileNotFoundError:
            return None
        except (ValueError, OSError):
            return "its job file cannot be read"
        return difference(old, self._provenance)

    def _clear(self, keep: Sequence[str] = ()) -> list[str]:
        return ownership.remove_folder(self.folder, self._mark, _is_work, keep)

    def commit(self, stage: Path, manifest: Manifest, refusals: str) -> None:
        """Put the finished stage in the target's place, the manifest last; see the top of this file.

        The stage has the shards that the manifest names; `refusals` is the text of `refused.jsonl`.
        """
        wanted = {shard.file for shard in manifest.shards}
        for child in stage.iterdir():
            if child.name not in wanted:
                ownership.remove_file(child, always)
        write_text(stage / REFUSED_NAME, refusals, always)
        ownership.write_mark(stage, Mark(_STORE, manifest.checksum, _names(manifest)))
        write_text(stage / MANIFEST_NAME, manifest.to_text(), always)
        check_replaceable(self.target, self.target)
        replace_store(stage, self.target, self.folder / REPLACED_NAME)
        left = self._clear()
        if left:
            self._say(
                f"left in {self.folder}, since stoker did not write it: {', '.join(map(repr, left))}"
            )


def replace_store(stage: Path, target: Path, replaced: Path) -> None:
    """Put the whole store `stage` in the place of `target`, which may be absent, empty or a store."""
    if not target.exists() or not any(target.iterdir()):
        ownership.move_folder(stage, target)
    elif not ownership.exchange(stage, target):
        ownership.move_folder(target, replaced)
        ownership.move_folder(stage, target)
    ownership.fsync(target.parent)
