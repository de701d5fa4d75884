"""Launch a command in several processes on this machine, and restart it when one is lost.

Enters: the arguments of `python -m stoker`, a number of processes. Leaves: an exit code. Costs the same as
torchrun: torch's own elastic launcher starts and observes the processes.

Success: exit code 0. If a process was killed or crashed, or a rank made no progress, all processes are ended, and the
command is started again from its latest checkpoint. Bad input, refused data and Ctrl-C end the run, because a restart
would not help. The processes never outlive this one (`lifetime.py`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from stoker.address import HIDDEN_WORDS, keep_secrets, masked
from stoker.errors import EXIT_DONE, EXIT_INPUT, EXIT_INTERRUPTED, EXIT_OURS, EXIT_REFUSED
from stoker.lifetime import children_of_this_process
from stoker.ownership import temporary_folder
from stoker.strict_json import exact_text
from stoker.train.ranks import RESTARTS

_FINAL = (EXIT_INPUT, EXIT_REFUSED, EXIT_INTERRUPTED)
_SAVING_SECONDS = 300
"""Time after a signal for the current step or validation, and a checkpoint. Torch's default is 30 s."""


def launch(
    words: Sequence[str], num_processes: int, max_restarts: int, say: Callable[[str], object]
) -> int:
    """Run `python -m stoker WORDS` in `num_processes` processes until it ends; return its exit code.

    Args:
        words: The verb and its options.
        num_processes: Number of processes, one per GPU.
        max_restarts: How often a run that lost a process is restarted; it then continues from its latest
            checkpoint.
        say: Called with a line for every restart.
    """
    os.environ.setdefault(
        "OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // num_processes))
    )
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(_SAVING_SECONDS))
    seen = _hide_secrets(words)
    for restart in range(max_restarts + 1):
        os.environ[RESTARTS] = str(restart)
        with temporary_folder("stoker-ranks-") as logs, children_of_this_process():
            code, why = _run(seen, num_processes, logs)
        if not why or code in _FINAL or restart == max_restarts:
            return code
        say(f"{why}: starting again from the latest checkpoint ({restart + 1} of {max_restarts})")
    return EXIT_OURS


def _hide_secrets(words: Sequence[str]) -> list[str]:
    """Return the arguments without secrets: other users can read a command line.

    The child reads the full ones from its environment.
    """
    for word in words:
        keep_secrets(word)
    seen = [masked(word) for word in words]
    if seen != list(words):
        os.environ[HIDDEN_WORDS] = exact_text(list(words))
    return seen


def _run(words: Sequence[str], num_processes: int, logs: Path) -> tuple[int, str]:
    """Run the command once; return the exit code, and a sentence on the process that failed, or ""."""
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # The launcher's long reports are switched off: one line is printed here, and ranks print their own.
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_processes,
        run_id="stoker",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.2,
        logs_specs=DefaultLogsSpecs(log_dir=str(logs)),  # by default torch leaves folders in /tmp
    )
    try:
        elastic_launch(config, sys.executable)("-m", "stoker", *words)
    except ChildFailedError as error:
        # The launcher may see ranks that end because of another rank at the same moment as that rank.
        final = [rank for rank, each in error.failures.items() if each.exitcode in _FINAL]
        rank = final[0] if final else error.get_first_failure()[0]
        code = int(error.failures[rank].exitcode)
        if code >= 0:
            return code, f"rank {rank} ended with exit code {code}"
        return EXIT_OURS, f"rank {rank} was ended by {signal.Signals(-code).name}"
    except SignalException as error:  # every process got the signal and has saved
        _end_the_rest()
        return (EXIT_INTERRUPTED if error.sigval == signal.SIGINT else EXIT_DONE), ""
    return EXIT_DONE, ""


def _end_the_rest() -> None:
    """Kill the processes that are left after a second signal: no process watches them any more."""
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "stoker" in child.cmdline():
                child.kill()
