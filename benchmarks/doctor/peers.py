"""Do other tools name the cause? py-spy, Scalene, torch's profiler and TraceML on one script for each cause.

    python benchmarks/doctor/peers.py --scalene FOLDER --traceml FOLDER --py-spy PROGRAM --out FILE

The folders are where `pip install --target` put the tools; one that is not given is not run. For each cause the script
in Lightning's or Hugging Face's style is taken where there is one, because TraceML reads those by itself; else the
first.

The rule, lenient to the tools: a profiler of lines names the cause if its costliest line of the script, imports apart,
lies in a function that is the cause (`SPOTS`). torch's profiler does if one of its three costliest operators is the
cause's (`OPERATORS`). TraceML does if its verdict names the kind of the cause (`VERDICTS`): "input-bound" counts for
every cause in loading. Finished scripts are kept in `--state`.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from cases import CASES, Case  # noqa: E402

from harness import machine_facts  # noqa: E402

STEPS, SECONDS = 80, 240
LOADING = (
    *("no-workers", "starved-by-loader", "decode-bound", "disk-bound", "augment-on-cpu"),
    *("python-collate", "hdf5-compressed", "hdf5-chunks", "workers-restarted"),
)
SPOTS = {
    "no-workers": {"__getitem__"},
    "starved-by-loader": {"__getitem__"},
    "decode-bound": {"decode", "__getitem__"},
    "disk-bound": {"read", "__getitem__", "__iter__"},
    "augment-on-cpu": {"augment"},
    "python-collate": {"collate"},
    "hdf5-compressed": {"__getitem__"},
    "hdf5-chunks": {"__getitem__"},
    "sync-every-step": {"after"},
    "gc-each-step": {"after"},
    "empty-cache-each-step": {"after"},
    "saves-too-often": {"after"},
    "slow-between-steps": {"get_batch", "__getitem__", "batches", "samples", "after", "rows"},
}
"""Functions of the scripts at which a tool that shows lines points at the cause."""
OPERATORS = {
    **dict.fromkeys(LOADING, ("enumerate(DataLoader)",)),
    "sync-every-step": ("aten::item", "aten::_local_scalar_dense"),
}
VERDICTS = {
    **dict.fromkeys((*LOADING, "slow-between-steps"), "INPUT"),
    "imbalanced-ranks": "STRAGGLER|IMBALANCE|SKEW",
    "memory-creep": "CREEP|GROWTH|LEAK",
    "sync-every-step": "SYNC|WAIT",
    "batch-too-small": "BATCH|UNDERUTIL|LOW",
}


def chosen() -> list[Case]:
    """Return one script for each cause."""
    found: dict[str, Case] = {}
    for case in CASES:
        if len(case.causes) != 1 or case.needs_gpu:
            continue
        known = found.setdefault(case.causes[0], case)
        if case.style in ("lightning", "hf") and known.style not in ("lightning", "hf"):
            found[case.causes[0]] = case
    return list(found.values())


def function_at(source: str, line: int) -> str:
    """Return the name of the innermost function around a line; "" at the top of the module."""
    inside = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.lineno <= line <= (node.end_lineno or line)
    ]
    return max(inside, key=lambda node: node.lineno).name if inside else ""


def named_by_line(line: Mapping[str, Any] | None, causes: Sequence[str]) -> bool | None:
    """Return whether a profiler's costliest line is in a function that is a cause; None if it did not run."""
    if line is None:
        return None
    return any(line["function"] in SPOTS.get(cause, ()) for cause in causes)


def named_by_operators(top: Sequence[str] | None, causes: Sequence[str]) -> bool | None:
    """Return whether torch's profiler shows an operator that is a cause; None if it did not run."""
    if not top:
        return None
    words = tuple(word for cause in causes for word in OPERATORS.get(cause, ()))
    return any(name.startswith(words) for name in top)  # such as enumerate(DataLoader)#...


def named_by_verdict(verdict: str | None, causes: Sequence[str]) -> bool | None:
    """Return whether TraceML's verdict names the kind of a cause; None if it gave none."""
    if verdict is None:
        return None
    return any(re.search(VERDICTS.get(cause, r"\Z\A"), verdict) for cause in causes)


# -- the tools ---------------------------------------------------------------------------------------


