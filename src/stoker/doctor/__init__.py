"""Why a job is slow, what would help, and by how much; see docs/doctor.md.

Files: `measurements.py` defines the measured values; `gains.py` has the arithmetic of a step; `rules.py` and
`rules_*.py`, all pure, turn measurements into findings (`findings.py`); `ablation.py` and `consultation.py` measure a
stoker job; `attach.py` runs a script with the probe (`probe/`) inside it; `transcript*.py` read the probe's files.
"""
