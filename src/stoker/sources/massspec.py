"""Mass spectra with their structures: `stoker pack massspec`.

Enters: one MSP file (or .msp.gz) and a folder, zip or SDF of MOL files, or SMILES inside the MSP.
Leaves: one sample per record that has both peaks and a structure; every other record is refused
with its file, line and reason. Costs: about 0.8 ms of CPU per molecule, all stages; one part
(5,000 molecules) in memory per worker; 740 bytes per molecule on disk.

Fields of the store:

    mz, intensity            ragged   the peaks of one spectrum, rising in m/z
    atoms, bonds             ragged   uint32 words, see `molecules.ATOM_FIELDS`, `BOND_FIELDS`
    functional_groups        dense    uint64, 48 flags, see `functional_groups`
    ecfp_bits, ecfp_counts   ragged   counted ECFP4 of 4096 bits: uint16 bit, uint8 count
    mol_weight               dense    float32, monoisotopic mass of the structure in dalton
    name, inchikey, formula, identifier   text as the record has it; empty where it has none
    group                    dense    int64, same for all records of one compound
    split                    dense    uint8, 0 train, 1 validation, 2 test

Spectra are kept whole and unbinned, so that one store serves any `max_mz`: peaks above it stay in
the store, and are dropped and counted when a spectrum is binned into `max_mz + 1` bins; a record
with all its peaks above is refused. Intensities are relative to the base peak, which is exactly
1.0, as float16: 11 significant bits (0.05 %), no peak rounds to zero (the smallest is 2^-24).
Peaks of zero intensity are dropped and counted; of peaks with equal m/z the largest stays. m/z is
uint16 when every m/z of the whole source is a whole number, float32 otherwise.

Replicates and stereoisomers of one compound share a `group` (the first block of the InChIKey) and
therefore a `split`: nothing in the test set was seen in training under another name.
"""

from __future__ import annotations

import gzip
import hashlib
import re
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import numpy as np

from stoker.bounds import copy_to_disk
from stoker.display import command
from stoker.errors import InputError, Refusal, RefusalList, SourceError, require_file
from stoker.ownership import always, writing
from stoker.sources.contract import Json, Part, PartContext, PartData, Preparation
from stoker.sources.molecules.files import NO_MOLS, MolIndex, MolPlaces, MolReader
from stoker.sources.molecules.functional_groups import FUNCTIONAL_GROUPS
from stoker.sources.molecules.packed import (
    ECFP_RADIUS,
    ECFP_SIZE,
    FEATURISER_VERSION,
    Mol,
    PackedMolecule,
    StructureForm,
    compound_key,
    layout,
    pack_molecule,
    read_structure,
    require_rdkit,
    warm_up,
)
from stoker.sources.msp import MspRange, Record, Rounding, SpectrumBatch, read_msp, split_msp
from stoker.store.fields import Array, Dense, FieldData, Ragged, offsets_of

Structures = Literal["auto", "mol", "smiles"]
SPLIT_NAMES = ("train", "val", "test")

_INCHIKEY = re.compile(r"[A-Z]{14}(-[A-Z]{10}(-[A-Z])?)?")
_SMALLEST = np.float16(2.0**-24)
_GZIP_MAGIC = b"\x1f\x8b"


