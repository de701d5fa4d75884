"""Measuring: a job run for a few seconds, its time and its memory. Below `tune` and `doctor`, which decide.

| file | job |
|---|---|
| `readings.py` | quartiles of repeated readings, and whether they keep growing; pure |
| `laps.py` | the clock of a loop that asks for batches |
| `jobs.py` | a ready job, its step or its loader alone, run for a while and timed |
| `gauge.py` | the memory that a try took, and what it may take |
| `search.py` | which size to try next, which to take; pure |
"""
