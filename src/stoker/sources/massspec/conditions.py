"""Measurement conditions of a spectrum: EI or MS/MS, precursor, adduct, energy, instrument, retention index.

Enters: the normalised metadata of a record. Leaves: its kind of spectrum, and the text of each condition. Costs: some
dictionary lookups a record.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Literal

SpectrumKind = Literal["EI", "MS/MS", "MS1"]

KINDS: tuple[SpectrumKind, ...] = ("EI", "MS/MS", "MS1")
CONDITIONS = {
    "precursor_mz": ("precursor_mz",),
    "adduct": ("precursor_type", "adduct"),
    "charge": ("charge",),
    "ion_mode": ("ion_mode",),
    "collision_energy": ("collision_energy",),
    "instrument": ("instrument", "source_instrument"),
    "instrument_type": ("instrument_type",),
    "ms_level": ("ms_level", "spectrum_type"),
    "retention_index": ("ri",),
    "retention_time": ("retention_time", "rtinseconds"),
}
"""Field of the store to the metadata keys that give it; the first key present is used."""

_EI = re.compile(r"(?:\A|[^A-Z])(?:EI|GC|CI-B)(?:[^A-Z]|\Z)|ELECTRON IONI[SZ]ATION|ELECTRON IMPACT")
_SOFT = re.compile(r"(?:\A|[^A-Z])(?:ESI|APCI|APPI|MALDI|LC|NSI|FAB|HESI|DI)(?:[^A-Z]|\Z)")
_EI_ADDUCTS = {"", "[M]+", "[M]+.", "[M]+*", "M+", "M+.", "[M]"}


def spectrum_kind(meta: Mapping[str, str]) -> SpectrumKind:
    """Return what kind of spectrum a record is.

    In this order: a level of 2 or more is MS/MS; an instrument or ionisation of electron impact is EI; a level of 1 is
    MS1; a soft ionisation, an adduct, a collision energy or a precursor m/z is MS/MS. A record without any of these
    signs is EI, as in the libraries of NIST.
    """
    adduct = meta.get("precursor_type") or meta.get("adduct", "")
    signs = adduct not in _EI_ADDUCTS or "collision_energy" in meta or "precursor_mz" in meta
    # Few combinations in a library of many records: the regular expressions run once for each.
    return _kind(
        meta.get("ms_level") or meta.get("spectrum_type", ""),
        meta.get("instrument_type", ""),
        meta.get("ionization", ""),
        meta.get("instrument", ""),
        signs,
    )


@lru_cache(maxsize=1024)
def _kind(
    level_text: str, instrument_type: str, ionization: str, instrument: str, signs: bool
) -> SpectrumKind:
    level = _level(level_text.strip().upper())
    if level is not None and level >= 2:
        return "MS/MS"
    about = f"{instrument_type} {ionization} {instrument}".upper()
    if _EI.search(about):
        return "EI"
    if level == 1:
        return "MS1"
    return "MS/MS" if signs or _SOFT.search(about) else "EI"


def _level(text: str) -> int | None:
    if text in ("MS/MS", "MSMS"):
        return 2
    digits = re.fullmatch(r"(?:MS[ ^]*)?(\d)", text)
    return int(digits[1]) if digits else None


ADDUCTS = (
    "[M+H]+", "[M-H]-", "[M+Na]+", "[M+NH4]+", "[M+K]+", "[M]+", "[M+H-H2O]+", "[M+Cl]-", "[M+2H]2+",
)  # fmt: skip
CONDITION_COLUMNS = (
    *("ms/ms", "ms1", "positive", "negative", "energy", "energy is known"),
    *(f"adduct {name}" for name in ADDUCTS),
    "other adduct",
)
"""Columns of the field `conditions`, which a model reads beside the molecule."""
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_MOST_ENERGY = 200.0


def encode_conditions(kind: SpectrumKind, meta: Mapping[str, str]) -> list[float]:
    """Return the conditions of a spectrum as numbers, one for each of `CONDITION_COLUMNS`.

    The energy is the first number of its text divided by 100, in any unit: eV and normalised energies are alike.
    """
    adduct = (meta.get("precursor_type") or meta.get("adduct", "")).replace(" ", "")
    mode = meta.get("ion_mode", "").strip().casefold()[:1]
    is_negative = mode in ("n", "-") or (not mode and adduct[-1:] == "-")
    is_positive = not is_negative and (mode in ("p", "+") or adduct[-1:] == "+")
    found = _NUMBER.search(meta.get("collision_energy", ""))
    energy = min(float(found[0]), _MOST_ENERGY) / 100 if found else 0.0
    known = [float(adduct == name) for name in ADDUCTS]
    flags = (kind == "MS/MS", kind == "MS1", is_positive, is_negative)
    return [
        *map(float, flags),
        energy,
        float(bool(found)),
        *known,
        float(bool(adduct) and not any(known)),
    ]


_ENERGY, _FIRST_ADDUCT = CONDITION_COLUMNS.index("energy"), 6
Ranges = Sequence[Sequence[float]]


def described_conditions(values: Sequence[float]) -> dict[str, str]:
    """Return encoded conditions as texts: kind, ion_mode, collision_energy and adduct, each where it is known."""
    kind = "MS/MS" if values[0] else "MS1" if values[1] else "EI"
    mode = "positive" if values[2] else "negative" if values[3] else ""
    energy = f"{values[_ENERGY] * 100:g}" if values[_ENERGY + 1] else ""
    adducts = zip(ADDUCTS, values[_FIRST_ADDUCT:], strict=False)
    adduct = next((name for name, is_it in adducts if is_it), "")
    found = {"kind": kind, "ion_mode": mode, "collision_energy": energy, "adduct": adduct}
    return {name: text for name, text in found.items() if text}


def completed_conditions(
    values: Sequence[float], usual: Sequence[float], ranges: Ranges
) -> list[float]:
    """Return conditions with unknown parts replaced by the usual ones, if training always knew these parts."""
    made = list(values)
    if made[:2] != list(usual[:2]):
        return made  # of another kind of spectrum, which has other conditions
    modes, adducts = slice(2, 4), slice(_FIRST_ADDUCT, len(made))
    if not any(made[modes]) and any(usual[modes]):
        made[modes] = usual[modes]
    if not made[_ENERGY + 1] and ranges[_ENERGY + 1][0]:
        made[_ENERGY : _ENERGY + 2] = usual[_ENERGY : _ENERGY + 2]
    if not any(made[adducts]) and made[modes] == list(usual[modes]):
        made[adducts] = usual[adducts]
    return made


def strange_conditions(values: Sequence[float], ranges: Ranges) -> str:
    """Return in words which conditions are outside those of training; "" if none is."""
    wrong = [not low <= value <= high for value, (low, high) in zip(values, ranges, strict=True)]
    told = described_conditions(values)
    # EI has neither flag: then the flag of the kind used in training is too low.
    if any(wrong[:2]):
        return f"{told['kind']} spectra"
    parts = []
    if any(wrong[2:4]):
        parts.append(f"ion mode {told.get('ion_mode', 'unknown')}")
    if wrong[_ENERGY + 1]:
        parts.append("a collision energy" if values[_ENERGY + 1] else "no collision energy")
    elif wrong[_ENERGY]:
        low, high = (100 * end for end in ranges[_ENERGY])
        parts.append(f"collision energy {told['collision_energy']} (it had {low:g} to {high:g})")
    if any(wrong[_FIRST_ADDUCT:]):
        parts.append(f"adduct {told.get('adduct', 'of another kind')}")
    return ", ".join(parts)


def conditions_in(metas: Sequence[Mapping[str, str]], name: str) -> list[str]:
    """Return one condition of each record as it is written there; empty where there is none."""
    first, *others = CONDITIONS[name]
    values = [meta.get(first, "") for meta in metas]
    for key in others:
        values = [value or meta.get(key, "") for value, meta in zip(values, metas, strict=True)]
    return values


def conditions_of(keys: Iterable[str]) -> set[str]:
    """Return which conditions records with these metadata keys have."""
    known = set(keys)
    return {name for name, names in CONDITIONS.items() if known.intersection(names)}
