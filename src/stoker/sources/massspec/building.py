"""The columns of one part of a spectrum library: peaks, molecules, conditions, texts, splits.

Enters: batches of records, the places of their structures. Leaves: the fields of the part, a refusal with a reason for
every record that is not taken, and counts. Costs: about 0.8 ms of CPU per molecule, nearly all of it RDKit's.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from stoker.errors import Refusal, RefusalList, SourceError
from stoker.sources.contract import Json, PartContext, PartData
from stoker.sources.massspec.conditions import (
    CONDITION_COLUMNS,
    KINDS,
    SpectrumKind,
    conditions_in,
    encode_conditions,
)
from stoker.sources.massspec.formats import LINE_IN_RECORD
from stoker.sources.massspec.structures import INCHIKEY, healed, mismatch, own_structure
from stoker.sources.molecules.files import MolPlaces, MolReader
from stoker.sources.molecules.packed import (
    Mol,
    PackedMolecule,
    StructureForm,
    compound_key,
    pack_molecule,
    read_structure,
)
from stoker.sources.msp import MspRange, Record, Rounding, SpectrumBatch
from stoker.store.fields import Array, Dense, FieldData, Ragged, offsets_of
from stoker.store.row_sketch import scramble

Structures = Literal["auto", "mol", "smiles", "none"]
Spectra = Literal["auto", "ei", "msms", "ms1", "all"]
SPLIT_NAMES = ("train", "val", "test")
NO_PEAKS = "no peaks"
NO_STRUCTURE = "no structure"
ABOVE = "all peaks above max_mz"
_SMALLEST = np.float16(2.0**-24)
_MOLECULE_FIELDS: dict[str, type[np.generic]] = {
    "atoms": np.uint32, "bonds": np.uint32, "functional_groups": np.uint64, "ecfp_bits": np.uint16,
    "ecfp_counts": np.uint8, "mol_weight": np.float32,
}  # fmt: skip
_OF_ONE_NUMBER = ("functional_groups", "mol_weight")


def group_of(key: str) -> int:
    """Return the 63-bit number of a compound key; the same on every machine and run."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little") >> 1


def assign_splits(groups: Array, train_ratio: float, val_ratio: float, seed: int = 42) -> Array:
    """Return 0, 1 or 2 (train, validation, test) per sample, from its group and the seed alone.

    Equal groups get equal splits; the ratios are expected shares of groups.
    """
    # The ratios hold for any set of groups, and a longer library keeps its splits.
    mixed = scramble(np.asarray(groups), seed)
    uniform = (mixed >> np.uint64(11)).astype(np.float64) / 2.0**53
    bounds = np.array([train_ratio, train_ratio + val_ratio])
    return np.searchsorted(bounds, uniform, side="right").astype(np.uint8)


@dataclass(frozen=True)
class Payload:
    """One part: a range of the MSP, perhaps cut short by `max_samples`, and its structures."""

    msp: Path  # the uncompressed file
    range: MspRange  # its bytes and lines
    first_record: int  # number of the first record in the file
    num_records: int  # records to take
    is_cut: bool  # whether `max_samples` ends inside
    places: MolPlaces  # where the structures are
    whole_mz: bool  # every m/z of the whole source is a whole number
    kinds: tuple[SpectrumKind, ...]  # kinds of spectra that are taken; others are ignored
    record_kinds: bytes  # index of each record's kind in `KINDS`, a byte each
    conditions: tuple[str, ...]  # conditions that some record of the source has: a field each
    highest_bin: int  # of all peaks of the source
    # counts from the scan, in the first part only; `MassSpecSource.finish` adds them up
    before: Mapping[str, Json] = field(default_factory=dict)


