"""Finds out what stoker wrote; the only code that deletes, empties, truncates or replaces anything.

Enters: paths. Leaves: the change, or a refusal that names the obstacle. Costs: a read of the entries concerned.

Three proofs that something is ours, each written by stoker:
- a folder holds the file `.stoker` (`Mark`): its kind, its id, and the names of the files that go with it;
- a file under a name that the user chose holds `SIGNATURE` in its first or last bytes;
- a file that stoker alone writes (a checkpoint, a run log, a lock) has the content that stoker writes there.

Anything without a proof is refused, never changed. Links are not followed: a link is removed as a link, and
an output through a link is written where the link leads, under the same rules. Other file systems mounted
below a folder are not entered.

Every new file is written under a temporary name beside its target and renamed when it is whole
(`writing`); a process that is killed meanwhile leaves the target as it was.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import itertools
import os
import re
import secrets
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from stoker import lifetime
from stoker.display import first_names, quoted
from stoker.errors import InputError, StokerError, file_error
from stoker.strict_json import json_text, parse_json

MARK_NAME = ".stoker"
SIGNATURE = "made-by-stoker"
"""Text in every file that stoker writes under a name which the user chose."""
_SIGNED_BYTES = 1 << 18
_MARK_BYTES = 16 << 20
_TEMPORARY = "temporary"
_LISTED = 3

IsOurs = Callable[[Path], bool]


# -- marks of folders ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mark:
    """Content of the file `.stoker` in a folder."""

    kind: str  # "store", "pack", "cache", "run", "demo", "temporary"
    id: str  # random; only the folder and what belongs to it (its manifest, its index) hold it
    files: tuple[str, ...] = ()  # names of its files; empty where the kind decides


def read_mark(folder: Path, kind: str) -> Mark | None:
    """Return the mark of a folder; None where it has no mark of this kind."""
    found = read_own_json(folder / MARK_NAME, _MARK_BYTES)
    try:
        mark = Mark(str(found["kind"]), str(found["id"]), tuple(map(str, found.get("files", ()))))
    except (KeyError, TypeError):
        return None
    return mark if mark.kind == kind else None


def read_own_json(path: Path, most_bytes: int) -> dict[str, Any]:
    """Return the JSON object in a small file of ours; {} where it is missing, a link, or no JSON object."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            found = parse_json(file.read(most_bytes))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def write_mark(folder: Path, mark: Mark) -> Mark:
    """Mark a folder as ours; one that has a mark of another kind is refused.

    The caller has made the folder, or found it empty, or knows what in it is ours.
    """
    path = folder / MARK_NAME
    text = json_text({SIGNATURE: True, "kind": mark.kind, "id": mark.id, "files": mark.files})
    with writing(path, lambda _: read_mark(folder, mark.kind) is not None) as temporary:
        write_new(temporary, text + "\n")
    return mark


def mark_once(folder: Path, kind: str) -> Mark:
    """Return the mark of a folder; a folder without one gets it from the first of several processes.

    If a second process replaced the mark, files named by the first id would no longer be ours.
    """
    if (mark := read_mark(folder, kind)) is not None:
        return mark
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # a disk without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        return read_mark(folder, kind) or write_mark(folder, Mark(kind, secrets.token_hex(16)))
    finally:
        os.close(descriptor)


