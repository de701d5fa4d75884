"""Fused kernels = torch reference. On a GPU as they are; elsewhere in Triton's interpreter.

The interpreter must be asked for before triton is imported, and then "auto" would take it for every
CPU tensor of the session. So it gets a process of its own: `tests/test_augment_fused.py` runs this
file with TRITON_INTERPRET=1. In any other process these are `gpu` tests.
"""

from __future__ import annotations

import math
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import quick_interpreter
from stoker.augment import fused, guard, philox
from stoker.augment.compose import Compose
from stoker.augment.definition import Program
from stoker.augment.geometry import (
    AlternatingFlip,
    RandomAffine,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomRotation,
    RandomVerticalFlip,
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
    encode_tape,
    make_program,
)
from stoker.augment.reference import TorchBackend
from stoker.augment.stages import Function

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
if INTERPRETED:
    quick_interpreter.quicken(overflow="OVERFLOW" in os.environ)
# Costs seconds in the interpreter and shows there what cheaper cases show: left to `make campaign`.
repeats = [pytest.mark.slow] if INTERPRETED else []

# One step for a whole small image: the interpreter pays per operation, not per pixel. On a GPU
# what `choose_config` says.
WHOLE = fused.Config(32, 64, 32, 64) if INTERPRETED else None
IMAGENET = Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
HALF_STEP = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


def make_images(shape, dtype=torch.uint8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    return images if dtype == torch.uint8 else (images.float() / 255).to(dtype)


def make_masks(shape, dtype=torch.int64, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 19, shape, generator=generator).to(dtype)


def drawn(ops, size, channels, batch, ignore_index=255, seed=3):
    """A program and a table drawn by the reference."""
    tape = encode_tape(ops, size)
    table = TorchBackend().draw(tape, philox.make_counter(seed), batch)
    return make_program(ops, size, channels, ignore_index), table


def moved_to(device, *tensors):
    """The same tensors with the same strides on the device."""
    placed = []
    for tensor in tensors:
        if tensor is not None and tensor.device != device:
            twin = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device
            )
            tensor = twin.copy_(tensor)
        placed.append(tensor)
    return placed


def run_fused(images, masks, rows, table, program, faults=None, config=WHOLE, held=None):
    backend = fused.FusedBackend(config, config, held)
    placed = moved_to(DEVICE, images, masks, rows, table)
    result, labels = backend.apply(*placed, program, faults)
    return result, labels


def run_reference(images, masks, rows, table, program):
    """The torch backend on the same device: on a CPU its `grid_sample` rounds places to 1e-5 pixel."""
    placed = moved_to(DEVICE, images, masks, rows, table)
    return TorchBackend().apply(*placed, program, None)


def agree(images, table, program, masks=None, rows=None, config=WHOLE, held=None):
    """Both backends on the same numbers; returns the fused result on the CPU."""
    result, labels = run_fused(images, masks, rows, table, program, config=config, held=held)
    expected, expected_labels = run_reference(images, masks, rows, table, program)
    assert result.dtype == expected.dtype
    assert result.shape == expected.shape
    assert result.stride() == expected.stride()
    close_enough(result.cpu(), expected.cpu())
    if masks is not None:
        assert labels.dtype == masks.dtype
        assert torch.equal(labels, expected_labels)
    return result.cpu()


def close_enough(result, expected):
    """1e-5 in float32; in half types one unit in the last place, at the value's own size."""
    error = (result.double() - expected.double()).abs()
    # Dividing by a standard deviation of 0.225 multiplies an error by 4.4, so it is relative there.
    allowed = 1e-5 * expected.double().abs().clamp(min=1.0)
    if expected.dtype in HALF_STEP:
        allowed = 2 * HALF_STEP[expected.dtype] * expected.double().abs() + 1e-5
    assert bool((error <= allowed).all()), f"{float((error - allowed).max())} above what is allowed"


def turned(degrees, size, batch=1):
    """A table that only rotates about the centre; whole sines and cosines are exact."""
    cosine, sine = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    if degrees % 90 == 0:
        cosine, sine = round(cosine), round(sine)
    cx, cy = (size[1] - 1) / 2, (size[0] - 1) / 2
    table = torch.zeros(batch, 16)
    table[:, :6] = torch.tensor(
        [cosine, -sine, cx - cosine * cx + sine * cy, sine, cosine, cy - sine * cx - cosine * cy]
    )
    table[:, 6:9] = 1.0
    return table


