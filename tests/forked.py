"""A `Popen` whose process is a fork of this one: what is imported here needs no import there."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
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
            # Threads of torch's and of xdist's are here; the child uses none of them.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if not self.pid:
            try:
                be()
            finally:
                os._exit(99)
