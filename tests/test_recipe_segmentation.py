"""The segmentation recipe: any size, losses and metrics against loops, ignored pixels, learning."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from recipe_loops import NoWaiting, train_job
from stoker.errors import InputError
from stoker.loader.loader import Loader
from stoker.packing import PackOptions, pack
from stoker.recipes.pictures import channel_statistics
from stoker.recipes.segmentation.evaluation import (
    IGNORE,
    SegmentationMetrics,
    compute_metrics,
    segmentation_loss,
)
from stoker.recipes.segmentation.network import (
    MAX_PARAMETERS,
    EfficientAttention,
    MicroSegFormer,
    MultiScaleAttention,
)
from stoker.recipes.segmentation.recipe import (
    SegmentationOptions,
    SegmentationRecipe,
    count_pixels,
    find_classes,
    make_augmentation,
    split_images,
    unpack_images,
)
from stoker.sources.images import SegmentationSource
from stoker.store.fields import Dense
from stoker.store.reader import open_store
from store_makers import write_store

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TINY = {
    "widths": [8, 12, 16, 16], "depths": [1, 1, 1, 1], "heads": [1, 1, 2, 2], "expansion": 2,
    "head_width": 16, "dropout": 0.0,
}  # fmt: skip
VOID = 7


def made_shapes(count: int, size: int = 32, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Noise with a bright square (class 1) and a red disc (class 2); a void border of one pixel."""
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 90, (count, 3, size, size)).astype("u1")
    masks = np.zeros((count, size, size), "u1")
    rows, columns = np.mgrid[:size, :size]
    for number in range(count):
        y, x = rng.integers(2, size - 14, 2)
        side = rng.integers(8, 13)
        square = (rows >= y) & (rows < y + side) & (columns >= x) & (columns < x + side)
        cy, cx, radius = *rng.integers(7, size - 7, 2), rng.integers(4, 7)
        disc = (rows - cy) ** 2 + (columns - cx) ** 2 <= radius**2
        images[number][:, square] = rng.integers(150, 255)
        images[number][:, disc] = np.array([[230], [40], [40]])
        masks[number][square] = 1
        masks[number][disc] = 2
    masks[:, 0] = masks[:, -1] = VOID
    return images, masks


def write_shapes(folder, count=40, **more):
    images, masks = made_shapes(count)
    return write_store(folder, [{"images": Dense(images), "masks": Dense(masks), **more}])


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write_shapes(tmp_path_factory.mktemp("shapes") / "s")


@pytest.fixture(scope="module")
def job(store):
    return SegmentationRecipe().make_job(store, TINY | {"ignore_values": [VOID]}, 0)


# -- the net -------------------------------------------------------------------------------------


def test_the_net_is_as_light_as_the_documents_ask():
    def count(module):
        return sum(parameter.numel() for parameter in module.parameters())

    net = MicroSegFormer(19, 3, SegmentationOptions())
    assert MAX_PARAMETERS == 1_821_085
    assert 1_500_000 < count(net) <= MAX_PARAMETERS
    assert count(net.head.scales) < 30_000  # the multi-scale part is the light one


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [(1, 1), (5, 9), (33, 47), (64, 64), (65, 31)])
@pytest.mark.parametrize("channels", [1, 3])
def test_logits_have_the_images_size(device, size, channels):
    sizes = {name: TINY[name] for name in ("widths", "depths", "heads")}
    net = MicroSegFormer(4, channels, SegmentationOptions(**sizes))
    logits = net.to(device)(torch.rand(2, channels, *size, device=device))
    assert logits.shape == (2, 4, *size)
    logits.sum().backward()
    assert all(parameter.grad is not None for parameter in net.parameters())


def test_a_prediction_does_not_depend_on_its_batch(job):
    net = job.model.cpu().eval()
    images = torch.randn(3, 3, 33, 29)
    together = net(images)
    for row in range(3):
        assert_allclose(net(images[row : row + 1])[0].detach(), together[row].detach(), atol=1e-5)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed:UserWarning")  # a CPU without bf16
