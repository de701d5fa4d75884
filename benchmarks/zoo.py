"""The training step of models that nobody here wrote: a plain loop, torch.compile, a hand-made graph, stoker.

    python benchmarks/zoo.py [--only resnet18,gcn] [--no-compile]

Four ways train the same model on the same eight batches, which are on the device before anything is timed, in
turns. `plain` is the eager loop that people write. `compiled` adds torch.compile(mode="reduce-overhead") to the
model, if it compiles in time. `graph` is the whole step as one CUDA graph, made by hand with torch alone: the
limit. `stoker` is `Trainer`, with what it decided in `step`.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from harness import publish, side_by_side
from stoker.report import Topic
from stoker.train.trainer import Trainer
from zoo_models import BUILDERS, Entry

HELD = 8
TURNS = 3
SECONDS_A_TURN = 0.2
COMPILE_SECONDS = 150


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


def plain_way(entry: Entry, batches, device, compiled: bool = False):
    own = copied(entry, device)
    model = torch.compile(own, mode="reduce-overhead") if compiled else own
    optimizer = torch.optim.AdamW(own.parameters(), lr=1e-4)

    def run(steps: int) -> None:
        for number in range(steps):
            if compiled:
                torch.compiler.cudagraph_mark_step_begin()
            train_step(entry, model, optimizer, *batches[number % HELD])

    return run


def graph_way(entry: Entry, batches, device):
    """The whole step as one graph, by torch alone; the batch is copied to where the graph reads it."""
    model = copied(entry, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=True)
    static = [tensor.clone() for tensor in flat(batches[0])]
    is_pair = isinstance(batches[0][0], tuple)
    inputs = tuple(static[:-1]) if is_pair else static[0]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            train_step(entry, model, optimizer, inputs, static[-1])
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = train_step(entry, model, optimizer, inputs, static[-1])

    def run(steps: int) -> None:
        assert model is not None  # kept, as is the optimizer: the graph uses their tensors
        assert optimizer is not None
        losses = []
        for number in range(steps):
            for target, source in zip(static, flat(batches[number % HELD]), strict=True):
                target.copy_(source)
            graph.replay()
            losses.append(loss.clone())

    return run


def flat(batch) -> list[torch.Tensor]:
    inputs, targets = batch
    return [*inputs, targets] if isinstance(inputs, tuple) else [inputs, targets]


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
        {"epochs": 1, "precision": entry.precision},
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


def measure(name: str, device, can_compile: bool) -> dict:
    """Rates of one model in every way; a way that fails has its error instead."""
    torch.manual_seed(0)
    entry = BUILDERS[name]()
    batches = [entry.make(device) for _ in range(HELD)]
    found: dict = {"batch": entry.batch, "precision": entry.precision}
    parameters = sum(one.numel() for one in entry.model.parameters())
    found["parameters"] = parameters
    how = None
    ways: dict = {}
    makers = {
        "plain": partial(plain_way, entry, batches, device),
        "graph": partial(graph_way, entry, batches, device),
        "stoker": partial(stoker_way, entry, batches, device),
    }
    if can_compile:
        makers["compiled"] = partial(plain_way, entry, batches, device, compiled=True)
    for way, make in makers.items():
        try:
            made = make()
            run, how_now = made if isinstance(made, tuple) else (made, None)
            # Warm-up, capture, the checks of the first replays and of those after 64 and 512.
            run(640 if way == "stoker" else 16)
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
    for number, way in enumerate(ways):
        median = statistics.median(turn[number] for turn in timed)
        found[f"{way}_per_second"] = entry.batch / median
    if how is not None:
        found["step"] = how()
    ours = found.get("stoker_per_second")
    for other in ("plain", "graph", "compiled"):
        if ours and f"{other}_per_second" in found:
            found[f"times_{other}"] = ours / found[f"{other}_per_second"]
    return found


def compile_once(name: str) -> bool:
    """Compile a model in a process of its own, which fills torch's cache; return whether it ended in time."""
    command = [sys.executable, __file__, "--compile-one", name]
    try:
        return (
            subprocess.run(
                command, timeout=COMPILE_SECONDS, capture_output=True, check=False
            ).returncode
            == 0
        )
    except subprocess.TimeoutExpired:
        return False


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--compile-one", default="")
    args = parser.parse_args()
    device = torch.device("cuda")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    if args.compile_one:
        entry = BUILDERS[args.compile_one]()
        batches = [entry.make(device) for _ in range(HELD)]
        plain_way(entry, batches, device, compiled=True)(3)
        return
    names = args.only.split(",") if args.only else list(BUILDERS)
    compiles = {}
    if not args.no_compile:
        with ThreadPoolExecutor(6) as pool:
            compiles = dict(zip(names, pool.map(compile_once, names), strict=True))
    results = {}
    for name in names:
        try:
            results[name] = measure(name, device, compiles.get(name, False))
        except Exception as error:  # noqa: BLE001 - the others are measured all the same
            results[name] = {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
        if not args.no_compile and not compiles.get(name):
            results[name]["compiled_error"] = f"it did not compile within {COMPILE_SECONDS} s"
        print(name, results[name], flush=True)
        torch.cuda.empty_cache()
    ratios = [found["times_plain"] for found in results.values() if "times_plain" in found]
    limits = [found["times_graph"] for found in results.values() if "times_graph" in found]
    summary = {
        "models": len(results),
        "median_times_plain": statistics.median(ratios) if ratios else None,
        "worst_times_plain": min(ratios, default=None),
        "worst_times_graph": min(limits, default=None),
    }
    publish("zoo", {"summary": summary, "models": results})


if __name__ == "__main__":
    main()
