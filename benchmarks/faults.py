"""Faults on purpose, for stoker and for its peers in the same harness: noticed, survived, wrong data, hung?

    python benchmarks/faults.py [--only load] [--seconds 30] [--seed 0] [--peers FOLDER]

`--peers` is a folder with litdata, mosaicml-streaming, webdataset and torchdata (`pip install --target`): peers that
are not installed are left out.

Enters: nothing; 600 samples are made, each holding its own number. Every case is a fork of one process that has torch
loaded: it gets a fresh copy of the files, the fault, and a time limit. Leaves: JSON with one entry per case. Outcomes:

- `named`: an error that names the file, the process or the sample concerned;
- `error`: another error;
- `survived`: every sample came once with its own values, or the resumed run is the unbroken one;
- `wrong`: it ended without an error, and samples were lost, repeated or changed;
- `waits`: it was still there at the limit, and had said which file it waits for; `hung`: it had not;
- `crashed`: a signal ended it.

Times to an error are wall time on the machine as it was; `load_average` says how busy that machine was.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import math
import os
import random
import re
import resource
import select
import shutil
import signal
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import fault_machine
import fault_ranks
from fault_data import OURS, SAMPLES, file_of, make_world, read_epoch, ways
from fault_files import (
    AT_REST,
    DISKS,
    MACHINE,
    MIDWAY,
    SMALL,
    data_place,
    flip,
    instead,
    on_broken_disk,
    signal_a_worker,
    small_disk,
    with_small_shm,
)  # fmt: skip
from fault_machine import NotApplicableError
from fault_memory import BUFFERS, flipped_in_buffer
from fault_packing import (
    killed_while_packing,
    onto_own_files,
    packed,
    packed_from_broken_disk,
    packed_on,
)
from fault_phases import LIMITS, all_phases
from fault_remote import REMOTE, remote
from fault_training import (
    VALIDATION,
    damaged_in_training,
    damaged_while_validating,
    killed_in,
    resumed_over_changed,
    validated_on_broken_disk,
)  # fmt: skip
from harness import publish
from stoker import stalls
from stoker.train.checkpoint import Checkpoints

# -- checkpoints -------------------------------------------------------------------------------------


class Evil:
    def __reduce__(self) -> Any:
        return (os.mkdir, (os.environ["FAULTS_EVIL"],))


def checkpoint_of(way: str, folder: Path, step: int, limit: int = 0) -> Path:
    state = {"w": torch.full((20_000,), float(step)), "step": step}
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if way == "torch.save":
        torch.save(state, folder / "last.pt")
        return folder / "last.pt"
    return Checkpoints(folder / "run").save(state, step, 0).path


def resumed(way: str, folder: Path, least: int = 1) -> dict[str, Any]:
    """Load the newest checkpoint: its values must all be those of its step."""
    if way == "torch.save":
        state = torch.load(folder / "last.pt", weights_only=True)
    else:
        state = Checkpoints(folder / "run").load().state
    whole = bool((state["w"] == state["step"]).all()) and state["step"] >= least
    return {"lost": 0, "repeated": 0, "changed": int(not whole)}


DAMAGED = {
    "a bit of the weights flipped": lambda path: flip(path, data_place(path)),
    "4 KiB of the weights zeroed": AT_REST["4 KiB of the values zeroed"],
    "cut in half": AT_REST["cut in half"],
    "cut by one byte": AT_REST["cut by one byte"],
    "empty": AT_REST["empty"],
    "a pickle that runs code": lambda path: (
        path.unlink(),
        torch.save({"w": Evil(), "step": 1}, path),
    ),
    "a folder in its place": AT_REST["a folder in its place"],
}


def damaged_checkpoint(way: str, fault: str, folder: Path) -> dict[str, Any]:
    os.environ["FAULTS_EVIL"] = str(folder / "evil")
    path = checkpoint_of(way, folder, 1)
    DAMAGED[fault](path)
    try:
        return resumed(way, folder)
    finally:
        if (folder / "evil").exists():
            raise RuntimeError("code of the checkpoint was run")


def full_disk_while_saving(way: str, folder: Path) -> dict[str, Any]:
    checkpoint_of(way, folder, 1)
    with contextlib.suppress(Exception):
        checkpoint_of(way, folder, 2, limit=20_000)
    return resumed(way, folder)


def killed_while_saving(way: str, seed: int, folder: Path) -> dict[str, Any]:
    """Kill a saving process at eight random moments; what is there must load every time."""
    rng = random.Random(seed)
    checkpoint_of(way, folder, 1)
    for _ in range(8):
        child = os.fork()
        if child == 0:
            for step in range(2, 10_000):
                checkpoint_of(way, folder, step)
        time.sleep(rng.uniform(0.01, 0.08))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        found = resumed(way, folder)
        if found["changed"]:
            return found
    return found


def saved_on(way: str, kind: str, folder: Path) -> dict[str, Any]:
    place = small_disk(folder, kind)
    checkpoint_of(way, place, 1)
    return resumed(way, place)


def saved_within(way: str, limit: Callable[[], None], folder: Path) -> dict[str, Any]:
    checkpoint_of(way, folder, 1)
    limit()
    checkpoint_of(way, folder, 2)
    return resumed(way, folder, least=2)


def resumed_within(way: str, limit: Callable[[], None], folder: Path) -> dict[str, Any]:
    checkpoint_of(way, folder, 1)
    limit()
    return resumed(way, folder)


def resumed_from_broken_disk(way: str, delay: float, folder: Path) -> dict[str, Any]:
    (folder / "saved").mkdir()
    bad = checkpoint_of(way, folder / "saved", 1)
    fault_machine.own_mounts()
    fault_machine.mount_broken(folder / "saved", folder / "disk", delay, None if delay else bad)
    return resumed(way, folder / "disk")


MANIFEST: dict[str, Callable[[Path], object]] = {
    "manifest cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "manifest missing": Path.unlink,
    "manifest a pipe": lambda path: instead(path, os.mkfifo),
    "manifest edited": lambda path: path.write_text(
        path.read_text().replace(str(SAMPLES), str(SAMPLES - 1))
    ),
    "manifest of 100,000 brackets": lambda path: path.write_text("[" * 100_000),
    "manifest with a path out of its folder": lambda path: path.write_text(
        path.read_text().replace("shard-", "../shard-")
    ),
}


# -- the cases ---------------------------------------------------------------------------------------

Case = tuple[str, str, str, Callable[[Path], dict[str, Any]]]


def all_cases(seed: int) -> list[Case]:
    """Return phase, fault, way and what to run."""
    found: list[Case] = []

    def at_rest(way: str, damage: Callable[[Path], object], folder: Path) -> dict[str, Any]:
        damage(file_of(way, folder))
        return read_epoch(way, folder)

    def midway(way: str, damage: Callable[[Path], object], folder: Path) -> dict[str, Any]:
        return read_epoch(way, folder, lambda: damage(file_of(way, folder)))

    def with_manifest(damage: Callable[[Path], object], folder: Path) -> dict[str, Any]:
        damage(folder / "store/store.json")
        return read_epoch(OURS[0], folder)

    def in_machine(way: str, prepare: Callable[[], None], folder: Path) -> dict[str, Any]:
        prepare()
        return read_epoch(way, folder)

    for way in ways():
        found += [
            ("load", fault, way, partial(on_broken_disk, way, delay))
            for fault, delay in DISKS.items()
        ]
        found.append(("load", "8 KiB of /dev/shm", way, partial(with_small_shm, way)))
        found += [
            ("load", fault, way, partial(at_rest, way, damage)) for fault, damage in AT_REST.items()
        ]
        found += [
            ("load", fault, way, partial(midway, way, damage)) for fault, damage in MIDWAY.items()
        ]
        found += [
            ("load", fault, way, partial(in_machine, way, prepare))
            for fault, prepare in MACHINE.items()
        ]
        for fault, number in (
            ("a worker is killed", signal.SIGKILL),
            ("a worker is stopped", signal.SIGSTOP),
        ):
            if "2 workers" in way:
                hit = partial(signal_a_worker, number)
                found.append(
                    (
                        "load",
                        fault,
                        way,
                        lambda folder, way=way, hit=hit: read_epoch(way, folder, hit),
                    )
                )
    for way in OURS:
        found += [
            ("load", fault, way, partial(flipped_in_buffer, way, is_checked))
            for fault, is_checked in BUFFERS.items()
        ]
    found += [
        ("resume", "data changed since, times set back", way, partial(resumed_over_changed, way))
        for way in OURS
    ]
    for way in fault_ranks.WAYS:
        found += [
            ("train", fault, way, partial(fault_ranks.lost_rank, way, fault))
            for fault in fault_ranks.RANK_FAULTS
        ]
    for fault, damage in MANIFEST.items():
        found.append(("load", fault, OURS[0], partial(with_manifest, damage)))
    for way in ("stoker checkpoint", "torch.save"):
        found += [
            ("resume", fault, way, partial(damaged_checkpoint, way, fault)) for fault in DAMAGED
        ]
        found += [
            ("resume", fault, way, partial(resumed_from_broken_disk, way, delay))
            for fault, delay in DISKS.items()
        ]
        for fault, limit in LIMITS.items():
            found.append(("save", fault, way, partial(saved_within, way, limit)))
            found.append(("resume", fault, way, partial(resumed_within, way, limit)))
        found += [
            ("save", fault, way, partial(saved_on, way, kind)) for fault, kind in SMALL.items()
        ]
        found.append(("save", "the disk is full", way, partial(full_disk_while_saving, way)))
        found.append(("save", "killed, eight times", way, partial(killed_while_saving, way, seed)))
    for phase in ("train", "validate"):
        for fault, number in (
            ("killed", signal.SIGKILL),
            ("terminated", signal.SIGTERM),
            ("interrupted", signal.SIGINT),
        ):
            found.append((phase, fault, "stoker trainer", partial(killed_in, phase, number)))
    found.append(("train", "a bit of the values flipped", "stoker trainer", damaged_in_training))
    found += [
        ("validate", fault, "stoker trainer", partial(damaged_while_validating, damage))
        for fault, damage in VALIDATION.items()
    ]
    found.append(("validate", "a bad sector (EIO)", "stoker trainer", validated_on_broken_disk))
    found.append(("pack", "killed, five times", "stoker pack", partial(killed_while_packing, seed)))
    found.append(("pack", "the disk is full", "stoker pack", partial(packed, limit=30_000)))
    found += [
        ("pack", fault, "stoker pack", partial(packed_on, kind)) for fault, kind in SMALL.items()
    ]
    found += [
        ("pack", f"input on {fault}", "stoker pack", partial(packed_from_broken_disk, delay))
        for fault, delay in DISKS.items()
    ]
    found.append(("pack", "a folder of the user's as OUT", "stoker pack", onto_own_files))
    found += [
        ("pack", f"input {fault}", "stoker pack", partial(packed, damage=AT_REST[fault]))
        for fault in (
            "cut in half",
            "cut by one byte",
            "empty",
            "missing",
            "a folder in its place",
            "a pipe in its place",
        )
    ]
    found += all_phases()
    if importlib.util.find_spec("aiohttp") and importlib.util.find_spec("fsspec"):
        found += [("remote", fault, "stoker, http", partial(remote, fault)) for fault in REMOTE]
    return found


# -- running -----------------------------------------------------------------------------------------


def texts_of(error: BaseException | None) -> str:
    """Return what an error and those that it was made from say."""
    said, seen = "", set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        said += f"{type(error).__name__}: {error}\n"
        error = error.__cause__ or error.__context__
    return said


def child(run: Callable[[Path], dict[str, Any]], folder: Path, out: int) -> None:
    os.setsid()
    quiet = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(quiet, number)
    warnings.simplefilter("ignore")
    stalls.WAIT_SECONDS = 3.0  # 30 in real life
    stalls.start_watch(lambda text: os.write(out, json.dumps({"waits": text}).encode() + b"\n"))
    try:
        answer = run(folder)
    except NotApplicableError:
        answer = {"not_applicable": True}
    except BaseException as error:  # noqa: BLE001  that is what is measured
        answer = {"error": texts_of(error)[:2000], "where": traceback.format_exc()[-400:]}
    os.write(out, json.dumps(answer).encode() + b"\n")
    os._exit(0)


def run_case(case: Case, world: Path, seconds: float) -> dict[str, Any]:
    """Run one case in a fork with a copy of the world; return its outcome."""
    phase, fault, way, run = case
    with tempfile.TemporaryDirectory(prefix="stoker-faults-") as name:
        folder = Path(name, "w")
        shutil.copytree(world, folder)
        ours, theirs = os.pipe()
        began = time.monotonic()
        pid = os.fork()
        if pid == 0:
            os.close(ours)
            child(run, folder, theirs)
        os.close(theirs)
        said = b""
        while (left := began + seconds - time.monotonic()) > 0:
            if not select.select([ours], [], [], left)[0]:
                break
            more = os.read(ours, 65536)
            said += more
            if not more:
                break
        taken = time.monotonic() - began
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.close(ours)
    entry: dict[str, Any] = {"phase": phase, "fault": fault, "way": way, "seconds": round(taken, 3)}
    answers = [json.loads(line) for line in said.splitlines()]
    waits = [answer["waits"] for answer in answers if "waits" in answer]
    if len(waits) == len(answers):
        if taken < seconds:
            return entry | {"outcome": "crashed", "status": status}
        if waits:
            return entry | {"outcome": "waits", "said": scrubbed(waits[0])}
        return entry | {"outcome": "hung", "status": status}
    return entry | judged(answers[-1], folder)


def judged(answer: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the outcome of an answer, and what an error said."""
    if answer.get("not_applicable"):
        return {"outcome": "n/a"}
    if "error" in answer:
        names = (
            "plain.h5", "store", "shard", "last.pt", "step-0", "features.npy", "worker (pid", "/new", "/run", ".tar",
            ".mds", "chunk-0", "/lit", "/disk", "/held",
        )  # fmt: skip
        named = any(name in answer["error"] for name in names)
        said = scrubbed(answer["error"].replace(str(folder), "…"))
        return {"outcome": "named" if named else "error", "said": said[:300]}
    bad = answer["lost"] or answer["repeated"] or answer["changed"]
    return {"outcome": "wrong" if bad else "survived", **answer}


