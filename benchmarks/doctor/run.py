"""The benchmark of doctors: does the doctor name the true cause of a slow script, and predict what its fix brings?

    python benchmarks/doctor/run.py                      # all scripts, one after the other: about an hour
    python benchmarks/doctor/run.py --jobs 8             # eight at once, each on two cores of its own
    python benchmarks/doctor/run.py --only no_workers    # those whose name contains it
    python benchmarks/doctor/run.py --seconds 1800 --healthy-last    # as many as begin within half an hour

A script whose twin is not faster there has no planted cause on that machine. If the doctor's first advice is not the
planted cause but another batch size or number of workers, that is tried as well: it is right if it brings as much as
the planted fix or more.

Each script runs alone, under `stoker doctor`, and then in turns as its fixed twin and alone again: two twins at least,
and up to four where two runs of the same script differ by more than 15 % (`--lengths brief`: three). The measured gain
is the median rate of the twin by that of the script; the overhead is the step under the doctor by the step alone. GPUs
are hidden unless `--gpu` is given, and each script may use two cores (with a GPU, give it `--cores 4`). Finished
scripts are kept in `--state` and not run again; one whose framework is not installed is listed as not run. The result
is `doctor-<machine>.json` in `--out`, of which `publish.py` makes the page docs/doctor-benchmark.md; `peers.py` asks
other tools.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import multiprocessing
import os
import queue
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import stopwatch  # noqa: E402
from cases import CASES, Case  # noqa: E402

from harness import RESULTS, machine_facts, machine_name  # noqa: E402

STEPS, RANK_STEPS, WARM_UP, LONGEST_SECONDS = 2000, 150, 20, 120
FEWEST_DOCTORED, NOISY = 100, 0.15
LEAST_GAIN = 1.05
"""A twin that is faster by less shows that the planted cause is none on this machine."""


class Lengths(NamedTuple):
    """How long and how often scripts run.

    Attributes:
        bare_seconds: A script alone, or its twin, ends after so long if it made enough steps; ranks never end early.
        doctored_seconds: Under the doctor it makes as many steps as take this long, and no fewer than FEWEST_DOCTORED.
        fewest_turns: Runs of the twin, each beside one of the script alone.
        most_turns: The same, while runs of the same script differ by more than NOISY.
    """

    bare_seconds: float
    doctored_seconds: float
    fewest_turns: int
    most_turns: int


LENGTHS = {
    "full": Lengths(2.5, 5.0, 2, 4),
    "brief": Lengths(1.5, 3.5, 2, 3),
    "quick": Lengths(1.2, 2.0, 1, 1),
}
CLOSE = 0.3
DROPPED = ("timeline", "subject")
"""Measurements of the doctor that are not kept. From the others its rules can be asked again."""

# -- one script --------------------------------------------------------------------------------------


FORKS = multiprocessing.get_context("forkserver")
"""Starts processes that have imported torch already: a run takes its own seconds, not those of importing."""


def variables_of(folder: Path, steps: int, **more: str) -> dict[str, str]:
    """Return the variables that every run gets."""
    return {"STEPS": str(steps), "OMP_NUM_THREADS": "1", "TMPDIR": str(folder), **more}


def rate_of(
    case: Case, words: Sequence[str], folder: Path, batch: int, cores: set[int], seconds: float
) -> dict[str, Any]:
    """Run a script with the stopwatch; return samples per second, or how it failed."""
    out = folder / "bare.times"
    out.unlink(missing_ok=True)
    steps = RANK_STEPS if case.style == "ranks" else STEPS
    variables = variables_of(folder, steps, STOPWATCH_LONGEST=str(seconds))
    task = (str(out), words, str(folder), cores, variables)
    process = FORKS.Process(target=stopwatch.run_forked, args=task)
    process.start()
    process.join(LONGEST_SECONDS)
    if process.is_alive():
        process.kill()
        process.join()
    if not out.exists():
        said = Path(f"{out}.said")
        return {"failure": said.read_text(errors="replace")[-600:] if said.exists() else "killed"}
    return read_times(out, batch)


def doctored_rate(
    script: Path, report: Path, folder: Path, batch: int, cores: set[int], steps: int
) -> dict[str, Any]:
    """Run a script under the doctor with the stopwatch, as a user would: in a process of its own."""
    out = folder / "doctored.times"
    out.unlink(missing_ok=True)
    doctor = [sys.executable, "-m", "stoker", "doctor", "--out", str(report), "--"]
    done = subprocess.run(
        [*doctor, sys.executable, str(HERE / "stopwatch.py"), str(out), str(script)],
        env={**os.environ, **variables_of(folder, steps)},
        cwd=folder,
        preexec_fn=partial(os.sched_setaffinity, 0, cores),
        capture_output=True,
        text=True,
        timeout=LONGEST_SECONDS,
        check=False,
    )
    if not out.exists():
        return {"failure": (done.stderr or done.stdout)[-600:]}
    return read_times(out, batch)


def read_times(out: Path, batch: int) -> dict[str, Any]:
    """Return the rate and the median step of what the stopwatch wrote."""
    seen = json.loads(out.read_text())
    times = seen["times"][WARM_UP:]
    steps = [after - before for before, after in itertools.pairwise(times)]
    return {
        "rate": batch * len(steps) / (times[-1] - times[0]),
        "median_step_seconds": statistics.median(steps),
        "queued_share": seen["queued"] / (times[-1] - times[0]),
        "top": seen["top"],
    }


def examine(case: Case, folder: Path, cores: set[int], lengths: Lengths) -> dict[str, Any]:
    """Run one case in all ways."""
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / f"{case.name}.py"
    script.write_text(case.source(), encoding="utf-8")
    fixed_batch = case.fixed_batch or case.batch
    result: dict[str, Any] = {
        "causes": case.causes,
        "also": case.also,
        "style": case.style,
        "has_gain": case.has_gain,
    }
    report = folder / "doctor.json"

    def time_script() -> dict[str, Any]:
        return rate_of(case, [str(script)], folder, case.batch, cores, lengths.bare_seconds)

    result["alone"] = [time_script()]
    if "failure" in result["alone"][0]:
        return result
    per_second = 1 / result["alone"][0]["median_step_seconds"]
    steps = min(STEPS, max(FEWEST_DOCTORED, round(lengths.doctored_seconds * per_second)))
    if case.style == "ranks":
        steps = RANK_STEPS
    result["doctored"] = doctored_rate(script, report, folder, case.batch, cores, steps)
    result["fixed"] = []
    for turn in range(lengths.most_turns):
        noise = max(map(drift, (result["alone"], result["fixed"])))
        if turn >= lengths.fewest_turns and (noise <= NOISY or not case.causes):
            break
        if case.causes:
            words = [str(script), "--fixed"]
            twin = rate_of(case, words, folder, fixed_batch, cores, lengths.bare_seconds)
            result["fixed"].append(twin)
        if turn:  # as often as the twin: it ran before the first turn
            result["alone"].append(time_script())
    if report.exists():
        found = json.loads(report.read_text())
        result["verdict"] = found["verdict"]
        result["unjudged"] = found["unjudged"]
        result["later"] = [one["name"] for one in found.get("later", ())]
        measured = found["measurements"].items()
        result["measured"] = {name: value for name, value in measured if name not in DROPPED}
        result["findings"] = [
            {"name": one["name"], "gain": one["gain"], "evidence": one["evidence"][:3]}
            for one in found["findings"]
        ]
        source = None if said_causes(result) else advised_source(case.source(), found["findings"])
        if case.causes and case.has_gain and source:
            other = folder / f"{case.name}_advised.py"
            other.write_text(source, encoding="utf-8")
            first = found["findings"][0]
            changes = first["patch"]["loader_arguments"]
            size = changes.get("batch_size", case.batch)
            way = rate_of(case, [str(other)], folder, size, cores, lengths.bare_seconds)
            result["tried"] = {"name": first["name"], "changes": changes, **way}
    return result


def said_causes(result: dict[str, Any]) -> bool:
    """Return whether the doctor's first finding is a planted cause."""
    return any(
        one["name"] in (*result["causes"], *result["also"]) for one in result["findings"][:1]
    )


