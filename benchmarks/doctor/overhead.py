"""What the probe costs: steps of 2 and 10 ms, and on a GPU a small GPT whose step is launch-bound, alone and under the
doctor in turns; and whether the step that the doctor reports is the step without it.

    python benchmarks/doctor/overhead.py [--seconds 60] [--out FILE]
    python benchmarks/doctor/overhead.py --at-once --seconds 80    # scripts side by side, each on cores of its own

Both processes live at the same time on the same cores, and one of them stands still: a turn is 64 steps (of 2 ms:
512) of one, then of the other, in the order ABBA. So a machine whose speed drifts slows both. The cost is the median
over pairs of turns, with its 95 % interval (that of the median, by ranks); `sound` says that the interval is no wider
than 4 points. Beside it stand the best turns, and the CPU time of all threads, which other programs change less.

With `--cupti` the doctor also runs once without detaching CUPTI, whose callbacks slow the steps after profiled ones.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
STEPS = 300
TURN_STEPS, LONG_TURN_STEPS = 64, 512
"""Steps of a turn, and of one of short steps: four or eight of the probe's windows; half or a quarter is timed."""
LONGEST_SECONDS = 60.0
"""A process that takes longer to start, or for a turn, has failed."""
WIDEST = 0.04
"""Width of the interval up to which a result is called sound."""
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


started: list[subprocess.Popen[bytes]] = []


def kill(process: subprocess.Popen[bytes]) -> None:
    """End a process and what it runs."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def leave(*_: Any) -> None:
    """End all processes, which would stand still for ever, when this one is asked to end."""
    for one in started:
        kill(one)
    os._exit(143)


class Runner:
    """One process that makes its steps in turns.

    Attributes:
        folder: With its pipes and what it writes.
        process: Python with the stopwatch and the script, or the doctor that runs it.
    """

    def __init__(
        self, script: Path, folder: Path, cores: set[int], steps: int, doctor: bool
    ) -> None:
        folder.mkdir()
        self.folder = folder
        self._pipes = {}
        for name in ("done", "go"):
            os.mkfifo(folder / name)
            self._pipes[name] = os.open(folder / name, os.O_RDWR)
        turns = {"STOPWATCH_TURNS": str(folder), "STOPWATCH_STEPS": str(steps)}
        words, env = command(script, folder, doctor, STEPS=str(1 << 40), **turns)
        self.process = subprocess.Popen(
            words,
            env=env,
            stdout=subprocess.DEVNULL,
            stderr=(folder / "said").open("w"),
            start_new_session=True,  # so that the doctor and what it runs can be ended together
            preexec_fn=partial(os.sched_setaffinity, 0, cores),  # noqa: PLW1509  it takes no lock
        )
        started.append(self.process)

    def wait(self) -> None:
        """Wait until it stands still."""
        ready, _, _ = select.select([self._pipes["done"]], [], [], LONGEST_SECONDS)
        if not ready:
            said = (self.folder / "said").read_text()[-600:]
            raise RuntimeError(f"no turn ended within {LONGEST_SECONDS:.0f} s: {said}")
        os.read(self._pipes["done"], 1)

    def turn(self) -> None:
        """Make it take one turn."""
        os.write(self._pipes["go"], b"g")
        self.wait()

    def turns(self) -> list[dict[str, float]]:
        """Return milliseconds of a step, by the wall and on cores, of each turn but the first, which fills caches."""
        lines = (self.folder / "turns").read_text().splitlines()
        return [mean_step(json.loads(line)) for line in lines[1:]]

    def end(self) -> None:
        """Let it end, so that the doctor writes its report."""
        os.write(self._pipes["go"], b"e")
        self.process.wait(LONGEST_SECONDS)

    def close(self) -> None:
        """End what is left of it."""
        kill(self.process)
        self.process.wait()
        for pipe in self._pipes.values():
            os.close(pipe)


def mean_step(turn: dict[str, Any]) -> dict[str, float]:
    """Return milliseconds of a step of a turn: the mean without the slowest twentieth, and its CPU time."""
    steps = sorted(turn["steps"])
    kept = steps[: math.ceil(0.95 * len(steps))]
    return {"ms": statistics.mean(kept) * 1e3, "cpu_ms": turn["cpu"] / len(steps) * 1e3}


def command(
    script: Path, folder: Path, doctor: bool, **variables: str
) -> tuple[list[str], dict[str, str]]:
    """Return the words and the environment that run a script with the stopwatch, alone or under the doctor."""
    words = [sys.executable, str(HERE / "stopwatch.py"), str(folder / "times"), str(script)]
    if doctor:
        report = ["--out", str(folder / "doctor.json")]
        words = [sys.executable, "-m", "stoker", "doctor", *report, "--", *words]
    env = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    env.pop("STOPWATCH_LOCK", None)
    return words, env


def reported_ms(folder: Path) -> float | None:
    """Return the median step that the doctor reports; None if it wrote no report."""
    try:
        told = json.loads((folder / "doctor.json").read_text())["measurements"]["step_seconds"]
    except (OSError, ValueError, KeyError):
        return None
    return float(told["median"]) * 1e3 if told else None


def compare(
    name: str,
    cores: set[int],
    seconds: float,
    cupti: bool,
    tell: Callable[[str, dict[str, Any]], None],
) -> None:
    """Run one script in turns, alone and under the doctor, for about so many seconds; tell the result after each."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        script = folder / "script.py"
        script.write_text(
            SCRIPTS[name]
            .replace(f"< {STEPS}", "< 1 << 40")
            .replace(f"range({STEPS})", "range(1 << 40)")
        )
        steps = LONG_TURN_STEPS if name.startswith("2 ms") else TURN_STEPS
        runners = [
            Runner(script, folder / way, cores, steps, doctor=way == "doctored")
            for way in ("alone", "doctored")
        ]
        try:
            for one in runners:
                one.wait()
            for one in runners:  # a turn that does not count
                one.turn()
            until = time.monotonic() + seconds
            count = 0
            while count < 2 or time.monotonic() < until:
                for one in runners if count % 2 == 0 else runners[::-1]:
                    one.turn()
                count += 1
                alone, doctored = (one.turns() for one in runners)
                tell(name, summarise(alone, doctored, None, ()))
            runners[1].end()
            told = reported_ms(folder / "doctored")
            tell(name, summarise(alone, doctored, told, ()))
        finally:
            for one in runners:
                one.close()
        kept: list[dict[str, float]] = []
        if cupti and "GPU" in name:
            # What torch's profiler leaves behind, if it is not told to detach itself.
            again = folder / "kept"
            again.mkdir()
            plain = folder / "plain.py"
            plain.write_text(SCRIPTS[name])
            words, env = command(plain, again, doctor=True, STEPS=str(STEPS), TEARDOWN_CUPTI="0")
            subprocess.run(words, env=env, check=True, capture_output=True, timeout=120)
            times = json.loads((again / "times").read_text())["times"][40:]
            taken = [late - early for early, late in itertools.pairwise(times)]
            kept.append({"ms": statistics.median(taken) * 1e3})
            tell(name, summarise(alone, doctored, told, kept))