def claim_folder(folder: Path, kind: str, what: str) -> Mark:
    """Make and mark a folder and its parents, or take one that has our mark or is empty; messages name `what`.

    Raises:
        InputError: It is a link, a file, or a folder with other things in it.
    """
    check_home(folder)
    was_there = os.path.lexists(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if folder.is_symlink() or not folder.is_dir():
        raise refused(folder, f"{what} has to be a folder of its own")
    if (mark := read_mark(folder, kind)) is not None:
        return mark
    names = (path.name for path in folder.iterdir())
    ours = f".{MARK_NAME}."  # a mark that another process is about to write
    others = [name for name in names if not (is_temporary(name) and name.startswith(ours))]
    if others:
        raise refused(folder, f"stoker needs this name for {what}", others)
    try:
        return mark_once(folder, kind)
    except OSError:
        if not was_there:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise


def refused(path: Path, why: str, others: Collection[str] = ()) -> InputError:
    """Return the error for a path that stoker did not write."""
    if others:
        shown = first_names([repr(name) for name in sorted(others)], _LISTED)
        given = f"{path} holds {shown}, which stoker did not write; {why}."
    else:
        given = f"{path} was not made by stoker; {why}."
    return InputError(
        given,
        "stoker deletes and replaces only what it wrote",
        "move it away, or choose another name",
    )


# -- removing --------------------------------------------------------------------------------------


def foreign_entries(folder: Path, is_ours: Callable[[str], bool]) -> list[str]:
    """Return the entries below a real folder that are not ours, by their paths in it.

    `is_ours` gets such a path: "built/" or "built/shard-00000.h5". A folder that is not ours is not entered.
    """
    return _sweep(folder, "", is_ours, folder.stat().st_dev, remove=False)


def remove_folder(
    folder: Path, mark: Mark, is_ours: Callable[[str], bool], keep: Collection[str] = ()
) -> list[str]:
    """Remove a marked folder; entries that are not ours stay, and with them the folder and its mark.

    The folder must be no link, and still have `mark`. Entries of `keep` stay too. Returns the entries that were left
    because they are not ours.
    """
    if folder.is_symlink() or read_mark(folder, mark.kind) != mark:
        raise refused(folder, "its mark is gone")

    def may_go(name: str) -> bool:
        return name not in keep and is_ours(name)

    left = _sweep(folder, "", may_go, folder.stat().st_dev, remove=True)
    if not left:
        # The mark is removed last, so that after a kill the rest is still known as ours.
        (folder / MARK_NAME).unlink(missing_ok=True)
        folder.rmdir()
    return [name for name in left if name not in keep]


def _sweep(
    here: Path, inside: str, is_ours: Callable[[str], bool], device: int, *, remove: bool
) -> list[str]:
    """Return the entries below `here` that are not ours; with `remove`, remove all others."""
    left: list[str] = []
    with os.scandir(here) as found:
        entries = sorted(found, key=lambda entry: entry.name)
    for entry in entries:
        path = Path(entry.path)
        is_folder = entry.is_dir(follow_symlinks=False)
        name = f"{inside}{entry.name}{'/' if is_folder else ''}"
        if name == MARK_NAME:
            continue
        if not is_ours(name):
            left.append(name)
        elif not is_folder:
            if remove:
                path.unlink(missing_ok=True)
        elif entry.stat(follow_symlinks=False).st_dev != device or is_mount_point(path):
            left.append(name)
        else:
            below = _sweep(path, name, is_ours, device, remove=remove)
            left += below
            if remove and not below:
                path.rmdir()
    return left


def remove_file(path: Path, is_ours: IsOurs) -> bool:
    """Remove a file that is ours; return whether it is gone. A link is removed as a link."""
    try:
        mode = path.lstat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)) or not is_ours(path):
            return False
        path.unlink()
    except FileNotFoundError:
        return True
    return True


def remove_empty_folder(folder: Path) -> None:
    """Remove an empty folder; raise OSError if it is not empty."""
    folder.rmdir()


def empty_file(descriptor: int, size: int = 0) -> None:
    """Cut an open file that is ours to `size` bytes."""
    os.ftruncate(descriptor, size)


def open_own_file(path: Path, flags: int, is_ours: Callable[[int], bool], what: str) -> int:
    """Open a file that stoker alone writes, such as a lock; make it where it is missing, and refuse a link.

    `flags` are as for `os.open`, without O_TRUNC. `is_ours` gets the descriptor of a file that is not empty, and says
    whether stoker wrote it. `what` names it in messages ("the lock of the run").
    """
    extra = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_CREAT | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags | extra, 0o644)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise refused(path, f"stoker needs this name for {what}") from error
        raise
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or (found.st_size and not is_ours(descriptor)):
        os.close(descriptor)
        raise refused(path, f"stoker needs this name for {what}")
    return descriptor


# -- writing ---------------------------------------------------------------------------------------


def has_signature(path: Path) -> bool:
    """Return whether the first or last 256 KiB of a file hold `SIGNATURE`."""
    with path.open("rb") as file:
        head = file.read(_SIGNED_BYTES)
        file.seek(max(0, file.seek(0, os.SEEK_END) - _SIGNED_BYTES))
        return SIGNATURE.encode() in head + file.read(_SIGNED_BYTES)


def free_name(path: Path) -> Path:
    """Return a free name beside `path`: `page-2.html` for `page.html`."""
    numbered = (path.with_name(f"{path.stem}-{n}{path.suffix}") for n in itertools.count(2))
    return next(name for name in numbered if not os.path.lexists(name))


def check_home(path: str | Path) -> None:
    """Refuse "~/runs" where no shell replaced it, as in YAML, Python and `--run-dir=~/runs`.

    A folder called `~` would be made in the current one, and `rm -r ~` removes another. One that exists is taken.
    """
    first, meant = Path(path).parts[:1], Path(os.path.expanduser(path))  # noqa: PTH111
    if first and meant != Path(path) and not os.path.lexists(first[0]):
        raise InputError(
            f"{path} names a folder {first[0]} in this one: only a shell replaces it by a home folder.",
            "a path that is written in full",
            quoted(meant),
        )


