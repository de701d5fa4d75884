"""Synthetic structures and spectra for the mass-spectra tests; no library data is shipped."""

from __future__ import annotations

import random
import zipfile
from pathlib import Path

# Salts, charges, isotopes, rings of all kinds, odd elements, stereo, single atoms.
SMILES = (
    "C", "O", "[H][H]", "[He]", "[Na+].[Cl-]", "CCO", "C[C@H](O)c1ccccc1", "C[C@@H](O)c1ccccc1",
    "c1ccc2cc3ccccc3cc2c1", "c1ccc2ccccc2c1", "CC(=O)Oc1ccccc1C(=O)O", "Cn1c(=O)c2c(ncn2C)n(C)c1=O",
    "C[Si](C)(C)OCCC(=O)OC", "FC(F)(F)c1ccc(Cl)cc1Br", "Ic1ccccc1", "CS(=O)(=O)C", "CS(C)=O",
    "NS(=O)(=O)c1ccc(N)cc1", "O=P(O)(O)OCC", "[O-][N+](=O)c1ccccc1", "C#N", "CC#CC", "C=C=C",
    "[2H]C([2H])([2H])O", "[13CH4]", "OB(O)c1ccccc1", "C[Se]C", "[Fe+2].[Cl-].[Cl-]",
    "S(F)(F)(F)(F)(F)F", "P(Cl)(Cl)(Cl)(Cl)Cl", "C[N+](C)(C)C", "[NH3+]CC(=O)[O-]", "O=C1C=CC(=O)C=C1",
    "C1CC1", "C1CCCCC1", "CCCCCCCCCC(=O)OCC(COC(=O)CCCCCCC)OC(=O)CCCCCCC", "F/C=C/F", "F/C=C\\F",
    "c1ccsc1", "c1ccoc1", "c1cc[nH]c1", "c1ccncc1", "O=C1CCCN1", "O=C1CCCO1", "C1CO1", "CC=O", "C=O",
    "N[Pt](N)(Cl)Cl", "[O-2].[Mg+2]", "[Al+3].[OH-].[OH-].[OH-]", "[Ti+4]", "CN=NC", "CC(C)=NO",
)  # fmt: skip


def mol_block(smiles: str, *, title: str = "", nist: bool = False) -> str:
    """A MOL block as RDKit writes it, or as NIST does: CRLF, blank atom fields."""
    from rdkit import Chem

    mol = Chem.MolFromSmiles(smiles)
    from rdkit.Chem import rdDepictor

    rdDepictor.Compute2DCoords(mol)
    lines = Chem.MolToMolBlock(mol).split("\n")
    lines[0] = title
    if not nist:
        return "\n".join(lines)
    num_atoms = int(lines[3][:3])
    for number in range(4, 4 + num_atoms):
        line = lines[number]
        lines[number] = line[:36] + "   " + line[39:42] + "     0"
    return "\r\n".join(lines)


def inchikey(smiles: str) -> str:
    from rdkit import Chem, rdBase

    with rdBase.BlockLogs():
        return Chem.MolToInchiKey(Chem.MolFromSmiles(smiles))


def msp_record(
    name: str,
    *,
    peaks: list[tuple[float, float]] | None = None,
    newline: str = "\n",
    **fields: str,
) -> str:
    """One record; `fields` are MSP keys with `_` for `#` at the end (`DB_` is `DB#`)."""
    peaks = [(15, 10), (29, 999), (31, 500.0)] if peaks is None else peaks
    lines = [f"Name: {name}"]
    lines += [f"{key[:-1] + '#' if key.endswith('_') else key}: {fields[key]}" for key in fields]
    lines.append(f"Num Peaks: {len(peaks)}")
    lines += [f"{mz:g} {intensity:g}" for mz, intensity in peaks]
    return newline.join(lines) + newline + newline


def write_library(
    folder: Path, smiles: tuple[str, ...], *, home: str = "folder"
) -> tuple[Path, Path]:
    """An MSP and its MOL files, in LIB2NIST's names; returns their paths."""
    random_source = random.Random(7)
    texts, blocks = [], {}
    for number, structure in enumerate(smiles):
        weight = random_source.randrange(60, 400)
        peaks = sorted(
            (float(mz), float(random_source.randrange(1, 999)))
            for mz in random_source.sample(range(10, weight), 20)
        )
        texts.append(
            msp_record(
                f"compound {number}", InChIKey=inchikey(structure), Formula="X", ID=str(number),
                peaks=peaks,
            )
        )  # fmt: skip
        blocks[f"id{number}.mol"] = mol_block(structure, nist=number % 2 == 0)
    msp = folder / "library.msp"
    msp.write_text("".join(texts))
    return msp, write_mols(folder, blocks, home)


def write_mols(folder: Path, blocks: dict[str, str], home: str) -> Path:
    """MOL files in a folder, a zip, or one SDF with an ID property."""
    if home == "folder":
        mols = folder / "mols"
        mols.mkdir()
        for name, block in blocks.items():
            (mols / name).write_text(block, newline="")
        return mols
    if home == "zip":
        mols = folder / "mols.zip"
        with zipfile.ZipFile(mols, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, block in blocks.items():
                archive.writestr(f"MOL/{name.upper()}", block)
        return mols
    mols = folder / "mols.sdf"
    with mols.open("w", newline="") as file:
        for name, block in blocks.items():
            file.write(f"{block.rstrip()}\n> <ID>\n{name[2:-4]}\n\n$$$$\n")
    return mols
