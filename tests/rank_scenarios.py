"""What one of several processes does in the tests of ranks: each scenario by name, its outcome in a file.

    python rank_scenarios.py FOLDER SCENARIO...     (with the environment that torchrun makes)

Apart from the tests, so that it starts quickly; all scenarios of a start share one process group.
"""

from __future__ import annotations

import contextlib
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
from stoker.train import shutdown
from stoker.train.evaluation import Evaluator
from stoker.train.oom import MemoryLevel
from stoker.train.parallel import gather_whole, is_sharded, load_whole_model, shard_model
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
    shutdown._ASK_SECONDS = 0.0  # at every step: these take a millisecond
    trainer = make(folder / "rows.h5", ranks, run_dir=folder / name, **options)
    taken: list[list[int]] = []
    inner = trainer._update.add

    def note(work):
        loss = inner(work)
        taken.append([trainer._at.epoch, *trainer._train.loader.samples[work.positions].tolist()])
        if len(taken) == 12 and ranks.rank == ranks.world_size - 1:
            os.kill(os.getpid(), 15)
        return loss

    trainer._update.add = note
    history = trainer.fit()
    return {"ended": history.ended, "taken": taken, "epoch": trainer._at.epoch}


def go_on(folder: Path, ranks: Ranks, name: str, **options) -> dict:
    """Resume what any number of ranks has left."""
    trainer = make(folder / "rows.h5", ranks, run_dir=folder / name, **options)
    taken: list[list[int]] = []
    inner = trainer._update.add

    def note(work):
        taken.append([trainer._at.epoch, *trainer._train.loader.samples[work.positions].tolist()])
        return inner(work)

    trainer._update.add = note
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
    config = {"precision": "fp32", "epochs": 2, "clip_norm": 1.0}
    trainer = Trainer(model, loader, None, LOSS, optimizer, None, config, "cpu")
    trainer.fit()
    return outcome(trainer)


def foreign_windows(folder: Path, ranks: Ranks) -> dict:
    """Batches of 30 and 10 on two ranks, 40 on one; two of them to an update, the last one alone."""
    from training_makers import read_rows

    parts = [(0, 30), (150, 10)]
    parts = [parts[ranks.rank]] if ranks.are_several else parts
    own = [
        [first + number * size + row for first, size in parts for row in range(size)]
        for number in range(5)
    ]
    data = torch.utils.data.TensorDataset(*read_rows(folder / "rows.h5"))
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = torch.utils.data.DataLoader(data, batch_sampler=own)
    config = {"precision": "fp32", "epochs": 2, "accumulation_steps": 2}
    trainer = Trainer(model, loader, None, LOSS, optimizer, None, config, "cpu")
    trainer.fit()
    return outcome(trainer)


def foreign_goes_on(folder: Path, ranks: Ranks) -> list[bool]:
    """Every rank shuffles a part of its own, with a generator of its own, and is resumed in an epoch."""
    from training_makers import read_rows

    shutdown._ASK_SECONDS = 0.0
    features, targets = read_rows(folder / "rows.h5")
    own = np.array_split(np.arange(200), ranks.world_size)[ranks.rank]
    seen: list[tuple[int, int]] = []

    def fit(stop_at: int) -> None:
        numbers = torch.as_tensor(own, dtype=torch.float32)[:, None]
        data = torch.utils.data.TensorDataset(features[own], torch.cat([targets[own], numbers], 1))
        model = make_model()

        def loss(outputs, wanted):
            seen.extend((trainer._at.epoch, int(number)) for number in wanted[:, 1])
            if len(seen) == stop_at:
                os.kill(os.getpid(), 15)
            return LOSS(outputs, wanted[:, :1])

        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        loader = torch.utils.data.DataLoader(data, 10, shuffle=True)
        config = {"precision": "fp32", "epochs": 2, "seed": 5}
        run_dir = folder / "foreign"
        trainer = Trainer(
            model, loader, None, loss, optimizer, None, config, "cpu", run_dir=run_dir
        )
        trainer.fit(resume=not stop_at)

    fit(stop_at=170)
    torch.manual_seed(99 + ranks.rank)
    fit(stop_at=0)
    return [sorted(n for each, n in seen if each == epoch) == own.tolist() for epoch in (0, 1)]


