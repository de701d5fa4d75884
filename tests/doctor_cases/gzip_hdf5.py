"""Rows lie in gzip in HDF5, one chunk each. Remedy: uncompressed and contiguous."""

import tempfile
from pathlib import Path

import h5py
import numpy as np
import torch
from loop import arguments, small_model, train
from torch.utils.data import DataLoader, Dataset

WIDTH = 16384


class Rows(Dataset):
    def __init__(self, path):
        self.path = path
        self.file = None

    def __len__(self):
        return 1024

    def __getitem__(self, index):
        if self.file is None:
            self.file = h5py.File(self.path, "r")
        return torch.from_numpy(self.file["rows"][index % 256]), float(index % 2)


if __name__ == "__main__":
    chosen = arguments()
    values = np.random.default_rng(0).integers(0, 2000, (256, WIDTH)).astype(np.float32)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.h5"
        how = (
            {}
            if chosen.remedied
            else {"chunks": (1, WIDTH), "compression": "gzip", "compression_opts": 1}
        )
        with h5py.File(path, "w") as file:
            file.create_dataset("rows", data=values, **how)
        loader = DataLoader(Rows(path), batch_size=16, num_workers=1, persistent_workers=True)
        train(loader, small_model(WIDTH), chosen.steps)
