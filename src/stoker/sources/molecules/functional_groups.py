"""Which of 48 functional groups a molecule has, as one uint64.

Enters: an RDKit molecule. Leaves: an integer whose bit i says that group i of
`FUNCTIONAL_GROUPS` is there; `expand_functional_groups` gives the 48 zeros and ones back. Costs:
about 90 µs for 14 heavy atoms. A pattern is only tried when the molecule has every element and
bond type that it needs, which spares seven searches out of ten.

The order is part of the stored format: append nothing, move nothing, and raise
`molecules.FEATURISER_VERSION` when a pattern changes. Patterns are written for molecules as RDKit
sanitises them: hydrogens implicit (`H1`, never `[H]`), aromatic rings lower-case, nitro groups
charge-separated. Halides are matched on any carbon, so aryl halides count.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np

from stoker.errors import MissingExtraError
from stoker.store.fields import Array

NUM_GROUPS = 48


class FunctionalGroup(NamedTuple):
    """One flag, set by a match of `smarts`. A match needs every word of `PRESENCE` in `needs`."""

    name: str
    smarts: str
    needs: str


# What a molecule has, as a bit mask that costs nothing to collect while its atoms are packed.
# "other" is any element without a word of its own; "a" is an aromatic atom.
_WORDS = ("H", "C", "N", "O", "F", "Si", "P", "S", "Cl", "Br", "I", "other")
PRESENCE = {word: 1 << bit for bit, word in enumerate((*_WORDS, "=", "#", "a", "ring", "charge"))}

FUNCTIONAL_GROUPS: tuple[FunctionalGroup, ...] = tuple(
    FunctionalGroup(*row)
    for row in (
        # carbon skeleton
        ("alkene", "[CX3]=[CX3]", "C ="),
        ("alkyne", "[CX2]#[CX2]", "C #"),
        ("benzene", "c1ccccc1", "C a"),
        ("naphthalene", "c1ccc2ccccc2c1", "C a"),
        ("anthracene", "c1ccc2cc3ccccc3cc2c1", "C a"),
        ("cyclohexane", "[CX4]1[CX4][CX4][CX4][CX4][CX4]1", "C ring"),
        ("hexamethylene", "[CH2;R0][CH2;R0][CH2;R0][CH2;R0][CH2;R0][CH2;R0]", "C"),
        # oxygen
        ("alcohol", "[OX2H][CX4]", "C O"),
        ("phenol", "[OX2H]c", "C O a"),
        ("ether", "[#6;!$(C=[O,S,N])][OX2H0][#6;!$(C=[O,S,N])]", "C O"),
        ("methoxy", "[CH3][OX2][#6]", "C O"),
        ("epoxide", "[#6]1[OX2][#6]1", "C O ring"),
        ("aldehyde", "[$([CX3H1][#6]),$([CX3H2])]=[OX1]", "C O ="),
        ("ketone", "[#6][CX3](=[OX1])[#6]", "C O ="),
        ("quinone", "O=[#6]1[#6]=,:[#6][#6](=O)[#6]=,:[#6]1", "C O = ring"),
        ("carboxylic_acid", "[CX3](=[OX1])[OX2H,OX1-]", "C O ="),
        ("ester", "[$([CX3][#6]),$([CX3H1])](=[OX1])[OX2H0][#6;!$(C=O)]", "C O ="),
        ("lactone", "O=[#6;R](@[#6])@[#8;R]@[#6;!$([#6]=O)]", "C O = ring"),
        ("anhydride", "[CX3](=[OX1])[OX2][CX3]=[OX1]", "C O ="),
        ("furan", "o1cccc1", "C O a"),
        # nitrogen
        ("primary_amine", "[NX3H2;!$(N[#6]=[O,S,N]);!$(N[S,P]=O)][#6]", "C N"),
        ("secondary_amine", "[NX3H1;!$(N[#6]=[O,S,N]);!$(N[S,P]=O)]([#6])[#6]", "C N"),
        ("tertiary_amine", "[NX3H0;!$(N[#6]=[O,S,N]);!$(N[S,P]=O)]([#6])([#6])[#6]", "C N"),
        ("aniline", "[NX3;+0;!$(N[#6]=[O,S]);!$(N[S,P]=O)]-c", "C N a"),
        ("amide", "[NX3][$([CX3](=O)[#6]),$([CX3H1]=O)]", "C N O ="),
        ("lactam", "O=[#6;R]@[#7;R]", "C N O = ring"),
        ("urea", "[#7X3][#6X3](=[OX1])[#7X3]", "C N O ="),
        ("carbamate", "[NX3][CX3](=[OX1])[OX2]", "C N O ="),
        ("imine", "[CX3]=[NX2;!$(N[#7,#8])]", "C N ="),
        ("oxime", "[CX3]=[NX2][OX2]", "C N O ="),
        ("nitrile", "[CX2]#[NX1]", "C N #"),
        ("nitro", "[NX3+](=[OX1])[OX1-]", "N O = charge"),
        ("azo", "[#6][NX2]=[NX2][#6]", "C N ="),
        ("pyridine", "n1ccccc1", "C N a"),
        ("pyrrole", "[nX3]1cccc1", "C N a"),
        # sulfur
        ("thiol", "[SX2H][#6]", "C S"),
        ("thioether", "[#6;!$(C=[O,S,N])][SX2H0][#6;!$(C=[O,S,N])]", "C S"),
        ("sulfoxide", "[#6][$([SX3]=[OX1]),$([SX3+][OX1-])][#6]", "C O S"),
        ("sulfone", "[#6][SX4](=[OX1])(=[OX1])[#6]", "C O S ="),
        ("sulfonamide", "[#6][SX4](=[OX1])(=[OX1])[NX3]", "C N O S ="),
        ("thiophene", "s1cccc1", "C S a"),
        # other groups that are frequent in electron-ionisation libraries
        ("phosphoryl", "[PX4]=[OX1,SX1]", "P ="),
        ("silyl_ether", "[SiX4][OX2]", "O Si"),
        ("trifluoromethyl", "[CX4](F)(F)F", "C F"),
        ("fluoride", "[#6]F", "C F"),
        ("chloride", "[#6]Cl", "C Cl"),
        ("bromide", "[#6]Br", "C Br"),
        ("iodide", "[#6]I", "C I"),
    )
)


@cache
def _patterns() -> tuple[tuple[int, int, Any], ...]:
    """Compile the table once per process: bit, needed presence, query molecule."""
    try:
        from rdkit import Chem
    except ImportError as error:
        raise MissingExtraError.for_package("rdkit", "chem", "reading MOL files") from error
    return tuple(
        (
            1 << bit,
            sum(PRESENCE[word] for word in group.needs.split()),
            Chem.MolFromSmarts(group.smarts),
        )
        for bit, group in enumerate(FUNCTIONAL_GROUPS)
    )


@lru_cache(maxsize=4096)
def _candidates(present: int | None) -> tuple[tuple[int, Any], ...]:
    """Return the patterns that can match; a library has a few hundred distinct masks, so the cache answers."""
    return tuple(
        (bit, pattern)
        for bit, needs, pattern in _patterns()
        if present is None or needs & present == needs
    )


def find_functional_groups(mol: Any, present: int | None = None) -> int:
    """Return the 48 flags of a sanitised RDKit molecule as one integer.

    `present` is a mask of `PRESENCE`; patterns that need other bits are skipped. None tries all.
    """
    matches = mol.HasSubstructMatch
    flags = 0
    for bit, pattern in _candidates(present):
        if matches(pattern):
            flags |= bit
    return flags


def expand_functional_groups(flags: Array) -> Array:
    """Return `(n, 48)` float32 zeros and ones of `(n,)` uint64 flags."""
    bits = np.asarray(flags, dtype=np.uint64)[:, None] >> np.arange(NUM_GROUPS, dtype=np.uint64)
    return (bits & np.uint64(1)).astype(np.float32)
