"""One worker for a step that is faster than it, and a second core that idles. Remedy: two workers."""

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
        values = np.frombuffer(zlib.decompress(PACKED), np.float32)[:4096]
        return torch.from_numpy(values.copy()), float(index % 2)


if __name__ == "__main__":
    chosen = arguments()
    workers = 2 if chosen.remedied else 1
    loader = DataLoader(Packed(), batch_size=24, num_workers=workers, persistent_workers=True)
    train(loader, small_model(4096), chosen.steps)
