"""A `Popen` whose process is a fork of this one: what is imported here needs no import there."""

from __future__ import annotations

import atexit
import faulthandler
import gc
import os
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Mapping
from typing import NoReturn


class Forked(subprocess.Popen):
    """A child that calls a function, which never returns; signals, waiting and exit code are a `Popen`'s."""

    def __init__(self, command, be: Callable[[], NoReturn]):
        self.args, self.returncode = command, None
        self.stdin = self.stdout = self.stderr = None
        self._waitpid_lock, self._child_created = threading.Lock(), True
        self._communication_started, self._input = False, None
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        with warnings.catch_warnings():
            # Threads of torch's are here; the child uses none of them.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if not self.pid:
            try:
                be()
            finally:
                os._exit(99)


def has_cuda_in_use() -> bool:
    """Whether this process uses a GPU, which no fork of it could: what may use one is started otherwise then."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized()


def begin_as_python_does(environment: Mapping[str, str]) -> None:
    """In a fork: leave behind what pytest and a test have set up, as if Python had been started."""
    faulthandler.disable()
    gc.freeze()  # what a collection touches is copied
    atexit._clear()  # what pytest and its helpers would do at their end
    for number in (signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout, sys.stderr = (open(number, "w", buffering=1) for number in (1, 2))  # noqa: SIM115, PTH123
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)  # a pool of threads does not survive the fork
    warnings.resetwarnings()  # which are errors in tests; below, those that Python begins with
    for kind in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", kind)
