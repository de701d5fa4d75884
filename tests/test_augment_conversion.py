"""`Compose.from_torchvision`: stand-ins with torchvision's names and attributes, and the package itself where it is."""

from __future__ import annotations

import pytest
import torch

from stoker.augment import (
    CenterCrop,
    ColorJitter,
    Compose,
    Function,
    GaussianBlur,
    Normalize,
    RandAugment,
    RandomAffine,
    RandomCrop,
    RandomErasing,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomRotation,
    RandomVerticalFlip,
    Resize,
    ToDtype,
    TrivialAugment,
)
from stoker.errors import InputError

IMAGENET = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}


def stand_in(name, **attributes):
    """An object with the class name and the attributes of a transform; called, it doubles the image."""
    kind = type(name, (), {"__call__": lambda self, image: (image * 2).clamp(0, 1)})
    made = kind()
    made.__dict__.update(attributes)
    return made


def listed(*transforms):
    return stand_in("Compose", transforms=list(transforms))


FLIP = stand_in("RandomHorizontalFlip", p=0.3)
JITTER = stand_in(
    "ColorJitter", brightness=(0.6, 1.4), contrast=(0.6, 1.4), saturation=None, hue=(-0.1, 0.1)
)
NORMALIZE = stand_in("Normalize", **IMAGENET)
NORMALIZE_1 = stand_in("Normalize", mean=[0.5], std=[0.5])


