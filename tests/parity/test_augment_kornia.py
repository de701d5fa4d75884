"""The torch backend against Kornia and torchvision: the same explicit parameters, never seeds.

Kornia resamples once per op and stoker once for all; so composed geometry is compared with the one
product of Kornia's own matrices. Tolerances are those of REQUIREMENTS section 5.
"""

from __future__ import annotations

import math
import warnings

import pytest
import torch

from stoker.augment.draw import BRIGHTNESS, CONTRAST, HUE, SATURATION, SIGMA, fill_table, untouched
from stoker.augment.geometry import (
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
    RandomErasing,
    encode_tape,
    make_program,
)
from stoker.augment.reference import TorchBackend, move_keypoints

SHAPES = [(1, 1, 33, 47), (3, 3, 64, 64), (2, 3, 41, 30), (4, 1, 16, 17)]
# Width and height differ by an even number, or a quarter turn would land every pixel on a tie.
EVEN_SHAPES = [(1, 1, 33, 47), (3, 3, 64, 64), (2, 3, 41, 29), (4, 1, 16, 18)]
ANGLES = [0.0, 90.0, 180.0, -90.0, 13.7, -179.0]
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    kornia = pytest.importorskip("kornia")
    import kornia.augmentation  # noqa: F811


def noise(shape, seed=0):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def chosen(batch, num_ops, seed=1):
    """Uniforms of our own choosing, so that both sides get the same parameters."""
    drawn = noise((batch, num_ops, 8), seed)
    drawn[:, :, 0] = 0.0  # every gate open
    return drawn


def drawn_table(ops, shape, drawn):
    table = untouched(shape[0], torch.device("cpu"))
    fill_table(table, encode_tape(ops, shape[2:]).tolist(), drawn)
    return table


def apply(images, ops, table, masks=None):
    program = make_program(ops, tuple(images.shape[-2:]), images.shape[1])
    result, moved = TorchBackend().apply(images, masks, None, table, program, None)
    return result if masks is None else (result, moved)


def augment(images, ops, drawn, masks=None):
    return apply(images, ops, drawn_table(ops, images.shape, drawn), masks)


def within(low, high, u):
    return low + u * (high - low)


def kornia_matrix(shape, degrees, shift, scale, shear, drawn):
    """What Kornia's RandomAffine computes from these parameters: input pixel -> output pixel."""
    batch, _, height, width = shape
    angle = within(-degrees, degrees, drawn[:, 1])
    move = torch.stack(
        [
            within(-shift[0] * width, shift[0] * width, drawn[:, 2]),
            within(-shift[1] * height, shift[1] * height, drawn[:, 3]),
        ],
        dim=1,
    )
    size = within(*scale, drawn[:, 4]).view(-1, 1).expand(-1, 2)
    lean = [math.radians(s) * within(-1, 1, drawn[:, 5 + k]) for k, s in enumerate(shear)]
    centre = torch.tensor([[(width - 1) / 2, (height - 1) / 2]]).expand(batch, 2)
    return kornia.geometry.transform.get_affine_matrix2d(move, centre, size, angle, *lean)


def warp(images, matrix, size=None, mode="bilinear"):
    return kornia.geometry.transform.warp_affine(
        images, matrix[:, :2], size or images.shape[-2:], mode=mode, align_corners=True
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_flips_are_kornias_bit_for_bit(shape):
    images = noise(shape)
    across = augment(images, [RandomHorizontalFlip(1.0)], chosen(shape[0], 1))
    down = augment(images, [RandomVerticalFlip(1.0)], chosen(shape[0], 1))
    assert torch.equal(across, kornia.geometry.transform.hflip(images))
    assert torch.equal(down, kornia.geometry.transform.vflip(images))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("degrees", ANGLES)
def test_rotation_is_kornias(shape, degrees):
    images = noise(shape)
    ours = augment(images, [RandomRotation((degrees, degrees))], chosen(shape[0], 1))
    theirs = kornia.geometry.transform.rotate(images, torch.full((shape[0],), degrees))
    # Kornia's corners at 90 degrees fall a rounding error outside and fade; ours are exact.
    torch.testing.assert_close(ours, theirs, atol=3e-5, rtol=0)


def test_rotation_of_a_large_odd_image():
    images = noise((1, 3, 513, 511))
    ours = augment(images, [RandomRotation((15.0, 15.0))], chosen(1, 1))
    theirs = kornia.geometry.transform.rotate(images, torch.full((1,), 15.0))
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=0)
    assert (ours - theirs).abs().mean() < 2e-5


