"""Measures the time and memory of a job that runs for a few seconds; `tune` and `doctor` decide by the results."""
