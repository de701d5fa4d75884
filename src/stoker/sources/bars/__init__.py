"""Bars of several timeframes: files, dialects, times, alignment, features, and the source itself.

`reading` gives bars from CSV, `timeframes` aligns them on their close times, `features` makes and
scales the columns, `source` puts them into a store.
"""

from stoker.sources.bars.dialects import Naming
from stoker.sources.bars.features import Scaler, apply_scaler, make_features
from stoker.sources.bars.files import BarFile
from stoker.sources.bars.reading import Bars, read_bars
from stoker.sources.bars.source import BarsSource, make_targets
from stoker.sources.bars.timeframes import DEFAULT_WINDOWS, parse_windows

__all__ = [
    "DEFAULT_WINDOWS",
    "BarFile",
    "Bars",
    "BarsSource",
    "Naming",
    "Scaler",
    "apply_scaler",
    "make_features",
    "make_targets",
    "parse_windows",
    "read_bars",
]
