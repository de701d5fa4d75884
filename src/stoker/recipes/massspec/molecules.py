"""Spectra for new molecules: SMILES, SDF, MOL, MSP or CSV in; predicted spectra as MSP out.

Enters: a file of molecules. Leaves: batches of fingerprints (and graphs, for the teacher) under their names, each with
an answer or a reason; a library in the NIST layout with base peak 999. Costs about 0.8 ms a molecule and the forward
pass; one batch in memory.
"""

from __future__ import annotations

import csv
import gzip
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from stoker.display import look_in
from stoker.errors import InputError, Refusal, unwritable
from stoker.ownership import SIGNATURE, has_signature, writing
from stoker.recipes.contract import RawBatch
from stoker.recipes.massspec.evaluation import peak_list
from stoker.sources.massspec.conditions import (
    CONDITION_COLUMNS,
    conditions_in,
    encode_conditions,
    spectrum_kind,
)
from stoker.sources.massspec.structures import healed, own_structure
from stoker.sources.molecules.packed import (
    ECFP_SIZE,
    PackedMolecule,
    StructureForm,
    molecular_formula,
    pack_molecule,
    read_structure,
)
from stoker.sources.msp import Record, SpectrumBatch, read_msp, write_msp
from stoker.train.predict import Predicted

Tensor = torch.Tensor
_SMILES = {".smi", ".smiles", ".txt"}
_SDF = {".sdf", ".sd", ".mol"}
_MSP = {".msp", ".msl"}
_CSV = {".csv", ".tsv"}
_SMILES_NAMES = ("smiles", "canonical_smiles", "canonicalsmiles", "isomeric_smiles", "structure")
_CONDITION_LABELS = ("adduct", "ion_mode", "collision_energy")
_NAME_NAMES = ("name", "title", "compound", "id", "identifier")


@dataclass(frozen=True)
class Wanted:
    """One molecule of the input.

    Attributes:
        name: Of the user's, or made from its place.
        text: Its structure, or "" where there is none.
        form: Of the text.
        why: Why there is no structure.
        meta: More to write beside the answer.
    """

    name: str
    text: str = ""
    form: StructureForm = "smiles"
    why: str = ""
    meta: Mapping[str, str] = field(default_factory=dict)


