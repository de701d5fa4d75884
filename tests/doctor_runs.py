"""Running scripts under the doctor's probe from one fork of this process, for the tests of the doctor."""

from __future__ import annotations

import os
from pathlib import Path

import forked_scripts
from forked import Forked
from stoker.doctor.attach import probe_variables
from stoker.doctor.measurements import MachineFacts, Measurements
from stoker.doctor.transcript import read_folder
from stoker.doctor.transcript_measures import measure

CASES = Path(__file__).parent / "doctor_cases"


def cores() -> int:
    return len(os.sched_getaffinity(0))


def run_warm(names, steps, folder, crashing=frozenset()) -> dict[str, Measurements]:
    """Run cases one after the other, and return what the probe saw of each."""
    folder.mkdir()
    words = [str(CASES / "warm.py"), str(steps), *names]
    variables = {**probe_variables(os.environ, folder), "OMP_NUM_THREADS": "1"}
    read, write = os.pipe()

    def be_warm():
        os.dup2(write, 1)
        os.close(write)
        forked_scripts.run(words, variables)

    process = Forked(words, be_warm)
    os.close(write)
    with open(read) as said:  # noqa: PTH123
        lines = said.read().splitlines()
    assert process.wait(200) == 0
    processes = read_folder(folder)
    seen = {}
    for name, pid, status in (line.split() for line in lines):
        assert (status == "0") == (name not in crashing), name
        # A case, the processes it started, and their own.
        family = {int(pid)}
        for _ in range(2):
            family |= {one.state["pid"] for one in processes if one.state["ppid"] in family}
        own = [one for one in processes if one.state["pid"] in family]
        seen[name] = measure(own, name, MachineFacts(cores=cores(), ram_free_bytes=8 << 30))
    return seen
