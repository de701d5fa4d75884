"""The kernels that crop and resize pictures = torch and Pillow. On a GPU as they are; elsewhere in Triton's interpreter.

`tests/test_augment_fused.py` runs this file in a process of its own with TRITON_INTERPRET=1; in any other process
this is a `gpu` test.
"""

from __future__ import annotations

import ctypes
import os
import queue
from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import Image

import quick_interpreter
from jpeg_planes import read_planes
from stoker.augment import Compose, RandomResizedCrop
from stoker.augment.sizing import Sizing, launch, launch_planes
from stoker.loader import nvjpeg, pictures
from stoker.loader.order import PlannedBatch
from stoker.sources.images.decoding import turned
from stoker.sources.images.encoded import picture_field
from stoker.store.fields import Dense
from stoker.store.memory import memory_store

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
if INTERPRETED:
    quick_interpreter.quicken(overflow="OVERFLOW" in os.environ)


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


# -- pictures as JPEG holds them -------------------------------------------------------------------


def jpeg(height, width, seed, mode="RGB", form="JPEG", turn=1, **options):
    coarse = np.random.default_rng(seed).integers(40, 216, (4, 5, 3), dtype=np.uint8)
    image = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC).convert(mode)
    exif = Image.Exif()
    exif[0x0112] = turn
    file = BytesIO()
    image.save(file, form, exif=exif, **({"quality": 92} if form == "JPEG" else {}), **options)
    return file.getvalue()


def enlarged(plane, halved, axis, length):
    """A plane of colours at full size, as libjpeg enlarges it."""
    if not halved:
        return plane
    plane, place = np.moveaxis(plane, axis, 0), np.arange(length)
    near = place // 2
    far = np.where(place % 2 == 0, near - 1, near + 1).clip(0, len(plane) - 1)
    return np.moveaxis(0.75 * plane[near] + 0.25 * plane[far], 0, axis)


@pytest.mark.parametrize("kind", [0, 1, 2])
def test_planes_are_resampled_like_the_rgb_picture_that_they_make(kind):
    rng = np.random.default_rng(kind)
    sizing = Sizing(RandomResizedCrop((9, 14)), 0, kind)
    sizes, turns = rng.integers(5, 40, (4, 2)), rng.integers(1, 9, 4)
    lying = np.where((turns >= 5)[:, None], sizes[:, ::-1], sizes)
    table, kept, wanted = np.ones((4, 9), np.int64), [], []
    for row, (height, width) in enumerate(lying.tolist()):
        across, down = (row & 1, row >> 1) if kind == 1 else (0, 0)
        shape = (2, height + down >> down, width + across >> across)
        first = rng.integers(0, 256, (height, width), dtype=np.uint8)
        others = rng.integers(90, 160, shape, dtype=np.uint8)
        on_device = [torch.from_numpy(each.copy()).to(DEVICE) for each in (first, *others)]
        kept += on_device
        addresses = [each.data_ptr() for each in on_device]
        table[row] = [*addresses, width, shape[2], across, down, kind, 1]
        bright = first.astype(np.float64)
        u, v = (
            enlarged(enlarged(each, down, 0, height), across, 1, width) - 128.0 for each in others
        )
        rgb = [bright + 1.402 * v, bright - 0.344136 * u - 0.714136 * v, bright + 1.772 * u]
        rgb = ([bright] * 3, rgb, [bright, u + 128, v + 128])[kind]
        wanted.append(pictures._turned_tensor(torch.from_numpy(np.stack(rgb)).float(), turns[row]))
    boxes = sizing.boxes(sizes, 0, 0)
    out = torch.zeros((4, 3, 9, 14), dtype=torch.uint8, device=DEVICE)
    launch_planes(table, sizes, turns, boxes, out)
    for made, image, (left, top, width, height) in zip(out, wanted, boxes.tolist(), strict=True):
        part = image[None, :, top : top + height, left : left + width]
        told = torch.nn.functional.interpolate(part, (9, 14), mode="bilinear", antialias=True)
        away = (made.cpu().float() - told[0].clamp(0, 255)).abs()
        assert away.max() <= 0.51 + 1e-3 * 255, away.max()