def only_geometry(size, out_size=None, channels=3, **changes) -> Program:
    program = make_program([RandomRotation(30)], size, channels)
    return Program(**{**program.__dict__, "out_size": out_size or size, **changes})


# -- drawing -----------------------------------------------------------------------------------------

EVERYTHING = [
    RandomHorizontalFlip(0.5),
    RandomVerticalFlip(0.3),
    RandomRotation(30),
    RandomAffine(10, (0.1, 0.2), (0.8, 1.2), (5, 8), p=0.7),
    RandomResizedCrop((23, 20)),
    RandomCrop((19, 16), padding=3),
    ColorJitter(0.2, 0.3, 0.4, 0.1, p=0.8),
    GaussianBlur(3, (0.1, 2.0), p=0.5),
    RandomErasing(0.6, value=0.25),
    IMAGENET,
]


def drawn_twice(ops, size, counter, batch):
    tape = encode_tape(ops, size)
    expected_counter, actual_counter = counter.clone(), counter.clone().to(DEVICE)
    expected = TorchBackend().draw(tape, expected_counter, batch)
    actual = fused.FusedBackend().draw(tape.to(DEVICE), actual_counter, batch)
    assert torch.equal(actual_counter.cpu(), expected_counter)
    return actual.cpu(), expected


@pytest.mark.parametrize(
    ("seed", "epoch", "step", "stream", "batch"),
    [(0, 0, 0, 0, 1), (-5, 3, 7, 3, 9), ((1 << 63) + 12345, 9, 2**31 + 5, 65535, 300)],
)
def test_the_table_is_the_references(seed, epoch, step, stream, batch):
    counter = philox.make_counter(seed, epoch, step, stream)
    actual, expected = drawn_twice(EVERYTHING, (29, 33), counter, batch)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    whole = [11, 12, 13, 14, 15]
    assert torch.equal(actual[:, whole], expected[:, whole])


@pytest.mark.parametrize(
    ("batch", "num_batches"),
    [pytest.param(1, 3, marks=repeats), (300, 2), pytest.param(1100, 1, marks=repeats)],
)
def test_a_table_drawn_by_many_programs_is_the_references(batch, num_batches):
    tape = encode_tape(EVERYTHING, (29, 33))
    made = []
    for backend, device in ((TorchBackend(), "cpu"), (fused.FusedBackend(), DEVICE)):
        counter = philox.make_counter(6, 2, 11, 3).to(device)
        table = backend.draw(tape.to(device), counter, batch, num_batches)
        made.append((table.cpu(), counter.tolist()))
    (expected, counter), (actual, other) = made
    assert counter == other == [6, 2, 11 + num_batches, 3]
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("batch", [1, 31, 257])
def test_uniforms_are_bit_equal(batch):
    # A factor from 0 to 1 is the uniform itself: u1, u2 and u3 stand in the table.
    counter = philox.make_counter(2**64 - 3, 5, 11, 7)
    unit = [ColorJitter((0.0, 1.0), (0.0, 1.0), (0.0, 1.0), 0.0, p=1.0)]
    uniforms = philox.uniforms(counter, batch, 1)
    actual, _ = drawn_twice(unit, (8, 8), counter, batch)
    assert torch.equal(actual[:, 6:9], uniforms[:, 0, 1:4])


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_gates_of_0_and_1_are_exact(p):
    ops = [RandomHorizontalFlip(p), RandomErasing(p)]
    actual, expected = drawn_twice(ops, (16, 24), philox.make_counter(1), 64)
    assert torch.equal(actual, expected)
    assert bool((actual[:, 0] == (-1.0 if p else 1.0)).all())


def test_an_empty_tape_changes_nothing_but_the_step():
    actual, expected = drawn_twice([], (8, 8), philox.make_counter(1), 5)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("batch", [1, 40])
def test_uniforms_of_stages_and_flips_by_id_are_bit_equal(batch):
    keep = Function(lambda images, _u: images)
    tape = encode_tape([AlternatingFlip(), RandomHorizontalFlip(), keep, keep], (8, 9))
    ids = torch.arange(batch) * 5_000_000_011
    for epoch in (0, 1):
        made = []
        for backend, device in ((TorchBackend(), "cpu"), (fused.FusedBackend(), DEVICE)):
            staged = torch.zeros(batch, 2, 8, device=device)
            counter = philox.make_counter(7, epoch, 3, 2).to(device)
            table = backend.draw(tape.to(device), counter, batch, ids=ids.to(device), staged=staged)
            made.append((table.cpu(), staged.cpu(), counter.tolist()))
        (table, staged, counter), (other, other_staged, other_counter) = made
        assert torch.equal(table, other)
        assert torch.equal(staged, other_staged)
        assert counter == other_counter == [7, epoch, 4, 2]
        assert len(set(staged.flatten().tolist())) > 15 * batch


