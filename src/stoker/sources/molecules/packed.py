"""Molecular structures to packed arrays, and back to the features that a graph network reads.

Enters: a MOL block or a SMILES. Leaves: one uint32 per atom, one uint32 per bond, 48 functional
group flags in a uint64, the counted ECFP4 as (bit, count) pairs, the monoisotopic mass.
`expand_atoms` and `expand_bonds` turn words into the 48 and 6 float features by shifts and
comparisons alone, so that a device can do the same from `ATOM_FIELDS` and `BOND_FIELDS`. Costs:
about 0.5 ms per molecule of 14 heavy atoms on one core, a quarter of it RDKit's own parsing;
200 bytes per molecule instead of 4 KB of float features and edges.

The words, low bits first (`ATOM_FIELDS`, `BOND_FIELDS` are this table as code):

    atom   element 0-3 | degree 4-6 | charge 7-9 | chirality 10-12 | hydrogens 13-15 |
           hybridisation 16-18 | aromatic 19 | ring 20
    bond   begin 0-13 | end 14-27 | type 28-29 | conjugated 30 | ring 31

Beyond the range: an element without its own class is "other"; a degree above 7 counts as 7; a
charge outside -3..3 is "other"; chirality that is neither unspecified nor tetrahedral CW/CCW nor
RDKit's OTHER (allene, square planar, ...) is "special"; more than 5 hydrogens count as 5; a
hybridisation that RDKit does not name (or SP2D) is "other". Bonds know four types: dative, ionic,
hydrogen and zero-order bonds count as single, quadruple and higher as triple.

RDKit removes explicit hydrogens on reading, except those that carry information (isotopes, H2,
hydrides, bridging). Isotopes share the class of their element. Salts keep all their parts.
"""

from __future__ import annotations

import importlib.util
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple

import numpy as np

from stoker.errors import MissingExtraError
from stoker.sources.molecules.functional_groups import PRESENCE, find_functional_groups
from stoker.store.fields import Array

# Raised whenever the same structure would give other words, flags or fingerprint bits.
FEATURISER_VERSION = 1

MAX_ATOMS = 1 << 14  # atom numbers have 14 bits in a bond word
ECFP_RADIUS = 2
ECFP_SIZE = 4096

Mol = Any  # rdkit.Chem.Mol; RDKit is an extra, so its types cannot be named here
StructureForm = Literal["mol", "smiles", "inchi"]


class BitField(NamedTuple):
    """Some bits of a word, and the feature columns that they expand to."""

    name: str  # name of the property
    shift: int  # lowest bit
    bits: int  # how many
    # names of the one-hot columns; () for a flag (one column, the bit itself) and for a plain number (no column)
    classes: tuple[str, ...]

    @property
    def mask(self) -> int:
        """Mask of the value once it is shifted down."""
        return (1 << self.bits) - 1

    @property
    def columns(self) -> int:
        """Feature columns."""
        return len(self.classes) if self.classes else int(self.bits == 1)


ELEMENTS = ("H", "C", "N", "O", "F", "Si", "P", "S", "Cl", "Br", "I", "other")

ATOM_FIELDS = (
    BitField("element", 0, 4, ELEMENTS),
    BitField("degree", 4, 3, ("0", "1", "2", "3", "4", "5", "6", "7+")),
    BitField("charge", 7, 3, ("-3", "-2", "-1", "0", "+1", "+2", "+3", "other")),
    BitField("chirality", 10, 3, ("none", "CW", "CCW", "OTHER", "special")),
    BitField("hydrogens", 13, 3, ("0", "1", "2", "3", "4", "5+")),
    BitField("hybridisation", 16, 3, ("S", "SP", "SP2", "SP3", "SP3D", "SP3D2", "other")),
    BitField("aromatic", 19, 1, ()),
    BitField("ring", 20, 1, ()),
)

BOND_FIELDS = (
    BitField("begin", 0, 14, ()),
    BitField("end", 14, 14, ()),
    BitField("type", 28, 2, ("single", "double", "triple", "aromatic")),
    BitField("conjugated", 30, 1, ()),
    BitField("ring", 31, 1, ()),
)

NUM_ATOM_FEATURES = sum(field.columns for field in ATOM_FIELDS)
NUM_BOND_FEATURES = sum(field.columns for field in BOND_FIELDS)


def layout() -> dict[str, Any]:
    """Return the bit layout as JSON, for a manifest."""
    return {
        word: [
            {"name": f.name, "shift": f.shift, "bits": f.bits, "classes": list(f.classes)}
            for f in fields
        ]
        for word, fields in (("atom", ATOM_FIELDS), ("bond", BOND_FIELDS))
    }


