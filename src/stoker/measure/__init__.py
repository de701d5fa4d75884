"""Measuring: a job run for a few seconds, its time and its memory. Below `tune` and `doctor`, which decide."""
