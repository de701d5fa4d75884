"""Spectrum libraries in MSP and MSL: read as a stream, split for workers, write, bin.

Enters: a text file, plain or gzipped, in any of the dialects of docs/msp.md. Leaves: batches of
records with their peaks in flat arrays, and everything that was refused, with its line. Costs:
see benchmarks/results/msp-*.json; memory for one block of text (2 MiB, or the longest record),
whatever the size of the file.

Two engines with the same result: `blocks` reads regular records in bulk; `text` reads anything
line by line, and is the reference.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Literal, NamedTuple

import numpy as np

from stoker.errors import InputError, Refusal, require_file
from stoker.ownership import never, writing
from stoker.sources.msp.blocks import (
    CHUNK_BYTES,
    MAX_LINE_BYTES,
    UTF8_BOM,
    BlockParser,
    is_gzip,
    no_ranges,
    overlong,
    read_blocks,
)
from stoker.sources.msp.keys import SYNONYM, WHITESPACE, is_field_key, spell
from stoker.sources.msp.text import (
    MAX_INTENSITY,
    NAME_LINE,
    Array,
    CarefulParser,
    LineTally,
    Parsed,
    Record,
)

Merge = Literal["max", "sum"]
Engine = Literal["fast", "careful"]
Rounding = Literal["nearest", "floor"]


@dataclass(frozen=True, slots=True)
class SpectrumBatch:
    """Some consecutive spectra of a file.

    Attributes:
        records: The metadata, one per spectrum.
        mz: float64, all peaks; ascending and without repeats within a spectrum.
        intensity: float32, as in the file, not normalised.
        offsets: int64, n + 1; spectrum i owns `mz[offsets[i]:offsets[i + 1]]`.
        refused: What was not taken, by line.
        tally: What became of every line.
    """

    records: list[Record]
    mz: Array
    intensity: Array
    offsets: Array
    refused: list[Refusal] = field(default_factory=list)
    tally: LineTally = field(default_factory=LineTally)


@dataclass(frozen=True, slots=True)
class MspRange:
    """A byte range of an uncompressed file that begins and ends between records.

    `num_records` counts its `Name:` lines; records without a name are not counted. Lines count from 1.
    """

    start_byte: int
    end_byte: int
    first_line: int
    num_records: int


def read_msp(
    path: str | Path,
    *,
    start_byte: int = 0,
    end_byte: int | None = None,
    first_line: int = 1,
    merge: Merge = "max",
    engine: Engine = "fast",
) -> Iterator[SpectrumBatch]:
    """Read a library, batch by batch. Blocks on the file; iterators share no state.

    Args:
        path: MSP or MSL; gzip is recognised by its first bytes.
        start_byte: Where to begin; take it, `end_byte` and `first_line` from an `MspRange`.
        end_byte: Where to stop; None for the end. Only for uncompressed files.
        first_line: Number of the line at `start_byte`, for messages.
        merge: Intensity of peaks with equal m/z in one spectrum: their maximum or their sum.
        engine: "careful" sends everything through the line parser; the result is the same.

    Yields:
        Batches in the order of the file, some of them perhaps without a spectrum.

    Raises:
        SourceError: When the file is missing, a damaged gzip, UTF-16, or has a line of more
            than 16 MiB. Anything else is reported in `refused`.
    """
    _require("merge", merge, ("max", "sum"))
    _require("engine", engine, ("fast", "careful"))
    parser = CarefulParser(str(path))
    block_parser = BlockParser(parser)
    for block in read_blocks(require_file(path, "the spectrum library"), start_byte, end_byte):
        if engine == "fast" and block.closed and parser.is_idle:
            parsed = block_parser.read(block.text, first_line)
        else:
            parser.feed(block.text, first_line)
            if block.closed:
                parser.close()
            parsed = parser.drain()
        first_line += parsed.tally.total
        yield _to_batch(parsed, merge)


def read_range(path: str | Path, piece: MspRange) -> Iterator[SpectrumBatch]:
    """Read one range that `split_msp` gave."""
    return read_msp(
        path, start_byte=piece.start_byte, end_byte=piece.end_byte, first_line=piece.first_line
    )


def _require(name: str, given: str, allowed: tuple[str, ...]) -> None:
    if given not in allowed:
        words = " or ".join(map(repr, allowed))
        raise InputError(f"{name}={given!r} is unknown.", words, f"{name}={allowed[0]!r}")


def _to_batch(parsed: Parsed, merge: Merge) -> SpectrumBatch:
    mz = np.concatenate([np.empty(0), *parsed.mz])
    intensity = np.concatenate([np.empty(0, np.float32), *parsed.intensity])
    sizes = np.array(parsed.sizes, np.int64)
    # Find the spectra whose m/z do not strictly rise.
    falls = np.zeros(len(mz), bool)
    np.less_equal(mz[1:], mz[:-1], out=falls[1:])
    starts = np.cumsum(sizes) - sizes
    falls[starts[sizes > 0]] = False
    disorderly = np.unique(np.searchsorted(starts + sizes, np.flatnonzero(falls), side="right"))
    if len(disorderly):
        keep = np.ones(len(mz), bool)
        for i, start in zip(disorderly, (np.cumsum(sizes) - sizes)[disorderly], strict=True):
            peaks = slice(start, start + sizes[i])
            flags = _sort_and_merge(mz[peaks], intensity[peaks], keep[peaks], merge)
            flags = tuple(sorted((*parsed.records[i].flags, *flags)))
            parsed.records[i] = replace(parsed.records[i], flags=flags)
            sizes[i] = np.count_nonzero(keep[peaks])
        mz, intensity = mz[keep], intensity[keep]
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    return SpectrumBatch(parsed.records, mz, intensity, offsets, parsed.refused, parsed.tally)


def _sort_and_merge(mz: Array, intensity: Array, keep: Array, merge: Merge) -> tuple[str, ...]:
    """Sort and merge one spectrum in place; clear `keep` after its last peak."""
    flags = ("unsorted",) if (mz[1:] < mz[:-1]).any() else ()
    order = np.argsort(mz, kind="stable")
    mz[:], intensity[:] = mz[order], intensity[order]
    starts = np.flatnonzero(np.concatenate([[True], mz[1:] != mz[:-1]]))
    if len(starts) == len(mz):
        return flags
    if merge == "max":
        merged = np.maximum.reduceat(intensity, starts)
    else:
        # In float64, and kept finite: two intensities of 3e38 have no sum in float32.
        merged = np.add.reduceat(intensity.astype(np.float64), starts)
        merged = np.minimum(merged, MAX_INTENSITY).astype(np.float32)
    mz[: len(starts)], intensity[: len(starts)] = mz[starts], merged
    keep[len(starts) :] = False
    return (*flags, "merged-duplicates")


# ------------------------------------------------------------------------------------------ split


def split_msp(path: str | Path, records_per_part: int) -> list[MspRange]:
    """Cut an uncompressed library into ranges that can be read independently.

    Cuts only where a record certainly begins: at a `Name:` line under an empty line, or below
    another `Name:` line with no empty line in between. Reading all ranges gives what reading the
    file gives.

    Args:
        path: An uncompressed MSP or MSL file.
        records_per_part: A range ends at the first cut after this many `Name:` lines.

    Returns:
        Ranges that cover the file without gaps, at least one.

    Raises:
        SourceError: When the file is missing or gzipped, or has a line of more than 16 MiB.
    """
    path = require_file(path, "the spectrum library")
    if records_per_part < 1:
        raise InputError(
            f"records_per_part={records_per_part}", "1 or more", "records_per_part=10000"
        )
    if is_gzip(path):
        raise no_ranges(path)
    names = [_NameLines(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, bool))]
    names += _name_lines(path)
    starts, lines, certain = (np.concatenate(column) for column in zip(*names, strict=True))
    cuts, first = [], 0
    candidates = np.flatnonzero(certain)
    while (at := np.searchsorted(candidates, first + records_per_part)) < len(candidates):
        first = int(candidates[at])
        cuts.append(first)
    first_bytes = [0, *starts[cuts].tolist(), path.stat().st_size]
    first_lines = [1, *lines[cuts].tolist()]
    num_records = np.diff([0, *cuts, len(starts)]).tolist()
    return [
        MspRange(*part)
        for part in zip(first_bytes[:-1], first_bytes[1:], first_lines, num_records, strict=True)
    ]


class _NameLines(NamedTuple):
    """Positions of `Name:` lines, by byte and by line, and whether each certainly begins a record."""

    starts: Array
    lines: Array
    certain: Array


def _name_lines(path: Path) -> Iterator[_NameLines]:
    num_above, last_name, last_blank = 1, 0, 0
    for base, raw in _whole_lines(path):
        starts = _line_starts(raw)
        names, blanks = _names_and_blanks(raw, starts)
        name_lines = names + num_above
        blank_lines = np.concatenate([[last_blank], blanks + num_above])
        blank_above = blank_lines[np.searchsorted(blanks, names)]
        name_above = np.concatenate([[last_name], name_lines])[:-1]
        certain = (blank_above == name_lines - 1) | (name_above > blank_above)
        yield _NameLines(starts[names] + base, name_lines, certain)
        last_name = name_lines[-1] if len(names) else last_name
        last_blank = blank_lines[-1]
        num_above += len(starts)


def _whole_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the file in pieces that end at line ends, each with its place in the file."""
    with path.open("rb") as stream:
        base, carry = 0, stream.read(len(UTF8_BOM))
        if carry == UTF8_BOM:
            base, carry = len(UTF8_BOM), b""
        while raw := stream.read(CHUNK_BYTES):
            carry += raw
            # The last two bytes decide whether a CR before them ends a line.
            cut = carry.rfind(b"\n") + 1 or carry.rfind(b"\r", 0, len(carry) - 2) + 1
            if cut:
                yield base, carry[:cut]
                base, carry = base + cut, carry[cut:]
            elif len(carry) > MAX_LINE_BYTES:
                raise overlong(path)
        if carry:
            yield base, carry


