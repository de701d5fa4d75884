"""The torch backend: every pixel as a slow loop computes it, and exact where it can be exact."""

from __future__ import annotations

import colorsys
import math
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stoker.augment import philox, reference
from stoker.augment.compose import Compose
from stoker.augment.draw import BRIGHTNESS, CONTRAST, HUE, SATURATION, SIGMA, draw_table, untouched
from stoker.augment.geometry import (
    RandomAffine,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomRotation,
    RandomVerticalFlip,
)
from stoker.augment.guard import NOT_FINITE, OUT_OF_UNIT
from stoker.augment.ops import (
    ColorJitter,
    GaussianBlur,
    Normalize,
    RandomErasing,
    ToDtype,
    encode_tape,
    make_program,
)
from stoker.augment.reference import TorchBackend, move_boxes, move_keypoints

gpu = pytest.mark.gpu
CPU = torch.device("cpu")
EVERYTHING = [
    RandomHorizontalFlip(),
    RandomRotation(30, p=0.7),
    RandomAffine(5, (0.1, 0.1), (0.8, 1.2), (4, 4), p=0.7),
    ColorJitter(0.3, 0.3, 0.3, 0.2, p=0.7),
    GaussianBlur(5, p=0.7),
    RandomErasing(0.5, value=0.4),
    Normalize((0.4, 0.5, 0.6), (0.2, 0.3, 0.4)),
]


