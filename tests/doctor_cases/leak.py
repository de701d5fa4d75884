"""Every batch is kept "for later". Remedy: only its mean is."""

import torch
from loop import arguments, small_model, train
from torch.utils.data import DataLoader, TensorDataset

if __name__ == "__main__":
    chosen = arguments()
    data = TensorDataset(torch.randn(512, 16384), torch.randn(512))
    kept = []

    def keep(x):
        kept.append(x.mean() if chosen.remedied else x)
        return x

    loader = DataLoader(data, batch_size=16, num_workers=1, persistent_workers=True)
    train(loader, small_model(16384, 0.010), chosen.steps, prepare=keep)
