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


SIZES = np.array([(18, 26), (30, 17), (8, 5)])
BOXES = {
    "whole": [(0, 0, 26, 18), (0, 0, 17, 30), (0, 0, 5, 8)],
    "at the edge": [(22, 14, 4, 4), (12, 0, 5, 30), (1, 3, 4, 5)],
    "narrow": [(23, 1, 3, 10), (13, 5, 1, 20), (2, 0, 2, 1)],
}


@pytest.mark.parametrize(("channels", "name"), [(1, "at the edge"), *((3, name) for name in BOXES)])
def test_the_kernel_resamples_like_torch(channels, name):
    rng = np.random.default_rng(channels)
    sizing = Sizing(RandomResizedCrop((5, 9)), 0, 0)
    boxes = np.array(BOXES[name])
    made = [rng.integers(0, 256, (channels, *size), dtype=np.uint8) for size in SIZES]
    images = [torch.from_numpy(array) for array in made]
    out = torch.zeros((len(SIZES), channels, 5, 9), dtype=torch.uint8, device=DEVICE)
    launch([image.to(DEVICE) for image in images], boxes, out)
    away = (out.cpu().int() - sizing.resize_tensors(images, boxes).int()).abs()
    assert away.max() <= 1, away.max()
    assert (away > 0).float().mean() < 0.03


def test_nothing_outside_of_the_pictures_is_read():
    """Pictures whose surroundings are white stay black to the last pixel."""
    memory = torch.full((3, 8, 12), 255, dtype=torch.uint8, device=DEVICE)
    memory[:, 2:6, 4:9] = 0
    out = torch.zeros((1, 3, 9, 130), dtype=torch.uint8, device=DEVICE)
    launch([memory], np.array([(4, 2, 5, 4)]), out)
    assert int(out.max()) == 0