@pytest.mark.parametrize("device", DEVICES)
def test_bfloat16_changes_logits_a_little(job, device):
    torch.manual_seed(4)
    net = job.model.to(device).eval()
    images = torch.randn(2, 3, 32, 32, device=device)
    exact = net(images)
    with torch.autocast(device, torch.bfloat16):
        rough = net(images)
    assert_allclose(rough.float().detach().cpu(), exact.detach().cpu(), atol=0.1)


def test_uint8_images_are_sent_back_with_the_remedy(job):
    with pytest.raises(InputError, match="uint8 reached the model") as caught:
        job.model(torch.zeros(1, 3, 8, 8, dtype=torch.uint8))
    assert "augment=job.augmentation" in caught.value.fix


@pytest.mark.parametrize("reduction", [1, 2, 3, 9])
def test_attention_is_softmax_over_averaged_squares(reduction):
    torch.manual_seed(0)
    size, width, heads = (5, 7), 6, 2
    layer = EfficientAttention(width, heads, reduction)
    tokens = torch.randn(2, 35, width)
    got = layer(tokens, size).detach()
    grid = tokens.view(2, *size, width)
    if reduction > 1:
        squares = [
            grid[:, y : y + reduction, x : x + reduction].mean(dim=(1, 2))
            for y in range(0, size[0], reduction)
            for x in range(0, size[1], reduction)
        ]
        keys_from = layer.norm(torch.stack(squares, dim=1))
    else:
        keys_from = tokens
    query, key_value = layer.query(tokens), layer.key_value(keys_from)
    key, value = key_value[..., :width], key_value[..., width:]
    found = []
    for head in range(heads):
        part = slice(head * 3, head * 3 + 3)
        scores = query[..., part] @ key[..., part].transpose(1, 2) / 3**0.5
        found.append(scores.softmax(dim=-1) @ value[..., part])
    assert_allclose(got, layer.out(torch.cat(found, dim=-1)).detach(), atol=1e-5)


def test_the_multi_scale_part_sees_near_and_far():
    torch.manual_seed(1)
    layer = MultiScaleAttention(8)
    image = torch.randn(1, 8, 15, 15, requires_grad=True)
    near, far = (abs(layer.scales[number].weight).sum().item() for number in (0, 2))
    assert near > 0
    assert far > 0
    # The map's own place, one, two and four pixels away: all reach the sum of the three scales.
    total = sum(scale(image) for scale in layer.scales)[0, 0, 7, 7]
    (slope,) = torch.autograd.grad(total, image)
    reached = {tuple(place) for place in (slope[0, 0] != 0).nonzero().tolist()}
    assert {(7, 7), (7, 8), (7, 9), (7, 11), (3, 3)} <= reached
    assert (7, 10) not in reached


# -- the loss ------------------------------------------------------------------------------------


def loss_by_hand(logits, masks, ce_weight, dice_weight):
    """One sample after the other, one class after the other."""
    losses = []
    for scores, mask in zip(logits, masks, strict=True):
        exponents = np.exp(scores - scores.max(axis=0))
        shares = exponents / exponents.sum(axis=0)
        counts = mask != IGNORE
        if not counts.any():
            losses.append(0.0)
            continue
        own = [-np.log(shares[mask[y, x], y, x]) for y, x in zip(*np.nonzero(counts), strict=True)]
        dice = []
        for label in np.unique(mask[counts]):
            true = (mask == label) & counts
            overlap = shares[label][true].sum()
            dice.append(1 - (2 * overlap + 1) / (shares[label][counts].sum() + true.sum() + 1))
        losses.append(ce_weight * np.mean(own) + dice_weight * np.mean(dice))
    return np.mean(losses)