def group_of(key: str) -> int:
    """Return the 63-bit number of a compound key; the same on every machine and run."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little") >> 1


def assign_splits(groups: Array, train_ratio: float, val_ratio: float, seed: int = 42) -> Array:
    """Return 0, 1 or 2 (train, validation, test) per sample, from its group and the seed alone.

    Args:
        groups: `(n,)` int64; equal groups get equal splits.
        train_ratio: Expected share of groups in training.
        val_ratio: Expected share in validation; the rest is test.
        seed: Another seed, another division.
    """
    # splitmix64: the ratios hold for any set of groups, and a longer library keeps its splits.
    with np.errstate(over="ignore"):
        mixed = np.asarray(groups).astype(np.uint64) + np.uint64(seed) * np.uint64(
            0x9E3779B97F4A7C15
        )
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
    uniform = (mixed >> np.uint64(11)).astype(np.float64) / 2.0**53
    bounds = np.array([train_ratio, train_ratio + val_ratio])
    return np.searchsorted(bounds, uniform, side="right").astype(np.uint8)


@dataclass(frozen=True)
class _Payload:
    """One part: a stretch of the MSP, cut short by `max_samples` or not, and its structures."""

    msp: Path
    range: MspRange
    first_record: int
    num_records: int
    is_cut: bool
    places: MolPlaces
    whole_mz: bool


@dataclass(frozen=True)
class _Survey:
    """What one look at a stretch of the MSP showed; one entry of `rows` per record."""

    rows: Array
    smiles: Array
    num_peaks: int
    whole_mz: bool
    refused: list[Refusal]


@dataclass(frozen=True)
class MassSpecSource:
    """An MSP library and its structures.

    Attributes:
        msp: The library, `.msp` or gzipped.
        mol_dir: A folder of MOL files, a zip of them, or one SDF; None takes SMILES only.
        max_mz: Highest bin; a record with nothing at or below it is refused.
        max_samples: Stop after this many records that have a structure; None takes all.
        structures: "mol" takes MOL files only, "smiles" only the record's SMILES, "auto" the MOL
            file and else the SMILES.
        rounding: How an m/z finds its bin.
        molecules_per_part: Records per shard.
        row_limit_seconds: A molecule that takes longer is refused; RDKit can hang.
        train_ratio: Expected share of compounds in training.
        val_ratio: Expected share in validation; the rest is test.
        seed: Of the split.
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

    kind: ClassVar[str] = "massspec"
    version: ClassVar[int] = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "msp", Path(self.msp))
        if self.mol_dir is not None:
            object.__setattr__(self, "mol_dir", Path(self.mol_dir))
        _check_options(self)

    def files(self) -> Sequence[Path]:
        """The MSP and where the MOL files are."""
        return [self.msp] if self.mol_dir is None else [self.msp, self.mol_dir]

    def options(self) -> Mapping[str, Json]:
        """Everything that changes the store, and what made it."""
        return {
            "max_mz": self.max_mz,
            "max_samples": self.max_samples,
            "structures": self.structures,
            "rounding": self.rounding,
            "molecules_per_part": self.molecules_per_part,
            "row_limit_seconds": self.row_limit_seconds,
            "train_ratio": self.train_ratio,
            "val_ratio": self.val_ratio,
            "seed": self.seed,
            "featuriser_version": FEATURISER_VERSION,
        }

    def prepare(self, scratch: Path) -> Preparation:
        """Find the structure of every record, and cut the MSP between records."""
        require_rdkit()
        msp = _plain_msp(require_file(self.msp, "the MSP file"), scratch)
        index = None
        if self.mol_dir is not None and self.structures != "smiles":
            index = MolIndex(self.mol_dir)
        ranges = split_msp(msp, self.molecules_per_part)
        surveys = [_survey(msp, piece, index, self.structures) for piece in ranges]
        whole_mz = all(survey.whole_mz for survey in surveys)
        parts: list[Part] = []
        first_record, wanted = 0, self.max_samples
        for piece, survey in zip(ranges, surveys, strict=True):
            num_records = _records_for(survey, wanted)
            places = index.places(survey.rows[:num_records]) if index is not None else NO_MOLS
            is_cut = num_records < len(survey.rows)
            payload = _Payload(msp, piece, first_record, num_records, is_cut, places, whole_mz)
            label = f"records {first_record}-{first_record + num_records - 1} of {self.msp.name}"
            found = _num_structures(survey, num_records)
            if num_records:
                parts.append(Part(len(parts), label, found, payload))
            first_record += num_records
            wanted = None if wanted is None else wanted - found
        peak_bytes = sum(survey.num_peaks for survey in surveys) * (4 if whole_mz else 6)
        return Preparation(
            parts=parts,
            # 200 peaks aside, a molecule of 50 heavy atoms with long names needs this much
            estimated_bytes=peak_bytes + 1200 * sum(part.num_samples for part in parts),
            refused=[
                replace(refusal, file=str(self.msp))
                for survey in surveys
                for refusal in survey.refused
            ],
            notes=_notes(self, surveys, index, whole_mz),
        )

    def build(self, part: Part, context: PartContext) -> PartData:
        """Parse one stretch of the MSP and featurise its molecules."""
        payload: _Payload = part.payload
        building = _Building(self, payload, warm_up())
        piece = payload.range
        batches = read_msp(
            payload.msp,
            start_byte=piece.start_byte,
            end_byte=piece.end_byte,
            first_line=piece.first_line,
        )
        with MolReader(payload.places) as reader:
            for batch in batches:
                building.take(batch, reader, context)
                context.guard(None)
                if payload.is_cut and building.seen == payload.num_records:
                    break  # max_samples ends inside this part
        return building.result()

    def finish(self, extras: Sequence[Mapping[str, Json]]) -> Mapping[str, Json]:
        """Add up the counts, and describe the layout for whoever reads the store."""
        counts: Counter[str] = Counter()
        refused: Counter[str] = Counter()
        splits: Counter[str] = Counter()
        for extra in extras:
            counts.update(extra["counts"])
            refused.update(extra["refused_records"])
            splits.update(extra["splits"])
        return {
            "counts": dict(counts),
            "refused_records": dict(refused),
            "splits": {name: splits.get(name, 0) for name in SPLIT_NAMES},
            "split_rule": {
                "train_ratio": self.train_ratio,
                "val_ratio": self.val_ratio,
                "seed": self.seed,
                "unit": "first block of the InChIKey",
            },
            "max_mz": self.max_mz,
            "num_bins": self.max_mz + 1,
            "rounding": self.rounding,
            "intensity": "relative to the base peak (1.0), float16",
            "mol_weight": "monoisotopic mass, dalton",
            "featuriser": {
                "version": FEATURISER_VERSION,
                "rdkit": sorted({extra["rdkit"] for extra in extras}),
                "layout": layout(),
                "functional_groups": [
                    {"name": group.name, "smarts": group.smarts} for group in FUNCTIONAL_GROUPS
                ],
                "ecfp": {"radius": ECFP_RADIUS, "size": ECFP_SIZE, "counts_saturate_at": 255},
            },
        }


