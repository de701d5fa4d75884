"""The exceptions that users see.

Enters: what was given, what is allowed, what to do next. Leaves: one message with these
three parts. Costs nothing.

Each part is one line without control characters and without secrets, whatever name or library's
message was put into it (`stoker.display`).

Every error also inherits the builtin that fits, so `except ValueError` keeps working, and
carries the exit code that the command line ends with.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from stoker.address import as_url, shown
from stoker.display import command, look_for, printable, quoted, secret_hint
from stoker.strict_json import parse_json

EXIT_DONE = 0
EXIT_OURS = 1
EXIT_INPUT = 2
EXIT_REFUSED = 3
EXIT_INTERRUPTED = 130


class StokerError(Exception):
    """Base of everything stoker raises on purpose.

    Args:
        given: What was found, with file, key, row or offset.
        allowed: What would have been right; may be empty.
        fix: What to type or change next; may be empty.
        details: Lines that belong to `given`, shown below it.
    """

    exit_code = EXIT_INPUT

    def __init__(
        self, given: str, allowed: str = "", fix: str = "", details: Sequence[str] = ()
    ) -> None:
        self.given = printable(given)
        self.allowed = printable(allowed)
        self.fix = printable(fix)
        self.details = tuple(map(printable, details))
        parts = [self.given, *(f"  {line}" for line in self.details)]
        parts += [f"Allowed: {self.allowed}"] if allowed else []
        parts += [f"Try: {self.fix} {secret_hint(self.fix)}".rstrip()] if fix else []
        super().__init__("\n".join(parts))

    def __reduce__(self) -> tuple[object, ...]:
        """Rebuild from the parts, so that the error survives a worker process."""
        return type(self), (self.given, self.allowed, self.fix, self.details)


class InputError(StokerError, ValueError):
    """An argument, option or file content that cannot be used."""


class ArgumentError(InputError, TypeError):
    """An argument of a public function or class that is unknown, missing, or of another type."""


class ConfigError(InputError):
    """A config file with an unknown key, a wrong type or a clash."""


class FieldNameError(InputError, KeyError):
    """A field that a batch does not have."""

    def __str__(self) -> str:
        """Return the message; `KeyError` would print it as one quoted line."""
        return str(self.args[0])


class DoesNotFitError(InputError):
    """No plan fits into the memory that was given; smaller batches or more memory for data would."""


class SourceError(InputError):
    """A raw file that cannot be read as what it was said to be."""


class StoreError(StokerError, OSError):
    """A store that is missing, incomplete, or not a store."""

    def __str__(self) -> str:
        """Return the message; `OSError` would print its arguments as a tuple."""
        return str(self.args[0])


class FileError(StoreError):
    """A file or folder that the system does not let stoker read or write: a full disk, no permission."""


class StoreVersionError(StoreError):
    """A store written by another format version than this code reads."""


class CorruptError(StoreError):
    """Stored bytes that are not the bytes that were written."""


class QualityError(StokerError, ValueError):
    """Data refused by the quality gate."""

    exit_code = EXIT_REFUSED


class OtherRankError(StokerError):
    """An error that another process of the run has reported; this process ends with its exit code, silently."""


class MissingExtraError(StokerError, ImportError):
    """A feature whose optional packages are not installed."""

    @classmethod
    def for_package(cls, package: str, extra: str, purpose: str) -> MissingExtraError:
        """Return an error that names the extra with `package`, and what needs it."""
        return cls(
            f"{purpose} needs the package {package!r}, which is not installed.",
            f"any install with the extra {extra!r}",
            install_command(extra),
        )


# -- errors of the system and of the installation --------------------------------------------------

_EXTRAS = {
    "PIL": ("pillow", "vision"),
    "rdkit": ("rdkit", "chem"),
    "torch_geometric": ("torch-geometric", "chem"),
    "torchao": ("torchao", "quant"),
    "distributed": ("distributed", "cluster"),
    "dask": ("dask", "cluster"),
    "fsspec": ("fsspec", "remote"),
    "aiohttp": ("aiohttp", "remote"),
    "matplotlib": ("matplotlib", "plots"),
    "numcodecs": ("numcodecs", "zarr"),
    "onnx": ("onnx", "onnx"),
    "onnx_ir": ("onnx-ir", "onnx"),
    "onnxruntime": ("onnxruntime", "onnx"),
    "onnxscript": ("onnxscript", "onnx"),
    "safetensors": ("safetensors", "safetensors"),
    "lightning": ("lightning", "lightning"),
    "accelerate": ("accelerate", "accelerate"),
    "transformers": ("transformers", "huggingface"),
    "torchdata": ("torchdata", "torchdata"),
}
"""Modules of optional packages: the package's name, and the extra of pyproject.toml that installs it."""