@pytest.mark.parametrize("device", DEVICES)
@given(seed=st.integers(0, 99), ignored=st.sampled_from([0.0, 0.3, 1.0]), batch=st.integers(1, 3))
def test_cross_entropy_and_dice_equal_a_loop(device, seed, ignored, batch):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(batch, 4, 5, 3)) * 3
    masks = rng.integers(0, 4, (batch, 5, 3)).astype("u1")
    masks[rng.random(masks.shape) < ignored] = IGNORE
    for weights in ((1.0, 1.5), (1.0, 0.0), (0.0, 1.0)):
        got = segmentation_loss(
            torch.tensor(logits, dtype=torch.float32, device=device),
            torch.tensor(masks, device=device),
            *weights,
        )
        assert got.item() == pytest.approx(loss_by_hand(logits, masks, *weights), abs=1e-5)


def test_cross_entropy_is_torchs_with_an_ignore_index():
    torch.manual_seed(2)
    logits, masks = torch.randn(1, 5, 6, 6), torch.randint(0, 5, (1, 6, 6))
    masks[0, :2] = IGNORE
    want = torch.nn.functional.cross_entropy(logits, masks, ignore_index=IGNORE)
    assert_allclose(segmentation_loss(logits, masks, 1.0, 0.0), want, rtol=1e-5)


def test_ignored_pixels_have_no_gradient_and_samples_are_averaged():
    torch.manual_seed(3)
    logits = torch.randn(3, 4, 6, 5, requires_grad=True)
    masks = torch.randint(0, 4, (3, 6, 5), dtype=torch.uint8)
    masks[0, 2:4] = IGNORE
    masks[2] = IGNORE  # nothing counts here at all
    loss = segmentation_loss(logits, masks)
    (slope,) = torch.autograd.grad(loss, logits)
    assert torch.isfinite(slope).all()
    assert not slope[0, :, 2:4].any()
    assert not slope[2].any()
    assert slope[0, :, 0].any()
    rows = [segmentation_loss(logits[row : row + 1], masks[row : row + 1]) for row in range(3)]
    assert_allclose(loss.detach(), torch.stack(rows).mean().detach(), rtol=1e-6)
    assert rows[2] == 0


# -- metrics -------------------------------------------------------------------------------------


def judge_by_hand(predicted, true, num_classes):
    counts = true != IGNORE
    shares, dices = [], []
    for label in range(num_classes):
        said, is_so = (predicted == label) & counts, (true == label) & counts
        if (said | is_so).any():
            shares.append((said & is_so).sum() / (said | is_so).sum())
            dices.append(2 * (said & is_so).sum() / (said.sum() + is_so.sum()))
    return {
        "miou": np.mean(shares),
        "mean_dice": np.mean(dices),
        "pixel_accuracy": (predicted == true)[counts].mean(),
    }


@pytest.mark.parametrize("device", DEVICES)
@given(seed=st.integers(0, 99), num_classes=st.integers(2, 6))
def test_miou_and_accuracy_equal_a_count_by_hand(device, seed, num_classes):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(5, num_classes, 4, 3)).astype("f4")
    logits[:, -1] -= 9  # one class is never predicted
    true = rng.integers(0, num_classes, (5, 4, 3)).astype("u1")
    true[rng.random(true.shape) < 0.2] = IGNORE
    true[0, 0, 0] = 0
    metrics = SegmentationMetrics(num_classes)
    for rows in (slice(0, 2), slice(2, 5)):
        metrics.update(
            torch.tensor(logits[rows], device=device), torch.tensor(true[rows], device=device)
        )
    want = judge_by_hand(logits.argmax(axis=1), true, num_classes)
    assert metrics.compute() == pytest.approx(want)


def test_metrics_of_nothing():
    assert SegmentationMetrics(3).compute() == {}
    assert np.isnan(compute_metrics(np.zeros((3, 3), int))["miou"])


