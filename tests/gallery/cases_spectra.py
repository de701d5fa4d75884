# ruff: noqa: E501  a table
"""Small spectrum libraries of every format and flaw, and what stoker does with each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from gallery.case import GalleryCase
from molecule_makers import inchikey, mol_block, msp_record

KIND = "Spectra and molecules: `stoker pack massspec`"
ETHANOL = {"SMILES": "CCO", "Formula": "C2H6O", "MW": "46", "InChIKey": inchikey("CCO")}


def Case(  # noqa: N802  a row of the table
    what: str,
    text: str | Callable[[Path], object],
    name: str,
    options: str,
    does: str,
    packed: int | None = None,
    says: tuple[str, ...] = (),
    check: Callable[[Any], None] | None = None,
) -> GalleryCase:
    """Return a case; `packed` is None where the command is refused."""

    def write(folder: Path) -> None:
        if callable(text):
            text(folder)
        else:
            (folder / name).write_text(text)

    words = ["pack", "massspec", "out", "--msp", name, "-j", "1", *options.split()]
    return GalleryCase(
        what,
        does,
        write,
        name=".",
        code=None if packed is None else 0,
        says=says,
        words=words,
        packed=packed,
        check=check,
    )


MGF = """# made by a test
BEGIN IONS
TITLE=scan 1
NAME=Ethanol M+H
PEPMASS=47.0491 1200
CHARGE=1+
SMILES=CCO
ADDUCT=[M+H]+
COLLISION_ENERGY=20
SOURCE_INSTRUMENT=LC-ESI-QTOF
RTINSECONDS=12.5
19.0178 5
29.0386 100 1+
47.0491 30
END IONS
"""
MASSBANK = """ACCESSION: MSBNK-Test-T0001
RECORD_TITLE: Ethanol; EI-B; MS
CH$NAME: Ethanol
CH$NAME: Ethyl alcohol
CH$FORMULA: C2H6O
CH$EXACT_MASS: 46.0419
CH$SMILES: CCO
CH$IUPAC: InChI=1S/C2H6O/c1-2-3/h3H,2H2,1H3
CH$LINK: CAS 64-17-5
CH$LINK: INCHIKEY LFQSCWFLJHTTHZ-UHFFFAOYSA-N
AC$INSTRUMENT: HITACHI M-80
AC$INSTRUMENT_TYPE: EI-B
AC$MASS_SPECTROMETRY: MS_TYPE MS
AC$MASS_SPECTROMETRY: ION_MODE POSITIVE
PK$SPLASH: splash10-0001
PK$NUM_PEAK: 3
PK$PEAK: m/z int. rel.int.
  27 10 100
  31 99 999
  45 40 400
//
"""
ITEMS = """> <NAME>
Ethanol

> <INCHIKEY>
LFQSCWFLJHTTHZ-UHFFFAOYSA-N

> <FORMULA>
C2H6O

> <SPECTRUM TYPE>
MS2

> <PRECURSOR TYPE>
[M+H]+

> <NUM PEAKS>
2

> <MASS SPECTRAL PEAKS>
29.0386 100
47.0491 30

