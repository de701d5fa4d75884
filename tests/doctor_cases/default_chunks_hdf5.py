"""Rows are read from a table in h5py's default chunks. Remedy: contiguous."""

import tempfile
from pathlib import Path

import h5py
import numpy as np
import torch
from loop import arguments, small_model, train
from torch.utils.data import DataLoader, Dataset

ROWS, WIDTH = 20_000, 1024


class Rows(Dataset):
    def __init__(self, path):
        self.path = path
        self.file = None

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        if self.file is None:
            self.file = h5py.File(self.path, "r")
        return torch.from_numpy(self.file["rows"][index * 7919 % ROWS]), float(index % 2)


if __name__ == "__main__":
    chosen = arguments()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.h5"
        with h5py.File(path, "w") as file:
            chunks = None if chosen.remedied else True
            file.create_dataset("rows", data=np.ones((ROWS, WIDTH), np.float32), chunks=chunks)
        loader = DataLoader(Rows(path), batch_size=16, num_workers=1, persistent_workers=True)
        train(loader, small_model(WIDTH), chosen.steps)
