"""The kernel that crops and resizes pictures = torch. On a GPU as it is; elsewhere in Triton's interpreter.

`tests/test_augment_fused.py` runs this file in a process of its own with TRITON_INTERPRET=1; in any other process
this is a `gpu` test.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from stoker.augment import RandomResizedCrop
from stoker.augment.sizing import Sizing, launch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]


@pytest.mark.parametrize("channels", [1, 3])
def test_the_kernel_resamples_like_torch(channels):
    rng = np.random.default_rng(channels)
    sizing = Sizing(RandomResizedCrop((12, 20)), 0, 0)
    sizes = rng.integers(3, 60, (2, 2))
    boxes = sizing.boxes(sizes, 0, 0)
    made = [rng.integers(0, 256, (channels, *size), dtype=np.uint8) for size in sizes]
    images = [torch.from_numpy(array) for array in made]
    out = torch.zeros((2, channels, 12, 20), dtype=torch.uint8, device=DEVICE)
    launch([image.to(DEVICE) for image in images], boxes, out)
    away = (out.cpu().int() - sizing.resize_tensors(images, boxes).int()).abs()
    assert away.max() <= 1, away.max()