def run_tool(words: Sequence[str], folder: Path, path: str | None = None) -> str:
    """Run a command line in a folder; return what it printed."""
    variables = {"STEPS": str(STEPS), "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
    own = os.environ.get("PYTHONPATH", "")
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, [path, own]))
    try:
        done = subprocess.run(
            list(words),
            env={**os.environ, **variables},
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout + done.stderr


def py_spy(program: str, script: Path, folder: Path) -> dict[str, Any] | None:
    """Return the script's line with most samples."""
    raw = folder / "stacks"
    words = ["record", "--rate", "50", "--format", "raw", "--full-filenames", "--subprocesses"]
    run_tool([program, *words, "--output", str(raw), "--", sys.executable, str(script)], folder)
    if not raw.exists():
        return None
    lines: Counter[tuple[str, int]] = Counter()
    for stack in raw.read_text(errors="replace").splitlines():
        frames, _, count = stack.rpartition(" ")
        if "importlib" in frames:
            continue
        own = [frame for frame in frames.split(";") if script.name in frame]
        found = re.fullmatch(r"(.*) \(.*:(\d+)\)", own[-1]) if own else None
        if found is not None:
            lines[(found[1].rpartition(".")[2], int(found[2]))] += int(count)
    if not lines:
        return None
    (function, line), _ = lines.most_common(1)[0]
    if function.startswith("<") and function != "<module>":
        function = function_at(script.read_text(), line)
    return {"function": function, "line": line}


def scalene(place: str, script: Path, folder: Path) -> dict[str, Any] | None:
    """Return the script's line with most time on a core, imports apart."""
    out = folder / "scalene.json"
    words = ["-m", "scalene", "--cli", "--json", "--cpu", "--outfile", str(out), str(script)]
    run_tool([sys.executable, *words], folder, place)
    if not out.exists():
        return None
    try:
        document = json.loads(out.read_text())
    except ValueError:
        return None
    source = script.read_text()
    best, costliest = None, 0.0
    for name, file in document.get("files", {}).items():
        for line in file["lines"] if Path(name).name == script.name else ():
            shares = ("n_cpu_percent_python", "n_cpu_percent_c", "n_sys_percent")
            cost = sum(line[share] for share in shares)
            is_import = line["line"].strip().startswith(("import ", "from "))
            if cost > costliest and not is_import:
                best, costliest = line, cost
    if best is None:
        return None
    return {"function": function_at(source, best["lineno"]), "line": best["lineno"]}


def traceml(place: str, script: Path, folder: Path) -> str | None:
    """Return TraceML's verdict in its own words; None if it gave none."""
    call = (
        f"import sys; sys.argv = ['traceml', 'run', {str(script)!r}]; "
        "from traceml_ai.launcher.cli import main; main()"
    )
    said = run_tool([sys.executable, "-c", call], folder, place)
    found = re.search(r"Verdict: *([^|\n]*)", said)
    return found[1].strip() if found else None


def torch_profiler(script: Path, folder: Path) -> list[str] | None:
    """Return the three costliest operators."""
    out = folder / "profiled.times"
    os.environ["STOPWATCH_PROFILE"] = "1"
    try:
        run_tool([sys.executable, str(HERE / "stopwatch.py"), str(out), str(script)], folder)
    finally:
        del os.environ["STOPWATCH_PROFILE"]
    return json.loads(out.read_text())["top"] if out.exists() else None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--py-spy", help="the program")
    parser.add_argument("--scalene", help="folder with the package")
    parser.add_argument("--traceml", help="folder with the package")
    parser.add_argument("--state", type=Path, default=Path(tempfile.gettempdir()) / "doctor-peers")
    parser.add_argument("--only", default="", help="parts of the names of scripts, by commas")
    parser.add_argument("--kept", action="store_true", help="run nothing, judge what is kept")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    asked.state.mkdir(parents=True, exist_ok=True)
    tools: dict[str, Any] = {"torch_profiler": torch_profiler}
    for name, tool in (("py_spy", py_spy), ("scalene", scalene), ("traceml", traceml)):
        if given := getattr(asked, name):
            tools[name] = partial(tool, given)
    judges = {"torch_profiler": named_by_operators, "traceml": named_by_verdict}
    rows: list[dict[str, Any]] = []
    for case in chosen():
        kept = asked.state / f"{case.name}.json"
        if not any(part in case.name for part in asked.only.split(",")):
            continue
        if asked.kept and not kept.exists():
            continue
        told = json.loads(kept.read_text()) if kept.exists() else {}
        for name, tool in tools.items():
            if name not in told and not asked.kept:
                with tempfile.TemporaryDirectory() as made:
                    script = Path(made) / f"{case.name}.py"
                    script.write_text(case.source(), encoding="utf-8")
                    told[name] = tool(script, Path(made))
                kept.write_text(json.dumps(told))
        row: dict[str, Any] = {"case": case.name, "causes": case.causes, "told": told}
        row["named"] = {
            name: judges.get(name, named_by_line)(answer, case.causes)
            for name, answer in told.items()
        }
        rows.append(row)
        print(case.name, row["named"], told, flush=True)
        document = {
            "benchmark": "doctor_peers",
            "machine": machine_facts(),
            "result": {"rows": rows},
        }
        asked.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
