"""Run a user's script with the probe inside it.

Enters: a command line. Leaves: its own exit code and `Measurements`. Costs the script's time, and 0.1 to 0.25 ms
more per step.

The probe (`probe/`) is loaded into every Python process of the command through the environment: `PYTHONPATH` begins
with the folder `probe/entry`. The script inherits stdin, stdout, stderr, the working directory and the process group.

Success: the script ends by itself, and its exit code is returned. Limit: after the given steps or seconds, the script
and all its processes get SIGTERM, then SIGKILL. Ctrl-C: the terminal interrupts the script too; it has five seconds to
shut down, and a second Ctrl-C kills it. SIGTERM to the doctor, or any error here: the script is ended, so that it never
outlives the doctor.
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from stoker import display
from stoker.doctor.gains import STARVED_SHARE, waits
from stoker.doctor.measurements import MachineFacts, Measurements
from stoker.doctor.transcript import read_folder
from stoker.doctor.transcript_measures import measure
from stoker.errors import InputError
from stoker.lifetime import child_environment, until_terminated
from stoker.machine import probe
from stoker.ownership import temporary_folder
from stoker.strict_json import json_text

_ENTRY = Path(__file__).parent / "probe" / "entry"
_POLL_SECONDS = 0.05
_LAST_WORDS_SECONDS = 1.5
_GRACE_SECONDS = 5.0


@dataclass(frozen=True)
class Attached:
    """The result of running a script with the probe."""

    exit_code: int | None  # the script's own, negative for a signal; None if the doctor ended it
    # why the doctor ended the script: "steps", "seconds", "interrupt" (Ctrl-C) or "termination" (SIGTERM to the
    # doctor); "" if it ended by itself
    stopped: str
    measurements: Measurements  # from the probe's files


def run_script(
    command: Sequence[str],  # as typed after `--`
    *,
    steps: int | None = None,  # end it after this number of optimizer updates, warm-up not counted
    seconds: float | None = None,  # end it after this time
    loader_arguments: Mapping[str, Any] | None = None,  # forced on every DataLoader of the script
    environment: Mapping[str, str] | None = None,  # None: the environment of this process
) -> Attached:
    """Run `command` (such as ["python", "train.py"]) to its end, or for a number of steps or seconds.

    Raises:
        InputError: The command is empty or cannot be started, or a limit is not above zero.
    """
    _check(command, steps, seconds)
    with temporary_folder("stoker-doctor-") as folder, until_terminated() as terminated:
        variables = probe_variables(environment or os.environ, folder, steps, loader_arguments)
        if seconds is not None:
            variables["STOKER_DOCTOR_SECONDS"] = f"{seconds:g}"
        process = _start(command, variables)
        stopped = _watch(process, folder, steps, seconds, terminated)
        code = None if stopped else process.returncode
        ending = describe_ending(code, stopped, seconds)
        machine = machine_facts()
        measured = measure(read_folder(folder), display.command(*command), machine, ending=ending)
    between = measured.between_seconds or 0.0
    step = measured.step_seconds
    if waits(measured) or (step is not None and between > STARVED_SHARE * step.median):
        # Measured only if more workers may be the remedy: their gain depends on it.
        worth = cores_worth(machine.cores)
        measured = replace(measured, machine=replace(measured.machine, cores_worth=worth))
    return Attached(code, stopped, measured)


def describe_ending(
    code: int | None, stopped: str, seconds: float | None = None, who: str = "it"
) -> str:
    """Return how a script ended, such as "it was killed by signal 9 (SIGKILL)"; `who` names it."""
    if stopped == "seconds" and seconds is not None:
        return f"the doctor ended {who} after {seconds:g} s"
    if stopped:
        by = {"interrupt": "Ctrl-C", "termination": "SIGTERM"}
        return f"{who} was ended by {by[stopped]}" if stopped in by else f"the doctor ended {who}"
    if code is not None and code < 0:
        known = {one.value: f" ({one.name})" for one in signal.Signals}
        return f"{who} was killed by signal {-code}{known.get(-code, '')}"
    return f"{who} ended with exit code {code}" if code else f"{who} finished"


def _check(command: Sequence[str], steps: int | None, seconds: float | None) -> None:
    example = "stoker doctor -- python train.py"
    if not command:
        raise InputError("there is no command to run.", "a command after --", example)
    for name, limit in (("--steps", steps), ("--seconds", seconds)):
        if limit is not None and limit <= 0:
            raise InputError(
                f"{name} is {limit}.",
                "a number above 0",
                display.command("stoker", "doctor", name, 100, "--", *command),
            )


def probe_variables(
    environment: Mapping[str, str],
    folder: Path,
    steps: int | None = None,
    loader_arguments: Mapping[str, Any] | None = None,
) -> dict[str, str]:
    """Return environment variables that make every Python process start the probe, which writes to `folder`."""
    variables = {n: value for n, value in environment.items() if not n.startswith("STOKER_DOCTOR_")}
    path = [str(_ENTRY), *filter(None, [variables.get("PYTHONPATH", "")])]
    variables["PYTHONPATH"] = os.pathsep.join(path)
    variables["STOKER_DOCTOR_FOLDER"] = str(folder)
    if steps is not None:
        variables["STOKER_DOCTOR_STEPS"] = str(steps)
    if loader_arguments:
        variables["STOKER_DOCTOR_OVERRIDE"] = json_text(dict(loader_arguments))
    return variables


def _start(command: Sequence[str], variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(list(command), env=child_environment(variables))
    except OSError as error:
        script = Path(command[0]).suffix == ".py"
        raise InputError(
            f"cannot run {command[0]!r}: {error.strerror}.",
            "a command as you would type it in a shell",
            display.command("stoker", "doctor", "--", "python", *command)
            if script
            else "look at the spelling, and at PATH",
        ) from error


# -- waiting for the script, ending it ---------------------------------------------------------------------


def _watch(
    process: subprocess.Popen[bytes],
    folder: Path,
    steps: int | None,
    seconds: float | None,
    terminated: threading.Event,
) -> str:
    """Wait for the script; return why the doctor ended it (see `Attached.stopped`), "" if it ended by itself."""
    deadline = None if seconds is None else time.monotonic() + seconds
    try:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_POLL_SECONDS)
                return ""
            if terminated.is_set():
                end(process)
                return "termination"
            if steps is not None and any(folder.glob("*.done")):
                # Give the other ranks of a data-parallel job time to reach the same step and write.
                time.sleep(_POLL_SECONDS * 4)
                end(process)
                return "steps"
            if deadline is not None and time.monotonic() > deadline:
                _ask_for_last_words(process, folder)
                if process.poll() is not None:
                    return ""
                end(process)
                return "seconds"
    except KeyboardInterrupt:
        _give_way(process)
        return "interrupt"
    finally:
        if process.poll() is None:
            _kill(process, _family(process.pid))


def _give_way(process: subprocess.Popen[bytes]) -> None:
    """Give the script 5 s to end after Ctrl-C (the terminal interrupts it too); a second Ctrl-C kills it."""
    family = _family(process.pid)
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_SECONDS)
            return
        end(process)
    except KeyboardInterrupt:
        _kill(process, family)


def _kill(process: subprocess.Popen[bytes], family: Sequence[psutil.Process]) -> None:
    """Kill a script and the processes that it has started."""
    process.kill()
    for one in family:
        with contextlib.suppress(psutil.Error):
            one.kill()
    process.wait()


def _ask_for_last_words(process: subprocess.Popen[bytes], folder: Path) -> None:
    """Ask the probe to write its last lines. Waits at most 1.5 s, because the script may block all threads."""
    (folder / "stop").touch()
    deadline = time.monotonic() + _LAST_WORDS_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        if any(folder.glob("*.done")):
            return
        time.sleep(_POLL_SECONDS)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a script and every process that it has started: SIGTERM to the script, then to the others, then SIGKILL."""
    family = _family(process.pid)
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE_SECONDS)
    for ask in (psutil.Process.terminate, psutil.Process.kill):
        left = [one for one in family if _lives(one)]
        if process.poll() is None and ask is psutil.Process.kill:
            process.kill()
        for one in left:
            with contextlib.suppress(psutil.Error):
                ask(one)
        deadline = time.monotonic() + 1.0
        while any(map(_lives, left)) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
    process.wait()