def test_quarter_turns_are_drawn_exactly():
    ops = [RandomRotation((90.0, 90.0))]
    actual, _ = drawn_twice(ops, (15, 15), philox.make_counter(4), 3)
    assert torch.equal(actual[0, :6], torch.tensor([0.0, -1.0, 14.0, 1.0, 0.0, 0.0]))


# -- geometry ----------------------------------------------------------------------------------------


@pytest.mark.thinned
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("out", [torch.float32, torch.float16, torch.bfloat16])
def test_dtypes(dtype, out):
    ops = [
        RandomHorizontalFlip(),
        RandomRotation(15),
        RandomBrightness(0.2),
        IMAGENET,
        ToDtype(out),
    ]
    program, table = drawn(ops, (13, 17), 3, 2)
    agree(make_images((2, 3, 13, 17), dtype), table, program)


@pytest.mark.thinned
@pytest.mark.parametrize("channels", [1, 2, 3, 4, 17])
@pytest.mark.parametrize("blur", [0, 3])
def test_channels(channels, blur):
    normalize = Normalize((0.4, *[0.5] * (channels - 1)), (0.2, *[0.3] * (channels - 1)))
    blurs = [GaussianBlur(blur, (0.5, 1.0), p=0.5)] if blur else []
    ops = [RandomRotation(20), RandomBrightness(0.3), *blurs, RandomErasing(0.5), normalize]
    program, table = drawn(ops, (6, 7), channels, 2)
    agree(make_images((2, channels, 6, 7)), table, program, make_masks((2, 6, 7)))


@pytest.mark.parametrize(
    "size",
    [
        (1, 1),
        (1, 9),
        (33, 29),
        pytest.param((7, 1), marks=repeats),
        pytest.param((2, 3), marks=repeats),
        pytest.param((5, 64), marks=repeats),
    ],
)
def test_odd_sizes(size):
    program, table = drawn([RandomRotation(40), RandomContrast(0.4)], size, 3, 2)
    agree(make_images((2, 3, *size)), table, program, make_masks((2, *size)))


