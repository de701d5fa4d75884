"""The probe: code that runs inside a measured script. Standard library only; it never imports torch itself.

Enters: a folder to write to. Leaves: one file per process there, `PID.jsonl`, appended to. Costs 0.1 to
0.25 ms per step. Written for Python 3.10 and torch 2.1 or newer (tested with those of constraints.txt), and
for scripts whose Python has no stoker: there these files are the package `_stoker_probe`, so they import
each other by `from . import`.

Files: `recorder.py` keeps and writes measurements, `places.py` finds file and line, `clocks.py` reads the
kernel's counters, `hooks.py` waits for imports and notes temporary folders, `loading.py` times the DataLoader and its
workers, `sampling.py` samples the stacks of loading and training, `steps.py` times optimizer steps, `fetching.py`
times synchronisations and copies, `operators.py` runs a few steps under torch's profiler, `hdf5.py` times h5py.
`entry/` starts the probe.

Contract: the probe never changes what the script computes, prints or raises.

    success  a wrapper calls the original first, outside any `try`, and returns its result unchanged
    failure  an exception in the probe's own code becomes a note in the file; the script does not see it
    cancel   the doctor creates the file `stop`; the probe writes its last lines and answers with `PID.done`
    threads  the training thread adds steps; one daemon thread per process writes the file; another one samples
             stacks. A forked process starts anew with a file of its own
"""

from __future__ import annotations

import os
from functools import partial


def start(folder: str) -> None:
    """Start the probe in this process. Until torch or h5py is imported, it only watches imports."""
    from . import fetching, hdf5, hooks, loading, operators, recorder, steps

    recorder.begin(folder)
    # Silences Kineto, the profiler's library, which prints to stderr. It reads this variable once.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    hooks.when_imported("torch", operators.install)
    hooks.when_imported("torch", steps.install)
    hooks.when_imported("torch", fetching.install)
    hooks.when_imported("torch", loading.install)
    if os.environ.get("STOKER_DOCTOR_SECONDS"):
        # Start the writing thread before the first step, for scripts that never reach one. Only with a time
        # limit, when the doctor will ask for the last lines.
        hooks.when_imported("torch", recorder.get().start_flusher)
    hooks.when_imported("torch._dynamo.trace_rules", hooks.hide_from_compiler)
    hooks.when_imported("h5py", hdf5.install)
    hooks.when_imported("multiprocessing.util", partial(hooks.note_temporaries, folder=folder))
    hooks.watch()
