"""What the metadata lines of an MSP record mean: which keys are the same, which value wins.

Enters: lines `key: value`. Leaves: one dict of normalised keys with all values, the synonyms,
and flags for missing identifiers. Costs: 9 µs for a header of 14 lines on a slow core,
28 for one of a new shape; caches are bounded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

WHITESPACE = b" \t\x0b\x0c"
_SPACES = WHITESPACE.decode()

PLAIN, DECIMAL, NAME, SYNONYM, COUNT, ODD = range(6)

# Canonical key: other words for it. A difference only in case, space, `_`, `-`, `#` is not another
# word: `PRECURSORMZ`, `Precursor m/z` and `precursor_mz` are the same spelling.
_OTHER_WORDS = {
    "name": ("compoundname",),
    "inchikey": (),
    "inchi": ("inchicode",),
    "smiles": ("smile",),
    "formula": ("form", "molecularformula", "molform"),
    "mw": ("molecularweight", "nominalmass"),
    "exact_mass": ("monoisotopicmass",),
    "cas": ("casno", "casnumber", "casrn"),
    "nist": ("nistno", "nistnumber"),
    "db": ("dbno", "accession"),
    "id": (),
    "ri": ("retentionindex", "kovatsindex"),
    "retention_time": ("rt", "rettime"),
    "precursor_mz": ("selectedionmz", "pepmass"),
    "precursor_type": ("adduct", "adducttype"),
    "ion_mode": ("ionizationmode", "ionisationmode", "polarity"),
    "collision_energy": ("ce",),
    "instrument": (),
    "instrument_type": (),
    "spectrum_type": (),
    "ms_level": (),
    "comment": ("comments",),
    "ontology": (),
    "splash": (),
    "charge": (),
    "ccs": (),
}
_DECIMALS = {"mw", "exact_mass", "ri", "retention_time", "precursor_mz"}
_SYNONYM_WORDS = {"synon", "synonym", "synonyms"}
_COUNT_WORDS = {"numpeaks", "numpeak", "numberofpeaks"}
_MISSING = {"", "None", "none", "NA", "N/A", "n/a", "null", "NULL", "nan", "NaN"}

_FIELD = re.compile(rb'_{0,3}[A-Za-z\x80-\xff][^:="|;]{0,60}')
_KEY_JOINERS = re.compile(r"[\s_#-]+")
_HASH_KEY = re.compile(r";[ \t]*([A-Za-z]{2,8}#)[ \t]*:")
_CAS_AND_NIST = re.compile(r"(\nCAS#:[^;\n]*);[ \t]*(NIST#:)")
_COMMA_DECIMAL = re.compile(r"([0-9]+),([0-9]+)")
_QUOTED_PAIR = re.compile(r'(?<!\S)"([^"=]{1,60})=([^"]*)"(?!\S)')
_PARENT = "Parent="  # in the comments of peptide libraries: NIST, SpectraST, MS2PIP
_OF_PARENT = {
    "Parent": "precursor_mz", "Charge": "charge", "Precursor_type": "precursor_type",
    "Collision_energy": "collision_energy", "MS_mode": "ion_mode",
}  # fmt: skip
_PLAIN_PAIR = re.compile(rf'(?<!\S)({"|".join(_OF_PARENT)})=(?:"([^"]*)"|([^\s"]+))')


Folded = tuple[dict[str, str], tuple[str, ...]]  # meta and synonyms


class Key(NamedTuple):
    """A raw key: its normalised spelling, its canonical key, and the kind of its values."""

    spelling: str
    canonical: str
    kind: int


def is_field_key(raw: bytes) -> bool:
    """Whether the bytes before a colon can be a key, and not the prose of a comment."""
    return _FIELD.fullmatch(raw) is not None and len(raw.split()) <= 5


def _squeeze(text: str) -> str:
    return re.sub(r"[\x00-/:-`{-\x7f]", "", text)


_CANONICAL = {_squeeze(key): key for key in _OTHER_WORDS}
_ALIAS = {word: key for key, words in _OTHER_WORDS.items() for word in words}


@lru_cache(maxsize=4096)
def spell(raw: str) -> Key:
    """Normalise a key: lower case, runs of space, `_`, `-` and `#` become one `_`, ends trimmed.

    Returns:
        Its spelling, the canonical key it stands for, and the kind of its values.
    """
    spelling = _KEY_JOINERS.sub("_", raw.lower()).strip("_")
    squeezed = _squeeze(spelling)
    if squeezed in _CANONICAL:
        spelling = _CANONICAL[squeezed]
    canonical = _ALIAS.get(squeezed, spelling)
    if not is_field_key(raw.encode()) or squeezed == "ms":
        kind = ODD
    elif squeezed in _COUNT_WORDS:
        kind = COUNT
    elif squeezed in _SYNONYM_WORDS:
        kind = SYNONYM
    elif spelling == "name":
        kind = NAME
    else:
        kind = DECIMAL if canonical in _DECIMALS else PLAIN
    return Key(spelling, canonical, kind)


# ---------------------------------------------------------------------------------------- header


class _Header:
    """Folds `key: value` lines into one dict without losing a value.

    A key that repeats keeps all its different values, joined with `; `. Another word for a
    canonical key (`Adduct` for `precursor_type`) takes that key while it is free and gives it
    back, moving to its own spelling, when the canonical spelling arrives.
    """

    __slots__ = ("_claimed", "_repeats", "meta", "synonyms")

    def __init__(self) -> None:
        self.meta: dict[str, str] = {}
        self.synonyms: list[str] = []
        self._claimed: dict[str, str] = {}
        self._repeats: dict[str, dict[str, None]] = {}

    def add(self, key: Key, value: str) -> None:
        """Take one field; `value` is already stripped."""
        if key.kind == SYNONYM:
            self.synonyms.extend([value] if value else ())
            return
        if key.kind == DECIMAL:
            value = self._mend_number(key.canonical, value)
        if ";" in value and key.canonical not in ("name", "comment"):
            value = self._split_shared_line(value)
        if value and (value not in _MISSING or key.canonical == "name"):
            self._place(key, value)

    def finish(self) -> Folded:
        """Return what was folded, with the pairs of a comment filled in."""
        for key, values in self._repeats.items():
            self.meta[key] = "; ".join(values)
        comment = self.meta.get("comment")
        if comment is not None and '"' in comment and "=" in comment:
            self._take_quoted_pairs(comment)
        if comment is not None and _PARENT in comment:
            for raw, in_quotes, plain in _PLAIN_PAIR.findall(comment):
                self.meta.setdefault(_OF_PARENT[raw], in_quotes or plain)
        return self.meta, tuple(self.synonyms)

    def _place(self, key: Key, value: str) -> None:
        meta, target = self.meta, key.canonical
        if key.spelling != target:
            if target not in meta:
                meta[target] = value
                self._claimed[target] = key.spelling
                return
            if self._claimed.get(target) != key.spelling:
                target = key.spelling
        elif target in self._claimed:
            other = self._claimed.pop(target)
            meta[other] = meta.pop(target)
            if target in self._repeats:
                self._repeats[other] = self._repeats.pop(target)
        if target in meta:
            self._repeats.setdefault(target, {meta[target]: None})[value] = None
        else:
            meta[target] = value

    def _mend_number(self, key: str, value: str) -> str:
        """GOLM writes `MW: 321,15`; MS-DIAL writes `RETENTIONTIME: CCS: 290.1`."""
        if key == "retention_time" and value[:4].lower() == "ccs:":
            self.add(spell("ccs"), value[4:].strip(_SPACES))
            return ""
        match = _COMMA_DECIMAL.fullmatch(value)
        return f"{match[1]}.{match[2]}" if match else value

    def _split_shared_line(self, value: str) -> str:
        """Take `NIST#: y` out of `CAS#: x;  NIST#: y`."""
        first, *rest = _HASH_KEY.split(value)
        for raw, part in zip(rest[::2], rest[1::2], strict=True):
            key, part = spell(raw), part.strip(_SPACES)
            if part and part not in _MISSING:
                self._place(key, part)
        return first.strip(_SPACES)

    def _take_quoted_pairs(self, comment: str) -> None:
        """MoNA: `"SMILES=CC" "computed InChI=InChI=1S/…"`; a plain field always wins."""
        meta = self.meta
        for raw, value in _QUOTED_PAIR.findall(comment):
            key, value = spell(raw.strip(_SPACES)), value.strip(_SPACES)
            if key.kind <= NAME and value not in _MISSING:
                meta.setdefault(key.canonical, value)
        for key_name in ("smiles", "inchi", "inchikey", "exact_mass"):
            if key_name not in meta and f"computed_{key_name}" in meta:
                meta[key_name] = meta[f"computed_{key_name}"]


def fold_header(lines: Iterable[str], strict: bool) -> Folded | None:
    """Turn header lines (`key: value`, without the peak count) into `meta` and `synonyms`.

    With `strict`, which the block parser uses, it returns None unless every line is without doubt one plain field and
    at most one is a name.
    """
    header = _Header()
    meta, named = header.meta, False
    for line in lines:
        raw, colon, value = line.partition(":")
        key = spell(raw)
        _, canonical, kind = key
        value = value.strip(_SPACES)
        if kind == PLAIN and canonical not in meta and value not in _MISSING and ";" not in value:
            if key[0] == canonical:
                meta[canonical] = value
                continue
        elif strict and (kind >= COUNT or not colon or (kind == NAME and named)):
            return None
        elif kind == NAME:
            named = True
        header.add(key, value)
    return header.finish()


class _Template(NamedTuple):
    """A header shape seen before: the keys in their order, and where each value goes."""

    pattern: re.Pattern[str]
    names: tuple[str, ...]
    synonyms_at: int | None

    def fill(self, text: str) -> Folded | None:
        """Return the result of `fold_header`, or None if the template does not fit."""
        match = self.pattern.fullmatch(text)
        if match is None:
            return None
        values: tuple[str, ...] = match.groups()
        synonyms: tuple[str, ...] = ()
        if self.synonyms_at is not None:
            lines = values[self.synonyms_at].split("\n")
            synonyms = tuple([line.partition(":")[2].strip(_SPACES) for line in lines])
            values = values[: self.synonyms_at] + values[self.synonyms_at + 1 :]
        meta = dict(zip(self.names, values, strict=True))
        if not _MISSING.isdisjoint(values):
            if meta.get("name") in _MISSING:
                return None
            meta = {key: value for key, value in meta.items() if value not in _MISSING}
        comment = meta.get("comment", "")
        return None if '"' in comment or _PARENT in comment else (meta, synonyms)


class HeaderReader:
    """Reads the headers of one file, most of which repeat a few shapes.

    A shape met twice becomes one regular expression that takes all values at once: a quarter of
    the time. A template is built from `fold_header` and gives the same result.
    Not thread-safe.
    """

    _MAX_SHAPES = 512
    _MAX_TEMPLATES = 16

    def __init__(self) -> None:
        self._templates: list[_Template] = []
        self._seen: dict[tuple[str, ...], int] = {}

    def read(self, text: str) -> Folded | None:
        """Return what `fold_header(..., strict=True)` returns for these lines."""
        if ";" in text:
            # NIST's own layout: one line made two, and the templates fit again.
            shared, apart = _CAS_AND_NIST.match(text, text.find("\nCAS#:")), text
            if shared:
                apart = f"{text[: shared.end(1)]}\n{text[shared.start(2) :]}"
            if _HASH_KEY.search(apart):
                return fold_header(text.split("\n"), strict=True)
            text = apart
        for position, template in enumerate(self._templates):
            folded = template.fill(text)
            if folded is not None:
                if position:
                    self._templates.insert(0, self._templates.pop(position))
                return folded
        lines = text.split("\n")
        folded = fold_header(lines, strict=True)
        if folded is not None and len(self._templates) < self._MAX_TEMPLATES:
            self._learn(lines)
        return folded

    def _learn(self, lines: list[str]) -> None:
        raws = [line.partition(":")[0] for line in lines]
        # Any number of synonyms in a row is one shape.
        shape = tuple(
            raw
            for raw, above in zip(raws, [None, *raws], strict=False)
            if raw != above or spell(raw).kind != SYNONYM
        )
        times = self._seen.get(shape, 0)
        if times or len(self._seen) < self._MAX_SHAPES:
            self._seen[shape] = times + 1
        template = _template(shape) if times == 1 else None
        if template is not None:
            self._templates.append(template)


def _template(shape: tuple[str, ...]) -> _Template | None:
    """Build the template of a shape; None if two keys could have the same canonical key."""
    keys = [spell(raw) for raw in shape]
    kinds = [key.kind for key in keys]
    canonical = [key.canonical for key in keys if key.kind != SYNONYM]
    folded = fold_header([f"{raw}: value" for raw in shape], strict=True)
    if folded is None or list(folded[0]) != canonical or kinds.count(SYNONYM) > 1:
        return None
    parts = []
    for raw, kind in zip(shape, kinds, strict=True):
        key = re.escape(raw) + ": ?"
        if kind == SYNONYM:
            parts.append(rf"({key}{_VALUE}(?:\n{key}{_VALUE})*+)")
        else:
            parts.append(rf"{key}({_DECIMAL_VALUE if kind == DECIMAL else _VALUE}|)")
    synonyms_at = kinds.index(SYNONYM) if SYNONYM in kinds else None
    return _Template(re.compile("\n".join(parts)), tuple(canonical), synonyms_at)


# Values that need no stripping and no mending.
_VALUE = r"\S.*+(?<![ \t\x0b\x0c])"
_DECIMAL_VALUE = r"[^\s,:][^,:\n]*+(?<![ \t\x0b\x0c])"


def flags_of(meta: dict[str, str], odd: Iterable[str] = ()) -> tuple[str, ...]:
    """Return the flags of a record: `odd` ones, and its missing identifiers."""
    missing = [f"no-{key}" for key in ("name", "inchikey") if key not in meta]
    if not ("id" in meta or "db" in meta or "nist" in meta or "cas" in meta):
        missing.append("no-id")
    return tuple(sorted({*odd, *missing})) if missing or odd else ()