_NEEDED = frozenset(
    ("cloudpickle", "h5py", "numpy", "psutil", "pyarrow", "pydantic", "rich", "torch", "typer", "xxhash", "yaml")
)  # fmt: skip


def install_command(extra: str = "") -> str:
    """Return the command that installs stoker with an extra, from where it was installed: a checkout, or a wheel."""
    behind = f"[{extra}]" if extra else ""
    root = Path(__file__).resolve().parents[2]
    if not (root / "pyproject.toml").is_file() or root / "src" not in Path(__file__).parents:
        origin = _installed_from()
        return command("pip", "install", f"stoker{behind}" + (f" @ {origin}" if origin else ""))
    try:
        place = "." if Path.cwd() == root else str(root)
    except OSError:  # the working folder is gone
        place = str(root)
    return command("pip", "install", "-e", f"{place}{behind}")


def _installed_from() -> str:
    """Return the URL of the folder, wheel or repository that pip installed stoker from; "" for an index."""
    from importlib import metadata  # 15 ms

    try:
        told = parse_json(metadata.distribution("stoker").read_text("direct_url.json") or "{}")
        return shown(f"git+{told['url']}" if "vcs_info" in told else told["url"])
    except (ImportError, OSError, ValueError, KeyError, TypeError):
        return ""


def missing_package(error: ImportError) -> MissingExtraError | None:
    """Return the error for a package that is not installed; None where `error` is something else."""
    module = (error.name or "").partition(".")[0]
    if not module or module == "stoker" or not isinstance(error, ModuleNotFoundError):
        return None
    package, extra = _EXTRAS.get(module, (module, ""))
    if extra:
        return MissingExtraError.for_package(package, extra, "this command")
    ours = module in _NEEDED
    return MissingExtraError(
        f"the package {package!r} is not installed.",
        "an environment with the packages that stoker needs" if ours else "an installed package",
        install_command() if ours else command("pip", "install", package),
    )


_DISK = "a disk with free space and free inodes, within its quota"
_ALLOWED = {
    errno.ENOSPC: _DISK,
    errno.EDQUOT: _DISK,
    errno.EFBIG: "a file within the size that the disk and `ulimit -f` allow",
    errno.EROFS: "a disk that can be written",
    errno.EACCES: "a place that you have permission for",
    errno.EPERM: "a place that you have permission for",
    errno.ENOENT: "a file or folder that exists",
    errno.ENOTDIR: "a path whose folders are folders",
    errno.EISDIR: "the name of a file",
    errno.EEXIST: "a name that is free",
    errno.ENOTEMPTY: "an empty folder",
    errno.ELOOP: "a path without a circle of links",
    errno.ENAMETOOLONG: "names of at most 255 bytes",
    errno.EILSEQ: "a name that the disk can hold",
    errno.EBUSY: "a place that nobody else uses",
    errno.ETXTBSY: "a place that nobody else uses",
    errno.EXDEV: "a place on one disk",
    errno.EIO: "a disk without faults",
    errno.ENXIO: "a disk that answers",
    errno.ENODEV: "a disk that answers",
    errno.ESTALE: "a disk that answers",
    errno.EREMOTEIO: "a disk that answers",
    errno.ENOMEM: "enough free memory",
    errno.EAGAIN: "enough processes and threads for this user",
    errno.EMFILE: "enough open files for this process",
    errno.ENFILE: "enough open files on this machine",
}
"""Error codes that are about the machine, not about stoker -> what would have been right."""
_COMMANDS = {
    errno.EFBIG: "ulimit -f unlimited",
    errno.EIO: "sudo dmesg | tail",
    errno.ENOMEM: "free -h",
    errno.EAGAIN: "ulimit -u unlimited",
    errno.EMFILE: "ulimit -n 4096",
    errno.ENFILE: "cat /proc/sys/fs/file-nr",
    errno.ENAMETOOLONG: "choose a shorter name",
}
# In errors of HDF5 and Rust only the text has the code.
_CODE = re.compile(r"errno = (\d+)|\[[Ee]rrno (\d+)\]|\(os error (\d+)\)")


