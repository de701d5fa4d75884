"""The molecule of a record: mended if a line is missing, and checked against the record.

Enters: the text of a MOL block, a SMILES or an InChI, and the record's metadata. Leaves: the molecule, or why not, with
the values of both. Costs: about 20 µs for the check; 250 µs more if a record has an InChIKey, but no formula or mass.

A structure that was found by an id or a name may be another compound's: formula, mass, and where both are absent the
InChIKey, must agree with what the record says.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from stoker.sources.molecules.packed import Mol, StructureForm, compound_key, toolkit

INCHIKEY = re.compile(r"[A-Z]{14}(-[A-Z]{10}(-[A-Z])?)?")
_END = "M  END"
_TERM = re.compile(r"(\[\d+[A-Z][a-z]?\]|[A-Z][a-z]?)(\d*)")
_ISOTOPES = {"D": "H", "T": "H"}
_SAME_MASS = 2e-5


def healed(text: str) -> tuple[str, bool]:
    """Return a MOL block with its `M  END`, and whether that line had to be added."""
    if f"\n{_END}" in text:
        return text, False
    lines = text.splitlines()
    if len(lines) < 5 or not lines[3].strip():
        return text, False  # no atoms to end: the parser reports what is wrong
    ends = (n for n, line in enumerate(lines) if n > 2 and line.startswith((">", "$$$$")))
    stop = next(ends, len(lines))
    while stop > 4 and not lines[stop - 1].strip():
        stop -= 1
    return "\n".join([*lines[:stop], _END, *lines[stop:]]), True


def own_structure(meta: Mapping[str, str]) -> tuple[str, StructureForm] | None:
    """Return the SMILES of a record, else its InChI; None where it has neither."""
    # Values of a repeated key arrive joined; any of them will do.
    if smiles := meta.get("smiles", "").partition("; ")[0]:
        return smiles, "smiles"
    inchi = meta.get("inchi", "").partition("; ")[0].strip().strip('"')
    if inchi:
        return (inchi if inchi[:6] == "InChI=" else f"InChI={inchi}"), "inchi"
    return None


def mismatch(mol: Mol, meta: Mapping[str, Any], where: str, mass: float) -> str:
    """Return how a structure contradicts its record, with both values; empty when it does not.

    `where` says where the structure is from; `mass` is its monoisotopic mass.
    """
    written = str(meta.get("formula") or "")
    # The usual case saves RDKit's formula (13 µs): different formulas do not have masses as close as this.
    if abs(_formula_mass(written) - mass) < _SAME_MASS:
        return ""
    found = toolkit().formula(mol) if written else ""
    if written and written == found:  # Hill order, as most records write it
        return ""
    given = elements(written)
    if given:
        # With the same elements the mass can differ by isotopes only, which many records leave out.
        # H162+ may also be H16 with two charges.
        if elements(found) in (given, elements(re.sub(r"\d[+-]\Z", "", written))):
            return ""
        return f"{where} is {found}, and the record says {meta['formula']}"
    if exact := _number(meta.get("exact_mass")):
        if abs(mass - exact) <= 0.1:
            return ""
        return f"{where} has the mass {mass:.4f}, and the record says {meta['exact_mass']}"
    if weight := _number(meta.get("mw")):
        # A nominal, a monoisotopic or an average mass: libraries write any of them.
        nearest = min(abs(mass - weight), abs(toolkit().average_mass(mol) - weight))
        if nearest <= max(1.0, 0.005 * weight):
            return ""
        return f"{where} has the mass {mass:.4f}, and the record says MW {meta['mw']}"
    key = str(meta.get("inchikey") or "").strip().upper()
    if INCHIKEY.fullmatch(key):
        found = compound_key(mol)
        if re.fullmatch(r"[A-Z]{14}", found) and found != key.partition("-")[0]:
            return f"{where} has the InChIKey {found}, and the record says {key}"
    return ""


@lru_cache(maxsize=4096)
def elements(formula: str) -> dict[str, int]:
    """Return the atoms of a formula without its charge; {} if it cannot be read with certainty.

    Only element symbols and counts are certain; isotopes count as their element.
    """
    text = re.sub(r"[\s]", "", formula)
    # A number before the sign belongs to the charge only after ] or ^: N2+ has two N.
    text = re.sub(r"(?:(?<=\])\d*[+-]+|\^\d*[+-]+|[+-]+\d*)\Z", "", text)
    text = (
        text.removeprefix("[").removesuffix("]") if text[:1] == "[" and text[-1:] == "]" else text
    )
    counted: Counter[str] = Counter()
    position = 0
    for term in _TERM.finditer(text):
        if term.start() != position:
            return {}
        position = term.end()
        symbol = re.sub(r"[\[\]\d]", "", term[1])
        counted[_ISOTOPES.get(symbol, symbol)] += int(term[2] or 1)
    return dict(+counted) if position == len(text) and set(counted) <= _SYMBOLS else {}


@lru_cache(maxsize=4096)
def _formula_mass(formula: str) -> float:
    common = toolkit().chem.GetPeriodicTable().GetMostCommonIsotopeMass
    return float(sum(count * common(symbol) for symbol, count in elements(formula).items()))


_SYMBOLS = frozenset(
    re.findall(
        "[A-Z][a-z]?",
        "HHeLiBeBCNOFNeNaMgAlSiPSClArKCaScTiVCrMnFeCoNiCuZnGaGeAsSeBrKrRbSrYZrNbMoTcRuRhPdAgCdInSnSbTeIXe"
        "CsBaLaCePrNdPmSmEuGdTbDyHoErTmYbLuHfTaWReOsIrPtAuHgTlPbBiPoAtRnFrRaAcThPaUNpPuAmCm",
    )
)


def _number(text: Any) -> float | None:
    try:
        number = float(str(text or "").split(";")[0])
    except ValueError:
        return None
    return number if 0 < number < 1e6 else None
