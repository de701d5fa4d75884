"""Spectra for new molecules: reads SMILES, SDF, MOL, tables, spectrum libraries or frames; writes spectra as MSP.

Enters: a file, a folder or a frame of molecules. Leaves: batches of fingerprints (and graphs, for the teacher) with
names as keys, and reasons for molecules that cannot be read; a library in the NIST layout with base peak 999. Costs
about 0.8 ms a molecule and the forward pass; one batch in memory.
"""

from __future__ import annotations

import csv
import gzip
import itertools
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from pyarrow import feather

from stoker.display import command, look_in
from stoker.errors import InputError, Refusal, SourceError, unwritable
from stoker.ownership import SIGNATURE, has_signature, temporary_folder, writing
from stoker.recipes.contract import Facts, RawBatch
from stoker.recipes.massspec.evaluation import peak_list
from stoker.recipes.massspec.metrics import root_spectra
from stoker.recipes.raw_tables import as_frame
from stoker.sources.massspec.conditions import (
    Ranges,
    completed_conditions,
    conditions_in,
    described_conditions,
    encode_conditions,
    spectrum_kind,
    strange_conditions,
)
from stoker.sources.massspec.formats import UNREADABLE, as_msp
from stoker.sources.massspec.structures import healed, own_structure
from stoker.sources.molecules.packed import (
    PackedMolecule,
    StructureForm,
    pack_molecule,
    read_structure,
    toolkit,
)
from stoker.sources.msp import Record, Rounding, SpectrumBatch, bin_spectrum, read_msp, write_msp
from stoker.sources.msp.keys import spell
from stoker.sources.msp.text import NO_RECORD
from stoker.store.fields import Array
from stoker.train.predict import Predicted
from stoker.units import format_count

Tensor = torch.Tensor
_SMILES = {".smi", ".smiles", ".txt"}
_SDF = {".sdf", ".sd", ".mol"}
_SPECTRA = {".msp", ".msl", ".mgf", ".mzml"}
_CSV = {".csv", ".tsv"}
_PARQUET = {".parquet", ".pq"}
_TABLES = _PARQUET | {".feather", ".arrow"}
_KNOWN = _SMILES | _SDF | _SPECTRA | _CSV | _TABLES
_HEAD_CHARACTERS = 1 << 16
_STRUCTURES = (
    "smiles", "canonical_smiles", "canonicalsmiles", "isomeric_smiles", "structure", "inchi",
)  # fmt: skip
_NAMES = ("name", "title", "compound", "id", "identifier")
_CONDITION_LABELS = ("adduct", "ion_mode", "collision_energy")
_CONDITION_KEYS = (*_CONDITION_LABELS, "precursor_type", "ms_level", "spectrum_type")
_CONDITION_WORDS = {
    "ion_mode": "ion mode",
    "collision_energy": "collision energy",
    "adduct": "adduct",
}


@dataclass(frozen=True)
class Wanted:
    """One molecule of the input."""

    name: str  # from the input, or made from its position in the file
    text: str = ""  # its structure, or "" if there is none
    form: StructureForm = "smiles"  # of the text
    why: str = ""  # why there is no structure
    meta: Mapping[str, str] = field(default_factory=dict)  # metadata of the spectrum in the input
    is_unnamed: bool = False  # whether the name was made from a position in the file
    # m/z and intensities of the measured spectrum, if the input has one
    peaks: tuple[Array, Array] | None = None