def advised_source(source: str, findings: Sequence[dict[str, Any]]) -> str | None:
    """Return a script with the numbers that the first finding advises for its DataLoader.

    None if the finding advises something else, or an argument that the script does not have.
    """
    changes = findings[0].get("patch", {}).get("loader_arguments", {}) if findings else {}
    # False and None are the defaults: num_workers=0 goes without what only workers need.
    changes = {
        name: value for name, value in changes.items() if value is not None and value is not False
    }
    for name, value in changes.items():
        source, places = re.subn(rf"\b{name}=\d+", f"{name}={value}", source)
        if not places or type(value) is not int:
            return None
    return source if changes else None


def drift(runs: Sequence[dict[str, Any]]) -> float:
    """Return by how much the fastest of some runs of the same script is faster than the slowest; 0 of none."""
    rates = [one["rate"] for one in runs if one.get("rate")]
    return max(rates) / min(rates) - 1 if rates else 0.0


# -- all of them -------------------------------------------------------------------------------------


def _median(runs: Iterable[dict[str, Any]], what: str) -> float | None:
    """Return the median of one figure of some runs; None if none has it."""
    return statistics.median([one[what] for one in runs if one.get(what)] or [0.0]) or None


def judge(name: str, result: dict[str, Any]) -> dict[str, Any]:
    """Return what came out of one case in a row: whether the top finding is right, gains, overhead."""
    causes, found = result["causes"], result.get("findings", [])
    names = [one["name"] for one in found]
    row: dict[str, Any] = {"case": name, "style": result["style"], "causes": causes, "found": names}
    without = "unjudged" if result.get("unjudged") else "healthy"
    if "failure" in result["doctored"]:
        without = "failed"  # it did not run under the doctor
    row["verdict"] = names[0] if names else without
    row["is_right"] = row["verdict"] in ((*causes, *result["also"]) if causes else ("healthy",))
    row["later"] = result.get("later", [])
    told = [*names, *row["later"]][:2]
    # One of them may go by another name.
    unnamed = [cause for cause in causes if cause not in told]
    row["all_named"] = not unnamed or (
        len(unnamed) < len(causes) and any(name in told for name in result["also"])
    )
    alone = _median(result["alone"], "rate")
    fixed = _median(result.get("fixed", ()), "rate")
    repeated = [runs for runs in (result["alone"], result.get("fixed", ())) if len(runs) > 1]
    row["drift"] = max(map(drift, repeated), default=None)
    queued = [one["queued_share"] for one in result["alone"] if "queued_share" in one]
    row["queued_share"] = max(queued, default=None)
    right = next((one for one in found if one["name"] in (*causes, *result["also"])), None)
    row["measured"] = fixed / alone if alone and fixed else None
    if alone and result.get("tried", {}).get("rate"):
        tried = result["tried"]
        row["tried"] = {"name": tried["name"], "predicted": found[0]["gain"]["likely"],
                        "measured": tried["rate"] / alone}  # fmt: skip
        row["is_right"] |= fixed is not None and tried["rate"] >= max(fixed, LEAST_GAIN * alone)
    row["predicted"] = (
        right["gain"]["likely"] if right and len(causes) == 1 and result["has_gain"] else None
    )
    fast = _median(result["alone"], "median_step_seconds")
    slow = result["doctored"].get("median_step_seconds")
    row["overhead"] = slow / fast - 1 if slow and fast else None
    row["step_ms"] = fast * 1e3 if fast else None
    return row


