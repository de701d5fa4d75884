"""Spectrum files of other formats, turned into MSP once: MGF, MassBank records, SDF with peaks, mzML, folders of them.

Enters: a file or a folder. Leaves: an MSP file in the scratch folder, which the one engine then reads in parallel, and
what was refused. Every record carries `source_file` and `source_line`, so that messages name the file that was given.
Costs: one pass in one process, about 10 MB/s of text; disk for the MSP.

The format is told by the content, not by the name. Of a folder all files that are spectra are read, in the order of
their names; other files are ignored and counted.
"""

from __future__ import annotations

import base64
import binascii
import gzip
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Literal
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
from stoker.store.foreign import name_kind

SpectrumFormat = Literal["msp", "mgf", "massbank", "sdf", "mzml"]
SDF_RECORD = "sdf_record"
"""Metadata key: number of the record in the SDF, from 0; its own MOL block is the structure."""

UNREADABLE = "unreadable record"  # kind of refused records of which nothing was taken
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
}  # fmt: skip
_MASSBANK_SUBKEYS = {
    "CH$LINK INCHIKEY": "inchikey",
    "CH$LINK CAS": "cas",
    "AC$MASS_SPECTROMETRY MS_TYPE": "ms_level",
    "AC$MASS_SPECTROMETRY ION_MODE": "ion_mode",
    "AC$MASS_SPECTROMETRY COLLISION_ENERGY": "collision_energy",
    "AC$MASS_SPECTROMETRY IONIZATION": "ionization",
    "AC$CHROMATOGRAPHY RETENTION_TIME": "retention_time",
    "AC$CHROMATOGRAPHY KOVATS_RTI": "ri",
    "MS$FOCUSED_ION PRECURSOR_M/Z": "precursor_mz",
    "MS$FOCUSED_ION PRECURSOR_TYPE": "precursor_type",
}


