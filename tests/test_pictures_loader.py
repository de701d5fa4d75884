"""Encoded pictures through `Loader`: the right pixels under the right labels, in every order, after every fault."""

from __future__ import annotations

import gc
import io
import pickle
import re
import warnings
import weakref
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import stoker
from paper_graphs import use_paper_graphs
from stoker.augment import (
    CenterCrop,
    ColorJitter,
    Compose,
    Normalize,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
)
from stoker.augment.sizing import Sizing
from stoker.errors import InputError, StoreError
from stoker.loader.pictures import make_policy
from stoker.plan import store_facts
from stoker.sources.images.encoded import encode_mask, picture_field
from stoker.store.fields import Dense
from stoker.store.memory import memory_store
from training_makers import DEVICES

Image = pytest.importorskip("PIL.Image", reason="Pillow is not installed (extra 'vision')")
SIZE = (24, 32)


def encoded(image, form="PNG", orientation=1):
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = io.BytesIO()
    image.save(file, form, exif=exif, **({"quality": 92} if form == "JPEG" else {}))
    return file.getvalue()


def picture(number, size=None):
    """A picture whose mean colour says its number."""
    height, width = size or (40 + number % 7, 50 + number % 5)
    pixels = np.full((height, width, 3), (number * 5 % 256, number * 11 % 256, 128), np.uint8)
    pixels[: height // 2, :, 2] = 0
    return Image.fromarray(pixels)


def make_store(num=30, size=None, broken=(), with_masks=False, form="PNG"):
    images = [picture(number, size) for number in range(num)]
    data = [encoded(image, form) for image in images]
    for row in broken:
        data[row] = data[row][: len(data[row]) // 3]
    sizes = [(image.height, image.width) for image in images]
    fields = {
        "images": picture_field(data),
        "image_size": Dense(np.array(sizes, np.int32)),
        "image_orientation": Dense(np.ones(num, np.uint8)),
        "labels": Dense(np.arange(num)),
    }
    if with_masks:
        masks = [(np.asarray(image)[..., 2] > 0).astype(np.uint8) for image in images]
        fields["masks"] = picture_field([encode_mask(mask) for mask in masks])
    return memory_store(fields, "pictures"), images


def colours(images):
    """The mean red and green of each image of a batch, as stored values."""
    return (images.mean((2, 3))[:, :2] * 255).round().to(torch.int64).tolist()


def expected_colours(labels):
    return [[number * 5 % 256, number * 11 % 256] for number in labels.tolist()]


# -- sizing ----------------------------------------------------------------------------------------


def test_rectangles_are_those_of_tensors_of_that_size():
    compose = Compose([RandomResizedCrop((40, 56)), RandomHorizontalFlip(0.0)], seed=5, stream=3)
    sizing, _ = compose.split_sizing()
    boxes = sizing.boxes(np.array([[90, 121]] * 200), 2, 7)
    compose.seek(2, 7)
    table = compose.draw(200, (90, 121), 3, "cpu").table.double().numpy()
    assert np.allclose(table[:, 2], boxes[:, 0])
    assert np.allclose(table[:, 5], boxes[:, 1])
    assert np.allclose(table[:, 0] * 55 + 1, boxes[:, 2], atol=1e-4)
    assert np.allclose(table[:, 4] * 39 + 1, boxes[:, 3], atol=1e-4)


def test_rectangles_lie_inside_pictures_of_all_sizes():
    sizes = np.random.default_rng(0).integers(1, 300, (4000, 2))
    for op in (RandomResizedCrop(8, (1e-3, 1.0), (0.2, 5.0), p=0.7), Resize(8)):
        left, top, width, height = Sizing(op, 1, 0).boxes(sizes, 0, 0).T
        assert min(left.min(), top.min()) >= 0
        assert min(width.min(), height.min()) >= 1
        assert (left + width <= sizes[:, 1]).all()
        assert (top + height <= sizes[:, 0]).all()
    assert (np.stack([height, width], 1) == sizes).all()


def test_later_ops_keep_their_draws():
    images = torch.randint(0, 256, (16, 3, 20, 20), dtype=torch.uint8)
    whole = Compose([Resize(20), RandomHorizontalFlip(), ColorJitter(0.4, 0.4, 0.4)], seed=9)
    _, rest = whole.split_sizing()
    assert torch.allclose(whole(images), rest(images), atol=1e-6)


def test_pillow_and_torch_resample_alike():
    rng = np.random.default_rng(0)
    sizing = Sizing(RandomResizedCrop(SIZE), 0, 0)
    sizes = rng.integers(10, 200, (12, 2))
    boxes = sizing.boxes(sizes, 0, 0)
    arrays = [rng.integers(0, 256, (*size, 3), dtype=np.uint8) for size in sizes]
    by_torch = sizing.resize_tensors([torch.from_numpy(a).permute(2, 0, 1) for a in arrays], boxes)
    for array, box, made in zip(arrays, boxes.tolist(), by_torch, strict=True):
        by_pillow = sizing.resize_picture(Image.fromarray(array), box)
        away = np.abs(by_pillow.astype(int) - made.permute(1, 2, 0).numpy().astype(int))
        assert away.max() <= 1


# -- batches ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP"])
def test_every_picture_comes_once_with_its_label(form):
    store, _ = make_store(form=form)
    with stoker.Loader(
        store, 8, "cpu", shuffle=True, augment=Compose([RandomResizedCrop(SIZE, (0.5, 1.0))])
    ) as loader:
        seen = []
        for batch in loader:
            assert batch["images"].shape[1:] == (3, *SIZE)
            found = np.array(colours(batch["images"]))
            assert np.abs(found - expected_colours(batch["labels"])).max() <= 3
            seen += batch["labels"].tolist()
        assert sorted(seen) == list(range(30))
        assert "decoded in threads by Pillow" in loader.reason
        assert loader.tier == "streamed"


@pytest.mark.parametrize("form", ["JPEG", "PNG"])
def test_threads_that_decode_leave_a_script_its_warnings(form, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1500)  # Pillow warns of each picture here
    store, _ = make_store(200, form=form)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with stoker.Loader(store, 8, "cpu", augment=Compose([Resize(SIZE)])) as loader:
            assert sum(1 for _ in range(4) for _ in loader) == 100
        with pytest.raises(RuntimeWarning, match="of the script"):
            warnings.warn("of the script", RuntimeWarning, stacklevel=1)


def test_pixels_are_those_of_pillow():
    store, images = make_store()
    with stoker.Loader(store, 10, "cpu", augment=Compose([Resize(SIZE)])) as loader:
        batch = next(iter(loader))
    for image, made in zip(images, batch["images"], strict=False):
        wanted = np.asarray(image.resize(SIZE[::-1], Image.Resampling.BILINEAR)) / 255
        assert np.allclose(made.permute(1, 2, 0).numpy(), wanted, atol=1e-6)


def test_pictures_are_turned_upright(tmp_path):
    image = picture(3, (20, 30))
    turned = [encoded(image, "PNG", number) for number in range(1, 9)]
    sizes = [(20, 30) if number < 5 else (30, 20) for number in range(1, 9)]
    store = memory_store(
        {
            "images": picture_field(turned),
            "image_size": Dense(np.array(sizes, np.int32)),
            "image_orientation": Dense(np.arange(1, 9, dtype=np.uint8)),
        },
        "turned",
    )
    from PIL import ImageOps

    augment = Compose([Resize((20, 20))])
    with stoker.Loader(store, 8, "cpu", augment=augment) as loader:
        batch = next(iter(loader))["images"]
    for data, made in zip(turned, batch, strict=True):
        with Image.open(io.BytesIO(data)) as lying:
            shown = ImageOps.exif_transpose(lying).resize((20, 20), Image.Resampling.BILINEAR)
        assert np.allclose(made.permute(1, 2, 0).numpy() * 255, np.asarray(shown), atol=1e-3)


def test_masks_move_with_their_images():
    store, _ = make_store(with_masks=True)
    ops = [RandomResizedCrop(SIZE, (0.2, 1.0)), RandomHorizontalFlip(), CenterCrop(20)]
    with stoker.Loader(store, 10, "cpu", shuffle=True, augment=Compose(ops)) as loader:
        for batch in loader:
            blue = batch["images"][:, 2] * 255
            # Where the resampled blue is neither mixed nor missing, the mask says what it is.
            assert (batch["masks"][blue > 127] == 1).all()
            assert (batch["masks"][blue < 1] == 0).all()
            assert batch["masks"].dtype == torch.uint8


def test_pictures_of_one_size_need_no_augmentation():
    store, images = make_store(12, (16, 16))
    with stoker.Loader(store, 4, "cpu", as_tuple=("images", "labels")) as loader:
        made, labels = next(iter(loader))
        assert made.dtype == torch.uint8
        for number, image in zip(labels.tolist(), made, strict=True):
            assert (image.permute(1, 2, 0).numpy() == np.asarray(images[number])).all()


def test_pictures_of_several_sizes_need_one_that_gives_them_one():
    store, _ = make_store()
    for augment in (None, Compose([RandomHorizontalFlip()])):
        with (
            stoker.Loader(store, 4, "cpu", augment=augment) as loader,
            pytest.raises(InputError, match=r"40 x 50 to 46 x 54"),
        ):
            next(iter(loader))
    with stoker.Loader(store, 4, "cpu") as loader:
        loader.use_augmentation(Compose([Resize(8)]))  # as a Trainer does
        assert next(iter(loader))["images"].shape == (4, 3, 8, 8)


def test_a_plan_for_a_gpu_is_refused():
    store, _ = make_store()
    plan = stoker.make_plan(
        store_facts(store.manifest), gpu_memory_bytes=10**9, ram_bytes=10**9, batch_size=4
    )
    with pytest.raises(InputError, match="stay in host memory"):
        stoker.Loader(store, 4, "cpu", plan=plan, augment=random_ops())


def epoch_of(loader):
    return [(batch["images"], batch["labels"]) for batch in loader]


def equal(first, second):
    pairs = zip(first, second, strict=True)
    return all(torch.equal(a, c) and torch.equal(b, d) for (a, b), (c, d) in pairs)


def random_ops():
    normalize = Normalize((0.5, 0.5, 0.5), (0.2, 0.2, 0.2))
    ops = [RandomResizedCrop(SIZE), RandomHorizontalFlip(), ColorJitter(0.4, 0.4, 0.4), normalize]
    return Compose(ops, seed=4)


def test_an_epoch_is_resumed_in_its_middle_to_the_bit():
    store, _ = make_store()
    options = {"shuffle": True, "seed": 3}
    with stoker.Loader(store, 4, "cpu", augment=random_ops(), **options) as whole:
        epoch_of(whole)
        second = epoch_of(whole)
    with stoker.Loader(store, 4, "cpu", augment=random_ops(), **options) as left:
        epoch_of(left)
        walk = iter(left)
        begun = [next(walk) for _ in range(3)]
        state, digest = left.state_dict(), left.order_digest()
    with stoker.Loader(store, 4, "cpu", augment=random_ops(), **options) as again:
        again.load_state_dict(state)
        assert again.order_digest() == digest
        rest = epoch_of(again)
    assert equal([(b["images"], b["labels"]) for b in begun] + rest, second)


def test_ranks_share_the_pictures_without_repeats():
    store, _ = make_store()
    seen = []
    for rank in range(3):
        with stoker.Loader(
            store, 5, "cpu", shuffle=True, rank=rank, world_size=3, augment=random_ops()
        ) as loader:
            seen += [label for batch in loader for label in batch["labels"].tolist()]
    assert sorted(seen) == list(range(30))


def test_chunks_give_the_same_pictures_as_resident_bytes():
    store, _ = make_store()
    with stoker.Loader(store, 4, "cpu", augment=random_ops()) as resident:
        whole = epoch_of(resident)
    room = sum(len(encoded(picture(n))) for n in range(30)) // 3
    with stoker.Loader(store, 4, "cpu", augment=random_ops(), data_bytes=room) as chunked:
        assert chunked.plan.tier == "chunked"
        assert equal(epoch_of(chunked), whole)


def test_a_loader_survives_pickling_and_an_early_end():
    store, _ = make_store()
    with stoker.Loader(store, 4, "cpu", shuffle=True, augment=random_ops()) as loader:
        for _ in loader:
            break
        with pytest.raises(InputError, match="decoded ahead"):
            loader.assemble(next(iter(loader.index_batches())))


def test_another_augmentation_holds_from_the_next_batch_on():
    """Batches that were decoded ahead for the augmentation before are decoded again."""
    store, _ = make_store()
    with stoker.Loader(store, 4, "cpu", augment=random_ops()) as loader:
        sides = []
        for batch in loader:
            sides.append(batch["images"].shape[-1])
            if len(sides) == 2:
                loader.use_augmentation(Compose([RandomResizedCrop(8), RandomHorizontalFlip()]))
    assert sides == [32, 32, *[8] * 6]


def test_an_iteration_over_a_closed_loader_says_so():
    walk = iter(loader := stoker.Loader(make_store()[0], 4, "cpu", augment=random_ops()))
    next(walk)
    loader.close()
    with pytest.raises(InputError, match="closed"):
        next(walk)


def test_a_closed_loader_keeps_no_memory_of_batches():
    store, _ = make_store(12, size=(200, 200))
    loader = stoker.Loader(store, 6, device="cpu", augment=Compose([Resize(256), Normalize(0, 1)]))
    assert len(list(loader)) == 2
    memory, rest = loader._pictures._memory, weakref.ref(loader._assembler._augment)
    assert memory.num_free
    loader.close()
    gc.collect()
    assert not memory.num_free
    assert rest() is None


def test_what_cannot_be_read_is_raised_after_the_batches_before_it(monkeypatch):
    store, _ = make_store()
    with stoker.Loader(store, 4, "cpu", augment=random_ops()) as loader:
        gather = loader._assembler.gather

        def fail(index, totals):
            if index.planned.step == 4:
                raise StoreError("labels fail their checksum", "", "")
            return gather(index, totals)

        monkeypatch.setattr(loader._assembler, "gather", fail)
        seen = []
        with pytest.raises(StoreError, match="checksum"):
            seen.extend(loader)
        assert len(seen) == 4


def test_a_spawned_copy_continues_with_the_same_batches(tmp_path):
    from stoker.packing import PackOptions, pack
    from stoker.sources.images import ImagesSource, KeepEncoded

    (tmp_path / "in" / "a").mkdir(parents=True)
    for number in range(6):
        picture(number).save(tmp_path / "in" / "a" / f"{number}.png")
    source = ImagesSource((8, 8), 3, tmp_path / "in", keep_encoded=KeepEncoded())
    pack(source, tmp_path / "s", PackOptions(jobs=1))
    with (
        stoker.Loader(tmp_path / "s", 2, "cpu", shuffle=True, augment=random_ops()) as loader,
        pickle.loads(pickle.dumps(loader)) as copy,
    ):
        assert equal(epoch_of(copy), epoch_of(loader))


def test_the_example_of_the_page_runs(tmp_path, monkeypatch):
    from stoker.packing import PackOptions, pack
    from stoker.sources.images import ImagesSource, KeepEncoded

    monkeypatch.chdir(tmp_path)
    (tmp_path / "in" / "a").mkdir(parents=True)
    for number in range(3):
        picture(number).save(tmp_path / "in" / "a" / f"{number}.png")
    source = ImagesSource((8, 8), 3, tmp_path / "in", keep_encoded=KeepEncoded())
    pack(source, tmp_path / "photographs", PackOptions(jobs=1))
    page = (Path(__file__).parent.parent / "docs" / "pictures.md").read_text()
    example, loop = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    state: dict = {}
    exec(compile(example, "docs/pictures.md", "exec"), state)
    if not torch.cuda.is_available():
        streams = {"Stream": Mock(), "stream": nullcontext, "current_stream": Mock()}
        for name, value in streams.items():
            monkeypatch.setattr(torch.cuda, name, value)
    exec(compile(loop, "docs/pictures.md", "exec"), state)
    assert state["batch"]["images"].shape == (3, 3, 224, 224)
    (batch,) = list(state["loader"])
    state["loader"].close()
    assert batch["images"].shape == (3, 3, 224, 224)


# -- faults ----------------------------------------------------------------------------------------


def test_a_broken_picture_stops_the_epoch_with_its_name():
    store, _ = make_store(broken=(7,))
    with stoker.Loader(store, 4, "cpu", augment=random_ops()) as loader:
        walk = iter(loader)
        next(walk)
        with pytest.raises(StoreError, match=r"sample 7 of pictures .*cannot be opened"):
            list(walk)


def test_a_picture_of_another_size_than_packed_is_broken():
    data = [encoded(picture(n, (16, 16) if n != 2 else (17, 16))) for n in range(6)]
    fields = {
        "images": picture_field(data),
        "image_size": Dense(np.full((6, 2), 16, np.int32)),
        "image_orientation": Dense(np.ones(6, np.uint8)),
    }
    with (
        stoker.Loader(memory_store(fields, "other"), 6, "cpu") as loader,
        pytest.raises(StoreError, match="17 x 16 pixels, and 16 x 16 when it was packed"),
    ):
        next(iter(loader))


@pytest.mark.parametrize("policy", ["skip", "replace"])
def test_broken_pictures_are_skipped_or_replaced_whole(policy):
    store, _ = make_store(broken=(3, 7, 20))
    options = {"on_broken": policy, "broken_budget": "10%", "shuffle": True}
    augment = Compose([Resize(SIZE)])
    with stoker.Loader(store, 6, "cpu", augment=augment, **options) as loader:
        seen = []
        for batch in loader:
            assert colours(batch["images"]) == expected_colours(batch["labels"])
            assert batch.sample_ids.tolist() == batch["labels"].tolist()
            seen += batch["labels"].tolist()
        assert not {3, 7, 20} & set(seen)
        assert len(seen) == (27 if policy == "skip" else 30)
        assert sorted(loader.broken) == [3, 7, 20]
        assert "cannot be opened" in loader.broken[3]
        digest = loader.order_digest()
    sound, _ = make_store()
    with stoker.Loader(sound, 6, "cpu", augment=augment, shuffle=True) as loader:
        epoch_of(loader)
        assert loader.order_digest() != digest  # other samples were seen
    with stoker.Loader(store, 6, "cpu", augment=augment, **options) as again:
        walk = iter(again)
        for _ in range(3):
            next(walk)
        state = again.state_dict()
        begun = set(again.broken)
    with stoker.Loader(store, 6, "cpu", augment=augment, **options) as resumed:
        resumed.load_state_dict(state)
        assert set(resumed.broken) == begun
        epoch_of(resumed)
        assert resumed.order_digest() == digest
        assert sorted(resumed.broken) == [3, 7, 20]
    with stoker.Loader(store, 6, "cpu", augment=augment, **options) as rest:
        rest.load_state_dict(state | {"broken": [[0, 0, 1], [0, 0, 2]]})
        with pytest.raises(StoreError, match=r"(?s)at most 3 may be left out.*found broken before"):
            [epoch_of(rest), epoch_of(rest)]


def test_the_run_log_lists_broken_pictures(tmp_path):
    from stoker.report import read_run_log

    store, _ = make_store(broken=(3, 7))
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 8 * 8, 30))
    options = {"on_broken": "skip", "broken_budget": "10%", "as_tuple": ("images", "labels")}
    with stoker.Loader(store, 10, "cpu", augment=Compose([Resize(8)]), **options) as loader:
        stoker.Trainer(
            model,
            loader,
            None,
            torch.nn.functional.cross_entropy,
            torch.optim.SGD(model.parameters(), 0.01),
            None,
            {"epochs": 2},
            "cpu",
            run_dir=tmp_path / "run",
        ).fit(quiet=True)
    (log,) = tmp_path.rglob("run.jsonl")
    notes = [line.values for line in read_run_log(log) if line.event == "note"]
    found = [note["broken"] for note in notes if "broken" in note]
    assert [sorted(each) for each in found] == [["3", "7"]]
    assert "cannot be opened" in found[0]["3"]