# Tables from RDKit's numbers to bits already in place: one lookup per property is what makes the
# loop over atoms cheap. RDKit's enums are integers, so they index directly; what has no upper
# bound is a dict with a default.
_ATOMIC_NUMBERS = {
    1: "H", 6: "C", 7: "N", 8: "O", 9: "F", 14: "Si", 15: "P", 16: "S", 17: "Cl", 35: "Br", 53: "I",
}  # fmt: skip
_ELEMENT = [ELEMENTS.index(_ATOMIC_NUMBERS.get(number, "other")) for number in range(128)]
_ELEMENT_PRESENT = [PRESENCE[ELEMENTS[code]] for code in _ELEMENT]
_DEGREE = {degree: degree << 4 for degree in range(7)}
_DEGREE_MOST = 7 << 4
_CHARGE = {charge: (charge + 3) << 7 for charge in range(-3, 4)}
_CHARGE_OTHER = 7 << 7
_CHIRALITY = [min(tag, 4) << 10 for tag in range(32)]
_HYDROGENS = {count: count << 13 for count in range(5)}
_HYDROGENS_MOST = 5 << 13
# RDKit: UNSPECIFIED, S, SP, SP2, SP3, SP2D, SP3D, SP3D2, OTHER
_HYBRIDISATION = [code << 16 for code in (6, 0, 1, 2, 3, 6, 4, 5, 6)]
_AROMATIC = 1 << 19
_RING = 1 << 20
# RDKit: UNSPECIFIED, SINGLE, DOUBLE, TRIPLE, QUADRUPLE, QUINTUPLE, HEXTUPLE, then the halves, 12
# AROMATIC, then weak bonds.
_BOND_TYPE = [code << 28 for code in (0, 0, 1, 2, 2, 2, 2, 0, 1, 2, 2, 2, 3)] + [0] * 19
_BOND_PRESENT = [0, 0, PRESENCE["="], PRESENCE["#"]] + [0] * 28
_CONJUGATED = 1 << 30
_BOND_RING = 1 << 31


@dataclass(frozen=True)
class PackedMolecule:
    """One molecule as it is stored."""

    atoms: Array  # `(atoms,)` uint32, see `ATOM_FIELDS`
    bonds: Array  # `(bonds,)` uint32, see `BOND_FIELDS`; each bond once
    functional_groups: int  # 48 flags, see `functional_groups.FUNCTIONAL_GROUPS`
    ecfp_bits: Array  # `(on,)` uint16, rising; set bits of the 4096-bit ECFP4
    ecfp_counts: Array  # `(on,)` uint8, how often; 255 means 255 or more
    mol_weight: float  # monoisotopic mass in dalton, the mass that EI spectra show


class Toolkit(NamedTuple):
    """The functions of RDKit in use, looked up once per process."""

    chem: Any
    base: Any
    count_fingerprint: Callable[[Mol], Any]
    exact_mass: Callable[[Mol], float]  # monoisotopic, in dalton
    average_mass: Callable[[Mol], float]  # in dalton
    formula: Callable[[Mol], str]  # in Hill order, with the charge


@cache
def toolkit() -> Toolkit:
    """Load RDKit.

    Raises:
        MissingExtraError: It is not installed.
    """
    try:
        from rdkit import Chem, rdBase
        from rdkit.Chem import rdFingerprintGenerator, rdMolDescriptors
    except ImportError as error:
        raise _missing() from error
    generator = rdFingerprintGenerator.GetMorganGenerator(radius=ECFP_RADIUS, fpSize=ECFP_SIZE)
    return Toolkit(
        Chem,
        rdBase,
        generator.GetCountFingerprint,
        rdMolDescriptors.CalcExactMolWt,
        rdMolDescriptors._CalcMolWt,
        rdMolDescriptors.CalcMolFormula,
    )


def require_rdkit() -> None:
    """Check that RDKit is installed, without loading it (30 MB)."""
    if importlib.util.find_spec("rdkit") is None:
        raise _missing()


def warm_up() -> str:
    """Load RDKit and compile the patterns, before a clock runs; return RDKit's version."""
    pack_molecule(read_structure("C", "smiles"))
    return str(toolkit().base.rdkitVersion)


def _missing() -> MissingExtraError:
    return MissingExtraError.for_package("rdkit", "chem", "reading MOL files")