@dataclass
class Converted:
    """An MSP made of other files, and what was not taken: `num_unread` records are among `refused`.

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
    if path.is_dir():
        return _convert_folder(path, scratch)
    plain = _uncompressed(require_file(path, "the spectrum library"), scratch)
    form = format_of(plain, path)
    if form == "msp":
        _refuse_other(plain, path)
        return Converted(plain)
    return _convert([(plain, path, form)], path, scratch)


def _refuse_other(plain: Path, path: Path) -> None:
    """Raise for a file that is no text of records: mzXML, JSON, an archive, a picture."""
    with plain.open("rb") as file:
        start = file.read(_HEAD_BYTES)
    other = name_kind(plain)
    if other is None and not start.startswith(b"\x89HDF"):
        return
    read = {"XML": "load_from_mzxml", "JSON": "load_from_json"}.get(other.what if other else "")
    read = read if read != "load_from_mzxml" or b"<mzXML" in start else None
    made = str(path.with_suffix(".mgf"))
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
    """Tell the format of an uncompressed file by its first 64 KiB, and by its ending where these are empty."""
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


def _uncompressed(path: Path, scratch: Path) -> Path:
    if not is_gzip(path):
        return path
    facts = path.stat()
    target = scratch / f"spectra-{facts.st_size}-{facts.st_mtime_ns}.msp"
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


def _convert_folder(folder: Path, scratch: Path) -> Converted:
    files, ignored = [], Counter[str]()
    for path in sorted(each for each in folder.rglob("*") if each.is_file()):
        ending = _ending(path)
        if any(part[:1] == "." for part in path.relative_to(folder).parts):
            ignored["hidden or system file"] += 1
        elif ending not in _ENDINGS:
            ignored[f"no spectra ({ending or 'no ending'})"] += 1
        else:
            plain = _uncompressed(path, scratch)
            files.append((plain, path, format_of(plain, path)))
    if not files:
        raise SourceError(
            f"{folder} holds no spectra.",
            f"files ending in {', '.join(sorted(_ENDINGS))}",
            command("ls", folder),
        )
    made = _convert(files, folder, scratch)
    made.ignored = ignored
    return made


def _convert(
    files: Sequence[tuple[Path, Path, SpectrumFormat]], named: Path, scratch: Path
) -> Converted:
    digest = xxhash.xxh3_64()
    for plain, path, form in files:
        stat = plain.stat()
        digest.update(
            f"{path}\0{form}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode(errors="replace")
        )
    made = Converted(scratch / f"converted-{digest.hexdigest()}.msp")
    counts: Counter[str] = Counter()

    def batches() -> Iterator[SpectrumBatch]:
        for plain, path, form in files:
            for batch in _READERS[form](plain, path, made):
                counts[form] += len(batch.records)
                yield batch

    # Written again when a pack is resumed: what was refused is found on the way.
    with (
        writing(made.path, always) as temporary,
        temporary.open("x", encoding="utf-8", newline="\n") as stream,
    ):
        write_msp(batches(), stream)
    words = {"mgf": "MGF", "massbank": "MassBank", "sdf": "SDF", "mzml": "mzML", "msp": "MSP"}
    made.notes = [
        f"{count:,} records of {words[form]} read from {named.name}"
        for form, count in counts.items()
    ]
    if [form for _, _, form in files] == ["sdf"]:
        made.structures = files[0][0]
    return made


# -- records -------------------------------------------------------------------------------------


@dataclass
class _Draft:
    """A record while it is read: `key: value` lines and peaks."""

    line: int
    fields: list[str] = field(default_factory=list)
    mz: list[float] = field(default_factory=list)
    intensity: list[float] = field(default_factory=list)
    size: int = 0
    problem: str = ""
    extra: dict[str, str] = field(default_factory=dict)

    def add(self, key: str, value: str) -> None:
        value = " ".join(value.split())
        # A count of peaks is the writer's own, and a key that is none could not be read back.
        if value and is_field_key(key.encode()) and spell(key).kind <= SYNONYM:
            self.fields.append(f"{key}: {value}")

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


def _taken(draft: _Draft, path: Path, made: Converted) -> Iterator[SpectrumBatch]:
    """Yield a finished record of a file as `write_msp` takes it; one that cannot be read is refused."""
    if reason := draft.problem or _bad_peaks(draft):
        made.refused.append(Refusal(str(path), draft.line, reason, kind=UNREADABLE))
        made.num_unread += 1
        return
    folded = fold_header(draft.fields, strict=False)
    assert folded is not None
    meta, synonyms = folded
    # Names of keys that a comment or an item made up may not be readable again.
    meta = {
        key: value
        for key, value in meta.items()
        if is_field_key(key.encode()) and spell(key).kind < SYNONYM
    }
    meta |= {"source_file": str(path), "source_line": str(draft.line), **draft.extra}
    yield SpectrumBatch(
        [Record(draft.line, meta, synonyms)],
        np.array(draft.mz, dtype=np.float64),
        np.array(draft.intensity, dtype=np.float32),
        np.array([0, len(draft.mz)]),
    )


def _bad_peaks(draft: _Draft) -> str:
    mz, intensity = np.array(draft.mz), np.array(draft.intensity)
    if not len(mz):
        return ""
    if not (np.isfinite(mz).all() and np.isfinite(intensity).all()):
        return "a peak is not finite"
    if mz.min() < 0 or intensity.min() < 0:
        return f"a peak is negative: m/z {mz.min():g}, intensity {intensity.min():g}"
    if intensity.max() > np.finfo(np.float32).max:
        return f"the intensity {intensity.max():g} is above the range of float32"
    return ""


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield numbered lines without their ends; bytes that are not UTF-8 are read as Latin-1."""
    with path.open("rb") as file:
        for number, raw in enumerate(_bounded(file, path), 1):
            try:
                text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError:
                text = raw.decode("latin-1")
            yield number, text.rstrip("\r\n")


def _bounded(file: IO[bytes], path: Path) -> Iterator[bytes]:
    while raw := file.readline(RECORD.most + 1):
        RECORD.check(len(raw), f"{path}: one line", "cut the file")
        yield raw


# -- formats -------------------------------------------------------------------------------------


def _read_mgf(plain: Path, path: Path, made: Converted) -> Iterator[SpectrumBatch]:
    draft: _Draft | None = None
    common: list[tuple[str, str]] = []
    for number, line in _lines(plain):
        text = line.strip()
        word = text.upper()
        if not text or text[0] in "#;!/":
            continue
        if word == "BEGIN IONS":
            if draft is not None:
                draft.problem = "the record has no END IONS"
                yield from _taken(draft, path, made)
            draft = _Draft(number)
            for key, value in common:
                _add_mgf(draft, key, value)
        elif word == "END IONS":
            if draft is not None:
                yield from _taken(draft, path, made)
            draft = None
        elif draft is None:
            key, sign, value = text.partition("=")
            if sign:
                common.append((key, value))
            else:
                reason, kind = f"{text[:60]!r} is outside a record", "line outside a record"
                made.refused.append(Refusal(str(path), number, reason, kind=kind))
        else:
            draft.grow(len(line), path)
            key, sign, value = text.partition("=")
            if sign and not _NUMBER.match(text):
                _add_mgf(draft, key, value)
            else:
                draft.add_peak(text)
    if draft is not None:
        draft.problem = "the file ends inside the record"
        yield from _taken(draft, path, made)