def noise(*shape, seed=0):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def bytes_of(*shape, seed=0):
    return torch.randint(
        0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


def drawn(ops, images, seed=0):
    tape = encode_tape(ops, tuple(images.shape[-2:]))
    return draw_table(tape, philox.make_counter(seed), images.shape[0])


def apply(images, ops, table=None, masks=None, rows=None, faults=None, **others):
    program = make_program(ops, tuple(images.shape[-2:]), images.shape[1], **others)
    table = drawn(ops, images) if table is None else table
    result, moved = TorchBackend().apply(
        images, masks, rows, table.to(images.device), program, faults
    )
    return result if masks is None else (result, moved)


def turned(degrees):
    return [RandomRotation((degrees, degrees))]


# -- against a slow loop -------------------------------------------------------------------------


def slow_resample(image, matrix, out_size):
    """One channel, float64, straight from the formula."""
    height, width = image.shape
    result = np.zeros(out_size)
    for y in range(out_size[0]):
        for x in range(out_size[1]):
            sx = np.float32(
                np.float32(matrix[0] * np.float32(x) + matrix[1] * np.float32(y)) + matrix[2]
            )
            sy = np.float32(
                np.float32(matrix[3] * np.float32(x) + matrix[4] * np.float32(y)) + matrix[5]
            )
            x0, y0 = math.floor(sx), math.floor(sy)
            fx, fy = float(sx) - x0, float(sy) - y0
            for dy, wy in ((0, 1 - fy), (1, fy)):
                for dx, wx in ((0, 1 - fx), (1, fx)):
                    if 0 <= x0 + dx < width and 0 <= y0 + dy < height:
                        result[y, x] += wy * wx * image[y0 + dy, x0 + dx]
    return result


@pytest.mark.parametrize("size", [(9, 13), (16, 8), (1, 7), (6, 1)])
@pytest.mark.parametrize(
    "ops",
    [
        [RandomRotation(180)],
        [RandomAffine(40, (0.5, 0.5), (0.3, 3.0), (30, 30))],
        [RandomHorizontalFlip(), RandomVerticalFlip(), RandomAffine(0, (1.0, 1.0))],
        [RandomResizedCrop((7, 5), (0.3, 1.0))],
        [RandomRotation(20), RandomCrop((5, 4), padding=3)],
    ],
)
def test_geometry_is_the_slow_loop(size, ops):
    images = noise(3, 2, *size)
    table = drawn(ops, images, seed=4)
    result = apply(images, ops, table)
    for sample in range(3):
        matrix = table[sample, :6].numpy()
        for channel in range(2):
            slow = slow_resample(images[sample, channel].numpy(), matrix, result.shape[-2:])
            np.testing.assert_allclose(result[sample, channel], slow, atol=2e-6)


@given(
    height=st.integers(1, 9),
    width=st.integers(1, 9),
    entries=st.lists(st.floats(-30, 30, width=32), min_size=6, max_size=6),
)
def test_any_matrix_is_the_slow_loop_for_images_and_labels(height, width, entries):
    images = noise(1, 1, height, width)
    labels = torch.arange(height * width).view(1, height, width)
    table = untouched(1, CPU)
    table[0, :6] = torch.tensor(entries)
    result, moved = apply(images, [RandomRotation(1)], table, labels, ignore_index=-1)
    m = table[0, :6].numpy()
    slow = slow_resample(images[0, 0].numpy(), m, (height, width))
    np.testing.assert_allclose(result[0, 0], slow, atol=2e-6)
    for y in range(height):
        for x in range(width):
            sx = np.float32(np.float32(m[0] * np.float32(x) + m[1] * np.float32(y)) + m[2])
            sy = np.float32(np.float32(m[3] * np.float32(x) + m[4] * np.float32(y)) + m[5])
            column, row = (math.floor(np.float32(s + np.float32(0.5))) for s in (sx, sy))
            inside = 0 <= column < width and 0 <= row < height
            assert moved[0, y, x] == (row * width + column if inside else -1)


@pytest.mark.parametrize("shift", [0.5, 0.25, -0.31, 0.01])
def test_hue_is_colorsys(shift):
    images = noise(1, 3, 6, 7)
    images[0, :, 0, 0] = 0.0
    images[0, :, 0, 1] = 1.0
    images[0, :, 0, 2] = torch.tensor([1.0, 0.0, 0.0])
    images[0, :, 0, 3] = torch.tensor([0.2, 0.7, 0.7])
    table = untouched(1, CPU)
    table[:, HUE] = shift
    result = apply(images, [ColorJitter(hue=0.5)], table)
    for pixel, made in zip(images[0].flatten(1).T, result[0].flatten(1).T, strict=True):
        hue, saturation, value = colorsys.rgb_to_hsv(*pixel.tolist())
        expected = colorsys.hsv_to_rgb((hue + shift) % 1.0, saturation, value)
        np.testing.assert_allclose(made, expected, atol=2e-6)


def test_brightness_contrast_and_saturation_are_their_formulas():
    images, table = noise(2, 3, 5, 6), untouched(2, CPU)
    b, c, s = torch.tensor([0.5, 1.8]), torch.tensor([1.7, 0.2]), torch.tensor([0.0, 2.5])
    table[:, BRIGHTNESS], table[:, CONTRAST], table[:, SATURATION] = b, c, s
    weights = torch.tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)
    b, c, s = (factor.view(2, 1, 1, 1) for factor in (b, c, s))
    bright = (images * b).clamp(0, 1)
    mean = (bright * weights).sum(1, keepdim=True).mean((2, 3), keepdim=True)
    sharp = (bright * c + (1 - c) * mean).clamp(0, 1)
    vivid = (sharp * s + (1 - s) * (sharp * weights).sum(1, keepdim=True)).clamp(0, 1)
    result = apply(images, [ColorJitter(0.9, 0.9, 2.0)], table)
    torch.testing.assert_close(result, vivid, atol=1e-6, rtol=0)


@pytest.mark.parametrize("taps", [3, 5, 9])
def test_blur_is_the_gaussian_with_reflected_borders(taps):
    images, table = noise(2, 1, 9, 11), untouched(2, CPU)
    table[:, SIGMA] = torch.tensor([0.8, 3.0])
    result = apply(images, [GaussianBlur(taps)], table).numpy()
    reach = taps // 2
    for sample, sigma in enumerate((0.8, 3.0)):
        bell = np.exp(
            -(np.arange(-reach, reach + 1) ** 2) / (2 * np.float64(np.float32(sigma)) ** 2)
        )
        kernel = np.outer(bell, bell) / bell.sum() ** 2
        padded = np.pad(images[sample, 0].numpy(), reach, mode="reflect")
        for y in range(9):
            for x in range(11):
                expected = (kernel * padded[y : y + taps, x : x + taps]).sum()
                assert abs(result[sample, 0, y, x] - expected) < 1e-6


