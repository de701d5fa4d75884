"""Spectrum files of other formats, turned into MSP once: MGF, MassBank records, SDF with peaks, mzML, folders of them.

Enters: a file or a folder. Leaves: an MSP file in the scratch folder, which the MSP reader then reads in parallel, and
refusals. Every record carries `source_file` and `source_line`, so that messages name the file that was given.
Costs: one pass in one process, about 10 MB/s of text; disk for the MSP.

The format is detected by the content. Of a folder all files with the ending of a spectrum format are read, in the order
of their names; other files are ignored and counted.
"""

from __future__ import annotations

import base64
import binascii
import gzip
import itertools
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal
from xml.etree import ElementTree

import numpy as np
import xxhash

from stoker.bounds import RECORD, copy_to_disk
from stoker.display import command
from stoker.errors import Refusal, RefusalList, SourceError, require_file
from stoker.ownership import always, writing
from stoker.sources.msp import Record, SpectrumBatch, read_msp, write_msp
from stoker.sources.msp.blocks import is_gzip
from stoker.sources.msp.keys import SYNONYM, fold_header, is_field_key, spell
from stoker.store.foreign import name_kind, unused_beside

SpectrumFormat = Literal["msp", "mgf", "massbank", "sdf", "mzml"]
SDF_RECORD = "sdf_record"
"""Metadata key: number of the record in the SDF, from 0; its own MOL block is the structure."""

UNREADABLE = "unreadable record"  # kind of records refused as a whole
LINE_IN_RECORD = "line in a record"  # kind of refused lines of records that were taken
_HEAD_BYTES = 1 << 16
_ENDINGS = {".msp", ".msl", ".mgf", ".txt", ".sdf", ".sd", ".mzml"}
_PEAKS_ITEM = "mass spectral peaks"
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
_MGF_KEYS = {
    "pepmass": "precursor_mz", "spectrumid": "id", "spectrum_id": "id", "identifier": "id",
    "feature_id": "id", "inchiaux": "inchikey", "mslevel": "ms_level", "ionmode": "ion_mode",
    "source_instrument": "instrument", "compound_name": "name", "parent_mass": "parent_mass",
}  # fmt: skip
_MASSBANK_KEYS = {
    "ACCESSION": "id", "CH$FORMULA": "formula", "CH$EXACT_MASS": "exact_mass",
    "CH$SMILES": "smiles", "CH$IUPAC": "inchi", "AC$INSTRUMENT": "instrument",
    "AC$INSTRUMENT_TYPE": "instrument_type", "PK$SPLASH": "splash", "COMMENT": "comment",
    # of a key and the first word of its value
    "CH$LINK INCHIKEY": "inchikey", "CH$LINK CAS": "cas", "AC$MASS_SPECTROMETRY MS_TYPE": "ms_level",
    "AC$MASS_SPECTROMETRY ION_MODE": "ion_mode", "AC$MASS_SPECTROMETRY IONIZATION": "ionization",
    "AC$MASS_SPECTROMETRY COLLISION_ENERGY": "collision_energy",
    "AC$CHROMATOGRAPHY RETENTION_TIME": "retention_time", "AC$CHROMATOGRAPHY KOVATS_RTI": "ri",
    "MS$FOCUSED_ION PRECURSOR_M/Z": "precursor_mz", "MS$FOCUSED_ION PRECURSOR_TYPE": "precursor_type",
}  # fmt: skip


@dataclass
class Converted:
    """An MSP made of other files, and what was refused: `num_unread` of `refused` are records.

    `structures` is the SDF whose records hold the structures; None where there is none.
    """

    path: Path
    refused: RefusalList = field(default_factory=RefusalList)
    num_unread: int = 0
    ignored: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    structures: Path | None = None