class MoleculeReader:
    """The molecules of a file, a folder or a frame, in their order; see `RawReader`."""

    key = "name"

    def __init__(
        self, molecules: Iterable[Wanted], source: str, facts: Facts, batch_size: int
    ) -> None:
        self._molecules, self._source, self._batch_size = molecules, source, batch_size
        self._graphs, self._max_mz = "atoms" in facts["inputs"], int(facts["num_bins"]) - 1
        self._rounding: Rounding = facts.get("rounding", "nearest")
        # Of the training: the most common conditions, empty if the model reads none; the lowest and highest value of
        # each, empty if the checkpoint does not contain them.
        self._usual: Sequence[float] = facts.get("usual_conditions", ())
        self._ranges: Ranges = facts.get("condition_ranges", ())
        self._num_usual = self._num_refused = self._num_odd = self._num_measured = 0
        self.num_rows: int | None = None

    @classmethod
    def open(cls, given: Any, facts: Facts, batch_size: int) -> MoleculeReader | None:
        """Return a reader of a path, a list of SMILES or a table with a column of them; None for anything else."""
        if isinstance(given, str | os.PathLike):
            path = Path(given)
            if path.is_dir() or (path.is_file() and _ending(path) in _KNOWN):
                return cls(read_molecules_of(path), str(path), facts, batch_size)
            return None
        found = _from_memory(given)
        return (
            None if found is None else cls(found, f"the {type(given).__name__}", facts, batch_size)
        )

    def __iter__(self) -> Iterator[RawBatch]:
        """Yield all molecules, in batches."""
        molecules = iter(self._molecules)
        while held := list(itertools.islice(molecules, self._batch_size)):
            yield self._as_batch(held)

    def _as_batch(self, wanted: Sequence[Wanted]) -> RawBatch:
        packed: list[PackedMolecule] = []
        reasons: list[str | None] = []
        labels: dict[str, list[str]] = {"formula": [], "smiles": []}
        conditions: list[list[float]] = []
        for each in wanted:
            made = self._featurise(each)
            remarks: list[str] = []
            if isinstance(made, str):
                self._num_refused += 1
                reasons.append(made)
                packed.append(_NOTHING)
                formula, smiles = "", each.text if each.form == "smiles" else ""
            else:
                packed.append(made[0])
                formula, smiles, parts = made[1:]
                if parts > 1:
                    remarks.append(
                        f"{parts} parts that no bond joins (a salt or a mixture), predicted as one of their whole mass"
                    )
                if made[0].mol_weight > self._max_mz:
                    remarks.append(
                        f"heavier than the highest bin: peaks above m/z {self._max_mz} are not predicted"
                    )
            labels["formula"].append(formula)
            labels["smiles"].append(smiles)
            is_known = packed[-1] is not _NOTHING
            values, strange = self._conditions(each.meta, counted=is_known)
            conditions.append(values)
            if is_known:
                remarks += [strange] if strange else []
                reasons.append("; ".join(remarks) or None)
                self._num_odd += bool(remarks)
        fields = as_fields(packed, self._graphs)
        if self._usual:
            fields["conditions"] = torch.tensor(conditions)
            told = [described_conditions(values) for values in conditions]
            metas = [each.meta for each in wanted]
            for name in _CONDITION_LABELS:
                given = conditions_in(metas, name)
                labels[name] = [
                    text or known.get(name, "") for text, known in zip(given, told, strict=True)
                ]
        return RawBatch(
            np.array([each.name for each in wanted], dtype=object),
            fields,
            np.array([each is not _NOTHING for each in packed]),
            reasons,
            {name: np.array(texts, dtype=object) for name, texts in labels.items()},
            self._measured(wanted),
        )

    def _measured(self, wanted: Sequence[Wanted]) -> Array | None:
        """Return measured root spectra, zeros for molecules without one; None if no molecule has one."""
        if all(each.peaks is None for each in wanted):
            return None
        peaks = [each.peaks or (np.zeros(0), np.zeros(0, np.float32)) for each in wanted]
        offsets = np.cumsum([0, *(len(mz) for mz, _ in peaks)])
        mz, intensity = (np.concatenate(parts) for parts in zip(*peaks, strict=True))
        made = bin_spectrum(mz, intensity, offsets, self._max_mz, rounding=self._rounding)
        self._num_measured += sum(len(each) > 0 for each, _ in peaks)
        return root_spectra(torch.from_numpy(made.spectra)).numpy()

    def _conditions(self, meta: Mapping[str, str], counted: bool) -> tuple[list[float], str]:
        """Return the conditions of a molecule, and a remark on those that the model was not trained on, or ""."""
        is_told = any(meta.get(key) for key in _CONDITION_KEYS)
        kind = spectrum_kind(meta)
        if not self._usual:
            is_other = is_told and kind != "EI"
            return (
                [],
                f"the record is of an {kind} spectrum, and the model was trained on EI"
                if is_other
                else "",
            )
        values = encode_conditions(kind, meta) if is_told else list(self._usual)
        if not self._ranges:  # an older checkpoint without ranges
            self._num_usual += counted and not is_told
            return values, ""
        full = completed_conditions(values, self._usual, self._ranges)
        self._num_usual += counted and (not is_told or full != values)
        strange = strange_conditions(full, self._ranges)
        return full, f"training did not have {strange}" if strange else ""

    def _featurise(self, wanted: Wanted) -> tuple[PackedMolecule, str, str, int] | str:
        """Return a molecule with its formula, its SMILES and the number of its parts, or why there is none."""
        if wanted.why:
            return wanted.why
        found = read_structure(wanted.text, wanted.form)
        if isinstance(found, str):
            return found
        tools = toolkit()
        try:
            smiles = wanted.text if wanted.form == "smiles" else tools.chem.MolToSmiles(found)
            num_parts = len(tools.chem.GetMolFrags(found))
            return pack_molecule(found), tools.formula(found), smiles, num_parts
        except (RuntimeError, ValueError) as error:  # RDKit's violated invariants
            return f"RDKit: {next(iter(str(error).splitlines()), '')}"

    def notes(self) -> Sequence[str]:
        """Return notes: how many molecules have no answer, and how many have a remark."""
        notes = []
        if self._num_refused:
            count = format_count(self._num_refused, "molecule")
            notes.append(f"{count} without a spectrum; see 'reason'")
        if self._num_measured:
            count = format_count(self._num_measured, "record")
            notes.append(
                f"{count} with a measured spectrum: compounds of training may be among them"
            )
        if self._num_odd:
            count = format_count(self._num_odd, "molecule")
            notes.append(f"{count} with a remark; see 'reason'")
        if self._num_usual:
            known = described_conditions(self._usual)
            shown = ", ".join(
                f"{_CONDITION_WORDS.get(name, '')} {text}".strip() for name, text in known.items()
            )
            count = format_count(self._num_usual, "molecule")
            notes.append(f"what the input does not say of {count} is as usual in training: {shown}")
        return notes