def _check_options(source: MassSpecSource) -> None:
    if not 1 <= source.max_mz <= 65_535:
        raise InputError(f"max_mz is {source.max_mz}.", "1 to 65535", "--max-mz 500")
    if source.max_samples is not None and source.max_samples < 1:
        raise InputError(f"max_samples is {source.max_samples}.", "1 or more, or none", "")
    if source.molecules_per_part < 1:
        raise InputError(f"molecules_per_part is {source.molecules_per_part}.", "1 or more", "")
    for name, allowed in (("structures", get_args(Structures)), ("rounding", get_args(Rounding))):
        if getattr(source, name) not in allowed:
            raise InputError(f"{name} is {getattr(source, name)!r}.", ", ".join(allowed), "")
    shares = (source.train_ratio, source.val_ratio)
    if min(shares) < 0 or sum(shares) > 1 + 1e-9:
        raise InputError(
            f"train_ratio {shares[0]} and val_ratio {shares[1]} leave no test share.",
            "two shares of 0 or more that add up to at most 1",
            "train_ratio=0.8, val_ratio=0.1",
        )
    if source.structures == "mol" and source.mol_dir is None:
        raise InputError(
            "structures='mol' without a place for MOL files.",
            "a folder, a zip or an .sdf",
            "--mol-dir MOLS, or --structures smiles",
        )


def _plain_msp(path: Path, scratch: Path) -> Path:
    """Return an uncompressed MSP: byte ranges need one."""
    with path.open("rb") as file:
        if file.read(2) != _GZIP_MAGIC:
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


def _survey(msp: Path, piece: MspRange, index: MolIndex | None, structures: Structures) -> _Survey:
    rows: list[int] = []
    smiles: list[bool] = []
    refused = RefusalList()
    num_peaks, whole_mz = 0, True
    for batch in read_msp(
        msp, start_byte=piece.start_byte, end_byte=piece.end_byte, first_line=piece.first_line
    ):
        for record in batch.records:
            rows.append(index.find(record.meta) if index is not None else -1)
            smiles.append(structures != "mol" and bool(record.meta.get("smiles")))
        num_peaks += len(batch.mz)
        whole_mz = whole_mz and _is_whole(batch.mz)
        refused.extend(batch.refused)
    # `build` reports what it reads; a stretch without records is never built.
    found = np.array(rows, dtype=np.int64), np.array(smiles, dtype=bool)
    return _Survey(*found, num_peaks, whole_mz, [] if rows else refused)


def _is_whole(mz: Array) -> bool:
    return not len(mz) or bool((mz == np.rint(mz)).all() and mz.max() <= 65_535)


def _num_structures(survey: _Survey, num_records: int) -> int:
    return int(((survey.rows >= 0) | survey.smiles)[:num_records].sum())


def _records_for(survey: _Survey, wanted: int | None) -> int:
    """Records of this stretch to take, so that at most `wanted` have a structure."""
    structured = np.flatnonzero((survey.rows >= 0) | survey.smiles)
    if wanted is None or wanted > len(structured):
        return len(survey.rows)
    return int(structured[wanted - 1]) + 1 if wanted else 0


