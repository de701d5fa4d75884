"""Runs a script and writes when each of its updates ended: `python stopwatch.py OUT SCRIPT [ARGUMENTS]`.

Costs a microsecond per update. The file is written after update number `STEPS`, by the first process that gets there.
`STOPWATCH_PROFILE` makes it run torch's profiler over a few updates as well, and write the costliest operators.
"""

import json
import os
import runpy
import sys
import time
from pathlib import Path

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

STEPS = int(os.environ.get("STEPS", "120"))
PROFILED = (10, 20)
out = sys.argv[1]
times: list[float] = []
profiler = None
top: list[str] = []


def note(*_):
    global profiler  # noqa: PLW0603  one per process
    times.append(time.perf_counter())
    if len(times) == STEPS:
        try:
            with Path(out).open("x") as file:
                json.dump({"times": times, "top": top}, file)
        except FileExistsError:
            pass
    if os.environ.get("STOPWATCH_PROFILE") and len(times) == PROFILED[0]:
        profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
        profiler.start()
    elif profiler is not None and len(times) == PROFILED[1]:
        profiler.stop()
        found = sorted(profiler.key_averages(), key=lambda one: -one.self_cpu_time_total)
        top.extend(one.key for one in found[:3])
        profiler = None


if __name__ == "__main__":
    register_optimizer_step_post_hook(note)
    sys.argv = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="__main__")
