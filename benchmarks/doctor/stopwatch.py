"""Runs a script and writes when each of its updates ended: `python stopwatch.py OUT SCRIPT [ARGUMENTS]`.

Costs a microsecond per update. The file is written after update number `STEPS`, by the first process that gets there.
A script whose updates no optimizer makes (a replayed CUDA graph) calls `sys.stopwatch_note()` after each.
`STOPWATCH_PROFILE` makes it run torch's profiler over a few updates as well, and write the costliest operators.
`STOPWATCH_LONGEST` ends the script after so many seconds of updates, if there were `LEAST` of them: long steps need no
more. `STOPWATCH_LOCK` names a file of which one script at a time holds the lock from its first update to its last; the
next ones import torch, wake the GPU, make their data and load their kernels meanwhile.
`STOPWATCH_TURNS` names a folder with two pipes, `done` and `go`: after `STOPWATCH_STEPS` updates and one, which the
doctor does not count, and at least `LEAST`, the script stands still until it is told to go, makes `STOPWATCH_STEPS`
updates, and so on until the pipe says that it ends. The seconds of each turn's updates, and its CPU time, are a line in
the file `turns` there. Standing still for the first time, the thread moves to the core `STOPWATCH_CORE`, if given, and
threads that the doctor has begun by then keep all of the cores of the script.
`run_forked` is the same in a process that was forked with torch already imported, which saves its seconds.
"""

import fcntl
import itertools
import json
import multiprocessing
import os
import runpy
import sys
import time
from collections.abc import Sequence
from pathlib import Path

LEAST, FIRST = 40, 21
PROFILED = (10, 20)
main_process = os.getpid()
lock: int | None = None
times: list[float] = []
cpu_times: list[float] = []
queued_before = 0.0
profiler = None
top: list[str] = []
stood: list[int] = []
resumed: list[tuple[float, float]] = []
pipes: list[int] = []


def await_gpu():
    """Wait for the GPU, of which a host that never does runs ahead: the first and the last time count its work."""
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def take_turns():
    """Stand still between two turns; return whether the script is to end."""
    place = os.environ.get("STOPWATCH_TURNS")
    if place is None or len(times) < LEAST or os.getpid() != main_process:
        return False
    if (len(times) - 1) % int(os.environ["STOPWATCH_STEPS"]):
        return False
    if not stood and "STOPWATCH_CORE" in os.environ:
        os.sched_setaffinity(0, {int(os.environ["STOPWATCH_CORE"])})
    await_gpu()
    times[-1] = time.perf_counter()
    if stood:
        wall, cpu = resumed[-1]
        taken = [wall, *times[stood[-1] :]]
        steps = [after - before for before, after in itertools.pairwise(taken)]
        with Path(place, "turns").open("a") as file:
            file.write(json.dumps({"steps": steps, "cpu": time.process_time() - cpu}) + "\n")
    stood.append(len(times))
    if not pipes:
        pipes.extend(os.open(f"{place}/{name}", os.O_RDWR) for name in ("done", "go"))
    os.write(pipes[0], b"d")
    ends = os.read(pipes[1], 1) == b"e"
    resumed.append((time.perf_counter(), time.process_time()))
    return ends


def queued_seconds():
    """Return the seconds for which this thread was ready to run and had no core; 0 if unknown."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def note(*_):
    global profiler, queued_before  # noqa: PLW0603  one per process
    if lock is not None and not times:  # the doctor does not count the first steps
        fcntl.flock(lock, fcntl.LOCK_EX)
    if len(times) + 1 in (FIRST, int(os.environ.get("STEPS", "120"))):
        await_gpu()
    if len(times) + 1 == FIRST:
        queued_before = queued_seconds()
    times.append(time.perf_counter())
    cpu_times.append(time.process_time())  # of all threads: a busy machine does not change it much
    longest = float(os.environ.get("STOPWATCH_LONGEST", "inf"))
    is_long = len(times) >= LEAST and times[-1] - times[0] > longest and os.getpid() == main_process
    is_long = take_turns() or is_long
    if is_long or len(times) == int(os.environ.get("STEPS", "120")):
        if is_long and not stood:
            await_gpu()
            times[-1] = time.perf_counter()
        try:
            with Path(os.environ["STOPWATCH_OUT"]).open("x") as file:
                queued = queued_seconds() - queued_before
                json.dump({"times": times, "cpu": cpu_times, "top": top, "queued": queued}, file)
        except FileExistsError:
            pass
        if lock is not None:
            fcntl.flock(lock, fcntl.LOCK_UN)
        if is_long:
            os._exit(0)
    if not os.environ.get("STOPWATCH_PROFILE"):
        return
    import torch

    if len(times) == PROFILED[0]:
        profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
        profiler.start()
    elif profiler is not None and len(times) == PROFILED[1]:
        profiler.stop()
        found = sorted(profiler.key_averages(), key=lambda one: -one.self_cpu_time_total)
        top.extend(one.key for one in found[:3])
        profiler = None


def run(out: str, words: Sequence[str]) -> None:
    """Run a script with its arguments in this process."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    global lock, main_process  # noqa: PLW0603  one per process
    os.environ["STOPWATCH_OUT"] = out
    register_optimizer_step_post_hook(note)
    sys.stopwatch_note = note
    main_process = os.getpid()
    if "STOPWATCH_LOCK" in os.environ:
        torch.zeros(1, device="cuda" if torch.cuda.is_available() else "cpu")
        # Inherited by workers, and free when the last of them ends, or at the last update.
        lock = os.open(os.environ["STOPWATCH_LOCK"], os.O_RDWR | os.O_CREAT)
    sys.argv = list(words)
    runpy.run_path(sys.argv[0], run_name="__main__")


def run_forked(
    out: str, words: Sequence[str], folder: str, cores: set[int], variables: dict[str, str]
) -> None:
    """Run a script in a fresh fork, in a folder and on some cores; what it prints goes into `out`.said."""
    said = os.open(f"{out}.said", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(said, stream)
    # Processes of a fork server make theirs in its way; scripts are to make theirs as Python does by itself.
    multiprocessing.set_start_method("fork", force=True)
    os.environ.update(variables)
    os.sched_setaffinity(0, cores)
    os.chdir(folder)
    run(out, words)


if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2:])