def system_code(error: BaseException) -> int | None:
    """Return the errno of a system error, from its text if a library put it only there."""
    code = error.errno if isinstance(error, OSError) else None
    if code is None and (found := _CODE.search(str(error))):
        code = int(next(filter(None, found.groups())))
    return code


def is_full_disk(error: BaseException) -> bool:
    """Return whether an error, or one of its causes, is that of a full disk."""
    full = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return any(system_code(each) in full for each in with_causes(error))


def with_causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its chain of causes; each once, even if an error is its own cause."""
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        yield found
        found = found.__cause__


def reason(error: BaseException) -> str:
    """Return the system's text for an error: "No space left on device"."""
    code = system_code(error)
    return str(error) if code is None else os.strerror(code)


def file_error(error: BaseException, path: str | Path | None = None) -> FileError | None:
    """Return the error to show for a system error; None where its code says nothing about the machine.

    `path` was read or written; the message names it if the error does not.
    """
    code = system_code(error)
    if code not in _ALLOWED:
        return None
    named = getattr(error, "filename", None)
    named = path if named is None or isinstance(named, int) else named
    if code == errno.ENOENT and named in (None, "."):
        try:
            os.getcwd()  # noqa: PTH109  Path.cwd() is the same call
        except OSError:
            here = "the working folder of this shell was removed."
            return FileError(here, "a folder that exists", "cd ~")
    if named is None:
        return FileError(f"{reason(error)}.", _ALLOWED[code], _COMMANDS.get(code, "df -h; df -i"))
    place = Path(os.fsdecode(named))
    return FileError(f"{place}: {reason(error)}.", _ALLOWED[code], _what_to_type(code, place))


def unwritable(path: str | Path, error: BaseException, what: str = "") -> StokerError:
    """Return the error for a file (`what`: "the run log") that cannot be written, whatever the reason.

    An error of stoker's own is returned as it is.
    """
    if isinstance(error, StokerError):
        return error
    code = system_code(error) or errno.ENOSPC
    allowed = _ALLOWED.get(code, "a folder with room and write permission")
    given = f"cannot write {what} {path}".replace("  ", " ")
    named = getattr(error, "filename", None)
    if isinstance(named, str) and Path(path).parent not in Path(named).parents:
        given += f" ({named})"  # something else that the writing needs
    return FileError(f"{given}: {reason(error)}.", allowed, _what_to_type(code, Path(path)))


def _what_to_type(code: int, place: Path) -> str:
    if code in _COMMANDS:
        return _COMMANDS[code]
    folder = place.parent.absolute()
    while not os.path.lexists(folder) and folder != folder.parent:
        folder = folder.parent
    if code not in (errno.ENOSPC, errno.EDQUOT):
        return command("ls", "-ld", folder)
    is_temporary = False
    look = f"{command('df', '-h', folder)}; {command('df', '-i', folder)}"
    with contextlib.suppress(OSError, ValueError, IndexError):  # not there, or there is none
        inside = place.relative_to(tempfile.gettempdir()).parts
        is_temporary = inside[0].startswith("stoker-")
    if is_temporary:
        look += f", or TMPDIR={quoted('FOLDER')} before the command, with a folder of a larger disk"
    return look


def require_utf8(path: str | Path) -> None:
    """Refuse a path with bytes that are not UTF-8, where a library or a file format cannot hold it."""
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise _not_utf8(str(path)) from error


def _not_utf8(name: str) -> InputError:
    return InputError(
        f"the name {name} holds bytes that are not UTF-8, and a library that stoker uses cannot take it.",
        "names in UTF-8",
        command("mv", name, "NAME") if os.path.lexists(name) else "give it another name",
    )


def unusable_name(error: ValueError) -> InputError | None:
    """Return the error for a path with bytes that are not UTF-8, or with NUL; None for other errors."""
    if isinstance(error, UnicodeEncodeError) and re.search("[\ud800-\udfff]", str(error.object)):
        return _not_utf8(str(error.object))
    if str(error).startswith("embedded null"):
        return InputError(
            "a path or name that was given holds a NUL character.",
            "names without control characters",
            "look for \\0 in the config and in the names of fields and columns",
        )
    return None