@pytest.mark.thinned
@pytest.mark.parametrize(
    "degrees", [0, 90, 12.5, *(pytest.param(one, marks=repeats) for one in (180, 270, 45, 133))]
)
@pytest.mark.parametrize("size", [(15, 15), (16, 16), (11, 17)])
def test_angles(degrees, size):
    images, masks = make_images((1, 3, *size), torch.float32), make_masks((1, *size))
    table = turned(degrees, size)
    result = agree(images, table, only_geometry(size), masks)
    if degrees % 180 == 0 or (degrees % 90 == 0 and size[0] == size[1]):
        assert torch.equal(result, torch.rot90(images, degrees // 90, (2, 3)))


@pytest.mark.parametrize(
    "ops",
    [
        pytest.param([RandomHorizontalFlip(0.5)], marks=repeats),
        pytest.param([RandomVerticalFlip(0.5)], marks=repeats),
        [RandomHorizontalFlip(0.5), RandomVerticalFlip(0.5)],
        pytest.param([RandomCrop(9)], marks=repeats),
        [RandomCrop((14, 20), padding=4)],
        pytest.param([RandomResizedCrop((8, 10))], marks=repeats),
        [RandomResizedCrop((30, 41))],
        [RandomResizedCrop((1, 1))],
        [RandomAffine(20, (0.3, 0.3), (0.5, 1.5), (10, 10))],
        [RandomHorizontalFlip(0.5), RandomRotation(15), RandomCrop(12, padding=2)],
        [],
    ],
    ids=lambda ops: "+".join(type(op).__name__ for op in ops) or "nothing",
)
def test_geometry(ops):
    size, batch = (15, 18), 2
    program, table = drawn(ops, size, 3, batch, ignore_index=-100)
    images = make_images((batch, 3, *size), torch.float32)
    result = agree(images, table, program, make_masks((batch, *size)))
    expected, _ = TorchBackend().apply(images, None, None, table, program, None)
    if program.whole_pixels or not program.geometry:
        assert torch.equal(result, expected)


@settings(max_examples=5 if INTERPRETED else 30)
@given(
    height=st.integers(1, 12),
    width=st.integers(1, 12),
    crop_y=st.integers(1, 16),
    crop_x=st.integers(1, 16),
    step=st.sampled_from([(4, 8), (2, 16), (16, 2)]),
    tiles=st.sampled_from([(1, 1), (2, 1), (1, 2)]),
    seed=st.integers(0, 99),
)
def test_every_pixel_is_written_once_for_any_tiles(
    height, width, crop_y, crop_x, step, tiles, seed
):
    padding = max(0, -(-(crop_y - height) // 2), -(-(crop_x - width) // 2))
    ops = [RandomHorizontalFlip(0.5), RandomCrop((crop_y, crop_x), padding=padding)]
    program, table = drawn(ops, (height, width), 1, 1, seed=seed)
    images, masks = make_images((1, 1, height, width), seed=seed), make_masks((1, height, width))
    config = fused.Config(step[0] * tiles[0], step[1] * tiles[1], *step, num_warps=1)
    result = agree(images, table, program, masks, config=config)
    expected, _ = TorchBackend().apply(images, None, None, table, program, None)
    assert torch.equal(result, expected)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(fused.Config(8, 16, 8, 16), marks=repeats),
        fused.Config(16, 32, 8, 16, 1),
        pytest.param(fused.Config(16, 16, 4, 8), marks=repeats),
        None,
    ],
)
def test_tiles_inside_at_the_edge_and_beyond_give_the_same_bits(config):
    # 33 x 29 in tiles of 8 x 16: some lie inside, some leave the image, some hang over the result.
    size = (33, 29)
    program, table = drawn([RandomRotation(20), RandomBrightness(0.2)], size, 3, 1)
    images = make_images((1, 3, *size), torch.float32)
    whole = agree(images, table, program)
    tiled = agree(images, table, program, config=config)
    assert torch.equal(whole, tiled)


# -- colour, blur, erasing ---------------------------------------------------------------------------

COLOUR = {
    "brightness": [RandomBrightness(0.6, p=0.7)],
    "contrast": [RandomContrast(0.6, p=0.7)],
    "saturation": [RandomSaturation(0.8, p=0.7)],
    "hue": [RandomHue(0.5, p=0.7)],
    "jitter": [ColorJitter(0.4, 0.4, 0.4, 0.2, p=0.8)],
    "small blur": [GaussianBlur(3, p=0.6)],
    "large blur": [GaussianBlur(9, (0.5, 3.0), p=0.6)],
    "erase": [RandomErasing(0.7, value=0.5)],
    "all": [ColorJitter(0.4, 0.4, 0.4, 0.2), GaussianBlur(5, p=0.5), RandomErasing(0.5), IMAGENET],
}


@pytest.mark.thinned
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=repeats if name == "large blur" else ()) for name in COLOUR],
)
@pytest.mark.parametrize("turn", [False, True])
def test_colour(name, turn):
    ops = [RandomRotation(25), *COLOUR[name]] if turn else COLOUR[name]
    program, table = drawn(ops, (15, 12), 3, 2)
    agree(make_images((2, 3, 15, 12)), table, program)


@pytest.mark.parametrize("name", ["contrast", "jitter", "small blur"])
def test_colour_of_gray_images(name):
    program, table = drawn(COLOUR[name], (9, 12), 1, 3)
    agree(make_images((3, 1, 9, 12)), table, program)


@pytest.mark.parametrize(
    "name", ["jitter", "large blur", "erase", "all"] if INTERPRETED else COLOUR
)
def test_untouched_samples_keep_every_bit(name):
    program, table = drawn(COLOUR[name], (15, 12), 3, 2)
    program = Program(**{**program.__dict__, "mean": None, "std": None})
    table[:] = torch.tensor([1.0, 0, 0, 0, 1, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0])
    images = make_images((2, 3, 15, 12), torch.float32) * 1.0009  # beyond 1: a clamp would show
    result, _ = run_fused(images, None, None, table, program)
    assert torch.equal(result.cpu(), images)


@pytest.mark.thinned
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("config", [WHOLE, fused.Config(16, 32, 16, 32)])
def test_contrasts_mean_is_right_to_1e_6_and_the_same_each_time(channels, config):
    size = (31, 27)
    program, table = drawn([RandomContrast((0.5, 0.5))], size, channels, 2)
    images = make_images((2, channels, *size), torch.float32)
    gray = torch.tensor([0.299, 0.587, 0.114]).double() if channels == 3 else torch.ones(1).double()
    mean = torch.einsum("nchw,c->n", images.double(), gray) / (size[0] * size[1])
    expected = 0.5 * images.double() + 0.5 * mean.view(-1, 1, 1, 1)
    first, _ = run_fused(images, None, None, table, program, config=config)
    again, _ = run_fused(images, None, None, table, program, config=config)
    assert float((first.cpu().double() - expected).abs().max()) < 1e-6
    assert torch.equal(first, again)


