"""docs/augmentation.md: its examples run, and its table of messages is what users meet."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from stoker.augment import (
    ColorJitter,
    Compose,
    Normalize,
    RandomContrast,
    RandomCrop,
    RandomErasing,
    RandomHorizontalFlip,
    RandomRotation,
)
from stoker.errors import InputError

PAGE = (Path(__file__).resolve().parent.parent / "docs/augmentation.md").read_text()


def FLIP(*given):  # noqa: N802  a constant of the page
    return Compose([RandomHorizontalFlip()], backend="torch")(*given)


IMAGES = torch.zeros(2, 3, 8, 8, dtype=torch.uint8)


def test_the_examples_run_one_after_the_other():
    pixels = torch.randint(0, 256, (4, 3, 16, 16), dtype=torch.uint8)
    classes = torch.randint(0, 5, (4, 16, 16))
    state = {
        "loader": [(pixels, classes)],
        "images_uint8": pixels,
        "masks": classes,
        "chunk": pixels,
        "chunk_masks": classes,
        "indices": torch.tensor([3, 0]),
        "boxes": torch.tensor([[[0.0, 0.0, 4.0, 4.0]]]).repeat(4, 1, 1),
        "points": torch.zeros(4, 2, 2),
        "labels": torch.tensor([0, 1, 2, 3]),
        "model": lambda images: images.mean((2, 3))[:, :1].repeat(1, 10),
    }
    examples = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(examples) >= 5
    for example in examples:
        state |= {"images": pixels, "masks": classes, "epoch": 60}
        if "mix(" in example:
            state["images"] = pixels.float() / 255
        example = example.replace("draw(batch=32, size=(512, 512)", "draw(batch=4, size=(16, 16)")
        exec(compile(example, "docs/augmentation.md", "exec"), state)
    assert state["batch"].dtype == torch.bfloat16
    assert state["batch"].shape[0] == 2, "rows of a chunk"
    assert state["out_boxes"].shape == (4, 1, 4)
    assert state["targets"].shape == (4, 10)
    assert state["augment"].current is state["augment"].stages[50]


@pytest.mark.parametrize(
    ("message", "wrong"),
    [
        ("images of shape (512, 512, 3)", lambda: FLIP(torch.zeros(512, 512, 3))),
        ("images of dtype torch.int64", lambda: FLIP(IMAGES.long())),
        ("float images with values outside 0 to 1", lambda: FLIP(IMAGES.float() + 200)),
        ("images with NaN or infinity", lambda: FLIP(IMAGES.float() * float("nan"))),
        ("masks of shape", lambda: FLIP(IMAGES, torch.zeros(2, 4, 4).long())),
        ("masks of dtype torch.float32", lambda: FLIP(IMAGES, torch.zeros(2, 8, 8))),
        (
            "ignore_index 255 with masks of dtype torch.int8",
            lambda: FLIP(IMAGES, torch.zeros(2, 8, 8, dtype=torch.int8)),
        ),
        ("p of RandomErasing is 1.5", lambda: RandomErasing(p=1.5)),
        ("degrees is -15", lambda: RandomRotation(-15)),
        (
            "a crop of 64x64 from an image of 32x32 with padding 4",
            lambda: Compose([RandomCrop(64, padding=4)])(torch.zeros(1, 3, 32, 32)),
        ),
        (
            "ColorJitter stands after Normalize",
            lambda: Compose([Normalize(0.5, 0.5), ColorJitter(0.2)]),
        ),
        (
            "contrast on images with 4 channels",
            lambda: Compose([RandomContrast(0.2)])(torch.zeros(1, 4, 8, 8)),
        ),
        (
            'backend="fused" on cpu: the device is a CPU',
            lambda: Compose([RandomHorizontalFlip()], backend="fused")(IMAGES),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_messages_of_the_page_are_those_of_the_code(message, wrong, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert message in PAGE
    with pytest.raises(InputError, match=re.escape(message)) as got:
        wrong()
    assert got.value.allowed
    assert got.value.fix
