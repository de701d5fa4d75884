"""The page docs/doctor-benchmark.md and its pictures, made of the result files: no figure is typed by hand.

    python benchmarks/doctor/publish.py        # reads benchmarks/results/doctor*.json, writes docs/
    python benchmarks/doctor/publish.py --merge NEW.json OLD.json --out BOTH.json

A run on a rented machine may be cut short: `--merge` takes from older results of the same machine the scripts that the
newer one did not run, notes in each row which one it is from, and keeps the figures of each by itself.

Enters: `doctor-*.json` of `run.py`, `doctor_peers-*.json` of `peers.py`, `doctor_overhead-*.json` of `overhead.py`,
`doctor_public-*.json` of public scripts, which were run by hand.
Leaves: Markdown and two SVG pictures for each result. Costs milliseconds.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS, DOCS = ROOT / "benchmarks" / "results", ROOT / "docs"
PAGE, PICTURES = "doctor-benchmark.md", "images/doctor"
CLOSE = 0.3
MENDED = (
    "The scripts ran in {} runs, and the doctor was improved after each. A later run began with the scripts that had "
    "not run or had gone wrong. Its rows replace older ones in the figures above, which are therefore better than "
    "those of any single run. Each run by itself:"
)
TOOLS = {
    "py_spy": "py-spy, costliest line",
    "scalene": "Scalene, costliest line",
    "torch_profiler": "torch's profiler, three costliest operators",
    "traceml": "TraceML, verdict",
}
_STYLE = (
    "<style>text{font:12px sans-serif;fill:#888}.v{font-weight:bold}.r{fill:#2a9d5c}.w{fill:#d1495b}"
    ".n{fill:#8883}.l{stroke:#888;stroke-width:1}.d{stroke-dasharray:4 4}</style>"
)


# -- pictures ----------------------------------------------------------------------------------------


def confusion_svg(confusion: Mapping[str, Mapping[str, int]]) -> str:
    """Draw true causes in rows and top findings in columns; right cells green, wrong ones red."""
    rows = sorted(confusion, key=lambda cause: (cause == "healthy", cause))
    told = {name for verdicts in confusion.values() for name in verdicts}
    columns = [*rows, *sorted(told - set(rows))]
    cell, left, top = 22, 170, 150
    parts = []
    for across, name in enumerate(columns):
        x = left + cell * across + 15
        parts.append(
            f'<text transform="rotate(-60 {x} {top - 6})" x="{x}" y="{top - 6}">{escape(name)}</text>'
        )
    for down, cause in enumerate(rows):
        y = top + cell * down
        parts.append(f'<text x="{left - 6}" y="{y + 15}" text-anchor="end">{escape(cause)}</text>')
        for across, name in enumerate(columns):
            count = confusion[cause].get(name, 0)
            kind = "n" if not count else "r" if cause == name else "w"
            x = left + cell * across
            parts.append(
                f'<rect class="{kind}" x="{x}" y="{y}" width="{cell - 2}" height="{cell - 2}"/>'
            )
            if count:
                parts.append(
                    f'<text class="v" style="fill:#fff" x="{x + 10}" y="{y + 15}" text-anchor="middle">{count}</text>'
                )
    width, height = left + cell * len(columns) + 90, top + cell * len(rows) + 8
    return _svg(width, height, parts)


def scatter_svg(pairs: Sequence[tuple[str, float, float]]) -> str:
    """Draw predicted against measured gains on logarithmic axes, with lines at ± 30 %."""
    most = max([2.0, *(value for _, *both in pairs for value in both)]) * 1.1
    size, left, top = 380, 46, 12

    def place(value: float) -> float:
        return size * math.log(max(value, 0.8) / 0.8) / math.log(most / 0.8)

    parts = []
    for mark in (1, 1.5, 2, 3, 5, 10, 20, 40):
        if mark <= most:
            x, y = left + place(mark), top + size - place(mark)
            parts.append(
                f'<line class="n" stroke="#8884" x1="{left}" x2="{left + size}" y1="{y:.1f}" y2="{y:.1f}"/>'
            )
            parts.append(
                f'<text x="{x:.1f}" y="{top + size + 16}" text-anchor="middle">{mark}</text>'
            )
            parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{mark}</text>')
    for factor, kind in ((1.0, "l"), (1 - CLOSE, "l d"), (1 + CLOSE, "l d")):
        ends = [(value, value * factor) for value in (0.8 / min(factor, 1), most / max(factor, 1))]
        (x1, y1), (x2, y2) = [(left + place(a), top + size - place(b)) for a, b in ends]
        parts.append(
            f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'
        )
    for name, measured, predicted in pairs:
        kind = "r" if abs(predicted / measured - 1) <= CLOSE else "w"
        x, y = left + place(measured), top + size - place(predicted)
        parts.append(
            f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="4"><title>{escape(name)}: predicted '
            f"{predicted:.2f}, measured {measured:.2f}</title></circle>"
        )
    parts.append(
        f'<text x="{left + size}" y="{top + size + 32}" text-anchor="end">measured gain</text>'
    )
    parts.append(
        f'<text transform="rotate(-90 12 {top})" x="12" y="{top}" text-anchor="end">predicted gain</text>'
    )
    return _svg(left + size + 12, top + size + 40, parts)


def _svg(width: float, height: float, parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
    return "\n".join([head, _STYLE, *parts, "</svg>"]) + "\n"


# -- the page ----------------------------------------------------------------------------------------


def percent(value: float | None) -> str:
    """Return a share in words; n/a if it is unknown."""
    return "n/a" if value is None else f"{value:.0%}" if abs(value) >= 0.1 else f"{value:.1%}"


def times(value: float | None) -> str:
    """Return a gain in words; n/a if it is unknown."""
    return "n/a" if value is None else f"× {value:.2f}"


def result_section(name: str, document: Mapping[str, Any]) -> list[str]:
    """Return the section of one result of `run.py`."""
    summary, rows = document["result"]["summary"], document["result"]["rows"]
    machine, predictions = document["machine"], summary["predictions"]
    wrong = [row for row in rows if not row["is_right"]]
    far = [
        row for row in rows
        if row["predicted"] and row["measured"] and abs(row["predicted"] / row["measured"] - 1) > CLOSE
    ]  # fmt: skip
    right, both, alarms = summary["top_right"], summary["both_named"], summary["false_alarms"]
    gaining, others, unkept = by_gain(rows)
    lines = [
        f"## {where(document)}",
        "",
        (f"{summary['num_scripts']} scripts, {machine['probe']['cpu'] or machine['host']}, torch "
        f"{machine['probe']['torch']}, commit `{str(machine.get('commit'))[:10]}`; "
        f"[every figure](../benchmarks/results/{name}.json)."),
        "",
        "| | target | measured |",
        "|---|---|---|",
        (f"| top finding right | 90 % | {right['right']} of {right['of']} "
        f"({percent(right['right'] / max(1, right['of']))}) |"),
        f"| the same, for scripts whose fix gained 5 % or more there, or whose cause ends the run | | {gaining} |",
        f"| predicted gains on other scripts with a cause that were not reached | | {len(unkept)} of {len(others)} |",
        f"| false alarms on healthy scripts | 0 | {alarms['alarms']} of {alarms['of']} |",
        (f"| predicted gain within ± 30 % of the measured one | 80 % | "
        f"{round((predictions['within_30_percent'] or 0) * predictions['count'])} of {predictions['count']} "
        f"({percent(predictions['within_30_percent'])}) |"),
        f"| median error of the prediction | | {percent(predictions['median_error'])} |",
        f"| both of two causes named, the second as hidden behind the first | | {both['right']} of {both['of']} |",
        ("| slow-down of a step under the doctor, p50 and p95 of the scripts | "
        f"| {percent(summary['overhead']['p50'])}, {percent(summary['overhead']['p95'])} |"),
        ("| difference between two runs of the same script, p50 and p95: the noise of the machine | "
        f"| {percent(quantile(rows, 0.5))}, {percent(quantile(rows, 0.95))} |"),
        "",
        *runs_table(document["result"].get("runs", ())),
        *([document["result"]["note"], ""] if document["result"].get("note") else []),
        f"![true cause in rows, top finding in columns]({PICTURES}/{name}-matrix.svg)",
        "",
        f"![predicted against measured gain; dashed: ± 30 %]({PICTURES}/{name}-gains.svg)",
        "",
        "What went wrong:" if wrong or far else "No verdict was wrong, and no prediction was off by more than 30 %.",
        "",
    ]  # fmt: skip
    lines += [
        f"- `{row['case']}`: the cause is {', '.join(row['causes']) or 'none'}, the doctor said {row['verdict']}"
        for row in wrong
    ]
    lines += [
        f"- `{row['case']}`: predicted {times(row['predicted'])}, measured {times(row['measured'])}" for row in far
    ]  # fmt: skip
    lines += [f"- `{row['case']}`: {told_without_gain(row)}" for row in others]
    better = [row for row in better_advice(rows) if row not in others]
    if better:
        lines += [
            "",
            "Counted as right: the first advice is not the planted fix, but it was tried and brought as much.",
            "",
        ]
        lines += [
            f"- `{row['case']}`: the planted fix gave {times(row['measured'])}; the doctor said {told_of_trial(row)}"
            for row in better
        ]
    if summary.get("not_run"):
        missing = ", ".join(f"`{one}`" for one in summary["not_run"])
        lines += [
            "",
            f"Not run, for lack of time on that machine or of a framework: {missing}.",
        ]
    return [*lines, ""]


def by_gain(
    rows: Sequence[Mapping[str, Any]],
) -> tuple[str, list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """Return how many of the scripts whose cause is one on that machine were right, the others, and promises not kept.

    The rule is the same for all scripts: a cause is one there if its fix was measured to bring 5 % or more, or if it
    ends the run. What the doctor promised of another is kept if it was tried in the same run and brought as much.
    """
    from cases import BY_NAME
    from run import LEAST_GAIN

    slow = [row for row in rows if row["causes"]]
    others = [
        row
        for row in slow
        if row["measured"]
        and row["measured"] < LEAST_GAIN
        and (row["case"] not in BY_NAME or BY_NAME[row["case"]].has_gain)
    ]
    causes = [row for row in slow if row not in others]
    unkept = [
        row
        for row in others
        if row["found"] and row.get("tried", {}).get("measured", 0.0) < LEAST_GAIN
    ]
    return f"{sum(row['is_right'] for row in causes)} of {len(causes)}", others, unkept


def better_advice(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the scripts for which another advice than the planted fix came first, and brought as much or more."""
    return [row for row in rows if row["is_right"] and row.get("tried")]


