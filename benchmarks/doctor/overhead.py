"""What the probe costs: steps of 2 and 10 ms, and on a GPU a small GPT whose step is launch-bound, alone and under the
doctor in turns; and whether the step that the doctor reports is the step without it.

    python benchmarks/doctor/overhead.py [--seconds 120] [--out FOLDER]     # doctor_overhead-<machine>.json there
    python benchmarks/doctor/overhead.py --at-once      # scripts side by side, each on cores of its own

First the size of the work is sought at which the bare step has its length on this machine. Then script and doctored
script live at the same time on the same cores, and one of them is stopped by a signal, with all its threads: a turn is
16 steps (of 2 ms: 64) of one, then of the other. So a machine whose speed drifts, as rented ones do within a second,
slows both. Four turns of each, in the order ABBABAAB, are a round: in each round calls are timed in the same share of
the steps. After some seconds both start anew: where the memory of a process lies may make it faster or slower for all
its life.

The cost is the median over rounds, by their whole time; its 95 % interval is that of a bootstrap over processes and
over their rounds. Rounds go on until the interval is as narrow as `Script.half_width`, or for `--seconds`; `sound`
says that it is, and that the bare step had the length that was asked for. Beside it stand the mean, the best round, the
rounds that came first after a start, while the doctor samples more often, and the CPU time of all threads, which other
programs change less. Starting is not counted. The doctor writes its file once a second, whether its turn has come or
not: the cost has twice a user's share of that.

With `--cupti` the doctor also runs once without detaching CUPTI, whose callbacks slow the steps after profiled ones.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import random
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from harness import RESULTS, machine_facts, machine_name  # noqa: E402

LONGEST_SECONDS = 60.0
"""A process that takes longer to start, or for a turn, has failed."""
ROUND = (0, 1, 1, 0)
"""Which of both comes first in the turns of a round."""
FEWEST_SESSIONS, SESSION_SECONDS, FIRST_ROUNDS = 6, 8.0, 2
"""How often both processes are started at least, how long their turns last, and how many rounds are the first ones."""
OFF_TARGET = 0.15
"""A bare step may be so much longer or shorter than asked for."""
MOST_SIZINGS = 5
"""How often the size of the work is sought at most: again where the first session's step is off its target."""
NUM_RESAMPLED = 2000


class Script(NamedTuple):
    """A script whose steps are to last some time.

    Attributes:
        text: With places for `depth`, `length` and `steps`.
        target_ms: Length of the bare step; None if it is taken as it is.
        limit: Share of the step that the probe may cost; None if nothing was promised.
        half_width: Half the width of the interval up to which the cost is called sound.
        turn_steps: Steps of a turn: a window of the probe, in which all calls are timed or none.
    """

    text: str
    target_ms: float | None
    limit: float | None
    half_width: float
    turn_steps: int


class Size(NamedTuple):
    """What makes a step longer: layers of the model, and positions in a sample."""

    depth: int = 6
    length: int = 1


HEAD = """
import sys, time, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.set_num_threads(1)
torch.manual_seed(0)
"""
MODEL = """
length, width, depth = {length}, 128, {depth}
model = nn.Sequential(*(part for _ in range(depth) for part in (nn.Linear(width, width), nn.ReLU())))
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
data = torch.randn(2, 640, length, width)

def train(x, y, step):
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        loss.item()
"""
LOADER = """
loader = DataLoader(TensorDataset(*data), batch_size=32, shuffle=True)
step = 0
while step < {steps}:
    for x, y in loader:
        step += 1
        train(x, y, step)
        if step == {steps}:
            break
"""
GET_BATCH = """
def get_batch():
    rows = torch.randint(0, len(data[0]), (32,))
    x = torch.stack([data[0, row] for row in rows])
    y = torch.stack([data[1, row] for row in rows])
    return x, y

for step in range(1, 1 + {steps}):
    x, y = get_batch()
    train(x, y, step)
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
    "2 ms": Script(HEAD + MODEL + LOADER, 2.0, 0.08, 0.025, 64),
    "10 ms": Script(HEAD + MODEL + LOADER, 10.0, 0.03, 0.015, 16),
    "2 ms, get_batch": Script(HEAD + MODEL + GET_BATCH, 2.0, 0.08, 0.025, 64),
    "10 ms, get_batch": Script(HEAD + MODEL + GET_BATCH, 10.0, 0.03, 0.015, 16),
    "GPT on a GPU": Script(HEAD + GPT, None, None, 0.02, 16),
}


def source(script: Script, size: Size, steps: int) -> str:
    """Return the script's text for a size and a number of steps."""
    return script.text.format(depth=size.depth, length=size.length, steps=steps)


