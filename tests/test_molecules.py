"""Packed molecules against RDKit asked directly, and the 48 groups against named compounds."""

from __future__ import annotations

import builtins
import importlib.util
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

Chem = pytest.importorskip("rdkit.Chem", reason="the extra 'chem' is not installed")

from molecule_makers import SMILES, mol_block  # noqa: E402
from stoker.errors import MissingExtraError  # noqa: E402
from stoker.sources.molecules import functional_groups  # noqa: E402
from stoker.sources.molecules import packed as molecules  # noqa: E402
from stoker.sources.molecules.functional_groups import (  # noqa: E402
    FUNCTIONAL_GROUPS,
    NUM_GROUPS,
    PRESENCE,
    expand_functional_groups,
    find_functional_groups,
)
from stoker.sources.molecules.packed import (  # noqa: E402
    ATOM_FIELDS,
    BOND_FIELDS,
    MAX_ATOMS,
    compound_key,
    expand_atoms,
    expand_bonds,
    pack_molecule,
    read_structure,
)


def read(smiles):
    mol = read_structure(smiles, "smiles")
    assert not isinstance(mol, str), mol
    return mol


# -- the words against RDKit itself ----------------------------------------------------------


def one_hot(value, classes):
    return [float(value == known) for known in classes]


def reference_atom(atom):
    """The 48 features by name, straight from RDKit's own strings."""
    symbols = ["H", "C", "N", "O", "F", "Si", "P", "S", "Cl", "Br", "I"]
    symbol = atom.GetSymbol() if atom.GetSymbol() in symbols else "other"
    charge = atom.GetFormalCharge() if abs(atom.GetFormalCharge()) <= 3 else "other"
    chirality = {
        "CHI_UNSPECIFIED": 0, "CHI_TETRAHEDRAL_CW": 1, "CHI_TETRAHEDRAL_CCW": 2, "CHI_OTHER": 3,
    }.get(str(atom.GetChiralTag()), 4)  # fmt: skip
    shapes = ["S", "SP", "SP2", "SP3", "SP3D", "SP3D2"]
    shape = str(atom.GetHybridization())
    return [
        *one_hot(symbol, [*symbols, "other"]),
        *one_hot(min(atom.GetDegree(), 7), range(8)),
        *one_hot(charge, [*range(-3, 4), "other"]),
        *one_hot(chirality, range(5)),
        *one_hot(min(atom.GetTotalNumHs(), 5), range(6)),
        *one_hot(shape if shape in shapes else "other", [*shapes, "other"]),
        float(atom.GetIsAromatic()),
        float(atom.IsInRing()),
    ]


def reference_bond(bond):
    names = {"SINGLE": 0, "DOUBLE": 1, "TRIPLE": 2, "QUADRUPLE": 2, "AROMATIC": 3}
    kind = names.get(str(bond.GetBondType()), 0)
    return [*one_hot(kind, range(4)), float(bond.GetIsConjugated()), float(bond.IsInRing())]


@given(st.lists(st.sampled_from(SMILES), min_size=1, max_size=4))
def test_features_equal_rdkit_asked_directly(parts):
    mol = read(".".join(parts))
    packed = pack_molecule(mol)
    atoms = expand_atoms(packed.atoms)
    np.testing.assert_array_equal(
        atoms, np.array([reference_atom(atom) for atom in mol.GetAtoms()], dtype=np.float32)
    )
    edges, features = expand_bonds(packed.bonds)
    expected_edges, expected_features = [], []
    for bond in mol.GetBonds():
        begin, end = bond.GetBeginAtomIdx(), bond.GetEndAtomIdx()
        expected_edges += [(begin, end), (end, begin)]
        expected_features += [reference_bond(bond)] * 2
    np.testing.assert_array_equal(edges, np.array(expected_edges, np.int64).reshape(-1, 2).T)
    np.testing.assert_array_equal(features, np.array(expected_features).reshape(-1, 6))
    assert (atoms.dtype, features.dtype, edges.dtype) == (np.float32, np.float32, np.int64)


def test_widths_and_layout():
    assert (molecules.NUM_ATOM_FEATURES, molecules.NUM_BOND_FEATURES) == (48, 6)
    for fields in (ATOM_FIELDS, BOND_FIELDS):
        position = 0
        for field in fields:
            assert field.shift == position, f"{field.name} overlaps or leaves a hole"
            assert len(field.classes) <= 1 << field.bits
            position += field.bits
        assert position <= 32
    assert [row["name"] for row in molecules.layout()["atom"]] == [f.name for f in ATOM_FIELDS]