@pytest.mark.parametrize("geometry", [True, False])
@pytest.mark.parametrize(
    ("channels", "dtype"),
    [(3, torch.uint8), pytest.param(3, torch.float32, marks=repeats), (1, torch.uint8)],
)
def test_contrast_in_one_pass_is_the_references(geometry, channels, dtype):
    size, tiles = (19, 27), fused.Config(16, 16, 16, 16)
    jitter = ColorJitter(0.3, 0.5, 0.4) if channels == 3 else ColorJitter(0.3, 0.5)
    moves = [RandomHorizontalFlip(), RandomRotation(30)] if geometry else []
    norm = [IMAGENET] if channels == 3 else []
    program, table = drawn([*moves, jitter, RandomErasing(0.5), *norm], size, channels, 2)
    table[1, 7] = 1.0  # untouched: this image waits for nothing
    images = make_images((3, channels, *size), dtype)
    agree(images, table, program, make_masks((3, *size)), torch.tensor([2, 0]), held=tiles)


def test_contrast_in_one_pass_leaves_its_counters_at_0_and_is_the_same_each_time():
    size, repeats = ((20, 20), 2) if INTERPRETED else ((224, 224), 200)
    program, table = drawn([RandomRotation(30), ColorJitter(0.3, 0.5)], size, 1, 2)
    images, table = moved_to(DEVICE, make_images((2, 1, *size), torch.uint8), table)
    backend = fused.FusedBackend(
        held_config=fused.Config(16, 16, 16, 16) if INTERPRETED else "auto"
    )
    results = [backend.apply(images, None, None, table, program, None)[0] for _ in range(repeats)]
    assert all(torch.equal(results[0], each) for each in results)
    assert not table[:, 15].any()


# -- masks, rows, strides ----------------------------------------------------------------------------


@pytest.mark.thinned
@pytest.mark.parametrize(
    ("dtype", "ignore"),
    [
        (torch.uint8, 255),
        (torch.int8, -1),
        (torch.int16, 255),
        (torch.int32, -100),
        (torch.int64, -100),
        (torch.int64, 1),
    ],
)
@pytest.mark.parametrize("channel", [False, True])
def test_masks(dtype, ignore, channel):
    program, table = drawn([RandomRotation(45)], (11, 14), 3, 2, ignore_index=ignore)
    shape = (2, 1, 11, 14) if channel else (2, 11, 14)
    images, masks = make_images((2, 3, 11, 14)), make_masks(shape, dtype)
    _, labels = run_fused(images, masks, None, table, program)
    assert bool((labels == ignore).any())
    agree(images, table, program, masks)


@pytest.mark.thinned
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("size", [(9, 13), (16, 16)])
def test_reflected_padding(size, dtype):
    ops = [RandomHorizontalFlip(), RandomVerticalFlip(), RandomCrop(size, 5, "reflect")]
    for extra in ([], [RandomContrast(0.4), RandomSaturation(0.3)]):
        program, table = drawn([*ops, *extra], size, 3, 4)
        assert program.reflect
        agree(make_images((4, 3, *size), dtype), table, program, make_masks((4, *size)))


@pytest.mark.parametrize("geometry", [False, True])
def test_rows_with_repeats(geometry):
    ops = [*([RandomRotation(15)] if geometry else []), RandomContrast(0.3), IMAGENET]
    rows = torch.tensor([4, 0, 4, 2])
    program, table = drawn(ops, (9, 10), 3, len(rows))
    images, masks = make_images((5, 3, 9, 10)), make_masks((5, 9, 10))
    agree(images, table, program, masks, rows)


def test_a_row_that_does_not_exist_gives_nan_and_harms_no_other():
    rows = torch.tensor([1, 7, -1, 0])
    program, table = drawn([RandomBrightness(0.2), IMAGENET], (5, 6), 3, 4)
    images = make_images((2, 3, 5, 6))
    result, _ = run_fused(images, None, rows, table, program)
    assert bool(result[1].isnan().all())
    assert bool(result[2].isnan().all())
    right, _ = run_fused(images, None, torch.tensor([1, 0, 0, 0]), table, program)
    assert torch.equal(result[[0, 3]], right[[0, 3]])