@dataclass(frozen=True)
class Options:
    """Options of a `MassSpecSource`, which its parts need too.

    Attributes:
        msp: The library in any format that `formats` reads, plain or gzipped, or a folder.
        mol_dir: A folder of MOL files, a zip of them, or one SDF; None takes SMILES only.
        max_mz: Highest bin; a record with nothing at or below it is refused.
        max_samples: Stop after this many records that have a structure; None takes all.
        structures: "mol" takes MOL files only, "smiles" only the record's SMILES or InChI, "auto" the MOL
            file and else these; "none" packs spectra without structures.
        rounding: How an m/z finds its bin.
        molecules_per_part: Records per shard.
        row_limit_seconds: A molecule that takes longer is refused; RDKit can hang.
        train_ratio: Expected share of compounds in training.
        val_ratio: Expected share in validation; the rest is test.
        seed: Seed of the split.
        spectra: Kinds of spectra to take: "ei", "msms", "ms1", "all"; "auto" takes the kind that at least 90 % of the
            records have, ignores the others with a note, and refuses a library that mixes them.
        without_spectra: Keep records without peaks, for prediction.
        structure_advice: What to type where records have no structure; callers other than `stoker pack` have their own.
    """

    msp: Path
    mol_dir: Path | None = None
    max_mz: int = 500
    max_samples: int | None = None
    structures: Structures = "auto"
    rounding: Rounding = "nearest"
    molecules_per_part: int = 5000
    row_limit_seconds: float | None = 10.0
    train_ratio: float = 0.8
    val_ratio: float = 0.1
    seed: int = 42
    spectra: Spectra = "auto"
    without_spectra: bool = False
    structure_advice: str = "--structures none"