@given(
    st.integers(0, MAX_ATOMS - 1),
    st.integers(0, MAX_ATOMS - 1),
    st.integers(0, 3),
    st.booleans(),
    st.booleans(),
)
def test_bond_words_hold_every_value(begin, end, kind, conjugated, ring):
    word = begin | end << 14 | kind << 28 | conjugated << 30 | ring << 31
    edges, features = expand_bonds(np.array([word], dtype=np.uint32))
    assert edges.tolist() == [[begin, end], [end, begin]]
    assert features[0].tolist() == [*one_hot(kind, range(4)), conjugated, ring]


def test_a_class_out_of_range_opens_into_zeros_not_into_its_neighbour():
    features = expand_atoms(np.array([15], dtype=np.uint32))[0]  # element 15 of 12
    assert not features[:12].any()
    assert features[12] == 1  # degree 0, untouched


def test_single_atoms_have_no_bonds():
    packed = pack_molecule(read("C"))
    assert (len(packed.atoms), len(packed.bonds)) == (1, 0)
    edges, features = expand_bonds(packed.bonds)
    assert (edges.shape, features.shape) == ((2, 0), (0, 6))


@pytest.mark.parametrize(
    ("smiles", "column"),
    [("[H][H]", 0), ("[He]", 11), ("C[Se]C", 1), ("[Fe+2].[Cl-].[Cl-]", 11), ("[2H]O[2H]", 0)],
)
def test_elements(smiles, column):
    assert expand_atoms(pack_molecule(read(smiles)).atoms)[0, column] == 1


def test_charges_beyond_three_are_other():
    assert expand_atoms(pack_molecule(read("[Ti+4]")).atoms)[0, 27] == 1


def test_what_has_no_upper_bound_stops_at_its_last_class():
    cluster = "[U]" + "(C)" * 70
    atoms = expand_atoms(pack_molecule(read(cluster)).atoms)
    assert atoms[0, 12 + 7] == 1  # 70 neighbours
    mol = read("[U]")
    mol.GetAtomWithIdx(0).SetNumExplicitHs(99)
    assert expand_atoms(pack_molecule(mol).atoms)[0, 33 + 5] == 1


def test_isotopes_share_the_class_of_their_element_and_change_the_mass():
    light, heavy = pack_molecule(read("C")), pack_molecule(read("[13CH4]"))
    np.testing.assert_array_equal(light.atoms, heavy.atoms)
    assert heavy.mol_weight - light.mol_weight == pytest.approx(1.003, abs=0.001)


def test_explicit_hydrogens_are_folded_in():
    mol = Chem.AddHs(Chem.MolFromSmiles("CCO"))
    packed = pack_molecule(read_structure(Chem.MolToMolBlock(mol), "mol"))
    np.testing.assert_array_equal(np.sort(packed.atoms), np.sort(pack_molecule(read("CCO")).atoms))


def test_enantiomers_differ_in_one_field_only():
    left, right = (pack_molecule(read(s)).atoms for s in ("C[C@H](O)CC", "C[C@@H](O)CC"))
    assert (left != right).sum() == 1
    chirality = next(field for field in ATOM_FIELDS if field.name == "chirality")
    assert not ((left ^ right) & ~np.uint32(chirality.mask << chirality.shift)).any()


@pytest.mark.parametrize("smiles", [s for s in SMILES if Chem.MolFromSmiles(s).GetNumAtoms() > 0])
@pytest.mark.parametrize("nist", [False, True])
def test_mol_blocks_as_rdkit_and_as_nist_write_them(smiles, nist):
    """CRLF, blank fields: the same molecule as from SMILES, apart from the order of atoms."""
    packed = pack_molecule(read_structure(mol_block(smiles, nist=nist), "mol"))
    expected = pack_molecule(read(smiles))
    assert packed.functional_groups == expected.functional_groups
    np.testing.assert_array_equal(np.sort(packed.atoms & 0x3FF), np.sort(expected.atoms & 0x3FF))
    assert len(packed.bonds) == len(expected.bonds)


# -- fingerprints ------------------------------------------------------------------------------