@pytest.mark.thinned
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize(
    "ops",
    [[], [RandomRotation(15), ColorJitter(0.2, 0.2, 0.2, 0.1), GaussianBlur(3)], [RandomCrop(4)]],
    ids=["still", "warped", "cropped"],
)
def test_rows_that_do_not_exist_are_the_same_in_both_backends(dtype, ops):
    rows = torch.tensor([1, 2, -1, 0, 2**40])
    program, table = drawn(ops, (5, 6), 3, len(rows), ignore_index=77)
    images, masks = make_images((2, 3, 5, 6), dtype), make_masks((2, 5, 6), torch.uint8)
    placed = moved_to(DEVICE, images, masks, rows, table)
    made = []
    for backend in (fused.FusedBackend(WHOLE, WHOLE), TorchBackend()):
        faults = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        made.append(backend.apply(*placed, program, faults))
        assert int(faults) == guard.NO_SUCH_ROW
    (result, labels), (expected, wanted) = made
    missing = [1, 2, 4]
    assert bool(result[missing].isnan().all())
    assert bool((labels[missing] == 77).all())
    assert torch.equal(result.isnan(), expected.isnan())
    close_enough(result.nan_to_num(9.0).cpu(), expected.nan_to_num(9.0).cpu())
    assert torch.equal(labels, wanted)


@pytest.mark.parametrize("dtype", [torch.uint8, pytest.param(torch.float32, marks=repeats)])
def test_rows_that_exist_set_no_fault(dtype):
    program, table = drawn([RandomRotation(15)], (5, 6), 3, 3)
    faults = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    run_fused(
        make_images((2, 3, 5, 6), dtype), None, torch.tensor([1, 0, 1]), table, program, faults
    )
    assert int(faults) == 0


@pytest.mark.thinned
@pytest.mark.parametrize("blur", [0, 3, pytest.param(7, marks=repeats)])
@pytest.mark.parametrize("entering", [torch.channels_last, torch.contiguous_format])
def test_channels_last_in_and_out(blur, entering):
    blurs = [GaussianBlur(blur, (0.5, 1.5), p=0.7)] if blur else []
    ops = [RandomRotation(15), *blurs, RandomErasing(0.5), IMAGENET]
    program, table = drawn([*ops, ToDtype(torch.float16, channels_last=True)], (9, 11), 3, 2)
    images = make_images((2, 3, 9, 11)).contiguous(memory_format=entering)
    agree(images, table, program)


@pytest.mark.thinned
@pytest.mark.parametrize("geometry", [False, True])
@pytest.mark.parametrize("view", ["offset", "every second", "expanded", "transposed"])
def test_any_strides(view, geometry):
    images, masks = make_images((4, 3, 12, 20)), make_masks((4, 12, 20))
    cut = {
        "offset": lambda x: x[1:3, ..., 1:10, 3:16],
        "every second": lambda x: x[::2, ..., ::2, ::2],
        "expanded": lambda x: x[:1].expand(2, *x.shape[1:]),
        "transposed": lambda x: x[:2].transpose(-1, -2),
    }[view]
    images, masks = cut(images), cut(masks)
    size = tuple(images.shape[-2:])
    ops = [RandomRotation(15) if geometry else RandomBrightness(0.2)]
    program, table = drawn(ops, size, 3, 2)
    if DEVICE.type == "cpu":
        agree(images, table, program, masks)
        return
    base = make_images((4, 3, 12, 20)).to(DEVICE), make_masks((4, 12, 20)).to(DEVICE)
    result, labels = fused.FusedBackend().apply(
        cut(base[0]), cut(base[1]), None, table.to(DEVICE), program, None
    )
    expected, expected_labels = TorchBackend().apply(images, masks, None, table, program, None)
    close_enough(result.cpu(), expected)
    assert torch.equal(labels.cpu(), expected_labels)


def test_everything_at_once():
    rows = torch.tensor([5, 1, 1, 0])
    ops = [*EVERYTHING, ToDtype(torch.float32, channels_last=True)]
    program, table = drawn(ops, (29, 33), 3, len(rows), ignore_index=7)
    images = make_images((6, 3, 29, 33)).contiguous(memory_format=torch.channels_last)
    agree(images, table, program, make_masks((6, 1, 29, 33), torch.uint8), rows)


