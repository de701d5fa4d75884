"""Molecules in files as people have them: other column names, other formats, folders, frames, partial conditions."""

import gzip

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

pytest.importorskip("rdkit")

from stoker.errors import InputError, SourceError
from stoker.recipes.massspec.molecules import MoleculeReader, read_molecules_of
from stoker.sources.massspec.conditions import (
    CONDITION_COLUMNS,
    completed_conditions,
    described_conditions,
    encode_conditions,
    strange_conditions,
)

PLAIN = {"inputs": [], "num_bins": 121}
HIGH = {"adduct": "[M+H]+", "ion_mode": "positive", "collision_energy": "40"}
LOW = {"adduct": "[M-H]-", "ion_mode": "negative", "collision_energy": "20"}
SEEN = np.array([encode_conditions("MS/MS", HIGH), encode_conditions("MS/MS", LOW)])
USUAL = SEEN[0].tolist()
RANGES = list(zip(SEEN.min(0).tolist(), SEEN.max(0).tolist(), strict=True))
MSMS = PLAIN | {"usual_conditions": USUAL, "condition_ranges": RANGES}
MGF = """BEGIN IONS
NAME=ethanol
SMILES=CCO
IONMODE=positive
ADDUCT=[M+H]+
29 10
END IONS
BEGIN IONS
NAME=broken
SMILES=CCC
29 -10
END IONS
"""
MASSBANK = """ACCESSION: MSBNK-A-1
RECORD_TITLE: propane; GC-EI-Q; MS
CH$NAME: propane
CH$FORMULA: C3H8
CH$SMILES: CCC
AC$INSTRUMENT_TYPE: EI-B
AC$MASS_SPECTROMETRY: MS_TYPE MS
PK$NUM_PEAK: 1
PK$PEAK: m/z int. rel.int.
  29 10 999
//
"""


def answers(given, model=PLAIN):
    """Return the rows that a model would answer: name, SMILES, reason, whether it has an answer, conditions."""
    reader = MoleculeReader.open(given, model, 3)
    found = []
    for batch in reader:
        for row, name in enumerate(batch.keys):
            labels = {key: values[row] for key, values in batch.labels.items()}
            found.append((name, labels, batch.reasons[row], bool(batch.answered[row])))
    return found, list(reader.notes())


def test_a_column_of_conditions_has_the_other_words_of_a_library(tmp_path):
    text = "Compound Name;SMILES;Precursor_Type;Ionization Mode;CE\nethanol;CCO;[M-H]-;negative;20 eV\n"
    (tmp_path / "a.csv").write_text(text)
    ((name, labels, reason, is_answered),), notes = answers(tmp_path / "a.csv", MSMS)
    assert (name, is_answered, reason) == ("ethanol", True, None)
    assert labels["adduct"] == "[M-H]-"
    assert labels["collision_energy"] == "20 eV"
    assert notes == []


def test_what_is_not_said_is_as_usual_in_training(tmp_path):
    (tmp_path / "a.csv").write_text("smiles,adduct\nCCO,\nCCC,[M+H]+\nCCC,[M-H]-\n")
    rows, notes = answers(tmp_path / "a.csv", MSMS)
    assert [labels["collision_energy"] for _, labels, _, _ in rows] == ["40", "40", "40"]
    assert [labels["adduct"] for _, labels, _, _ in rows] == ["[M+H]+", "[M+H]+", "[M-H]-"]
    assert notes == [
        (
            "what the input does not say of 3 molecules is as usual in training: "
            "MS/MS, ion mode positive, collision energy 40, adduct [M+H]+"
        )
    ]


@pytest.mark.parametrize(
    ("meta", "wanted"),
    [
        (HIGH, ""),
        (HIGH | {"collision_energy": "90"}, "collision energy 90 (it had 20 to 40)"),
        (HIGH | {"adduct": "[M+Na]+"}, "adduct [M+Na]+"),
        (HIGH | {"adduct": "[M+Li]+"}, "adduct of another kind"),
    ],
)
def test_conditions_that_training_did_not_have_are_named(meta, wanted):
    values = completed_conditions(encode_conditions("MS/MS", meta), USUAL, RANGES)
    assert strange_conditions(values, RANGES) == wanted


