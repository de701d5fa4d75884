"""Definitions, tape and draws: what may be asked for, and what each sample then gets."""

from __future__ import annotations

import math
import pickle
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stoker.augment import Compose, philox
from stoker.augment.definition import TAPE_WIDTH, Opcode
from stoker.augment.draw import draw_table, fill_table, untouched
from stoker.augment.geometry import (
    CenterCrop,
    RandomAffine,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomRotation,
    RandomVerticalFlip,
    Resize,
)
from stoker.augment.ops import (
    ColorJitter,
    GaussianBlur,
    Normalize,
    RandomBrightness,
    RandomContrast,
    RandomErasing,
    RandomHue,
    RandomSaturation,
    ToDtype,
    check_order,
    encode_tape,
    make_program,
)
from stoker.errors import InputError

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
EVERY_OP = [
    RandomHorizontalFlip(),
    RandomVerticalFlip(0.25),
    RandomRotation(15, p=0.3),
    RandomAffine(5, (0.1, 0.2), (0.9, 1.1), (3, 4), p=0.4),
    RandomResizedCrop((20, 24), p=0.8),
    RandomCrop((18, 16), padding=2),
    ColorJitter(0.2, 0.3, 0.1, 0.05, p=0.5),
    GaussianBlur(3, p=0.2),
    RandomErasing(0.5),
    Normalize(MEAN, STD),
    ToDtype(torch.float16, channels_last=True),
]


def draw(ops, batch=64, size=(40, 48), seed=0, epoch=0, step=0, stream=0):
    counter = philox.make_counter(seed, epoch, step, stream)
    return draw_table(encode_tape(ops, size), counter, batch)


# -- what may be asked for -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: RandomHorizontalFlip(1.5), "p of RandomHorizontalFlip is 1.5"),
        (lambda: RandomVerticalFlip(-0.1), "p of RandomVerticalFlip is -0.1"),
        (lambda: RandomHorizontalFlip(float("nan")), "is nan"),
        (lambda: RandomHorizontalFlip("often"), "is 'often'"),
        (lambda: RandomHorizontalFlip(True), "is True"),
        (lambda: RandomRotation(-15), "degrees is -15"),
        (lambda: RandomRotation((10, -10)), "the low end is above the high end"),
        (lambda: RandomRotation((0, 10, 20)), "two numbers"),
        (lambda: RandomRotation(float("inf")), "degrees is inf"),
        (lambda: RandomAffine(degrees=-1), "degrees is -1"),
        (lambda: RandomAffine(scale=(1.1, 0.9)), "the low end is above the high end"),
        (lambda: RandomAffine(scale=(0, 1)), "scale is 0"),
        (lambda: RandomAffine(translate=(1.5, 0)), "translate is 1.5"),
        (lambda: RandomAffine(translate=0.1), "two numbers, for x and for y"),
        (lambda: RandomAffine(shear=(-3, 0)), "shear is -3"),
        (lambda: RandomAffine(shear=(90, 0)), "shear is 90"),
        (lambda: RandomResizedCrop(0), "size is 0"),
        (lambda: RandomResizedCrop((8, 0)), "size is (8, 0)"),
        (lambda: RandomResizedCrop(8, scale=(0.5, 1.5)), "scale is 1.5"),
        (lambda: RandomResizedCrop(8, ratio=(2, 1)), "the low end is above"),
        (lambda: RandomResizedCrop(2.5), "size is 2.5"),
        (lambda: Resize(-4), "size is -4"),
        (lambda: RandomCrop(32, padding=-1), "padding is -1"),
        (lambda: RandomCrop(0), "size is 0"),
        (lambda: RandomBrightness(-0.1), "brightness is -0.1"),
        (lambda: RandomBrightness(float("inf")), "brightness is inf"),
        (lambda: ColorJitter(brightness=(0, float("inf"))), "brightness is inf"),
        (lambda: RandomSaturation(1e7), "a number from 0 to 1e+06"),
        (lambda: Normalize(0.0, 1e-300), "std is 1e-300"),
        (lambda: RandomContrast((1.2, 0.8)), "the low end is above"),
        (lambda: RandomSaturation((-0.5, 1.0)), "saturation is -0.5"),
        (lambda: RandomHue(0.6), "hue is 0.6"),
        (lambda: ColorJitter(hue=(-0.7, 0)), "hue is -0.7"),
        (lambda: ColorJitter(p=2), "p of ColorJitter is 2"),
        (lambda: GaussianBlur(4), "kernel_size is 4"),
        (lambda: GaussianBlur(1), "kernel_size is 1"),
        (lambda: GaussianBlur(3, sigma=(2, 1)), "the low end is above"),
        (lambda: GaussianBlur(3, sigma=(0, 1)), "sigma is 0"),
        (lambda: RandomErasing(value=2), "value of RandomErasing is 2"),
        (lambda: RandomErasing(scale=(0.5, 0.1)), "the low end is above"),
        (lambda: Normalize(MEAN, (0.2, 0, 0.2)), "std is (0.2, 0, 0.2)"),
        (lambda: Normalize((), ()), "mean is empty"),
        (lambda: Normalize("grey", 1), "mean is 'grey'"),
        (lambda: ToDtype(torch.int32), "dtype is torch.int32"),
        (lambda: philox.make_counter(1 << 64), "seed is"),
        (lambda: philox.make_counter(0, epoch=-1), "epoch is -1"),
        (lambda: philox.make_counter(0, stream=1 << 16), "stream is 65536"),
    ],
)
def test_bad_arguments_say_what_is_allowed_and_what_to_type(make, words):
    with pytest.raises(InputError) as caught:
        make()
    assert words in str(caught.value)
    assert caught.value.allowed
    assert caught.value.fix


