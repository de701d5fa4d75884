"""A deep, narrow model: the GPU is done with a layer before the next is launched. Remedy: one CUDA graph."""

import torch
from loop import DEVICE, arguments
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

if __name__ == "__main__":
    chosen = arguments()
    torch.manual_seed(0)
    layers = [layer for _ in range(100) for layer in (nn.Linear(64, 64), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(64, 1)).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, foreach=False)
    if chosen.remedied:
        example = torch.randn(512, 64, device=DEVICE)
        model = torch.cuda.make_graphed_callables(model, (example,))
    data = TensorDataset(torch.randn(512, 64), torch.randn(512))
    x, y = (part.to(DEVICE) for part in next(iter(DataLoader(data, batch_size=512))))
    for _ in range(chosen.steps):
        loss = nn.functional.mse_loss(model(x).squeeze(-1), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