@pytest.mark.parametrize("shape", SHAPES)
def test_affine_is_kornias_with_shift_scale_and_shear(shape):
    images, drawn = noise(shape), chosen(shape[0], 1)
    op = RandomAffine(25, (0.1, 0.2), (0.8, 1.3), (12, 7))
    ours = augment(images, [op], drawn)
    theirs = warp(images, kornia_matrix(shape, 25, (0.1, 0.2), (0.8, 1.3), (12, 7), drawn[:, 0]))
    torch.testing.assert_close(ours, theirs, atol=3e-5, rtol=0)


def test_affine_is_kornias_random_affine_given_its_parameters():
    shape, drawn = (3, 3, 40, 50), chosen(3, 1)
    images = noise(shape)
    aug = kornia.augmentation.RandomAffine(25.0, (0.1, 0.2), (0.8, 1.3), 12.0, align_corners=True)
    params = {
        "translations": torch.stack(
            [within(-5.0, 5.0, drawn[:, 0, 2]), within(-8.0, 8.0, drawn[:, 0, 3])], dim=1
        ),
        "center": torch.tensor([[24.5, 19.5]]).expand(3, 2),
        "scale": within(0.8, 1.3, drawn[:, 0, 4]).view(-1, 1).expand(-1, 2),
        "angle": within(-25.0, 25.0, drawn[:, 0, 1]),
        "shear_x": within(-12.0, 12.0, drawn[:, 0, 5]),
        "shear_y": within(-7.0, 7.0, drawn[:, 0, 6]),
    }
    matrix = aug.compute_transformation(images, params, aug.flags)
    theirs = aug.apply_transform(images, params, aug.flags, matrix)
    ours = augment(images, [RandomAffine(25, (0.1, 0.2), (0.8, 1.3), (12, 7))], drawn)
    torch.testing.assert_close(ours, theirs, atol=3e-5, rtol=0)


@pytest.mark.parametrize("shape", SHAPES)
def test_composed_geometry_is_the_product_of_kornias_matrices(shape):
    images, drawn = noise(shape), chosen(shape[0], 3)
    ops = [
        RandomHorizontalFlip(1.0),
        RandomRotation(30),
        RandomAffine(0, (0.1, 0.1), (0.9, 1.1), (5, 0)),
    ]
    batch, _, height, width = shape
    centre = torch.tensor([[(width - 1) / 2, (height - 1) / 2]]).expand(batch, 2)
    angle = within(-30, 30, drawn[:, 1, 1])
    flip = torch.tensor([[-1.0, 0, width - 1], [0, 1, 0], [0, 0, 1]]).expand(batch, 3, 3)
    turn = torch.eye(3).repeat(batch, 1, 1)
    turn[:, :2] = kornia.geometry.transform.get_rotation_matrix2d(
        centre, angle, torch.ones(batch, 2)
    )
    last = kornia_matrix(shape, 0, (0.1, 0.1), (0.9, 1.1), (5, 0), drawn[:, 2])
    ours = augment(images, ops, drawn)
    torch.testing.assert_close(ours, warp(images, last @ turn @ flip), atol=3e-5, rtol=0)


@pytest.mark.parametrize("shape", EVEN_SHAPES)
@pytest.mark.parametrize("degrees", ANGLES)
def test_masks_are_kornias_nearest_wherever_the_coordinate_is_no_tie(shape, degrees):
    batch, _, height, width = shape
    labels = torch.randint(
        1, 19, (batch, height, width), generator=torch.Generator().manual_seed(2)
    )
    ops, drawn = [RandomRotation((degrees, degrees))], chosen(batch, 1)
    _, ours = augment(noise(shape), ops, drawn, masks=labels)
    theirs = kornia.geometry.transform.rotate(
        labels.unsqueeze(1).float(), torch.full((batch,), degrees), mode="nearest"
    )[:, 0].long()
    ours = torch.where(ours == 255, 0, ours)  # Kornia fills corners with class 0
    table = drawn_table(ops, shape, drawn)[0]
    x, y = torch.arange(width), torch.arange(height).view(-1, 1)
    places = [table[0] * x + table[1] * y + table[2], table[3] * x + table[4] * y + table[5]]
    ties = [((place - place.floor() - 0.5).abs() < 1e-4).expand(height, width) for place in places]
    clear = ~(ties[0] | ties[1])
    assert clear.float().mean() > 0.9
    assert torch.equal(ours[:, clear], theirs[:, clear])
    assert ours.dtype == torch.int64