@pytest.mark.parametrize(
    ("transform", "expected"),
    [
        (FLIP, RandomHorizontalFlip(0.3)),
        (stand_in("RandomVerticalFlip", p=1.0), RandomVerticalFlip(1.0)),
        (
            stand_in("RandomRotation", degrees=[-15.0, 15.0], expand=False, center=None, fill=0),
            RandomRotation(15),
        ),
        (
            stand_in(
                "RandomAffine",
                degrees=[-5.0, 5.0],
                translate=(0.1, 0.2),
                scale=(0.9, 1.1),
                shear=[-10.0, 10.0],
                fill={"others": 0},
                center=None,
            ),
            RandomAffine((-5, 5), (0.1, 0.2), (0.9, 1.1), (10, 0)),
        ),
        (
            stand_in(
                "RandomAffine", degrees=[0.0, 0.0], translate=None, scale=None, shear=None, fill=0
            ),
            RandomAffine(),
        ),
        (
            stand_in("RandomResizedCrop", size=(8, 8), scale=(0.1, 1.0), ratio=(0.75, 1.33)),
            RandomResizedCrop(8, (0.1, 1.0), (0.75, 1.33)),
        ),
        (
            stand_in("RandomCrop", size=(8, 8), padding=[4], padding_mode="reflect", fill=0),
            RandomCrop(8, 4, "reflect"),
        ),
        (stand_in("RandomCrop", size=(8, 8), padding=None, fill=0), RandomCrop(8)),
        (stand_in("CenterCrop", size=(8, 8)), CenterCrop(8)),
        (stand_in("Resize", size=[8, 9], antialias=True), Resize((8, 9))),
        (JITTER, ColorJitter((0.6, 1.4), (0.6, 1.4), hue=(-0.1, 0.1))),
        (
            stand_in("GaussianBlur", kernel_size=(3, 3), sigma=[0.1, 2.0]),
            GaussianBlur(3, (0.1, 2.0)),
        ),
        (
            stand_in("RandomErasing", p=0.2, scale=(0.02, 0.3), ratio=(0.3, 3.3), value=0),
            RandomErasing(0.2, (0.02, 0.3), (0.3, 3.3)),
        ),
        (NORMALIZE, Normalize(tuple(IMAGENET["mean"]), tuple(IMAGENET["std"]))),
        (stand_in("ToDtype", dtype=torch.float16, scale=True), ToDtype(torch.float16)),
        (
            stand_in("RandAugment", num_ops=2, magnitude=9, num_magnitude_bins=31),
            RandAugment(),
        ),
        (stand_in("TrivialAugmentWide", num_magnitude_bins=31), TrivialAugment()),
        (
            stand_in(
                "RandomApply",
                p=0.5,
                transforms=[stand_in("GaussianBlur", kernel_size=3, sigma=1.0)],
            ),
            GaussianBlur(3, (1.0, 1.0), p=0.5),
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_transform_becomes_the_op_of_its_name(transform, expected):
    compose = Compose.from_torchvision(listed(transform), seed=3)
    assert compose.ops == (expected,)
    (told,) = compose.conversion
    assert told.name == type(transform).__name__
    assert told.how == ("stage" if isinstance(expected, (RandAugment, TrivialAugment)) else "fused")


def test_what_leaves_nothing_to_do_is_dropped_and_said():
    compose = Compose.from_torchvision(
        [stand_in("ToImage"), FLIP, stand_in("ToDtype", dtype=torch.float32, scale=True), NORMALIZE]
    )
    assert [type(op) for op in compose.ops] == [RandomHorizontalFlip, Normalize]
    assert [str(one) for one in compose.conversion] == [
        "ToImage: dropped (images are tensors already)",
        "RandomHorizontalFlip: fused",
        "ToDtype: dropped (images leave as float32 from 0 to 1)",
        "Normalize: fused",
    ]


def test_an_order_of_torchvision_becomes_ours_and_is_said():
    compose = Compose.from_torchvision(listed(JITTER, listed(FLIP), NORMALIZE))
    assert [type(op) for op in compose.ops] == [RandomHorizontalFlip, ColorJitter, Normalize]
    assert compose.conversion[1].note == "moved before ColorJitter"


def test_what_we_do_not_have_is_called_image_by_image_and_said():
    odd = stand_in("RandomSolarize", threshold=0.5, p=0.5)
    compose = Compose.from_torchvision(listed(FLIP, odd, NORMALIZE))
    told = compose.conversion[1]
    assert told.how == "image by image"
    assert "no op of ours" in told.note
    images = torch.randint(0, 100, (4, 3, 8, 8), dtype=torch.uint8)
    plain = Compose([RandomHorizontalFlip(0.3)])(images)
    mean, std = (torch.tensor(IMAGENET[name]).view(1, 3, 1, 1) for name in ("mean", "std"))
    assert torch.allclose(compose(images), ((plain * 2).clamp(0, 1) - mean) / std, atol=1e-5)


@pytest.mark.parametrize(
    ("transform", "why"),
    [
        (stand_in("Resize", size=[8]), "shorter side"),
        (stand_in("Resize", size=8), "shorter side"),  # v1 keeps the number
        (stand_in("Resize", size=None, max_size=8), "longer side"),
        (stand_in("RandomCrop", size=(8, 8), padding=[1, 2, 1, 2], fill=0), "differs by side"),
        (stand_in("RandomCrop", size=(8, 8), padding=2, padding_mode="edge", fill=0), "'edge'"),
        (stand_in("RandomErasing", p=1.0, scale=(0.1, 0.2), ratio=(1, 2), value=None), "random"),
        (
            stand_in("RandAugment", num_ops=2, magnitude=9, num_magnitude_bins=31, fill=[127]),
            "fill",
        ),
        (stand_in("TrivialAugmentWide", num_magnitude_bins=31, fill=127), "fill"),
        (stand_in("RandomRotation", degrees=[0, 9], expand=False, center=None, fill=127), "fill"),
        (stand_in("GaussianBlur", kernel_size=(3, 5), sigma=1.0), "not square"),
        (
            stand_in(
                "RandomAffine", degrees=[0, 0], translate=None, scale=None, shear=[0, 10], fill=0
            ),
            "shear",
        ),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_options_that_we_do_not_have_are_named(transform, why):
    (told,) = Compose.from_torchvision(listed(transform)).conversion
    assert told.how == "image by image"
    assert why in told.note


def test_what_differs_is_told():
    policy = {"num_magnitude_bins": 31, "interpolation": "InterpolationMode.NEAREST", "fill": None}
    grey = stand_in("Grayscale", num_output_channels=1)
    compose = Compose.from_torchvision(
        [
            stand_in("Resize", size=[8, 8], interpolation=3),
            stand_in("RandAugment", num_ops=2, magnitude=9, **policy),
            stand_in("TrivialAugmentWide", **policy),
            grey,
        ]
    )
    assert [one.note for one in compose.conversion] == [
        "bilinear instead of bicubic",
        "bilinear instead of nearest",
        "bilinear instead of nearest",
        "3 equal channels for RGB instead of 1",
    ]
    images = torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8)
    settled = Compose.from_torchvision([grey]).validation()
    assert len(settled.ops) == 1, "Grayscale is not random"
    assert torch.equal(settled(images)[:, 0], settled(images)[:, 2])
    half = stand_in("RandomApply", p=0.5, transforms=[grey])
    assert Compose.from_torchvision([half]).validation().ops == ()


# -- image by image ----------------------------------------------------------------------------------


def odd(name, call, **attributes):
    """A transform that computes `call(image)`."""
    made = stand_in(name, **attributes)
    type(made).__call__ = lambda self, image: call(image)
    return made


def to_size(height, width):
    return lambda image: torch.nn.functional.interpolate(image[None], (height, width))[0]


@pytest.mark.parametrize(
    ("transform", "size", "validated"),
    [
        (odd("Resize", to_size(6, 9), size=6), (6, 9), (6, 9)),
        (odd("Resize", to_size(5, 7), size=[6], max_size=7), (4, 7), None),
        (odd("Resize", to_size(4, 6), size=None, max_size=6), (4, 6), (4, 6)),
        (odd("Pad", to_size(10, 14), padding=1), (10, 14), (10, 14)),
        (odd("Pad", to_size(14, 14), padding=[1, 3]), (14, 14), (14, 14)),
        (odd("Pad", to_size(14, 16), padding=[1, 2, 3, 4]), (14, 16), (14, 16)),
        (
            odd("RandomCrop", to_size(5, 6), size=(5, 6), padding=(1, 2), pad_if_needed=False),
            (5, 6),
            (5, 6),
        ),
        (
            odd("RandomCrop", to_size(9, 9), size=(9, 9), padding=None, pad_if_needed=True),
            (9, 9),
            (9, 9),
        ),
    ],
    ids=lambda value: type(value).__name__ if hasattr(value, "__dict__") else str(value),
)
def test_a_transform_called_image_by_image_may_change_the_size(transform, size, validated):
    images = torch.randint(0, 256, (3, 3, 8, 12), dtype=torch.uint8)
    compose = Compose.from_torchvision(listed(transform, stand_in("CenterCrop", size=(4, 4)), FLIP))
    assert compose.conversion[0].how == "image by image"
    if validated is None:
        with pytest.raises(
            InputError, match=r"Resize made \(3, 5, 7\) .* of an image \(3, 8, 12\)"
        ):
            compose(images)
        return
    assert compose.ops[0].out_size((8, 12)) == size
    assert compose(images).shape == (3, 3, 4, 4)
    alone = Compose.from_torchvision([transform])
    assert alone(images).shape == (3, 3, *size)
    assert alone.validation()(images).shape == (3, 3, *validated)


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.float16])
def test_what_stands_before_the_conversion_to_float_is_given_bytes(dtype):
    seen = []

    def fill(image):
        seen.append(image)
        return image.new_full(image.shape, 51 if image.dtype == torch.uint8 else 0.2)

    filling = odd("RandomPerspective", fill, fill=51)
    to_float = [] if dtype is None else [stand_in("ToDtype", dtype=dtype, scale=True)]
    images = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    made = Compose.from_torchvision([filling, *to_float, NORMALIZE_1])(images)
    assert torch.allclose(made.float(), torch.full((1, 1, 16, 16), -0.6), atol=1e-3)
    if dtype is not None:
        assert torch.equal(seen[0], images[0])
    Compose.from_torchvision([*to_float, filling])(images)
    assert seen[-1].dtype == torch.float32


@pytest.mark.parametrize(
    ("transform", "told"),
    [
        (stand_in("RandomRotation", degrees=[0, 9], expand=True, center=None, fill=0), "expand"),
        (stand_in("FiveCrop", size=(4, 4)), "FiveCrop gives the images"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_what_gives_images_sizes_of_their_own_is_refused(transform, told):
    with pytest.raises(InputError, match=told):
        Compose.from_torchvision([FLIP, transform])


def test_masks_stay_with_values_and_are_refused_where_pixels_may_move():
    images = torch.randint(0, 100, (2, 3, 8, 8), dtype=torch.uint8)
    masks = images[:, 0].long()
    still = stand_in("RandomApply", p=0.5, transforms=[stand_in("RandomSolarize"), JITTER])
    assert torch.equal(Compose.from_torchvision([JITTER, still])(images, masks)[1], masks)
    moving = Compose.from_torchvision([JITTER, stand_in("RandomPerspective")])
    with pytest.raises(InputError, match="masks with RandomPerspective"):
        moving(images, masks)


def test_erasing_behind_normalize_and_grayscale_are_stages():
    erasing = stand_in("RandomErasing", p=1.0, scale=(0.1, 0.2), ratio=(0.3, 3.3), value=0)
    grey = stand_in("RandomGrayscale", p=1.0)
    compose = Compose.from_torchvision(listed(grey, NORMALIZE, erasing))
    assert [one.how for one in compose.conversion] == ["stage", "fused", "stage"]
    images = torch.randint(1, 255, (16, 3, 12, 12), dtype=torch.uint8)
    out = compose(images)
    erased = (out == 0.0).all(1)
    assert bool(((erased.flatten(1).sum(1) > 5) & (erased.flatten(1).sum(1) < 60)).all())
    assert all(isinstance(op, Function) for op in (compose.ops[0], compose.ops[2]))
    values = out * torch.tensor(IMAGENET["std"]).view(1, 3, 1, 1)
    values = values + torch.tensor(IMAGENET["mean"]).view(1, 3, 1, 1)
    kept = values.permute(0, 2, 3, 1)[~erased]
    assert float((kept - kept[:, :1]).abs().max()) < 1e-5, "three equal channels"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (3, "is no list of transforms"),
        (stand_in("RandomOrder", transforms=[FLIP]), "is no list of transforms"),
        ([3], "is no transform"),
        (
            listed(stand_in("RandomSolarize"), FLIP),
            None,
        ),
        (
            listed(
                JITTER,
                stand_in("RandomGrayscale", p=1.0),
                stand_in("RandomSolarize"),
                stand_in("RandomErasing", p=1.0, scale=(0.1, 0.2), ratio=(1, 2), value=0),
                FLIP,
            ),
            r"behind Function\(RandomSolarize.* which is called image by image",
        ),
    ],
)
def test_what_cannot_be_converted_is_refused(given, told):
    if told is None:
        Compose.from_torchvision(given)
        return
    with pytest.raises(InputError, match=told):
        Compose.from_torchvision(given)


def test_the_ready_made_classes_make_a_plain_compose():
    from stoker import GPUAugmentation

    made = GPUAugmentation.from_torchvision(listed(FLIP), seed=4)
    assert type(made) is Compose
    assert made.state_dict()["seed"] == 4


# -- the package itself ------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_packages_own_transforms_compute_the_same(device):
    v2 = pytest.importorskip("torchvision.transforms.v2", reason="torchvision is not installed")
    images = torch.randint(0, 256, (6, 3, 32, 32), dtype=torch.uint8, device=device)
    theirs = v2.Compose(
        [
            v2.RandomHorizontalFlip(1.0),
            v2.CenterCrop(24),
            # Both below 1, so that nothing is clamped: torchvision applies them in a random order.
            v2.ColorJitter(brightness=(0.7, 0.7), saturation=(0.6, 0.6)),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(**IMAGENET),
        ]
    )
    ours = Compose.from_torchvision(theirs)
    assert [one.how for one in ours.conversion] == ["fused", "fused", "fused", "dropped", "fused"]
    # In float32 from the start: torchvision rounds to bytes after each op, ours once at the end.
    expected = theirs(images.float() / 255)
    assert float((ours(images) - expected).abs().max()) < 5e-4
    every = v2.Compose(
        [
            v2.ToImage(),
            v2.RandomResizedCrop(24, antialias=True),
            v2.RandomCrop(24, padding=4, padding_mode="reflect"),
            v2.RandomRotation(15),
            v2.RandomAffine(5, (0.1, 0.1), (0.9, 1.1), 5),
            v2.RandAugment(),
            v2.TrivialAugmentWide(),
            v2.RandomGrayscale(0.2),
            v2.RandomApply([v2.GaussianBlur(3)], 0.5),
            v2.RandomErasing(0.5),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(**IMAGENET),
        ]
    )
    with pytest.raises(InputError, match="reflected padding with flips"):
        Compose.from_torchvision(every)
    every.transforms.pop(2)
    converted = Compose.from_torchvision(every)
    assert {one.how for one in converted.conversion} == {"fused", "stage", "dropped"}
    assert converted(images).shape == (6, 3, 24, 24)