def as_msp(path: Path, scratch: Path) -> Converted:
    """Return an uncompressed MSP with the spectra of a file or folder.

    A plain MSP is returned as it is; byte ranges need an uncompressed one.
    """
    ignored: Counter[str] = Counter()
    if path.is_dir():
        named = _spectrum_files(path, ignored)
    else:
        named = [require_file(path, "the spectrum library")]
    plain = {each: _uncompressed(each, scratch) for each in named}
    forms = {each: format_of(plain[each], each) for each in named}
    if forms == {path: "msp"}:
        _refuse_other(plain[path], path)
        return Converted(plain[path])
    made = Converted(scratch / f"converted-{_name_of(named)}.msp", ignored=ignored)
    counts: Counter[SpectrumFormat] = Counter()

    def batches() -> Iterator[SpectrumBatch]:
        for each, form in forms.items():
            if form == "msp":
                spectra = _read_again(plain[each], each, made)
            else:
                spectra = _taken(_READERS[form][1](plain[each], each), each, made)
            for batch in spectra:
                counts[form] += len(batch.records)
                yield batch

    # Written again when a pack is resumed, because writing it collects the refusals.
    with (
        writing(made.path, always) as temporary,
        temporary.open("x", encoding="utf-8", newline="\n") as stream,
    ):
        write_msp(batches(), stream)
    words = {form: word for form, (word, _) in _READERS.items()}
    made.notes = [
        f"{count:,} records of {words.get(form, 'MSP')} read from {path.name}"
        for form, count in counts.items()
    ]
    if [*forms.values()] == ["sdf"]:
        made.structures = plain[named[0]]
    return made


def _refuse_other(plain: Path, path: Path) -> None:
    """Raise for a file that is no text of records: mzXML, JSON, an archive, a picture."""
    with plain.open("rb") as file:
        start = file.read(_HEAD_BYTES)
    other = name_kind(plain)
    if other is None and not start.startswith(b"\x89HDF"):
        return
    read = {"XML": "load_from_mzxml", "JSON": "load_from_json"}.get(other.what if other else "")
    read = read if read != "load_from_mzxml" or b"<mzXML" in start else None
    made = unused_beside(path, ".mgf")
    code = (
        f"from matchms.importing import {read} as load; from matchms.exporting import save_as_mgf as save; "
        f"save(list(load({str(path)!r})), {made!r})"
    )
    what = "mzXML" if read == "load_from_mzxml" else other.what if other else "an HDF5 file"
    raise SourceError(
        f"{path} is {what}.",
        "MSP, MGF, MassBank records, SDF with peaks, or mzML",
        command("python3", "-c", code) if read else command("file", path),
    )


def holds_spectra(path: Path) -> bool:
    """Return whether a file, or the first files of a folder, are spectra by their names or their content."""
    files = [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.is_file())
    for file in files[:20]:
        ending = _ending(file)
        if ending in _ENDINGS - {".txt"}:
            return True
        if ending == ".txt" and format_of(file) != "msp":
            return True
    return False


def _ending(path: Path) -> str:
    return (Path(path.stem) if path.suffix.lower() == ".gz" else path).suffix.lower()


def format_of(path: Path, named: Path | None = None) -> SpectrumFormat:
    """Detect the format of an uncompressed file by its first 64 KiB; endings decide for .sdf and .sd only."""
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    text = head.decode("latin-1").lstrip("\ufeff \t\r\n\x00")
    if re.match(r"<\?xml|<(?:indexed)?mzML", text) and "mzML" in text:
        return "mzml"
    if re.search(r"^BEGIN IONS", text, re.MULTILINE):
        return "mgf"
    if re.match(r"(?:.*\n){0,20}?ACCESSION: ", text) and re.search(
        r"^PK\$|^CH\$", text, re.MULTILINE
    ):
        return "massbank"
    if re.search(r"^\$\$\$\$|^M  END|^> +<", text, re.MULTILINE) or _ending(named or path) in (
        ".sdf",
        ".sd",
    ):
        return "sdf"
    return "msp"