def test_a_spent_budget_stops_with_names():
    store, _ = make_store(broken=(3, 7, 20))
    with (
        stoker.Loader(
            store, 6, "cpu", augment=random_ops(), on_broken="skip", broken_budget=2
        ) as loader,
        pytest.raises(StoreError, match="3 pictures cannot be decoded"),
    ):
        epoch_of(loader)


def test_a_batch_without_any_intact_picture_stops():
    store, _ = make_store(4, broken=range(4))
    with (
        stoker.Loader(
            store, 4, "cpu", augment=random_ops(), on_broken="skip", broken_budget="100%"
        ) as loader,
        pytest.raises(StoreError, match="all 4 pictures of batch 0"),
    ):
        epoch_of(loader)


def test_policies_are_checked():
    with pytest.raises(InputError, match="on_broken"):
        make_policy("ignore", "1%", 10)
    assert make_policy("skip", "25%", 40).most == 10
    assert make_policy("skip", 7, 40).most == 7
    assert make_policy("stop", "1%", 40).most == 0


@pytest.mark.parametrize("device", DEVICES)
def test_a_trainer_captures_the_step_over_encoded_pictures(device, monkeypatch):
    if device == "cpu":
        use_paper_graphs(monkeypatch)

    def fit(capture):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 16 * 16, 30))
        augment = Compose([RandomResizedCrop(16), RandomHorizontalFlip(0.5)], seed=3)
        with stoker.Loader(make_store()[0], 5, device, shuffle=True, augment=augment) as loader:
            optimizer = torch.optim.SGD(model.parameters(), 0.01)
            criterion = torch.nn.CrossEntropyLoss()
            settings = {"epochs": 3, "precision": "fp32", "capture": capture}
            trainer = stoker.Trainer(
                model, loader, None, criterion, optimizer, None, settings, device
            )
            return trainer, trainer.fit(quiet=True).losses

    trainer, losses = fit("on")
    assert trainer._captured.active, trainer._captured.reason
    assert losses == pytest.approx(fit("off")[1], rel=1e-4)
