"""Faults on purpose, for stoker and for its peers in the same harness: noticed, survived, wrong data, hung?

    python benchmarks/faults.py [--only load] [--seconds 20] [--seed 0] [--peers FOLDER]

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

import h5py
import numpy as np
import torch

import fault_machine
from fault_data import BATCH, OURS, SAMPLES, WIDTH, file_of, make_world, read_epoch, rows, ways
from fault_machine import NotApplicableError
from fault_remote import REMOTE, remote
from harness import publish
from stoker import stalls
from stoker.loader.loader import Loader
from stoker.packing import PackOptions, pack
from stoker.sources.arrays import ArraysSource
from stoker.store.reader import open_store
from stoker.train.checkpoint import Checkpoints
from stoker.train.trainer import Trainer

# -- files that are damaged before they are read ----------------------------------------------------


def patch(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x10]))


def data_place(path: Path) -> int:
    """Return a place inside the values: in the middle of the file; of a tar file, behind the header of a member."""
    middle = path.stat().st_size // 2
    return middle // 1024 * 1024 + 700 if path.suffix == ".tar" else middle


def instead(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


def swap(path: Path) -> None:
    others = [one for one in sorted(path.parent.glob(f"*{path.suffix}")) if one != path]
    if not others:
        with h5py.File(path, "w") as file:
            file["features"] = rows()[::-1].copy()
        return
    first, second = path.read_bytes(), others[0].read_bytes()
    path.write_bytes(second)
    others[0].write_bytes(first)


AT_REST: dict[str, Callable[[Path], object]] = {
    "a bit of the values flipped": lambda path: flip(path, data_place(path)),
    "4 KiB of the values zeroed": lambda path: patch(path, data_place(path), bytes(4096)),
    "values of noise": lambda path: patch(path, data_place(path), random.Random(0).randbytes(2048)),
    "cut in half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "cut by one byte": lambda path: os.truncate(path, path.stat().st_size - 1),
    "empty": lambda path: os.truncate(path, 0),
    "missing": Path.unlink,
    "a megabyte behind its end": lambda path: patch(path, path.stat().st_size, bytes(1 << 20)),
    "another signature": lambda path: patch(path, 0, b"notHDF5!"),
    "noise in its headers": lambda path: patch(path, 48, random.Random(1).randbytes(200)),
    "a folder in its place": lambda path: instead(path, Path.mkdir),
    "a link to nowhere": lambda path: instead(path, lambda at: at.symlink_to("nowhere")),
    "a link to itself": lambda path: instead(path, lambda at: at.symlink_to(at.name)),
    "a pipe in its place": lambda path: instead(path, os.mkfifo),
    "exchanged with another file": swap,
}

MIDWAY: dict[str, Callable[[Path], object]] = {
    "removed while it is read": Path.unlink,
    "cut while it is read": lambda path: os.truncate(path, path.stat().st_size // 3),
    "overwritten while it is read": lambda path: patch(
        path, path.stat().st_size * 3 // 4, bytes(4096)
    ),
}


# -- the machine -------------------------------------------------------------------------------------


def few_descriptors() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))


def little_memory() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + (96 << 20),) * 2)


def wrong_clock() -> None:
    real, begun = time.time, time.time()
    time.time = lambda: real() - 86400 * (real() - begun)  # type: ignore[assignment]


MACHINE = {
    "64 file descriptors": few_descriptors,
    "96 MiB of memory": little_memory,
    "a clock that runs backwards": wrong_clock,
}


def signal_a_worker(number: int) -> None:
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    if not children:
        raise NotApplicableError
    os.kill(int(children[0]), number)


def on_broken_disk(way: str, delay: float, folder: Path) -> dict[str, Any]:
    """Read an epoch from a disk with one bad sector, or one that takes `delay` seconds for every read."""
    fault_machine.own_mounts()
    bad = None if delay else file_of(way, folder)
    fault_machine.mount_broken(folder, folder.with_name("disk"), delay, bad)
    return read_epoch(way, folder.with_name("disk"))


def with_small_shm(way: str, folder: Path) -> dict[str, Any]:
    fault_machine.own_mounts()
    fault_machine.mount_memory(Path("/dev/shm"), "size=8k")
    return read_epoch(way, folder)


DISKS = {
    "a bad sector (EIO)": 0.0,
    "a slow disk, 0.2 s a read": 0.2,
    "a disk that never answers": 3600.0,
}


def small_disk(folder: Path, kind: str) -> Path:
    """Return a folder on a disk of its own: full, without inodes, or read-only."""
    fault_machine.own_mounts()
    place = folder / "disk"
    options = {"full": "size=24k", "no inodes": "size=8m,nr_inodes=3", "read-only": "size=8m"}[kind]
    fault_machine.mount_memory(place, options)
    if kind == "read-only":
        fault_machine.make_read_only(place)
    return place


SMALL = {"a disk of 24 KiB": "full", "no inodes left": "no inodes", "a read-only disk": "read-only"}


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


# -- training, with stoker ---------------------------------------------------------------------------


def trained(
    folder: Path,
    run: str,
    resume: bool = False,
    after: Callable[[str, int], None] | None = None,
    held: Path | None = None,
) -> list[float]:
    """Train two epochs; `after` is told each batch of "train" and "validate" with its number."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    counts = {"train": 0, "validate": 0}

    def unpack(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        phase = "train" if model.training else "validate"
        counts[phase] += 1
        if after:
            after(phase, counts[phase])
        values = batch["features"] / SAMPLES
        return values, values.mean(1, keepdim=True)

    with contextlib.ExitStack() as stack:
        loader = stack.enter_context(Loader(folder / "store", BATCH, "cpu", order="shuffled"))
        held_loader = held and stack.enter_context(
            Loader(held, BATCH, "cpu", data_bytes=SAMPLES * WIDTH * 2)
        )
        trainer = Trainer(
            model, loader, held_loader, torch.nn.functional.mse_loss, torch.optim.SGD(model.parameters(), 0.05), None,
            {"epochs": 2, "precision": "fp32", "capture": "off", "checkpoint_every_steps": 7},
            "cpu", run_dir=folder / run, unpack=unpack,
        )  # fmt: skip
        trainer.fit(resume=resume, quiet=True)
    return [float(value) for one in model.parameters() for value in one.detach().flatten()]


def killed_in(phase: str, number: int, folder: Path) -> dict[str, Any]:
    """End a run in its 40th training or 10th validation batch; the resumed run must be the unbroken one."""
    held = None
    if phase == "validate":
        held = folder / "held"
        shutil.copytree(folder / "store", held)
    expected = trained(folder, "unbroken", held=held)
    at = (phase, 40 if phase == "train" else 10)

    def hit(now: str, count: int) -> None:
        if (now, count) == at:
            os.kill(os.getpid(), number)

    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            trained(folder, "run", after=hit, held=held)
        os._exit(0)
    os.waitpid(child, 0)
    changed = trained(folder, "run", resume=True, held=held) != expected
    return {"lost": 0, "repeated": 0, "changed": int(changed)}


def damaged_while_validating(damage: Callable[[Path], object], folder: Path) -> dict[str, Any]:
    """Damage the validation store after its first batch of the second epoch: values that differ must raise."""
    held = folder / "held"
    shutil.copytree(folder / "store", held)
    expected = trained(folder, "unbroken", held=held)
    shard = sorted(held.glob("*.h5"))[-1]

    def hit(now: str, count: int) -> None:
        if (now, count) == ("validate", SAMPLES // BATCH + 1):
            time.sleep(0.02)  # the times of files move with the kernel's clock
            damage(shard)

    weights = trained(folder, "run", after=hit, held=held)
    # Weights do not depend on validation: a run that ends must have read what was there, or its old file.
    readable = damage is Path.unlink
    return {"lost": 0, "repeated": 0, "changed": int(weights != expected or not readable)}


def validated_on_broken_disk(folder: Path) -> dict[str, Any]:
    fault_machine.own_mounts()
    bad = file_of(OURS[0], folder)
    fault_machine.mount_broken(folder / "store", folder / "held", bad=bad)
    trained(folder, "run", held=folder / "held")
    return {"lost": 0, "repeated": 0, "changed": 1}


VALIDATION: dict[str, Callable[[Path], object]] = {
    "validation data removed": Path.unlink,
    "validation data cut": lambda path: os.truncate(path, path.stat().st_size // 3),
    "validation data overwritten": lambda path: patch(path, path.stat().st_size // 2, bytes(4096)),
}


def damaged_in_training(folder: Path) -> dict[str, Any]:
    flip(file_of(OURS[0], folder), data_place(file_of(OURS[0], folder)))
    trained(folder, "run")
    return {"lost": 0, "repeated": 0, "changed": 1}


# -- packing, with stoker ------------------------------------------------------------------------


def packed(
    folder: Path, damage: Callable[[Path], object] | None = None, limit: int = 0
) -> dict[str, Any]:
    path = folder / "features.npy"
    if damage:
        damage(path)
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    pack(ArraysSource((path,), part_bytes=SAMPLES * WIDTH * 2), folder / "new", PackOptions(jobs=1))
    return {"lost": 0, "repeated": 0, "changed": int(not holds_rows(folder / "new"))}


def packed_on(kind: str, folder: Path) -> dict[str, Any]:
    out = small_disk(folder, kind) / "new"
    source = ArraysSource((folder / "features.npy",), part_bytes=SAMPLES * WIDTH * 2)
    pack(source, out, PackOptions(jobs=1))
    return {"lost": 0, "repeated": 0, "changed": int(not holds_rows(out))}


def holds_rows(path: Path) -> bool:
    """Return whether a store is sound and holds the samples."""
    with open_store(path) as store:
        sound = not store.verify().problems
        return sound and np.array_equal(store.read_rows("features", 0, store.num_samples), rows())


def packed_from_broken_disk(delay: float, folder: Path) -> dict[str, Any]:
    fault_machine.own_mounts()
    (folder / "inputs").mkdir()
    shutil.copy(folder / "features.npy", folder / "inputs")
    bad = None if delay else folder / "inputs/features.npy"
    fault_machine.mount_broken(folder / "inputs", folder / "disk", delay, bad)
    pack(ArraysSource((folder / "disk/features.npy",)), folder / "new", PackOptions(jobs=1))
    return {"lost": 0, "repeated": 0, "changed": int(not holds_rows(folder / "new"))}


def saved_on(way: str, kind: str, folder: Path) -> dict[str, Any]:
    place = small_disk(folder, kind)
    checkpoint_of(way, place, 1)
    return resumed(way, place)


def resumed_from_broken_disk(way: str, folder: Path) -> dict[str, Any]:
    (folder / "saved").mkdir()
    bad = checkpoint_of(way, folder / "saved", 1)
    fault_machine.own_mounts()
    fault_machine.mount_broken(folder / "saved", folder / "disk", bad=bad)
    return resumed(way, folder / "disk")


def killed_while_packing(seed: int, folder: Path) -> dict[str, Any]:
    rng = random.Random(seed)
    for _ in range(5):
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                packed(folder)
            os._exit(0)
        time.sleep(rng.uniform(0.0, 0.1))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return packed(folder)


def onto_own_files(folder: Path) -> dict[str, Any]:
    (folder / "new").mkdir()
    (folder / "new" / "thesis.tex").write_text("mine")
    try:
        return packed(folder)
    finally:
        if not (folder / "new" / "thesis.tex").exists():
            raise RuntimeError("a file of the user's is gone")


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
    for fault, damage in MANIFEST.items():
        found.append(("load", fault, OURS[0], partial(with_manifest, damage)))
    for way in ("stoker checkpoint", "torch.save"):
        found += [
            ("resume", fault, way, partial(damaged_checkpoint, way, fault)) for fault in DAMAGED
        ]
        found.append(("resume", "a bad sector (EIO)", way, partial(resumed_from_broken_disk, way)))
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
            "" if None in times else ", ".join(f"{one:.1f} s" for one in times),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


OUTCOMES = ("named", "error", "survived", "wrong", "waits", "hung", "crashed")


def main() -> None:
    parser = argparse.ArgumentParser(description="Faults on purpose, for stoker and its peers.")
    parser.add_argument(
        "--only", default="", help="a phase: load, train, validate, save, resume, pack, remote"
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="limit of a case")
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
    for module in ("webdataset", "streaming", "litdata", "torchdata"):
        with contextlib.suppress(ImportError):
            importlib.import_module(module)  # before the clock of a case runs
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
