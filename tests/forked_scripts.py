"""Scripts under the doctor's probe in a fork of this process, which has torch loaded: a start costs 5 s of CPU.

Only the start differs: the process is a child of this one, has the environment, folder and streams that it would have,
and the probe enters it before the script. Tests of how a script is started and how the probe enters it start
Python itself (`test_doctor_attach.py`, `test_doctor_endings.py`); so does a process that has begun to use CUDA.
"""

from __future__ import annotations

import atexit
import os
import runpy
import sys
import threading
import traceback
from pathlib import Path
from typing import NoReturn

import torch._dynamo  # noqa: F401  else every script whose steps are profiled would

from forked import Forked, begin_as_python_does, has_cuda_in_use
from stoker.doctor import attach

START = attach._start


def start(command, variables):
    """Stand in for `attach._start`."""
    if has_cuda_in_use():
        return START(command, variables)
    assert command[0] in (sys.executable, "python"), command
    return Forked(command, lambda: run(command[1:], variables))


def run(words, variables) -> NoReturn:
    """Be the script; end the process."""
    code = 1
    try:
        begin_as_python_does(variables)
        _enter()
        sys.argv = [*map(str, words)]
        sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
        runpy.run_path(str(Path(sys.argv[0]).absolute()), run_name="__main__")  # as Python does
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001  as Python ends a script
        traceback.print_exc()
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()
        os._exit(code)


def _enter() -> None:
    """Start the probe as Python would; what it waits for has been imported already."""
    runpy.run_path(str(attach._ENTRY / "sitecustomize.py"))
    hooks = sys.modules["_stoker_probe.hooks"]
    for name in [name for name in hooks._WANTED if name in sys.modules]:
        for call in hooks._WANTED.pop(name):
            call(sys.modules[name])