@dataclass
class Building:
    """The columns of one part while it is built."""

    source: Options
    payload: Payload
    rdkit: str
    refused: list[Refusal] = field(default_factory=RefusalList)
    reasons: Counter[str] = field(default_factory=Counter)
    ignored: Counter[str] = field(default_factory=Counter)
    record_kinds: list[SpectrumKind] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    # m/z, intensity and lengths of the spectra of each batch, after an empty first entry
    spectra: list[tuple[Array, Array, Array]] = field(
        default_factory=lambda: [(np.empty(0), np.empty(0, np.float16), np.empty(0, np.int64))]
    )
    molecules: list[PackedMolecule] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    seen: int = 0

    def take(self, batch: SpectrumBatch, reader: MolReader, context: PartContext) -> None:
        """Featurise the records of a batch, then add the spectra of those that were accepted."""
        wanted = self.payload.num_records - self.seen
        end = batch.records[wanted].line if wanted < len(batch.records) else None
        lines = [
            replace(refusal, file=str(self.source.msp), kind=LINE_IN_RECORD)
            for refusal in batch.refused
            if end is None or refusal.line is None or refusal.line < end
        ]
        self.refused.extend(lines)
        self.counts["unreadable_lines"] += sum(refusal.count for refusal in lines)
        spectra = _Spectra(batch, self.source)
        accepted = np.zeros(len(batch.records), dtype=bool)
        for number, record in enumerate(batch.records[:wanted]):
            kind = KINDS[self.payload.record_kinds[self.seen]]
            if kind not in self.payload.kinds:
                self.ignored[f"{kind} spectrum"] += 1
                self.seen += 1
                continue
            outcome = spectra.refusal(number) or self._featurise(record, reader, context)
            self.seen += 1
            if outcome is None:
                accepted[number] = True
                self.record_kinds.append(kind)
                continue
            reason, detail = outcome
            self.reasons[reason] += 1
            fixes = {
                NO_PEAKS: "--without-spectra",
                NO_STRUCTURE: self.source.structure_advice,
                ABOVE: f"--max-mz {self.payload.highest_bin}",
            }
            fix = fixes.get(reason, "")
            # A record of another format has its original place.
            file = record.meta.get("source_file", str(self.source.msp))
            line = int(record.meta.get("source_line", record.line))
            self.refused.append(Refusal(file, line, detail, kind=reason, fix=fix))
        self.spectra.append(spectra.columns(accepted, self.counts))

    def _featurise(
        self, record: Record, reader: MolReader, context: PartContext
    ) -> tuple[str, str] | None:
        """Add one molecule to the columns, or return why not: kind of reason, and details."""
        row = self.payload.first_record + self.seen
        if row in context.poisoned:
            return "poisoned", f"refused because it ended a worker: {context.poisoned[row]}"
        if self.source.structures == "none":
            self.keys.append(_compound_of(record, None))
            self.records.append(record)
            return None
        given: tuple[str, StructureForm] | None = None
        where = ""
        try:
            if reader.knows(self.seen):
                text, mended = healed(reader.read(self.seen))
                self.counts["structures_without_m_end"] += mended
                given, where = (text, "mol"), f"the structure {reader.name(self.seen)}"
        except SourceError as error:
            return "unreadable MOL file", error.given
        if given is None and self.source.structures != "mol":
            given, where = own_structure(record.meta), "the record's own structure"
        if given is None:
            return NO_STRUCTURE, _no_structure(self.source)
        context.guard(row)
        mol = read_structure(*given)
        if isinstance(mol, str):
            return "RDKit", mol
        try:
            packed = pack_molecule(mol)
            if wrong := mismatch(mol, record.meta, where, packed.mol_weight):
                return "structure of another compound", wrong
            key = _compound_of(record, mol)
        except (RuntimeError, ValueError) as error:  # RDKit's violated invariants
            return "RDKit", f"RDKit: {next(iter(str(error).split(chr(10))), '')}"
        self.keys.append(key)
        self.molecules.append(packed)
        self.records.append(record)
        return None

    def result(self) -> PartData:
        """Join the columns."""
        source = self.source
        groups = np.array([group_of(key) for key in self.keys], dtype=np.int64)
        splits = assign_splits(groups, source.train_ratio, source.val_ratio, source.seed)
        mz, intensity, lengths = map(np.concatenate, zip(*self.spectra, strict=True))
        offsets = offsets_of(lengths)
        fields: dict[str, FieldData] = {
            "mz": Ragged(mz.astype(np.uint16 if self.payload.whole_mz else np.float32), offsets),
            "intensity": Ragged(intensity, offsets),
        }
        for name, dtype in _MOLECULE_FIELDS.items() if source.structures != "none" else ():
            pieces = [getattr(molecule, name) for molecule in self.molecules]
            if name in _OF_ONE_NUMBER:
                fields[name] = Dense(np.array(pieces, dtype=dtype))
                continue
            sizes = np.fromiter(map(len, pieces), dtype=np.int64, count=len(pieces))
            values = np.concatenate([np.empty(0, dtype), *pieces])
            fields[name] = Ragged(values, offsets_of(sizes))
        fields |= self._text_fields() | self._condition_fields()
        fields |= {"group": Dense(groups), "split": Dense(splits)}
        per_split = np.bincount(splits, minlength=len(SPLIT_NAMES)).tolist()
        extra = {
            "counts": {**self.counts, "records": self.seen, "samples": len(self.records)},
            "refused_records": dict(self.reasons),
            "ignored_records": dict(self.ignored),
            "spectrum_kinds": dict(Counter(self.record_kinds)),
            "before": dict(self.payload.before),
            "splits": dict(zip(SPLIT_NAMES, per_split, strict=True)),
            "rdkit": self.rdkit,
        }
        return PartData(fields=fields, refused=self.refused, extra=extra)

    def _condition_fields(self) -> dict[str, FieldData]:
        """Return the conditions as numbers; {} if only EI is taken, whose conditions are all the same."""
        if set(self.payload.kinds) <= {"EI"}:
            return {}
        rows = [
            encode_conditions(kind, record.meta)
            for kind, record in zip(self.record_kinds, self.records, strict=True)
        ]
        values = np.array(rows, dtype=np.float32).reshape(len(rows), len(CONDITION_COLUMNS))
        return {"conditions": Dense(values, CONDITION_COLUMNS)}

    def _text_fields(self) -> dict[str, FieldData]:
        metas = [record.meta for record in self.records]
        texts = {
            name: [str(meta.get(name) or "") for meta in metas]
            for name in ("name", "inchikey", "formula")
        }
        texts["identifier"] = [_identifier(meta) for meta in metas]
        for name in self.payload.conditions:
            texts[name] = (
                list(map(str, self.record_kinds))
                if name == "spectrum_kind"
                else conditions_in(metas, name)
            )
        return {name: Ragged.from_strings(values) for name, values in texts.items()}