@pytest.mark.parametrize("op", EVERY_OP, ids=lambda op: type(op).__name__)
def test_ops_are_values(op):
    assert pickle.loads(pickle.dumps(op)) == op
    assert hash(op) == hash(pickle.loads(pickle.dumps(op)))
    assert eval(repr(op), globals()) == op  # what is printed can be typed
    with pytest.raises(AttributeError):
        op.p = 0.1


def test_every_row_of_the_tape_holds_opcode_gate_and_numbers():
    tape = encode_tape(EVERY_OP, (40, 48))
    assert tape.shape == (9, TAPE_WIDTH)
    assert tape.dtype == torch.float32
    assert tape[:, 0].tolist() == [1, 2, 3, 3, 4, 5, 6, 7, 8]
    torch.testing.assert_close(
        tape[:, 1], torch.tensor([0.5, 0.25, 0.3, 0.4, 0.8, 1.0, 0.5, 0.2, 0.5])
    )
    assert tape[0, 2] == 47
    assert tape[1, 2] == 39
    # The crop sees the 20x24 that the resized crop made, and padding 2 on each side.
    assert tape[5, 2:6].tolist() == [-2, -2, 13, 7]
    assert tape[8, 2:4].tolist() == [16, 18]
    assert encode_tape([Normalize(MEAN, STD)], (8, 8)).shape == (0, TAPE_WIDTH)


# -- the order -----------------------------------------------------------------------------------


def test_the_documented_order_passes_and_keeps_the_ops():
    assert check_order(EVERY_OP) == tuple(EVERY_OP)


@pytest.mark.parametrize(
    ("ops", "words", "order"),
    [
        (
            [Normalize(MEAN, STD), ColorJitter(0.2)],
            "colour on normalised values destroys them ([-2.1,2.6] -> [.14,.84])",
            "Compose([ColorJitter, Normalize])",
        ),
        (
            [Normalize(MEAN, STD), RandomCrop(32, padding=4)],
            "is the mean colour, not black",
            "Compose([RandomCrop, Normalize])",
        ),
        (
            [RandomErasing(), GaussianBlur(3), RandomHorizontalFlip()],
            "GaussianBlur stands after RandomErasing",
            "Compose([RandomHorizontalFlip, GaussianBlur, RandomErasing])",
        ),
        (
            [RandomContrast(0.1), RandomBrightness(0.1)],
            "brightness, contrast, saturation, hue",
            "Compose([RandomBrightness, RandomContrast])",
        ),
        (
            [ToDtype(torch.float16), Normalize(MEAN, STD)],
            "Normalize stands after ToDtype",
            "Compose([Normalize, ToDtype])",
        ),
    ],
)
def test_another_order_is_refused_with_the_order_to_type(ops, words, order):
    with pytest.raises(InputError) as caught:
        check_order(ops)
    assert words in str(caught.value)
    _, *names = re.findall(r"[A-Z]\w+(?=\()", caught.value.fix)
    assert f"Compose([{', '.join(names)}])" == order


