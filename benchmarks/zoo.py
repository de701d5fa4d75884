"""The training step of models that nobody here wrote: a plain loop, torch.compile, a hand-made graph, stoker.

    python benchmarks/zoo.py [--only resnet18,gcn] [--no-compile]

Four ways train the same model on the same eight batches, which are on the device before anything is timed, in
turns. `plain` is the eager loop that people write. `compiled` adds torch.compile(mode="reduce-overhead") to the
model, if it compiles in time: in a process of its own, which then waits and is timed when no other works; ten at
once, because each holds memory of the GPU. `graph` is
the whole step as one CUDA graph, made by hand with torch alone: the limit. `stoker` is `Trainer`, or `stoker.capture`
for a step with several optimizers, with what it decided in `step`.

Published after each model; rows of models that are not named are kept, and each row says at which commit it was made.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import repeat

import torch

import stoker
from harness import RESULTS, current_commit, machine_name, publish, side_by_side
from stoker.report import Topic
from stoker.train.trainer import Trainer
from zoo_models import BUILDERS, Entry, Loop

HELD = 8
TURNS, MORE_TURNS = 3, 8
ALIKE = 0.2
"""Ways that differ by less than this share have more turns: an eager loop of small kernels varies by 10 %."""
SECONDS_A_TURN = 0.2
COMPILE_SECONDS = 90
COMPILE_SECONDS_IN_ALL = 400
COMPILED_AT_ONCE = 10


def autocast(entry: Entry):
    if entry.precision == "fp32":
        return contextlib.nullcontext()
    return torch.autocast("cuda", torch.bfloat16)


def train_step(entry: Entry, model, optimizer, inputs, targets) -> torch.Tensor:
    """One step as people write it."""
    with autocast(entry):
        outputs = model(inputs)
    loss = entry.criterion(outputs.float(), targets)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def copied(entry: Entry, device) -> torch.nn.Module:
    return copy.deepcopy(entry.model).to(device).train()


def compile_module(model):
    return torch.compile(model, mode="reduce-overhead")


def loop_way(entry: Loop, batches, device, way: str):
    """A step of several optimizers: as it is, compiled, as a graph made by hand, or by `stoker.capture`."""
    torch.manual_seed(0)
    options = {"fused": True, "capturable": True} if way == "graph" else {}
    through = compile_module if way == "compiled" else lambda model: model
    modules, optimizers, step = entry.build(device, through, **options)
    if way == "stoker":
        captured = stoker.capture(step, model=modules, optimizer=optimizers)
        return (
            lambda steps: run_steps(captured, batches, steps)
        ), lambda: f"step {captured.reason}"
    if way != "graph":
        marks = way == "compiled"
        return lambda steps: run_steps(step, batches, steps, marks)
    static = [tensor.clone() for tensor in flat(batches[0])]
    graph, loss = record(partial(step, (tuple(static), None)))

    def run(steps: int) -> None:
        assert optimizers  # kept, as are the modules: the graph uses their tensors
        replay(graph, loss, static, batches, steps)

    return run


def run_steps(step, batches, steps: int, marks: bool = False) -> None:
    for number in range(steps):
        if marks:
            torch.compiler.cudagraph_mark_step_begin()
        step(batches[number % HELD])


def plain_way(entry: Entry, batches, device, compiled: bool = False):
    own = copied(entry, device)
    model = compile_module(own) if compiled else own
    optimizer = torch.optim.AdamW(own.parameters(), lr=1e-4)

    def step(batch):
        return train_step(entry, model, optimizer, *batch)

    return lambda steps: run_steps(step, batches, steps, compiled)


def record(step):
    """Record a step as one graph, by torch alone; return the graph and its loss."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    return graph, loss


def replay(graph, loss, static, batches, steps: int) -> None:
    losses = []
    for number in range(steps):
        for target, source in zip(static, flat(batches[number % HELD]), strict=True):
            target.copy_(source)
        graph.replay()
        losses.append(loss.clone())