def first_mz_above(source: Options) -> float:
    """Return the m/z from which on `bin_spectrum` drops peaks."""
    return source.max_mz + (0.5 if source.rounding == "nearest" else 1.0)


class _Spectra:
    """The peaks of one batch, all at once: a loop over records would cost more than RDKit."""

    def __init__(self, batch: SpectrumBatch, source: Options) -> None:
        self._max_mz = source.max_mz
        self._may_be_empty = source.without_spectra
        lengths = np.diff(batch.offsets)
        num = len(lengths)
        self._owner = np.repeat(np.arange(num), lengths)
        self._mz = batch.mz
        intensity = batch.intensity.astype(np.float64)
        self._positive = intensity > 0
        self._above = batch.mz >= first_mz_above(source)
        base = np.zeros(num)
        np.maximum.at(base, self._owner, intensity)
        relative = intensity / np.where(base > 0, base, 1)[self._owner]
        self._relative = np.maximum(relative.astype(np.float16), _SMALLEST)
        self._lengths = lengths
        self._num_positive = np.bincount(self._owner[self._positive], minlength=num)
        inside = self._owner[self._positive & ~self._above]
        self._num_inside = np.bincount(inside, minlength=num)

    def refusal(self, number: int) -> tuple[str, str] | None:
        """Return why this spectrum cannot be used, or None."""
        if self._may_be_empty and not self._num_positive[number]:
            return None
        if not self._lengths[number]:
            return NO_PEAKS, "the record has no peaks"
        if not self._num_positive[number]:
            return NO_PEAKS, "all peaks of the record have zero intensity"
        if not self._num_inside[number]:
            return (
                ABOVE,
                f"all {self._num_positive[number]} peaks lie above max_mz {self._max_mz}",
            )
        return None

    def columns(self, accepted: Array, counts: Counter[str]) -> tuple[Array, Array, Array]:
        """Return m/z, intensity and lengths of the accepted spectra; the parser sorted them."""
        mine = accepted[self._owner]
        keep = mine & self._positive
        counts["peaks"] += int(keep.sum())
        counts["peaks_of_zero_intensity_dropped"] += int((mine & ~self._positive).sum())
        counts["peaks_above_max_mz"] += int((keep & self._above).sum())
        return self._mz[keep], self._relative[keep], self._num_positive[accepted]


def _no_structure(source: Options) -> str:
    if source.structures == "smiles" or source.mol_dir is None:
        return "no structure: the record has no SMILES"
    places = f"no MOL file named after its ID, CAS or DB# in {source.mol_dir.name}"
    if source.structures == "mol":
        return f"no structure: {places}"
    return f"no structure: {places}, and no SMILES in the record"


def _identifier(meta: Mapping[str, Any]) -> str:
    """Return the first of ID, NIST#, DB# and CAS that the record has."""
    return next((str(meta[key]) for key in ("id", "nist", "db", "cas") if meta.get(key)), "")


def _compound_of(record: Record, mol: Mol | None) -> str:
    """Return the key of the compound: the InChIKey's first block as recorded, else as computed.

    Without a structure the key is the SMILES, InChI, name or id; without those the record's position.
    """
    meta = record.meta
    given = str(meta.get("inchikey") or "").strip().upper()
    if INCHIKEY.fullmatch(given):
        return given.partition("-")[0]
    if mol is not None:
        return compound_key(mol)
    for name in ("smiles", "inchi", "name"):
        if meta.get(name):
            return f"{name} {meta[name]}".casefold()
    return _identifier(meta) or f"{meta.get('source_file', '')}:{record.line}"