def roll_back(folder: Path, ranks: Ranks) -> dict:
    trainer = make(folder / "dirty-137.h5", ranks, val=False, nonfinite="rollback")
    trainer.fit()
    return outcome(trainer) | {"notes": trainer.history.notes}


def refused(folder: Path, ranks: Ranks) -> dict[str, str]:
    """Trainers that ranks cannot share, each with what is said."""

    def fit_unfrozen() -> None:
        trainer = make(folder / "rows.h5", ranks)
        trainer.model[0].weight.requires_grad = False
        trainer.fit()

    def wrap_twice() -> None:
        model = nn.parallel.DistributedDataParallel(make_model())
        optimizer = torch.optim.AdamW(model.parameters())
        loader = Loader(folder / "rows.h5", 12, "cpu", rank=ranks.rank, world_size=2)
        Trainer(model, loader, None, LOSS, optimizer, device="cpu")

    made = {
        "unfrozen": fit_unfrozen,
        "wrapped": wrap_twice,
        "not shared": lambda: make(folder / "rows.h5", Ranks(), val=False),
        "chunks": lambda: make(folder / "rows.h5", ranks, chunk_bytes=28 * (30 + 20 * ranks.rank)),
    }
    said = {}
    for name, act in made.items():
        try:
            act()
        except StokerError as error:
            said[name] = str(error)
    return said


def evaluate_parts(folder: Path, ranks: Ranks) -> dict:
    """Weights that are loaded right after a validation, in which those of the root stay whole."""
    trainer = make(folder / "rows.h5", ranks, sharded=True, checkpoint_every_epochs=0)
    trainer.fit()
    before = outcome(trainer)
    state = gather_whole(trainer.model.state_dict())
    trainer.validate()
    was_sharded = is_sharded(trainer.model)
    load_whole_model(trainer.model, {name: value.clone() for name, value in state.items()})
    evaluator = Evaluator(
        trainer.model, LOSS, None, trainer._precision, trainer.device, ranks=ranks
    )
    kept = gather_whole(trainer.optimizer.state_dict(), keep=False)["state"][0]["exp_avg"]
    return {
        "was sharded": was_sharded,
        "is the same": before["weights"] == outcome(trainer)["weights"],
        "survives alone": evaluator._survives,
        "name": trainer.identity["model"],
        "kept": kept,
    }


def lowest_level(folder: Path, ranks: Ranks) -> tuple:
    """One rank remembers that less fits."""
    update = make(folder / "rows.h5", ranks)._update
    known = MemoryLevel(12, 6) if ranks.rank else None
    return update._lowest(known).pass_size, update._lowest(None), update.give_way()


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
    "foreign windows": foreign_windows,
    "foreign goes on": foreign_goes_on,
    "rolled back": roll_back,
    "refused": refused,
    "parts evaluated": evaluate_parts,
    "parts stopped": lambda folder, ranks: stop_early(folder, ranks, "parts", sharded=True),
    "whole gone on": lambda folder, ranks: go_on(folder, ranks, "parts"),
    "lowest level": lowest_level,
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


def thread_names() -> list[str]:
    """Return what the kernel calls this process's threads, torch's own among them."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended since
            names.append((task / "comm").read_text().strip())
    return names


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    found = {}
    with join("cuda" if "captured" in sys.argv else "cpu", 60) as (ranks, _):
        for name in sys.argv[2:]:
            found[name] = SCENARIOS[name](folder, ranks)
    found["threads left"] = [name for name in thread_names() if "gloo" in name]
    (folder / f"rank-{ranks.rank}.pkl").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main()