def _spectrum_files(folder: Path, ignored: Counter[str]) -> list[Path]:
    """Return the files of a folder that are spectra by their names; count the others."""
    found = []
    for path in sorted(each for each in folder.rglob("*") if each.is_file()):
        ending = _ending(path)
        if any(part[:1] == "." for part in path.relative_to(folder).parts):
            ignored["hidden or system file"] += 1
        elif ending not in _ENDINGS:
            ignored[f"no spectra ({ending or 'no ending'})"] += 1
        else:
            found.append(path)
    if not found:
        raise SourceError(
            f"{folder} holds no spectra.",
            f"files ending in {', '.join(sorted(_ENDINGS))}",
            command("ls", folder),
        )
    return found


def _name_of(paths: Iterable[Path]) -> str:
    """Return a name for the output made of some files; it changes when a file changes."""
    digest = xxhash.xxh3_64()
    for path in paths:
        stat = path.stat()
        digest.update(f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode(errors="replace"))
    return digest.hexdigest()


def _uncompressed(path: Path, scratch: Path) -> Path:
    if not is_gzip(path):
        return path
    target = scratch / f"spectra-{_name_of([path])}.msp"
    if target.exists():  # left by the run that this one resumes
        return target
    try:
        with (
            gzip.open(path, "rb") as packed,
            writing(target, always) as temporary,
            temporary.open("xb") as plain,
        ):
            copy_to_disk(packed, plain, scratch, f"unpacking {path}")
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise SourceError(
            f"{str(path)!r} is a damaged gzip file: {error}", "", command("gzip", "-t", path)
        ) from error
    return target


# -- records -------------------------------------------------------------------------------------


@dataclass
class _Draft:
    """A record while it is read: `key: value` lines and peaks; or a line outside any record."""

    line: int
    fields: list[str] = field(default_factory=list)
    mz: list[float] = field(default_factory=list)
    intensity: list[float] = field(default_factory=list)
    size: int = 0
    problem: str = ""
    kind: str = UNREADABLE  # kind of the problem
    extra: dict[str, str] = field(default_factory=dict)

    def add(self, key: str, value: str) -> None:
        value = " ".join(value.split())
        # The writer adds the count of peaks itself; an invalid key could not be read back.
        if value and is_field_key(key.encode()) and spell(key).kind <= SYNONYM:
            self.fields.append(f"{key}: {value}")

    def has_name(self) -> bool:
        return any(line.startswith("name:") for line in self.fields)

    def add_peak(self, text: str) -> None:
        cells = re.split(r"[\s,;]+", text.strip())
        numbers = [cell for cell in cells[:2] if _NUMBER.fullmatch(cell)]
        if len(numbers) < 2:
            self.problem = self.problem or f"the peak {text.strip()[:60]!r} is no pair of numbers"
            return
        self.mz.append(float(numbers[0]))
        self.intensity.append(float(numbers[1]))

    def grow(self, size: int, path: Path) -> None:
        self.size += size
        RECORD.check(self.size, f"{path}: the record of line {self.line}", "cut the file")

    def find_problem(self) -> str:
        """Return why the record cannot be read, or ""."""
        mz, intensity = np.array(self.mz), np.array(self.intensity)
        if self.problem or not len(mz):
            return self.problem
        if not (np.isfinite(mz).all() and np.isfinite(intensity).all()):
            return "a peak is not finite"
        if mz.min() < 0 or intensity.min() < 0:
            return f"a peak is negative: m/z {mz.min():g}, intensity {intensity.min():g}"
        if intensity.max() > np.finfo(np.float32).max:
            return f"the intensity {intensity.max():g} is above the range of float32"
        return ""

    def spectrum(self, path: Path) -> SpectrumBatch:
        """Return the record as `write_msp` takes it."""
        folded = fold_header(self.fields, strict=False)
        assert folded is not None
        # Keys taken from a comment or an item may be invalid, and could not be read back.
        meta = {
            key: value
            for key, value in folded[0].items()
            if is_field_key(key.encode()) and spell(key).kind < SYNONYM
        }
        meta |= {"source_file": str(path), "source_line": str(self.line), **self.extra}
        return SpectrumBatch(
            [Record(self.line, meta, folded[1])],
            np.array(self.mz, dtype=np.float64),
            np.array(self.intensity, dtype=np.float32),
            np.array([0, len(self.mz)]),
        )


