"""Why a job is slow, what would help, and by how much; see docs/doctor.md.

Files: `measurements.py` holds what was measured; `gains.py` the arithmetic of a step; `rules.py` and `rules_*.py`
turn measurements into `findings.py`, all of them pure; `ablation.py` and `consultation.py` measure a stoker job;
`attach.py` runs a script with the folder `probe/` on its path, and `transcript*.py` read back what the probe wrote.
"""