@pytest.mark.parametrize(
    ("ops", "words"),
    [
        ([ColorJitter(0.1), ColorJitter(0.2)], "ColorJitter repeats work"),
        ([ColorJitter(0.1), RandomHue(0.1)], "RandomHue repeats work"),
        ([GaussianBlur(3), GaussianBlur(5)], "GaussianBlur repeats work"),
        ([Normalize(0.5, 0.5), Normalize(0.5, 0.5)], "Normalize repeats work"),
        ([RandomHorizontalFlip], "is not an augmentation"),
        ([lambda image: image], "is not an augmentation"),
    ],
)
def test_repeated_and_foreign_ops_are_refused(ops, words):
    with pytest.raises(InputError, match=words):
        check_order(ops)


def test_geometry_may_repeat_in_any_order():
    check_order([RandomRotation(5), RandomHorizontalFlip(), RandomRotation(5), RandomCrop(4)])


# -- the program ---------------------------------------------------------------------------------


def test_the_program_holds_what_does_not_depend_on_the_draw():
    program = make_program(EVERY_OP, (40, 48), 3, ignore_index=7)
    assert (program.in_size, program.out_size) == ((40, 48), (18, 16))
    assert program.geometry
    assert program.brightness
    assert program.contrast
    assert program.saturation
    assert program.hue
    assert program.blur_kernel == 3
    assert program.mean == MEAN
    assert program.out_dtype == torch.float16
    assert program.channels_last
    assert program.ignore_index == 7
    assert not program.whole_pixels
    assert hash(program) == hash(make_program(EVERY_OP, (40, 48), 3, ignore_index=7))


def test_work_that_no_draw_can_ask_for_is_left_out():
    idle = [
        RandomHorizontalFlip(0.0),
        RandomRotation(0),
        RandomAffine(10, p=0.0),
        ColorJitter(0.0, 0.0, p=1.0),
        GaussianBlur(3, p=0.0),
        RandomErasing(0.0),
    ]
    program = make_program(idle, (8, 8), 3)
    busy = (program.geometry, program.brightness, program.contrast, program.erase)
    assert busy == (False,) * 4
    assert program.blur_kernel == 0
    grey = make_program([ColorJitter(0.1, 0.1, 0.1, 0.1)], (8, 8), 1)
    assert grey.contrast
    assert not grey.saturation
    assert not grey.hue


@pytest.mark.parametrize(
    ("ops", "whole"),
    [
        ([RandomVerticalFlip(), RandomHorizontalFlip()], True),
        ([RandomHorizontalFlip(), RandomCrop(4, 1)], True),
        ([RandomHorizontalFlip(), RandomRotation(3)], False),
        ([RandomHorizontalFlip(), RandomRotation(3, p=0.0)], True),
        ([Resize(8)], False),
        ([], False),
    ],
)
def test_the_program_knows_when_pixels_stay_whole(ops, whole):
    assert make_program(ops, (8, 8), 3).whole_pixels == whole


@pytest.mark.parametrize(
    ("ops", "size", "channels", "words"),
    [
        ([RandomCrop(33)], (32, 40), 3, "a crop of 33x33 from an image of 32x40"),
        ([RandomCrop(41, padding=4)], (32, 64), 3, "at most 40x72"),
        ([Normalize(MEAN, STD)], (8, 8), 1, "mean has 3 numbers and the images have 1 channels"),
        ([RandomContrast(0.1)], (8, 8), 4, "contrast on images with 4 channels"),
        ([ColorJitter(hue=0.1)], (8, 8), 2, "hue on images with 2 channels"),
        ([GaussianBlur(9)], (4, 30), 3, "a blur of 9 taps on images of 4x30"),
    ],
)
def test_ops_that_do_not_fit_the_images_are_refused(ops, size, channels, words):
    with pytest.raises(InputError) as caught:
        make_program(ops, size, channels)
    assert words in str(caught.value)
    assert caught.value.fix


