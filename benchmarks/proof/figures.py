"""The tables of docs/faults.md on the long campaigns, made from benchmarks/results/proof_*.json.

    python benchmarks/proof/figures.py            prints them
    python benchmarks/proof/figures.py --write    puts them between the marks in docs/faults.md

Counts of several machines add up: each has a seed of its own. Nothing here is typed by hand.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/faults.md"
FAULTS_BEGIN, FAULTS_END = (
    "<!-- faults: made by benchmarks/proof/figures.py -->",
    "<!-- faults end -->",
)
BEGIN, END = "<!-- campaigns: made by benchmarks/proof/figures.py -->", "<!-- campaigns end -->"
WORDS = ("right", "refused", "wrong", "crash", "hang")
NAMES = {"exactly_once": "exactly once: plans", "kills": "kill run: kills", "fuzz": "fuzz: inputs"}
GOALS = {"exactly_once": 1_000_000, "kills": 2000, "fuzz": 10_000_000}
UNITS = {
    "rss_bytes": ("resident memory", 2**20, "MiB"),
    "device_bytes": ("device memory", 2**20, "MiB"),
    "device_reserved_bytes": ("device memory, reserved", 2**20, "MiB"),
    "files": ("open files", 1, ""),
    "threads": ("threads", 1, ""),
    "step_ms": ("step, wall time", 1, "ms"),
    "step_cpu_ms": ("step, CPU time", 1, "ms"),
    "malloc_used_bytes": ("memory that C code has in use", 2**20, "MiB"),
    "malloc_held_bytes": ("memory that its allocator holds", 2**20, "MiB"),
    "pinned_bytes": ("pinned memory of torch", 2**20, "MiB"),
    "python_blocks": ("blocks of Python", 1, ""),
    "shared_bytes": ("mapped files and shared memory", 2**20, "MiB"),
}


def load(name: str) -> dict[str, dict[str, Any]]:
    """Return the results of a campaign by machine, or machine and number of the part where it ran in parts."""
    paths = sorted((ROOT / "benchmarks/results").glob(f"proof_{name}-*.json"))
    return {
        path.stem.removeprefix(f"proof_{name}-"): json.loads(path.read_text("utf-8"))["result"]
        for path in paths
    }


def _row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _quantiles(seconds: list[float]) -> str:
    ordered = sorted(seconds)
    at = [ordered[math.ceil(share * len(ordered)) - 1] for share in (0.5, 0.99, 1.0)]
    return ", ".join(f"{one:.1f}" for one in at)


def counts() -> list[str]:
    """Return the table of trials."""
    lines = [
        _row(
            "campaign",
            "done",
            "of",
            "right",
            "refused by name",
            "wrong",
            "crashes",
            "hangs",
            "where",
        ),
        "|---|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    for name, goal in GOALS.items():
        by_family: dict[str, dict[str, int]] = {}
        machines = load(name)
        for result in machines.values():
            for family, entry in result["families"].items():
                summed = by_family.setdefault(family, dict.fromkeys(WORDS, 0))
                for word in WORDS:
                    summed[word] += entry["counts"][word]
        total = {word: sum(one[word] for one in by_family.values()) for word in WORDS}
        where = ", ".join(
            f"{host}: {sum(sum(one['counts'].values()) for one in result['families'].values()):,}"
            for host, result in machines.items()
        )
        if not machines:
            continue
        lines.append(
            _row(
                NAMES[name],
                f"{sum(total.values()):,}",
                f"{goal:,}",
                *(f"{total[word]:,}" for word in WORDS),
                where,
            )
        )
        if len(by_family) > 1:
            lines += [
                _row(
                    f"– {family}",
                    f"{sum(one.values()):,}",
                    "",
                    *(f"{one[word]:,}" for word in WORDS),
                    "",
                )
                for family, one in by_family.items()
            ]
    return lines


def recoveries() -> list[str]:
    """Return the table of seconds to recover."""
    lines = [
        _row("killed in", "recovered after (p50, p99, worst), s", "kills", "where"),
        "|---|---:|---:|---|",
    ]
    for host, result in load("kills").items():
        for family, entry in result["families"].items():
            if entry.get("seconds"):
                lines.append(
                    _row(family, _quantiles(entry["seconds"]), len(entry["seconds"]), host)
                )
    return lines


def without_largest_step(found: Mapping[str, Any]) -> float | None:
    """Return the growth per hour without the largest rise or fall between stretches; None of files without stretches.

    An allocator takes one block of some MiB for good, which a straight line takes for growth; what grows steadily still
    does without it.
    """
    if (medians := found.get("medians")) is None:
        return None
    rises = [after - before for before, after in itertools.pairwise(medians)]
    if not found["per_hour"] or not any(rises):
        return 0.0
    at = max(range(len(rises)), key=lambda number: abs(rises[number]))
    level = [value - rises[at] * (number > at) for number, value in enumerate(medians)]
    numbers = range(len(medians))
    slopes = [statistics.linear_regression(numbers, values).slope for values in (medians, level)]
    # The first is that of the file, in other units.
    return float(found["per_hour"] * slopes[1] / slopes[0]) if slopes[0] else 0.0


def soaks() -> list[str]:
    """Return the table of slopes."""
    lines = [
        _row(
            "soak",
            "minutes",
            "steps",
            "what",
            "level",
            "growth per hour (95 % interval)",
            "without its largest step",
            "grows",
        ),
        "|---|---:|---:|---|---:|---:|---:|---|",
    ]
    parts = [(host, part) for host, result in load("soak").items() for part in result["parts"]]
    for host, part in parts:
        for half in ("one long run", "short runs"):
            if (entry := part.get(half)) is None:
                continue  # it was ended before
            about = (
                f"{host}, {part['begun'][:10]}, {half}",
                f"{entry['seconds'] / 60:.0f}",
                f"{entry['steps']:,}",
            )
            for key, (label, scale, unit) in UNITS.items():
                if (found := entry.get(key)) is None:
                    continue
                rest = without_largest_step(found)
                level, growth, low, high = (
                    found[word] / scale for word in ("level", "per_hour", "low", "high")
                )
                lines.append(
                    _row(
                        *about, label, f"{level:,.1f} {unit}".strip(),
                        f"{growth:+.1f} ({low:+.1f} to {high:+.1f}) {unit}".strip(),
                        "n/a" if rest is None else f"{rest / scale:+.1f} {unit}".strip(),
                        "yes" if found["grows"] else "no",
                    )
                )  # fmt: skip
                about = ("", "", "")
    return lines


def text() -> str:
    """Return what stands between the marks."""
    parts = [counts(), recoveries(), soaks()]
    return "\n\n".join("\n".join(lines) for lines in parts if len(lines) > 2) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true")
    if not parser.parse_args().write:
        print(text())
        return
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from faults import table  # imports torch and every peer that is installed

    page = PAGE.read_text("utf-8")
    for path in sorted((ROOT / "benchmarks/results").glob("faults-*.json")):
        made = table(json.loads(path.read_text("utf-8"))["result"])
        page = _between(page, FAULTS_BEGIN, made, FAULTS_END)
    PAGE.write_text(_between(page, BEGIN, text(), END), "utf-8")


def _between(page: str, begin: str, made: str, end: str) -> str:
    """Return a page with other text between two marks."""
    head, _, rest = page.partition(begin)
    return f"{head}{begin}\n\n{made}\n{end}{rest.partition(end)[2]}"


if __name__ == "__main__":
    main()