_NOTHING = PackedMolecule(
    np.zeros(1, np.uint32), np.zeros(0, np.uint32), 0, np.zeros(0, np.uint16), np.zeros(0, np.uint8), 0.0
)  # fmt: skip
"""Stands for a molecule that cannot be read: one atom, since a graph has at least one."""


def as_fields(molecules: Sequence[PackedMolecule], graphs: bool) -> dict[str, Tensor]:
    """Return molecules in the form of a loader's batch."""
    weights = [each.mol_weight for each in molecules]
    fields = {"mol_weight": torch.tensor(weights, dtype=torch.float32)}
    for name in ("ecfp_bits", "ecfp_counts", *(("atoms", "bonds") if graphs else ())):
        parts = [getattr(each, name) for each in molecules]
        fields[name] = torch.from_numpy(np.concatenate(parts).astype(np.int64))
        fields[f"{name}/offsets"] = torch.from_numpy(np.cumsum([0, *map(len, parts)]))
    return fields


# -- files in ------------------------------------------------------------------------------------


def _ending(path: Path) -> str:
    return Path(path.stem if path.suffix.lower() == ".gz" else path.name).suffix.lower()


def read_molecules_of(path: Path) -> Iterator[Wanted]:
    """Yield the molecules of a file, or of all files of a folder in the order of their names.

    The ending decides: .smi, .txt, .sdf, .mol, .csv, .tsv, and spectra as packing reads them (MSP, MGF, MassBank
    records, mzML), each perhaps with .gz; Parquet and Feather.
    """
    if path.is_dir():
        return _from_folder(path)
    ending = _ending(path)
    if ending in _SPECTRA:
        return _from_spectra(path)
    if ending in _SDF:
        return _from_sdf(path)
    if ending in _TABLES:
        return _from_columns(path)
    return _from_csv(path) if ending in _CSV else _from_smiles(path)


def _from_columns(path: Path) -> Iterator[Wanted]:
    """Yield the rows of a Parquet or Feather file; a damaged file is an error."""
    read = pq.read_table if _ending(path) in _PARQUET else feather.read_table
    try:
        table = read(path)
    except (pa.ArrowException, OSError) as error:
        raise SourceError(
            f"{path} cannot be read as {_ending(path)[1:]}: {next(iter(str(error).splitlines()), '')}.",
            "a whole Parquet or Feather file",
            look_in(path.parent),
        ) from error
    rows = zip(*(column.to_pylist() for column in table.columns), strict=True)
    yield from _from_rows(table.column_names, rows, path)


def _from_folder(folder: Path) -> Iterator[Wanted]:
    files = [
        file
        for file in sorted(each for each in folder.rglob("*") if each.is_file())
        if not any(part[:1] == "." for part in file.relative_to(folder).parts)
    ]
    if not any(_ending(file) in _KNOWN for file in files):
        raise InputError(
            f"{folder} holds no molecules.",
            f"files ending in {', '.join(sorted(_KNOWN))}",
            command("ls", folder),
        )
    for file in files:
        place = str(file.relative_to(folder))
        if _ending(file) not in _KNOWN:
            yield Wanted(place, why=f"not a file of molecules ({_ending(file) or 'no ending'})")
            continue
        for each in read_molecules_of(file):
            # Names that were made from a position in a file are not unique in a folder.
            yield replace(each, name=f"{place} {each.name}") if each.is_unnamed else each


