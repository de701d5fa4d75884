"""Tables: CSV and other text, Parquet, Feather.

`layout` finds how a text file is written, `reading` gives its rows, `columns` says what a column becomes, `survey`
looks at all rows once, `source` puts them into a store.
"""

from stoker.sources.tables.columns import parse_codes, parse_dtypes, parse_words
from stoker.sources.tables.layout import TextOptions
from stoker.sources.tables.source import TableSource

__all__ = ["TableSource", "TextOptions", "parse_codes", "parse_dtypes", "parse_words"]