# -- the dice ------------------------------------------------------------------------------------


def plain_philox(key, counter):
    """Philox4x32-10 with Python's own integers (Salmon et al. 2011)."""
    word = 0xFFFFFFFF
    (k0, k1), (c0, c1, c2, c3) = key, counter
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & word, (a >> 32) ^ c3 ^ k1, a & word
        k0, k1 = (k0 + 0x9E3779B9) & word, (k1 + 0xBB67AE85) & word
    return [c0, c1, c2, c3]


def test_philox_gives_the_published_answers():
    zero, full = torch.zeros(2, 1, dtype=torch.int64), torch.full((2, 1), 0xFFFFFFFF)
    words = philox.philox(torch.tensor(0), zero, zero)[0].tolist()
    assert words == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    words = philox.philox(torch.tensor(-1), full, full)[0].tolist()
    assert words == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


def test_torch_and_numpy_go_through_the_same_rounds():
    words = torch.randint(0, 1 << 32, (2, 50), generator=torch.Generator().manual_seed(1))
    factors, steps = philox._constants(torch.device("cpu"))
    keys = steps.view(10, 2, 1) + words[:, :1]
    state, factors = (words, words.flip(1)), factors.view(2, 1)
    here = philox._rounds(state, keys, factors, lambda array: array.flip(0))
    state = tuple(tensor.numpy() for tensor in state)
    there = philox._rounds(state, keys.numpy(), factors.numpy(), lambda array: array[::-1])
    for one, other in zip(here, there, strict=True):
        assert np.array_equal(one.numpy(), other)


@given(
    seed=st.integers(-(1 << 63), (1 << 64) - 1),
    epoch=st.integers(0, 0xFFFFFFFF),
    step=st.integers(0, 0xFFFFFFFF),
    stream=st.integers(0, 0xFFFF),
    batch=st.integers(1, 5),
    num_ops=st.integers(1, 4),
)
def test_uniforms_are_philox_of_row_op_step_and_epoch(seed, epoch, step, stream, batch, num_ops):
    drawn = philox.uniforms(philox.make_counter(seed, epoch, step, stream), batch, num_ops)
    assert drawn.shape == (batch, num_ops, 8)
    key = (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF)
    for row in range(batch):
        for op in range(num_ops):
            words = []
            for half in (0, 1):
                block = (2 * op + half + (stream << 16)) & 0xFFFFFFFF
                words += plain_philox(key, (row, block, step, epoch))
            assert drawn[row, op].tolist() == [(word >> 8) * 2.0**-24 for word in words]


def test_uniforms_look_uniform_and_rows_and_ops_are_unrelated():
    drawn = philox.uniforms(philox.make_counter(7), 2000, 3).double()
    assert drawn.min() >= 0
    assert drawn.max() < 1
    flat = drawn.view(2000, 24)
    torch.testing.assert_close(flat.mean(0), torch.full((24,), 0.5).double(), atol=0.03, rtol=0)
    torch.testing.assert_close(flat.var(0), torch.full((24,), 1 / 12).double(), atol=0.01, rtol=0)
    between = torch.corrcoef(flat.T) - torch.eye(24)
    assert between.abs().max() < 0.1


# -- the draws -----------------------------------------------------------------------------------


def test_a_draw_is_a_function_of_seed_epoch_step_and_stream():
    first = draw(EVERY_OP)
    assert torch.equal(first, draw(EVERY_OP))
    for other in ({"seed": 1}, {"epoch": 1}, {"step": 1}, {"stream": 1}):
        assert not torch.equal(first, draw(EVERY_OP, **other))