# -- the size of the work ----------------------------------------------------------------------------


def seek_size(target_ms: float, step_ms: Callable[[Size], float]) -> tuple[Size, float]:
    """Return the size at which a step takes so long, and the milliseconds that it took there.

    The fewer layers, the fewer calls: a slow machine takes fewer, so that half of the step at least is work that grows
    with the length.
    """
    for depth in (6, 4, 3, 2, 1):
        size = Size(depth)
        least = found = step_ms(size)
        if least < target_ms / 2:
            break
    for _ in range(8):
        if least > target_ms or abs(found / target_ms - 1) < OFF_TARGET / 5:
            break
        # The time grows with the length from that of the shortest.
        per_position = (found - least) / (size.length - 1) if size.length > 1 else found / 8
        length = max(1, round(1 + (target_ms - least) / max(per_position, 1e-3)))
        if length == size.length:
            break
        size = Size(size.depth, length)
        found = step_ms(size)
    return size, found


def find_size(script: Script, core: int | None) -> tuple[Size, float]:
    """Seek the size of a script's step in this process, by its time on a core: other programs change that less."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    target = script.target_ms
    assert target is not None
    if core is not None:
        os.sched_setaffinity(0, {core})
    times: list[float] = []
    register_optimizer_step_post_hook(lambda *_: times.append(time.thread_time()))

    def step_ms(size: Size) -> float:
        times.clear()
        steps = max(30, round(400 / target))
        exec(compile(source(script, size, steps), "script", "exec"), {"__name__": "__main__"})
        taken = [after - before for before, after in itertools.pairwise(times[steps // 3 :])]
        return statistics.mean(taken) * 1e3

    step_ms(Size())  # the first steps of a process are slow
    return seek_size(target, step_ms)


def calibrate(script: Script, core: int | None) -> tuple[Size, float | None]:
    """Find the size in a process of its own: the probe must see torch being imported, and hooks stay."""
    if script.target_ms is None:
        return Size(), None
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawned) as pool:
        return pool.submit(find_size, script, core).result()


# -- turns -------------------------------------------------------------------------------------------


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
        folder.mkdir(parents=True)
        self.folder = folder
        self._pipes = {}
        for name in ("done", "go"):
            os.mkfifo(folder / name)
            self._pipes[name] = os.open(folder / name, os.O_RDWR)
        turns = {"STOPWATCH_TURNS": str(folder), "STOPWATCH_STEPS": str(steps)}
        turns["STOPWATCH_FIRST"] = str(steps * len(ROUND))
        if len(cores) > 1:  # the script's own thread stays on one; the doctor's may take any
            turns["STOPWATCH_CORE"] = str(min(cores))
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

    def stop(self) -> None:
        """Stop all its threads: those of the doctor would go on beside the other script."""
        os.killpg(self.process.pid, signal.SIGSTOP)

    def turn(self) -> None:
        """Make it take one turn."""
        os.killpg(self.process.pid, signal.SIGCONT)
        os.write(self._pipes["go"], b"g")
        self.wait()
        self.stop()

    def rounds(self) -> list[dict[str, float]]:
        """Return milliseconds of a step, by the wall and on cores, of each round but the first, which fills caches."""
        turns = [json.loads(line) for line in (self.folder / "turns").read_text().splitlines()]
        each = len(ROUND)
        return [mean_step(turns[at : at + each]) for at in range(each, len(turns), each)]

    def end(self) -> None:
        """Let it end, so that the doctor writes its report."""
        os.killpg(self.process.pid, signal.SIGCONT)
        os.write(self._pipes["go"], b"e")
        self.process.wait(LONGEST_SECONDS)

    def close(self) -> None:
        """End what is left of it."""
        kill(self.process)
        self.process.wait()
        for pipe in self._pipes.values():
            os.close(pipe)


def mean_step(turns: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return milliseconds of a step of some turns: the mean of all, which has what the doctor does now and then."""
    steps = [seconds for turn in turns for seconds in turn["steps"]]
    cpu = sum(turn["cpu"] for turn in turns)
    return {
        "ms": round(sum(steps) / len(steps) * 1e3, 4),
        "cpu_ms": round(cpu / len(steps) * 1e3, 4),
    }


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


