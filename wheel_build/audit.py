"""Compares the pinned versions with the database of known weaknesses, where pip-audit and the database can be had.

    python -m wheel_build.audit

Without them the list with its versions is printed, and that nothing was compared. Ends with 1 for a known weakness.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

from wheel_build.sbom import pins, requirements

ROOT = Path(__file__).resolve().parent.parent


def compare() -> int | None:
    """Return pip-audit's answer: 0 for none known, 1 for some; None where nothing could be compared."""
    if importlib.util.find_spec("pip_audit") is None:
        return None
    done = subprocess.run(
        [sys.executable, "-m", "pip_audit", "--no-deps", "--disable-pip", "--progress-spinner=off",
         "--requirement", str(ROOT / "constraints.txt")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    sys.stdout.write(done.stdout)
    known = "known vulnerabilit" in (done.stdout + done.stderr).lower()
    if known:
        sys.stderr.write(done.stderr)
        return done.returncode
    return None


def main() -> int:
    """Compare, or list; return the exit code."""
    answer = compare()
    if answer is not None:
        return answer
    tested = pins(ROOT)
    for name, places in sorted(requirements(ROOT).items()):
        asked = "; ".join(dict.fromkeys(line for _, line in places))
        sys.stdout.write(f"{name:16} {tested.get(name, 'not pinned'):14} {asked}\n")
    there = importlib.util.find_spec("pip_audit") is not None
    reason = "the database was not reached" if there else "pip-audit is not installed"
    sys.stdout.write(f"{reason}: these versions were compared with nothing.\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
