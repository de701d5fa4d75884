"""The line parser of MSP and MSL libraries: records, keys, and lines with peaks.

Enters: lines of bytes, in the order of the file. Leaves: one `Record` per spectrum with its raw
peaks, one `Refusal` for everything that was not taken, and a tally that accounts for every
line. Costs: 200 µs per record of 60 peaks on a slow core; memory for the record that is open.

This is the reference. The block parser in `blocks` may only take what it would have read the same
way; everything else comes here. The rules are written down in docs/msp.md.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np

from stoker.bounds import RECORD
from stoker.display import command
from stoker.errors import Refusal
from stoker.sources.msp.keys import COUNT, WHITESPACE, flags_of, fold_header, is_field_key, spell

Array = np.ndarray[Any, np.dtype[Any]]

NO_RECORD = "no record"
"""Kind of refused lines: metadata without a name, a peak count or peaks, and so no record."""
MAX_INTENSITY = float(np.finfo(np.float32).max)
_PSI_MARK = b"#psi spectral library format"
_PSI_FIELD = re.compile(rb"ms:([0-9]{1,9})\|", re.IGNORECASE)
_PSI_TERMS = {b"1000130": b"ion mode", b"1000129": b"ion mode", b"1000073": b"ionization"}

# Only these lines are certain to begin a record, so `split_msp` may cut nowhere else.
NAME_LINE = re.compile(rb"[ \t\x0b\x0c]*(?:name[ \t\x0b\x0c]*:|ms:1009003\|)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Record:
    """The text side of one spectrum.

    Attributes:
        line: 1-based line of the record's first line in the file.
        meta: Normalised key to value, see `spell`. Values are stripped; a key without a value
            (`None`, `NA`, nothing) is absent.
        synonyms: Every `Synon:` line, in order.
        declared_peaks: What `Num Peaks` said, or None.
        flags: What is odd about the record, sorted; the words are listed in docs/msp.md.
    """

    line: int
    meta: dict[str, str]
    synonyms: tuple[str, ...] = ()
    declared_peaks: int | None = None
    flags: tuple[str, ...] = ()


@dataclass(slots=True)
class LineTally:
    """What became of every line: the four numbers add up to the lines of the text."""

    blank: int = 0
    metadata: int = 0
    peaks: int = 0
    refused: int = 0

    @property
    def total(self) -> int:
        """Number of lines seen."""
        return self.blank + self.metadata + self.peaks + self.refused

    def __iadd__(self, other: LineTally) -> LineTally:
        for part in fields(self):
            setattr(self, part.name, getattr(self, part.name) + getattr(other, part.name))
        return self


# ----------------------------------------------------------------------------------------- peaks

NUMBER = rb"(?:[0-9]++(?:\.[0-9]*+)?+|\.[0-9]++)(?:[eE][+-]?+[0-9]++)?+"
_PEAK_START = frozenset(b"0123456789.+-,;:()[]{}\"'")
_PAIR = re.compile(rb"(%b)[ \t]++(%b)(?:[ \t]++(\"[^\"]*+\"))?+[ \t]*+" % (NUMBER, NUMBER))
# Possessive quantifiers: a million digits in front of a letter must not be tried a million times.
_TOKEN = re.compile(
    rb"(?P<number>[+-]?+(?:%b|nan|inf(?:inity)?)(?=[\s,;:()\[\]{}\"]|$))"
    rb"|(?P<quoted>\"[^\"]*+\"?|'[^']*+'?)"
    rb"|(?P<gap>[\s,;:()\[\]{}]++)"
    rb"|(?P<word>[^\s,;:()\[\]{}\"]++)" % NUMBER,
    re.IGNORECASE,
)
_PEAK_IN_ANNOTATION = re.compile(rb"[;(\[{][ \t]*+%b[ \t,:]++%b(?=[\s,;)\]}]|$)" % (NUMBER, NUMBER))


class PeakLine(NamedTuple):
    """The peaks of one line: (m/z, intensity) pairs that can be taken, and why others cannot.

    It is `plain` where it has only numbers and delimiters, so that it cannot be the prose of a comment.
    """

    pairs: list[tuple[float, float]]
    problems: list[str]
    plain: bool


def read_peak_line(text: bytes) -> PeakLine | None:
    """Read the peaks of one stripped line; None when it holds no pair of numbers.

    Numbers pair up across any delimiters. An annotation, quoted or not, belongs to the pair
    before it, and so do plain numbers that only blanks set apart from that pair. After a quoted
    annotation new peaks need a `;` or an opening bracket in front; after an unquoted one there
    are none.
    """
    line, plain = PeakLine([], [], False), True
    for run, delimiters, annotated in _runs(text, line.problems):
        plain = plain and not annotated
        _take_run(run, delimiters, annotated, line)
    if not line.pairs and not line.problems:
        return None
    return line._replace(plain=plain and not line.problems)


def _runs(text: bytes, problems: list[str]) -> Iterable[tuple[list[bytes], bytes, bool]]:
    """Yield runs of numbers: the numbers, the delimiters between them, whether an annotation follows."""
    run: list[bytes] = []
    delimiters: list[bytes] = []
    skipping = False
    for token in _TOKEN.finditer(text):
        kind = token.lastgroup
        if kind == "gap":
            if skipping:
                skipping = not any(mark in token[0] for mark in b";([{")
            elif run:
                delimiters.append(token[0])
        elif kind == "number" and not skipping:
            run.append(token[0])
        elif not skipping:
            if run:
                yield run, b"".join(delimiters), True
            run, delimiters, skipping = [], [], True
            if kind == "word":
                if _PEAK_IN_ANNOTATION.search(text, token.start()):
                    problems.append("what looks like peaks after an unquoted annotation")
                return
    if run:
        yield run, b"".join(delimiters), False


def _take_run(run: list[bytes], delimiters: bytes, annotated: bool, line: PeakLine) -> None:
    if len(run) == 1:
        if line.pairs or not annotated:
            line.problems.append(f"{_show(run[0])} stands alone: m/z without intensity")
        return
    if not delimiters.strip(WHITESPACE) and (annotated or len(run) == 3):
        run = run[:2]
    if len(run) % 2:
        line.problems.append(f"an odd number of values, {len(run)}, cannot be paired")
        return
    for texts in zip(run[::2], run[1::2], strict=True):
        mz, intensity = map(float, texts)
        if 0.0 <= mz < math.inf and 0.0 <= intensity <= MAX_INTENSITY:
            # + 0.0: "-0" is a zero, and must not differ from one in its bits.
            line.pairs.append((mz + 0.0, intensity + 0.0))
            continue
        bad, text = ("intensity", texts[1]) if 0.0 <= mz < math.inf else ("m/z", texts[0])
        line.problems.append(f"{bad} {_show(text)} is negative, not a number, or too large")


def _show(text: bytes) -> str:
    """Return a short, printable excerpt for a message."""
    shown = ascii(text[:60].decode("latin-1"))
    return shown if len(text) <= 60 else f"{shown}…"


# --------------------------------------------------------------------------------- careful parser


@dataclass(slots=True)
class _Draft:
    """A record that is being read."""

    line: int
    # line, `key: value` and continuations
    header: list[tuple[int, list[bytes]]] = field(default_factory=list)
    mz: list[float] = field(default_factory=list)
    intensity: list[float] = field(default_factory=list)
    flags: set[str] = field(default_factory=set)
    declared: int | None = None
    count_line: int | None = None
    named: bool = False
    psi: bool = False
    in_peaks: bool = False


@dataclass(slots=True)
class Parsed:
    """Result of parsing some text: records, and the peaks of all of them, concatenated in the order of the file."""

    records: list[Record] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    mz: list[Array] = field(default_factory=list)
    intensity: list[Array] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)
    tally: LineTally = field(default_factory=LineTally)

    def extend(self, other: Parsed) -> None:
        """Append what was parsed after this."""
        self.records += other.records
        self.sizes += other.sizes
        self.mz += other.mz
        self.intensity += other.intensity
        self.refused += other.refused
        self.tally += other.tally


class CarefulParser:
    """Reads any text line by line. Every line ends up in a record, as blank, or refused.

    A `Name:` line begins a record, unless the open record is still a header without a name; a
    blank line ends a record that has peaks. `feed` may be called with any number of pieces that
    end at line ends; an open record continues until `close`. Not thread-safe.
    """

    def __init__(self, file: str) -> None:
        self._file = file
        self._open: _Draft | None = None
        self._open_bytes = 0
        self._blank_above = False
        self._parsed = Parsed()
        self._mz: list[float] = []
        self._intensity: list[float] = []

    @property
    def is_idle(self) -> bool:
        """Whether no record is open."""
        return self._open is None

    def feed(self, text: bytes, first_line: int) -> None:
        """Read whole lines, ended by LF; the first has the number `first_line`."""
        lines = text.split(b"\n")
        before = self._open
        if not lines[-1]:
            lines.pop()
        for number, line in enumerate(lines, first_line):
            pair = _PAIR.fullmatch(line)
            if pair is None or not self._take_plain_pair(pair):
                self._take(number, line.strip(WHITESPACE))
        # A piece is a few megabytes: only a record that outlasts pieces can be too long.
        self._open_bytes = self._open_bytes + len(text) if before is self._open is not None else 0
        RECORD.check(
            self._open_bytes,
            f"{self._file}: the record that goes on at line {first_line}",
            command("head", "-c", "2000", self._file),
        )

    def drain(self) -> Parsed:
        """Return and remove everything that is finished."""
        parsed, self._parsed = self._parsed, Parsed()
        parsed.mz.append(np.array(self._mz, np.float64))
        parsed.intensity.append(np.array(self._intensity, np.float32))
        self._mz, self._intensity = [], []
        parsed.refused.sort(key=lambda refusal: refusal.line or 0)
        return parsed

    def close(self) -> None:
        """End the open record, if there is one."""
        draft, self._open, self._blank_above = self._open, None, False
        if draft is None:
            return
        if draft.named or draft.count_line is not None or draft.in_peaks:
            self._finish(draft)
        else:
            for number, parts in draft.header:
                self._parsed.tally.metadata -= len(parts)
                self._parsed.tally.refused += len(parts) - 1
                self._refuse(number, "metadata without a name, a peak count or peaks", NO_RECORD)

    def _finish(self, draft: _Draft) -> None:
        header = b"\n".join(b" ".join(parts) for _, parts in draft.header)
        try:
            text = header.decode()
        except UnicodeDecodeError:
            text = header.decode("latin-1")
            draft.flags.add("latin-1")
        folded = fold_header(text.split("\n") if text else (), strict=False)
        assert folded is not None
        meta, synonyms = folded
        if not draft.mz:
            draft.flags.add("no-peaks")
        if draft.declared is None:
            draft.flags.add("no-count")
        elif draft.declared != len(draft.mz):
            draft.flags.add("count-mismatch")
            reason = f"Num Peaks says {draft.declared}, the record has {len(draft.mz)}: not trusted"
            self._parsed.refused.append(Refusal(self._file, draft.count_line, reason))
        flags = flags_of(meta, draft.flags)
        self._parsed.records.append(Record(draft.line, meta, synonyms, draft.declared, flags))
        self._parsed.sizes.append(len(draft.mz))
        self._mz += draft.mz
        self._intensity += draft.intensity

    def _take(self, number: int, text: bytes) -> None:
        draft = self._open
        if not text:
            self._parsed.tally.blank += 1
            if draft is not None and draft.in_peaks:
                self.close()
            self._blank_above = True
            return
        if text[0] in _PEAK_START and self._take_peaks(number, text):
            return
        if NAME_LINE.match(text):
            self._begin_named(number)
        pair = self._field(text)
        if pair is None:
            self._take_prose(number, text)
        elif spell(pair[0].decode("latin-1")).kind == COUNT:
            self._take_count(number, pair[1])
        else:
            self._take_field(number, b"%b:%b" % pair)

    def _begin_named(self, number: int) -> None:
        draft = self._open
        if draft is not None and (
            self._blank_above or draft.named or draft.in_peaks or draft.count_line is not None
        ):
            self.close()
        self._draft(number).named = True

    def _draft(self, number: int) -> _Draft:
        """Return the open record, or begin one; a blank line above may end the open record."""
        draft = self._open
        if self._blank_above and draft is not None:
            if draft.count_line is not None:
                self.close()
                draft = None
            else:
                draft.flags.add("blank-in-header")
        self._blank_above = False
        if draft is None:
            draft = self._open = _Draft(number)
        return draft

    def _field(self, text: bytes) -> tuple[bytes, bytes] | None:
        """Return key and value when the line is metadata, in the MSP or the PSI manner."""
        psi = _PSI_FIELD.match(text)
        if psi:
            if self._open is not None:
                self._open.psi = True
            raw, equals, value = text[psi.end() :].partition(b"=")
            if not equals:
                raw, value = _PSI_TERMS.get(psi[1], b"term"), raw
        else:
            raw, colon, value = text.partition(b":")
            if not colon and self._open is not None and self._open.psi:
                raw, colon, value = text.partition(b" = ")
            if not colon:
                return None
        raw = raw.strip(WHITESPACE)
        return (raw, value) if is_field_key(raw) else None

    def _take_field(self, number: int, line: bytes) -> None:
        draft = self._draft(number)
        if draft.in_peaks:
            draft.flags.add("late-metadata")
        elif draft.count_line is not None:
            draft.flags.add("misplaced-count")
        draft.header.append((number, [line]))
        self._parsed.tally.metadata += 1

    def _take_count(self, number: int, value: bytes) -> None:
        draft = self._draft(number)
        value = value.strip(WHITESPACE)
        if draft.count_line is not None:
            self._refuse(number, "a second peak count in one record")
            return
        draft.count_line = number
        if draft.in_peaks:
            draft.flags.add("misplaced-count")
        if value.isdigit() and len(value) <= 18:
            draft.declared = int(value)
            self._parsed.tally.metadata += 1
        else:
            self._refuse(number, f"peak count {_show(value)} is not a whole number")

    def _take_peaks(self, number: int, text: bytes) -> bool:
        """Take a line of peaks; False when it is none, or is the prose of a comment."""
        line = read_peak_line(text)
        draft = self._open
        if line is None:
            return False
        if draft is None:
            self._refuse(number, f"peaks outside any record: {_show(text)}")
            return True
        if not line.plain and draft.count_line is None and not draft.in_peaks:
            return False
        if self._blank_above:
            draft.flags.add("blank-in-header")
            self._blank_above = False
        draft.in_peaks = True
        for mz, intensity in line.pairs:
            draft.mz.append(mz)
            draft.intensity.append(intensity)
        if line.pairs:
            self._parsed.tally.peaks += 1
        else:
            self._parsed.tally.refused += 1
        for problem in line.problems:
            self._parsed.refused.append(Refusal(self._file, number, problem))
        return True

    def _take_plain_pair(self, pair: re.Match[bytes]) -> bool:
        """Take a plain peak line, as nine of ten lines are, fast; False if there is any doubt."""
        draft = self._open
        if draft is None or self._blank_above:
            return False
        if pair[3] is not None and draft.count_line is None and not draft.in_peaks:
            return False
        mz, intensity = float(pair[1]), float(pair[2])
        if mz == math.inf or intensity > MAX_INTENSITY:
            return False
        draft.in_peaks = True
        draft.mz.append(mz)
        draft.intensity.append(intensity)
        self._parsed.tally.peaks += 1
        return True

    def _take_prose(self, number: int, text: bytes) -> None:
        """Take the next line of a comment that spans several, or refuse."""
        draft = self._open
        if draft is None and text.lower().startswith(_PSI_MARK):
            self._parsed.tally.metadata += 1
        elif draft is None or draft.in_peaks or draft.count_line is not None or not draft.header:
            where = "outside any record" if draft is None else "where peaks were expected"
            self._refuse(number, f"neither metadata nor peaks, {where}: {_show(text)}")
        else:
            self._draft(number).header[-1][1].append(text)
            self._parsed.tally.metadata += 1

    def _refuse(self, number: int, reason: str, kind: str = "") -> None:
        self._parsed.tally.refused += 1
        self._parsed.refused.append(Refusal(self._file, number, reason, kind=kind))