def _add_mgf(draft: _Draft, raw: str, value: str) -> None:
    key = raw.strip().lower()
    value = value.strip()
    if key == "title":
        draft.add("title", value)
        if not any(line[:5] == "name:" for line in draft.fields):
            draft.fields.append(f"compoundname: {value}")  # gives way to a NAME
        return
    if key == "pepmass":
        value = value.split()[0] if value.split() else ""
    if key == "rtinseconds":
        key, value = "retention_time", f"{value} s" if value else ""
    if (key in ("charge", "pepmass") and value.strip("+-.0") == "") or value in ("N/A", "NA"):
        return
    draft.add(_MGF_KEYS.get(key, key), value)


def _read_massbank(plain: Path, path: Path, made: Converted) -> Iterator[SpectrumBatch]:
    draft: _Draft | None = None
    in_peaks = False
    for number, line in _lines(plain):
        if line.strip() == "//":
            if draft is not None:
                yield from _taken(draft, path, made)
            draft, in_peaks = None, False
            continue
        if not line.strip():
            continue
        if draft is None:
            draft = _Draft(number)
        draft.grow(len(line), path)
        if line[:1] in " \t":
            if in_peaks:
                draft.add_peak(line)
            continue
        in_peaks = False
        key, _, value = line.partition(": ")
        key, value = key.strip(), value.strip()
        if key == "PK$PEAK":
            in_peaks = True
        elif key == "CH$NAME":
            named = any(entry[:6] == "name: " for entry in draft.fields)
            draft.add("synon" if named else "name", value)
        elif key in _MASSBANK_KEYS:
            if value != "N/A":
                draft.add(_MASSBANK_KEYS[key], value)
        else:
            word, _, rest = value.partition(" ")
            if (name := _MASSBANK_SUBKEYS.get(f"{key} {word}")) and rest.strip() != "N/A":
                draft.add(name, rest)
    if draft is not None:
        draft.problem = "the record has no // at its end"
        yield from _taken(draft, path, made)


def _read_sdf(plain: Path, path: Path, made: Converted) -> Iterator[SpectrumBatch]:
    number_of_record = 0
    draft, title, item, in_items, has_text = _Draft(1), "", "", False, False
    first = 1

    def finish() -> Iterator[SpectrumBatch]:
        if not any(entry[:5] == "name:" for entry in draft.fields):
            draft.add("name", title)
        draft.extra[SDF_RECORD] = str(number_of_record)
        yield from _taken(draft, path, made)

    for number, line in _lines(plain):
        if line[:4] == "$$$$":
            if has_text:
                yield from finish()
                number_of_record += 1
            draft, title, item, in_items, has_text = _Draft(number + 1), "", "", False, False
            first = number + 1
            continue
        draft.grow(len(line), path)
        has_text = has_text or bool(line.strip())
        if number == first:
            title = line.strip()
        if line[:1] == ">" and "<" in line:
            in_items = True
            item = line.partition("<")[2].partition(">")[0].strip().lower()
        elif in_items and not line.strip():
            item = ""
        elif in_items and item == _PEAKS_ITEM:
            draft.add_peak(line)
        elif in_items and item in ("synonyms", "synonym"):
            draft.add("synon", line)
        elif in_items and item == "comment" and "=" in line:
            draft.add(*(part.strip() for part in line.split("=", 1)))
        elif in_items and item and item != "num peaks":
            draft.add(item, line)
    if has_text:
        yield from finish()


def _read_mzml(plain: Path, path: Path, made: Converted) -> Iterator[SpectrumBatch]:
    number = 0
    try:
        for draft in _mzml_drafts(plain):
            number = draft.line
            yield from _taken(draft, path, made)
    except SourceError:
        raise
    except (ElementTree.ParseError, ValueError) as error:
        raise SourceError(
            f"{path} cannot be read as mzML behind spectrum {number}: {error}.",
            "an intact mzML file",
            command("head", "-c", "1000", path),
        ) from error


def _read_again(plain: Path, path: Path, made: Converted) -> Iterator[SpectrumBatch]:
    """Read an MSP of a folder, and note where each record stands."""
    for batch in read_msp(plain):
        made.refused.extend(
            Refusal(str(path), each.line, each.reason, each.unit, each.count, "line in a record")
            for each in batch.refused
        )
        for record in batch.records:
            record.meta.update(source_file=str(path), source_line=str(record.line))
        yield batch