def test_the_baseline_answers_the_commonest_training_class(store, job):
    _, masks = made_shapes(40)
    true = masks[job.samples["val"]].copy()
    true[true == VOID] = IGNORE
    train = masks[job.samples["train"]]
    majority = np.bincount(train[train != VOID]).argmax()
    want = judge_by_hand(np.full_like(true, majority), true, 3)
    assert job.baseline == pytest.approx(want)
    assert 0.2 < job.baseline["miou"] < 0.34  # one class of three, at best


# -- from the store ------------------------------------------------------------------------------


def test_classes_come_from_the_record_or_from_the_masks(store, tmp_path):
    assert find_classes(store, SegmentationOptions(ignore_values=(VOID,)))[0] == 3
    assert find_classes(store, SegmentationOptions())[0] == VOID + 1
    assert find_classes(store, SegmentationOptions(num_classes=19))[0] == 19
    with pytest.raises(InputError, match="hold the value 7") as caught:
        find_classes(store, SegmentationOptions(num_classes=3))
    assert "ignore_values=[7]" in caught.value.fix
    with pytest.raises(InputError, match="nothing but ignored"):
        find_classes(store, SegmentationOptions(ignore_values=(0, 1, 2, VOID)))
    from PIL import Image

    for folder, mode in (("images", "RGB"), ("masks", "L")):
        (tmp_path / folder).mkdir()
        picture = np.full((6, 6), 4, "u1") if mode == "L" else np.zeros((6, 6, 3), "u1")
        Image.fromarray(picture).save(tmp_path / folder / "a.png")
    source = SegmentationSource((6, 6), 3, tmp_path / "images", tmp_path / "masks")
    pack(source, tmp_path / "s", PackOptions(jobs=1))
    with open_store(tmp_path / "s") as packed:
        assert find_classes(packed, SegmentationOptions())[0] == 5


def test_normalisation_is_by_training_images_only(store, job, tmp_path):
    images, masks = made_shapes(40)
    train = images[job.samples["train"]].astype(np.float64) / 255
    mean, std = channel_statistics(store, job.samples["train"])
    assert_allclose(mean, train.mean(axis=(0, 2, 3)), rtol=1e-9)
    assert_allclose(std, train.std(axis=(0, 2, 3)), rtol=1e-6)
    images[job.samples["val"]] = 255
    changed = write_store(tmp_path / "s", [{"images": Dense(images), "masks": Dense(masks)}])
    again = SegmentationRecipe().make_job(changed, TINY | {"ignore_values": [VOID]}, 0)
    assert again.notes[2] == job.notes[2]
    assert f"mean ({mean[0]:.4f}" in job.notes[2]


def test_one_grey_for_all_images_does_not_divide_by_nothing(tmp_path):
    grey = {
        "images": Dense(np.full((4, 1, 5, 5), 9, "u1")),
        "masks": Dense(np.eye(5, dtype="u1")[None].repeat(4, 0)),
    }
    flat = write_store(tmp_path / "s", [grey])
    mean, std = channel_statistics(flat, np.arange(4))
    assert (mean, std) == ([9 / 255], [1 / 255])


def test_validation_images_are_normalised_and_nothing_else(store, job):
    images, masks = made_shapes(40)
    mean, std = channel_statistics(store, job.samples["train"])
    loader = Loader(
        store, 4, "cpu", fields=job.fields, samples=job.samples["val"],
        augment=job.augmentation.validation(),
    )  # fmt: skip
    got, targets = job.unpack(next(iter(loader)))
    chosen = job.samples["val"][:4]
    want = (images[chosen] / 255 - np.reshape(mean, (3, 1, 1))) / np.reshape(std, (3, 1, 1))
    assert_allclose(got, want, atol=1e-5)
    true = masks[chosen].copy()
    true[true == VOID] = IGNORE
    assert (targets.numpy() == true).all()