def test_erasing_fills_the_rectangle_before_normalisation():
    images, table = noise(2, 3, 6, 8), untouched(2, CPU)
    table[0, 11:15] = torch.tensor([2.0, 1.0, 5.0, 4.0])
    ops = [RandomErasing(1.0, value=0.5), Normalize(0.5, 0.25)]
    result = apply(images, ops, table)
    assert (result[0, :, 1:4, 2:5] == 0).all()
    outside = torch.ones(6, 8, dtype=torch.bool)
    outside[1:4, 2:5] = False
    expected = (images - 0.5) * 4
    assert torch.equal(result[0][:, outside], expected[0][:, outside])
    assert torch.equal(result[1], expected[1])


# -- exact where it can be -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float16, torch.bfloat16])
def test_nothing_drawn_changes_no_bit(dtype):
    images = bytes_of(4, 3, 11, 14) if dtype == torch.uint8 else noise(4, 3, 11, 14).to(dtype)
    shut = [
        RandomHorizontalFlip(0.3),
        RandomAffine(30, (0.2, 0.2), (0.5, 2.0), (10, 10), p=0.3),
        ColorJitter(0.5, 0.5, 0.5, 0.5, p=0.3),
        GaussianBlur(5, p=0.3),
        RandomErasing(0.3),
    ]
    labels = torch.randint(0, 9, (4, 11, 14))
    result, moved = apply(images, shut, untouched(4, CPU), labels)
    scale = torch.tensor(1 / 255)
    expected = images.float() * scale if dtype == torch.uint8 else images.float()
    assert torch.equal(result, expected)
    assert torch.equal(moved, labels)


def test_bytes_become_v_times_one_255th():
    images = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    result = apply(images, [Normalize(0.0, 1.0)])
    expected = np.arange(256, dtype=np.float32) * np.float32(1 / 255)
    assert np.array_equal(result.flatten().numpy(), expected)
    assert result.max() == 1.0


def test_values_slightly_outside_are_left_alone_by_untouched_factors():
    images = torch.full((1, 3, 2, 2), 1.0005)
    images[0, 0] = -0.0005
    assert torch.equal(apply(images, [ColorJitter(0.1, 0.1, 0.1)], untouched(1, CPU)), images)


@pytest.mark.parametrize("extra", [[], [RandomRotation((360, 360))], [RandomCrop((9, 14))]])
@pytest.mark.parametrize(
    ("ops", "axes"),
    [
        ([RandomHorizontalFlip(1.0)], (-1,)),
        ([RandomVerticalFlip(1.0)], (-2,)),
        ([RandomVerticalFlip(1.0), RandomHorizontalFlip(1.0)], (-2, -1)),
    ],
)
def test_flips_are_exact_on_every_path(ops, axes, extra):
    images, labels = noise(3, 3, 9, 14), torch.randint(0, 99, (3, 1, 9, 14))
    result, moved = apply(images, [*ops, *extra], masks=labels)
    assert torch.equal(result, images.flip(axes))
    assert torch.equal(moved, labels.flip(axes))


@pytest.mark.parametrize(("degrees", "turns"), [(0, 0), (90, 1), (180, 2), (-90, 3), (270, 3)])
@pytest.mark.parametrize("side", [8, 9])
def test_quarter_turns_are_exact(degrees, turns, side):
    images, labels = noise(2, 3, side, side), torch.randint(0, 9, (2, side, side))
    result, moved = apply(images, turned(degrees), masks=labels)
    assert torch.equal(result, images.rot90(turns, (2, 3)))
    assert torch.equal(moved, labels.rot90(turns, (1, 2)))


