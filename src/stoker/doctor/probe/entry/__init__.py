"""The folder that stands first on a measured script's path; it holds one file and nothing to clash with."""