@given(st.sampled_from(SMILES))
def test_ecfp_equals_the_dense_count_fingerprint(smiles):
    from rdkit.Chem import rdFingerprintGenerator

    mol = read(smiles)
    generator = rdFingerprintGenerator.GetMorganGenerator(radius=2, fpSize=4096)
    packed = pack_molecule(mol)
    dense = np.zeros(4096, dtype=np.int64)
    dense[packed.ecfp_bits] = packed.ecfp_counts
    np.testing.assert_array_equal(dense, generator.GetCountFingerprintAsNumPy(mol))
    assert (np.diff(packed.ecfp_bits.astype(int)) > 0).all()


def test_counts_saturate_instead_of_wrapping():
    packed = pack_molecule(read("C" * 400))
    assert packed.ecfp_counts.max() == 255


# -- refusals ----------------------------------------------------------------------------------


ONE_ATOM = """


  1  0  0  0  0  0  0  0  0  0999 V2000
    0.0000    0.0000    0.0000 {}  0  0
M  END
"""


@pytest.mark.parametrize(
    ("text", "form", "words"),
    [
        ("CO(C)C", "smiles", "Explicit valence for atom # 1 O, 3, is greater than permitted"),
        ("c1cccc1", "smiles", "Can't kekulize mol"),
        ("C(", "smiles", "SMILES Parse Error"),
        ("C1CC", "smiles", "unclosed ring"),
        ("", "smiles", "empty text"),
        ("", "mol", "empty text"),
        ("garbage", "mol", "no molecule in it"),
        ("\n\n\n  0  0  0  0  0  0  0  0  0  0999 V2000\nM  END\n", "mol", "no atoms"),
        (
            ONE_ATOM.format("Xx"),
            "mol",
            "Element 'Xx' not found",
        ),
        (
            ONE_ATOM.format("C ").replace("  1  0", "  9  0").replace("M  END\n", ""),
            "mol",
            "EOF",
        ),
    ],
)
def test_refusals_carry_rdkits_own_words_and_stay_off_stderr(capfd, text, form, words):
    reason = read_structure(text, form)
    assert isinstance(reason, str)
    assert words in reason
    assert "\n" not in reason
    assert capfd.readouterr() == ("", "")


def test_explaining_a_failure_gives_rdkits_logs_back_as_they_were(capfd):
    from rdkit import rdBase

    for change in (lambda: None, lambda: rdBase.DisableLog("rdApp.error")):
        change()
        before = rdBase.LogStatus()
        try:
            assert isinstance(read_structure("CO(C)C", "smiles"), str)
            assert rdBase.LogStatus() == before
        finally:
            rdBase.EnableLog("rdApp.error")
    Chem.MolFromSmiles("CO(C)C")
    assert "valence" in capfd.readouterr().err  # the caller still hears RDKit


def test_too_many_atoms_are_refused(monkeypatch):
    monkeypatch.setattr(molecules, "MAX_ATOMS", 4)
    assert not isinstance(read_structure("CCC", "smiles"), str)
    assert "4 atoms; at most 3" in read_structure("CCCC", "smiles")


def test_without_rdkit_the_extra_is_named(monkeypatch):
    real_import = builtins.__import__

    def no_rdkit(name, *args, **kwargs):
        if name.startswith("rdkit"):
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_rdkit)
    for cached in (molecules.toolkit, functional_groups._patterns):
        cached.cache_clear()
    functional_groups._candidates.cache_clear()
    with pytest.raises(MissingExtraError, match=r"\[chem\]"):
        read_structure("C", "smiles")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"\[chem\]"):
        molecules.require_rdkit()
    with pytest.raises(MissingExtraError, match=r"\[chem\]"):
        find_functional_groups(Chem.Mol())


