"""Epochs of ten batches, and workers that are started anew for each. Remedy: persistent workers."""

import torch
from loop import arguments, small_model, train
from torch.utils.data import DataLoader, TensorDataset

if __name__ == "__main__":
    chosen = arguments()
    data = TensorDataset(torch.randn(640, 64), torch.randn(640))
    loader = DataLoader(data, batch_size=64, num_workers=2, persistent_workers=chosen.remedied)
    train(loader, small_model(64), chosen.steps)
