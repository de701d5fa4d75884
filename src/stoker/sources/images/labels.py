"""Labels and splits from separate files: a CSV of names and labels, lists of names.

Enters: the pictures' relative paths, and a CSV or text file. Leaves: the class and the split of each picture, and a
refusal for every line that fits no picture. Costs: one pass over the file.

A name is found as a relative path, as a file name, or as either without its ending, in this order; where several
pictures have the name, the line is refused.
"""

from __future__ import annotations

import csv
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from stoker.display import command
from stoker.errors import InputError, Refusal, SourceError, require_file
from stoker.sources.images.listing import SPLIT_ALIASES

_SPLIT_COLUMNS = {"split", "set", "subset", "partition", "fold_name"}
_LABEL_COLUMNS = ("label", "class", "target", "category", "classname", "class_name", "species")
_NAME_COLUMNS = {"image", "file", "filename", "name", "path", "id", "image_id", "img", "picture"}
_MOST_CLASSES = 10_000


class NameIndex:
    """Finds pictures by the names that lists use for them."""

    def __init__(self, pictures: Sequence[str]) -> None:
        self._by_name: dict[str, list[str]] = defaultdict(list)
        for picture in pictures:
            path = PurePosixPath(picture)
            for name in {picture, picture[: -len(path.suffix)], path.name, path.stem}:
                self._by_name[name].append(picture)
        self._pictures = set(pictures)

    def find(self, text: str) -> list[str]:
        """Return the pictures that a name may mean."""
        name = text.strip().replace("\\", "/").removeprefix("./").lstrip("/")
        if name in self._pictures:
            return [name]
        path = PurePosixPath(name)
        for candidate in (name, path.name, path.stem):
            if found := self._by_name.get(candidate):
                return found
        return []


@dataclass(frozen=True)
class Labels:
    """Contents of a CSV of labels."""

    classes: Sequence[str]  # names, in the order of their numbers
    label: Mapping[str, int]  # picture to class number
    split: Mapping[str, int]  # picture to split number; empty when the file has no such column
    refused: Sequence[Refusal]  # lines that fit no picture, or two
    notes: Sequence[str]  # which columns were taken, for the user


def read_labels(path: Path, pictures: Sequence[str], column: str | None = None) -> Labels:
    """Read a CSV with one line per picture; its separator is detected.

    `column` is the column of labels; None takes the only one left, or one with a name such as `label`.
    """
    require_file(path, "the file of labels")
    header, rows = _read_csv(path)
    index = NameIndex(pictures)
    name_at = _name_column(path, header, rows, index)
    has_header = header[name_at].lower() in _NAME_COLUMNS or not index.find(header[name_at])
    if not has_header:  # the first line names a picture: it is a row
        rows = [(1, header), *rows]
        header = [f"c{number}" for number in range(len(header))]
    others = [number for number in range(len(header)) if number != name_at]
    split_at = next(
        (n for n in others if header[n].lower() in _SPLIT_COLUMNS and _are_splits(rows, n)), None
    )
    others = [number for number in others if number != split_at]
    classes, values, about = _label_values(path, header, rows, others, column)
    label: dict[str, int] = {}
    split: dict[str, int] = {}
    refused = []
    numbers = {name: number for number, name in enumerate(classes)}
    for (line, row), value in zip(rows, values, strict=True):
        found = index.find(row[name_at])
        if len(found) > 1:  # folder and name in two columns
            cells = {cell.strip() for cell in row}
            near = [name for name in found if cells & {*PurePosixPath(name).parts[:-1]}]
            found = near if len(near) == 1 else found
        reason, kind = "", ""
        if value is None:
            reason, kind = f"{row[name_at]!r} has no label", "no label"
        elif not found:
            reason, kind = f"there is no picture {row[name_at]!r}", "label without a picture"
        elif len(found) > 1:
            reason = f"{row[name_at]!r} may be {found[0]} or {found[1]}"
            kind = "name of several pictures"
        elif label.get(found[0], numbers[value]) != numbers[value]:
            reason = f"{row[name_at]!r} is {value!r} here and {classes[label[found[0]]]!r} above"
            kind = "two labels for one picture"
        if reason:
            refused.append(Refusal(str(path), line, reason, kind=kind))
            continue
        assert value is not None
        label[found[0]] = numbers[value]
        if split_at is not None:
            split[found[0]] = SPLIT_ALIASES[row[split_at].strip().lower()]
    notes = [f"{path.name}: pictures from column {header[name_at]!r}, {about}"]
    if not has_header:
        notes.append(f"{path.name}: no header, so columns are named c0 to c{len(header) - 1}")
    if split_at is not None:
        notes.append(f"{path.name}: the split is that of column {header[split_at]!r}")
    return Labels(classes, label, split, refused, notes)


def read_lists(
    lists: Sequence[tuple[str, Path]], pictures: Sequence[str]
) -> tuple[dict[str, int], list[Refusal]]:
    """Return the split of every picture that a list names, and the lines that name none.

    Args:
        lists: Split name and file, one name a line. If a line is no name, its text before the first space is used.
        pictures: Relative paths.
    """
    index = NameIndex(pictures)
    split: dict[str, int] = {}
    refused = []
    for name, path in lists:
        number = SPLIT_ALIASES[name.lower()]
        text = require_file(path, f"the list of {name}").read_text(encoding="utf-8-sig")
        for line, entry in enumerate(text.splitlines(), 1):
            if not entry.strip():
                continue
            found = index.find(entry) or index.find(entry.split()[0])
            reason, kind = "", ""
            if not found:
                reason, kind = f"there is no picture {entry.strip()!r}", "listed without a picture"
            elif len(found) > 1:
                reason = f"{entry.strip()!r} may be {found[0]} or {found[1]}"
                kind = "name of several pictures"
            elif split.setdefault(found[0], number) != number:
                reason = f"{entry.strip()!r} is in two lists"
                kind = "in two lists"
            if reason:
                refused.append(Refusal(str(path), line, reason, kind=kind))
    return split, refused