def test_an_ei_record_is_not_taken_for_ms_ms_nor_the_other_way(tmp_path):
    ei = "Name: a\nSMILES: CCO\nInstrument_type: EI-B\nMs_level: MS1\nNum Peaks: 1\n29 1\n\n"
    msms = (
        "Name: b\nSMILES: CCO\nPrecursor_type: [M+H]+\nCollision_energy: 40\nNum Peaks: 1\n29 1\n"
    )
    (tmp_path / "a.msp").write_text(ei + msms)
    (first, second), notes = answers(tmp_path / "a.msp", MSMS)
    assert first[2] == "training did not have EI spectra"
    assert first[1]["adduct"] == ""
    assert second[2] is None
    assert notes[1:] == ["1 molecule with a remark; see 'reason'"]
    (first, second), _ = answers(tmp_path / "a.msp", PLAIN)
    assert first[2] is None
    assert second[2] == "the record is of an MS/MS spectrum, and the model was trained on EI"


def test_conditions_are_described_as_they_were_encoded():
    assert described_conditions(SEEN[1]) == {"kind": "MS/MS"} | LOW
    assert described_conditions([0.0] * len(CONDITION_COLUMNS)) == {"kind": "EI"}


def test_a_molecule_above_the_last_bin_is_told(tmp_path):
    (tmp_path / "a.smi").write_text("CCO\nCCCCCCCCCCCC dodecane\n")
    rows, notes = answers(tmp_path / "a.smi")
    assert [reason for _, _, reason, _ in rows] == [
        None,
        "heavier than the highest bin: peaks above m/z 120 are not predicted",
    ]
    assert all(is_answered for *_, is_answered in rows)
    assert notes == ["1 molecule with a remark; see 'reason'"]


def test_spectrum_libraries_are_read_as_packing_reads_them(tmp_path):
    (tmp_path / "a.mgf").write_text(MGF)
    (tmp_path / "b.txt").write_text(MASSBANK)
    with gzip.open(tmp_path / "c.mgf.gz", "wt") as file:
        file.write(MGF)
    for name in ("a.mgf", "c.mgf.gz"):
        rows, notes = answers(tmp_path / name)
        assert [(key, labels["smiles"]) for key, labels, _, _ in rows] == [
            ("ethanol", "CCO"),
            ("line 8", ""),
        ]
        assert "negative" in rows[1][2]
        assert "1 molecule without a spectrum; see 'reason'" in notes
    (row,), _ = answers(tmp_path / "b.txt")
    assert (row[0], row[1]["smiles"], row[3]) == ("propane", "CCC", True)


def test_a_record_without_a_name_or_peaks_has_a_reason(tmp_path):
    text = "SMILES: CCO\nFormula: C2H6O\n\nName: b\nSMILES: CCC\nNum Peaks: 0\n\nSMILES: CCN\n"
    (tmp_path / "a.msp").write_text(text)
    rows, _ = answers(tmp_path / "a.msp")
    assert [(name, is_answered) for name, _, _, is_answered in rows] == [
        ("line 1", False),
        ("b", True),
        ("line 8", False),
    ]
    assert rows[0][2] == "metadata without a name, a peak count or peaks"


