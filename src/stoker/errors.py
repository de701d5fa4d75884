"""The exceptions a user can meet.

Enters: what was given, what is allowed, what to do next. Leaves: one message with these
three parts. Costs nothing.

Each part is one line without control characters and without secrets, whatever name or library's
message was put into it (`stoker.display`).

Every error also inherits the builtin that fits, so `except ValueError` keeps working, and
carries the exit code that the command line ends with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stoker.address import as_url, shown
from stoker.display import command, look_in, printable, secret_hint

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


class ConfigError(InputError):
    """A config file with an unknown key, a wrong type or a clash."""


class SourceError(InputError):
    """A raw file that cannot be read as what it was said to be."""


class StoreError(StokerError, OSError):
    """A store that is missing, incomplete, or not a store."""

    def __str__(self) -> str:
        """Return the message; `OSError` would print its arguments as a tuple."""
        return str(self.args[0])


class StoreVersionError(StoreError):
    """A store written by another format version than this code reads."""


class CorruptError(StoreError):
    """Stored bytes that are not the bytes that were written."""


class QualityError(StokerError, ValueError):
    """Data refused by the quality gate."""

    exit_code = EXIT_REFUSED


class OtherRankError(StokerError):
    """An error that another process of the same run has told; this one ends with it, and silently."""


class MissingExtraError(StokerError, ImportError):
    """A feature whose optional packages are not installed."""

    @classmethod
    def for_package(cls, package: str, extra: str, purpose: str) -> MissingExtraError:
        """Say which extra brings `package`, and what it is needed for."""
        return cls(
            f"{purpose} needs the package {package!r}, which is not installed.",
            f"any install with the extra {extra!r}",
            f"pip install 'stoker[{extra}]'",
        )


@dataclass(frozen=True)
class Refusal:
    """One piece of input that was not taken, and why. Nothing is lost without one of these.

    Attributes:
        file: The file it stands in, as the user named it.
        line: 1-based line, or 0-based row with `unit="row"`; None when it is the whole file.
        reason: In words a user understands.
        unit: What `line` counts: "line", "row" or "record".
    """

    file: str
    line: int | None
    reason: str
    unit: str = "line"

    def __str__(self) -> str:
        """Format as `file:line: reason`, the way editors and compilers do."""
        if self.line is None:
            return f"{self.file}: {self.reason}"
        where = f"{self.file}:{self.line}" if self.unit == "line" else ""
        return f"{where or f'{self.file} {self.unit} {self.line}'}: {self.reason}"


def require_file(path: str | Path, what: str) -> Path:
    """Return `path` as a Path, or raise with what was expected there."""
    if as_url(path) is not None:
        raise SourceError(
            f"{what} {shown(path)!r} is a URL.", "a file on this machine", "download it first"
        )
    path = Path(path)
    if not path.exists():
        raise SourceError(
            f"{what} {str(path)!r} does not exist.", "a readable file", look_in(path.parent)
        )
    if path.is_dir():
        raise SourceError(
            f"{what} {str(path)!r} is a folder.", "a readable file", command("ls", path)
        )
    return path