def _open_text(path: Path) -> IO[str]:
    if path.suffix.lower() == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", errors="replace", newline="")
    return path.open(encoding="utf-8-sig", errors="replace", newline="")


def _unnamed(place: str, text: str, form: StructureForm = "smiles", **more: Any) -> Wanted:
    return Wanted(place, text, form, is_unnamed=True, **more)


def _from_smiles(path: Path) -> Iterator[Wanted]:
    with _open_text(path) as file:
        head = file.read(_HEAD_CHARACTERS)
    if re.search(r"^(?:ACCESSION: |BEGIN IONS)", head, re.MULTILINE):  # a library, not SMILES
        yield from _from_spectra(path)
        return
    first = next((line for line in head.splitlines() if line.strip()), "")
    if _separator(first) is not None:
        yield from _from_csv(path)
        return
    with _open_text(path) as file:
        for number, line in enumerate(file, 1):
            # A SMILES ends at a tab, comma or blank; the rest of the line is the name.
            text, *rest = re.split(r"\t|,| ", line.strip(), maxsplit=1)
            is_header = line.strip() == first.strip() and spell(text).canonical == "smiles"
            if not text or text[0] == "#" or is_header:
                continue
            name = rest[0].strip() if rest else ""
            yield Wanted(name, text) if name else _unnamed(f"line {number}", text)


def _from_sdf(path: Path) -> Iterator[Wanted]:
    lines: list[str] = []
    number = 0
    with _open_text(path) as file:
        for line in itertools.chain(file, ["$$$$\n"]):  # the last record may lack its end mark
            if line[:4] != "$$$$":
                lines.append(line)
                continue
            if any(each.strip() for each in lines):
                number += 1
                text, _ = healed("".join(lines))
                name = lines[0].strip()
                yield (
                    Wanted(name, text, "mol") if name else _unnamed(f"record {number}", text, "mol")
                )
            lines = []


def _from_spectra(path: Path) -> Iterator[Wanted]:
    """Yield the records of a library; a record that cannot be read is a molecule with a reason."""
    with temporary_folder() as scratch:
        made = as_msp(path, scratch)
        unread = [each for each in made.refused if each.kind == UNREADABLE]
        for batch in read_msp(made.path):
            peaks = {
                id(each): (batch.mz[low:high], batch.intensity[low:high])
                for each, (low, high) in zip(batch.records, pairwise(batch.offsets), strict=True)
            }
            found = [(int(each.meta.get("source_line", each.line)), each) for each in batch.records]
            lost = [each for each in batch.refused if each.kind == NO_RECORD]
            # Consecutive refused lines are one record: keep the first.
            lines = {each.line for each in lost}
            lost = [each for each in lost if (each.line or 0) - 1 not in lines]
            rows: list[tuple[int, Record | Refusal]] = [*found]
            rows += [(each.line or 0, each) for each in lost]
            for line, each in sorted(rows, key=itemgetter(0)):
                yield replace(_of_record(line, each), peaks=peaks.get(id(each)))
        for refusal in unread:
            yield _of_record(refusal.line or 0, refusal)


def _of_record(line: int, given: Record | Refusal) -> Wanted:
    if isinstance(given, Refusal):
        return _unnamed(f"line {line}", "", why=given.reason)
    name = given.meta.get("name", "")
    found = own_structure(given.meta)
    why = "" if found else "the record has neither SMILES nor InChI"
    text, form = found or ("", "smiles")
    return Wanted(name or f"line {line}", text, form, why, meta=given.meta, is_unnamed=not name)


def _cells(line: str, separator: str) -> list[str]:
    return next(csv.reader([line], delimiter=separator), [])


def _separator(header: str) -> str | None:
    """Return the separator that leaves a column of structures in a header; None where none does."""
    for separator in ",\t;|":
        names = _cells(header, separator)
        if len(names) > 1 and _place(names, _STRUCTURES) is not None:
            return separator
    return None


def _place(names: Sequence[str], wanted: Sequence[str]) -> int | None:
    """Return the index of the first wanted column that exists; names have the same synonyms as in a library."""
    spelled = [spell(name.strip()).canonical for name in names]
    return next((spelled.index(name) for name in wanted if name in spelled), None)


def _from_csv(path: Path) -> Iterator[Wanted]:
    with _open_text(path) as file:
        first = file.readline()
        separator = _separator(first) or ","
        rows = csv.reader(file, delimiter=separator)
        try:
            yield from _from_rows(_cells(first, separator), rows, path)
        except csv.Error as error:
            raise SourceError(
                f"{path} is no table of text at line {rows.line_num + 1}: {error}.",
                "a CSV file with a header",
                look_in(path.parent),
            ) from error


