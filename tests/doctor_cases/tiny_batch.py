"""Two samples per step. Remedy: more."""

import torch
from loop import arguments, train
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

if __name__ == "__main__":
    chosen = arguments()
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(4096, 32), torch.randn(4096))
    layers = [layer for _ in range(12) for layer in (nn.Linear(32, 32), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(32, 1))
    train(DataLoader(data, batch_size=32 if chosen.remedied else 2), model, chosen.steps)
