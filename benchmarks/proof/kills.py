"""Two thousand kills at random moments of pack, train, validate and save: is anything lost, repeated or changed?

    python benchmarks/proof/kills.py [--kills 2000] [--seconds 3600] [--jobs 2] [--seed 0]

Enters: nothing; 600 samples are made, each holding its own number. A trial forks a job from a process that has torch
loaded, ends it with SIGKILL at a random moment of its phase, and does the same job again, with `resume` where a
checkpoint was left. Leaves: counts and seconds in `benchmarks/results/proof_kills-*.json`, from which it goes on.
Costs: about a second of CPU for a kill.

- pack: at any moment; packed again, every file must have the bytes of an unbroken pack, and nothing may be left beside.
- train: at any moment of two epochs with shuffled samples, momentum, a schedule and a checkpoint every 3 steps.
- validate: in the first or second validation of that run.
- save: in any of its saves.

After train, validate and save the run goes on to its end: weights and optimiser state must be bit-equal to those of an
unbroken run, and every sample of the epoch in which it was killed must have been trained on exactly once: before
the checkpoint that it went on from, or after it (both processes write down the samples of every step).
The seconds of recovery go from the start of the second process's job to its first new step, or to the end of pack.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import struct
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from campaign import Campaign, Family, make_parser
from stoker.loader.loader import Loader
from stoker.packing import PackOptions, pack
from stoker.sources.arrays import ArraysSource
from stoker.train.checkpoint import Checkpoints
from stoker.train.trainer import Trainer

SAMPLES, WIDTH, BATCH, EPOCHS = 600, 32, 20, 2
PHASES = ("pack", "train", "validate", "save")
_STEP = struct.Struct(f"<qqd{BATCH}q")


def make_inputs(folder: Path) -> None:
    numbers = np.arange(SAMPLES, dtype="f4")[:, None]
    np.save(folder / "features.npy", numbers + np.arange(WIDTH, dtype="f4") / 1024)


def packed(folder: Path, out: Path) -> None:
    source = ArraysSource((folder / "features.npy",), part_bytes=SAMPLES * WIDTH)
    pack(source, out, PackOptions(jobs=1))


def trained(folder: Path, run: Path, log: Path, tell: Callable[[str], None], resume: bool) -> None:
    """Train; write down epoch, step, time and samples of every step, and at the end what came out."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    # The log is appended by one write a step: a kill leaves whole entries.
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def unpack(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        values = batch["features"] / SAMPLES
        if model.training:
            numbers = batch["features"][:, 0].to(torch.int64).tolist()
            entry = _STEP.pack(loader.epoch, batch.step, time.monotonic(), *numbers)
            os.write(file, entry)
        else:
            tell("validate")
        return values, values.mean(1, keepdim=True)

    real = Checkpoints.save

    def save(self: Checkpoints, *given: Any, **named: Any) -> Any:
        tell("save")
        return real(self, *given, **named)

    Checkpoints.save = save  # type: ignore[method-assign]
    shared = {"order": "shuffled", "seed": 3}
    with (
        Loader(folder / "store", BATCH, "cpu", **shared) as loader,
        Loader(folder / "store", 50, "cpu") as held,
    ):
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * SAMPLES // BATCH)
        trainer = Trainer(
            model, loader, held, torch.nn.functional.mse_loss, optimizer, scheduler,
            {"epochs": EPOCHS, "precision": "fp32", "capture": "off", "checkpoint_every_steps": 3, "keep_last": 2},
            "cpu", run_dir=run, unpack=unpack,
        )  # fmt: skip
        trainer.fit(resume=resume, quiet=True)
        made = {
            "weights": [value.tolist() for value in model.state_dict().values()],
            "momentum": [entry["momentum_buffer"].tolist() for entry in optimizer.state.values()],
            "digest": loader.order_digest(),
        }
    (log.with_suffix(".made")).write_text(json.dumps(made))


def entries(log: Path) -> list[tuple[int, int, float, tuple[int, ...]]]:
    raw = log.read_bytes() if log.exists() else b""
    whole = len(raw) // _STEP.size * _STEP.size
    return [
        (epoch, step, at, tuple(rest)) for epoch, step, at, *rest in _STEP.iter_unpack(raw[:whole])
    ]


def forked(
    job: Callable[[Callable[[str], None]], None], wanted: str, count: int, seconds: float
) -> tuple[bool, float]:
    """Run a job in a fork; kill it `seconds` after it has told `wanted` for the count-th time ("" is its start).

    Return whether the kill came before its end, and when it was started.
    """
    ours, theirs = os.pipe()
    began = time.monotonic()
    pid = os.fork()
    if pid == 0:
        told = [0]

        def tell(what: str) -> None:
            told[0] += what == wanted
            if what == wanted and told[0] == count:
                os.write(theirs, b"x")

        try:
            job(tell)
        except BaseException:  # noqa: BLE001  the trial looks at what was made
            import traceback

            Path(os.environ.get("KILLS_ERRORS", "/dev/null")).write_text(traceback.format_exc())
            os._exit(1)
        os._exit(0)
    os.close(theirs)
    if wanted:
        os.read(ours, 1)
    os.close(ours)
    if seconds < 1e6:
        time.sleep(seconds)
        os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code > 0:
        raise AssertionError(
            "the job failed: " + Path(os.environ["KILLS_ERRORS"]).read_text()[-1200:]
        )
    return code < 0, began


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def prepare(phase: str, scratch: Path) -> Callable[[random.Random], tuple[str, float]]:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ["KILLS_ERRORS"] = str(scratch / "error")
    make_inputs(scratch)
    began = time.monotonic()
    forked(lambda _: packed(scratch, scratch / "store"), "", 0, 1e9)
    pack_seconds = time.monotonic() - began
    stored = content(scratch / "store")
    log, run = scratch / "steps", scratch / "run"
    if phase != "pack":
        began = time.monotonic()
        forked(lambda tell: trained(scratch, run, log, tell, False), "", 0, 1e9)
        train_seconds = time.monotonic() - began
        reference = json.loads(log.with_suffix(".made").read_text())
        unbroken = {(epoch, step): samples for epoch, step, _, samples in entries(log)}

    def clean() -> None:
        for each in (run, scratch / "new"):
            shutil.rmtree(each, ignore_errors=True)
        for each in (log, log.with_suffix(".made")):
            each.unlink(missing_ok=True)

    def kill_pack(rng: random.Random) -> tuple[str, float]:
        clean()
        out = scratch / "new"
        forked(lambda _: packed(scratch, out), "", 0, rng.uniform(0, 1.1 * pack_seconds))
        whole = out.exists()
        if whole:
            assert content(out) == stored, "a store that stands there is not whole"
            shutil.rmtree(out)
        _, began = forked(lambda _: packed(scratch, out), "", 0, 1e9)
        taken = time.monotonic() - began
        assert content(out) == stored, "other bytes than those of an unbroken pack"
        left = [
            path.name
            for path in scratch.iterdir()
            if path.name.startswith((".new", "new")) and path != out
        ]
        assert not left, f"left beside: {left}"
        return "right", taken

    def kill_run(rng: random.Random) -> tuple[str, float]:
        clean()
        wanted, count, seconds = {
            "train": ("", 0, rng.uniform(0, train_seconds)),
            "validate": ("validate", rng.randint(1, 2 * SAMPLES // 50), rng.uniform(0, 0.01)),
            "save": ("save", rng.randint(1, 2 * SAMPLES // BATCH // 3), rng.uniform(0, 0.03)),
        }[phase]
        forked(lambda tell: trained(scratch, run, log, tell, False), wanted, count, seconds)
        first = entries(log)
        saved = bool(list(run.glob("step-*.pt"))) if run.exists() else False
        if not saved:
            shutil.rmtree(run, ignore_errors=True)
        made = log.with_suffix(".made")
        if not made.exists() or saved:
            made.unlink(missing_ok=True)
            _, began = forked(lambda tell: trained(scratch, run, log, tell, saved), "", 0, 1e9)
        found = json.loads(made.read_text())
        assert found["weights"] == reference["weights"], "other weights"
        assert found["momentum"] == reference["momentum"], "another state of the optimiser"
        second = entries(log)[len(first) :]
        # Without a new step the loader stands at the beginning of the epoch that would follow.
        assert not second or found["digest"] == reference["digest"], "another order"
        # Steps before the checkpoint that the second process went on from count from the first one.
        begin = min((entry[:2] for entry in second), default=(EPOCHS, 0))
        steps = [entry for entry in first if entry[:2] < begin] + second
        assert len(steps) == len(unbroken), f"{len(steps)} steps instead of {len(unbroken)}"
        for epoch, step, _, samples in steps:
            assert unbroken[epoch, step] == samples, (
                f"other samples in step {step} of epoch {epoch}"
            )
        for epoch in range(EPOCHS):
            seen = sorted(number for entry in steps if entry[0] == epoch for number in entry[3])
            assert seen == list(range(SAMPLES)), "a sample is lost or repeated"
        return "right", (second[0][2] if second else time.monotonic()) - began

    return kill_pack if phase == "pack" else kill_run


def main() -> None:
    options = make_parser(__doc__, "kills", 2000).parse_args()
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)  # imports a second of torch
    families = [
        Family(phase, lambda scratch, phase=phase: prepare(phase, scratch), block=20)
        for phase in PHASES
    ]
    Campaign("kills", families, options.kills, options.seed, 120, options.out).run(
        options.seconds, options.jobs
    )


if __name__ == "__main__":
    main()
