"""Every sample is a read from a disk that takes 2 ms to answer. Remedy: one read per batch."""

import time

import torch
from loop import arguments, small_model, train
from torch.utils.data import DataLoader, Dataset


class OnDisk(Dataset):
    def __len__(self):
        return 4096

    def read(self, index):
        time.sleep(0.002)
        return torch.full((64,), index / 4096), float(index % 2)

    def __getitem__(self, index):
        return self.read(index)


class InOneFile(OnDisk):
    def __getitems__(self, indices):
        time.sleep(0.002)
        return [(torch.full((64,), index / 4096), float(index % 2)) for index in indices]


if __name__ == "__main__":
    chosen = arguments()
    data = InOneFile() if chosen.remedied else OnDisk()
    loader = DataLoader(data, batch_size=16, num_workers=2, persistent_workers=True)
    train(loader, small_model(64), chosen.steps)
