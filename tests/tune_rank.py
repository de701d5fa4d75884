"""One of several processes that tune together; apart from the tests, so that it starts quickly."""

from __future__ import annotations

import torch
import torch._dynamo  # before the group, which it would keep alive: see train/ranks.py
from torch import nn

from stoker.compat.max_batch import find_max_batch_size
from stoker.measure.search import Outcome, choose, climb
from stoker.tune.trial import agree


class Limited(nn.Module):
    """A model with dropout, buffers and a made-up limit: more samples than `limit` run out of memory."""

    def __init__(self, limit: int, features: int = 4) -> None:
        super().__init__()
        self.limit = limit
        self.layers = nn.Sequential(
            nn.Linear(features, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3)
        )
        self.sizes: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.sizes.append(len(x))
        if len(x) > self.limit:
            raise torch.OutOfMemoryError(f"CUDA out of memory: {len(x)} samples")
        return self.layers(x)


def decide(rank: int, folder: str, results) -> None:
    distributed = torch.distributed
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2
    )
    caps, factor = (5, 3)[rank], (1.0, 3.0)[rank]

    def measure(level: int) -> Outcome:
        own = (
            Outcome(None, False, "out of memory")
            if level > caps
            else Outcome(factor * 2**level, True)
        )
        return agree(own)

    tried = climb(8, 1, measure)
    lines: list[str] = []
    size = find_max_batch_size(Limited((40, 23)[rank]), (4,), "cpu", max_batch=64, say=lines.append)
    results.put(
        (
            rank,
            choose(tried, 1),
            {r: (o.rate, o.fits, o.reason) for r, o in tried.items()},
            size,
            lines,
        )
    )
    distributed.destroy_process_group()
