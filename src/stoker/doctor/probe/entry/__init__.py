"""The first folder on a measured script's path; it holds one module, so that no other name can clash."""