class Engine(nvjpeg.Decoder):
    """The library as this module calls it, in host memory."""

    def __init__(self):
        self.device_index, self.channels, self.planes, self._device = 0, 3, True, DEVICE
        self._found, self._handle = np.zeros((4, 4), np.int32), None

    def _look(self, _handle, address, length, *where):
        opened = Image.open(BytesIO(ctypes.string_at(address, length)))
        layers = [layer[1:3] for layer in opened.layer]
        known = {1: {(1, 1): 6}, 3: {(1, 1): 0, (2, 1): 1, (2, 2): 2, (1, 2): 3}}
        layout = known[len(layers)][layers[0]]
        for place, value in zip(where, (len(layers), layout, *opened.size), strict=True):
            ctypes.c_int32.from_address(place).value = value
        return 0

    def _decode(self, data, images, form):
        assert form == 1
        for file, numbers in zip(data, images.tolist(), strict=True):
            _, _, planes = read_planes(file.numpy().tobytes())
            for plane, address, pitch in zip(planes, numbers[:4], numbers[4:], strict=False):
                for number, line in enumerate(plane):
                    ctypes.memmove(address + number * pitch, line.tobytes(), len(line))


def test_a_known_picture_that_comes_out_otherwise_is_told():
    if not INTERPRETED:
        pytest.skip("the library of this test lies in host memory")
    nvjpeg._prove(Engine())
    Engine._decode, kept = (lambda *_: None), Engine._decode
    try:
        with pytest.raises(nvjpeg.DecoderError, match="levels away"):
            nvjpeg._prove(Engine())
    finally:
        Engine._decode = kept


def test_a_mixed_batch_in_planes_is_what_pillow_gives(monkeypatch):
    if not INTERPRETED:
        pytest.skip("the library of this test lies in host memory")
    files = [jpeg(33, 47, 0, subsampling=2), jpeg(21, 30, 1, subsampling=1)]
    files += [jpeg(17, 26, 2, subsampling=0), jpeg(25, 18, 3, "L")]
    files += [jpeg(30, 41, 3 + turn, subsampling=2, turn=turn) for turn in (3, 6, 7)]
    files += [jpeg(20, 20, 20, subsampling=0, keep_rgb=True), jpeg(22, 29, 21, form="PNG")]
    opened = [Image.open(BytesIO(file)) for file in files]
    turns = [image.getexif().get(0x0112, 1) for image in opened]
    upright = [turned(each.convert("RGB"), turn) for each, turn in zip(opened, turns, strict=True)]
    store = memory_store(
        {
            "images": picture_field(files),
            "image_size": Dense(
                np.array([(each.height, each.width) for each in upright], np.int32)
            ),
            "image_orientation": Dense(np.array(turns, np.uint8)),
        },
        "pictures",
    )
    num = len(files)
    made = pictures.Pictures(store, ["images"], np.arange(num), DEVICE, pictures.Policy())
    made.use(Compose([RandomResizedCrop((16, 24))]))
    by_others = []

    def decode_others(data):
        by_others.append(len(data))
        opened = [Image.open(BytesIO(each.numpy().tobytes())).convert("RGB") for each in data]
        return [torch.from_numpy(np.array(each)).permute(2, 0, 1) for each in opened]

    made._decode_batch = decode_others
    made._engines = pictures.Engines.__new__(pictures.Engines)
    made._engines._free, made._engines.are_used = queue.SimpleQueue(), True
    made._engines._free.put(Engine())
    monkeypatch.setattr(pictures, "_wait", lambda: None)
    planned = PlannedBatch(0, np.arange(num)[::-1].copy(), (0,), (num,), num)
    data = [torch.from_numpy(store.read_values("images", n)) for n in planned.positions]
    work = pictures.Work(planned, {}, {"images": data})
    boxes = made._boxes(planned, 0)
    for _ in range(2):  # headers are looked at once
        images, reasons = made._images_on_gpu(work, boxes)
        assert not reasons
        for image, position, box in zip(images, planned.positions, boxes.tolist(), strict=True):
            told = made.sizing.resize_picture(upright[position], box).astype(int)
            away = np.abs(image.permute(1, 2, 0).numpy().astype(int) - told)
            assert away.mean() < 1.0, (position, away.mean())
            assert away.max() <= 6, (position, away.max())
    assert made._layouts.tolist() == [2, 1, 0, 6, 2, 2, 2, nvjpeg.OTHER, nvjpeg.UNKNOWN]
    assert by_others == [1, 1]