def interval_of_median(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the median of what the values are drawn from, by ranks; wide for fewer than six."""
    ordered, num = sorted(values), len(values)
    below = 0.0
    for rank in range(num // 2 + 1):
        below += math.comb(num, rank) / 2**num
        if below > 0.025:
            return ordered[max(0, rank - 1)], ordered[min(num - 1, num - rank)]
    return ordered[0], ordered[-1]


def summarise(
    alone: Sequence[dict[str, float]],
    doctored: Sequence[dict[str, float]],
    told: float | None,
    kept: Sequence[dict[str, float]],
) -> dict[str, Any]:
    """Return the median of the pairs of turns with its interval, and what the best turns and the CPU time say."""
    pairs = [after["ms"] / before["ms"] - 1 for before, after in zip(alone, doctored, strict=False)]
    used = [after["cpu_ms"] / before["cpu_ms"] - 1 for before, after in zip(alone, doctored, strict=False)]  # fmt: skip
    low, high = interval_of_median(pairs)
    bare, slow = (statistics.median(one["ms"] for one in runs) for runs in (alone, doctored))
    best = min(one["ms"] for one in doctored) / min(one["ms"] for one in alone) - 1
    return {
        "alone_ms": bare,
        "doctored_ms": slow,
        "reported_ms": told,
        "overhead": statistics.median(pairs),
        "interval": [low, high],
        "sound": high - low <= WIDEST,
        "best_overhead": best,
        "cpu_overhead": statistics.median(used),
        "reported_error": None if told is None else told / bare - 1,
        "turns": {"alone": list(alone), "doctored": list(doctored), "cupti_kept": list(kept)},
    }


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="of turns, for each script")
    parser.add_argument(
        "--at-once", action="store_true", help="all scripts at the same time, each on its own cores"
    )
    parser.add_argument("--cupti", action="store_true", help="on a GPU: once without detaching it")
    parser.add_argument("--only", default="", help="parts of the names to run, by commas")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, leave)
    names = [
        name
        for name in SCRIPTS
        if any(part in name for part in asked.only.split(","))
        and ("GPU" not in name or torch.cuda.is_available())
    ]
    usable = sorted(os.sched_getaffinity(0))
    each = len(usable) // len(names) if asked.at_once and names else len(usable)
    result: dict[str, Any] = {}
    writing = threading.Lock()

    def run(number: int) -> None:
        name = names[number]
        first = number * each if asked.at_once else 0
        last = None if number == len(names) - 1 else first + each
        compare(name, set(usable[first:last]), asked.seconds, asked.cupti, tell)

    def tell(name: str, found: dict[str, Any]) -> None:
        with writing:
            result[name] = found
            if found["reported_ms"] is not None:  # the last word on it
                told = {key: value for key, value in found.items() if key != "turns"}
                print(name, told, flush=True)
            if asked.out is not None:
                asked.out.write_text(json.dumps(result, indent=1) + "\n")

    with ThreadPoolExecutor(max(1, len(names)) if asked.at_once else 1) as pool:
        list(pool.map(run, range(len(names))))


if __name__ == "__main__":
    main()