def check_output(
    path: str | Path, inputs: Iterable[str | Path] = (), is_ours: IsOurs = has_signature
) -> Path:
    """Return the real path of a file that is about to be written, or refuse it before any work. A link is followed.

    Raises:
        InputError: It is one of the inputs, a folder, a device, or a file that is not ours.
    """
    path = Path(path)
    check_home(path)
    for given in inputs:
        with contextlib.suppress(OSError):
            if path.samefile(given):
                raise InputError(
                    f"{path} is read by this command, and would be replaced by what it writes.",
                    "an output that is no input",
                    quoted(free_name(path)),
                )
    target = path.resolve() if path.is_symlink() else path
    try:
        mode = target.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return target
    if stat.S_ISDIR(mode):
        raise InputError(
            f"{path} is a folder.", "the name of a file", quoted(path / f"NAME{path.suffix}")
        )
    if not stat.S_ISREG(mode):
        raise InputError(
            f"{path} is not a plain file.",
            "the name of a file",
            quoted(path.with_stem(f"{path.stem}-2")),
        )
    if not is_ours(target):
        raise InputError(
            f"{path} exists, and stoker did not write it.",
            "a new name, or a file that stoker wrote before",
            f"{quoted(free_name(path))}, or move the file away",
        )
    return target


@contextlib.contextmanager
def writing(path: str | Path, is_ours: IsOurs = has_signature) -> Iterator[Path]:
    """Yield the name of a temporary file beside `path`; if the block succeeds, it becomes `path`.

    Blocks until the bytes are on the disk. When the block fails, or the process is killed, `path` is as
    it was before. `check_output` refuses a `path` that may not be replaced.
    """
    target = check_output(path, is_ours=is_ours)
    with _temporary_beside(target) as temporary:
        try:
            yield temporary
            fsync(temporary)
            rename_over(temporary, target, is_ours)
        except StokerError:
            raise
        except OSError as error:
            # A failed write names no file, or the temporary one, which the user does not know.
            if error.filename in (None, str(temporary)):
                error.filename = str(path)
            raise
        except Exception as error:
            # Libraries in Rust have errors of their own for a full disk.
            known = file_error(error, path)
            if known is None:
                raise
            raise known from error


def rename_over(file: Path, target: Path, is_ours: IsOurs) -> None:
    """Rename a complete file of ours to `target`, replacing an older file that is ours."""
    check_output(target, is_ours=is_ours)  # another program may have made it meanwhile
    file.replace(target)
    fsync(target.parent)


def write_text(
    path: str | Path, text: str, is_ours: IsOurs = has_signature, *, private: bool = False
) -> None:
    """Make `path` from `text`, or leave it untouched; see `writing`. Only its owner may read a `private` one."""
    with writing(path, is_ours) as temporary:
        write_new(temporary, text, private=private)


def write_new(path: Path, text: str, *, private: bool = False) -> None:
    """Write a file that does not exist yet."""
    with path.open("x", encoding="utf-8", errors="surrogateescape", newline="") as file:
        if private:
            os.fchmod(file.fileno(), 0o600)
        file.write(text)


def always(path: Path) -> bool:  # noqa: ARG001
    """`is_ours` for files below a folder that is ours."""
    return True


def never(path: Path) -> bool:  # noqa: ARG001
    """`is_ours` for an output that replaces nothing."""
    return False


def is_temporary(name: str) -> bool:
    """Return whether a name has the form that `writing` uses: `.NAME.TOKEN.tmp`."""
    return re.fullmatch(r"\..*\.[0-9a-f]{8}\.tmp", name, re.DOTALL) is not None


def remove_temporaries(folder: Path, belongs: Callable[[str], bool] = lambda _: True) -> None:
    """Remove the files that killed writers left in `folder`; the caller knows that no writer is active.

    `belongs` gets the final name of the temporary file.
    """
    for path in folder.glob(".*.tmp"):
        if is_temporary(path.name) and belongs(path.name[1:].rsplit(".", 2)[0]):
            with contextlib.suppress(OSError):
                path.unlink()


@contextlib.contextmanager
def _temporary_beside(target: Path) -> Iterator[Path]:
    """Yield a free name beside `target`; a file that still has it afterwards is removed."""
    token = secrets.token_hex(4)
    name = target.name
    while len(os.fsencode(name)) > 200:  # a name may have 255 bytes
        name = name[:-1]
    temporary = target.with_name(f".{name}.{token}.tmp")
    # In a user's script no helper process is started for a file: what a kill leaves there, `is_temporary` recognises.
    lifetime.remember(temporary, token, start=lifetime.is_command)
    try:
        yield temporary
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        lifetime.forget(temporary)


