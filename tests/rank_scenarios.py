"""What one of several processes does in the tests of ranks: each scenario by name, its outcome in a file.

    python rank_scenarios.py FOLDER SCENARIO...     (with the environment that torchrun makes)

Apart from the tests, so that it starts quickly; all scenarios of a start share one process group.
"""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn

from run_makers import settings_for
from stoker.errors import InputError, StokerError
from stoker.loader.loader import Loader
from stoker.recipes.run import run_recipe
from stoker.train import ending
from stoker.train.parallel import shard_model
from stoker.train.ranks import Ranks, check_alike, join
from stoker.train.trainer import Trainer
from training_makers import make_model

GLOBAL_BATCH = 24
LOSS = nn.functional.mse_loss


def make(
    path: Path, ranks: Ranks, *, order="shuffled", val=True, sharded=False, run_dir=None, **options
):
    """A trainer whose global batch is the same on any number of ranks."""
    model = make_model()
    if sharded:
        shard_model(model, ranks, torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    share = {"rank": ranks.rank, "world_size": ranks.world_size}
    batch = GLOBAL_BATCH // ranks.world_size
    chunk = options.pop("chunk_bytes", None)
    loader = Loader(path, batch, "cpu", order=order, seed=1, chunk_bytes=chunk, **share)
    judged = Loader(path, batch, "cpu", **share) if val else None
    config = {"epochs": 2, "precision": "fp32", "read_every": 3, **options}
    return Trainer(model, loader, judged, LOSS, optimizer, None, config, "cpu", run_dir=run_dir)


def outcome(trainer: Trainer) -> dict:
    """What must be the same on any number of ranks."""
    from stoker.train.parallel import gather_whole

    state = gather_whole(trainer.model.state_dict())
    return {
        "weights": torch.cat([value.flatten() for value in state.values()]).tolist(),
        "losses": trainer.history.losses,
        "epochs": [
            (report.num_samples, report.train_loss, report.metrics)
            for report in trainer.history.epochs
        ],
    }


def train(folder: Path, ranks: Ranks, **options) -> dict:
    trainer = make(folder / "rows.h5", ranks, **options)
    trainer.fit()
    return outcome(trainer) | {"notes": trainer.history.notes}


def stop_early(folder: Path, ranks: Ranks, name: str, **options) -> dict:
    """Train until a signal to one rank ends all of them in the middle of an epoch, and leave a checkpoint."""
    ending._ASK_SECONDS = 0.0  # at every step: these take a millisecond
    trainer = make(folder / "rows.h5", ranks, run_dir=folder / name, **options)
    taken: list[list[int]] = []
    inner = trainer._train_on

    def note(work, position):
        inner(work, position)
        taken.append([trainer._epoch, *trainer._train.loader.samples[work.positions].tolist()])
        if len(taken) == 12 and ranks.rank == ranks.world_size - 1:
            os.kill(os.getpid(), 15)

    trainer._train_on = note
    history = trainer.fit()
    return {"ended": history.ended, "taken": taken, "epoch": trainer._epoch}


def go_on(folder: Path, ranks: Ranks, name: str, **options) -> dict:
    """Resume what any number of ranks has left."""
    trainer = make(folder / "rows.h5", ranks, run_dir=folder / name, **options)
    taken: list[list[int]] = []
    inner = trainer._train_on

    def note(work, position):
        taken.append([trainer._epoch, *trainer._train.loader.samples[work.positions].tolist()])
        inner(work, position)

    trainer._train_on = note
    trainer.fit(resume=True)
    return outcome(trainer) | {"taken": taken, "notes": trainer.history.notes}


def captured(folder: Path, ranks: Ranks) -> dict:
    """The step with its exchange in one CUDA graph, against the same model on a GPU alone."""
    found = {}
    for name, wrapped in (("together", True), ("alone", False)):
        model = make_model().to("cuda")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        loader = Loader(folder / "rows.h5", 10, "cuda", order="shuffled", seed=1)
        config = {"epochs": 3, "precision": "fp32", "capture": "on", "read_every": 3}
        current, Ranks.current = Ranks.current, Ranks.current if wrapped else Ranks
        try:
            trainer = Trainer(model, loader, None, LOSS, optimizer, None, config, "cuda")
        finally:
            Ranks.current = current
        trainer.fit()
        found[name] = outcome(trainer) | {
            "step": trainer._captured.reason,
            "notes": trainer.history.notes,
        }
    return found


def parts_on_gpu(folder: Path, ranks: Ranks) -> dict:
    """FSDP2 over NCCL, in float32 and in float16 with scaled gradients, against the same on a GPU alone."""
    found = {}
    for precision in ("fp32", "fp16"):
        for name, sharded in (("in parts", True), ("alone", False)):
            model = make_model().to("cuda")
            if sharded:
                shard_model(model, ranks, torch.device("cuda", 0))
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            loader = Loader(folder / "rows.h5", 10, "cuda", order="shuffled", seed=1)
            config = {"epochs": 2, "precision": precision, "capture": "off", "read_every": 3}
            current, Ranks.current = Ranks.current, Ranks.current if sharded else Ranks
            try:
                trainer = Trainer(model, loader, None, LOSS, optimizer, None, config, "cuda")
            finally:
                Ranks.current = current
            trainer.fit()
            state = trainer.state_dict()
            trainer.load_state_dict(state)
            found[f"{precision} {name}"] = outcome(trainer)
    return found


def dirty(folder: Path, ranks: Ranks) -> str:
    trainer = make(folder / "dirty-137.h5", ranks, val=False)
    try:
        trainer.fit()
    except StokerError as error:
        return str(error)
    return "nothing was found"


def unequal_loaders(folder: Path, ranks: Ranks) -> str:
    count = 40 + 8 * ranks.rank
    data = torch.utils.data.TensorDataset(torch.randn(count, 6), torch.randn(count, 1))
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = torch.utils.data.DataLoader(data, 8)
    trainer = Trainer(model, loader, None, LOSS, optimizer, None, {"precision": "fp32"}, "cpu")
    try:
        trainer.fit()
    except InputError as error:
        return str(error)
    return "nothing was found"


def foreign_loader(folder: Path, ranks: Ranks) -> dict:
    """A DataLoader with a sampler of torch's, whose batches differ in size between the ranks."""
    from training_makers import read_rows

    features, targets = read_rows(folder / "rows.h5")
    own = np.array_split(np.arange(len(features)), ranks.world_size)[ranks.rank]
    data = torch.utils.data.TensorDataset(features[own], targets[own])
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = torch.utils.data.DataLoader(data, -(-len(own) // 5))
    config = {"precision": "fp32", "epochs": 2}
    trainer = Trainer(model, loader, None, LOSS, optimizer, None, config, "cpu")
    trainer.fit()
    return outcome(trainer)


def disagree(folder: Path, ranks: Ranks) -> str:
    try:
        check_alike(ranks, {"stoker": f"0.{ranks.rank}"})
    except InputError as error:
        return str(error)
    return "they agree"


def fail_on_one(folder: Path, ranks: Ranks) -> tuple[str, str]:
    try:
        with ranks.shared_fate():
            if ranks.rank == ranks.world_size - 1:
                raise InputError("this rank cannot.", "a rank that can", "another")
    except StokerError as error:
        return type(error).__name__, str(error)
    return "", ""


def recipe(folder: Path, ranks: Ranks, kind: str, *overrides: str) -> dict:
    run_dir = folder / f"run-{kind}-{ranks.world_size}-{len(overrides)}"
    exact = "recipe.options.dropout=0"
    run = run_recipe(settings_for(kind, folder / kind, run_dir, exact, *overrides))
    return {
        "losses": run.losses,
        "val": run.val,
        "test": run.test,
        "samples": [report.num_samples for report in run.epochs],
        "notes": run.notes,
    }


SCENARIOS = {
    "whole": train,
    "accumulated": lambda folder, ranks: train(folder, ranks, accumulation_steps=4),
    "in parts": lambda folder, ranks: train(folder, ranks, sharded=True),
    "stopped": lambda folder, ranks: stop_early(folder, ranks, "stopped"),
    "stopped time": lambda folder, ranks: stop_early(folder, ranks, "time", order="time"),
    "gone on": lambda folder, ranks: go_on(folder, ranks, "stopped"),
    "gone on time": lambda folder, ranks: go_on(folder, ranks, "time", order="time"),
    "captured": captured,
    "parts on a GPU": parts_on_gpu,
    "dirty": dirty,
    "unequal": unequal_loaders,
    "foreign": foreign_loader,
    "disagree": disagree,
    "one fails": fail_on_one,
    "tabular": lambda folder, ranks: recipe(folder, ranks, "tabular"),
    "tabular in parts": lambda folder, ranks: recipe(
        folder, ranks, "tabular", "training.parallel=fsdp"
    ),
    # Lanes of one length: else their edges depend on the number of ranks.
    "stateful": lambda folder, ranks: recipe(folder, ranks, "stateful", "data.drop_last=true"),
    "massspec": lambda folder, ranks: recipe(folder, ranks, "massspec"),
}


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    found = {}
    with join("cuda" if "captured" in sys.argv else "cpu", 60) as (ranks, _):
        for name in sys.argv[2:]:
            found[name] = SCENARIOS[name](folder, ranks)
        (folder / f"rank-{ranks.rank}.pkl").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main()