def test_a_batch_larger_than_the_grid(monkeypatch):
    monkeypatch.setattr(fused, "MAX_SAMPLES", 2)
    program, table = drawn([RandomRotation(15), RandomContrast(0.4)], (6, 7), 3, 5)
    rows = torch.tensor([2, 2, 0, 1, 0])
    agree(make_images((3, 3, 6, 7)), table, program, make_masks((3, 6, 7)), rows)


@pytest.mark.parametrize("dtype", [torch.uint8, pytest.param(torch.float32, marks=repeats)])
def test_compose_gives_the_same_with_either_backend(dtype):
    ops = [RandomRotation(15), ColorJitter(0.2, 0.2), IMAGENET]
    images = make_images((2, 3, 9, 11), dtype).to(DEVICE)
    masks = make_masks((2, 9, 11)).to(DEVICE)
    here, there = Compose(ops, seed=4, backend="fused"), Compose(ops, seed=4, backend="torch")
    for _ in range(2):
        (result, labels), (expected, wanted) = here(images, masks), there(images, masks)
        close_enough(result.cpu(), expected.cpu())
        assert torch.equal(labels, wanted)
    assert here.backend_reason.startswith("fused: Triton")
    assert here.state_dict() == there.state_dict()


# -- faults ------------------------------------------------------------------------------------------


@pytest.mark.thinned
@pytest.mark.parametrize(
    ("dtype", "geometry"),
    [(torch.float16, True), (torch.bfloat16, False), (torch.float32, False), (torch.float32, True)],
)
@pytest.mark.parametrize(
    ("value", "bits"),
    [
        (0.0, 0),
        pytest.param(1.0, 0, marks=repeats),
        (-0.0, 0),
        (-0.02, 1),
        (1.02, 1),
        pytest.param(255.0, 1, marks=repeats),
        (float("inf"), 3),
        (float("-inf"), 3),
        (float("nan"), 2),
    ],
)
def test_faults(dtype, value, bits, geometry):
    ops = [RandomRotation(10) if geometry else RandomBrightness(0.2)]
    program, table = drawn(ops, (7, 9), 3, 2)
    images = make_images((2, 3, 7, 9), dtype)
    images[1, 2, 3, 4] = value
    faults = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    run_fused(images, None, None, table, program, faults)
    assert int(faults) & bits == bits
    assert bool(int(faults)) == bool(bits)


def test_faults_stay_set_and_bytes_have_none():
    program, table = drawn([RandomRotation(10)], (7, 9), 3, 2)
    faults = torch.tensor([2], dtype=torch.int32, device=DEVICE)
    run_fused(make_images((2, 3, 7, 9), torch.float32), None, None, table, program, faults)
    run_fused(make_images((2, 3, 7, 9)), None, None, table, program, faults)
    assert int(faults) == 2


# -- far away ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strides", "wide"),
    [((2**30, 16, 4, 1), False), ((16, 2**30 - 1, 4, 1), True), ((48, 16, 2**30, 2**28), True)],
    ids=["samples", "channels", "rows and columns"],
)
def test_elements_beyond_2_to_31(strides, wide):
    # Untouched pages cost no memory on the CPU: only the 96 elements of the view are written.
    shape, need = (2, 3, 4, 4), 2**33
    if DEVICE.type == "cuda" and torch.cuda.mem_get_info()[0] < 2 * need:
        pytest.skip(f"needs {2 * need >> 30} GiB of free GPU memory")
    images = torch.empty(need, dtype=torch.uint8, device=DEVICE).as_strided(shape, strides)
    source = make_images(shape)
    images.copy_(source)
    program, table = drawn([RandomRotation(30)], (4, 4), 3, 2)
    assert fused._is_wide(images) == wide
    result, _ = fused.FusedBackend(WHOLE).apply(images, None, None, table.to(DEVICE), program, None)
    expected, _ = TorchBackend().apply(source, None, None, table, program, None)
    close_enough(result.cpu(), expected)


# -- a real GPU only ---------------------------------------------------------------------------------

needs_gpu = pytest.mark.skipif(INTERPRETED, reason="the interpreter has no streams and no speed")


@needs_gpu
def test_a_result_beyond_2_to_31_elements():
    batch, size = 2800, (512, 512)
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("needs 12 GiB of free GPU memory")
    ops = [RandomRotation(15), RandomBrightness(0.2), IMAGENET, ToDtype(torch.float16)]
    program, table = drawn(ops, size, 3, batch)
    images, rows = make_images((4, 3, *size)), torch.arange(batch) % 4
    masks = make_masks((4, *size), torch.uint8)
    placed = moved_to(DEVICE, images, masks, rows, table)
    result, labels = fused.FusedBackend().apply(*placed, program, None)
    assert result.numel() > 2**31
    for sample in (0, 1365, batch - 1):
        one = slice(sample, sample + 1)
        expected, wanted = run_reference(images, masks, rows[one], table[one], program)
        close_enough(result[one].cpu(), expected.cpu())
        assert torch.equal(labels[one], wanted)


