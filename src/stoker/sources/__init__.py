"""Raw files to columns, one file per kind. See `contract.Source` for what a source is."""