def test_the_step_advances_in_place():
    counter, tape = philox.make_counter(3), encode_tape(EVERY_OP, (40, 48))
    before = counter.data_ptr()
    first, second = draw_table(tape, counter, 4), draw_table(tape, counter, 4)
    assert counter.tolist() == [3, 0, 2, 0]
    assert counter.data_ptr() == before
    assert torch.equal(second, draw(EVERY_OP, batch=4, seed=3, step=1))
    assert not torch.equal(first, second)


def test_a_larger_batch_begins_with_the_smaller_one_and_rows_differ():
    small, large = draw(EVERY_OP, batch=5), draw(EVERY_OP, batch=50)
    assert torch.equal(small, large[:5])
    assert len({tuple(row) for row in large.tolist()}) == 50


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_gates_open_as_often_as_asked_and_exactly_at_the_ends(p):
    ops = [
        RandomRotation((5, 10), p=p),
        ColorJitter((1.5, 2.0), (1.5, 2.0), (1.5, 2.0), (0.1, 0.2), p=p),
        GaussianBlur(3, p=p),
        RandomErasing(p),
    ]
    table = draw(ops, batch=3000)
    for column, rest in ((1, 0.0), (6, 1.0), (7, 1.0), (8, 1.0), (9, 0.0), (10, 0.0), (13, 0.0)):
        share = (table[:, column] != rest).float().mean().item()
        assert share == p if p in (0.0, 1.0) else abs(share - p) < 0.03
    # One gate for the four colours.
    changed = table[:, 6:10] != torch.tensor([1.0, 1.0, 1.0, 0.0])
    assert torch.equal(changed.all(1), changed.any(1))


def test_factors_fill_their_ranges_and_stay_inside():
    table = draw([ColorJitter(0.2, 0.4, 1.5, 0.1), GaussianBlur(3, (0.5, 1.5))], batch=4000)
    for column, (low, high) in {
        6: (0.8, 1.2),
        7: (0.6, 1.4),
        8: (0.0, 2.5),
        9: (-0.1, 0.1),
        10: (0.5, 1.5),
    }.items():
        values = table[:, column]
        assert values.min() >= low - 1e-6
        assert values.max() <= high + 1e-6
        assert values.max() - values.min() > 0.99 * (high - low)
        assert abs(values.mean() - (low + high) / 2) < 0.02 * (high - low)


def test_angles_shifts_scales_and_shears_fill_their_ranges():
    size = (101, 81)
    angle = torch.rad2deg(torch.asin(draw([RandomRotation(30)], 3000, size)[:, 3]))
    assert -30.01 < angle.min() < -29.5
    assert 29.5 < angle.max() < 30.01
    assert abs(angle.mean()) < 1.0
    table = draw([RandomAffine(0, (0.1, 0.2))], 3000, size)
    assert 8.0 < table[:, 2].abs().max() <= 8.1001
    assert 20.0 < table[:, 5].abs().max() <= 20.2001
    scale = 1 / draw([RandomAffine(0, scale=(0.5, 2.0))], 3000, size)[:, 0]
    assert 0.4999 < scale.min() < 0.51
    assert 1.99 < scale.max() < 2.001
    lean = torch.rad2deg(torch.atan(draw([RandomAffine(0, shear=(20, 0))], 3000, size)[:, 1]))
    assert 19.8 < lean.abs().max() < 20.01


def test_untouched_is_what_no_op_draws():
    assert torch.equal(draw([], batch=3), untouched(3, torch.device("cpu")))
    assert untouched(1, torch.device("cpu")).tolist() == [
        [1, 0, 0, 0, 1, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0]
    ]


@pytest.mark.parametrize(("degrees", "cosine", "sine"), [(0, 1, 0), (90, 0, 1), (180, -1, 0)])
def test_quarter_turns_are_exact(degrees, cosine, sine):
    row = draw([RandomRotation((degrees, degrees))], batch=1, size=(11, 7))[0, :6].tolist()
    cx, cy = 3.0, 5.0
    expected = [
        cosine,
        -sine,
        cx - cosine * cx + sine * cy,
        sine,
        cosine,
        cy - sine * cx - cosine * cy,
    ]
    assert row == expected


