"""Functions of one's own, RandAugment, TrivialAugment, reflected padding, the alternating flip."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from stoker.augment import (
    AlternatingFlip,
    ColorJitter,
    Compose,
    Function,
    GaussianBlur,
    Normalize,
    RandAugment,
    RandomCrop,
    RandomHorizontalFlip,
    RandomRotation,
    ToDtype,
    TrivialAugment,
)
from stoker.augment.policies import NAMES, _equalize, _posterize, _sharpen, _stretch
from stoker.errors import InputError


def pictures(num=6, channels=3, size=(20, 24), seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (num, channels, *size), generator=generator, dtype=torch.uint8)


def unit(images):
    """Bytes as the backends scale them: times the reciprocal, which rounds otherwise than a division."""
    return images.float() * (1.0 / 255.0)


# -- functions of one's own --------------------------------------------------------------------------


def invert(images, u):
    return 1.0 - images


def test_a_function_stands_between_fused_parts_and_gives_what_separate_calls_give():
    images = pictures()
    before, after = [RandomHorizontalFlip(), RandomCrop(16)], [Normalize(0.5, 0.25)]
    whole = Compose([*before, Function(invert), *after], seed=3)
    expected = (1.0 - Compose(before, seed=3)(images) - 0.5) / 0.25
    assert torch.allclose(whole(images), expected, atol=1e-6)
    assert whole.backend_reason.endswith(
        "; invert in torch between fused parts: another read and write of the batch each"
    )
    assert torch.equal(whole.validation()(images), Compose([*before, *after]).validation()(images))


def test_a_function_draws_from_the_counter_and_keeps_the_samples_behind_its_gate():
    images = pictures(64)
    seen = []

    def note(values, u):
        seen.append(u.clone())
        return torch.zeros_like(values)

    compose = Compose([Function(note, phase="blur", p=0.5)], seed=1)
    first, second = compose(images), compose(images)
    gone = (first == 0).flatten(1).all(1)
    assert 16 < int(gone.sum()) < 48
    assert torch.equal(first[~gone], unit(images[~gone]))
    assert not torch.equal(gone, (second == 0).flatten(1).all(1))
    compose.seek(0)
    assert torch.equal(compose(images), first)
    assert torch.equal(seen[0], seen[2])
    assert seen[0].shape == (64, 7)
    assert len(set(seen[0].flatten().tolist())) > 440


def test_two_functions_and_the_ops_around_them_draw_independently():
    images = torch.full((400, 3, 4, 4), 128, dtype=torch.uint8)
    drawn = []

    def keep(values, u):
        drawn.append(u[:, 0].clone())
        return values

    compose = Compose([RandomHorizontalFlip(), Function(keep), Function(keep, phase="erase")])
    compose(images)
    flips = (compose.draw(400, (4, 4), 3, "cpu").table[:, 0] < 0).float()
    table = torch.stack([*drawn, flips])
    assert float(torch.corrcoef(table).fill_diagonal_(0).abs().max()) < 0.2


def test_masks_move_with_geometry_on_either_side_of_a_function():
    images, masks = pictures(), pictures(channels=1)[:, 0].long()
    ops = [RandomHorizontalFlip(), RandomCrop(12)]
    expected = Compose(ops, seed=4)(images, masks)[1]
    plain = Function(lambda values, _u: values)
    for made in ([*ops, plain], [Function(invert, phase="geometry", masks=lambda m, _u: m), *ops]):
        assert torch.equal(Compose(made, seed=4)(images, masks)[1], expected) == (made[0] is ops[0])
    lazy = Compose([Function(invert, phase="geometry")])
    with pytest.raises(InputError, match="moves images only"):
        lazy(images, masks)


def test_rows_dtypes_and_layouts_pass_through_a_function():
    images = pictures(9)
    rows = torch.tensor([4, 4, 0])
    compose = Compose([Function(invert), ToDtype(torch.bfloat16, channels_last=True)])
    out = compose(images, rows=rows)
    assert out.dtype == torch.bfloat16
    assert out.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(out, (1 - unit(images[rows])).to(torch.bfloat16))
    double = Compose([Function(invert), ToDtype(torch.float64)])(images.double() / 255)
    assert torch.equal(double, 1 - images.double() / 255)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Function(invert, phase="sound"), "phase is 'sound'"),
        (lambda: Function(3), "function is 3"),
        (lambda: Function(invert, masks=3), "masks is 3"),
        (lambda: Function(invert, p=2), "p of Function is 2"),
        (
            lambda: Compose([Normalize(0.5, 0.5), Function(invert)]),
            "Function stands after Normalize",
        ),
        (
            lambda: Compose(
                [RandomHorizontalFlip(), Function(invert, phase="geometry"), RandomCrop(4)]
            ),
            "stands between other geometry",
        ),
        (
            lambda: Compose([Function(lambda i, u: i[:1])])(pictures()),
            r"torch.float32 \(1, 3, 20, 24\)",
        ),
        (
            lambda: Compose([Function(lambda i, u: None)])(pictures()),
            "returned NoneType for images",
        ),
    ],
)
def test_wrong_functions_are_refused(make, told):
    with pytest.raises(InputError, match=told):
        make()


def test_boxes_do_not_follow_a_function_that_moves():
    compose = Compose([Function(invert, phase="geometry")])
    params = compose.draw(2, (8, 8), 3, "cpu")
    with pytest.raises(InputError, match="boxes with Function"):
        compose.boxes(torch.zeros(2, 1, 4), params)
    plain = Compose([Function(invert)])
    plain.boxes(torch.zeros(2, 1, 4), plain.draw(2, (8, 8), 3, "cpu"))


# -- RandAugment, TrivialAugment ---------------------------------------------------------------------


@pytest.mark.parametrize("policy", [RandAugment(), RandAugment(3, 14), TrivialAugment()])
@pytest.mark.parametrize("channels", [1, 3])
def test_policies_keep_shape_range_and_draws(policy, channels):
    images, masks = pictures(40, channels), pictures(40, 1)[:, 0].long()
    compose = Compose([RandomCrop(16), policy, Normalize(0.0, 1.0)], seed=2)
    out, moved = compose(images, masks)
    assert out.shape == (40, channels, 16, 16)
    assert moved.shape == (40, 16, 16)
    assert float(out.min()) >= 0
    assert float(out.max()) <= 1
    compose.seek(0)
    again, moved_again = compose(images, masks)
    assert torch.equal(out, again)
    assert torch.equal(moved, moved_again)
    assert not torch.equal(out, compose(images, masks)[0])


def one_op(name, strength=1.0, sign=1.0, images=None, masks=None, wide=True):
    """One op of the list for all images, at a strength from 0 to 1."""
    images = pictures(2, size=(8, 9)).float() / 255 if images is None else images
    policy = TrivialAugment() if wide else RandAugment()
    compose = Compose([policy])

    def apply(values, labels, table, program):
        backend = compose._pick(values.device, values.dtype, program)
        return backend.apply(values, labels, None, table, program, None)

    num = images.shape[0]
    chosen = torch.full((num,), NAMES.index(name))
    level, signs = torch.full((num,), float(strength)), torch.full((num,), float(sign))
    return images, policy.run_one((images, masks), chosen, level, signs, 255, apply)


def test_the_ops_do_what_their_names_say():
    images, (out, _) = one_op("Identity")
    assert torch.equal(out, images)
    images, (out, _) = one_op("Brightness", 1.0, -1.0)
    assert torch.allclose(out, images * 0.01, atol=1e-6)
    images, (out, _) = one_op("Color", 1.0, -1.0, wide=False)
    grey = (images * torch.tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)).sum(1, keepdim=True)
    assert torch.allclose(out, 0.1 * images + 0.9 * grey, atol=1e-5)
    images, (out, _) = one_op("Solarize", 1.0)
    assert torch.equal(out, 1.0 - images)
    images, (out, _) = one_op("Solarize", 0.0)
    assert torch.equal(out, torch.where(images >= 1.0, 1.0 - images, images))


def test_translation_shear_and_rotation_move_masks_too():
    masks = torch.arange(2 * 8 * 9).view(2, 8, 9) % 200
    images, (out, moved) = one_op("TranslateX", 3 / 32, 1.0, masks=masks)
    assert torch.equal(out[..., :6], images[..., 3:])
    assert torch.equal(moved[..., :6], masks[..., 3:])
    assert bool((moved[..., 6:] == 255).all())
    square = pictures(1, size=(9, 9)).float() / 255
    _, (out, _) = one_op("Rotate", 90 / 135, 1.0, images=square)
    turned = min(float((out - torch.rot90(square, k, (2, 3))).abs().max()) for k in (1, 3))
    assert turned < 1e-4
    _, (out, _) = one_op("ShearX", 1.0, 1.0, images=square)
    assert torch.allclose(out[..., 0, :], square[..., 0, :], atol=1e-5), "the first row stays"


def test_posterize_autocontrast_equalize_and_sharpness_are_pils():
    image = pytest.importorskip("PIL.Image")
    from PIL import ImageEnhance, ImageOps

    bytes_ = pictures(1, size=(13, 17), seed=3)
    values = bytes_.float() / 255
    picture = image.fromarray(bytes_[0].permute(1, 2, 0).numpy())
    none = torch.zeros(1, 1, 1, 1)

    def pixels(made):
        import numpy as np

        return torch.from_numpy(np.array(made)).permute(2, 0, 1)[None].float()

    for bits in (2, 5, 8):
        made = _posterize(values, torch.full((1, 1, 1, 1), float(bits)))
        assert torch.equal((made * 255).round(), pixels(ImageOps.posterize(picture, bits)))
    assert torch.equal((_equalize(values, none) * 255).round(), pixels(ImageOps.equalize(picture)))
    stretched = (_stretch(values, none) * 255 - pixels(ImageOps.autocontrast(picture))).abs().max()
    assert float(stretched) <= 1.0, "PIL rounds down"
    sharp = pixels(ImageEnhance.Sharpness(picture).enhance(1.5))
    made = _sharpen(values, torch.full((1, 1, 1, 1), 0.5)) * 255
    assert float((made - sharp).abs().max()) <= 2.0, "PIL rounds the smoothed image first"
    flat = torch.full((1, 3, 8, 8), 0.5)
    assert torch.equal(_equalize(flat, none), flat)
    assert torch.equal(_stretch(flat, none), flat)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: RandAugment(num_ops=0), "num_ops"),
        (lambda: RandAugment(magnitude=31), "magnitude"),
        (lambda: RandAugment(magnitude=1.5), "magnitude"),
        (lambda: TrivialAugment(1), "num_magnitude_bins"),
        (lambda: Compose([RandAugment()])(pictures(channels=4)), "RandAugment on images with 4"),
        (
            lambda: Compose([RandAugment()]).keypoints(
                torch.zeros(2, 1, 2), Compose([RandAugment()]).draw(2, (8, 8), 3, "cpu")
            ),
            "keypoints with RandAugment",
        ),
    ],
)
def test_wrong_policies_are_refused(make, told):
    with pytest.raises(InputError, match=told):
        make()


# -- reflected padding -------------------------------------------------------------------------------


@given(
    st.integers(3, 12), st.integers(3, 12), st.integers(1, 11), st.integers(0, 2**31), st.booleans()
)
def test_a_reflected_crop_is_a_crop_of_torchs_reflected_image(height, width, padding, seed, flip):
    padding = min(padding, height - 1, width - 1)
    images = pictures(4, size=(height, width), seed=seed % 97)
    masks = images[:, 0].long()
    ops = [RandomCrop((height, width), padding, "reflect")]
    compose = Compose([*([RandomHorizontalFlip()] if flip else []), *ops], seed=seed)
    params = compose.draw(4, (height, width), 3, "cpu")
    out, moved = compose.apply(images, params, masks)
    padded = functional.pad(unit(images), (padding,) * 4, mode="reflect")
    labels = functional.pad(masks[:, None].float(), (padding,) * 4, mode="reflect")[:, 0].long()
    for sample, row in enumerate(params.table.tolist()):
        sign, left, top = int(row[0]), int(row[2]), int(row[5])
        # An output pixel x reads sign * x + left of the image, which stands at `padding` in the padded one.
        x = [sign * place + left + padding for place in range(width)]
        y = [place + top + padding for place in range(height)]
        assert torch.equal(out[sample], padded[sample][:, y][:, :, x])
        assert torch.equal(moved[sample], labels[sample][y][:, x])


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: RandomCrop(8, 2, "edge"), "padding_mode is 'edge'"),
        (lambda: Compose([RandomCrop(8, 8, "reflect")])(pictures(size=(8, 8))), "at most 7"),
        (
            lambda: Compose([RandomCrop(8, 2, "reflect"), RandomRotation(10)]),
            "beside RandomRotation",
        ),
        (lambda: Compose([RandomCrop(8, 2, "reflect"), RandomCrop(4)]), "no other geometry"),
    ],
)
def test_what_reflected_padding_cannot_do_is_refused(make, told):
    with pytest.raises(InputError, match=told):
        make()


def test_validation_of_a_reflected_crop_is_reflected_in_the_middle():
    images = pictures(1, size=(6, 6))
    out = Compose([RandomCrop(8, 2, "reflect")]).validation()(images)
    assert torch.equal(out, functional.pad(unit(images), (1,) * 4, mode="reflect"))


# -- the alternating flip ----------------------------------------------------------------------------


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**32 - 2), st.integers(0, 7))
def test_an_image_is_mirrored_in_every_second_epoch_wherever_it_stands(seed, epoch, stream):
    ids = torch.arange(200) * 3_000_000_007
    first = Compose([AlternatingFlip()], seed=seed)
    second = Compose([AlternatingFlip()], seed=seed, stream=stream)
    first.seek(epoch)
    now = first.draw(200, (4, 4), 1, "cpu", ids=ids).table[:, 0]
    assert 60 < int((now < 0).sum()) < 140
    second.seek(epoch, 9)
    shuffled = torch.randperm(200, generator=torch.Generator().manual_seed(1))
    again = second.draw(200, (4, 4), 1, "cpu", ids=ids[shuffled]).table[:, 0]
    assert torch.equal(again, now[shuffled]), "the place, the step and the rank do not matter"
    first.seek(epoch + 1)
    assert torch.equal(first.draw(200, (4, 4), 1, "cpu", ids=ids).table[:, 0], -now)


def test_the_alternating_flip_takes_rows_or_ids_and_asks_for_them():
    images = pictures(8)
    compose = Compose([AlternatingFlip(), ColorJitter(0.1), GaussianBlur(3)])
    rows = torch.tensor([3, 1, 6])
    compose(images, rows=rows)
    compose(images, ids=torch.arange(8))
    with pytest.raises(InputError, match="without the numbers of the images"):
        compose(images)
    with pytest.raises(InputError, match=r"ids are torch.int32 \(8,\)"):
        compose(images, ids=torch.arange(8).int())
    validation = compose.validation()
    assert not validation.needs_ids
    validation(images)


def test_hwc_images_are_named_as_such():
    with pytest.raises(InputError, match=r"channels last \(HWC\)") as caught:
        Compose([ColorJitter(contrast=0.2)])(torch.zeros(2, 32, 32, 3))
    assert "permute(0, 3, 1, 2)" in str(caught.value)
    with pytest.raises(InputError, match="HWC"):
        Compose([ColorJitter(contrast=0.2)]).apply(torch.zeros(32, 32, 3))


# -- on a GPU ------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_stages_are_captured_and_agree_with_the_cpu():
    images, ids = pictures(16, size=(32, 32)), torch.arange(16)
    ops = [AlternatingFlip(), RandomCrop(32, 4, "reflect"), TrivialAugment(), Normalize(0.5, 0.25)]
    here, there = Compose(ops, seed=6), Compose(ops, seed=6)
    expected = [here(images, ids=ids) for _ in range(4)]
    given, names = images.cuda(), ids.cuda()
    for step in range(4):
        assert float((there(given, ids=names).cpu() - expected[step]).abs().median()) < 1e-4
    there.seek(0)
    there(given, ids=names)
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        there(given, ids=names)
    torch.cuda.current_stream().wait_stream(side)
    there.seek(0)
    with torch.cuda.graph(graph):
        out = there(given, ids=names)
    there.seek(0)
    seen = []
    for _ in range(3):
        graph.replay()
        seen.append(out.cpu().clone())
    assert all(float((a - b).abs().median()) < 1e-4 for a, b in zip(seen, expected, strict=False))
    assert not torch.equal(seen[0], seen[1])
