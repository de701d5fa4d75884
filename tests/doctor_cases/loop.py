"""What all cases share: their two flags, a small model, a loop of steps.

Every case plants one cause; `--remedied` runs the same job with that cause removed and nothing else
changed. `Device` stands for a GPU: a step that takes its time and needs no core.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--remedied", action="store_true")
    parser.add_argument("--steps", type=int, default=1_000_000)
    return parser.parse_args()


class Device(nn.Module):
    """Passes its input on after a while, as a GPU with so much to do would."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return x


def small_model(width: int, seconds: float = 0.005) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        Device(seconds), nn.Flatten(), nn.Linear(width, 16), nn.ReLU(), nn.Linear(16, 1)
    )


def batches_of(loader):
    while True:
        yield from loader


def train(loader, model, steps, prepare=None, after_step=None) -> None:
    """Train on (x, y) batches; `prepare(x)` before the model, `after_step(loss, output)` after an update."""
    torch.set_num_threads(1)
    model = model.to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for _, (x, y) in zip(range(steps), batches_of(loader), strict=False):
        x, y = x.to(DEVICE, non_blocking=True), y.to(DEVICE, non_blocking=True)
        output = model(x if prepare is None else prepare(x))
        loss = nn.functional.mse_loss(output.squeeze(-1), y.to(output.dtype))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if after_step is not None:
            after_step(loss, output)