def _line_starts(raw: bytes) -> Array:
    """Return where each line begins. Lines end with LF, CR LF, CR CR LF, or CR."""
    codes = np.frombuffer(raw, np.uint8)
    ends = codes == 10
    if b"\r" in raw:
        padded = np.concatenate([codes, [0, 0]])
        after, then = padded[1:-1], padded[2:]
        ends |= (codes == 13) & (after != 10) & ~((after == 13) & (then == 10))
    starts = np.flatnonzero(ends) + 1
    return np.concatenate([[0], starts[starts < len(raw)]])


def _names_and_blanks(raw: bytes, starts: Array) -> tuple[Array, Array]:
    """Return the numbers of the `Name:` lines and of the empty lines."""
    codes = np.frombuffer(raw, np.uint8)
    first = _FIRST_BYTES[codes[starts]]
    second = _SECOND_BYTES[codes[np.minimum(starts + 1, len(raw) - 1)]]
    maybe_name = np.flatnonzero(first & second)
    is_name = [NAME_LINE.match(raw, at) is not None for at in starts[maybe_name].tolist()]
    blank = (first & _BLANK) != 0
    spaced = np.flatnonzero(first & _SPACE)
    blank[spaced] = [_BLANK_LINE.match(raw, at) is not None for at in starts[spaced].tolist()]
    return maybe_name[np.array(is_name, bool)], np.flatnonzero(blank)


