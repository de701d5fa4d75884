"""The probe: what runs inside a measured script. Standard library only; torch is met, never imported.

Enters: a folder to write to. Leaves: one file per process there, `PID.jsonl`, appended to. Costs 0.1 to
0.25 ms per step. Written for Python 3.10 and torch 2.1 or newer (tested with those of constraints.txt), and
for scripts whose Python has no stoker: there these files are the package `_stoker_probe`, so they import
each other by `from . import`.

Files: `recorder.py` what is kept and written, `places.py` file and line, `clocks.py` readings, `hooks.py`
waiting for imports, `loading.py` DataLoader and its workers, `sampling.py` what loading code is doing,
`steps.py` optimizer steps, `fetching.py` syncs and copies, `operators.py` a few steps under torch's
profiler, `hdf5.py` h5py. `entry/` starts it.

The one rule: nothing the probe does may change what the script does. A wrapper calls the original first
and outside any `try`; whatever fails in the probe's own code becomes a note.
"""

from __future__ import annotations

import os


def start(folder: str) -> None:
    """Begin in this process: nothing is touched until torch or h5py is imported."""
    from . import fetching, hdf5, hooks, loading, operators, recorder, steps

    recorder.begin(folder)
    # The profiler's library writes to stderr when it starts and stops, and reads this once.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    hooks.when_imported("torch", operators.install)
    hooks.when_imported("torch", steps.install)
    hooks.when_imported("torch", fetching.install)
    hooks.when_imported("torch", loading.install)
    if os.environ.get("STOKER_DOCTOR_SECONDS"):
        # A thread before the first step, for scripts that never get there; only where somebody will ask.
        hooks.when_imported("torch", recorder.get().start_flusher)
    hooks.when_imported("torch._dynamo.trace_rules", hooks.hide_from_compiler)
    hooks.when_imported("h5py", hdf5.install)
    hooks.watch()