def graph_way(entry: Entry, batches, device):
    """The whole step as one graph, by torch alone; the batch is copied to where the graph reads it."""
    model = copied(entry, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=True)
    static = [tensor.clone() for tensor in flat(batches[0])]
    is_pair = isinstance(batches[0][0], tuple)
    inputs = tuple(static[:-1]) if is_pair else static[0]
    graph, loss = record(partial(train_step, entry, model, optimizer, inputs, static[-1]))

    def run(steps: int) -> None:
        assert model is not None  # kept, as is the optimizer: the graph uses their tensors
        assert optimizer is not None
        replay(graph, loss, static, batches, steps)

    return run


def flat(batch) -> list[torch.Tensor]:
    inputs, targets = batch
    inputs = list(inputs) if isinstance(inputs, tuple) else [inputs]
    return inputs if targets is None else [*inputs, targets]


class Held:
    """A loader of batches that are on the device: as many as an epoch is to have."""

    def __init__(self, batches) -> None:
        self._batches = batches
        self.steps = HELD

    def __iter__(self):
        return (self._batches[number % HELD] for number in range(self.steps))

    def __len__(self) -> int:
        return self.steps


def stoker_way(entry: Entry, batches, device):
    model = copied(entry, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    held = Held(batches)
    trainer = Trainer(
        model,
        held,
        None,
        entry.criterion,
        optimizer,
        None,
        {"epochs": 1, "precision": entry.precision, "clip_norm": 1.0},
        device,
    )

    def run(steps: int) -> None:
        held.steps = steps
        trainer.train_epoch()

    def how() -> str:
        notes = [note for note in trainer.history.told if note.topic is Topic.STEP]
        return notes[-1].text if notes else "unknown"

    return run, how


def one_turn(run, steps: int) -> float:
    """Return the seconds of one step."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    run(steps)
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / steps


def make_ways(entry: Entry | Loop, batches, device) -> dict:
    """What makes each way to train."""
    if isinstance(entry, Loop):
        names = ("plain", "graph", "stoker")
        return {way: partial(loop_way, entry, batches, device, way) for way in names}
    return {
        "plain": partial(plain_way, entry, batches, device),
        "graph": partial(graph_way, entry, batches, device),
        "stoker": partial(stoker_way, entry, batches, device),
    }


def measure(name: str, device) -> dict:
    """Rates of one model in every way but the compiled one; a way that fails has its error instead."""
    torch.manual_seed(0)
    entry = BUILDERS[name]()
    batches = [entry.make(device) for _ in range(HELD)]
    found: dict = {"batch": entry.batch, "precision": entry.precision}
    if isinstance(entry, Entry):
        found["parameters"] = sum(one.numel() for one in entry.model.parameters())
    how = None
    ways: dict = {}
    makers = make_ways(entry, batches, device)
    for way, make in makers.items():
        try:
            made = make()
            run, how_now = made if isinstance(made, tuple) else (made, None)
            # Warm-up, capture, the checks of the first replays and of the one after 64; where the turns would
            # reach the next one, after 512, that too.
            run(80 if way == "stoker" else 16)
            if way == "stoker" and one_turn(run, 16) < 2e-3:
                run(560)
            torch.cuda.synchronize()
            ways[way] = run
            how = how_now or how
        except Exception as error:  # noqa: BLE001 - a model that one way cannot train is a result
            found[f"{way}_error"] = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
            torch.cuda.synchronize()
    turns = [
        partial(one_turn, run, max(8, int(SECONDS_A_TURN / one_turn(run, 16))))
        for run in ways.values()
    ]
    timed = side_by_side(turns, TURNS)
    if {"plain", "stoker"} <= ways.keys():
        plain, ours = (
            statistics.median(turn[[*ways].index(way)] for turn in timed)
            for way in ("plain", "stoker")
        )
        timed += side_by_side(turns, MORE_TURNS) if abs(plain / ours - 1) < ALIKE else []
    for number, way in enumerate(ways):
        median = statistics.median(turn[number] for turn in timed)
        found[f"{way}_per_second"] = entry.batch / median
    if how is not None:
        found["step"] = how()
    return found


class Compiled:
    """A model that is compiled in a process of its own, which waits until it is to be timed.

    Args:
        name: Of the model.
        until: When all compiling ends.
    """

    def __init__(self, name: str, until: float) -> None:
        self.error: str | None = None
        seconds = min(COMPILE_SECONDS, until - time.monotonic())
        if seconds < 10:
            self.error = f"{COMPILE_SECONDS_IN_ALL} s of compiling were over"
            return
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as the process
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--compile-one", name],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
            env={**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()
        if self._hear(seconds) != "ready":
            self.error = f"it did not compile within {seconds:.0f} s"
            if self._process.poll() is not None:
                self._errors.seek(0)
                self.error = (self._errors.read().strip().splitlines() or ["it failed"])[-1][:200]
            self._process.kill()

    def _listen(self) -> None:
        for line in self._process.stdout:
            self._lines.put(line.strip())
        self._lines.put("")

    def _hear(self, seconds: float) -> str:
        try:
            return self._lines.get(timeout=seconds)
        except queue.Empty:
            return ""

    def time(self) -> float | None:
        """Return the seconds of a step; None if it failed."""
        if self.error is not None:
            return None
        print("go", file=self._process.stdin, flush=True)
        answer = self._hear(30)
        self._process.kill()
        if not answer:
            self.error = "it failed while it was timed"
            return None
        return float(answer)


def compile_one(name: str, device) -> None:
    """In a process of its own: compile, say so, wait, and print the seconds of a step."""
    entry = BUILDERS[name]()
    batches = [entry.make(device) for _ in range(HELD)]
    if isinstance(entry, Loop):
        run = loop_way(entry, batches, device, "compiled")
    else:
        run = plain_way(entry, batches, device, compiled=True)
    run(6)
    torch.cuda.synchronize()
    print("ready", flush=True)
    sys.stdin.readline()
    steps = max(8, int(SECONDS_A_TURN / one_turn(run, 16)))
    print(statistics.median(one_turn(run, steps) for _ in range(TURNS)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--compile-one", default="")
    args = parser.parse_args()
    device = torch.device("cuda")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    if args.compile_one:
        compile_one(args.compile_one, device)
        return
    names = args.only.split(",") if args.only else list(BUILDERS)
    path = RESULTS / f"zoo-{machine_name()}.json"
    results = json.loads(path.read_text())["result"]["models"] if path.exists() else {}
    compiled: dict[str, Compiled] = {}
    left = float(COMPILE_SECONDS_IN_ALL)
    for number, name in enumerate(names):
        if number % COMPILED_AT_ONCE == 0 and not args.no_compile:
            some, began = names[number : number + COMPILED_AT_ONCE], time.monotonic()
            with ThreadPoolExecutor(COMPILED_AT_ONCE) as pool:
                made = pool.map(Compiled, some, repeat(began + left))
                compiled |= zip(some, made, strict=True)
            left -= time.monotonic() - began
        try:
            found = results[name] = measure(name, device)
        except Exception as error:  # noqa: BLE001 - the others are measured all the same
            found = {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
            results[name] = found
        if name in compiled:
            seconds = compiled[name].time()
            if seconds is None:
                found["compiled_error"] = compiled[name].error
            elif "batch" in found:
                found["compiled_per_second"] = found["batch"] / seconds
        ours = found.get("stoker_per_second")
        for other in ("plain", "graph", "compiled"):
            if ours and f"{other}_per_second" in found:
                found[f"times_{other}"] = ours / found[f"{other}_per_second"]
        found["commit"] = current_commit()
        print(name, found, flush=True)
        torch.cuda.empty_cache()
        publish("zoo", {"summary": summary_of(results), "models": results})


def summary_of(results: dict[str, dict]) -> dict:
    ratios = [found["times_plain"] for found in results.values() if "times_plain" in found]
    limits = [found["times_graph"] for found in results.values() if "times_graph" in found]
    return {
        "models": len(results),
        "median_times_plain": statistics.median(ratios) if ratios else None,
        "worst_times_plain": min(ratios, default=None),
        "worst_times_graph": min(limits, default=None),
    }


if __name__ == "__main__":
    main()
