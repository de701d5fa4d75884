"""The folder of a run: written while it trains, read during the run and afterwards.

`telemetry.py` writes; `reading.py`, `record.py` and `follow.py` read; `run_page.py` and `figures.py` show. No
torch: a process that does not train reads a run.
"""