def test_geometry_composes_first_op_outermost():
    ops = [RandomHorizontalFlip(1.0), RandomRotation((90, 90)), RandomCrop(5)]
    size = (9, 13)
    drawn = torch.zeros(1, 3, 8)
    drawn[0, 2, 1], drawn[0, 2, 2] = 0.5, 0.9
    table = untouched(1, torch.device("cpu"))
    fill_table(table, encode_tape(ops, size).tolist(), drawn)
    left, top = math.floor(0.5 * 9), math.floor(0.9 * 5)
    x, y = 2.0 + left, 3.0 + top  # pixel (2, 3) of the crop
    x, y = -(y - 4.0) + 6.0, (x - 6.0) + 4.0  # the rotation: cos 90 = 0, sin 90 = 1
    x = 12.0 - x  # the flip
    m = table[0]
    assert (m[0] * 2 + m[1] * 3 + m[2]).item() == x
    assert (m[3] * 2 + m[4] * 3 + m[5]).item() == y


@given(
    height=st.integers(1, 40),
    width=st.integers(1, 40),
    padding=st.integers(0, 5),
    data=st.data(),
    u=st.floats(0, 1, exclude_max=True, width=32),
)
def test_crop_corners_reach_both_ends_and_never_beyond(height, width, padding, data, u):
    size = (
        data.draw(st.integers(1, height + 2 * padding)),
        data.draw(st.integers(1, width + 2 * padding)),
    )
    rows = encode_tape([RandomCrop(size, padding)], (height, width)).tolist()
    for value in (u, 0.0, 1 - 2**-24):
        table = untouched(1, torch.device("cpu"))
        fill_table(table, rows, torch.full((1, 1, 8), value))
        left, top = table[0, 2].item(), table[0, 5].item()
        assert -padding <= left <= width + padding - size[1]
        assert -padding <= top <= height + padding - size[0]
        assert left == int(left)
        if value == 0.0:
            assert (left, top) == (-padding, -padding)
        if value > 0.9999999:
            assert (left, top) == (width + padding - size[1], height + padding - size[0])


@given(
    height=st.integers(1, 300),
    width=st.integers(1, 300),
    out=st.integers(1, 40),
    low=st.floats(0.01, 1),
    ratio=st.floats(0.2, 1),
    seed=st.integers(0, 1000),
)
def test_resized_crops_stay_inside_the_image(height, width, out, low, ratio, seed):
    op = RandomResizedCrop((out, out + 3), (low, 1.0), (ratio, 1 / ratio))
    table = draw([op], batch=8, size=(height, width), seed=seed)
    far_x = table[:, 0] * (out + 2) + table[:, 2]
    far_y = table[:, 4] * (out - 1) + table[:, 5]
    assert table[:, 2].min() >= 0
    assert table[:, 5].min() >= 0
    assert far_x.max() <= width - 1 + 1e-4 * width
    assert far_y.max() <= height - 1 + 1e-4 * height


def test_resized_crops_have_the_areas_and_shapes_asked_for():
    op = RandomResizedCrop(101, (0.1, 0.5), (0.5, 2.0))
    table = draw([op], batch=4000, size=(400, 400))
    width, height = table[:, 0] * 100 + 1, table[:, 4] * 100 + 1
    area, shape = width * height / 160000, width / height
    assert 0.099 < area.min() < 0.105
    assert 0.495 < area.max() < 0.503
    assert abs(area.mean() - 0.3) < 0.01
    assert 0.49 < shape.min() < 0.51
    assert 1.96 < shape.max() < 2.04
    assert abs(shape.log().mean()) < 0.03


def test_where_the_shape_does_not_fit_the_area_is_kept():
    table = draw([RandomResizedCrop(11, (0.9, 0.9), (0.2, 0.2))], batch=50, size=(100, 100))
    width, height = table[:, 0] * 10 + 1, table[:, 4] * 10 + 1
    assert torch.equal(height.round(), torch.full((50,), 100.0))
    torch.testing.assert_close(width, torch.full((50,), 90.0))