def test_a_half_turn_of_any_size_is_exact():
    images = noise(2, 1, 7, 12)
    assert torch.equal(apply(images, turned(180)), images.flip(2, 3))


def test_whole_crops_with_padding_are_slices():
    images, labels = noise(5, 3, 10, 12), torch.randint(0, 9, (5, 10, 12))
    ops = [RandomCrop((8, 9), padding=3)]
    table = drawn(ops, images)
    result, moved = apply(images, ops, table, labels, ignore_index=77)
    padded = torch.nn.functional.pad(images, (3, 3, 3, 3))
    classes = torch.nn.functional.pad(labels, (3, 3, 3, 3), value=77)
    for sample in range(5):
        left, top = int(table[sample, 2]) + 3, int(table[sample, 5]) + 3
        assert torch.equal(result[sample], padded[sample, :, top : top + 8, left : left + 9])
        assert torch.equal(moved[sample], classes[sample, top : top + 8, left : left + 9])
    assert len({tuple(row) for row in table[:, 2:6:3].tolist()}) > 1


@pytest.mark.parametrize(
    "ops",
    [
        [RandomHorizontalFlip(), RandomVerticalFlip()],
        [RandomHorizontalFlip(), RandomCrop((9, 15), padding=4), RandomVerticalFlip()],
        [RandomCrop((2, 30), padding=11)],
    ],
)
def test_slices_and_the_resample_of_a_gpu_agree_bit_for_bit(ops):
    images, labels = bytes_of(20, 3, 11, 14), torch.randint(0, 9, (20, 1, 11, 14))
    program, table = make_program(ops, (11, 14), 3), drawn(ops, images, seed=3)
    backend = TorchBackend()
    assert program.whole_pixels
    sliced = backend.apply(images, labels, None, table, program, None)
    sampled = backend.apply(images, labels, None, table, replace(program, whole_pixels=False), None)
    assert torch.equal(sliced[0], sampled[0])
    assert torch.equal(sliced[1], sampled[1])


@pytest.mark.parametrize("offset", [-30, -14, -1, 0, 13, 14, 40])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_crops_beyond_the_image_are_empty_there(offset, sign):
    images, table = noise(1, 1, 11, 14), untouched(1, CPU)
    table[0, 0], table[0, 2] = sign, offset
    result = apply(images, [RandomCrop((11, 9), padding=1)], table)
    for x in range(9):
        column = int(sign * x + offset)
        expected = images[0, 0, :, column] if 0 <= column < 14 else torch.zeros(11)
        assert torch.equal(result[0, 0, :, x], expected)


def test_a_resize_to_the_same_size_changes_nothing():
    images = noise(2, 3, 50, 37)
    assert torch.equal(apply(images, [RandomResizedCrop((50, 37), p=0.0)]), images)


# -- masks, dtypes, layouts, rows ----------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_masks_keep_dtype_and_labels_and_corners_are_ignored(dtype):
    labels = torch.randint(1, 19, (2, 1, 20, 31)).to(dtype)
    _, moved = apply(noise(2, 3, 20, 31), turned(45), masks=labels)
    assert moved.dtype == dtype
    assert moved.shape == labels.shape
    assert set(moved.unique().tolist()) <= {*range(1, 19), 255}
    assert (moved[:, 0, 0, 0] == 255).all()
    assert not (moved[:, 0, 8:12, 12:18] == 255).any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("channels_last", [False, True])
def test_dtype_and_layout_are_those_asked_for(dtype, channels_last):
    images = bytes_of(3, 3, 16, 19)
    table = drawn(EVERYTHING, images)
    wide = apply(images, EVERYTHING, table)
    result = apply(images, [*EVERYTHING, ToDtype(dtype, channels_last)], table)
    assert result.dtype == dtype
    assert result.is_contiguous(
        memory_format=torch.channels_last if channels_last else torch.contiguous_format
    )
    assert torch.equal(result, wide.to(dtype))