# A look at two bytes of each line spares the regular expression 97 of 100 lines.
_MAYBE_NAME, _MAYBE_PSI, _SPACE, _BLANK = 1, 2, 4, 8
_BLANK_LINE = re.compile(rb"[ \t\x0b\x0c]*+(?:[\r\n]|\Z)")
_FIRST_BYTES = np.zeros(256, np.uint8)
_FIRST_BYTES[list(b"Nn")] = _MAYBE_NAME
_FIRST_BYTES[list(b"Mm")] = _MAYBE_PSI
_FIRST_BYTES[list(WHITESPACE)] = _SPACE
_FIRST_BYTES[list(b"\r\n")] = _BLANK
_SECOND_BYTES = np.full(256, _SPACE, np.uint8)
_SECOND_BYTES[list(b"Aa")] |= _MAYBE_NAME
_SECOND_BYTES[list(b"Ss")] |= _MAYBE_PSI


# ------------------------------------------------------------------------------------------ write

_WRITTEN_KEYS = {
    "name": "Name", "inchikey": "InChIKey", "inchi": "InChI", "smiles": "SMILES", "formula": "Formula",
    "mw": "MW", "exact_mass": "ExactMass", "cas": "CAS#", "nist": "NIST#", "db": "DB#", "id": "ID",
    "ri": "RI", "precursor_mz": "PrecursorMZ", "comment": "Comment",
}  # fmt: skip