@pytest.mark.parametrize("shape", SHAPES[1:3])
def test_keypoints_move_as_kornia_moves_points(shape):
    ops, drawn = [RandomAffine(25, (0.1, 0.2), (0.8, 1.3), (12, 7))], chosen(shape[0], 1)
    points = noise((shape[0], 9, 2)) * 30
    table = drawn_table(ops, shape, drawn)
    ours, _ = move_keypoints(points, table, make_program(ops, shape[2:], shape[1]))
    matrix = kornia_matrix(shape, 25, (0.1, 0.2), (0.8, 1.3), (12, 7), drawn[:, 0])
    torch.testing.assert_close(
        ours, kornia.geometry.linalg.transform_points(matrix, points), atol=1e-4, rtol=0
    )


def test_crop_with_padding_is_kornias():
    images = noise((3, 3, 20, 24))
    drawn = torch.zeros(3, 1, 8)
    drawn[:, 0, 1] = torch.tensor([0.0, 0.5, 0.999])
    drawn[:, 0, 2] = torch.tensor([0.999, 0.2, 0.0])
    ours = augment(images, [RandomCrop((18, 16), padding=3)], drawn)
    corners = []
    for u in drawn[:, 0]:
        left, top = int(u[1] * 15), int(u[2] * 9)
        corners.append([[left, top], [left + 15, top], [left + 15, top + 17], [left, top + 17]])
    theirs = kornia.geometry.transform.crop_by_indices(
        torch.nn.functional.pad(images, (3, 3, 3, 3)), torch.tensor(corners)
    )
    assert torch.equal(ours, theirs)


def test_resized_crop_is_kornias_crop_by_boxes():
    images, drawn = noise((4, 3, 37, 52)), chosen(4, 1)
    ops = [RandomResizedCrop((24, 31), scale=(0.2, 0.9))]
    table = drawn_table(ops, images.shape, drawn)
    left, top, right, bottom = (
        table[:, 2],
        table[:, 5],
        table[:, 2] + table[:, 0] * 30,
        table[:, 5] + table[:, 4] * 23,
    )
    box = torch.stack([left, top, right, top, right, bottom, left, bottom], 1).view(-1, 4, 2)
    target = torch.tensor([[[0.0, 0], [30, 0], [30, 23], [0, 23]]]).expand(4, 4, 2)
    theirs = kornia.geometry.transform.crop_by_boxes(images, box, target, align_corners=True)
    torch.testing.assert_close(apply(images, ops, table), theirs, atol=3e-5, rtol=0)


@pytest.mark.parametrize("shape", [(1, 3, 33, 47), (4, 3, 16, 17)])
@pytest.mark.parametrize("kinds", [(0,), (1,), (2,), (3,), (0, 1), (0, 1, 2, 3)])
def test_colour_is_kornias_color_jitter_in_the_fixed_order(shape, kinds):
    images = noise(shape)
    spread = torch.linspace(0.5, 1.5, shape[0]) if shape[0] > 1 else torch.tensor([1.3])
    factors = [spread, spread.flip(0), spread * 0.9, spread - 1.05]
    aug = kornia.augmentation.ColorJitter(0.5, 0.5, 0.5, 0.5, order=kinds)
    names = ("brightness_factor", "contrast_factor", "saturation_factor", "hue_factor")
    theirs = aug.apply_transform(images, dict(zip(names, factors, strict=True)), {}, None)
    table = untouched(shape[0], torch.device("cpu"))
    for kind in kinds:
        table[:, (BRIGHTNESS, CONTRAST, SATURATION, HUE)[kind]] = factors[kind]
    ours = apply(images, [ColorJitter(0.5, 0.5, 0.5, 0.5)], table)
    torch.testing.assert_close(ours, theirs, atol=5e-6, rtol=0)


