"""Files of every kind and flaw, written here, with what stoker does with each: tests and a docs page in one table.

`cases_*.py` hold `KIND`, the heading, and `CASES`; `tests/test_gallery.py` runs them, and `docs_build/pages.py` makes
the page "What stoker reads" of them.
"""
