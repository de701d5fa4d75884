"""One small task for every framework: the plain torch loop that all of them must agree with."""

from __future__ import annotations

import json
import os
import re
from functools import partial
from pathlib import Path

import torch
from torch import nn

import warm_stoker
from stoker.loader.loader import Loader
from training_makers import make_model

BATCH, RATE = 20, 0.05
NAMES = ("features", "targets")


def makes(path, batch=BATCH, **options):
    """What makes the loader of `path`, but for device, rank and number of processes (None: batch size too)."""
    sized = {} if batch is None else {"batch_size": batch}
    return partial(Loader, path, **{"order": "shuffled", "seed": 1, **sized, **options})


def step_loss(model, features, targets):
    return nn.functional.mse_loss(model(features), targets)


def plain_losses(
    path, epochs=2, accumulate=1, set_rate=None, momentum=0.9, counts_short_windows=False, **options
):
    """Losses and final weights of the loop everybody would write; short windows end in an update too.

    Lightning and Accelerate divide by the batches that a window should have, Hugging Face by those it has.
    """
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=momentum)
    losses, updates = [], 0
    with makes(path, **options)(device="cpu") as loader:
        for epoch in range(epochs):
            loader.set_epoch(epoch)
            for number, batch in enumerate(loader, 1):
                if set_rate is not None:
                    optimizer.param_groups[0]["lr"] = set_rate(updates)
                loss = step_loss(model, batch["features"], batch["targets"])
                begun = (number - 1) // accumulate * accumulate
                short = min(accumulate, len(loader) - begun)
                (loss / (short if counts_short_windows else accumulate)).backward()
                losses.append(loss.item())
                if number % accumulate == 0 or number == len(loader):
                    optimizer.step()
                    optimizer.zero_grad()
                    updates += 1
    return losses, flat(model)


def flat(model):
    return torch.cat([value.detach().flatten() for value in model.parameters()])


def taken(batch):
    """Samples of a batch, in order."""
    return batch.positions.tolist() if hasattr(batch, "positions") else batch[0].tolist()


def run_ranks(framework, path, folder):
    """Run `framework_ranks.py` in a fork, which starts two processes; return what each has seen."""
    script = Path(__file__).with_name("framework_ranks.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default"}
    words = [framework, path, folder]
    done = warm_stoker.run_script_here(script, None, environment, words=words)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in (0, 1)]


def docs_code(section, rows, folder, monkeypatch):
    """The code of one section of docs/frameworks.md, with its `train.h5` in the working folder."""
    page = Path(__file__).resolve().parent.parent / "docs/frameworks.md"
    text = page.read_text(encoding="utf-8").partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    monkeypatch.chdir(folder)
    (folder / "train.h5").symlink_to(rows)
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    return code
