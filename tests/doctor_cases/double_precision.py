"""Data came from numpy as float64, and the model followed. Remedy: float32."""

import numpy as np
import torch
from loop import arguments, train
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

if __name__ == "__main__":
    chosen = arguments()
    torch.manual_seed(0)
    values = np.random.default_rng(0).normal(size=(2048, 512))
    model = nn.Sequential(
        nn.Linear(512, 768), nn.ReLU(), nn.Linear(768, 768), nn.ReLU(), nn.Linear(768, 1)
    )
    model = model.float() if chosen.remedied else model.double()
    features = torch.from_numpy(values)
    data = TensorDataset(features.float() if chosen.remedied else features, torch.randn(2048))
    train(DataLoader(data, batch_size=128), model, chosen.steps)
