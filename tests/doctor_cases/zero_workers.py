"""Samples are decompressed in the training process. Remedy: workers."""

import zlib

import numpy as np
import torch
from loop import arguments, small_model, train
from torch.utils.data import DataLoader, Dataset

PACKED = zlib.compress(np.tile(np.arange(512, dtype=np.float32), 400).tobytes(), 1)


class Packed(Dataset):
    def __len__(self):
        return 4096

    def __getitem__(self, index):
        values = np.frombuffer(zlib.decompress(PACKED), np.float32)[: 64 * 64]
        return torch.from_numpy(values.copy()), float(index % 2)


if __name__ == "__main__":
    chosen = arguments()
    more = {"num_workers": 2, "persistent_workers": True} if chosen.remedied else {}
    train(DataLoader(Packed(), batch_size=16, **more), small_model(64 * 64, 0.010), chosen.steps)
