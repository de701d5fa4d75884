"""The folder of a run: what is written into it while it goes, and what can be read out of it afterwards.

`telemetry.py` writes; `reading.py`, `record.py` and `follow.py` read; `run_page.py` and `plots.py` show. No
torch: a run is looked at by a process that does not train.
"""