def read_structure(text: str, form: StructureForm) -> Mol | str:
    """Parse and sanitise one structure; nothing is written to stderr.

    May hang for minutes on rare inputs (rdkit issues 6434, 6545) and cannot be interrupted from
    Python: run it in a process with a time limit. Not thread-safe while it explains a failure.

    Returns:
        The sanitised molecule, or why there is none, in RDKit's own words.
    """
    tools = toolkit()
    with tools.base.BlockLogs():
        try:
            mol = _parse(tools.chem, text, form)
        except (RuntimeError, ValueError):  # violated invariants, rdkit issue 5433
            mol = None
    if mol is None:
        return f"RDKit: {_explain(tools, text, form)}"
    num_atoms = mol.GetNumAtoms()
    if num_atoms == 0:
        return "the structure has no atoms"
    if num_atoms > MAX_ATOMS - 1:
        return f"the structure has {num_atoms} atoms; at most {MAX_ATOMS - 1}"
    if not all(atom.GetAtomicNum() for atom in mol.GetAtoms()):  # its mass would be wrong
        return "the structure has an atom without an element (* or R)"
    return mol


def _parse(chem: Any, text: str, form: StructureForm) -> Mol | None:
    if form == "smiles":
        # RDKit reads "" as an empty molecule, and takes what follows a space as a name.
        return chem.MolFromSmiles(text.strip()) if text.strip() else None
    if form == "inchi":
        return chem.MolFromInchi(text.strip()) if text.strip() else None
    # Strict: lax parsing silently turns an unknown element into a dummy atom, and NIST's
    # blank fields and CRLF are read either way.
    return chem.MolFromMolBlock(text, strictParsing=True)


def _explain(tools: Toolkit, text: str, form: StructureForm) -> str:
    """Fail again with RDKit's log turned into a list, and return the reason; slow and rare."""
    heard: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    logger = logging.getLogger("rdkit")
    handlers, propagate = logger.handlers[:], logger.propagate
    status = [line.split(":") for line in tools.base.LogStatus().splitlines()]
    logger.handlers[:], logger.propagate = [Listener()], False
    tools.base.LogToPythonLogger()
    try:
        _parse(tools.chem, text, form)
    except (RuntimeError, ValueError) as error:
        heard.append(f"[error] {next(iter(str(error).strip().splitlines()), type(error).__name__)}")
    finally:
        tools.base.LogToCppStreams()
        logger.handlers[:], logger.propagate = handlers, propagate
        # Switching streams turns every log on again; restore the caller's state.
        for name, state in status:
            (tools.base.EnableLog if state == "enabled" else tools.base.DisableLog)(name)
    # A message begins with its time; a violated invariant adds a C++ stack trace.
    told = [found[1] for found in map(_LOG_LINE.fullmatch, heard) if found]
    told = [each for each in told if each.strip(" :") != "ERROR"]  # InChI's library gives no reason
    if told:
        return told[-1]
    return "no molecule in it" if text.strip() else "empty text"


_LOG_LINE = re.compile(r"\[(?:[\d:]+|error)\] (.*\w.*)", re.DOTALL)


def pack_molecule(mol: Mol) -> PackedMolecule:
    """Pack one molecule from `read_structure`.

    Atom and bond order are RDKit's, which is the file's order less its plain hydrogens.
    """
    tools = toolkit()
    atoms, present = _atom_words(mol)
    bonds, bonds_present = _bond_words(mol)
    counts = tools.count_fingerprint(mol).GetNonzeroElements()
    bits = sorted(counts)
    times = list(map(counts.__getitem__, bits))
    if times and max(times) > 255:
        times = [min(each, 255) for each in times]
    return PackedMolecule(
        atoms=np.array(atoms, dtype=np.uint32),
        bonds=np.array(bonds, dtype=np.uint32),
        functional_groups=find_functional_groups(mol, present | bonds_present),
        ecfp_bits=np.array(bits, dtype=np.uint16),
        ecfp_counts=np.array(times, dtype=np.uint8),
        mol_weight=tools.exact_mass(mol),
    )


def _atom_words(mol: Mol) -> tuple[list[int], int]:
    """Pack every atom; also return a mask of the elements and kinds of atom present."""
    words = []
    present = 0
    # Not mol.GetAtoms(): its iterator is written in Python, 115 µs against 98 for 14 atoms.
    for atom in map(mol.GetAtomWithIdx, range(mol.GetNumAtoms())):
        number = atom.GetAtomicNum()
        charge = atom.GetFormalCharge()
        present |= _ELEMENT_PRESENT[number]
        word = (
            _ELEMENT[number]
            | _DEGREE.get(atom.GetDegree(), _DEGREE_MOST)
            | _CHARGE.get(charge, _CHARGE_OTHER)
            | _CHIRALITY[atom.GetChiralTag()]
            | _HYDROGENS.get(atom.GetTotalNumHs(), _HYDROGENS_MOST)
            | _HYBRIDISATION[atom.GetHybridization()]
        )
        if charge:
            present |= PRESENCE["charge"]
        if atom.GetIsAromatic():
            word |= _AROMATIC
            present |= PRESENCE["a"]
        if atom.IsInRing():
            word |= _RING
            present |= PRESENCE["ring"]
        words.append(word)
    return words, present