$$$$
"""
SDF = mol_block("CCO", title="a") + ITEMS


def _text(field: str, *expected: str) -> Callable[[Any], None]:
    def check(store: Any) -> None:
        assert [store.read_text(field, n) for n in range(store.num_samples)] == list(expected)

    return check


def _peaks(*expected: float) -> Callable[[Any], None]:
    def check(store: Any) -> None:
        got = store.shards[0].arrays["mz/values"].read(0, len(expected))
        assert [round(float(value), 3) for value in got] == [round(value, 3) for value in expected]

    return check


def _lacks(field: str) -> Callable[[Any], None]:
    def check(store: Any) -> None:
        assert field not in store.fields

    return check


def _library(text: str, **files: str) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        (folder / "lib.msp").write_text(text)
        for name, content in files.items():
            path = folder / name.replace("__", "/").replace("_dot_", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)

    return write


def _folder(folder: Path) -> None:
    (folder / "lib" / "deep").mkdir(parents=True)
    (folder / "lib" / "a.txt").write_text(MASSBANK)
    (folder / "lib" / "deep" / "b.msp").write_text(msp_record("Ethanol", **ETHANOL))
    (folder / "lib" / "notes.pdf").write_text("x")
    (folder / "lib" / ".hidden.txt").write_text("x")


def _without_end(block: str) -> str:
    return block.replace("M  END\n", "")


MSMS = {
    **ETHANOL,
    "PrecursorMZ": "47.05",
    "Precursor_type": "[M+H]+",
    "Collision_energy": "20 eV",
    "Instrument_type": "LC-ESI-QTOF",
}
ANY = "--on-bad quarantine --bad-budget 100%"

CASES = [
    Case("MSP with SMILES", msp_record("Ethanol", **ETHANOL), "lib.msp", "", "packed", 1, ("1 records found = 1 packed",), _text("name", "Ethanol")),
    Case("MGF", MGF, "lib.mgf", "", "packed with its precursor, adduct, charge and energy; MS/MS, said", 1,
         ("1 records of MGF read", "1 of 1 records are MS/MS spectra"), _text("adduct", "[M+H]+")),
    Case("MGF, peaks", MGF, "lib.mgf", "", "the first two columns", 1, (), _peaks(19.0178, 29.0386, 47.0491)),
    Case("MGF without END IONS", MGF.replace("END IONS", ""), "lib.mgf", ANY, "the record is refused", None, ("the file ends inside the record",)),
    Case("MassBank record", MASSBANK, "rec.txt", "", "packed; EI by its instrument", 1, ("1 records of MassBank read",), _text("instrument", "HITACHI M-80")),
    Case("SDF with peaks", SDF, "lib.sdf", "", "packed with its own MOL block", 1, ("1 records of SDF read", "Found 1 compounds with MOL files"), _text("spectrum_kind", "MS/MS")),
    Case("SDF with peaks, two records", SDF + mol_block("CCN", title="b") + ITEMS.replace("C2H6O", "C2H7N").replace("LFQSCWFLJHTTHZ", "QUSNBJAOOMFDIB"), "lib.sdf", "",
         "each record with its own structure", 2, (), _text("formula", "C2H6O", "C2H7N")),
    Case("a folder of records", _folder, "lib", "", "all files, in order; others ignored and counted", 2,
         ("ignored 1: hidden or system file", "ignored 1: no spectra (.pdf)"), _text("name", "Ethanol", "Ethanol")),
    Case("MS/MS records", msp_record("Ethanol", **MSMS), "lib.msp", "", "packed, and said; conditions are fields", 1,
         ("1 of 1 records are MS/MS spectra, not EI",), _text("collision_energy", "20 eV")),
    Case("EI and MS/MS mixed", msp_record("a", **ETHANOL) + msp_record("b", **MSMS), "lib.msp", "", "refused, with the options", None,
         ("mixes kinds of spectra: 1 EI, 1 MS/MS", "--spectra ei")),
    Case("EI of a mixed library", msp_record("a", **ETHANOL) + msp_record("b", **MSMS), "lib.msp", "--spectra ei", "the others are ignored and counted", 1,
         ("ignored 1: MS/MS spectrum",), _text("name", "a")),
    Case("a few MS/MS records in an EI library", msp_record("a", **ETHANOL) * 20 + msp_record("b", **MSMS), "lib.msp", "", "ignored, and said", 20,
         ("1 MS/MS spectra are ignored; --spectra all takes them",), _text("spectrum_kind", *["EI"] * 20)),
    Case("retention index", msp_record("a", **ETHANOL, RI="427"), "lib.msp", "", "a field", 1, (), _text("retention_index", "427")),
    Case("InChI only", msp_record("a", InChI="InChI=1S/C2H6O/c1-2-3/h3H,2H2,1H3"), "lib.msp", "", "the structure is read from it", 1),
    Case("a MOL file of another compound, by id", _library(msp_record("Water", ID="7", Formula="H2O", MW="18"), mols__id7_dot_mol=mol_block("CC(=O)Oc1ccccc1C(=O)O")),
         "lib.msp", f"--mol-dir mols {ANY}", "refused, with both formulas", None, ("id7.mol is C9H8O4, and the record says H2O",)),
    Case("the same, with a mass only", _library(msp_record("Water", ID="7", ExactMass="18.0106"), mols__id7_dot_mol=mol_block("CC(=O)Oc1ccccc1C(=O)O")),
         "lib.msp", f"--mol-dir mols {ANY}", "refused, with both masses", None, ("has the mass 180.0423, and the record says 18.0106",)),
    Case("the same, with an InChIKey only", _library(msp_record("Water", ID="7", InChIKey=inchikey("O")), mols__id7_dot_mol=mol_block("CCO")),
         "lib.msp", f"--mol-dir mols {ANY}", "refused, with both keys", None, ("has the InChIKey LFQSCWFLJHTTHZ, and the record says XLYOFNOQVPJJNP",)),
    Case("a SMILES that contradicts the formula", msp_record("a", SMILES="CCN", Formula="C2H6O"), "lib.msp", ANY, "refused, with both formulas", None,
         ("is C2H7N, and the record says C2H6O",)),
    Case("SDF structures by InChIKey", _library(msp_record("a", ID="1", **{k: v for k, v in ETHANOL.items() if k != "SMILES"}),
         mols_dot_sdf=mol_block("CCN") + "> <ID>\n1\n\n$$$$\n" + mol_block("CCO") + f"> <INCHIKEY>\n{inchikey('CCO')}\n\n$$$$\n"),
         "lib.msp", "--mol-dir mols.sdf", "the InChIKey is looked for before the id", 1),
    Case("SDF structures by InChI", _library(msp_record("a", ID="1", Formula="C2H6O", InChI="InChI=1S/C2H6O/c1-2-3/h3H,2H2,1H3"),
         mols_dot_sdf=mol_block("CCN") + "> <ID>\n1\n\n$$$$\n" + mol_block("CCO") + "> <InChI>\nInChI=1S/C2H6O/c1-2-3/h3H,2H2,1H3\n\n$$$$\n"),
         "lib.msp", "--mol-dir mols.sdf --structures mol", "the InChI is looked for before the id", 1),
    Case("a MOL file without M  END", _library(msp_record("a", ID="7", Formula="C2H6O"), mols__id7_dot_mol=_without_end(mol_block("CCO"))),
         "lib.msp", "--mol-dir mols", "healed", 1),
    Case("no structure", msp_record("a"), "lib.msp", ANY, "refused", None, ("no structure: the record has no SMILES",)),
    Case("spectra without structures", msp_record("a") + msp_record("b"), "lib.msp", "--structures none", "packed without molecules", 2,
         ("Packing spectra without structures",), _lacks("atoms")),
    Case("Num Peaks: 0", msp_record("a", **ETHANOL, peaks=[]), "lib.msp", ANY, "refused, with the option", None, ("the record has no peaks", "--without-spectra")),
    Case("Num Peaks: 0, for prediction", msp_record("a", **ETHANOL, peaks=[]), "lib.msp", "--without-spectra", "packed with an empty spectrum", 1),
    Case("more records than --max-samples", msp_record("a", **ETHANOL) * 5, "lib.msp", "--max-samples 2", "the others are ignored and counted", 2,
         ("ignored 3: beyond --max-samples",)),
    Case("nothing but refused records, with any budget", msp_record("a"), "lib.msp", ANY, "refused: no sample is left", None, ("no sample is left",)),
]  # fmt: skip
