"""What the probe's hooks cost a step, in one process: on and off in turns of 48 steps.

    python benchmarks/doctor/inside.py "2 ms"          # or another script of overhead.py
    python benchmarks/doctor/inside.py "GPT on a GPU" --steps 800 --out FILE

Enters: a script of overhead.py, whose size is sought first. Leaves: microseconds of CPU and wall time that the hooks
add to a step, in the windows in which calls are timed and in those in which they are not, and the share of both by how
many there are of each. A machine that others use varies by more between two processes than what is asked about; within
one, the lower half of the steps in turns agrees to a few microseconds. While the hooks are off the sampling thread
sleeps.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent.parent / "src"), str(HERE)]

from overhead import SCRIPTS, calibrate, source  # noqa: E402

from stoker.doctor import probe  # noqa: E402
from stoker.doctor.probe import recorder  # noqa: E402

TURN, SETTLING, WARM_UP = 48, 12, 100
METHODS = ("item", "__bool__", "__float__", "__int__", "tolist", "numpy", "nonzero", "cpu", "to", "cuda")  # fmt: skip


class Switch:
    """The probe's wrappers and hooks, all on or all off."""

    def __init__(self, torch: Any) -> None:
        from torch.optim import optimizer
        from torch.utils.data import dataloader
        from torch.utils.data._utils import fetch

        places = [
            *((torch.Tensor, name) for name in METHODS),
            (torch.autograd, "backward"),
            (fetch._MapDatasetFetcher, "fetch"),
            (dataloader._BaseDataLoaderIter, "__next__"),
        ]
        self._replaced = [
            (owner, name, getattr(owner, name), getattr(owner, name).__wrapped__)
            for owner, name in places
        ]
        self._hooks = [
            (kept, dict(kept))
            for kept in (
                optimizer._global_optimizer_pre_hooks,
                optimizer._global_optimizer_post_hooks,
            )
        ]
        self.on = True

    def turn(self) -> None:
        """Switch."""
        self.on = not self.on
        if self.on:
            recorder.get().step_start = time.perf_counter()
        else:
            # No step ends while the hooks are off, and none is to be taken for a late one.
            recorder.watching, recorder.get().step_start = False, float("inf")
        for owner, name, ours, original in self._replaced:
            setattr(owner, name, ours if self.on else original)
        for kept, ours in self._hooks:
            for number, hook in ours.items():
                # The key stays: torch is iterating over these.
                kept[number] = hook if self.on else _nothing


def _nothing(*_: Any) -> None:
    """Stand for a hook that is off."""


def lower_half(values: list[float]) -> float:
    """Return the mean of the lower half, without the lowest tenth."""
    ordered = sorted(values)
    return statistics.mean(ordered[len(ordered) // 10 : len(ordered) // 2 + 1])


def compare(script: str, steps: int) -> dict[str, Any]:
    """Run a script under the probe in this process; return what its hooks add to a step."""
    probe.start(tempfile.mkdtemp(prefix="doctor-inside-"))
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    switch = Switch(torch)
    seen: dict[str, list[tuple[float, float]]] = defaultdict(list)
    count, before = 0, (0.0, 0.0)

    def note(*_: Any) -> None:
        nonlocal count, before
        count += 1
        now = (time.thread_time(), time.perf_counter())
        if count > WARM_UP and count % TURN > SETTLING:
            state = "off" if not switch.on else "timed" if recorder.watching else "plain"
            seen[state].append((now[0] - before[0], now[1] - before[1]))
        if count % TURN == 0:
            switch.turn()
        before = (time.thread_time(), time.perf_counter())

    register_optimizer_step_post_hook(note)
    exec(compile(script, "script", "exec"), {"__name__": "__main__"})
    result: dict[str, Any] = {"steps": steps}
    for at, clock in enumerate(("cpu", "wall")):
        bare = lower_half([one[at] for one in seen["off"]])
        result[f"{clock}_ms"] = bare * 1e3
        for state in ("timed", "plain"):
            more = lower_half([one[at] for one in seen[state]]) - bare
            result[f"{state}_{clock}_us"] = more * 1e6
        timed = result["timed_steps"] = len(seen["timed"]) / len(seen["timed"] + seen["plain"])
        both = timed * result[f"timed_{clock}_us"] + (1 - timed) * result[f"plain_{clock}_us"]
        result[f"{clock}_share"] = both * 1e-6 / bare
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("script", choices=tuple(SCRIPTS))
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    script = SCRIPTS[asked.script]
    size, _ = calibrate(script, None)
    result = {**size._asdict(), **compare(source(script, size, asked.steps), asked.steps)}
    print(asked.script, {name: round(value, 3) for name, value in result.items()}, flush=True)
    if asked.out is not None:
        asked.out.write_text(json.dumps({asked.script: result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
