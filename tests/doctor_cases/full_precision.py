"""Large matrices of float32 are multiplied in full. Remedy: TF32. On a GPU only."""

import torch
from loop import DEVICE, arguments, train
from torch import nn

if __name__ == "__main__":
    chosen = arguments()
    if chosen.remedied:
        torch.set_float32_matmul_precision("high")
    model = nn.Sequential(
        nn.Linear(8, 4096), *(nn.Linear(4096, 4096) for _ in range(4)), nn.Linear(4096, 1)
    )
    rows = torch.randn(4096, 8, device=DEVICE)
    train([(rows, torch.zeros(4096, device=DEVICE))], model, chosen.steps)