def _bond_words(mol: Mol) -> tuple[list[int], int]:
    """Pack every bond; also return a mask of the types present."""
    words = []
    present = 0
    for bond in map(mol.GetBondWithIdx, range(mol.GetNumBonds())):
        kind = bond.GetBondType()
        present |= _BOND_PRESENT[kind]
        word = bond.GetBeginAtomIdx() | bond.GetEndAtomIdx() << 14 | _BOND_TYPE[kind]
        if bond.GetIsConjugated():
            word |= _CONJUGATED
        if bond.IsInRing():
            word |= _BOND_RING
        words.append(word)
    return words, present


def expand_atoms(words: Array) -> Array:
    """Return `(n, 48)` float32 features of `(n,)` atom words; a class out of range is all zeros."""
    return _expand(np.asarray(words, dtype=np.uint32), ATOM_FIELDS, NUM_ATOM_FEATURES)


def expand_bonds(words: Array) -> tuple[Array, Array]:
    """Return the directed edges of `(m,)` bond words.

    Returns:
        `(2, 2m)` int64 edge index and `(2m, 6)` float32 features. Bond k gives edge 2k from begin
        to end and edge 2k + 1 back.
    """
    words = np.asarray(words, dtype=np.uint32)
    begin, end = (
        (words >> np.uint32(field.shift)) & np.uint32(field.mask) for field in BOND_FIELDS[:2]
    )
    edges = np.empty((2, 2 * len(words)), dtype=np.int64)
    edges[0, 0::2] = edges[1, 1::2] = begin
    edges[0, 1::2] = edges[1, 0::2] = end
    return edges, np.repeat(_expand(words, BOND_FIELDS[2:], NUM_BOND_FEATURES), 2, axis=0)


def _expand(words: Array, fields: tuple[BitField, ...], width: int) -> Array:
    features = np.zeros((len(words), width), dtype=np.float32)
    column = 0
    for field in fields:
        values = (words >> np.uint32(field.shift)) & np.uint32(field.mask)
        block = features[:, column : column + field.columns]
        if field.classes:
            np.equal(
                values[:, None],
                np.arange(field.columns, dtype=np.uint32),
                out=block,
                casting="unsafe",
            )
        else:
            block[:, 0] = values
        column += field.columns
    return features


_BOND_NAMES = ("SINGLE", "DOUBLE", "TRIPLE", "AROMATIC")


def draw_molecule(atoms: Array, bonds: Array) -> str:
    """Return a drawing of packed words as SVG; empty where RDKit is absent or cannot draw them.

    An element without its own class is drawn as `*`: the words do not hold it.
    """
    if importlib.util.find_spec("rdkit") is None or not len(atoms):
        return ""
    chem = toolkit().chem
    from rdkit.Chem import rdDepictor
    from rdkit.Chem.Draw import rdMolDraw2D

    mol = chem.RWMol()
    for word in np.asarray(atoms, dtype=np.uint32).tolist():
        name = ELEMENTS[min(word & 15, len(ELEMENTS) - 1)]
        atom = chem.Atom("*" if name == "other" else name)
        charge = (word >> 7 & 7) - 3
        atom.SetFormalCharge(charge if charge <= 3 else 0)
        atom.SetIsAromatic(bool(word >> 19 & 1))
        atom.SetNoImplicit(True)
        atom.SetNumExplicitHs(min(word >> 13 & 7, 5))
        mol.AddAtom(atom)
    try:
        with toolkit().base.BlockLogs():
            for word in np.asarray(bonds, dtype=np.uint32).tolist():
                kind = getattr(chem.BondType, _BOND_NAMES[word >> 28 & 3])
                mol.AddBond(word & 0x3FFF, word >> 14 & 0x3FFF, kind)
            mol.UpdatePropertyCache(strict=False)
            chem.FastFindRings(mol)
            rdDepictor.Compute2DCoords(mol)
            drawer: Any = rdMolDraw2D.MolDraw2DSVG(210, 150)
            drawer.drawOptions().prepareMolsBeforeDrawing = False
            drawer.DrawMolecule(mol)
            drawer.FinishDrawing()
    except (RuntimeError, ValueError):  # RDKit's violated invariants
        return ""
    text = drawer.GetDrawingText()
    return str(text[max(0, text.find("<svg")) :])


def compound_key(mol: Mol) -> str:
    """Return a key that stereoisomers and isotopologues share, for records without an InChIKey.

    The first block of the InChIKey that RDKit computes (0.25 ms), or the canonical SMILES without
    stereo where InChI has no answer.
    """
    tools = toolkit()
    with tools.base.BlockLogs():
        key = str(tools.chem.MolToInchiKey(mol))
    return key.partition("-")[0] or str(tools.chem.MolToSmiles(mol, isomericSmiles=False))