@pytest.mark.thinned
@needs_gpu
@pytest.mark.parametrize("size", [(512, 512), (224, 224), (32, 32), (511, 333)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_real_sizes_with_the_tiles_chosen(size, dtype):
    batch = 5
    ops = [RandomHorizontalFlip(), RandomRotation(15), ColorJitter(0.2, 0.2, 0.1, 0.05), IMAGENET]
    program, table = drawn(ops, size, 3, batch)
    images, masks = make_images((batch, 3, *size), dtype), make_masks((batch, *size))
    agree(images, table, program, masks, config=None)


@needs_gpu
def test_a_captured_graph_draws_anew_and_reads_new_images():
    size, batch = (64, 48), 6
    ops = [RandomRotation(30), ColorJitter(0.3, 0.3, 0.3, 0.1), GaussianBlur(3), IMAGENET]
    program, tape = make_program(ops, size, 3), encode_tape(ops, size).to(DEVICE)
    counter = philox.make_counter(5).to(DEVICE)
    images = make_images((batch, 3, *size)).to(DEVICE)
    backend = fused.FusedBackend()
    backend.apply(images, None, None, backend.draw(tape, counter, batch), program, None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        table = backend.draw(tape, counter, batch)
        result, _ = backend.apply(images, None, None, table, program, None)
    reference = philox.make_counter(5, step=1)
    for seed in (10, 11, 12):
        images.copy_(make_images((batch, 3, *size), seed=seed))
        graph.replay()
        expected = TorchBackend().draw(tape.cpu(), reference, batch)
        torch.testing.assert_close(table.cpu(), expected, rtol=1e-5, atol=1e-4)
        wanted, _ = run_reference(images, None, None, table, program)
        close_enough(result.cpu(), wanted.cpu())


@needs_gpu
@pytest.mark.timeout(60)
def test_programs_that_wait_for_each_other_end_in_any_number_of_streams():
    """The largest images that are held, from a thread for each of twelve streams, beside a replayed graph."""
    size, batch = (512, 512), 16
    program, table = drawn([RandomRotation(15), ColorJitter(0.3, 0.4)], size, 3, batch)
    images = make_images((batch, 3, *size))
    expected, _ = run_reference(images, None, None, table, program)
    images, table = images.to(DEVICE), table.to(DEVICE)
    captured, graph = table.clone(), torch.cuda.CUDAGraph()
    fused.FusedBackend().apply(images, None, None, captured, program, None)
    with torch.cuda.graph(graph):
        replayed, _ = fused.FusedBackend().apply(images, None, None, captured, program, None)

    def launch(stream: torch.cuda.Stream) -> torch.Tensor:
        backend, mine = fused.FusedBackend(), table.clone()
        with torch.cuda.stream(stream):
            for _ in range(20):
                result, _ = backend.apply(images, None, None, mine, program, None)
        stream.synchronize()
        return result

    torch.cuda.synchronize()
    with ThreadPoolExecutor(12) as pool:
        running = [pool.submit(launch, torch.cuda.Stream()) for _ in range(12)]
        for _ in range(20):
            graph.replay()
        results = [each.result() for each in running]
    torch.cuda.synchronize()
    for result in (*results, replayed):
        close_enough(result.cpu(), expected.cpu())


@needs_gpu
def test_the_second_call_takes_the_short_way_and_other_pointers_the_long_one():
    size = (40, 40)
    program, table = drawn([RandomRotation(15), RandomContrast(0.2)], size, 3, 2)
    backend, table_there = fused.FusedBackend(), table.to(DEVICE)
    flat = torch.empty(2 * 3 * 40 * 40 + 16, dtype=torch.uint8, device=DEVICE)
    for offset, seed in ((0, 1), (0, 2), (1, 3), (0, 4), (7, 5)):
        there = flat[offset : offset + 9600].view(2, 3, *size)
        images = make_images((2, 3, *size), seed=seed)
        there.copy_(images)
        result, _ = backend.apply(there, None, None, table_there, program, None)
        expected, _ = TorchBackend().apply(images, None, None, table, program, None)
        close_enough(result.cpu(), expected)
    assert all(plan.augment.direct is not None for plan in backend._plans.values())