def test_training_images_are_augmented_with_their_masks(store, job):
    loader = Loader(
        store, 32, "cpu", fields=job.fields, samples=job.samples["train"], augment=job.augmentation
    )
    (first, masks), (second, _) = (job.unpack(*list(loader)) for _ in range(2))
    assert not torch.equal(first, second)  # another draw in the next epoch
    assert set(masks.unique().tolist()) == {0, 1, 2, IGNORE}
    # The red disc is still where its mask says: red stands out there and nowhere else.
    red = first[:, 0] - first[:, 1]
    assert red[masks == 2].mean() > red[masks == 1].mean() + 0.5


def test_ignored_values_become_255():
    masks = torch.tensor([[[0, 3, 11, 255]]], dtype=torch.uint8)
    batch = {"images": torch.zeros(1, 3, 1, 4), "masks": masks}
    _, got = unpack_images(batch, (11, 3))
    assert got.tolist() == [[[0, 255, 255, 255]]]
    assert masks.tolist() == [[[0, 3, 11, 255]]]  # the batch keeps its own


@pytest.mark.parametrize("preset", ["standard", "minimal", "strong", "none"])
def test_presets_normalise_as_asked(preset):
    options = SegmentationOptions(augmentation=preset)
    made = make_augmentation(options, [0.5], [0.25], 0)
    names = [type(op).__name__ for op in made.ops]
    assert names[-1] == "Normalize"
    assert ("RandomHorizontalFlip" in names) == (preset != "none")
    assert ("RandomRotation" in names) == (preset in ("standard", "strong"))
    assert made.ignore_index == IGNORE


def test_an_augmentation_option_has_an_effect_or_is_refused():
    plain, wild = (
        repr(make_augmentation(SegmentationOptions(rotation_degrees=degrees), [0.5], [0.2], 0))
        for degrees in (None, 77.0)
    )
    assert "77" in wild
    assert "77" not in plain
    never = SegmentationOptions(augmentation="minimal", horizontal_flip_prob=0.0)
    assert "0.0" in repr(make_augmentation(never, [0.5], [0.2], 0))
    with pytest.raises(InputError, match="rotation_degrees"):
        make_augmentation(
            SegmentationOptions(augmentation="minimal", rotation_degrees=5.0), [0.5], [0.2], 0
        )


def test_splits_are_the_stores_own_or_made(store, tmp_path):
    made, note = split_images(store, SegmentationOptions(), 5)
    assert sorted(np.concatenate(list(made.values())).tolist()) == list(range(40))
    assert [len(ids) for ids in made.values()] == [32, 4, 4]
    assert "random, seed 5" in note
    ordered, _ = split_images(store, SegmentationOptions(split="ordered"), 5)
    assert ordered["train"].tolist() == list(range(32))
    assert ordered["test"].tolist() == list(range(36, 40))
    own = np.arange(40) % 3
    with_split = write_shapes(tmp_path / "s", split=Dense(own.astype("u1")))
    kept, note = split_images(with_split, SegmentationOptions(), 5)
    assert (kept["val"] == np.flatnonzero(own == 1)).all()
    assert "the store's own" in note
    with pytest.raises(InputError, match="no training samples"):
        split_images(store, SegmentationOptions(ratios=(0.0, 0.5, 0.5)), 0)


def test_pixels_are_counted_block_by_block(store, monkeypatch):
    whole = count_pixels(store, np.arange(40))
    assert whole.sum() == 40 * 32 * 32
    monkeypatch.setattr("stoker.recipes.pictures._READ_BYTES", 3000)
    assert (count_pixels(store, np.arange(40)) == whole).all()