def parse_lists(texts: Sequence[str]) -> tuple[tuple[str, Path], ...]:
    """Return (split, file) for each "train=train.txt"."""
    lists = []
    for text in texts:
        name, sign, file = text.partition("=")
        if not sign or not file or name.strip().lower() not in SPLIT_ALIASES:
            raise InputError(
                f"--list is {text!r}.",
                "train, val or test, =, and a file",
                "--list train=train.txt",
            )
        lists.append((name.strip().lower(), Path(file)))
    return tuple(lists)


def _read_csv(path: Path) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """Return the header and (line, cells) of every row."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            first = file.readline()
            file.seek(0)
            # The header decides: column names rarely contain another separator.
            separator = max((",", ";", "\t", "|"), key=first.count)
            if separator in first:
                reader = csv.reader(file, delimiter=separator, strict=True)
                table = [(reader.line_num, row) for row in reader if row]
            else:  # "n01/x.jpg 17", as in lists of ImageNet and Caffe
                lines = enumerate(file.read().splitlines(), 1)
                table = [(number, line.rsplit(None, 1)) for number, line in lines if line.strip()]
    except (UnicodeDecodeError, csv.Error) as error:
        raise SourceError(
            f"{path} cannot be read as CSV: {error}.", "UTF-8 text", command("head", path)
        ) from error
    if len(table) < 2 or len(table[0][1]) < 2:
        raise SourceError(
            f"{path} has {len(table)} lines and {len(table[0][1]) if table else 0} columns.",
            "a header with at least two columns, then a line per picture",
            command("head", path),
        )
    header = [name.strip() for name in table[0][1]]
    for line, row in table[1:]:
        if len(row) != len(header):
            raise SourceError(
                f"{path}:{line} has {len(row)} cells; the header has {len(header)}.",
                "as many cells as the header",
                command("head", path),
            )
    return header, table[1:]


def _name_column(
    path: Path, header: Sequence[str], rows: Sequence[tuple[int, list[str]]], index: NameIndex
) -> int:
    some = rows[:200]
    hits = [sum(bool(index.find(row[n])) for _, row in some) for n in range(len(header))]
    if not max(hits):
        raise SourceError(
            f"no column of {path} names the pictures: {', '.join(map(repr, header))}; "
            f"the first row is {', '.join(rows[0][1][:8])}.",
            "file names, with or without their ending",
            command("head", path),
        )
    return hits.index(max(hits))


def _are_splits(rows: Sequence[tuple[int, list[str]]], number: int) -> bool:
    return all(row[number].strip().lower() in SPLIT_ALIASES for _, row in rows)


def _label_values(
    path: Path,
    header: Sequence[str],
    rows: Sequence[tuple[int, list[str]]],
    others: Sequence[int],
    column: str | None,
) -> tuple[list[str], list[str | None], str]:
    """Return the classes, the class name of every row, and how they were found."""
    if column is not None:
        if column not in header:
            raise InputError(
                f"--label-column is {column!r}; {path} has {', '.join(map(repr, header))}.",
                "one of these",
                command("--label-column", header[others[0]] if others else header[0]),
            )
        chosen: int | None = header.index(column)
    elif len(others) == 1:
        chosen = others[0]
    else:
        named = [n for n in others if header[n].lower() in _LABEL_COLUMNS]
        chosen = named[0] if len(named) == 1 else None
    if chosen is None:
        hot = [[_number(row[n]) for n in others] for _, row in rows]
        if others and all({*flags} <= {0.0, 1.0} and flags.count(1.0) == 1 for flags in hot):
            names = [header[n] for n in others]
            return (
                names,
                [names[flags.index(1.0)] for flags in hot],
                "one column of 0 and 1 a class",
            )
        raise InputError(
            f"{path} has the columns {', '.join(map(repr, header))}, and several may be the label.",
            "the name of one",
            command("--label-column", header[others[0]] if others else header[0]),
        )
    texts = [row[chosen].strip() for _, row in rows]
    counted = Counter(text for text in texts if text)
    if len(counted) > _MOST_CLASSES or (len(counted) > 20 and _are_measurements(counted)):
        raise InputError(
            f"column {header[chosen]!r} of {path} has {len(counted):,} different values.",
            f"classes: at most {_MOST_CLASSES:,}, and no measurements",
            "pack arrays, for targets that are numbers",
        )
    classes = sorted(counted, key=_natural)
    return classes, [text or None for text in texts], f"labels from column {header[chosen]!r}"


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _are_measurements(counted: Counter[str]) -> bool:
    """Return whether labels are numbers, some with a fraction: measurements, not classes."""
    try:
        return any(float(text) % 1 for text in counted)
    except ValueError:
        return False


def _natural(text: str) -> tuple[int, float, str]:
    """Order numbers by value, before words."""
    number = _number(text)
    is_number = number is not None and math.isfinite(number)
    return (0, number or 0.0, text) if is_number else (1, 0.0, text)