def test_strides_of_the_input_do_not_matter():
    images = bytes_of(3, 3, 16, 19)
    table = drawn(EVERYTHING, images)
    expected = apply(images, EVERYTHING, table)
    last = images.contiguous(memory_format=torch.channels_last)
    assert torch.equal(apply(last, EVERYTHING, table), expected)
    cut = torch.zeros(3, 3, 16, 38, dtype=torch.uint8)
    cut[..., ::2] = images
    assert torch.equal(apply(cut[..., ::2], EVERYTHING, table), expected)


@pytest.mark.parametrize("ops", [EVERYTHING, [RandomHorizontalFlip()], [Normalize(0.5, 0.5)]])
def test_rows_pick_images_and_masks(ops):
    images, labels = bytes_of(7, 3, 12, 13), torch.randint(0, 9, (7, 12, 13))
    rows = torch.tensor([6, 0, 0, 3])
    table = drawn(ops, images[rows])
    result, moved = apply(images, ops, table, labels, rows=rows)
    expected, classes = apply(images[rows], ops, table, labels[rows])
    assert torch.equal(result, expected)
    assert torch.equal(moved, classes)


def test_the_input_is_never_changed():
    images, labels = noise(3, 3, 12, 13), torch.randint(0, 9, (3, 12, 13))
    for ops in (EVERYTHING, [RandomHorizontalFlip(1.0), ColorJitter(0.5)], [Normalize(0.5, 0.5)]):
        before = images.clone(), labels.clone()
        result, moved = apply(images, ops, masks=labels)
        assert torch.equal(images, before[0])
        assert torch.equal(labels, before[1])
        assert result.data_ptr() != images.data_ptr()
        assert moved.data_ptr() != labels.data_ptr()


def test_slices_of_the_batch_give_the_same_bits(monkeypatch):
    images, labels = noise(64, 3, 20, 22), torch.randint(0, 9, (64, 20, 22))
    table = drawn(EVERYTHING, images)
    whole = apply(images, EVERYTHING, table, labels)
    monkeypatch.setattr(reference, "CPU_SLICE_BYTES", 3 * 20 * 22 * 3 * 4)
    parts = apply(images, EVERYTHING, table, labels)
    assert torch.equal(whole[0], parts[0])
    assert torch.equal(whole[1], parts[1])


@pytest.mark.parametrize("dtype", [ToDtype(torch.float32), ToDtype(torch.bfloat16, True)])
def test_a_large_result_keeps_its_memory_as_long_as_a_view_of_it_lives(dtype):
    images = bytes_of(16, 3, 96, 128)
    augment = Compose([RandomHorizontalFlip(), ColorJitter(0.4), dtype], seed=3)
    first = augment(images)
    place, row, kept = first.data_ptr(), first[5], first[5].clone()
    del first
    second = augment(images)
    assert second.data_ptr() != place
    assert second.dtype == dtype.dtype
    assert second.is_contiguous() != dtype.channels_last
    assert torch.equal(row, kept)
    del row
    assert augment(images).data_ptr() == place
    pickle.loads(pickle.dumps(augment))(images)


def test_float64_images_are_worked_on_in_float64():
    images = noise(2, 3, 12, 13).double()
    ops = [*EVERYTHING, ToDtype(torch.float64)]
    table = drawn(ops, images)
    result = apply(images, ops, table)
    torch.testing.assert_close(
        result.float(), apply(images.float(), EVERYTHING, table), atol=2e-5, rtol=0
    )
    assert not torch.equal(result, result.float().double())


@pytest.mark.parametrize("channels", [1, 2, 5])
def test_any_number_of_channels_moves_and_brightens(channels):
    images, table = noise(2, channels, 9, 9), untouched(2, CPU)
    table[:, BRIGHTNESS] = 0.5
    result = apply(images, [RandomHorizontalFlip(0.5), ColorJitter(0.5)], table)
    assert torch.equal(result, images * 0.5)


