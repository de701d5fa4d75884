"""Mass spectra with their structures: `stoker pack massspec`.

Enters: one spectrum library (MSP, MSL, MGF, MassBank, SDF with peaks, mzML; plain or gzipped; or a folder) and a
folder, zip or SDF of MOL files, or SMILES or InChI inside the records. Leaves: one sample per record that has both
peaks and a structure; every other record is refused or ignored with its file, line and reason. Costs: about 0.8 ms of
CPU per molecule, all stages; one part (5,000 molecules) in memory per worker; 740 bytes per molecule on disk.

Fields of the store:

    mz, intensity            ragged   the peaks of one spectrum, rising in m/z
    atoms, bonds             ragged   uint32 words, see `molecules.ATOM_FIELDS`, `BOND_FIELDS`
    functional_groups        dense    uint64, 48 flags, see `functional_groups`
    ecfp_bits, ecfp_counts   ragged   counted ECFP4 of 4096 bits: uint16 bit, uint8 count
    mol_weight               dense    float32, monoisotopic mass of the structure in dalton
    name, inchikey, formula, identifier   text as the record has it; empty where it has none
    precursor_mz, adduct, charge, ion_mode, collision_energy, instrument, instrument_type, ms_level,
    retention_index, retention_time, spectrum_kind   the same, each where some record of the source has one
    conditions               dense    float32, the same as numbers, see `conditions.CONDITION_COLUMNS`; where other
                                      kinds of spectra than EI are taken
    group                    dense    int64, same for all records of one compound
    split                    dense    uint8, 0 train, 1 validation, 2 test

With `structures="none"` there are no fields of molecules; with `without_spectra` records without peaks are kept, with
empty spectra, so that a spectrum can be predicted for them.

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

import math
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import ClassVar, get_args

import numpy as np

from stoker.display import command, nearest
from stoker.errors import InputError, Refusal, RefusalList, SourceError
from stoker.sources.contract import (
    Account,
    Json,
    Part,
    PartContext,
    PartData,
    Preparation,
    recorded_options,
)
from stoker.sources.massspec.building import (
    SPLIT_NAMES,
    Building,
    Options,
    Payload,
    Spectra,
    Structures,
    first_mz_above,
)
from stoker.sources.massspec.conditions import KINDS, SpectrumKind, conditions_of, spectrum_kind
from stoker.sources.massspec.formats import LINE_IN_RECORD, as_msp
from stoker.sources.massspec.structures import own_structure
from stoker.sources.molecules.files import NO_MOLS, MolIndex, MolReader
from stoker.sources.molecules.functional_groups import FUNCTIONAL_GROUPS
from stoker.sources.molecules.packed import (
    ECFP_RADIUS,
    ECFP_SIZE,
    FEATURISER_VERSION,
    layout,
    require_rdkit,
    warm_up,
)
from stoker.sources.msp import MspRange, Rounding, read_range, split_msp
from stoker.store.fields import Array

_NEARLY_ALL = 0.9
_MOST_MZ = 65_535
_FEW = 0.01
"""Share of peaks above `max_mz` from which a note says so."""
_BY_OPTION: dict[str, tuple[SpectrumKind, ...]] = {
    "ei": ("EI",),
    "msms": ("MS/MS",),
    "ms1": ("MS1",),
    "all": KINDS,
}


@dataclass(frozen=True)
class _Survey:
    """Result of one pass over the MSP; the arrays have one entry per record."""

    lengths: list[int]  # records of each range
    rows: Array  # row of the structure in the index; -1 where there is none
    own: Array  # whether a record without a MOL file has a structure itself, or needs none
    kinds: Array  # index of the kind of spectrum in `KINDS`
    num_peaks: int  # sum over all records
    num_above: int  # peaks above `max_mz`
    highest_bin: int
    whole_mz: bool  # every m/z is a whole number
    conditions: set[str]  # conditions that some record has
    refused: list[Refusal]  # refused lines of ranges without a record to build


@dataclass(frozen=True)
class MassSpecSource(Options):
    """A spectrum library and its structures; see `Options` for what may be given."""

    kind: ClassVar[str] = "massspec"
    version: ClassVar[int] = 2

    def __post_init__(self) -> None:
        object.__setattr__(self, "msp", Path(self.msp))
        if self.mol_dir is not None:
            object.__setattr__(self, "mol_dir", Path(self.mol_dir))
        if not 1 <= self.max_mz <= _MOST_MZ:
            raise InputError(f"max_mz is {self.max_mz}.", "1 to 65535", "--max-mz 500")
        if self.max_samples is not None and self.max_samples < 1:
            raise InputError(f"max_samples is {self.max_samples}.", "1 or more, or none", "")
        if self.molecules_per_part < 1:
            raise InputError(f"molecules_per_part is {self.molecules_per_part}.", "1 or more", "")
        words = {"structures": Structures, "rounding": Rounding, "spectra": Spectra}
        for name, allowed in ((name, get_args(kind)) for name, kind in words.items()):
            if getattr(self, name) not in allowed:
                given = getattr(self, name)
                near = nearest(given, allowed) or allowed[0]
                raise InputError(
                    f"{name} is {given!r}.",
                    ", ".join(allowed),
                    f"--{name} {near} ({name}={near!r})",
                )
        shares = (self.train_ratio, self.val_ratio)
        if min(shares) < 0 or sum(shares) > 1 + 1e-9:
            raise InputError(
                f"train_ratio {shares[0]} and val_ratio {shares[1]} leave no test share.",
                "two shares of 0 or more that add up to at most 1",
                "train_ratio=0.8, val_ratio=0.1",
            )
        if self.structures == "mol" and self.mol_dir is None:
            raise InputError(
                "structures='mol' without a place for MOL files.",
                "a folder, a zip or an .sdf",
                "--mol-dir MOLS, or --structures smiles",
            )

    def files(self) -> Sequence[Path]:
        """The MSP and where the MOL files are."""
        return [self.msp] if self.mol_dir is None else [self.msp, self.mol_dir]

    def options(self) -> Mapping[str, Json]:
        """Everything that changes the store, and the version of the featuriser."""
        own = recorded_options(self, "msp", "mol_dir", "structure_advice")
        return own | {"featuriser_version": FEATURISER_VERSION}

    def prepare(self, scratch: Path) -> Preparation:
        """Find the structure of every record, and cut the MSP between records."""
        if self.structures != "none":
            require_rdkit()
        made = as_msp(self.msp, scratch)
        index = None
        if self.structures in ("auto", "mol"):
            place = self.mol_dir or made.structures
            index = MolIndex(place, place == made.structures) if place is not None else None
        ranges = split_msp(made.path, self.molecules_per_part)
        survey = _survey(made.path, ranges, index, self)
        kinds = self._kinds(survey)
        wanted = [KINDS.index(kind) for kind in kinds]
        usable = ((survey.rows >= 0) | survey.own) & np.isin(survey.kinds, wanted)
        end = len(usable)
        if self.max_samples is not None and usable.sum() >= self.max_samples:
            end = int(np.flatnonzero(usable)[self.max_samples - 1]) + 1
        parts: list[Part] = []
        first = 0
        for piece, length in zip(ranges, survey.lengths, strict=True):
            stop = min(first + length, end)
            if stop > first:
                taken = slice(first, stop)
                payload = Payload(
                    made.path,
                    piece,
                    first,
                    stop - first,
                    stop < first + length,
                    NO_MOLS if index is None else index.places(survey.rows[taken]),
                    survey.whole_mz,
                    kinds,
                    survey.kinds[taken].tobytes(),
                    tuple(sorted(survey.conditions)),
                    survey.highest_bin,
                )
                label = f"records {first}-{stop - 1} of {self.msp.name}"
                parts.append(Part(len(parts), label, int(usable[taken].sum()), payload))
            first += length
        if parts:
            before = {
                "unread": made.num_unread,
                "left_out": len(usable) - end,
                "ignored_files": dict(made.ignored),
            }
            parts[0] = replace(parts[0], payload=replace(parts[0].payload, before=before))
        lines = (
            replace(refusal, file=str(self.msp), kind=LINE_IN_RECORD) for refusal in survey.refused
        )
        return Preparation(
            parts=parts,
            # 200 peaks aside, a molecule of 50 heavy atoms with long names needs this much
            estimated_bytes=survey.num_peaks * (4 if survey.whole_mz else 6)
            + 1200 * sum(part.num_samples for part in parts),
            refused=[*made.refused, *lines],
            notes=[*made.notes, *_notes(self, survey, kinds, index)],
        )

    def _kinds(self, survey: _Survey) -> tuple[SpectrumKind, ...]:
        """Return the kinds of spectra to take: the user's choice, else the kind of nearly all records."""
        if self.spectra != "auto":
            return _BY_OPTION[self.spectra]
        counts = np.bincount(survey.kinds, minlength=len(KINDS))
        found = np.flatnonzero(counts).tolist()
        if found and counts.max() >= _NEARLY_ALL * counts.sum():
            return (KINDS[int(np.argmax(counts))],)
        if len(found) > 1:
            listed = ", ".join(f"{counts[number]:,} {KINDS[number]}" for number in found)
            options = [
                name
                for name, (kind, *_) in _BY_OPTION.items()
                if name != "all" and KINDS.index(kind) in found
            ]
            ways = [command("--spectra", name) for name in [*options, "all"]]
            raise SourceError(
                f"{self.msp} mixes kinds of spectra: {listed}.",
                "one kind, or all of them with the field spectrum_kind",
                ", or ".join(ways),
            )
        return KINDS

    def build(self, part: Part, context: PartContext) -> PartData:
        """Parse one stretch of the MSP and featurise its molecules."""
        payload: Payload = part.payload
        building = Building(self, payload, "" if self.structures == "none" else warm_up())
        with MolReader(payload.places) as reader:
            for batch in read_range(payload.msp, payload.range):
                building.take(batch, reader, context)
                context.guard(None)
                if payload.is_cut and building.seen == payload.num_records:
                    break  # max_samples ends inside this part
        return building.result()

    def finish(self, extras: Sequence[Mapping[str, Json]]) -> Mapping[str, Json]:
        """Add up the counts, and describe the layout for readers of the store."""
        names = ("counts", "refused_records", "ignored_records", "splits", "spectrum_kinds")
        sums: dict[str, Counter[str]] = {name: Counter() for name in names}
        for extra in extras:
            for name, counter in sums.items():
                counter.update(extra[name])
        # Accounts of files, lines and records; the last one counts samples.
        before = extras[0]["before"] if extras else {}
        accounts = []
        if files := before.get("ignored_files"):
            accounts.append(Account("other files", sum(files.values()), 0, {}, files))
        counts = sums["counts"]
        if lines := counts["unreadable_lines"]:
            accounts.append(Account("unreadable lines", lines, 0, {LINE_IN_RECORD: lines}))
        unread, left = int(before.get("unread", 0)), int(before.get("left_out", 0))
        refused = {**sums["refused_records"], "unreadable record": unread}
        ignored = {**sums["ignored_records"], "beyond --max-samples": left}
        found = counts["records"] + unread + left
        accounts.append(Account("records", found, counts["samples"], refused, ignored))
        return {
            "accounts": [asdict(account) for account in accounts],
            "spectrum_kinds": dict(sums["spectrum_kinds"]),
            "has_structures": self.structures != "none",
            "counts": dict(sums["counts"]),
            "refused_records": dict(sums["refused_records"]),
            "splits": {name: sums["splits"][name] for name in SPLIT_NAMES},
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


def _survey(
    msp: Path, ranges: Sequence[MspRange], index: MolIndex | None, source: MassSpecSource
) -> _Survey:
    structures = source.structures
    # Ten bytes per record: a library may have millions.
    rows, own, kinds = array("q"), bytearray(), bytearray()
    lengths: list[int] = []
    keys: set[str] = set()
    refused = RefusalList()
    num_peaks, num_above, highest, whole_mz = 0, 0, 0.0, True
    for piece in ranges:
        first, lines = len(rows), RefusalList()
        for batch in read_range(msp, piece):
            for record in batch.records:
                row = index.find(record.meta) if index is not None else -1
                rows.append(row)
                # Only asked where no MOL file was found.
                may_own = row < 0 and structures != "mol"
                has_own = may_own and own_structure(record.meta) is not None
                own.append(structures == "none" or has_own)
                kinds.append(KINDS.index(spectrum_kind(record.meta)))
                keys.update(record.meta)
            num_peaks += len(batch.mz)
            num_above += int((batch.mz >= first_mz_above(source)).sum())
            highest = max(highest, float(batch.mz.max(initial=0)))
            is_whole = (batch.mz == np.rint(batch.mz)) & (batch.mz <= 65_535)
            whole_mz = whole_mz and bool(is_whole.all())
            lines.extend(batch.refused)
        lengths.append(len(rows) - first)
        # `build` reports what it reads; a range without records is never built.
        refused.extend([] if lengths[-1] else lines)
    return _Survey(
        lengths,
        np.array(rows, dtype=np.int64),
        np.frombuffer(own, dtype=bool),
        np.frombuffer(kinds, dtype=np.uint8),
        num_peaks,
        num_above,
        min(math.ceil(highest), _MOST_MZ),
        whole_mz,
        conditions_of(keys) | ({"spectrum_kind"} if any(kinds) else set()),
        refused,
    )


def _notes(
    source: MassSpecSource, survey: _Survey, kinds: Sequence[SpectrumKind], index: MolIndex | None
) -> list[str]:
    num_records = len(survey.rows)
    num_mol = int((survey.rows >= 0).sum())
    num_own = int((survey.own & (survey.rows < 0)).sum())
    notes = []
    if source.structures == "none":
        notes.append("Packing spectra without structures")
    if index is not None:
        notes.append(f"Found {num_mol:,} compounds with MOL files")
    if num_own and source.structures != "none":
        more = "more " if index is not None else ""
        notes.append(f"Found {num_own:,} {more}compounds with a SMILES in the record")
    if left := num_records - num_mol - num_own:
        notes.append(f"{left:,} of {num_records:,} records have no structure and will be refused")
    if source.max_samples is not None:
        notes.append(f"Taking at most the first {source.max_samples:,} that have a structure")
    for number, kind in enumerate(KINDS):
        num = int((survey.kinds == number).sum())
        if num and kind not in kinds:
            notes.append(f"{num:,} {kind} spectra are ignored; --spectra all takes them")
        elif num and number:
            notes.append(f"{num:,} of {num_records:,} records are {kind} spectra, not EI")
    if survey.num_above > _FEW * survey.num_peaks:
        share = survey.num_above / survey.num_peaks
        notes.append(
            f"{survey.num_above:,} of {survey.num_peaks:,} peaks ({share:.0%}) lie above --max-mz {source.max_mz}, "
            f"and no model gets them; --max-mz {survey.highest_bin} takes all"
        )
    whole = "uint16: every value is a whole number"
    stored = whole if survey.whole_mz else "float32: some have decimals"
    return [*notes, f"m/z is stored as {stored}"]