def scrubbed(text: str) -> str:
    """Return a text without the places of this machine."""
    return re.sub(
        r"/\S*site-packages", "site-packages", re.sub(r"/tmp/stoker-faults-\w+", "…", text)
    )


def summary(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Return per way how often each outcome came, and the times to an error."""
    found: dict[str, Any] = {}
    for way in dict.fromkeys(entry["way"] for entry in entries):
        own = [entry for entry in entries if entry["way"] == way and entry["outcome"] != "n/a"]
        times = sorted(entry["seconds"] for entry in own if entry["outcome"] in ("named", "error"))
        found[way] = {
            "faults": len(own),
            **{word: sum(entry["outcome"] == word for entry in own) for word in OUTCOMES},
            "lost": sum(entry.get("lost", 0) for entry in own),
            "repeated": sum(entry.get("repeated", 0) for entry in own),
            "changed": sum(entry.get("changed", 0) for entry in own),
            "error_p50_seconds": round(statistics.median(times), 3) if times else None,
            "error_p99_seconds": times[math.ceil(0.99 * len(times)) - 1] if times else None,
            "error_worst_seconds": times[-1] if times else None,
        }
    return found


def table(result: dict[str, Any]) -> str:
    """Return the summary as the table of docs/faults.md."""
    head = ["", *OUTCOMES, "samples lost, repeated, changed", "error after (p50, p99, worst)"]
    lines = [f"| {' | '.join(head)} |", f"|---|{'---:|' * (len(head) - 1)}"]
    for way, facts in result["summary"].items():
        times = [facts[f"error_{word}_seconds"] for word in ("p50", "p99", "worst")]
        cells = [
            way,
            *(str(facts[word] or "") for word in OUTCOMES),
            ", ".join(str(facts[word]) for word in ("lost", "repeated", "changed")),
            "" if None in times else ", ".join(f"{one:.2f} s" for one in times),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


OUTCOMES = ("named", "error", "survived", "wrong", "waits", "hung", "crashed")


def main() -> None:
    parser = argparse.ArgumentParser(description="Faults on purpose, for stoker and its peers.")
    parser.add_argument(
        "--only", default="", help="a phase: load, train, validate, save, resume, pack, remote"
    )
    parser.add_argument("--seconds", type=float, default=30.0, help="limit of a case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", type=Path, default=None, help="a file instead of benchmarks/results"
    )
    parser.add_argument("--peers", type=Path, default=None, help="a folder of pip install --target")
    parser.add_argument("--way", default="", help="only this loader")
    parser.add_argument("--fault", default="", help="only this fault")
    parser.add_argument(
        "--into", type=Path, default=None, help="replace the cases in this result, and publish it"
    )
    options = parser.parse_args()
    if options.peers:
        sys.path.append(str(options.peers))
    ways()  # imports peers, before the clock of a case runs
    importlib.import_module("torch._dynamo")  # ranks import it
    torch.set_num_threads(1)
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)  # imports a second of torch
    entries = []
    with tempfile.TemporaryDirectory(prefix="stoker-faults-") as name:
        world = Path(name)
        make_world(world)
        for case in all_cases(options.seed):
            asked = zip((options.only, options.fault, options.way), case, strict=False)
            if all(one in ("", given) for one, given in asked):
                entries.append(run_case(case, world, options.seconds))
                last = entries[-1]
                print(
                    f"{last['outcome']:9} {last['seconds']:7.2f} s  {last['phase']:7} {last['fault']:40} {last['way']}",
                    flush=True,
                )
    if options.into:
        old = json.loads(options.into.read_text("utf-8"))
        new = {(entry["phase"], entry["fault"], entry["way"]): entry for entry in entries}
        was = old.get("result", old)["cases"]
        entries = [new.pop((one["phase"], one["fault"], one["way"]), one) for one in was] + [
            *new.values()
        ]
    result = {
        "samples": SAMPLES, "limit_seconds": options.seconds, "load_average": os.getloadavg()[1],
        "summary": summary(entries), "cases": entries,
    }  # fmt: skip
    if options.out:
        options.out.write_text(json.dumps(result, indent=1))
    else:
        publish("faults", result)


if __name__ == "__main__":
    main()
