"""The tabular recipe: rows or windows of rows to classes or numbers."""
