"""MSP and MSL spectrum libraries: `library` reads, splits, writes and bins.

`blocks` is the fast engine, `text` the careful one and the reference, `keys` has the names of metadata.
"""

from stoker.sources.msp.library import (
    MspRange,
    Rounding,
    SpectrumBatch,
    bin_spectrum,
    read_msp,
    read_range,
    split_msp,
    write_msp,
)
from stoker.sources.msp.text import LineTally, Record

__all__ = [
    "LineTally", "MspRange", "Record", "Rounding", "SpectrumBatch", "bin_spectrum", "read_msp",
    "read_range", "split_msp", "write_msp",
]  # fmt: skip