def _from_rows(
    header: Sequence[str], rows: Iterable[Sequence[Any]], source: Any
) -> Iterator[Wanted]:
    place = _place(header, _STRUCTURES)
    if place is None:
        raise InputError(
            f"{source} has the columns {', '.join(header) or 'none'}.",
            f"a column of structures: {', '.join(_STRUCTURES)}",
            look_in(source.parent) if isinstance(source, Path) else "{'smiles': ['CCO']}",
        )
    form: StructureForm = "inchi" if spell(header[place].strip()).canonical == "inchi" else "smiles"
    named = _place(header, _NAMES)
    keys = [spell(name.strip()).canonical for name in header]
    for number, row in enumerate(rows, 1):
        cells = ["" if cell is None else str(cell).strip() for cell in row]
        cells += [""] * (len(header) - len(cells))
        meta = {
            key: cell
            for key, cell in zip(keys, cells, strict=False)
            if key in _CONDITION_KEYS
            and cell
            and cell.casefold() not in ("nan", "na", "n/a", "none")
        }
        name = cells[named] if named is not None else ""
        why = "" if cells[place] else "the cell is empty"
        yield Wanted(name or f"row {number}", cells[place], form, why, meta, is_unnamed=not name)


def _from_memory(given: Any) -> Iterator[Wanted] | None:
    """Return an iterator over the molecules of a list of SMILES or of a table; None for anything else."""
    if isinstance(given, np.ndarray) and given.ndim == 1 and given.dtype.names is None:
        given = given.tolist()
    if isinstance(given, list | tuple) and all(isinstance(each, str) for each in given):
        return _from_rows(["smiles"], ([each] for each in given), "the list")
    is_table = isinstance(given, Mapping | list | tuple | np.ndarray) or hasattr(given, "columns")
    if not is_table:
        return None
    table = as_frame(given, ["smiles"])
    rows = zip(*(column.to_pylist() for column in table.columns), strict=True)
    return _from_rows(table.column_names, rows, f"the {type(given).__name__}")


# -- spectra out ---------------------------------------------------------------------------------


def write_spectra(out: Path, answers: Iterable[Predicted], about: str) -> int:
    """Write predictions as an MSP library; return the number of molecules.

    A molecule without an answer is a record of 0 peaks whose comment has the reason.

    Args:
        out: The file; an older one of ours is replaced when the new one is complete.
        answers: Predictions with the column "spectrum", square roots of intensities.
        about: Description of the model, for the comments.
    """
    counted = 0

    def batches() -> Iterator[SpectrumBatch]:
        nonlocal counted
        for predicted in answers:
            yield as_spectra(predicted, about)
            counted += len(predicted.sample_ids)

    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with (
            writing(out, has_signature) as temporary,
            temporary.open("x", encoding="utf-8", newline="\n") as file,
        ):
            write_msp(batches(), file)
    except OSError as error:
        raise unwritable(out, error) from error
    return counted


def as_spectra(predicted: Predicted, about: str) -> SpectrumBatch:
    """Return predictions as spectra of whole intensities, base peak 999."""
    records, peaks = [], []
    for row, name in enumerate(map(str, predicted.sample_ids)):
        known = predicted.answered is None or bool(predicted.answered[row])
        meta = {"name": name}
        for key in ("formula", "smiles", *_CONDITION_LABELS):
            if key in predicted.labels and predicted.labels[key][row]:
                meta[key] = str(predicted.labels[key][row])
        reason = (
            predicted.reasons[row] if predicted.reasons is not None else None
        ) or "no structure"
        remark = (
            f"; {predicted.reasons[row]}" if predicted.reasons and predicted.reasons[row] else ""
        )
        meta["comment"] = f"{SIGNATURE}: {about + remark if known else f'no spectrum: {reason}'}"
        spectrum = torch.from_numpy(np.ascontiguousarray(predicted.columns["spectrum"][row]))
        records.append(Record(0, meta))
        peaks.append(peak_list(spectrum, len(spectrum)) if known else [])
    flat = np.array([pair for each in peaks for pair in each], dtype=np.float64).reshape(-1, 2)
    offsets = np.concatenate([[0], np.cumsum([len(each) for each in peaks])]).astype(np.int64)
    return SpectrumBatch(records, flat[:, 0], np.rint(flat[:, 1]).astype(np.float32), offsets)