def write_msp(batches: Iterable[SpectrumBatch], file: str | Path | IO[str]) -> None:
    """Write spectra in the NIST layout: `Name` first, `Num Peaks` last before the peaks.

    Reading the result gives the same `meta`, `synonyms` and peaks, bit for bit.

    Args:
        batches: For example from `read_msp`.
        file: A path that does not exist yet, written as UTF-8, or an open text file.

    Raises:
        InputError: When a key of `meta` could not be read back, or the file exists.
    """
    if isinstance(file, str | Path):
        with (
            writing(file, never) as temporary,
            temporary.open("x", encoding="utf-8", newline="\n") as stream,
        ):
            write_msp(batches, stream)
        return
    for batch in batches:
        bounds = batch.offsets.tolist()
        for record, start, stop in zip(batch.records, bounds, bounds[1:], strict=False):
            file.write(_header_text(record, stop - start))
            peaks = zip(batch.mz[start:stop].tolist(), batch.intensity[start:stop], strict=True)
            # Nine digits give back every float32, repr every float64.
            file.writelines(f"{mz!r} {intensity:.9g}\n" for mz, intensity in peaks)
            file.write("\n")


def _header_text(record: Record, num_peaks: int) -> str:
    lines = [f"Name: {_one_line(record.meta.get('name', ''))}"]
    for key, value in record.meta.items():
        if not is_field_key(key.encode()) or spell(key).kind >= SYNONYM:
            raise InputError(
                f"the record of line {record.line} has the key {key!r}.",
                "letters first; no colon, quote, bar, semicolon or equals sign; at most 61 bytes",
                "rename the key in Record.meta",
            )
        if key != "name":
            lines.append(f"{_WRITTEN_KEYS.get(key, key)}: {_one_line(value)}")
    lines += [f"Synon: {_one_line(synonym)}" for synonym in record.synonyms]
    return "\n".join([*lines, f"Num Peaks: {num_peaks}", ""])


def _one_line(text: str) -> str:
    return text.replace("\r", " ").replace("\n", " ")


# -------------------------------------------------------------------------------------------- bin


class Binned(NamedTuple):
    """Spectra on a grid of whole m/z."""

    spectra: Array  # `(n, max_mz + 1)` float32; the largest bin of a spectrum is 1, or all are 0
    num_dropped: Array  # `(n,)` int64, peaks above `max_mz`


def bin_spectrum(
    mz: Array, intensity: Array, offsets: Array, max_mz: int, *, rounding: Rounding = "nearest"
) -> Binned:
    """Bin spectra to whole m/z: the maximum per bin, then the base peak set to 1.

    A peak goes to the nearest whole m/z, halves up: 99.5 goes to 100, and 99.6 too. With
    `rounding="floor"` both go to 99. Bin `max_mz` is kept, everything above is dropped and
    counted; the base peak is the largest of what is kept.

    Args:
        mz: All peaks, as in `SpectrumBatch`.
        intensity: One per peak.
        offsets: n + 1 positions, as in `SpectrumBatch`.
        max_mz: Last bin.
        rounding: "nearest" or "floor".

    Returns:
        The spectra, and how many peaks of each were dropped. Takes 4 (max_mz + 1) bytes each.
    """
    _require("rounding", rounding, ("nearest", "floor"))
    num_spectra = len(offsets) - 1
    rows = np.repeat(np.arange(num_spectra), np.diff(offsets))
    floor = np.floor(mz)
    # Not floor(mz + 0.5): the sum rounds, and 0.49999999999999994 would go to 1.
    bins = floor + (mz - floor >= 0.5) if rounding == "nearest" else floor
    kept = bins <= max_mz
    spectra = np.zeros((num_spectra, max_mz + 1), np.float32)
    np.maximum.at(spectra, (rows[kept], bins[kept].astype(np.int64)), intensity[kept])
    base = spectra.max(axis=1, keepdims=True, initial=0.0)
    np.divide(spectra, base, out=spectra, where=base > 0)
    return Binned(spectra, np.bincount(rows[~kept], minlength=num_spectra))
