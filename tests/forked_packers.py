"""The worker processes of a pack as forks: each start of Python with numpy and h5py costs half a second.

Only the start differs: a worker has the pipes, the variables and the descriptor of notes that it would have, is killed,
dies and hangs alike. Tests of how workers are started use the fixture `started_packers`.
"""

from __future__ import annotations

import os
import subprocess
from types import SimpleNamespace
from typing import NoReturn

from forked import Forked, begin_as_python_does


class Packer(Forked):
    """What `stoker.packing.workers` gets for a `Popen` with two pipes."""

    def __init__(self, command, *, env, pass_fds, stdin, stdout):
        assert (stdin, stdout) == (subprocess.PIPE, subprocess.PIPE)
        orders, to_worker = os.pipe()
        from_worker, answers = os.pipe()
        super().__init__(command, lambda: _be_worker(orders, answers, env))
        os.close(orders)
        os.close(answers)
        self.stdin, self.stdout = os.fdopen(to_worker, "wb"), os.fdopen(from_worker, "rb")


def _be_worker(orders: int, answers: int, environment) -> NoReturn:
    os.dup2(orders, 0)
    os.dup2(answers, 1)
    begin_as_python_does(environment)
    from stoker.packing.workers import serve

    serve()
    os._exit(0)


FORKS = SimpleNamespace(Popen=Packer, PIPE=subprocess.PIPE)


def fork_packers() -> None:
    """Have every pack of this process fork its workers."""
    import stoker.packing.workers

    stoker.packing.workers.subprocess = FORKS
