"""Compares the pinned versions with the database of known weaknesses, where pip-audit and the database can be had.

    python -m wheel_build.audit

Without them the list with its versions is printed, and that nothing was compared. Ends with 1 for a known weakness.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from wheel_build.sbom import pins, requirements

ROOT = Path(__file__).resolve().parent.parent


class Answer(NamedTuple):
    """What pip-audit said: names with a known weakness, names that it compared, and why it left others out."""

    weak: dict[str, list[str]]
    compared: list[str]
    left_out: dict[str, str]


def read_answer(text: str) -> Answer:
    """Read pip-audit's JSON. It ends with 0 and "no known vulnerabilities" also when it compared nothing."""
    listed = json.loads(text)["dependencies"]
    left_out = {each["name"]: each["skip_reason"] for each in listed if "skip_reason" in each}
    compared = [each for each in listed if "vulns" in each]
    weak = {
        each["name"]: [one["id"] for one in each["vulns"]] for each in compared if each["vulns"]
    }
    return Answer(weak, [each["name"] for each in compared], left_out)


def compare() -> Answer | None:
    """Return pip-audit's answer; None where it is not installed or failed."""
    if importlib.util.find_spec("pip_audit") is None:
        return None
    done = subprocess.run(
        [sys.executable, "-m", "pip_audit", "--no-deps", "--disable-pip", "--progress-spinner=off", "--format=json",
         "--requirement", str(ROOT / "constraints.txt")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    try:
        return read_answer(done.stdout)
    except (ValueError, KeyError, TypeError):
        return None


def main() -> int:
    """Compare, or list; return the exit code."""
    answer = compare()
    if answer is not None and answer.compared:
        for name, known in sorted(answer.weak.items()):
            sys.stdout.write(f"{name}: {', '.join(known)}\n")
        for name, reason in sorted(answer.left_out.items()):
            sys.stdout.write(f"{name} was not compared: {reason}\n")
        sys.stdout.write(
            f"{len(answer.compared)} versions were compared, {len(answer.weak)} have a known weakness.\n"
        )
        return 1 if answer.weak else 0
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