def _notes(
    source: MassSpecSource, surveys: Sequence[_Survey], index: MolIndex | None, whole_mz: bool
) -> list[str]:
    num_records = sum(len(survey.rows) for survey in surveys)
    num_mol = sum(int((survey.rows >= 0).sum()) for survey in surveys)
    num_smiles = sum(_num_structures(survey, len(survey.rows)) for survey in surveys) - num_mol
    notes = []
    if index is not None:
        notes.append(f"Found {num_mol:,} compounds with MOL files")
    if num_smiles:
        more = "more " if index is not None else ""
        notes.append(f"Found {num_smiles:,} {more}compounds with a SMILES in the record")
    if left := num_records - num_mol - num_smiles:
        notes.append(f"{left:,} of {num_records:,} records have no structure and will be refused")
    if source.max_samples is not None:
        notes.append(f"Taking at most the first {source.max_samples:,} that have a structure")
    kind = "uint16: every value is a whole number" if whole_mz else "float32: some have decimals"
    return [*notes, f"m/z is stored as {kind}"]


@dataclass
class _Building:
    """The columns of one part while it is built."""

    source: MassSpecSource
    payload: _Payload
    rdkit: str
    refused: list[Refusal] = field(default_factory=RefusalList)
    reasons: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    spectra: list[tuple[Array, Array, Array]] = field(default_factory=list)
    molecules: list[PackedMolecule] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    seen: int = 0

    def take(self, batch: SpectrumBatch, reader: MolReader, context: PartContext) -> None:
        """Featurise the records of a batch, then take the spectra of those that were accepted."""
        file = str(self.source.msp)
        wanted = self.payload.num_records - self.seen
        end = batch.records[wanted].line if wanted < len(batch.records) else None
        self.refused.extend(
            replace(refusal, file=file)
            for refusal in batch.refused
            if end is None or refusal.line is None or refusal.line < end
        )
        spectra = _Spectra(batch, self.source)
        accepted = np.zeros(len(batch.records), dtype=bool)
        for number, record in enumerate(batch.records[:wanted]):
            outcome = spectra.refusal(number) or self._featurise(record, reader, context)
            self.seen += 1
            if outcome is None:
                accepted[number] = True
                continue
            reason, detail = outcome
            self.reasons[reason] += 1
            self.refused.append(Refusal(file, record.line, detail))
        self.spectra.append(spectra.columns(accepted, self.counts))

    def _featurise(
        self, record: Record, reader: MolReader, context: PartContext
    ) -> tuple[str, str] | None:
        """Add one molecule to the columns, or say why not: a class of reasons and the words."""
        row = self.payload.first_record + self.seen
        if row in context.poisoned:
            return "poisoned", f"refused because it ended a worker: {context.poisoned[row]}"
        # A key that repeats arrives joined; the first SMILES is as good as the others.
        text = record.meta.get("smiles", "").partition("; ")[0]
        form: StructureForm = "smiles"
        try:
            if reader.knows(self.seen):
                text, form = reader.read(self.seen), "mol"
        except SourceError as error:
            return "unreadable MOL file", error.given
        if not text or (form == "smiles" and self.source.structures == "mol"):
            return "no structure", _no_structure(self.source)
        context.guard(row)
        mol = read_structure(text, form)
        if isinstance(mol, Refusal):
            return "RDKit", mol.reason
        try:
            key, packed = _compound_of(record, mol), pack_molecule(mol)
        except (RuntimeError, ValueError) as error:  # RDKit's violated invariants
            return "RDKit", f"RDKit: {next(iter(str(error).split(chr(10))), '')}"
        self.keys.append(key)
        self.molecules.append(packed)
        self.records.append(record)
        return None

    def result(self) -> PartData:
        """Join the columns."""
        splits = self._splits()
        fields = {
            **self._spectrum_fields(),
            **self._molecule_fields(),
            **self._text_fields(),
            "group": Dense(self._groups()),
            "split": Dense(splits),
        }
        per_split = np.bincount(splits, minlength=len(SPLIT_NAMES)).tolist()
        extra = {
            "counts": {**self.counts, "records": self.seen, "samples": len(self.records)},
            "refused_records": dict(self.reasons),
            "splits": dict(zip(SPLIT_NAMES, per_split, strict=True)),
            "rdkit": self.rdkit,
        }
        return PartData(fields=fields, refused=self.refused, extra=extra)

    def _groups(self) -> Array:
        return np.array([group_of(key) for key in self.keys], dtype=np.int64)

    def _splits(self) -> Array:
        source = self.source
        return assign_splits(self._groups(), source.train_ratio, source.val_ratio, source.seed)

    def _spectrum_fields(self) -> dict[str, FieldData]:
        mz_type = np.uint16 if self.payload.whole_mz else np.float32
        mz = np.concatenate([np.empty(0), *(piece[0] for piece in self.spectra)])
        intensity = [np.empty(0, np.float16), *(piece[1] for piece in self.spectra)]
        lengths = [np.empty(0, np.int64), *(piece[2] for piece in self.spectra)]
        offsets = offsets_of(np.concatenate(lengths))
        return {
            "mz": Ragged(mz.astype(mz_type), offsets),
            "intensity": Ragged(np.concatenate(intensity), offsets),
        }

    def _molecule_fields(self) -> dict[str, FieldData]:
        packed = self.molecules
        return {
            "atoms": _ragged([molecule.atoms for molecule in packed], np.uint32),
            "bonds": _ragged([molecule.bonds for molecule in packed], np.uint32),
            "functional_groups": Dense(
                np.array([molecule.functional_groups for molecule in packed], dtype=np.uint64)
            ),
            "ecfp_bits": _ragged([molecule.ecfp_bits for molecule in packed], np.uint16),
            "ecfp_counts": _ragged([molecule.ecfp_counts for molecule in packed], np.uint8),
            "mol_weight": Dense(
                np.array([molecule.mol_weight for molecule in packed], dtype=np.float32)
            ),
        }

    def _text_fields(self) -> dict[str, FieldData]:
        metas = [record.meta for record in self.records]
        texts = {
            name: [str(meta.get(name) or "") for meta in metas]
            for name in ("name", "inchikey", "formula")
        }
        texts["identifier"] = [_identifier(meta) for meta in metas]
        return {name: Ragged.from_strings(values) for name, values in texts.items()}


