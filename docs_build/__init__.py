"""Pages of the documentation site that are made of the code, its results and the files beside it.

Nothing here ships with the package. `site.py` gives the pages to zensical (`make docs`); the tests look at
the same pages without it.
"""
