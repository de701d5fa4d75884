"""Runs several cases, each in a fork of one process that has torch loaded: imports are most of a short run.

`python warm.py STEPS case [case ...]`, a case being its file's name, `name:remedied` with the remedy. One
line per case: its name, process and exit status.
"""

import os
import runpy
import sys
import traceback
from pathlib import Path

import h5py
import loop
import torch
from torch.utils.data import DataLoader  # noqa: F401  loaded here, used by the cases

HERE = Path(__file__).parent


def run_case(name: str, steps: str) -> None:
    name, _, flag = name.partition(":")
    sys.argv = [f"{name}.py", "--steps", steps, *(["--remedied"] if flag else [])]
    runpy.run_path(str(HERE / f"{name}.py"), run_name="__main__")


if __name__ == "__main__":
    assert h5py
    assert loop
    # The first optimizer of a process imports a second of torch.
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    for case in sys.argv[2:]:
        child = os.fork()
        if child == 0:
            status = 0
            try:
                run_case(case, sys.argv[1])
            except BaseException:  # noqa: BLE001  the next case must run
                traceback.print_exc()
                status = 1
            sys.stdout.flush()
            os._exit(status)
        _, status = os.waitpid(child, 0)
        print(case, child, os.waitstatus_to_exitcode(status), flush=True)