_READERS: dict[SpectrumFormat, Callable[[Path, Path, Converted], Iterable[SpectrumBatch]]] = {
    "msp": _read_again,
    "mgf": _read_mgf,
    "massbank": _read_massbank,
    "sdf": _read_sdf,
    "mzml": _read_mzml,
}


# -- mzML -------------------------------------------------------------------------------------------
# Existing readers need lxml and a controlled vocabulary that they fetch; what a pack needs are a dozen terms. Arrays
# are 32- or 64-bit floats, plain or zlib; numpress and profile spectra, whose peaks must be picked first, are refused
# by name.


_LEVEL, _PROFILE = "MS:1000511", "MS:1000128"
_MZ, _INTENSITY = "MS:1000514", "MS:1000515"
_TYPES = {"MS:1000523": "<f8", "MS:1000521": "<f4", "MS:1000519": "<i4", "MS:1000522": "<i8"}
_PLAIN, _ZLIB = "MS:1000576", "MS:1000574"
_TERMS = {
    _LEVEL: "ms_level",
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
# Of these the unit is worth keeping.
_WITH_UNIT = ("retention_time",)

Terms = dict[str, tuple[str, str]]  # accession to value and unit


def _mzml_drafts(path: Path) -> Iterator[_Draft]:
    """Read a file from first to last; the line of a draft is the number of its spectrum.

    Raises:
        ElementTree.ParseError: It is not whole XML.
        SourceError: A spectrum claims more than the limit of one record.
        ValueError: A number in it is none.
    """
    groups: dict[str, Terms] = {}
    parent: ElementTree.Element | None = None
    ionization, number = "", 0
    for event, element in ElementTree.iterparse(path, events=("start", "end")):
        tag = element.tag.rpartition("}")[2]
        if event == "start":
            if tag == "spectrumList":
                parent = element
            continue
        if tag == "referenceableParamGroup":
            groups[element.get("id", "")] = _own_terms(element, {})
        elif tag == "spectrum":
            number += 1
            yield _spectrum(element, groups, number, ionization)
            if parent is not None:
                parent.clear()  # or every spectrum stays in memory
        elif tag == "instrumentConfiguration":
            named = [term for each in element.iter() for term in _own_terms(each, groups)]
            ionization = next((_SOURCES[term] for term in named if term in _SOURCES), ionization)
        elif tag == "chromatogram":
            element.clear()


def _own_terms(element: ElementTree.Element, groups: Mapping[str, Terms]) -> Terms:
    """Return the terms of an element itself, with those of the groups it names."""
    terms: Terms = {}
    for child in element:
        tag = child.tag.rpartition("}")[2]
        if tag == "referenceableParamGroupRef":
            terms |= groups.get(child.get("ref", ""), {})
        elif tag == "cvParam":
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
        if each.tag.rpartition("}")[2] == "binaryDataArray":
            name = next((term for term in (_MZ, _INTENSITY) if term in terms), "")
            if name:
                own = int(each.get("arrayLength") or length)
                arrays[name], problem = _decode(each, terms, own)
                made.problem = made.problem or problem
            continue
        for accession, (value, unit) in terms.items():
            if accession in _TERMS and value:
                key = _TERMS[accession]
                meta.setdefault(key, f"{value} {unit}".strip() if key in _WITH_UNIT else value)
            elif accession in _MODES:
                meta["ion_mode"] = _MODES[accession]
            elif accession == _PROFILE:
                made.problem = "it is a profile spectrum: peaks must be picked first"
    made.mz, made.intensity = arrays.get(_MZ, []), arrays.get(_INTENSITY, [])
    if len(made.mz) != len(made.intensity):
        made.problem = (
            made.problem or f"it has {len(made.mz)} m/z and {len(made.intensity)} intensities"
        )
    for key, value in (*meta.items(), ("ionization", ionization)):
        made.add(key, value)
    return made


def _decode(element: ElementTree.Element, terms: Terms, length: int) -> tuple[list[float], str]:
    """Return the values of one array, or why not."""
    kind = next((_TYPES[term] for term in terms if term in _TYPES), "")
    if not kind or not ({_PLAIN, _ZLIB} & terms.keys()):
        return [], "its arrays are packed by numpress or another method that is not read"
    text = next(
        (child.text or "" for child in element if child.tag.rpartition("}")[2] == "binary"), ""
    )
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