def told_of_trial(row: Mapping[str, Any]) -> str:
    """Say what the doctor's own first advice was promised to bring, and what it brought."""
    tried = row["tried"]
    return f"{tried['name']}, {times(tried['predicted'])}, and with that it was {times(tried['measured'])}"


def told_without_gain(row: Mapping[str, Any]) -> str:
    """Say what the doctor told of a script whose planted fix brought nothing."""
    told = f"its planted fix gave {times(row['measured'])} there, so it is not a cause; "
    if row.get("tried"):
        return f"{told}the doctor said {told_of_trial(row)}"
    if not row["found"]:
        return f"{told}the doctor predicted no gain"
    planted = row["verdict"] in row["causes"]
    return f"{told}the doctor said {row['verdict']}, which {'is the planted cause' if planted else 'was not tried'}"


def runs_table(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the figures of each run that was merged, by itself; nothing if there is one."""
    if len(runs) < 2:
        return []
    lines = [
        MENDED.format(len(runs)),
        "",
        "| run, last change of the doctor | scripts | top finding right | false alarms | within ± 30 % | both of two |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for number, one in enumerate(runs, 1):
        told = one["summary"]
        right, alarms = told["top_right"], told["false_alarms"]
        close, both = told["predictions"], told["both_named"]
        lines.append(
            f"| {number}, `{one['commit']}` | {told['num_scripts']} | {right['right']} of {right['of']} "
            f"| {alarms['alarms']} of {alarms['of']} | {percent(close['within_30_percent'])} of {close['count']} "
            f"| {both['right']} of {both['of']} |"
        )
    return [*lines, ""]


def where(document: Mapping[str, Any]) -> str:
    """Return the machine of a result in words."""
    gpus = document["machine"]["probe"]["gpus"]
    if not gpus:
        return "On two cores, without a GPU"
    if document["result"].get("gpu"):
        return f"On an {gpus[0]['name']}"
    return f"On two cores of a machine with an {gpus[0]['name']}, which was hidden"


def quantile(rows: Sequence[Mapping[str, Any]], part: float) -> float | None:
    """Return a quantile of how much two runs of the same script differ."""
    known = sorted(row["drift"] for row in rows if row.get("drift") is not None)
    return known[int(part * (len(known) - 1))] if known else None


def doubt(row: Mapping[str, Any]) -> str:
    """Return the interval of a cost, and that it is not sound where it is wide; "" for older rows, which have none."""
    if "interval" not in row:
        return ""
    low, high = (percent(one) for one in row["interval"])
    return f" ({low} to {high}{'' if row['sound'] else ': NOT SOUND, the machine varied'})"


def overhead_section(documents: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the tables of `overhead.py`, one for each machine; nothing without any."""
    if not documents:
        return []
    lines = [
        "## What the probe costs",
        "",
        "Two processes on the same cores, one alone and one under the doctor, take short turns; the other one is",
        'stopped meanwhile. The cost is the median of the rounds of turns, with its 95 % interval. "Reported" is',
        "the step that the doctor reports, from the steps in which it times no calls.",
        "",
    ]
    for document in documents:
        lines += overhead_table(document)
    return lines


def overhead_table(document: Mapping[str, Any]) -> list[str]:
    """Return the table of one machine."""
    machine = document["machine"]
    cpu = machine["probe"]["cpu"] or machine["host"]
    lines = [
        f"{cpu}, {machine['host']}, {machine['date']}, commit `{machine.get('commit')}`:",
        "",
        "| step | alone | under the doctor | cost | target | reported | its error |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    limits = {"2 ms": 0.08, "10 ms": 0.03}  # of older rows
    for name, row in document["result"].items():
        cells = (f"{row[key]:.2f} ms" for key in ("alone_ms", "doctored_ms"))
        told = f"{row['reported_ms']:.2f} ms" if row["reported_ms"] else "n/a"
        limit = row.get("limit", limits.get(name))
        lines.append(
            f"| {name} | {' | '.join(cells)} | {percent(row['overhead'])}{doubt(row)} "
            f"| {percent(limit) if limit else ''} | {told} | {percent(row['reported_error'])} |"
        )
    lines.append("")
    for name, row in document["result"].items():
        if row.get("note"):
            lines.append(f"{name}: {row['note']}")
        if "sessions" in row:
            low, high = (percent(one) for one in row["cpu_interval"])
            lines.append(
                f"- {name}: {row['rounds']} rounds of {row['sessions']} pairs of processes. Their CPU time is "
                f"{percent(row['cpu_overhead'])} apart ({low} to {high}), their mean {percent(row['mean_overhead'])}; "
                f"the rounds right after a start are {percent(row['first_overhead'])}."
            )
        elif "cpu_overhead" in row:
            lines.append(
                f"{name}: the best turns are {percent(row['best_overhead'])} apart, their CPU time "
                f"{percent(row['cpu_overhead'])}."
            )
        if inside := row.get("inside"):
            lines.append(
                f"{name}: in one process, with the hooks on and off in turns (`inside.py`), they add "
                f"{inside['timed_cpu_us']:.0f} µs of CPU time to a step whose calls are timed and "
                f"{inside['plain_cpu_us']:.0f} µs to the others, {percent(inside['cpu_share'])} of "
                f"{inside['cpu_ms']:.2f} ms."
            )
        kept = [one["ms"] for one in row.get("turns", {}).get("cupti_kept", ())]
        if kept:
            lines += [
                "",
                f"{name}, if CUPTI stays attached after the profiled steps: {kept[0]:.2f} ms.",
            ]
    return [*lines, ""]


def public_section(document: Mapping[str, Any]) -> list[str]:
    """Return the table of public scripts, whose first advice was applied by hand."""
    rows = document["result"]["rows"]
    lines = [
        "## Scripts of strangers",
        "",
        f"{len(rows)} public training scripts ran under the doctor for 20 to 40 s each, on two cores without a GPU",
        "that other programs used as well. Its advice was applied by hand, and both versions ran in turns, unless",
        "the last column is empty. If it advised nothing, a remedy was tried if reading the script suggested one.",
        "Turns on the busy machine differ; the notes say by how much. The models are small, as on a laptop; on a",
        "GPU the same scripts may wait for their data.",
        "",
        "| project | its habit | finding | predicted | applied | measured |",
        "|---|---|---|---|---|---:|",
    ]
    for row in rows:
        predicted = row.get("verdict", "nothing to fix")
        if row["predicted"]:
            low, likely, high = row["predicted"]
            predicted = f"× {likely:.2f} ({low:.2f} to {high:.2f})"
        lines.append(
            f"| {row['project']}, `{row['script']}` | {row['habit']} | {row['found'] or ''} | {predicted} "
            f"| {row['applied']} | {times(row['measured']) if row['measured'] else ''} |"
        )
    lines.append("")
    lines += [f"- {row['project']}: {row['note']}" for row in rows if row["note"]]
    made = [f"{row['project']} ({row['prepared']})" for row in rows if row["prepared"]]
    return [*lines, "", f"Changes that they needed to run here: {'; '.join(made)}.", ""]


def matrix_section(document: Mapping[str, Any]) -> list[str]:
    """Return the table of `matrix.py`."""
    table = document["result"]
    from matrix import CONDITIONS

    conditions = [name for name in CONDITIONS if any(name in row for row in table.values())]
    told = [cell["told"] for row in table.values() for cell in row.values()]
    ran = [one for one in told if one != "not run"]
    wrong = sum(one.startswith("wrong") for one in ran)
    lines = [
        "## Every way of getting batches, under every condition",
        "",
        (
            f"{len(ran)} scripts that make their batches slowly ran on two cores that other programs used as well: "
            f"{ran.count('right')} right, {ran.count('cannot judge')} cannot judge, {wrong} wrong."
        ),
        "",
        *([document["note"], ""] if document.get("note") else []),
        "| | " + " | ".join(conditions) + " |",
        "|---" * (len(conditions) + 1) + "|",
    ]
    for getting, row in table.items():
        cells = [row.get(name, {"told": "not run"})["told"] for name in conditions]
        lines.append(f"| {getting} | {' | '.join(cells)} |")
    return [*lines, ""]


def peers_section(document: Mapping[str, Any], ours: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the table of other tools; `ours` has the rows of our own result by script."""
    rows = document["result"]["rows"]
    tools = [tool for tool in TOOLS if any(tool in row["named"] for row in rows)]
    answers = {
        tool: [row["named"][tool] for row in rows if row["named"].get(tool) is not None]
        for tool in tools
    }
    stokers = [ours[row["case"]]["is_right"] for row in rows if row["case"] in ours]
    lines = [
        "## Do other tools name the cause?",
        "",
        f"The test has one script for each cause, {len(rows)} in all. It is one in Lightning's or Hugging Face's",
        "style if there is one, because TraceML reads those without changes, else the first script. The rule",
        "favours the tools. A line profiler names the cause if its costliest line of the script, without imports,",
        "is in the function that is the cause. torch's profiler names it if one of its three costliest operators",
        "belongs to the cause. TraceML names it if its verdict has the right kind: *input-bound* counts for every",
        "cause in loading, though it does not tell workers from decoding. None of these tools predicts a gain. A",
        "script without an answer within four minutes does not count for that tool. The tools ran on two cores",
        "that other programs used as well, stoker's doctor on quiet cores. Shares of time hardly depend on that,",
        "but the machines are not the same.",
        "",
        "| | named | of scripts with an answer |",
        "|---|---:|---:|",
        f"| stoker doctor, top finding | {sum(stokers)} | {len(stokers)} |",
        *(f"| {TOOLS[tool]} | {sum(answers[tool])} | {len(answers[tool])} |" for tool in tools),
        "",
        "| cause | script | stoker doctor | " + " | ".join(TOOLS[tool].split(",")[0] for tool in tools) + " |",
        "|---|---|---" + "|---" * len(tools) + "|",
    ]  # fmt: skip
    words = {True: "yes", False: "no", None: "no answer"}
    for row in rows:
        own = ours.get(row["case"])
        cells = [words[own["is_right"]] if own else "not run"]
        for tool in tools:
            told = row["told"].get(tool)
            said = (
                f": {told}"
                if tool == "traceml" and told
                else f": {told['function'] or 'the loop'}"
                if isinstance(told, dict)
                else ""
            )
            cells.append(f"{words[row['named'].get(tool)]}{said}")
        lines.append(f"| {', '.join(row['causes'])} | `{row['case']}` | {' | '.join(cells)} |")
    return [*lines, ""]


INTRO = """# A benchmark for doctors

A tool that says why training is slow should be tested on scripts whose cause is known. `benchmarks/doctor/cases.py` has
{num} small training scripts in the usual styles: plain loops, epochs with validation, accumulation, classes, Lightning,
Hugging Face's Trainer, Accelerate, `torch.compile`, generators, hand-made `get_batch`, memory maps, dicts of arrays,
tar shards, stoker's own Loader and `prefetch`, notebook cells, two ranks. {one} have one planted cause, {two} have two,
{healthy} are healthy. Each slow script has a fixed twin. The gain of the fix is measured in the same run: script and
twin run in turns, and again while two runs of the same script differ by more than 15 %.
`benchmarks/doctor/publish.py` makes this page from the result files; no figure is typed by hand.

    python benchmarks/doctor/run.py             # on this machine, about an hour
    python benchmarks/doctor/publish.py         # this page

The authors of the doctor wrote the scripts, and fixed errors of the doctor that the scripts showed. So the scripts test
what the doctor can see. Public scripts by other people follow [below](#scripts-of-strangers).
"""


def make_page(results: Path = RESULTS) -> dict[str, str]:
    """Return the page and its pictures by their path below docs/."""
    from cases import CASES

    counts = [len(case.causes) for case in CASES]
    intro = INTRO.format(
        num=len(CASES), one=counts.count(1), two=counts.count(2), healthy=counts.count(0)
    )
    lines = [intro]
    files: dict[str, str] = {}
    ours: dict[str, Mapping[str, Any]] = {}
    for path in sorted(results.glob("doctor-*.json")):
        document = json.loads(path.read_text(encoding="utf-8"))
        rows = document["result"]["rows"]
        lines += result_section(path.stem, document)
        if not document["result"].get("gpu"):
            ours |= {row["case"]: row for row in rows}
        pairs = [
            (row["case"], row["measured"], row["predicted"])
            for row in rows
            if row["predicted"] and row["measured"]
        ]
        files[f"{PICTURES}/{path.stem}-matrix.svg"] = confusion_svg(
            document["result"]["summary"]["confusion"]
        )
        files[f"{PICTURES}/{path.stem}-gains.svg"] = scatter_svg(pairs)
    prices = sorted(results.glob("doctor_overhead-*.json"))
    lines += overhead_section([json.loads(path.read_text(encoding="utf-8")) for path in prices])
    for path in sorted(results.glob("doctor_public-*.json")):
        lines += public_section(json.loads(path.read_text(encoding="utf-8")))
    for path in sorted(results.glob("doctor_matrix-*.json")):
        lines += matrix_section(json.loads(path.read_text(encoding="utf-8")))
    for path in sorted(results.glob("doctor_peers-*.json")):
        lines += peers_section(json.loads(path.read_text(encoding="utf-8")), ours)
    files[PAGE] = "\n".join(lines).rstrip() + "\n"
    return files


def merge(paths: Sequence[Path], note: str = "") -> dict[str, Any]:
    """Return the newest result, with rows of the others for scripts that it has not, and each one's own figures."""
    from run import summarise

    documents = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    rows: dict[str, Any] = {}
    for number, document in enumerate(documents):
        before = sum(len(one["result"].get("runs", ())) or 1 for one in documents[number + 1 :])
        for row in document["result"]["rows"]:
            rows.setdefault(row["case"], {**row, "run": before + row.get("run", 1)})
    newest = documents[0]
    summary = summarise(list(rows.values()))
    left = {name for document in documents for name in document["result"]["summary"]["not_run"]}
    summary["not_run"] = sorted(left - set(rows))
    runs: list[Mapping[str, Any]] = []
    for one in reversed(documents):
        own = {"commit": one["machine"].get("commit"), "summary": summarise(one["result"]["rows"])}
        runs += one["result"].get("runs") or [own]
    raw: dict[str, Any] = {}
    for document in reversed(documents):
        raw |= document["result"].get("raw", {})
    result = {**newest["result"], "summary": summary, "rows": list(rows.values()), "raw": raw}
    return {**newest, "result": {**result, "runs": runs, "note": note}}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--merge", nargs="+", type=Path, help="results, the newest first")
    parser.add_argument("--note", default="", help="a paragraph for the merged result's section")
    parser.add_argument("--out", type=Path, help="file for the merged result")
    asked = parser.parse_args()
    if asked.merge:
        asked.out.write_text(json.dumps(merge(asked.merge, asked.note), indent=1) + "\n")
        return
    for name, text in make_page().items():
        path = DOCS / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()
