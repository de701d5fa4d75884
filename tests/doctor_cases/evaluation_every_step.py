"""A large model is evaluated in every step, and no value of it is read. Remedy: evaluate every 20 steps.

On a GPU the host has soon launched the evaluation: only the kernels' time shows it.
"""

import itertools

import torch
from loop import DEVICE, arguments, train
from torch import nn

if __name__ == "__main__":
    chosen = arguments()
    torch.set_float32_matmul_precision("high")  # in full, the products would be a second cause
    rows = torch.ones(256, 8, device=DEVICE)
    model = nn.Sequential(
        nn.Linear(8, 4096), *(nn.Linear(4096, 4096) for _ in range(8)), nn.Linear(4096, 1)
    )
    held_out = torch.ones(8192, 8, device=DEVICE)
    steps = itertools.count()

    def evaluate(_loss, _output):
        if next(steps) % 20 and chosen.remedied:
            return
        model.eval()
        with torch.no_grad():
            model(held_out)
        model.train()

    train([(rows, torch.zeros(256, device=DEVICE))], model, chosen.steps, after_step=evaluate)
