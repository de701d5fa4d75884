"""Text to show or to type: without control characters and secrets, quoted for a shell.

Enters: names and messages with any content from a file or a server. Leaves: one line that a terminal shows
unchanged, a word that a shell takes as one word, JSON without raw control characters. Costs a few
microseconds.
"""

from __future__ import annotations

import contextlib
import difflib
import html
import itertools
import os
import re
import shlex
from collections.abc import Collection, Iterable
from pathlib import Path, PurePath
from typing import Any

from stoker.address import MARK, masked, shown
from stoker.strict_json import json_text

# Control characters, marks that reverse the direction of text, line ends of Unicode, invisible characters, and
# surrogates (bytes of a file name that are not UTF-8). Joiners stay: scripts and emoji need them.
UNPRINTABLE = (
    r"\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    r"\ud800-\udfff\U0001d173-\U0001d17a\U000e0000-\U000e007f"
)
_UNPRINTABLE = re.compile(f"[{UNPRINTABLE}]")
_MOST_NAMES = 10_000  # names of a folder that are compared with a missing one
_WORDS = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}


def printable(text: str) -> str:
    """Return `text` as one line that is safe to show: control characters escaped, secrets left out."""
    return _UNPRINTABLE.sub(_escaped, masked(text))


def _escaped(match: re.Match[str]) -> str:
    code = ord(match[0])
    if 0xDC80 <= code <= 0xDCFF:  # a byte of a file name
        return f"\\x{code - 0xDC00:02x}"
    return match[0].encode("unicode_escape").decode()


def show(text: str, stream: Any) -> None:
    """Write text to a script's own stream, which may be missing, closed, of few letters, or have no more than `write`.

    A line that cannot be shown ends no run.
    """
    with contextlib.suppress(AttributeError, OSError, ValueError):
        try:
            stream.write(text)
        except UnicodeEncodeError as error:
            letters = text.encode(error.encoding, "backslashreplace")
            stream.write(letters.decode(error.encoding))
        stream.flush()


def escaped_json(text: str) -> str:
    """Return a JSON text that is safe to print: control characters escaped, other letters unchanged."""
    # Inside strings `json` has escaped line ends already; the others are its own.
    return _UNPRINTABLE.sub(
        lambda match: match[0] if match[0] == "\n" else json_text(match[0])[1:-1], text
    )


# -- commands ------------------------------------------------------------------------------------


def quoted(word: object) -> str:
    """Return a word quoted for a shell, which takes it as one word whatever it contains.

    A URL loses its secrets. A path that begins with a dash gets `./`, so that it is no option.
    """
    text = shown(word) if isinstance(word, str | PurePath) else str(word)  # type: ignore[arg-type]
    text = masked(text)
    if isinstance(word, PurePath) and text.startswith("-"):
        text = f"./{text}"
    if not _UNPRINTABLE.search(text):
        return shlex.quote(text)
    return "$'" + "".join(map(_in_dollar_quotes, text)) + "'"


def _in_dollar_quotes(letter: str) -> str:
    """Return a letter as it stands between `$'` and `'`, which bash, zsh and POSIX shells know."""
    if letter in "\\'":
        return f"\\{letter}"
    if not _UNPRINTABLE.match(letter):
        return letter
    # Octal: unlike \x it has a fixed length in every shell.
    return _WORDS.get(letter) or "".join(f"\\{byte:03o}" for byte in _bytes_of(letter))


def _bytes_of(letter: str) -> bytes:
    try:
        return os.fsencode(letter)
    except UnicodeEncodeError:  # half of a character that no file name can hold
        return letter.encode("utf-8", "surrogatepass")


def command(*words: object) -> str:
    """Return a command to type, each word quoted."""
    return " ".join(map(quoted, words))


def first_names(names: Collection[object], most: int = 4) -> str:
    """Return the first names by commas, and how many more there are."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(map(str, itertools.islice(names, most))) + more


def nearest(name: object, known: Iterable[str]) -> str | None:
    """Return the known name that was probably meant, for advice; upper and lower case are alike."""
    folded = {each.casefold(): each for each in known}
    near = difflib.get_close_matches(str(name).casefold(), folded, n=1)
    return folded[near[0]] if near else None


def meant_path(missing: Path) -> Path | None:
    """Return the path that was probably meant by a missing one.

    That is the path with its variables and its `~` replaced, as a shell does, or the nearest name in the same folder.
    A name with another ending counts only if the rest is equal: notes.txt is never suggested for node.pt.
    """
    # os.path: `Path.expanduser` raises for "~$report.xlsx", which names no user.
    meant = Path(os.path.expanduser(os.path.expandvars(missing)))  # noqa: PTH111
    if meant != missing and meant.exists():
        return meant
    try:
        with os.scandir(missing.parent) as entries:
            names = [entry.name for entry in itertools.islice(entries, _MOST_NAMES)]
    except (OSError, ValueError):
        names = []
    alike = [
        name
        for name in names
        if name != missing.name
        and (PurePath(name).suffix == missing.suffix or PurePath(name).stem == missing.stem)
    ]
    near = nearest(missing.name, alike)
    # Compared by the whole names, an ending alone makes short names alike: nowhere.csv and out.csv.
    is_alike = near and nearest(missing.stem, [PurePath(near).stem])
    return missing.with_name(near) if near and is_alike else None


def look_for(missing: Path, *options: str, holding: str = "") -> str:
    """Return the path that was probably meant by a missing one, or the `ls` command of its folder.

    A path that was meant is a folder with the file `holding`, where that is named.
    """
    meant = meant_path(missing)
    is_right = meant is not None and (meant / holding).exists()
    return quoted(meant) if meant and is_right else look_in(missing.parent, *options)


def look_in(folder: Path, *options: str) -> str:
    """Return the `ls` command of a folder, or of its nearest existing parent."""
    there = next((each for each in (folder, *folder.parents) if each.exists()), folder)
    return command("ls", *options, there)


def secret_hint(text: str) -> str:
    """Return a note for a command from which a password was left out; "" for other commands."""
    return f"({MARK} is a password that is not shown)" if MARK in text else ""


def table_html(title: str, rows: Iterable[tuple[str, str]]) -> str:
    """Return a small table for notebooks: a title and pairs of name and value, all escaped."""
    cells = "".join(
        f'<tr><td style="text-align:left">{html.escape(printable(name))}</td>'
        f'<td style="text-align:left">{html.escape(printable(value))}</td></tr>'
        for name, value in rows
    )
    return f"<table><caption><b>{html.escape(printable(title))}</b></caption>{cells}</table>"