@dataclass(frozen=True)
class Refusal:
    """One piece of input that was not taken, and why. Nothing is lost without one of these.

    Attributes:
        file: The file it stands in, as the user named it.
        line: 1-based line, or 0-based row with `unit="row"`; None when it is the whole file.
        reason: In words a user understands.
        unit: What `line` counts: "line", "row" or "record".
        count: How many pieces it stands for; above 1 where a listing was cut short.
        kind: Class of reasons that the pack counts it under ("cannot be decoded"); the reason itself when empty.
        is_asked: The user asked for such pieces to be left out: they count as ignored, not against the budget.
        fix: What to type so that it is taken; may be empty.
    """

    file: str
    line: int | None
    reason: str
    unit: str = "line"
    count: int = 1
    kind: str = ""
    is_asked: bool = False
    fix: str = ""

    def __str__(self) -> str:
        """Format as `file:line: reason`, the way editors and compilers do."""
        if self.line is None:
            return f"{self.file}: {self.reason}"
        where = f"{self.file}:{self.line}" if self.unit == "line" else ""
        return f"{where or f'{self.file} {self.unit} {self.line}'}: {self.reason}"


class RefusalList(list[Refusal]):
    """Refusals of one input: the first `MOST` are listed, all are counted.

    A file of noise would fill the memory with its refusals. Those above `MOST` are counted in the last entry.
    """

    MOST = 100_000

    def append(self, refusal: Refusal) -> None:
        """List the refusal, or count it in the last entry."""
        if len(self) < self.MOST:
            super().append(refusal)
            return
        more = refusal.count + (self[-1].count if len(self) > self.MOST else 0)
        del self[self.MOST :]
        reason = f"{more:,} more pieces of input are refused, and not listed one by one"
        super().append(
            Refusal(refusal.file, None, reason, count=more, kind="not listed one by one")
        )

    def extend(self, refusals: Iterable[Refusal]) -> None:
        """Append each."""
        for refusal in refusals:
            self.append(refusal)


def count_refused(refusals: Iterable[Refusal]) -> int:
    """Return the number of refused pieces of input, listed or not, without those that the user asked to leave out."""
    return sum(refusal.count for refusal in refusals if not refusal.is_asked)


def count_kinds(refusals: Iterable[Refusal], *, is_asked: bool = False) -> dict[str, int]:
    """Return the number of refused pieces by kind of reason; with `is_asked`, of those left out on request."""
    kinds: dict[str, int] = {}
    for refusal in refusals:
        if refusal.is_asked != is_asked:
            continue
        kind = refusal.kind or refusal.reason
        kinds[kind] = kinds.get(kind, 0) + refusal.count
    return kinds


def require_file(path: str | Path, what: str) -> Path:
    """Return `path` as a Path, or raise with what was expected there."""
    if as_url(path) is not None:
        raise SourceError(
            f"{what} {shown(path)!r} is a URL.", "a file on this machine", "download it first"
        )
    path = Path(path)
    if not path.exists():
        raise SourceError(
            f"{what} {str(path)!r} does not exist.", "a readable file", look_for(path)
        )
    if path.is_dir():
        raise SourceError(
            f"{what} {str(path)!r} is a folder.", "a readable file", command("ls", path)
        )
    refuse_special(path, what)
    return path


_SPECIAL = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def special_kind(path: str | Path) -> str | None:
    """Return "a named pipe", "a socket" or "a device" for such a path; None for files, folders and missing paths.

    Opening one of them may block forever, until somebody writes into it.
    """
    try:
        return _SPECIAL.get(stat.S_IFMT(os.stat(path).st_mode))  # noqa: PTH116  of a str, too
    except (OSError, ValueError):
        return None


def refuse_special(
    path: str | Path,
    what: str,
    error: type[StokerError] = SourceError,
    *,
    is_read_once: bool = False,
) -> None:
    """Raise where `path` is a named pipe, a socket or a device: inputs are read more than once, and by threads.

    `is_read_once` accepts /dev/stdin and the pipe that a shell makes of `<(command)`: they have a writer.
    """
    kind = special_kind(path)
    if kind is None or (is_read_once and str(Path(path).parent) in ("/dev", "/dev/fd")):
        return
    raise error(f"{what} {str(path)!r} is {kind}.", "a regular file", command("ls", "-l", path))