def test_one_channel_takes_contrast_and_ignores_saturation_and_hue():
    images, table = noise(1, 1, 9, 9), untouched(1, CPU)
    table[:, CONTRAST], table[:, SATURATION], table[:, HUE] = 0.5, 0.1, 0.3
    result = apply(images, [ColorJitter(0.1, 0.5, 0.9, 0.5)], table)
    torch.testing.assert_close(result, images * 0.5 + images.mean() * 0.5)


@pytest.mark.parametrize(
    ("bad", "bits"),
    [
        (255.0, OUT_OF_UNIT),
        (-0.1, OUT_OF_UNIT),
        (math.nan, NOT_FINITE),
        (math.inf, NOT_FINITE | OUT_OF_UNIT),
        (1.0005, 0),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_faults_are_noted_on_the_device(bad, bits, dtype):
    images, faults = noise(3, 3, 5, 5).to(dtype), torch.zeros(1, dtype=torch.int32)
    images[1, 2, 3, 4] = bad
    if dtype == torch.bfloat16 and bits == 0:
        images[1, 2, 3, 4] = 1.0  # 1.0005 is no bfloat16
    apply(images, [RandomHorizontalFlip()], faults=faults)
    assert faults.item() == bits
    apply(noise(3, 3, 5, 5), [RandomHorizontalFlip()], faults=faults)
    assert faults.item() == bits  # a later good batch does not hide it


def test_rows_that_are_not_used_are_not_blamed():
    images, faults = noise(3, 3, 5, 5), torch.zeros(1, dtype=torch.int32)
    images[1] = 99.0
    rows = torch.tensor([0, 2])
    apply(images, [Normalize(0.5, 0.5)], untouched(2, CPU), rows=rows, faults=faults)
    assert faults.item() == 0


# -- boxes and keypoints -------------------------------------------------------------------------

MOVES = [
    [RandomHorizontalFlip(1.0)],
    turned(90),
    [RandomRotation(30)],
    [RandomAffine(20, (0.1, 0.1), (0.9, 1.4), (8, 8))],
    [RandomCrop((50, 54), padding=2)],
    [RandomResizedCrop((48, 52), (0.7, 1.0))],
    [RandomVerticalFlip(1.0), RandomRotation(20), RandomCrop(56)],
]


@pytest.mark.parametrize("ops", MOVES)
def test_a_keypoint_follows_its_dot(ops):
    places = torch.tensor([[20, 25], [31, 40], [40, 22], [28, 30]])
    images = torch.zeros(4, 1, 61, 63)
    for sample, (x, y) in enumerate(places.tolist()):
        images[sample, 0, y - 1 : y + 2, x - 1 : x + 2] = 0.5
        images[sample, 0, y, x] = 1.0
    table = drawn(ops, images, seed=11)
    result = apply(images, ops, table)
    program = make_program(ops, (61, 63), 1)
    moved, inside = move_keypoints(places.view(4, 1, 2).float(), table, program)
    for sample in range(4):
        weight = result[sample, 0]
        if not inside[sample, 0] or weight.sum() < 1.0:
            continue
        y, x = torch.meshgrid(*(torch.arange(n).float() for n in weight.shape), indexing="ij")
        centre = torch.stack([(weight * x).sum(), (weight * y).sum()]) / weight.sum()
        assert (centre - moved[sample, 0]).abs().max() < 0.3
    assert inside.sum() >= 3


@pytest.mark.parametrize("ops", MOVES)
def test_a_box_holds_its_moved_rectangle(ops):
    boxes = torch.tensor([[[20.0, 18, 34, 30]], [[25, 25, 26, 40]], [[5, 30, 50, 32]]])
    images = torch.zeros(3, 1, 61, 63)
    for sample, (x0, y0, x1, y1) in enumerate(boxes[:, 0].long().tolist()):
        images[sample, 0, y0:y1, x0:x1] = 1.0
    table = drawn(ops, images, seed=11)
    result, program = apply(images, ops, table), make_program(ops, (61, 63), 1)
    moved, valid = move_boxes(boxes, table, program)
    assert valid.all()
    for sample in range(3):
        rows, columns = torch.nonzero(result[sample, 0] > 0.5, as_tuple=True)
        x0, y0, x1, y1 = moved[sample, 0].tolist()
        assert abs(columns.min() - x0) < 1.5
        assert abs(columns.max() + 1 - x1) < 1.5
        assert abs(rows.min() - y0) < 1.5
        assert abs(rows.max() + 1 - y1) < 1.5
        assert 0 <= x0 <= x1 <= program.out_size[1]
        assert 0 <= y0 <= y1 <= program.out_size[0]


def test_flipped_boxes_and_keypoints_are_exact():
    program = make_program([RandomHorizontalFlip(1.0)], (10, 20), 3)
    table = drawn([RandomHorizontalFlip(1.0)], torch.zeros(1, 3, 10, 20))
    boxes, valid = move_boxes(torch.tensor([[[2.0, 3, 7, 9]]]), table, program)
    assert boxes.tolist() == [[[13, 3, 18, 9]]]
    assert valid.all()
    points, inside = move_keypoints(torch.tensor([[[0.0, 4], [19, 0], [25, 0]]]), table, program)
    assert points.tolist() == [[[19, 4], [0, 0], [-6, 0]]]
    assert inside.tolist() == [[True, True, False]]


def test_without_geometry_boxes_are_cut_at_the_border_only():
    program = make_program([ColorJitter(0.1)], (10, 20), 3)
    boxes = torch.tensor([[[-3.0, 2, 5, 14], [21, 2, 25, 5]]])
    moved, valid = move_boxes(boxes, untouched(1, CPU), program)
    assert moved[0, 0].tolist() == [0, 2, 5, 10]
    assert valid.tolist() == [[True, False]]
    points, inside = move_keypoints(torch.tensor([[[3.0, 4], [20, 4]]]), untouched(1, CPU), program)
    assert points.tolist() == [[[3, 4], [20, 4]]]
    assert inside.tolist() == [[True, False]]


def test_a_matrix_without_inverse_marks_everything_outside():
    program = make_program([RandomResizedCrop(4)], (9, 9), 1)
    table = untouched(1, CPU)
    table[0, 0] = 0.0
    points, inside = move_keypoints(torch.ones(1, 2, 2), table, program)
    _, valid = move_boxes(torch.ones(1, 2, 4), table, program)
    assert torch.isfinite(points).all()
    assert not inside.any()
    assert not valid.any()


@given(angle=st.floats(-180, 180), x=st.floats(0, 40), y=st.floats(0, 30))
def test_keypoints_and_the_matrix_are_inverse_of_each_other(angle, x, y):
    ops = [RandomRotation((angle, angle)), RandomAffine(10, (0.2, 0.2), (0.5, 2.0), (20, 20))]
    table = drawn(ops, torch.zeros(1, 1, 31, 41))
    points, _ = move_keypoints(torch.tensor([[[x, y]]]), table, make_program(ops, (31, 41), 1))
    m, (px, py) = table[0].double(), points[0, 0].double()
    assert abs(m[0] * px + m[1] * py + m[2] - x) < 1e-3
    assert abs(m[3] * px + m[4] * py + m[5] - y) < 1e-3


@gpu
def test_the_gpu_gives_what_the_cpu_gives():
    images, labels = bytes_of(6, 3, 65, 47), torch.randint(0, 19, (6, 65, 47))
    tape = encode_tape(EVERYTHING, (65, 47))
    table = draw_table(tape, philox.make_counter(5), 6)
    there = draw_table(tape.cuda(), philox.make_counter(5).cuda(), 6)
    torch.testing.assert_close(there.cpu(), table, atol=1e-4, rtol=1e-5)
    result, moved = apply(images, EVERYTHING, table, labels)
    far, classes = apply(images.cuda(), EVERYTHING, table, labels.cuda())
    torch.testing.assert_close(far.cpu(), result, atol=1e-4, rtol=0)
    assert (classes.cpu() != moved).float().mean() < 1e-3
