"""The benchmarks page, made of `benchmarks/results/*.json`; no figure is typed by hand.

Enters: result files as `benchmarks/harness.py` writes them. Leaves: Markdown with ours, the peers, the limit and
the ratios of each, losses marked like wins, and the files themselves. Costs milliseconds, and one `git show` per
commit that a result names.

`measures.py` says where the figures stand in the files of each benchmark. A file of an unknown benchmark is shown
whole, so that nothing published is left out.
"""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from docs_build.markdown import table
from docs_build.measures import MEASURES


@dataclass(frozen=True)
class Row:
    """What a `Measure` found in one file; None is a figure that the file does not have."""

    what: str
    unit: str
    ours: float | None
    peers: Mapping[str, float | None]
    limit: tuple[str, float | None] | None
    less_is_better: bool

    def times(self, other: float | None) -> float | None:
        """Return how many times as good as `other` ours is: above 1 we win, below 1 we lose."""
        if not other or not self.ours:
            return None
        return other / self.ours if self.less_is_better else self.ours / other


def _look_up(result: Any, keys: str) -> float | None:
    """Follow keys into a result; None where it does not go on or ends in something else than a number."""
    for key in keys.split("/"):
        if not isinstance(result, Mapping):
            return None
        if key.endswith("*"):
            key = next((name for name in result if name.startswith(key[:-1])), key)
        result = result.get(key)
    if isinstance(result, bool) or not isinstance(result, int | float):
        return None
    return float(result)


def rows_of(document: Mapping[str, Any]) -> list[Row]:
    """Return the rows of one result file; none for a benchmark that is not known here."""
    result = document["result"]
    if document["benchmark"] == "augment":
        return list(_augment_rows(result))
    rows = []
    for measure in MEASURES.get(document["benchmark"], ()):
        peers = {name: _look_up(result, keys) for name, keys in measure.peers.items()}
        limit = (measure.limit[0], _look_up(result, measure.limit[1])) if measure.limit else None
        ours = _look_up(result, measure.ours)
        rows.append(Row(measure.what, measure.unit, ours, peers, limit, measure.less_is_better))
    return rows


def _augment_rows(result: Mapping[str, Any]) -> Iterator[Row]:
    """Every table of `augment` has a row per way; ours stand against the peers of the same table."""
    for types, tables in result["tables"].items():
        for each in tables.values():
            times = {row["name"]: row for row in each["rows"]}
            peers = {name: row["ms"] for name, row in times.items() if row["kind"] == "peer"}
            limit = next((row for row in each["rows"] if row["kind"] == "limit"), None)
            mask = ", with a mask" if each["work"]["mask"] else ""
            for name, row in times.items():
                if row["kind"] == "ours":
                    yield Row(
                        f"{each['title']}{mask}, {types}: {name}",
                        "ms",
                        row["ms"],
                        peers,
                        (limit["name"].removeprefix("limit: "), limit["ms"]) if limit else None,
                        less_is_better=True,
                    )


def benchmarks_page(results: Path, readme: str) -> str:
    """Make the page.

    Args:
        results: The folder of the JSON files.
        readme: `benchmarks/README.md`: its table of questions, and how the figures are to be read.
    """
    intro, _, reading = readme.partition("\n## ")
    lines = [
        intro.strip(),
        "",
        "The tables below are made of the published files when this site is built. A ratio above 1 is a win, whatever",
        "the unit; **bold** ones below 1 are losses. `n/a` was not measured on that machine.",
        "",
    ]
    lines += defaults_section(results)
    for path in sorted(results.glob("*.json")):
        lines += _section(path)
    return "\n".join(lines) + f"\n## {reading}"


def defaults_section(results: Path) -> list[str]:
    """Return one table of every recipe's default run: what it reaches, its best baseline, minutes on each machine."""
    files = [json.loads(path.read_text()) for path in sorted(results.glob("defaults-*.json"))]
    if not files:
        return []
    machines = [f"minutes, {document['machine']['host']}" for document in files]
    header = ("recipe", "data", "metric", "model", "best baseline", "verdict", *machines)
    cells = []
    for recipe in dict.fromkeys(name for document in files for name in document["result"]):
        rows = [document["result"].get(recipe) for document in files]
        # A GPU's file comes last by name; a projected run has no metric.
        row = next((row for row in reversed(rows) if row and "value" in row), None)
        data = next(row["data"] for row in rows if row)
        shown = _default_words(row) if row else ["n/a"] * 4
        cells.append((recipe, data, *shown, *map(_minutes_words, rows)))
    return [
        "## What the recipes reach by default { #recipe-defaults }",
        "",
        "Each recipe on public data, with no setting but the store; `benchmarks/defaults.py` runs them. The metric is",
        "of the test samples, with the interval of 95 % over them; the baseline is fitted in the same run. Minutes are",
        "from the open store to the last figure, baselines included, and in brackets those of the processor, which",
        "other work on the machine does not lengthen. *Projected* ones are the processor time of some steps, times the",
        "steps of a whole run, over the cores; evaluations are not in them, and a run may stop earlier.",
        "",
        *table(header, cells),
        "",
    ]


