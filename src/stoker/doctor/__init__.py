"""Why a job is slow, what would help, and by how much; see docs/doctor.md.

Files: `measurements.py` what was measured, `findings.py` what a finding says, `gains.py` the arithmetic
of "what if", `rules.py` and its `rules_*.py` the verdicts, all of them pure; `attach.py` runs somebody's
script with the `probe/` folder on its path, and the `transcript*.py` read back what that has written.
"""