class _Spectra:
    """The peaks of one batch, all at once: a loop over records would cost more than RDKit."""

    def __init__(self, batch: SpectrumBatch, source: MassSpecSource) -> None:
        self._max_mz = source.max_mz
        lengths = np.diff(batch.offsets)
        num = len(lengths)
        self._owner = np.repeat(np.arange(num), lengths)
        self._mz = batch.mz
        intensity = batch.intensity.astype(np.float64)
        self._positive = intensity > 0
        # Where `bin_spectrum` begins to drop.
        limit = source.max_mz + (0.5 if source.rounding == "nearest" else 1.0)
        self._above = batch.mz >= limit
        base = np.zeros(num)
        np.maximum.at(base, self._owner, intensity)
        relative = intensity / np.where(base > 0, base, 1)[self._owner]
        self._relative = np.maximum(relative.astype(np.float16), _SMALLEST)
        self._lengths = lengths
        self._num_positive = np.bincount(self._owner[self._positive], minlength=num)
        inside = self._owner[self._positive & ~self._above]
        self._num_inside = np.bincount(inside, minlength=num)

    def refusal(self, number: int) -> tuple[str, str] | None:
        """Why this spectrum cannot be used, or None."""
        if not self._lengths[number]:
            return "no peaks", "the record has no peaks"
        if not self._num_positive[number]:
            return "no peaks", "all peaks of the record have zero intensity"
        if not self._num_inside[number]:
            return (
                "all peaks above max_mz",
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


def _ragged(pieces: list[Array], dtype: type[np.generic]) -> Ragged:
    lengths = np.fromiter((len(piece) for piece in pieces), dtype=np.int64, count=len(pieces))
    return Ragged(np.concatenate([np.empty(0, dtype), *pieces]), offsets_of(lengths))


def _no_structure(source: MassSpecSource) -> str:
    if source.structures == "smiles" or source.mol_dir is None:
        return "no structure: the record has no SMILES"
    places = f"no MOL file named after its ID, CAS or DB# in {source.mol_dir.name}"
    if source.structures == "mol":
        return f"no structure: {places}"
    return f"no structure: {places}, and no SMILES in the record"


def _identifier(meta: Mapping[str, Any]) -> str:
    """The first of ID, NIST#, DB# and CAS that the record has."""
    return next((str(meta[key]) for key in ("id", "nist", "db", "cas") if meta.get(key)), "")


def _compound_of(record: Record, mol: Mol) -> str:
    """Key of the compound: the InChIKey's first block as recorded, else as computed."""
    given = str(record.meta.get("inchikey") or "").strip().upper()
    return given.partition("-")[0] if _INCHIKEY.fullmatch(given) else compound_key(mol)
