"""Your own HDF5 with `features` (n, T, F) and `targets`, in chunks that load while you train."""

import tempfile
from pathlib import Path

import h5py
import numpy as np
import torch

from stoker import ChunkDataLoader

rng = np.random.default_rng(0)
device = "cuda" if torch.cuda.is_available() else "cpu"

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder, "train.h5")
    with h5py.File(path, "w") as file:  # any file of this shape will do; nothing is converted
        file["features"] = rng.normal(size=(3000, 60, 16)).astype("f4")
        file["targets"] = rng.normal(size=(3000, 3)).astype("f4")

    loader = ChunkDataLoader(path, batch_size=128, chunk_size_gb=0.004, device=device, shuffle=True)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(60 * 16, 3)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    seen = 0
    for features, targets in loader:  # on the device, and no short batch at a chunk's edge
        loss = torch.nn.functional.mse_loss(model(features), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen += len(features)
    print(f"{len(loader)} batches, {seen} samples, last loss {loss.item():.4f}")