def test_another_kind_of_store_is_refused(tmp_path):
    plain = write_store(tmp_path / "s", [{"images": Dense(np.zeros((2, 3, 4, 4), "f4"))}])
    with pytest.raises(InputError, match="images uint8") as caught:
        SegmentationRecipe().make_job(plain, {}, 0)
    assert "stoker pack segmentation" in caught.value.fix


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"with": 3}, "no option 'with'"),
        ({"dice_weight": "1.5"}, "'dice_weight'"),
        ({"ce_weight": 0, "dice_weight": 0}, "not both 0"),
        ({"heads": [3, 2, 4, 6]}, "divisors of the widths"),
        ({"widths": [32, 64, 128]}, "'widths'"),
        ({"augmentation": "wild"}, "'augmentation'"),
        ({"ignore_values": [300]}, "0 to 255"),
        ({"num_classes": 1}, "2 to 255"),
    ],
)
def test_options_that_make_no_sense_are_refused(store, options, words):
    with pytest.raises(InputError, match=words):
        SegmentationRecipe().make_job(store, options, 0)


def test_the_rate_warms_up_for_five_epochs_update_by_update(store):
    options = TINY | {"ignore_values": [VOID], "epochs": 50}
    job = SegmentationRecipe().make_job(store, options, 0)
    optimizer = job.make_optimizer(job.model.parameters(), 8e-4)
    schedule = job.make_schedule(optimizer, 500)  # ten updates per epoch
    rates = []
    for _ in range(500):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert 40 <= int(np.argmax(rates)) <= 50
    assert max(rates) == pytest.approx(8e-4, rel=0.03)
    assert (np.diff(rates[:49]) > 0).all()
    assert (np.diff(rates[51:]) < 0).all()
    assert rates[-1] < 1e-6
    assert SegmentationOptions(epochs=4).warmup_share == 0.5


def test_the_job_names_what_the_trainer_needs(job):
    assert job.fields == ["images", "masks"]
    assert job.monitor == ("miou", True)
    assert "3 classes; mask values 7, 255 count nowhere" in job.notes[0]
    assert isinstance(job.make_optimizer(job.model.parameters(), 8e-4), torch.optim.AdamW)


@pytest.mark.parametrize("device", DEVICES)
def test_nothing_waits_for_the_device(store, job, device):
    loader = Loader(store, 8, device, fields=job.fields, augment=job.augmentation.validation())
    batch, model, metrics = next(iter(loader)), job.model.to(device), job.metrics()
    with NoWaiting():
        inputs, targets = job.unpack(batch)
        outputs = model(inputs)
        job.criterion(outputs, targets).backward()
        metrics.update(outputs, targets)


# -- learning ------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_it_learns_shapes(store, device):
    torch.manual_seed(0)
    options = TINY | {"ignore_values": [VOID], "epochs": 9, "warmup_epochs": 1}
    job = SegmentationRecipe().make_job(store, options, 0)
    _, losses, metrics = train_job(job, store, epochs=9, batch_size=8, lr=6e-3, device=device)
    assert losses[-1] < 0.6 * losses[0]
    assert metrics["miou"] > job.baseline["miou"] + 0.25
    assert metrics["pixel_accuracy"] > job.baseline["pixel_accuracy"] + 0.05


@pytest.mark.slow  # real data, where it is there; what is made is learned above
def test_it_learns_camvid(shared_data, tmp_path):
    """30 real images at 45 x 60, a tiny net, seconds."""
    folder = shared_data / "segmentation"
    source = SegmentationSource((45, 60), 3, folder / "images", folder / "masks")
    pack(source, tmp_path / "s", PackOptions(jobs=1))
    with open_store(tmp_path / "s") as real:
        options = TINY | {"ignore_values": [11], "split": "ordered", "epochs": 12}
        job = SegmentationRecipe().make_job(real, options, 0)
        assert "11 classes" in job.notes[0]
        _, _, metrics = train_job(job, real, epochs=12, batch_size=4, lr=4e-3)
        assert metrics["miou"] > 2 * job.baseline["miou"]
        assert metrics["pixel_accuracy"] > job.baseline["pixel_accuracy"] + 0.1