class MoleculeReader:
    """The molecules of a file in its order; see `RawReader`.

    Args:
        path: The file.
        graphs: Whether the model reads graphs.
        batch_size: Molecules at once.
        usual: Conditions for molecules whose input says none; empty where the model reads none.
    """

    key = "name"

    def __init__(
        self, path: Path, graphs: bool, batch_size: int, usual: Sequence[float] = ()
    ) -> None:
        self._path, self._graphs, self._batch_size = path, graphs, batch_size
        self._usual = list(usual)
        self._num_usual = 0
        self._num_refused = 0
        self.num_rows: int | None = None

    @classmethod
    def open(
        cls, given: Any, graphs: bool, batch_size: int, usual: Sequence[float] = ()
    ) -> MoleculeReader | None:
        """Return a reader of a file of molecules, or of a list of SMILES; None for anything else."""
        if not isinstance(given, str | os.PathLike):
            return None
        path = Path(given)
        known = _SMILES | _SDF | _MSP | _CSV
        if not path.is_file() or _ending(path) not in known:
            return None
        return cls(path, graphs, batch_size, usual)

    def __iter__(self) -> Iterator[RawBatch]:
        """Yield every molecule once."""
        held: list[Wanted] = []
        for wanted in read_molecules_of(self._path):
            held.append(wanted)
            if len(held) == self._batch_size:
                yield self._as_batch(held)
                held = []
        if held:
            yield self._as_batch(held)

    def _as_batch(self, wanted: Sequence[Wanted]) -> RawBatch:
        packed: list[PackedMolecule | None] = []
        reasons: list[str | None] = []
        formulas: list[str] = []
        for each in wanted:
            made = self._featurise(each)
            reasons.append(made if isinstance(made, str) else None)
            packed.append(None if isinstance(made, str) else made[0])
            formulas.append("" if isinstance(made, str) else made[1])
        structures = [each.text if each.form == "smiles" else "" for each in wanted]
        labels = {
            "formula": np.array(formulas, dtype=object),
            "smiles": np.array(structures, dtype=object),
        }
        answered = np.array([each is not None for each in packed])
        self._num_refused += int((~answered).sum())
        names = np.array([each.name for each in wanted], dtype=object)
        rows = as_rows(packed, self._graphs)
        if self._usual:
            rows["conditions"] = torch.tensor([self._conditions(each.meta) for each in wanted])
            for name in _CONDITION_LABELS:
                told = conditions_in([each.meta for each in wanted], name)
                labels[name] = np.array(told, dtype=object)
        return RawBatch(names, rows, answered, reasons, labels)

    def _conditions(self, meta: Mapping[str, str]) -> list[float]:
        """Return the conditions that the input says, or the usual ones of training."""
        if any(meta.get(key) for key in (*_CONDITION_LABELS, "precursor_type", "ms_level")):
            return encode_conditions(spectrum_kind(meta), meta)
        self._num_usual += 1
        return self._usual

    def _featurise(self, wanted: Wanted) -> tuple[PackedMolecule, str] | str:
        """Return a molecule with its formula, or why there is none."""
        if wanted.why:
            return wanted.why
        found = read_structure(wanted.text, wanted.form, file=str(self._path))
        if isinstance(found, Refusal):
            return found.reason
        try:
            return pack_molecule(found), molecular_formula(found)
        except (RuntimeError, ValueError) as error:  # RDKit's violated invariants
            return f"RDKit: {next(iter(str(error).splitlines()), '')}"

    def notes(self) -> Sequence[str]:
        """Return how many molecules have no answer."""
        refused = self._num_refused
        notes = [f"{refused:,} molecules have a reason instead of a spectrum"] if refused else []
        if self._num_usual:
            named = zip(CONDITION_COLUMNS, self._usual, strict=True)
            shown = ", ".join(f"{name} {value:g}" for name, value in named if value) or "EI"
            notes.append(
                f"{self._num_usual:,} molecules without conditions have those usual in training: {shown}"
            )
        return notes


def as_rows(packed: Sequence[PackedMolecule | None], graphs: bool) -> dict[str, Tensor]:
    """Return molecules as tensors of a row each; one that is None has zeros, and one atom where there are graphs."""
    ecfp = torch.zeros(len(packed), ECFP_SIZE)
    weights = torch.zeros(len(packed))
    for row, each in enumerate(packed):
        if each is not None:
            ecfp[row, each.ecfp_bits.astype(np.int64)] = torch.from_numpy(each.ecfp_counts).float()
            weights[row] = each.mol_weight
    rows = {"ecfp": ecfp, "mol_weight": weights}
    if not graphs:
        return rows
    for name in ("atoms", "bonds"):
        words = [
            np.zeros(1 if name == "atoms" else 0, np.uint32)
            if each is None
            else getattr(each, name)
            for each in packed
        ]
        counts = np.array([len(each) for each in words])
        table = np.zeros((len(packed), max(1, counts.max(initial=0))), np.int64)
        for row, each_words in enumerate(words):
            table[row, : len(each_words)] = each_words
        rows |= {name: torch.from_numpy(table), f"num_{name}": torch.from_numpy(counts)}
    return rows


