"""What the probe costs: steps of 2 and 10 ms, and on a GPU a small GPT whose step is launch-bound, alone and under the
doctor in turns; and whether the step that the doctor reports is the step without it.

    python benchmarks/doctor/overhead.py [--turns 4] [--out FILE]
    python benchmarks/doctor/overhead.py --turns 2 --at-once --seconds 40    # within a minute, on many quiet cores

On a GPU the doctor also runs once without detaching CUPTI, whose callbacks slow the steps after the profiled ones.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
STEPS = 300
HEAD = """
import sys, time, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.set_num_threads(1)
torch.manual_seed(0)
"""
CPU = """
width, depth = {width}, {depth}
model = nn.Sequential(*(part for _ in range(depth) for part in (nn.Linear(width, width), nn.ReLU())))
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
loader = DataLoader(TensorDataset(torch.randn(3200, width), torch.randn(3200, width)), batch_size=32)
step = 0
while step < {steps}:
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % 10 == 0:
            loss.item()
"""
GPT = """
layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True, norm_first=True)
model = nn.Sequential(nn.Embedding(256, 128), nn.TransformerEncoder(layer, 8), nn.Linear(128, 256)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
data = torch.randint(0, 256, (1_000_000,))

def get_batch():
    starts = torch.randint(0, len(data) - 129, (16,))
    x = torch.stack([data[at : at + 128] for at in starts])
    return x.pin_memory().to("cuda", non_blocking=True)

for step in range({steps}):
    x = get_batch()
    loss = nn.functional.cross_entropy(model(x).view(-1, 256), x.view(-1))
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        loss.item()
"""
SCRIPTS = {
    "2 ms": HEAD + CPU.format(width=96, depth=6, steps=STEPS),
    "10 ms": HEAD + CPU.format(width=512, depth=8, steps=STEPS),
    "GPT on a GPU": HEAD + GPT.format(steps=STEPS),
}


WINDOWS = ((20, 36), (40, 100), (100, 200), (200, STEPS))
"""Steps whose medians are told apart: the first are before torch's profiler runs on a GPU, the others after it."""
WARM_UP = 40


def time_steps(
    script: Path, folder: Path, cores: set[int], doctor: bool, **variables: str
) -> dict[str, Any]:
    """Return the median steps by the stopwatch, and the one that the doctor reports."""
    times, report = folder / "times", folder / "doctor.json"
    words = [sys.executable, str(HERE / "stopwatch.py"), str(times), str(script)]
    if doctor:
        words = [sys.executable, "-m", "stoker", "doctor", "--out", str(report), "--", *words]
    env = {**os.environ, "STEPS": str(STEPS), "OMP_NUM_THREADS": "1", **variables}
    if "cuda" not in script.read_text():
        env.pop("STOPWATCH_LOCK", None)  # of the GPU, which it does not use
    times.unlink(missing_ok=True)
    subprocess.run(
        words,
        env=env,
        check=True,
        capture_output=True,
        timeout=120,
        preexec_fn=partial(os.sched_setaffinity, 0, cores),
    )
    seen = json.loads(times.read_text())
    steps, used = (
        [after - before for before, after in itertools.pairwise(seen[what])]
        for what in ("times", "cpu")
    )
    told = json.loads(report.read_text())["measurements"]["step_seconds"] if doctor else None
    return {
        "ms": statistics.median(steps[WARM_UP:]) * 1e3,
        "cpu_ms": statistics.median(used[WARM_UP:]) * 1e3,
        "windows_ms": [statistics.median(steps[first:last]) * 1e3 for first, last in WINDOWS],
        "reported_ms": told["median"] * 1e3 if told else None,
    }


def compare(
    name: str,
    cores: set[int],
    turns: int,
    until: float,
    tell: Callable[[str, dict[str, Any]], None],
) -> None:
    """Run one script in turns, alone and under the doctor, and tell what there is after each.

    No turn but the first begins after `until`.
    """
    alone: list[dict[str, Any]] = []
    doctored: list[dict[str, Any]] = []
    kept: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        script = folder / "script.py"
        script.write_text(SCRIPTS[name])
        for turn in range(turns):
            if turn and time.monotonic() > until:
                break
            alone.append(time_steps(script, folder, cores, doctor=False))
            doctored.append(time_steps(script, folder, cores, doctor=True))
            tell(name, summarise(alone, doctored, kept))
        if "GPU" in name and time.monotonic() < until:
            # What torch's profiler leaves behind, if it is not told to detach itself.
            kept.append(time_steps(script, folder, cores, doctor=True, TEARDOWN_CUPTI="0"))
            tell(name, summarise(alone, doctored, kept))


def summarise(
    alone: list[dict[str, Any]], doctored: list[dict[str, Any]], kept: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return the medians of turns, and what the best ones say: others use the machine as well."""
    bare, slow, told = (
        statistics.median(one[what] for one in runs)
        for runs, what in ((alone, "ms"), (doctored, "ms"), (doctored, "reported_ms"))
    )

    def best(what: str) -> float:
        return min(one[what] for one in doctored) / min(one[what] for one in alone) - 1

    return {
        "alone_ms": bare,
        "doctored_ms": slow,
        "reported_ms": told,
        "overhead": slow / bare - 1,
        "best_overhead": best("ms"),
        "cpu_overhead": best("cpu_ms"),
        "reported_error": told / bare - 1,
        "turns": {"alone": alone, "doctored": doctored, "cupti_kept": kept},
    }


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no turn after so long")
    parser.add_argument(
        "--at-once", action="store_true", help="all scripts at the same time, each on its own cores"
    )
    parser.add_argument("--only", default="", help="parts of the names to run, by commas")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    names = [
        name
        for name in SCRIPTS
        if any(part in name for part in asked.only.split(","))
        and ("GPU" not in name or torch.cuda.is_available())
    ]
    usable = sorted(os.sched_getaffinity(0))
    each = len(usable) // len(names) if asked.at_once and names else len(usable)
    until = time.monotonic() + asked.seconds
    result: dict[str, Any] = {}
    writing = threading.Lock()

    def run(number: int) -> None:
        name = names[number]
        first = number * each if asked.at_once else 0
        last = None if number == len(names) - 1 else first + each
        compare(name, set(usable[first:last]), asked.turns, until, tell)

    def tell(name: str, found: dict[str, Any]) -> None:
        with writing:
            result[name] = found
            print(name, {key: value for key, value in found.items() if key != "turns"}, flush=True)
            if asked.out is not None:
                asked.out.write_text(json.dumps(result, indent=1) + "\n")

    with ThreadPoolExecutor(len(names) if asked.at_once else 1) as pool:
        list(pool.map(run, range(len(names))))


if __name__ == "__main__":
    main()
