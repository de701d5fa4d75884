"""The spectra of an mzML file, one at a time, with the standard library alone.

Enters: an uncompressed file. Leaves: identifier, conditions and peaks of each spectrum; a reason where its peaks cannot
be read. Costs: one pass of the XML parser; memory for one spectrum.

Existing readers need lxml and a controlled vocabulary that they fetch; what a pack needs are a dozen terms. Arrays
are 32- or 64-bit floats, plain or zlib. Numpress and other encodings are refused by name, and so are profile spectra,
whose peaks must be picked first.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

import numpy as np

from stoker.bounds import RECORD

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

Terms = dict[str, tuple[str, str]]
"""Accession to value and unit."""


@dataclass
class MzmlSpectrum:
    """One spectrum.

    Attributes:
        identifier: Its native id.
        meta: Conditions, by the keys of MSP metadata.
        mz: m/z of the peaks.
        intensity: Beside them.
        problem: Why the peaks cannot be used; empty when they can.
    """

    identifier: str
    meta: dict[str, str] = field(default_factory=dict)
    mz: list[float] = field(default_factory=list)
    intensity: list[float] = field(default_factory=list)
    problem: str = ""


def read_spectra(path: Path) -> Iterator[MzmlSpectrum]:
    """Read a file from first to last.

    Raises:
        ElementTree.ParseError: It is not whole XML.
        SourceError: A spectrum claims more than the limit of one record.
        ValueError: A number in it is none.
    """
    groups: dict[str, Terms] = {}
    parent: ElementTree.Element | None = None
    ionization = ""
    for event, element in ElementTree.iterparse(path, events=("start", "end")):
        tag = element.tag.rpartition("}")[2]
        if event == "start":
            if tag == "spectrumList":
                parent = element
            continue
        if tag == "referenceableParamGroup":
            groups[element.get("id", "")] = _own_terms(element, {})
        elif tag == "spectrum":
            made = _spectrum(element, groups)
            if ionization:
                made.meta["ionization"] = ionization
            yield made
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


def _spectrum(element: ElementTree.Element, groups: Mapping[str, Terms]) -> MzmlSpectrum:
    made = MzmlSpectrum(element.get("id", ""))
    length = int(element.get("defaultArrayLength") or 0)
    RECORD.check(8 * length, f"the spectrum {made.identifier!r}")
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
                made.meta.setdefault(key, f"{value} {unit}".strip() if key in _WITH_UNIT else value)
            elif accession in _MODES:
                made.meta["ion_mode"] = _MODES[accession]
            elif accession == _PROFILE:
                made.problem = "it is a profile spectrum: peaks must be picked first"
    made.mz, made.intensity = arrays.get(_MZ, []), arrays.get(_INTENSITY, [])
    if len(made.mz) != len(made.intensity):
        made.problem = (
            made.problem or f"it has {len(made.mz)} m/z and {len(made.intensity)} intensities"
        )
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