def name_again(path: Path, name: Path, is_ours: IsOurs) -> bool:
    """Make `name` a second name of `path`: a hard link, or a relative link where the disk has none.

    Returns:
        Whether it was done; False where the disk has no links at all, or `name` is not ours.
    """
    if name.exists() and name.samefile(path):
        return True
    if os.path.lexists(name) and not is_ours(name):
        return False
    with _temporary_beside(name) as temporary:
        for link in (os.link, lambda old, new: new.symlink_to(old.name)):
            with contextlib.suppress(OSError):
                link(path, temporary)
                temporary.replace(name)
                return True
    return False


def fsync(path: Path) -> None:
    """Force a file's or folder's bytes to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems without it
            raise
    finally:
        os.close(descriptor)


# -- folders that change places --------------------------------------------------------------------

_AT_FDCWD = -100
_NOREPLACE, _EXCHANGE = 1, 2
_UNSUPPORTED = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}


def exchange(one: Path, other: Path) -> bool:
    """Exchange two folders in one step; return False where the kernel or the disk cannot."""
    return _renameat2(one, other, _EXCHANGE)


def move_folder(folder: Path, target: Path) -> None:
    """Rename a folder to a free name, or over an empty folder."""
    if not target.is_dir() and _renameat2(folder, target, _NOREPLACE):
        return
    folder.rename(target)  # over an empty folder; one that is not empty raises


def _renameat2(one: Path, other: Path, flags: int) -> bool:
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if sys.platform != "linux" or call is None:
        return False
    if call(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), flags) == 0:
        return True
    code = ctypes.get_errno()
    if code in _UNSUPPORTED:
        return False
    raise OSError(code, os.strerror(code), str(one), None, str(other))


def is_mount_point(path: Path) -> bool:
    """Whether another disk or folder is mounted at `path`; such a folder cannot be renamed."""
    if os.path.ismount(path):
        return True
    try:  # a folder bound to another place of the same disk
        lines = Path("/proc/self/mountinfo").read_bytes().splitlines()
    except OSError:
        return False
    places = {line.split()[4].decode("unicode_escape") for line in lines}
    return os.fsencode(path.resolve()).decode("latin-1") in places


# -- temporary folders -----------------------------------------------------------------------------


@contextlib.contextmanager
def temporary_folder(prefix: str = "stoker-") -> Iterator[Path]:
    """Yield a temporary folder that is removed afterwards, also when this process is killed."""
    mark = Mark(_TEMPORARY, secrets.token_hex(16))
    folder = Path(tempfile.gettempdir(), f"{prefix}{secrets.token_hex(6)}").absolute()
    lifetime.remember(folder, mark.id)
    folder.mkdir(mode=0o700)
    write_mark(folder, mark)
    try:
        yield folder
    finally:
        remove_leftover(str(folder), mark.id)
        lifetime.forget(folder)


@contextlib.contextmanager
def unnamed_file(folder: Path) -> Iterator[IO[bytes]]:
    """Yield a file in `folder`, without a name where the disk supports that; it is gone when it is closed."""
    with tempfile.TemporaryFile(dir=folder, prefix=".stoker-") as file:
        yield file


def remove_leftover(path: str, mark_id: str) -> None:
    """Remove a temporary folder or file whose mark or name has this id."""
    place = Path(path)
    mark = read_mark(place, _TEMPORARY)
    if mark is not None and mark.id == mark_id and not place.is_symlink():
        for note in place.glob("temporary-*"):
            _remove_multiprocessing_folder(note)
        shutil.rmtree(place, ignore_errors=True)
    elif place.is_dir() and not place.is_symlink() and not any(place.iterdir()):
        place.rmdir()  # killed before it was marked
    elif is_temporary(place.name) and place.name.endswith(f".{mark_id}.tmp"):
        place.unlink(missing_ok=True)


def _remove_multiprocessing_folder(note: Path) -> None:
    """Remove the folder of Python's multiprocessing whose path a killed process left in the file `note`.

    The note lies in a folder of ours, and only processes that we started write there. The folder stays if its name
    or owner is not that of a folder of multiprocessing, or if one of its sockets is still in use.
    """
    with contextlib.suppress(OSError, ValueError):
        folder = Path(os.fsdecode(note.read_bytes()))
        facts = folder.lstat()
        is_theirs = folder.name.startswith("pymp-") and stat.S_ISDIR(facts.st_mode)
        if not is_theirs or facts.st_uid != os.getuid():
            return
        if f"{folder}/".encode() in Path("/proc/net/unix").read_bytes():
            return
        if all(stat.S_ISSOCK(entry.lstat().st_mode) for entry in folder.iterdir()):
            shutil.rmtree(folder, ignore_errors=True)