def _taken(drafts: Iterable[_Draft], path: Path, made: Converted) -> Iterator[SpectrumBatch]:
    """Yield the records of a file; one that cannot be read is refused."""
    for draft in drafts:
        if reason := draft.find_problem():
            fix = command("msconvert", path, *_PICKING) if reason == _IS_PROFILE else ""
            line = draft.line or None
            made.refused.append(Refusal(str(path), line, reason, kind=draft.kind, fix=fix))
            made.num_unread += draft.kind == UNREADABLE
        else:
            yield draft.spectrum(path)


def _read_again(plain: Path, path: Path, made: Converted) -> Iterator[SpectrumBatch]:
    """Read an MSP of a folder, and note the position of each record."""
    for batch in read_msp(plain):
        made.refused.extend(
            replace(each, file=str(path), kind=LINE_IN_RECORD) for each in batch.refused
        )
        for record in batch.records:
            record.meta.update(source_file=str(path), source_line=str(record.line))
        yield batch


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield numbered lines without their ends; bytes that are not UTF-8 are read as Latin-1."""
    number = 0
    with path.open("rb") as file:
        while raw := file.readline(RECORD.most + 1):
            RECORD.check(len(raw), f"{path}: one line", "cut the file")
            number += 1
            try:
                text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError:
                text = raw.decode("latin-1")
            yield number, text.rstrip("\r\n")


# -- formats -------------------------------------------------------------------------------------
# Readers of one file each: `plain` is read, `path` is its name in messages.


def _read_mgf(plain: Path, path: Path) -> Iterator[_Draft]:
    draft: _Draft | None = None
    common: list[tuple[str, str]] = []
    for number, line in _lines(plain):
        text = line.strip()
        if not text or text[0] in "#;!/":
            continue
        key, sign, value = text.partition("=")
        if text.upper() in ("BEGIN IONS", "END IONS"):
            is_end = text.upper() == "END IONS"
            if draft is not None:
                draft.problem = draft.problem if is_end else "the record has no END IONS"
                yield draft
            draft = None
            if not is_end:
                draft = _Draft(number)
                for pair in common:
                    _add_mgf(draft, *pair)
        elif draft is not None:
            draft.grow(len(line), path)
            if sign and not _NUMBER.match(text):
                _add_mgf(draft, key, value)
            else:
                draft.add_peak(text)
        elif sign:
            common.append((key, value))
        else:
            problem = f"{text[:60]!r} is outside a record"
            yield _Draft(number, problem=problem, kind="line outside a record")
    if draft is not None:
        draft.problem = "the file ends inside the record"
        yield draft


def _add_mgf(draft: _Draft, raw: str, value: str) -> None:
    key = raw.strip().lower()
    value = value.strip()
    if key == "title":
        draft.add("title", value)
        if not draft.has_name():
            draft.fields.append(f"compoundname: {value}")  # gives way to a NAME
        return
    if key == "pepmass":
        value = value.split()[0] if value.split() else ""
    if key == "rtinseconds":
        key, value = "retention_time", f"{value} s" if value else ""
    if (key in ("charge", "pepmass") and value.strip("+-.0") == "") or value in ("N/A", "NA"):
        return
    draft.add(_MGF_KEYS.get(key, key), value)


def _read_massbank(plain: Path, path: Path) -> Iterator[_Draft]:
    draft: _Draft | None = None
    in_peaks = False
    for number, line in _lines(plain):
        if line.strip() == "//":
            if draft is not None:
                yield draft
            draft = None
            continue
        if not line.strip():
            continue
        if draft is None:
            draft, in_peaks = _Draft(number), False
        draft.grow(len(line), path)
        if line[:1] in " \t":
            if in_peaks:
                draft.add_peak(line)
            continue
        key, _, value = map(str.strip, line.partition(": "))
        in_peaks = key == "PK$PEAK"
        name = _MASSBANK_KEYS.get(key, "")
        if key == "CH$NAME":
            name = "synon" if draft.has_name() else "name"
        elif not name:
            word, _, value = value.partition(" ")
            name, value = _MASSBANK_KEYS.get(f"{key} {word}", ""), value.strip()
        if name and (value != "N/A" or key == "CH$NAME"):
            draft.add(name, value)
    if draft is not None:
        draft.problem = "the record has no // at its end"
        yield draft


def _read_sdf(plain: Path, path: Path) -> Iterator[_Draft]:
    draft, title, item, has_text, num_records = _Draft(1), "", "", False, 0
    for number, line in itertools.chain(_lines(plain), [(0, "$$$$")]):  # the last may have no end
        if line[:4] == "$$$$":
            if has_text:
                if not draft.has_name():
                    draft.add("name", title)
                draft.extra[SDF_RECORD] = str(num_records)
                yield draft
                num_records += 1
            draft, title, item, has_text = _Draft(number + 1), "", "", False
            continue
        draft.grow(len(line), path)
        has_text = has_text or bool(line.strip())
        if number == draft.line:
            title = line.strip()
        if line[:1] == ">" and "<" in line:
            item = line.partition("<")[2].partition(">")[0].strip().lower()
        elif not line.strip():
            item = ""
        elif item == _PEAKS_ITEM:
            draft.add_peak(line)
        elif item in ("synonyms", "synonym"):
            draft.add("synon", line)
        elif item == "comment" and "=" in line:
            draft.add(*map(str.strip, line.split("=", 1)))
        elif item and item != "num peaks":
            draft.add(item, line)


# -- mzML -------------------------------------------------------------------------------------------
# Existing readers need lxml and a controlled vocabulary that they fetch; what a pack needs are a dozen terms. Arrays
# are 32- or 64-bit floats, plain or zlib; numpress and profile spectra, whose peaks must be picked first, are refused
# by name.


_PROFILE = "MS:1000128"
_IS_PROFILE = "it is a profile spectrum: peaks must be picked first"
_PICKING = ("--filter", "peakPicking true 1-", "-o", "picked")
_MZ, _INTENSITY = "MS:1000514", "MS:1000515"
_TYPES = {"MS:1000523": "<f8", "MS:1000521": "<f4", "MS:1000519": "<i4", "MS:1000522": "<i8"}
_PLAIN, _ZLIB = "MS:1000576", "MS:1000574"
_TERMS = {
    "MS:1000511": "ms_level",
    "MS:1000016": "retention_time",
    "MS:1000744": "precursor_mz",
    "MS:1000041": "charge",
    "MS:1000045": "collision_energy",
}
_MODES = {"MS:1000130": "positive", "MS:1000129": "negative"}
_SOURCES = {
    "MS:1000389": "EI",
    "MS:1000071": "CI",
    "MS:1000073": "ESI",
    "MS:1000398": "ESI",
    "MS:1000070": "APCI",
    "MS:1000075": "MALDI",
}

Terms = dict[str, tuple[str, str]]  # accession to value and unit


def _read_mzml(plain: Path, path: Path) -> Iterator[_Draft]:
    """Read a file from first to last; the line of a draft is the number of its spectrum."""
    groups: dict[str, Terms] = {}
    parent: ElementTree.Element | None = None
    ionization, number = "", 0
    try:
        for event, element in ElementTree.iterparse(plain, events=("start", "end")):
            tag = _tag(element)
            if event == "start":
                if tag == "spectrumList":
                    parent = element
            elif tag == "referenceableParamGroup":
                groups[element.get("id", "")] = _own_terms(element, {})
            elif tag == "spectrum":
                yield _spectrum(element, groups, number + 1, ionization)
                number += 1
                if parent is not None:
                    parent.clear()  # or every spectrum stays in memory
            elif tag == "instrumentConfiguration":
                named = [term for each in element.iter() for term in _own_terms(each, groups)]
                ionization = next(
                    (_SOURCES[term] for term in named if term in _SOURCES), ionization
                )
            elif tag == "chromatogram":
                element.clear()
            elif tag == "run" and not number:
                yield _Draft(0, problem="it holds no spectrum; chromatograms are not read")
    except SourceError:  # a spectrum that claims to exceed the limit of one record
        raise
    except (ElementTree.ParseError, ValueError) as error:  # no whole XML, or a number that is none
        raise SourceError(
            f"{path} cannot be read as mzML after spectrum {number}: {error}.",
            "an intact mzML file",
            command("head", "-c", "1000", path),
        ) from error


def _tag(element: ElementTree.Element) -> str:
    """Return the name of an element without its namespace."""
    return element.tag.rpartition("}")[2]


def _own_terms(element: ElementTree.Element, groups: Mapping[str, Terms]) -> Terms:
    """Return the terms of an element itself, with those of the groups it names."""
    terms: Terms = {}
    for child in element:
        if _tag(child) == "referenceableParamGroupRef":
            terms |= groups.get(child.get("ref", ""), {})
        elif _tag(child) == "cvParam":
            terms[child.get("accession", "")] = child.get("value", ""), child.get("unitName", "")
    return terms


def _spectrum(
    element: ElementTree.Element, groups: Mapping[str, Terms], number: int, ionization: str
) -> _Draft:
    made, identifier = _Draft(number), element.get("id", "")
    length = int(element.get("defaultArrayLength") or 0)
    RECORD.check(8 * length, f"the spectrum {identifier!r}")
    meta = {"name": identifier or f"spectrum {number}", "id": identifier}
    arrays: dict[str, list[float]] = {}
    for each in element.iter():
        terms = _own_terms(each, groups)
        if _tag(each) == "binaryDataArray":
            if name := next((term for term in (_MZ, _INTENSITY) if term in terms), ""):
                own = int(each.get("arrayLength") or length)
                arrays[name], problem = _decode(each, terms, own)
                made.problem = made.problem or problem
            continue
        for accession, (value, unit) in terms.items():
            if accession in _TERMS and value:
                key = _TERMS[accession]
                # The unit matters for times only.
                text = f"{value} {unit}".strip() if key == "retention_time" else value
                meta.setdefault(key, text)
            elif accession in _MODES:
                meta["ion_mode"] = _MODES[accession]
            elif accession == _PROFILE:
                made.problem = _IS_PROFILE
    made.mz, made.intensity = arrays.get(_MZ, []), arrays.get(_INTENSITY, [])
    if len(made.mz) != len(made.intensity):
        unequal = f"it has {len(made.mz)} m/z and {len(made.intensity)} intensities"
        made.problem = made.problem or unequal
    for key, value in (*meta.items(), ("ionization", ionization)):
        made.add(key, value)
    return made


def _decode(element: ElementTree.Element, terms: Terms, length: int) -> tuple[list[float], str]:
    """Return the values of one array, or why not."""
    kind = next((_TYPES[term] for term in terms if term in _TYPES), "")
    if not kind or not ({_PLAIN, _ZLIB} & terms.keys()):
        return [], "its arrays are packed by numpress or another method that is not read"
    text = next((child.text or "" for child in element if _tag(child) == "binary"), "")
    num_bytes = length * np.dtype(kind).itemsize
    try:
        raw = base64.b64decode(text, validate=False)
        if _ZLIB in terms and raw:
            raw = zlib.decompressobj().decompress(raw, num_bytes + 1)
    except (binascii.Error, zlib.error) as error:
        return [], f"its arrays are damaged: {error}"
    if len(raw) != num_bytes:
        return [], f"an array has {len(raw):,} bytes where {length:,} values need {num_bytes:,}"
    values: list[float] = np.frombuffer(raw, kind).astype(np.float64).tolist()
    return values, ""


_READERS: dict[SpectrumFormat, tuple[str, Callable[[Path, Path], Iterable[_Draft]]]] = {
    "mgf": ("MGF", _read_mgf),
    "massbank": ("MassBank", _read_massbank),
    "sdf": ("SDF", _read_sdf),
    "mzml": ("mzML", _read_mzml),
}
"""Name for people, and the reader; an MSP among other files is read by `_read_again`."""
