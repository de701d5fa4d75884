"""Mass spectra with their structures: `stoker pack massspec`.

`formats` reads MGF, MassBank, SDF and mzML into MSP; `conditions` tells EI from MS/MS and keeps what a spectrum was
measured under; `structures` finds and checks the molecule of a record; `building` makes the columns of one part;
`source` has the source.
"""

from stoker.sources.massspec.building import SPLIT_NAMES, assign_splits, group_of
from stoker.sources.massspec.formats import holds_spectra
from stoker.sources.massspec.source import MassSpecSource

__all__ = ["SPLIT_NAMES", "MassSpecSource", "assign_splits", "group_of", "holds_spectra"]
