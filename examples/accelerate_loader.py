"""Accelerate over a stoker Loader: through `prepare` as it is, accumulated windows, a state in mid-epoch."""

import tempfile
from functools import partial
from pathlib import Path

import h5py
import numpy as np
import torch
from accelerate import Accelerator

from stoker import Loader
from stoker.frameworks.accelerate import load_for

with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    features = np.random.default_rng(0).normal(size=(2000, 16)).astype("f4")
    with h5py.File(folder / "train.h5", "w") as file:
        file["features"], file["targets"] = features, features[:, :1] - features[:, 1:2]

    accelerator = Accelerator(gradient_accumulation_steps=3)
    make = partial(Loader, folder / "train.h5", 100, order="shuffled", seed=1)
    loader = load_for(accelerator, make)  # this process's share, on its device
    model = torch.nn.Linear(16, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.register_for_checkpointing(loader)
    updates = 0
    for _epoch in range(2):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.mse_loss(model(batch["features"]), batch["targets"])
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                updates += accelerator.sync_gradients
            if batch.step == 4:
                accelerator.save_state(folder / "state")  # model, optimizer, and the loader's place
    accelerator.load_state(folder / "state")
    left = sum(1 for _ in loader)
    print(
        f"{updates} updates, last loss {loss.item():.4f}; from the saved state {left} batches are left"
    )
    loader.close()
