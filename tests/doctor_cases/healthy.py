"""Nothing is wrong: data is ready when the step wants it, and the step is worth its while."""

import torch
from loop import CUDA, arguments, small_model, train
from torch.utils.data import DataLoader, TensorDataset

if __name__ == "__main__":
    chosen = arguments()
    data = TensorDataset(torch.randn(4096, 256), torch.randn(4096))
    loader = DataLoader(
        data, batch_size=64, num_workers=1, persistent_workers=True, pin_memory=CUDA
    )
    train(loader, small_model(256, 0.010), chosen.steps)
