"""Two ranks on the CPU, one of which is lost, for `faults.py`: does the other end, with a name, and is the rest exact?

Enters: a folder with a store, the rank to hit and the signal. Leaves: how long the other rank took to end, what it
said, and whether the resumed run has the weights of an unbroken one. Costs: six processes of a second or two each.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from fault_data import BATCH, SAMPLES, WIDTH
from stoker.loader.loader import Loader
from stoker.train.ranks import join
from stoker.train.trainer import Trainer

STALL_SECONDS = 6
HIT_AT = 20
RANK_FAULTS = {
    "a rank is killed": (1, signal.SIGKILL),
    "the first rank is killed": (0, signal.SIGKILL),
    "a rank is stopped": (1, signal.SIGSTOP),
}
WAYS = ("stoker trainer", "DDP, gloo")


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def _train_stoker(folder: Path, run: str, resume: bool, hit: Any) -> list[float]:
    with join("cpu", STALL_SECONDS) as (ranks, _):
        model, count = _model(), 0

        def unpack(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
            nonlocal count
            count += 1
            hit(count)
            values = batch["features"] / SAMPLES
            return values, values.mean(1, keepdim=True)

        share = {"rank": ranks.rank, "world_size": ranks.world_size}
        with Loader(folder / "store", BATCH // 2, "cpu", order="shuffled", **share) as loader:
            optimizer = torch.optim.SGD(model.parameters(), 0.05)
            config = {
                "epochs": 2,
                "precision": "fp32",
                "capture": "off",
                "checkpoint_every_steps": 7,
            }
            trainer = Trainer(
                model, loader, None, torch.nn.functional.mse_loss, optimizer, None, config, "cpu",
                run_dir=folder / run, unpack=unpack,
            )  # fmt: skip
            trainer.fit(resume=resume, quiet=True)
        return [float(value) for one in model.parameters() for value in one.detach().flatten()]


def _train_ddp(folder: Path, run: str, resume: bool, hit: Any) -> list[float]:  # noqa: ARG001
    """What people write: DDP over a sampler; it has no checkpoint here, only its end counts."""
    import numpy as np

    distributed.init_process_group("gloo")
    values = torch.from_numpy(np.load(folder / "features.npy"))[distributed.get_rank() :: 2]
    wrapped = torch.nn.parallel.DistributedDataParallel(_model())
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.05)
    for count, part in enumerate((values / SAMPLES).split(BATCH // 2), 1):
        hit(count)
        torch.nn.functional.mse_loss(wrapped(part), part.mean(1, keepdim=True)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return []


def _start(way: str, folder: Path, run: str, rank: int, port: int, resume: bool, hit: Any) -> int:
    pid = os.fork()
    if pid:
        return pid
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank)}
    os.environ.update(place, LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    said = os.open(folder / f"{run}-{rank}.txt", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    for number in (1, 2):
        os.dup2(said, number)
    try:
        train = _train_stoker if way == WAYS[0] else _train_ddp
        weights = train(folder, run, resume, hit)
        (folder / f"{run}-{rank}.json").write_text(json.dumps(weights))
    except BaseException as error:  # noqa: BLE001  that is what is measured
        os.write(said, f"{type(error).__name__}: {error}\n".encode())
        os._exit(1)
    os._exit(0)


def _run(
    way: str,
    folder: Path,
    run: str,
    victim: int | None = None,
    number: int = 0,
    resume: bool = False,
) -> tuple[list[Any], float, str]:
    """Return the weights of both ranks, and of the one that was not hit the seconds to its end and what it said."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mark = folder / f"{run}-hit"

    def hit(count: int) -> None:
        if os.environ["RANK"] == str(victim) and count == HIT_AT:
            mark.write_text(str(time.monotonic()))
            os.kill(os.getpid(), number)

    pids = [_start(way, folder, run, rank, port, resume, hit) for rank in range(2)]
    seconds, said = 0.0, ""
    try:
        for rank, pid in enumerate(pids):
            if rank != victim:
                os.waitpid(pid, 0)
        if victim is not None:
            seconds = time.monotonic() - float(mark.read_text())
            said = (folder / f"{run}-{1 - victim}.txt").read_text(errors="replace")
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
    made = [folder / f"{run}-{rank}.json" for rank in range(2)]
    return [json.loads(one.read_text()) for one in made if one.exists()], seconds, said


def lost_rank(way: str, fault: str, folder: Path) -> dict[str, Any]:
    """Lose a rank in the middle of training; then resume with two."""
    victim, number = RANK_FAULTS[fault]
    expected = _run(way, folder, "unbroken")[0]
    _, seconds, said = _run(way, folder, "run", victim, number)
    if way != WAYS[0]:
        raise RuntimeError(said.strip()[-500:] or "it ended without a word")
    resumed = _run(way, folder, "run", resume=True)[0]
    alike = len(expected) == 2 and resumed == expected
    found = {"lost": 0, "repeated": 0, "changed": int(not alike or f"rank {victim}" not in said)}
    return found | {
        "other_rank_ended_after_seconds": round(seconds, 2),
        "said": said.strip()[-300:],
    }