def _family(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []


def _lives(process: psutil.Process) -> bool:
    """Return whether a process still runs; a zombie does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def machine_facts() -> MachineFacts:
    """Return the facts of this machine that the rules use."""
    found = probe()
    return MachineFacts(
        cores=found.cores_usable,
        physical_cores=physical_cores(),
        device_name=found.cpu,
        ram_free_bytes=found.ram_available_bytes,
    )


_WORK = """
import json, sys, time, zlib
text, packed = json.dumps(list(range(300))), zlib.compress(bytes(range(256)) * 16)
begin, slot, rounds, is_first = *map(float, sys.argv[1:4]), sys.argv[4] == "0"
for number in range(2 * int(rounds)):
    if number % 2 or is_first:
        time.sleep(max(0.0, begin + number * slot - time.time()))
        until, began, count = begin + (number + 0.9) * slot, time.process_time(), 0
        while not count or time.time() < until:
            count += sum(json.loads(text)) > 0 and len(zlib.decompress(packed)) > 0
        print(count / max(time.process_time() - began, 1e-9))
"""
"""Work like a dataset's, in turns: the first process alone, then all of them. The results are per second of CPU time,
so that other programs hardly change them."""
_TURN_SECONDS, _TURNS = 0.04, 5
"""One turn takes so long, and there are so many of each kind: a single one is wrong by up to half where the neighbours
of a rented machine come and go (readings of one machine: 1.06 to 2.0)."""
_MOST_CORES = 32


def cores_worth(cores: int | None) -> float | None:
    """Measure the throughput of all cores together, as a multiple of one thread's.

    None on one core, on more than 32, or if it fails. Takes about half a second. On rented machines a core is often one
    of two hardware threads of a physical core, and the system does not say so.
    """
    if cores is None or not 2 <= cores <= _MOST_CORES:
        return None
    begin = time.time() + 0.1 + 0.02 * cores
    turns = [str(begin), str(_TURN_SECONDS), str(_TURNS)]
    try:
        started = [
            subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _WORK, *turns, str(number)],
                stdout=subprocess.PIPE,
            )
            for number in range(cores)
        ]
        first, *others = (
            [float(rate) for rate in one.communicate(timeout=10)[0].split()] for one in started
        )
        together = [sum(rates) for rates in zip(first[1::2], *others, strict=True)]
        shares: list[float] = [
            of_all / one for one, of_all in zip(first[::2], together, strict=True)
        ]
    except (
        OSError,
        ValueError,
        subprocess.SubprocessError,
    ):
        # Those that still run end by themselves.
        return None
    return min(float(cores), max(1.0, statistics.median(shares)))


def physical_cores(cpus: Path = Path("/sys/devices/system/cpu")) -> int | None:
    """Return the number of physical cores among the usable logical cores; None if unknown."""
    try:
        return len(
            {
                (cpus / f"cpu{number}" / "topology" / "thread_siblings_list").read_text()
                for number in os.sched_getaffinity(0)
            }
        )
    except (OSError, AttributeError):
        return None