def _default_words(row: Mapping[str, Any]) -> list[str]:
    words = {
        "better": "better",
        "unclear": "**maybe no better**",
        "worse": "**not worth training**",
    }
    span = row.get("interval") or []
    told = f" ({span[0]:.3g} to {span[1]:.3g})" if len(span) == 2 else ""
    baseline = f"{row['baseline']} {row['baseline_value']:.3g}" if row.get("baseline") else "n/a"
    metric = row["metric"] + ("" if row.get("more_is_better", True) else ", less is better")
    worth = words.get(str(row.get("worth")), "n/a")
    return [metric, f"{row['value']:.3g}{told}", baseline, worth]


def _minutes_words(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "n/a"
    cpu = row.get("cpu_minutes")
    words = number_words(row["minutes"]) + ("" if cpu is None else f" ({number_words(cpu)})")
    if not row.get("projected"):
        return f"{words}, {row['epochs']} epochs" if "epochs" in row else words
    return f"*projected* {words}: {row['epochs']} epochs of {number_words(row['epoch_seconds'])} s"


def _section(path: Path) -> list[str]:
    document = json.loads(path.read_text(encoding="utf-8"))
    machine, commit = document["machine"], document["machine"].get("commit")
    rows = rows_of(document)
    link = f"[{path.name}](results/{path.name})"
    if document["benchmark"] == "defaults":
        lines = ["[One table](#recipe-defaults) has the default runs of all machines."]
    else:
        lines = _rows_table(rows) if rows else _whole(document["result"])
    when = f"Code of commit `{commit}`, of {_commit_date(commit) or 'n/a'}."
    if machine.get("date"):
        when = f"Measured on {machine['date']}, code of commit `{commit}`."
    return [
        f"## {document['benchmark']}: {machine['host']} {{ #{path.stem} }}",
        "",
        f"{_machine_words(machine['probe'])}. {when} {link} has every figure and its spread.",
        "",
        *lines,
        "",
    ]


def _machine_words(probe: Mapping[str, Any]) -> str:
    gpus = [gpu["name"] for gpu in probe["gpus"]]
    words = [
        ", ".join(gpus) or "No GPU",
        f"{probe['cores_usable']} cores" + (f" ({probe['cpu']})" if probe.get("cpu") else ""),
        f"{probe['ram_total_bytes'] / 1e9:.0f} GB of RAM",
        f"torch {probe['torch']}",
        f"Python {probe['python']}",
    ]
    return ", ".join(words)


def _commit_date(commit: str | None) -> str | None:
    command = ["git", "show", "-s", "--format=%cs", str(commit)]
    folder = Path(__file__).parent
    try:
        return subprocess.check_output(
            command, stderr=subprocess.DEVNULL, text=True, timeout=20, cwd=folder
        ).strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _rows_table(rows: list[Row]) -> list[str]:
    cells = []
    for row in rows:
        peers = [_against(row, name, value, loses=True) for name, value in row.peers.items()]
        limit = _against(row, *row.limit, loses=False) if row.limit else ""
        cells.append((row.what, _figure(row.ours, row.unit), "<br>".join(peers), limit))
    return table(("what", "ours", "against the peers", "against the limit"), cells)


def _against(row: Row, name: str, value: float | None, *, loses: bool) -> str:
    times = row.times(value)
    if times is None or value is None:
        return f"n/a: {name}"
    shown = f"{number_words(times)} ×"
    shown = f"**{shown}**" if loses and times < 1 else shown
    return f"{shown} {name} ({_figure(value, row.unit)})"


def _whole(result: Mapping[str, Any]) -> list[str]:
    """Show every number of a result whose layout is not known here; groups of equal entries become tables."""
    grids = {key: value for key, value in result.items() if _is_grid(value)}
    rest = {key: value for key, value in result.items() if key not in grids}
    lines = table(("figure", "value"), _flat(rest, ""))
    for name, rows in grids.items():
        columns = list(next(iter(rows.values())))
        cells = [(key, *(_plain(row[one]) for one in columns)) for key, row in rows.items()]
        lines += ["", f"{_words(name)}:", "", *table(["", *map(_words, columns)], cells)]
    return lines


def _is_grid(value: Any) -> bool:
    """Tell entries with the same plain figures from anything else."""
    if not isinstance(value, Mapping) or len(value) < 2:
        return False
    rows = list(value.values())
    return all(
        isinstance(row, Mapping)
        and row.keys() == rows[0].keys()
        and not any(isinstance(item, Mapping | list) for item in row.values())
        for row in rows
    )


def _flat(value: Any, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat(item, f"{name}, {_words(key)}" if name else _words(key))
    elif isinstance(value, list):
        for number, item in enumerate(value, 1):
            yield from _flat(item, f"{name} {number}")
    else:
        yield name, _plain(value)


def _words(key: str) -> str:
    return str(key).replace("_", " ").replace("|", "\\|")


def _plain(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "n/a" if value is None else str(value).replace("|", "\\|")
    return number_words(value) if isinstance(value, float) else f"{value:,}"


def _figure(value: float | None, unit: str) -> str:
    return f"{number_words(value)}&nbsp;{unit}" if value is not None else "n/a"


def number_words(value: float) -> str:
    """Write a number with three significant digits, thousands apart."""
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.{min(8, 2 - math.floor(math.log10(abs(value))))}f}"
