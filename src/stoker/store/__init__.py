"""The HDF5 store: format, writer, parallel reader, quality gate, checksums. See README.md here."""