Rounds = list[dict[str, float]]


def run_session(
    path: Path, folder: Path, script: Script, cores: set[int]
) -> tuple[Rounds, Rounds, float | None]:
    """Start a script alone and under the doctor, let them take turns; return those, and the step that is reported."""
    runners = []
    try:
        for way in ("alone", "doctored"):
            own = (path, folder / way, cores, script.turn_steps)
            runners.append(Runner(*own, doctor=way == "doctored"))
        for one in runners:
            one.wait()
        for one in runners:
            one.stop()
        until = time.monotonic() + SESSION_SECONDS
        for count in itertools.count():  # the first does not count
            if count > FIRST_ROUNDS and time.monotonic() > until:
                break
            for first in ROUND:
                for one in (runners[first], runners[1 - first]):
                    one.turn()
        runners[1].end()
        alone, doctored = (one.rounds() for one in runners)
        return alone, doctored, reported_ms(folder / "doctored")
    finally:
        for one in runners:
            one.close()


def compare(
    name: str,
    cores: set[int],
    seconds: float,
    cupti: bool,
    tell: Callable[[str, dict[str, Any]], None],
) -> None:
    """Measure one script for at most about so many seconds; tell the result after each session."""
    began = time.monotonic()
    script = SCRIPTS[name]
    alone: Rounds = []
    doctored: Rounds = []
    told: list[float] = []
    kept: list[dict[str, float]] = []
    facts: dict[str, Any] = {"num_sizings": 0}
    with tempfile.TemporaryDirectory() as made:
        path = Path(made) / "script.py"
        for number in itertools.count():
            if not alone:
                size, calibrated = calibrate(script, min(cores))
                facts |= {**size._asdict(), "calibrated_ms": calibrated}
                facts["num_sizings"] += 1
                path.write_text(source(script, size, 1 << 40))
            *both, reported = run_session(path, Path(made) / str(number), script, cores)
            for all_rounds, rounds in zip((alone, doctored), both, strict=True):
                all_rounds += [{"session": number, **one} for one in rounds]
            told += [reported] if reported is not None else []
            found = summarise(alone, doctored, told, kept, script)
            each = (time.monotonic() - began) / (number + 1)
            ended = time.monotonic() + each > began + seconds
            is_first = found["sessions"] == 1 and not ended
            if is_first and not found["on_target"] and facts["num_sizings"] < MOST_SIZINGS:
                # Other programs may have slowed the machine while the size was sought.
                alone, doctored, told = [], [], []
                continue
            if found["sessions"] >= FEWEST_SESSIONS:
                ended = ended or found["sound"]
            tell(name, {**facts, **found, "is_final": ended})
            if ended:
                break
        if cupti and "GPU" in name:
            # What torch's profiler leaves behind, if it is not told to detach itself.
            steps, again = 300, Path(made) / "kept"
            again.mkdir()
            path.write_text(source(script, size, steps))
            words, env = command(path, again, doctor=True, STEPS=str(steps), TEARDOWN_CUPTI="0")
            subprocess.run(words, env=env, check=True, capture_output=True, timeout=120)
            times = json.loads((again / "times").read_text())["times"][40:]
            taken = [late - early for early, late in itertools.pairwise(times)]
            kept.append({"ms": statistics.median(taken) * 1e3})
            found = summarise(alone, doctored, told, kept, script)
            tell(name, {**facts, **found, "is_final": True})


# -- what they say -----------------------------------------------------------------------------------