def as_ragged(rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return atoms and bonds of `as_rows` as a loader hands them over: joined, with offsets."""
    made: dict[str, Tensor] = {}
    for name in ("atoms", "bonds"):
        table, counts = rows[name], rows[f"num_{name}"]
        inside = torch.arange(table.shape[1], device=table.device) < counts[:, None]
        made[name] = table[inside]
        made[f"{name}/offsets"] = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    return made


# -- files in ------------------------------------------------------------------------------------


def _ending(path: Path) -> str:
    return Path(path.stem if path.suffix.lower() == ".gz" else path.name).suffix.lower()


def read_molecules_of(path: Path) -> Iterator[Wanted]:
    """Yield the molecules of a file, by its ending: .smi, .sdf, .mol, .msp or .csv, perhaps with .gz."""
    ending = _ending(path)
    if ending in _MSP:
        return _from_msp(path)
    if ending in _SDF:
        return _from_sdf(path)
    return _from_csv(path) if ending in _CSV else _from_smiles(path)


def _open_text(path: Path) -> IO[str]:
    if path.suffix.lower() == ".gz":
        return gzip.open(path, "rt", encoding="utf-8", errors="replace")
    return path.open(encoding="utf-8", errors="replace")


def _from_smiles(path: Path) -> Iterator[Wanted]:
    with _open_text(path) as file:
        for number, line in enumerate(file, 1):
            text, _, name = (
                line.strip().partition(" ") if "\t" not in line else line.strip().partition("\t")
            )
            if text and not text.startswith("#"):
                yield Wanted(name.strip() or f"line {number}", text)


def _from_sdf(path: Path) -> Iterator[Wanted]:
    lines: list[str] = []
    number = 0
    with _open_text(path) as file:
        for line in [*file, "$$$$\n"] if _ending(path) == ".mol" else _closed(file):
            if line[:4] != "$$$$":
                lines.append(line)
                continue
            if any(each.strip() for each in lines):
                number += 1
                text, _ = healed("".join(lines))
                yield Wanted(lines[0].strip() or f"record {number}", text, "mol")
            lines = []


def _closed(file: Iterable[str]) -> Iterator[str]:
    """Yield the lines, and an end for a last record that has none."""
    yield from file
    yield "$$$$\n"


def _from_msp(path: Path) -> Iterator[Wanted]:
    for batch in read_msp(path):
        for record in batch.records:
            name = record.meta.get("name") or f"line {record.line}"
            found = own_structure(record.meta)
            if found is None:
                yield Wanted(name, why="the record has neither SMILES nor InChI")
            else:
                yield Wanted(name, *found, meta=record.meta)


def _from_csv(path: Path) -> Iterator[Wanted]:
    with _open_text(path) as file:
        first = file.readline()
        # The header says which separator it has: the one that leaves a column of structures.
        headers = {sep: _cells(first, sep) for sep in ",\t;|"}
        fits = [sep for sep, names in headers.items() if set(names) & set(_SMILES_NAMES)]
        separator = fits[0] if fits else ","
        header = headers[separator]
        rows = csv.reader(file, delimiter=separator)
        place = next((header.index(name) for name in _SMILES_NAMES if name in header), None)
        if place is None:
            raise InputError(
                f"{path} has the columns {', '.join(header) or 'none'}.",
                f"a column of structures: {', '.join(_SMILES_NAMES)}",
                look_in(path.parent),
            )
        named = next((header.index(name) for name in _NAME_NAMES if name in header), None)
        for number, row in enumerate(rows, 1):
            text = row[place].strip() if place < len(row) else ""
            name = row[named].strip() if named is not None and named < len(row) else ""
            cells = dict(zip(header, map(str.strip, row), strict=False))
            meta = {
                key: value for key, value in cells.items() if value and key in _CONDITION_LABELS
            }
            why = "" if text else "the cell is empty"
            yield Wanted(name or f"row {number}", text, why=why, meta=meta)


def _cells(line: str, separator: str) -> list[str]:
    cells = next(csv.reader([line], delimiter=separator), [])
    return [name.strip().lstrip("\ufeff").casefold() for name in cells]


# -- spectra out ---------------------------------------------------------------------------------


def write_spectra(out: Path, answers: Iterable[Predicted], about: str) -> int:
    """Write predictions as an MSP library; return how many molecules there were.

    A molecule without an answer is a record of 0 peaks whose comment has the reason.

    Args:
        out: The file; an older one of ours is replaced when it is whole.
        answers: With the column "spectrum", square roots of intensities.
        about: Which model it was, for the comments.
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
        meta["comment"] = f"{SIGNATURE}: {about if known else f'no spectrum: {reason}'}"
        spectrum = torch.from_numpy(np.ascontiguousarray(predicted.columns["spectrum"][row]))
        records.append(Record(0, meta))
        peaks.append(peak_list(spectrum, len(spectrum)) if known else [])
    flat = np.array([pair for each in peaks for pair in each], dtype=np.float64).reshape(-1, 2)
    offsets = np.concatenate([[0], np.cumsum([len(each) for each in peaks])]).astype(np.int64)
    return SpectrumBatch(records, flat[:, 0], np.rint(flat[:, 1]).astype(np.float32), offsets)