def test_every_file_of_a_folder_is_answered_or_has_a_reason(tmp_path):
    (tmp_path / "in" / "deep").mkdir(parents=True)
    (tmp_path / "in" / "a.smi").write_text("CCO\nCCC propane\n")
    (tmp_path / "in" / "deep" / "b.smi").write_text("CCN\n")
    (tmp_path / "in" / "notes.docx").write_text("x")
    (tmp_path / "in" / ".hidden").write_text("x")
    rows, _ = answers(tmp_path / "in")
    assert [(name, is_answered) for name, _, _, is_answered in rows] == [
        ("a.smi line 1", True),
        ("propane", True),
        ("deep/b.smi line 1", True),
        ("notes.docx", False),
    ]
    (tmp_path / "none").mkdir()
    with pytest.raises(InputError, match="holds no molecules"):
        answers(tmp_path / "none")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("header.txt", "name,smiles\nethanol,CCO\n"),
        ("header.smi", "SMILES name\nCCO ethanol\n"),
        ("commas.smi", "CCO,ethanol\n"),
        ("bom.csv", "\ufeffsmiles\tname\nCCO\tethanol\n"),
        ("inchi.csv", 'id,InChI\nethanol,"InChI=1S/C2H6O/c1-2-3/h3H,2H2,1H3"\n'),
    ],
)
def test_lists_are_read_however_they_are_written(tmp_path, name, text):
    (tmp_path / name).write_text(text, encoding="utf-8")
    (row,), _ = answers(tmp_path / name)
    assert (row[0], row[1]["smiles"], row[2]) == ("ethanol", "CCO", None)


def test_a_cell_beyond_the_limit_of_csv_is_refused(tmp_path):
    (tmp_path / "a.csv").write_text("smiles\n" + "C" * 200_000 + "\n")
    with pytest.raises(InputError, match="field larger than field limit"):
        list(read_molecules_of(tmp_path / "a.csv"))


@pytest.mark.parametrize(
    "given",
    [
        ["CCO", "bad("],
        ("CCO", "bad("),
        np.array(["CCO", "bad("]),
        {"SMILES": ["CCO", "bad("]},
        [{"smiles": "CCO"}, {"smiles": "bad("}],
        pa.table({"id": ["row 1", None], "smiles": ["CCO", "bad("]}),
    ],
)
def test_molecules_come_from_memory_too(given):
    rows, _ = answers(given)
    assert [(name, is_answered) for name, _, _, is_answered in rows] == [
        ("row 1", True),
        ("row 2", False),
    ]


@pytest.mark.parametrize("name", ["a.parquet", "a.feather", "A.PQ"])
def test_tables_of_columns_are_read_as_csv_is(tmp_path, name):
    """As chemists publish them: another word for SMILES, codes as text columns, a missing structure."""
    table = pa.table(
        {
            "id": pa.array(["C1", "C2", "C3"]).dictionary_encode(),
            "target": [1.0, 2.0, 3.0],
            "smile": ["CCO", None, "C1CC"],
        }
    )
    write = feather.write_feather if name.endswith("feather") else pq.write_table
    write(table, tmp_path / name)
    rows, notes = answers(tmp_path / name)
    assert [(key, labels["formula"], why) for key, labels, why, _ in rows[:2]] == [
        ("C1", "C2H6O", None),
        ("C2", "", "the cell is empty"),
    ]
    assert "unclosed ring" in rows[2][2]
    assert notes == ["2 molecules without a spectrum; see 'reason'"]
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 and nothing")
    with pytest.raises(SourceError, match="cannot be read as parquet"):
        answers(tmp_path / "bad.parquet")


def test_salts_mixtures_and_unknown_atoms_do_not_pass_without_a_word():
    rows, _ = answers(["CC(=O)[O-].[Na+]", "C1.C1", "*CC", "[2H]C", "C[N+](C)(C)C"])
    reasons = [(why, is_answered) for _, _, why, is_answered in rows]
    assert reasons[0] == (
        "2 parts that no bond joins (a salt or a mixture), predicted as one of their whole mass",
        True,
    )
    assert reasons[1] == (None, True)  # the ring closure joins them
    assert reasons[2] == ("the structure has an atom without an element (* or R)", False)
    assert reasons[3:] == [(None, True), (None, True)]


def test_a_broken_inchi_has_a_reason_that_says_something():
    rows, _ = answers({"inchi": ["InChI=1S/C2H6O/c1-2", "InChI=1S/C2H6O/c1-2-3/h3H,2H2,1H3"]})
    assert [row[2] for row in rows] == ["RDKit: no molecule in it", None]


def test_what_holds_no_molecules_is_refused():
    assert MoleculeReader.open(7, PLAIN, 3) is None
    with pytest.raises(InputError, match="has the columns mass"):
        answers({"mass": [1.0]})