def test_a_shut_gate_resizes_the_whole_image():
    whole = draw([RandomResizedCrop((5, 9), p=0.0)], batch=2, size=(21, 33))
    assert torch.equal(whole, draw([Resize((5, 9))], batch=2, size=(21, 33)))
    assert whole[0, :6].tolist() == [4, 0, 0, 0, 5, 0]
    middle = draw([Resize(1)], batch=1, size=(21, 33))
    assert middle[0, :6].tolist() == [0, 0, 16, 0, 0, 10]


@pytest.mark.parametrize(
    ("size", "corner"), [((5, 6), (3, 2)), ((9, 12), (0, 0)), ((11, 14), (-1, -1))]
)
def test_centre_crops_take_the_middle(size, corner):
    table = draw([CenterCrop(size, padding=1)], batch=2, size=(9, 12))
    assert (table[0, 2].item(), table[0, 5].item()) == corner


def test_erased_rectangles_lie_inside_and_have_the_area_asked_for():
    table = draw([RandomErasing(1.0, (0.02, 0.33), (0.3, 3.3))], batch=3000, size=(120, 200))
    x0, y0, x1, y1 = table[:, 11:15].unbind(1)
    assert x0.min() >= 0
    assert y0.min() >= 0
    assert x1.max() <= 200
    assert y1.max() <= 120
    area = (x1 - x0) * (y1 - y0) / 24000
    assert 0.018 < area.min() < 0.025
    assert 0.28 < area.max() < 0.345
    assert torch.equal(table[:, 11:15], table[:, 11:15].round())


@pytest.mark.parametrize(
    ("p", "u", "open_"),
    [(0.0, 0.0, False), (0.5, 0.5, False), (0.5, 0.49, True), (1.0, 1 - 2**-24, True)],
)
def test_a_gate_is_open_below_p_and_not_at_p(p, u, open_):
    table = untouched(1, torch.device("cpu"))
    fill_table(
        table, encode_tape([RandomHorizontalFlip(p)], (4, 4)).tolist(), torch.full((1, 1, 8), u)
    )
    assert (table[0, 0].item() == -1.0) == open_


@pytest.mark.parametrize("u", [0.0, 1 - 2**-24])
def test_rectangles_reach_both_ends(u):
    drawn = torch.full((1, 2, 8), u)
    drawn[:, :, :3] = 0.5  # gate, area and shape
    drawn[:, :, 0] = 0.0
    table = untouched(1, torch.device("cpu"))
    ops = [RandomResizedCrop(11, (0.25, 0.25), (1, 1)), RandomErasing(1.0, (0.25, 0.25), (1, 1))]
    fill_table(table, encode_tape(ops, (100, 60)).tolist(), drawn)
    side = round(math.sqrt(0.25 * 6000))
    assert table[0, 2].item() == (0 if u == 0 else 60 - side)
    assert table[0, 5].item() == (0 if u == 0 else 100 - side)
    assert table[0, 11:15].tolist() == ([0, 0, 6, 6] if u == 0 else [5, 5, 11, 11])


def test_opcodes_are_the_small_numbers_kernels_know():
    assert {code.name: int(code) for code in Opcode} == {
        "FLIP_H": 1,
        "FLIP_V": 2,
        "AFFINE": 3,
        "RESIZED_CROP": 4,
        "CROP": 5,
        "COLOUR": 6,
        "BLUR": 7,
        "ERASE": 8,
        "FLIP_BY_ID": 9,
        "STAGE": 10,
    }


def test_the_largest_factors_and_the_smallest_std_give_finite_images():
    images = torch.rand(2, 3, 8, 9)
    images[0] = 0.0
    ops = [ColorJitter((1e6, 1e6), (1e6, 1e6), (1e6, 1e6)), Normalize(0.0, 1e-12)]
    assert Compose(ops)(images).isfinite().all()


@pytest.mark.parametrize("op", [RandomRotation(0), RandomRotation((-0.0, 0.0)), RandomHue(0)])
def test_zero_is_printed_without_a_sign(op):
    assert "-0.0" not in repr(op)