def test_brightness_and_contrast_of_grey_images_are_kornias():
    images, factor = noise((3, 1, 20, 21)), torch.tensor([0.4, 1.0, 1.7])
    aug = kornia.augmentation.ColorJitter(0.5, 0.5, order=(0, 1))
    params = {"brightness_factor": factor, "contrast_factor": factor.flip(0)}
    params |= {"saturation_factor": torch.ones(3), "hue_factor": torch.zeros(3)}
    table = untouched(3, torch.device("cpu"))
    table[:, BRIGHTNESS], table[:, CONTRAST] = factor, factor.flip(0)
    ours = apply(images, [ColorJitter(0.5, 0.5)], table)
    torch.testing.assert_close(
        ours, aug.apply_transform(images, params, {}, None), atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("taps", [3, 7])
def test_blur_is_kornias(shape, taps):
    images, sigma = noise(shape), torch.linspace(0.1, 2.5, shape[0])
    table = untouched(shape[0], torch.device("cpu"))
    table[:, SIGMA] = sigma
    ours = apply(images, [GaussianBlur(taps)], table)
    theirs = kornia.filters.gaussian_blur2d(
        images, (taps, taps), sigma.view(-1, 1).expand(-1, 2), border_type="reflect"
    )
    torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=0)


def test_erasing_is_kornias():
    images, drawn = noise((4, 3, 30, 40)), chosen(4, 1)
    ops = [RandomErasing(1.0, value=0.25)]
    table = drawn_table(ops, images.shape, drawn)
    x0, y0, x1, y1 = table[:, 11:15].unbind(1)
    aug = kornia.augmentation.RandomErasing()
    sides = {"xs": x0, "ys": y0, "widths": x1 - x0, "heights": y1 - y0}
    theirs = aug.apply_transform(images, {**sides, "values": torch.full((4,), 0.25)}, {}, None)
    assert torch.equal(apply(images, ops, table), theirs)
    assert ((x1 - x0) * (y1 - y0)).min() > 0


def test_normalize_is_kornias():
    images = noise((2, 3, 9, 11))
    ours = apply(images, [Normalize(MEAN, STD)], untouched(2, torch.device("cpu")))
    theirs = kornia.enhance.normalize(images, torch.tensor(MEAN), torch.tensor(STD))
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)


# -- torchvision ---------------------------------------------------------------------------------


def test_torchvision_agrees_on_every_op_it_has():
    functional = pytest.importorskip("torchvision.transforms.v2.functional")
    from torchvision.transforms import InterpolationMode

    images = noise((2, 3, 64, 64))
    table = untouched(2, torch.device("cpu"))

    def close(ours, theirs, atol):
        torch.testing.assert_close(ours, theirs, atol=atol, rtol=0)

    flip = [RandomHorizontalFlip(1.0)]
    close(augment(images, flip, chosen(2, 1)), functional.horizontal_flip(images), 0)
    turned = functional.rotate(images, 15.0, InterpolationMode.BILINEAR, fill=None)
    close(augment(images, [RandomRotation((15.0, 15.0))], chosen(2, 1)), turned, 1e-4)
    jitter = [ColorJitter(0.5, 0.5, 0.5, 0.5)]
    for column, factor, theirs in (
        (BRIGHTNESS, 1.3, functional.adjust_brightness),
        (CONTRAST, 0.7, functional.adjust_contrast),
        (SATURATION, 1.4, functional.adjust_saturation),
        (HUE, 0.2, functional.adjust_hue),
    ):
        changed = table.clone()
        changed[:, column] = factor
        close(apply(images, jitter, changed), theirs(images, factor), 1e-4)
    blurred = table.clone()
    blurred[:, SIGMA] = 1.2
    theirs = functional.gaussian_blur(images, [5, 5], [1.2, 1.2])
    close(apply(images, [GaussianBlur(5)], blurred), theirs, 1e-5)
    normalized = functional.normalize(images, list(MEAN), list(STD))
    close(apply(images, [Normalize(MEAN, STD)], table), normalized, 1e-5)
