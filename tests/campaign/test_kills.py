"""Kills at random moments of pack (all kinds), train, tune and doctor: nothing is left, nothing is lost.

Each trial starts a command in a session of its own, ends it by a random signal to the process or to its
group at a random moment, and looks after two seconds (times four, for a busy machine) at processes,
`/dev/shm` and the temporary folder. Then the same command runs to its end, and what it made must be what an
unbroken run made. `STOKER_KILLS` sets the number of trials (200), `STOKER_SEED` the seed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from molecule_makers import SMILES
from run_makers import make_store

pytestmark = [pytest.mark.slow, pytest.mark.timeout(4 * 3600)]
KILLS = int(os.environ.get("STOKER_KILLS", "200"))
SEED = int(os.environ.get("STOKER_SEED", "0"))
SIGNALS = [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT]
PATIENCE_SECONDS = 2.0 * 4
HAS_RDKIT = importlib.util.find_spec("rdkit") is not None

CONFIG = """\
recipe: {name: tabular, store: store, options: {hidden: [16]}}
training: {epochs: 6, batch_size: 16, lr: 0.003}
run: {dir: run}
"""
SCRIPT = """\
import torch, time
from torch.utils.data import DataLoader, TensorDataset
if __name__ == "__main__":
    data = TensorDataset(torch.randn(4000, 32), torch.randn(4000, 1))
    model = torch.nn.Linear(32, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for epoch in range(40):
        for x, y in DataLoader(data, 32, num_workers=2):
            optimizer.zero_grad()
            ((model(x) - y) ** 2).mean().backward()
            optimizer.step()
            time.sleep(0.002)
"""


@dataclass(frozen=True)
class Job:
    """A command, what it takes, and what it makes (None: nothing that is kept)."""

    name: str
    words: tuple[str, ...]
    seconds: float
    made: str | None


def make_inputs(folder: Path) -> None:
    rng = np.random.default_rng(0)
    np.savez(folder / "x.npz", features=rng.normal(size=(200_000, 40)).astype("f4"))
    lines = "\n".join(
        ",".join(f"{value:.4f}" for value in row) for row in rng.normal(size=(60_000, 12))
    )
    (folder / "x.csv").write_text(",".join(f"c{n}" for n in range(12)) + "\n" + lines + "\n")
    for kind in ("cats", "dogs"):
        (folder / "photos" / kind).mkdir(parents=True)
        for n in range(150):
            pixels = rng.integers(0, 255, (96, 96, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / "photos" / kind / f"{n}.png")
    for kind in ("images", "masks"):
        (folder / kind).mkdir()
        for n in range(150):
            shape, most = ((96, 96, 3), 255) if kind == "images" else ((96, 96), 3)
            Image.fromarray(rng.integers(0, most, shape, dtype=np.uint8)).save(
                folder / kind / f"{n}.png"
            )
    from stoker.demo.story import make_bars

    make_bars(folder / "bars", 9, 0)
    records = [
        f"Name: r{n}\nSMILES: {SMILES[n % len(SMILES)]}\nNum Peaks: 2\n{40 + n % 50} 10\n91 {n % 90 + 1}\n"
        for n in range(1500)
    ]
    (folder / "x.msp").write_text("\n".join(records))
    make_store("tabular", folder / "store").close()
    (folder / "c.yaml").write_text(CONFIG)
    (folder / "train.py").write_text(SCRIPT)


JOBS = [
    Job("arrays", ("pack", "arrays", "x.npz", "OUT", "-j", "2"), 3, "OUT"),
    Job("table", ("pack", "table", "x.csv", "OUT", "-j", "2", "--repair", "robust"), 4, "OUT"),
    Job("images", ("pack", "images", "photos", "OUT", "--size", "64x64", "-j", "2"), 4, "OUT"),
    Job("segmentation", ("pack", "segmentation", "OUT", "--images", "images", "--masks", "masks", "-j", "2"), 4, "OUT"),
    Job("bars", ("pack", "bars", "bars", "OUT", "--windows", "M1=64,M5=32", "-j", "2"), 3, "OUT"),
    *([Job("massspec", ("pack", "massspec", "OUT", "--msp", "x.msp", "-j", "2"), 5, "OUT")] if HAS_RDKIT else []),
    Job("train", ("train", "--config", "c.yaml", "--device", "cpu"), 6, "run"),
    Job("tune", ("tune", "--config", "c.yaml", "--device", "cpu", "--seconds", "0.3"), 8, None),
    Job("doctor", ("doctor", "--steps", "60", "--", sys.executable, "train.py"), 12, None),
]  # fmt: skip


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kills")
    make_inputs(folder)
    (folder / "tmp").mkdir()
    reference = {}
    for job in JOBS:
        if job.made:
            done = run(folder, job)
            assert done.returncode == 0, done.stderr.decode()[-2000:]
            reference[job.name] = content(folder / job.made)
            shutil.rmtree(folder / job.made)
    return folder, reference


def run(folder: Path, job: Job, *more: str) -> subprocess.CompletedProcess[bytes]:
    words = [sys.executable, "-m", "stoker", *job.words[:1], *more, *job.words[1:]]
    return subprocess.run(
        words, cwd=folder, env=variables(folder), capture_output=True, check=False
    )


def variables(folder: Path) -> dict[str, str]:
    return {**os.environ, "TMPDIR": str(folder / "tmp"), "OMP_NUM_THREADS": "1"}


def content(made: Path) -> object:
    if (made / "store.json").exists():
        return {path.name: path.read_bytes() for path in sorted(made.iterdir())}
    steps = sorted(made.glob("step-*.pt"))
    loaded = torch.load(steps[-1], weights_only=True)["state"]["model"]
    return steps[-1].name, {name: value.tolist() for name, value in loaded.items()}


def of_trial(token: str) -> list[str]:
    """Command lines of processes that carry the trial's token in their environment."""
    entry = f"STOKER_TRIAL={token}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if entry in (folder / "environ").read_bytes().split(b"\0"):
                found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:100])
    return found


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def test_nothing_outlives_a_command_and_nothing_is_lost(world):
    folder, reference = world
    rng = random.Random(SEED)
    tally: dict[str, int] = {}
    for trial in range(KILLS):
        job = JOBS[trial % len(JOBS)]
        number, group = rng.choice(SIGNALS), rng.random() < 0.5
        before, token = shared_memory(), f"{os.getpid()}-{trial}"
        words = [sys.executable, "-m", "stoker", *job.words]
        process = subprocess.Popen(
            words, cwd=folder, env=variables(folder) | {"STOKER_TRIAL": token}, start_new_session=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        time.sleep(rng.uniform(0.05, job.seconds))
        with contextlib.suppress(ProcessLookupError):
            (os.killpg if group else os.kill)(process.pid, number)
        # A run that saves, or a script that is asked to end, may take a moment; a kill may not.
        process.wait(60)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            left = of_trial(token)
            # torch keeps compiled kernels there, for every process of this user.
            files = [
                path for path in (folder / "tmp").iterdir() if "torchinductor" not in path.name
            ]
            shared = shared_memory() - before
            if not left and not files and not shared:
                break
            assert time.monotonic() < deadline, (
                f"{trial} {job.name} {number} {group} {left} {files} {shared}"
            )
            time.sleep(0.05)
        if job.made is not None:
            finish(folder, job)
            assert content(folder / job.made) == reference[job.name], (trial, job.name)
            assert not list(folder.glob("*.partial")), (trial, job.name)
            shutil.rmtree(folder / job.made)
        tally[f"{job.name} {signal.Signals(number).name}"] = (
            tally.get(f"{job.name} {signal.Signals(number).name}", 0) + 1
        )
    print(json.dumps({"kills": KILLS, "seed": SEED, "tally": tally}))


def finish(folder: Path, job: Job) -> None:
    saved = job.name == "train" and list((folder / "run").glob("step-*.pt"))
    if job.name == "train" and not saved:
        shutil.rmtree(folder / "run", ignore_errors=True)
    done = run(folder, job, *(["--resume"] if saved else []))
    assert done.returncode == 0, done.stderr.decode()[-2000:]
