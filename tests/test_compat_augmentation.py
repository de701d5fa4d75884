"""The documented names, the schedule, the config's keys, MixUp and CutMix."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

import stoker
from stoker.augment import (
    ColorJitter,
    Compose,
    CutMix,
    GaussianBlur,
    GPUAugmentation,
    MinimalGPUAugmentation,
    MixUp,
    Normalize,
    ProgressiveAugmentation,
    RandomAffine,
    RandomHorizontalFlip,
    RandomRotation,
    StrongGPUAugmentation,
    ToDtype,
)
from stoker.augment.mixing import beta_quantiles
from stoker.compat.augmentation import augmentation_from_settings
from stoker.config import parse_config, resolve
from stoker.config.tree import key_schemas
from stoker.errors import InputError

DOORS = [GPUAugmentation, MinimalGPUAugmentation, StrongGPUAugmentation]


def pictures(batch=8, size=(24, 28), seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (batch, 3, *size), dtype=torch.uint8, generator=generator)


def plain(images):
    return images.float() * torch.tensor(1 / 255)


# -- the doors -----------------------------------------------------------------------------------


def test_the_doors_hold_what_the_documents_say():
    assert GPUAugmentation().ops == (
        RandomHorizontalFlip(0.5),
        RandomRotation(15, p=0.3),
        RandomAffine(scale=(0.9, 1.1), translate=(0.05, 0.05), p=0.3),
        ColorJitter(0.2, 0.2, 0.1, p=0.5),
    )
    assert MinimalGPUAugmentation(0.25).ops == (RandomHorizontalFlip(0.25),)
    assert StrongGPUAugmentation().ops == (
        RandomHorizontalFlip(0.5),
        RandomRotation(20, p=0.4),
        RandomAffine(scale=(0.85, 1.15), translate=(0.1, 0.1), p=0.4),
        ColorJitter(0.3, 0.3, 0.15, p=0.5),
        GaussianBlur(3, (0.1, 2.0), p=0.2),
    )
    for door in DOORS:
        assert getattr(stoker, door.__name__) is door
    assert stoker.ProgressiveAugmentation is ProgressiveAugmentation


@pytest.mark.parametrize("door", DOORS)
def test_doors_take_images_or_images_and_masks(door):
    images, masks = pictures(), torch.randint(0, 19, (8, 24, 28))
    alone = door(seed=4)(images)
    result, moved = door(seed=4)(images, masks)
    assert torch.equal(alone, result)
    assert moved.dtype == torch.int64
    assert not torch.equal(result, plain(images))
    with pytest.raises(InputError, match=r"masks\.long\(\) or masks\.to\(torch\.uint8\)"):
        door()(images, masks.float())


@pytest.mark.parametrize("door", DOORS)
def test_doors_end_in_normalisation_and_dtype_where_asked(door):
    aug = door(mean=0.5, std=0.25, dtype=torch.bfloat16, ignore_index=7, backend="torch")
    assert aug.ops[-2:] == (Normalize(0.5, 0.25), ToDtype(torch.bfloat16))
    assert aug(pictures()).dtype == torch.bfloat16
    assert aug.ignore_index == 7
    assert torch.equal(
        aug.validation()(pictures()), ((plain(pictures()) - 0.5) * 4).to(torch.bfloat16)
    )
    with pytest.raises(InputError, match="both or neither"):
        door(mean=0.5)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: GPUAugmentation(rotation_degrees=-15), "degrees is -15"),
        (lambda: GPUAugmentation(horizontal_flip_prob=1.5), "is 1.5"),
        (lambda: GPUAugmentation(brightness=-1), "brightness is -1"),
        (lambda: MinimalGPUAugmentation(-0.5), "is -0.5"),
        (lambda: ProgressiveAugmentation({}), "begins with epoch 0"),
        (lambda: ProgressiveAugmentation({5: MinimalGPUAugmentation()}), "begins with epoch 0"),
        (lambda: ProgressiveAugmentation([MinimalGPUAugmentation()]), "a mapping"),
        (lambda: ProgressiveAugmentation({0: RandomHorizontalFlip()}), "a Compose"),
        (
            lambda: ProgressiveAugmentation({0: GPUAugmentation(), -3: GPUAugmentation()}),
            "a stage from epoch -3",
        ),
        (lambda: MixUp(0.0, 10), "alpha is 0.0"),
        (lambda: MixUp(0.2, 0), "num_classes is 0"),
        (lambda: CutMix(1.0, 10, p=1.1), "p is 1.1"),
        (lambda: CutMix(1.0, 10, stream=9000), "stream is 9000"),
    ],
)
def test_bad_arguments_say_what_to_type(make, words):
    with pytest.raises(InputError) as caught:
        make()
    assert words in str(caught.value)
    assert caught.value.allowed
    assert caught.value.fix


# -- the schedule --------------------------------------------------------------------------------


class HoldingTrainer:
    """Holds the object, as a trainer does, and never asks for another."""

    def __init__(self, augmentation):
        self.augmentation = augmentation

    def step(self, images):
        return self.augmentation(images)


def test_the_schedule_reaches_a_trainer_that_already_holds_it():
    schedule = ProgressiveAugmentation({50: StrongGPUAugmentation(), 0: MinimalGPUAugmentation()})
    trainer, images = HoldingTrainer(schedule), pictures()
    for epoch, door in (
        (0, MinimalGPUAugmentation),
        (49, MinimalGPUAugmentation),
        (50, StrongGPUAugmentation),
        (120, StrongGPUAugmentation),
    ):
        schedule.set_epoch(epoch)
        expected = door()
        expected.set_epoch(epoch)
        assert torch.equal(trainer.step(images), expected(images))
    assert schedule.backend_reason == "torch: the device is a CPU"


def test_the_generation_changes_with_the_ops_and_only_then():
    schedule = ProgressiveAugmentation({0: MinimalGPUAugmentation(), 50: StrongGPUAugmentation()})
    seen = []
    for epoch in (0, 1, 49, 50, 51, 10, 50):
        schedule.set_epoch(epoch)
        seen.append(schedule.generation)
    assert seen == [0, 0, 0, 1, 1, 2, 3]
    assert Compose([]).generation == 0


def test_the_schedule_forwards_everything_to_its_stage():
    schedule = ProgressiveAugmentation(
        {0: GPUAugmentation(seed=2), 3: StrongGPUAugmentation(seed=2)}
    )
    images, masks = pictures(), torch.randint(0, 9, (8, 24, 28))
    schedule.seek(4, 7)
    strong = StrongGPUAugmentation(seed=2)
    strong.seek(4, 7)
    params, twin = schedule.draw(8, (24, 28), 3, "cpu"), strong.draw(8, (24, 28), 3, "cpu")
    assert torch.equal(params.table, twin.table)
    for ours, theirs in zip(
        schedule.apply(images, params, masks), strong.apply(images, twin, masks), strict=True
    ):
        assert torch.equal(ours, theirs)
    boxes, points = torch.rand(8, 2, 4) * 20, torch.rand(8, 2, 2) * 20
    assert torch.equal(schedule.boxes(boxes, params)[0], strong.boxes(boxes, twin)[0])
    assert torch.equal(schedule.keypoints(points, params)[0], strong.keypoints(points, twin)[0])
    assert schedule.validation().ops == ()
    schedule.check()
    state = schedule.state_dict()
    other = ProgressiveAugmentation({0: GPUAugmentation(seed=2), 3: StrongGPUAugmentation(seed=2)})
    other.load_state_dict(state)
    assert isinstance(other.current, StrongGPUAugmentation)
    assert torch.equal(other(images), schedule(images))


# -- the config ----------------------------------------------------------------------------------

TOGGLES = {
    "horizontal_flip_prob": 1.0,
    "rotation_degrees": 60.0,
    "brightness": 0.9,
    "contrast": 0.9,
    "saturation": 0.9,
}
COLUMNS = {
    "horizontal_flip_prob": {0, 1, 2, 3},
    "rotation_degrees": {0, 1, 2, 3, 4, 5},
    "brightness": {6},
    "contrast": {7},
    "saturation": {8},
}


def settings_of(**keys):
    tree = {"training": {"use_gpu_augmentation": True}, "gpu_augmentation": keys}
    return resolve(parse_config(yaml.safe_dump(tree))).augmentation


def test_every_key_of_the_section_is_toggled_here():
    section = {key for key in key_schemas() if key.startswith("gpu_augmentation.")}
    assert section == {f"gpu_augmentation.{name}" for name in TOGGLES}


@pytest.mark.parametrize("name", TOGGLES)
def test_each_key_changes_its_columns_and_the_pixels(name):
    images = pictures(32)
    before = augmentation_from_settings(settings_of(), seed=1)
    after = augmentation_from_settings(settings_of(**{name: TOGGLES[name]}), seed=1)
    tables = [aug.draw(32, (24, 28), 3, "cpu").table for aug in (before, after)]
    changed = {int(column) for column in (tables[0] != tables[1]).any(0).nonzero()}
    assert changed
    assert changed <= COLUMNS[name]
    before.seek(0)
    after.seek(0)
    assert not torch.equal(before(images), after(images))


def test_the_settings_reach_the_ops_with_all_options():
    aug = augmentation_from_settings(
        settings_of(rotation_degrees=3, saturation=0.4),
        mean=0.5,
        std=0.5,
        dtype=torch.float16,
        seed=9,
    )
    assert (
        aug.ops
        == GPUAugmentation(0.5, 3, 0.2, 0.2, 0.4, mean=0.5, std=0.5, dtype=torch.float16).ops
    )
    assert aug.state_dict()["seed"] == 9


def test_switched_off_nothing_is_built():
    tree = {"training": {"use_gpu_augmentation": False}, "gpu_augmentation": {"brightness": 0.9}}
    assert (
        augmentation_from_settings(resolve(parse_config(yaml.safe_dump(tree))).augmentation) is None
    )
    assert augmentation_from_settings(resolve(parse_config("")).augmentation) is None


# -- MixUp and CutMix ----------------------------------------------------------------------------


def test_mixup_is_the_weighted_sum_with_the_one_before():
    images, classes = torch.rand(6, 3, 5, 7), torch.tensor([0, 1, 2, 3, 4, 4])
    mixed, targets = MixUp(0.8, 5, seed=3)(images, classes)
    assert targets.shape == (6, 5)
    torch.testing.assert_close(targets.sum(1), torch.ones(6))
    for sample in range(5):  # the last two share a class
        share = targets[sample, classes[sample]]
        expected = images[sample] * share + images[sample - 1] * (1 - share)
        torch.testing.assert_close(mixed[sample], expected)
        assert 0 <= share <= 1
    assert targets[5, 4] == 1.0


def test_cutmix_targets_are_the_area_that_was_cut():
    images = torch.arange(8.0).view(8, 1, 1, 1).expand(8, 3, 16, 20) / 8
    mixed, targets = CutMix(1.0, 8, seed=5)(images, torch.arange(8))
    for sample in range(8):
        kept = mixed[sample, 0] == images[sample, 0]
        torch.testing.assert_close(kept.float().mean(), targets[sample, sample])
        torch.testing.assert_close(1 - kept.float().mean(), targets[sample, sample - 1])
        cut = ~kept
        rows, columns = cut.any(1), cut.any(0)
        assert torch.equal(cut, rows[:, None] & columns[None])  # one rectangle
        assert set(mixed[sample][:, cut].unique().tolist()) <= {images[sample - 1, 0, 0, 0].item()}
    assert 0.05 < targets.diagonal().mean() < 0.95


@pytest.mark.parametrize("mixer", [MixUp, CutMix])
def test_a_shut_gate_is_exact_and_p_is_the_share_that_is_mixed(mixer):
    images, classes = torch.rand(400, 1, 8, 8), torch.arange(400)
    same, targets = mixer(1.0, 400, p=0.0)(images, classes)
    assert torch.equal(same, images)
    assert torch.equal(targets, torch.eye(400))
    _, targets = mixer(1.0, 400, p=0.3)(images, classes)
    assert 0.2 < (targets.diagonal() < 1).float().mean() < 0.4


@pytest.mark.parametrize("mixer", [MixUp, CutMix])
def test_mixing_can_be_repeated(mixer):
    images, classes = torch.rand(8, 3, 9, 9), torch.arange(8)
    mix = mixer(1.0, 8, seed=2)
    first, second = mix(images, classes)[0], mix(images, classes)[0]
    assert not torch.equal(first, second)
    mix.set_epoch(0)
    assert torch.equal(mix(images, classes)[0], first)
    mix.seek(0, 1)
    assert torch.equal(mix(images, classes)[0], second)
    assert not torch.equal(mixer(1.0, 8, seed=2, stream=1)(images, classes)[0], first)


def test_half_images_and_soft_targets_pass_through():
    images, soft = torch.rand(4, 3, 9, 9).half(), torch.full((4, 5), 0.2)
    mixed, targets = MixUp(0.4, 5)(images, soft)
    assert mixed.dtype == torch.float16
    torch.testing.assert_close(targets, soft)


@pytest.mark.parametrize(
    ("images", "targets", "words"),
    [
        (pictures(4), torch.arange(4), "mix what a Compose returned"),
        (torch.rand(3, 9, 9), torch.arange(3), "images are torch.float32 (3, 9, 9)"),
        (torch.rand(4, 3, 9, 9), torch.arange(3), "targets of shape (3,)"),
        (torch.rand(4, 3, 9, 9), torch.zeros(4, 9, 9).long(), "masks cannot be mixed"),
        (torch.rand(4, 3, 9, 9), torch.tensor([0, 1, 2, 5]), "labels from 0 to 5"),
        (torch.rand(4, 3, 9, 9), torch.tensor([0, 1, 2, -1]), "labels from -1 to 2"),
        (torch.rand(4, 3, 9, 9), torch.tensor([0, 1, 2, -1]), "labels >= 0"),
        (torch.rand(0, 3, 9, 9), torch.arange(0), "there is no pixel"),
        (torch.rand(4, 3, 0, 9), torch.arange(4), "there is no pixel"),
        (torch.rand(4, 3, 9, 9), [0, 1, 2, 3], "targets: list"),
        (torch.rand(4, 3, 9, 9), torch.zeros(4, device="meta"), "targets: meta"),
    ],
)
def test_what_cannot_be_mixed_is_refused(images, targets, words):
    with pytest.raises(InputError) as caught:
        CutMix(1.0, 5)(images, targets)
    assert words in str(caught.value)
    assert caught.value.fix


def test_the_quantiles_are_those_of_the_beta_distribution():
    for alpha, spread in ((0.2, 0.42258), (1.0, 0.28868), (2.0, 0.22361), (8.0, 0.12127)):
        table = beta_quantiles(alpha)
        # The mean of the quantile function is the mean; its spread 1 / sqrt(4 (2 alpha + 1)).
        middle = (table[1:] + table[:-1]) / 2
        assert abs(middle.mean() - 0.5) < 1e-12
        assert abs(middle.std() - spread) < 2e-4
    np.testing.assert_allclose(beta_quantiles(1.0), np.linspace(0, 1, 4097), atol=1e-9)
    # Beta(2, 2) has the distribution function 3x^2 - 2x^3, Beta(1/2, 1/2) has arcsin.
    two, half = beta_quantiles(2.0), beta_quantiles(0.5)
    even = np.linspace(0, 1, 4097)
    np.testing.assert_allclose(3 * two**2 - 2 * two**3, even, atol=1e-7)
    np.testing.assert_allclose(half, np.sin(np.pi * even / 2) ** 2, atol=1e-6)


@given(alpha=st.floats(0.01, 100))
def test_quantiles_rise_from_zero_to_one_and_are_symmetric(alpha):
    table = beta_quantiles(alpha)
    assert 0.0 <= table[0] < 1e-3  # far below 0.5 a steep density is 0 in float64
    assert (np.diff(table) >= 0).all()
    np.testing.assert_allclose(table, 1 - table[::-1], atol=1e-12)


@pytest.mark.parametrize("mixer", [MixUp, CutMix])
@pytest.mark.parametrize("first", [True, False])
def test_mixing_works_on_both_sides_of_inference_mode(mixer, first):
    images, classes = torch.rand(4, 3, 9, 9), torch.arange(4)
    expected = mixer(0.8, 5)
    with torch.inference_mode(first):
        mix = mixer(0.8, 5)
    for inside in (first, not first, first):
        with torch.inference_mode(inside):
            mixed, targets = mix(images, classes)
        wanted = expected(images, classes)
        assert torch.equal(mixed, wanted[0])
        assert torch.equal(targets, wanted[1])


@pytest.mark.parametrize("state", [None, {}, {"seed": 0, "epoch": "x", "step": 0, "stream": 0}])
def test_a_schedule_refuses_a_state_that_is_none(state):
    schedule = ProgressiveAugmentation({0: MinimalGPUAugmentation()})
    with pytest.raises(InputError) as caught:
        schedule.load_state_dict(state)
    assert caught.value.allowed
    assert caught.value.fix
    with pytest.raises(InputError, match="epoch is 'x'"):
        schedule.seek("x")