def test_importing_loads_neither_rdkit_nor_torch():
    code = (
        "import sys, stoker.sources.molecules, stoker.sources.massspec\n"
        "print([name for name in ('rdkit', 'torch') if name in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


# -- compounds ---------------------------------------------------------------------------------


def test_stereoisomers_share_their_key():
    keys = {compound_key(read(smiles)) for smiles in ("C[C@H](O)F", "C[C@@H](O)F", "CC(O)F")}
    assert len(keys) == 1
    assert compound_key(read("F/C=C/F")) == compound_key(read("F/C=C\\F"))
    assert compound_key(read("CCO")) != compound_key(read("COC"))


def test_the_key_falls_back_to_smiles_where_inchi_has_no_answer(monkeypatch):
    monkeypatch.setattr(Chem, "MolToInchiKey", lambda mol: "")
    assert compound_key(read("OCC")) == compound_key(read("CCO")) == "CCO"


# -- functional groups -------------------------------------------------------------------------

# name: compounds that have the group, compounds that do not (the near misses)
GROUPS = {
    "alkene": (["C=C", "CC=CC(C)=O"], ["CC", "c1ccccc1"]),
    "alkyne": (["C#C", "CC#CC"], ["C=C", "CC#N"]),
    "benzene": (["Cc1ccccc1", "Clc1ccc2ccccc2c1"], ["C1CCCCC1", "c1ccncc1"]),
    "naphthalene": (["c1ccc2ccccc2c1", "c1ccc2cc3ccccc3cc2c1"], ["c1ccccc1-c1ccccc1"]),
    "anthracene": (["c1ccc2cc3ccccc3cc2c1"], ["c1ccc2ccccc2c1", "c1ccc2c(c1)ccc1ccccc12"]),
    "cyclohexane": (["C1CCCCC1", "CC1CCCCC1"], ["C1CCCC1", "CCCCCC", "C1CCC=CC1"]),
    "hexamethylene": (["CCCCCCCC"], ["CCCCCC", "C1CCCCCCC1"]),
    "alcohol": (["CCO", "OC1CCCCC1"], ["Oc1ccccc1", "COC", "CC(=O)O"]),
    "phenol": (["Oc1ccccc1"], ["OCc1ccccc1", "COc1ccccc1"]),
    "ether": (["COC", "COc1ccccc1", "C1CCOC1"], ["CCO", "CC(=O)OC", "c1ccoc1"]),
    "methoxy": (["COC", "COc1ccccc1", "CC(=O)OC"], ["CCOCC", "CO", "C[Si](C)(C)OC(C)C"]),
    "epoxide": (["C1CO1", "CC1OC1C"], ["C1COC1", "C1CC1"]),
    "aldehyde": (["CC=O", "O=Cc1ccccc1", "C=O"], ["CC(C)=O", "CC(=O)O", "COC=O", "CN(C)C=O"]),
    "ketone": (["CC(C)=O", "O=C1CCCCC1", "CC(=O)c1ccccc1"], ["CC=O", "CC(=O)OC", "CC(N)=O"]),
    "quinone": (["O=C1C=CC(=O)C=C1", "O=C1c2ccccc2C(=O)c2ccccc21"], ["O=C1CCC(=O)CC1"]),
    "carboxylic_acid": (["CC(=O)O", "CC(=O)[O-]"], ["CC(=O)OC", "CC=O", "CS(=O)(=O)O"]),
    "ester": (["CC(=O)OC", "COC=O", "COC(=O)c1ccccc1"], ["CC(=O)O", "CC(=O)OC(C)=O", "COC(=O)OC"]),
    "lactone": (["O=C1CCCO1", "O=c1ccc2ccccc2o1"], ["CC(=O)OC", "O=C1CCC(=O)O1", "O=C1OCCO1"]),
    "anhydride": (["CC(=O)OC(C)=O", "O=C1CCC(=O)O1"], ["CC(=O)OC", "CC(=O)CC(C)=O"]),
    "furan": (["c1ccoc1", "c1ccc2occc2c1"], ["C1CCOC1", "c1ccsc1"]),
    "primary_amine": (["CN", "Nc1ccccc1"], ["CNC", "CC(N)=O", "CS(N)(=O)=O", "NC(=N)N"]),
    "secondary_amine": (["CNC", "CNc1ccccc1"], ["CN", "CNC(C)=O", "c1cc[nH]c1"]),
    "tertiary_amine": (["CN(C)C"], ["CNC", "CN(C)C=O", "c1ccncc1", "C[N+](C)(C)C"]),
    "aniline": (["Nc1ccccc1", "CN(C)c1ccccc1"], ["NCc1ccccc1", "CC(=O)Nc1ccccc1", "O=[N+]([O-])c1ccccc1"]),
    "amide": (["CC(N)=O", "CN(C)C=O", "CC(=O)Nc1ccccc1"], ["CC(=O)OC", "NC(N)=O", "CN"]),
    "lactam": (["O=C1CCCN1", "O=c1cccc[nH]1"], ["CC(=O)NC", "O=C1CCCO1"]),
    "urea": (["NC(N)=O", "CNC(=O)NC"], ["CC(N)=O", "NC(N)=S"]),
    "carbamate": (["COC(N)=O", "CNC(=O)Oc1ccccc1"], ["CC(N)=O", "COC(C)=O"]),
    "imine": (["CC=NC", "N=Cc1ccccc1"], ["CC=NO", "CC=NN", "CC#N", "c1ccncc1"]),
    "oxime": (["CC=NO", "CC(C)=NOC"], ["CC=NC", "CNO"]),
    "nitrile": (["CC#N", "N#Cc1ccccc1"], ["C#C", "CC=N"]),
    "nitro": (["C[N+](=O)[O-]", "O=[N+]([O-])c1ccccc1"], ["CN=O", "C[N+](C)(C)[O-]"]),
    "azo": (["CN=NC", "c1ccc(N=Nc2ccccc2)cc1"], ["CNNC", "CC=NN", "CN=[N+]=[N-]"]),
    "pyridine": (["c1ccncc1", "c1ccc2ncccc2c1"], ["c1cc[nH]c1", "c1cncnc1", "C1CCNCC1"]),
    "pyrrole": (["c1cc[nH]c1", "c1ccc2[nH]ccc2c1"], ["c1ccncc1", "c1cnc[nH]1", "C1CCNC1"]),
    "thiol": (["CS", "Sc1ccccc1"], ["CSC", "CO"]),
    "thioether": (["CSC", "CSc1ccccc1"], ["CS", "CSSC", "CC(=O)SC", "c1ccsc1"]),
    "sulfoxide": (["CS(C)=O", "C[S+](C)[O-]"], ["CS(C)(=O)=O", "CSC"]),
    "sulfone": (["CS(C)(=O)=O", "O=S1(=O)CCCC1"], ["CS(C)=O", "CS(N)(=O)=O", "O=S=O", "CS(=O)(=O)O"]),
    "sulfonamide": (["CS(N)(=O)=O"], ["CS(C)(=O)=O", "CC(N)=O"]),
    "thiophene": (["c1ccsc1", "c1ccc2sccc2c1"], ["C1CCSC1", "c1ccoc1"]),
    "phosphoryl": (["COP(=O)(OC)OC", "COP(=S)(OC)OC"], ["CP(C)C", "COP(OC)OC"]),
    "silyl_ether": (["CO[Si](C)(C)C", "C[Si](C)(C)O[Si](C)(C)C"], ["C[Si](C)(C)C", "COC"]),
    "trifluoromethyl": (["CC(F)(F)F", "FC(F)(F)c1ccccc1"], ["CC(F)F", "Fc1c(F)c(F)ccc1"]),
    "fluoride": (["CF", "Fc1ccccc1"], ["CCl", "F", "FS(F)(F)(F)(F)F"]),
    "chloride": (["CCl", "Clc1ccccc1"], ["CBr", "Cl", "C[Si](C)(C)Cl"]),
    "bromide": (["CBr", "Brc1ccccc1"], ["CCl", "Br"]),
    "iodide": (["CI", "Ic1ccccc1"], ["CBr", "I"]),
}  # fmt: skip


def test_the_table_has_48_distinct_groups_each_with_examples():
    names = [group.name for group in FUNCTIONAL_GROUPS]
    assert len(names) == NUM_GROUPS == 48
    assert names == list(GROUPS)
    assert len({group.smarts for group in FUNCTIONAL_GROUPS}) == 48
    for group in FUNCTIONAL_GROUPS:
        assert Chem.MolFromSmarts(group.smarts) is not None, group
        assert set(group.needs.split()) <= set(PRESENCE)


@pytest.mark.parametrize("name", GROUPS)
def test_each_group_matches_its_compounds_and_not_the_near_misses(name):
    bit = [group.name for group in FUNCTIONAL_GROUPS].index(name)
    have, lack = GROUPS[name]
    found = [
        smiles for smiles in have + lack if pack_molecule(read(smiles)).functional_groups >> bit & 1
    ]
    assert found == have


@given(st.sampled_from(SMILES + tuple(s for have, lack in GROUPS.values() for s in have + lack)))
def test_skipping_hopeless_patterns_changes_nothing(smiles):
    mol = read(smiles)
    assert pack_molecule(mol).functional_groups == find_functional_groups(mol)


def test_flags_open_into_48_columns():
    flags = np.array([0, 1, 1 << 47, (1 << 48) - 1], dtype=np.uint64)
    columns = expand_functional_groups(flags)
    assert (columns.shape, columns.dtype) == ((4, 48), np.float32)
    assert columns.sum(axis=1).tolist() == [0, 1, 1, 48]
    assert columns[1, 0] == columns[2, 47] == 1
