"""One row of the table: a file, the command, and what must come of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class GalleryCase:
    """A file and its expected outcome.

    Attributes:
        what: The file, in words: the left cell of the docs page.
        does: What stoker does with it: the right cell.
        write: Writes the input into an empty folder, or its text for `name`.
        options: Behind `stoker pack KIND NAME OUT`.
        name: Of the input in the folder.
        code: Exit code: 0 packed, 2 refused as it is, 3 refused by the gate or the budget; None for any refusal.
        says: Texts that must be printed.
        fields: Field to its first rows, as lists of numbers.
        columns: Of `features`, where they are worth a look.
        attributes: Entries of the manifest's attributes.
        account: Found, packed, refused, ignored of the last account.
        verb: Words of the command.
        words: The whole command, where it is not VERB NAME OUT OPTIONS.
        packed: Samples of the store.
        check: Looks at the store.
    """

    what: str
    does: str
    write: Callable[[Path], object] | str | bytes
    options: Sequence[str] = ()
    name: str = "t.csv"
    code: int | None = 0
    says: Sequence[str] = ()
    fields: Mapping[str, Any] = field(default_factory=dict)
    columns: Sequence[str] | None = None
    attributes: Mapping[str, Any] = field(default_factory=dict)
    account: tuple[int, int, int, int] | None = None
    verb: Sequence[str] = ("pack", "table")
    words: Sequence[str] = ()
    packed: int | None = None
    check: Callable[[Any], None] | None = None

    def make(self, folder: Path) -> None:
        """Write the input."""
        path = folder / self.name
        if isinstance(self.write, str):
            path.write_text(self.write, encoding="utf-8")
        elif isinstance(self.write, bytes):
            path.write_bytes(self.write)
        else:
            self.write(path)