def interval_of_median(sessions: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return the 95 % interval of the median of all values: some sessions are drawn again, and of each its values."""
    draw = random.Random(0)
    medians = sorted(
        statistics.median(
            value
            for session in draw.choices(sessions, k=len(sessions))
            for value in draw.choices(session, k=len(session))
        )
        for _ in range(NUM_RESAMPLED)
    )
    return medians[int(0.025 * NUM_RESAMPLED)], medians[int(0.975 * NUM_RESAMPLED)]


def summarise(
    alone: Sequence[dict[str, float]],
    doctored: Sequence[dict[str, float]],
    told: Sequence[float],
    kept: Sequence[dict[str, float]],
    script: Script,
) -> dict[str, Any]:
    """Return the median of the rounds with its interval, and what else they say.

    Args:
        alone: Rounds of the bare script, with the number of their session.
        doctored: Those under the doctor, in the same order.
        told: The steps that the doctor reported, in ms.
        kept: The step with CUPTI attached.
        script: What was asked for.
    """
    sessions: dict[float, list[tuple[float, float]]] = {}
    for before, after in zip(alone, doctored, strict=True):
        pair = (after["ms"] / before["ms"] - 1, after["cpu_ms"] / before["cpu_ms"] - 1)
        sessions.setdefault(before["session"], []).append(pair)
    pairs = [pair for session in sessions.values() for pair in session]
    first = [pair[0] for session in sessions.values() for pair in session[:FIRST_ROUNDS]]
    intervals = [
        interval_of_median([[pair[at] for pair in session] for session in sessions.values()])
        for at in range(2)
    ]
    low, high = intervals[0]
    bare, slow = (statistics.median(one["ms"] for one in runs) for runs in (alone, doctored))
    whole, slow_whole = (sum(one["ms"] for one in runs) for runs in (alone, doctored))
    target = script.target_ms
    on_target = target is None or abs(bare / target - 1) <= OFF_TARGET
    reported = statistics.median(told) if told else None
    return {
        "target_ms": target,
        "alone_ms": bare,
        "doctored_ms": slow,
        "reported_ms": reported,
        "limit": script.limit,
        "overhead": statistics.median(pair[0] for pair in pairs),
        "interval": [low, high],
        "on_target": on_target,
        "sound": len(sessions) >= FEWEST_SESSIONS
        and high - low <= 2 * script.half_width
        and on_target,
        "mean_overhead": slow_whole / whole - 1,
        "first_overhead": statistics.median(first),
        "best_overhead": min(one["ms"] for one in doctored) / min(one["ms"] for one in alone) - 1,
        "cpu_overhead": statistics.median(pair[1] for pair in pairs),
        "cpu_interval": list(intervals[1]),
        "reported_error": None if reported is None else reported / bare - 1,
        "sessions": len(sessions),
        "rounds": len(pairs),
        "turns": {"alone": list(alone), "doctored": list(doctored), "cupti_kept": list(kept)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seconds", type=float, default=120.0, help="at most, about, for each script"
    )
    parser.add_argument(
        "--at-once", action="store_true", help="all scripts at the same time, each on its own cores"
    )
    parser.add_argument("--cupti", action="store_true", help="on a GPU: once without detaching it")
    parser.add_argument(
        "--only", default="", help="names to run, by semicolons; the others of the file are kept"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, leave)
    facts = machine_facts()
    names = [name for name in SCRIPTS if "GPU" not in name or facts["probe"]["gpus"]]
    if asked.only:
        names = [name for name in names if name in asked.only.split(";")]
    usable = sorted(os.sched_getaffinity(0))
    each = len(usable) // len(names) if asked.at_once and names else len(usable)
    asked.out.mkdir(parents=True, exist_ok=True)
    path = asked.out / f"doctor_overhead-{machine_name()}.json"
    result: dict[str, Any] = {}
    if asked.only and path.exists():
        result = json.loads(path.read_text())["result"]
    writing = threading.Lock()

    def run(number: int) -> None:
        name = names[number]
        first = number * each if asked.at_once else 0
        last = None if number == len(names) - 1 else first + each
        compare(name, set(usable[first:last]), asked.seconds, asked.cupti, tell)

    def tell(name: str, found: dict[str, Any]) -> None:
        with writing:
            result[name] = found
            said = {key: value for key, value in found.items() if key != "turns"}
            print(name, said if found["is_final"] else _short(found), flush=True)
            document = {"benchmark": "doctor_overhead", "machine": facts, "result": result}
            path.write_text(json.dumps(document, indent=1) + "\n")

    with ThreadPoolExecutor(max(1, len(names)) if asked.at_once else 1) as pool:
        list(pool.map(run, range(len(names))))


def _short(found: dict[str, Any]) -> str:
    low, high = found["interval"]
    return (
        f"session {found['sessions']}: {found['alone_ms']:.2f} ms, {found['overhead']:.1%} "
        f"({low:.1%} to {high:.1%}), on cores {found['cpu_overhead']:.1%}"
    )


if __name__ == "__main__":
    main()