def summarise(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of the benchmark."""
    slow = [row for row in rows if row["causes"]]
    healthy = [row for row in rows if not row["causes"]]
    one = [row for row in slow if len(row["causes"]) == 1]
    pairs = [
        (row["predicted"], row["measured"]) for row in one if row["predicted"] and row["measured"]
    ]
    errors = [abs(predicted / measured - 1) for predicted, measured in pairs]
    overheads = sorted(row["overhead"] for row in rows if row["overhead"] is not None)
    matrix: dict[str, dict[str, int]] = {}
    for row in (*one, *healthy):
        told = matrix.setdefault(row["causes"][0] if row["causes"] else "healthy", {})
        told[row["verdict"]] = told.get(row["verdict"], 0) + 1
    return {
        "num_scripts": len(rows),
        "top_right": {"right": sum(row["is_right"] for row in slow), "of": len(slow)},
        "both_named": {"right": sum(row["all_named"] for row in slow if len(row["causes"]) > 1),
                       "of": sum(len(row["causes"]) > 1 for row in slow)},
        "false_alarms": {"alarms": sum(bool(row["found"]) for row in healthy), "of": len(healthy)},
        "healthy_unjudged": sum(row["verdict"] == "unjudged" for row in healthy),
        "predictions": {
            "count": len(errors),
            "median_error": statistics.median(errors) if errors else None,
            "within_30_percent": sum(error <= CLOSE for error in errors) / len(errors) if errors else None,
        },
        "overhead": {
            "p50": overheads[len(overheads) // 2] if overheads else None,
            "p95": overheads[int(0.95 * (len(overheads) - 1))] if overheads else None,
        },
        "confusion": matrix,
    }  # fmt: skip


def core_sets(num_jobs: int, each: int) -> list[set[int]]:
    """Return cores for every job: its own, or all of them where there are not enough.

    The two threads of a physical core go to the same job, so that no job takes the units of another.
    """

    def physical(number: int) -> tuple[int, int]:
        with contextlib.suppress(OSError, ValueError):
            path = Path(f"/sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list")
            return int(re.split(r"[-,]", path.read_text())[0]), number
        return number, number

    usable = sorted(os.sched_getaffinity(0), key=physical)
    own = [set(usable[at * each : (at + 1) * each]) for at in range(num_jobs)]
    return own if num_jobs * each <= len(usable) else [set(usable)] * num_jobs


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", default="", help="parts of the names of scripts to run, by commas"
    )
    parser.add_argument("--first", default="", help="names of scripts to begin with, by commas")
    parser.add_argument(
        "--healthy-last", action="store_true", help="run scripts with a cause before all others"
    )
    parser.add_argument("--jobs", type=int, default=1, help="scripts at once")
    parser.add_argument("--cores", type=int, default=2, help="cores of each script")
    parser.add_argument(
        "--gpu", action="store_true", help="let scripts use the GPU, one at a time even with --jobs"
    )
    parser.add_argument(
        "--lengths", choices=LENGTHS, default="full",
        help="how long scripts run: brief where a machine is lent by the minute, quick for one run of each",
    )  # fmt: skip
    parser.add_argument("--again", action="store_true", help="run scripts whose result is kept")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no script after so long")
    parser.add_argument("--state", type=Path, default=Path(tempfile.gettempdir()) / "doctor-bench")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON")
    asked = parser.parse_args()
    if asked.gpu:
        os.environ.setdefault(
            "STOPWATCH_LOCK", str(Path(tempfile.gettempdir()) / "doctor-gpu-lock")
        )
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # Imported packages are the same for a script as for its doctor, which runs in another folder.
    given = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(HERE.parent.parent / "src"), *(str(Path(one).absolute()) for one in given)]
    )
    os.environ["OMP_NUM_THREADS"] = "1"
    FORKS.set_forkserver_preload(["torch", "numpy", "h5py", "stopwatch"])
    asked.state.mkdir(parents=True, exist_ok=True)
    free: queue.Queue[set[int]] = queue.Queue()
    for cores in core_sets(asked.jobs, asked.cores):
        free.put(cores)
    until = time.monotonic() + asked.seconds

    asked.out.mkdir(parents=True, exist_ok=True)
    named = machine_name()
    # Without a GPU the machine's name has its cores already.
    on = named if asked.gpu or named.startswith("cpu-") else f"{asked.cores}-cores-{named}"
    facts, writing = machine_facts(), threading.Lock()

    def publish() -> dict[str, Any]:
        """Write what there is after every script, so that a run that is cut short leaves its results."""
        kept = {case.name: asked.state / f"{case.name}.json" for case in CASES}
        raw = {name: json.loads(path.read_text()) for name, path in kept.items() if path.exists()}
        rows = [judge(name, one) for name, one in raw.items() if "failure" not in one["alone"][0]]
        done = {row["case"] for row in rows}
        summary = summarise(rows)
        summary["not_run"] = [case.name for case in wanted if case.name not in done]
        lengths = LENGTHS[asked.lengths]._asdict()
        result = {
            "gpu": asked.gpu,
            "lengths": lengths,
            "summary": summary,
            "rows": rows,
            "raw": raw,
        }
        document = {"benchmark": "doctor", "machine": facts, "result": result}
        (asked.out / f"doctor-{on}.json").write_text(json.dumps(document, indent=1) + "\n")
        return summary

    def run(case: Case) -> None:
        kept = asked.state / f"{case.name}.json"
        if (kept.exists() and not asked.again) or time.monotonic() > until:
            return
        began = time.monotonic()
        cores, folder = free.get(), asked.state / "work" / case.name
        try:
            result = examine(case, folder, cores, LENGTHS[asked.lengths])
        except subprocess.TimeoutExpired as error:
            print(f"{case.name}: {error}", flush=True)
            return
        finally:
            free.put(cores)
            shutil.rmtree(folder, ignore_errors=True)
        result["seconds"] = round(time.monotonic() - began, 1)
        kept.write_text(json.dumps(result))
        if "failure" in result["alone"][0]:
            print(f"--  {case.name}: {result['alone'][0]['failure'][-300:]}", flush=True)
            return
        row = judge(case.name, result)
        gains = [row["predicted"], row["measured"]] if row["causes"] else []
        mark = "ok " if row["is_right"] else "NO "
        took = f"{result['seconds']:.0f} s"
        print(mark, case.name, row["found"] or row["verdict"], *gains, took, flush=True)
        with writing:
            publish()

    wanted = [
        case
        for case in CASES
        if any(part in case.name for part in asked.only.split(","))
        and not (case.without_gpu if asked.gpu else case.needs_gpu)
    ]
    # Mixed, so that a run that is cut short has some of every kind.
    random.Random(1).shuffle(wanted)
    first = asked.first.split(",")
    late = asked.healthy_last
    wanted.sort(key=lambda case: (case.name not in first, late and not case.causes))
    with ThreadPoolExecutor(asked.jobs) as pool:
        list(pool.map(run, wanted))
    print(json.dumps(publish(), indent=1))


if __name__ == "__main__":
    main()
