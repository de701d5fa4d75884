"""Segmentation as the field evaluates it, and masks for new pictures: against plain loops."""

from __future__ import annotations

import csv
import itertools
import json
import math
import shutil

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from kept_commands import said_by as run
from stoker.errors import InputError
from stoker.packing.samples import encode_png
from stoker.recipes.answers import predict_file
from stoker.recipes.inference import load_trained
from stoker.recipes.segmentation.evaluation import (
    IGNORE,
    boundary_scores,
    class_scores,
    compute_metrics,
    count_each,
    palette,
)
from stoker.recipes.segmentation.masks import (
    Scale,
    free_mask_name,
    segment,
    tile_starts,
    write_masks,
)
from test_recipe_segmentation import TINY, made_shapes

ON_CPU = ("--device", "cpu")


def drawn_masks(seed, num_classes, size=(9, 11), batch=3):
    rng = np.random.default_rng(seed)
    masks = rng.integers(0, num_classes, (batch, *size))
    answers = np.where(
        rng.random(masks.shape) < 0.6, masks, rng.integers(0, num_classes, masks.shape)
    )
    masks[rng.random(masks.shape) < 0.1] = IGNORE
    return torch.from_numpy(answers), torch.from_numpy(masks)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 4))
def test_counts_and_scores_equal_a_loop_over_pixels(seed, num_classes):
    answers, masks = drawn_masks(seed, num_classes)
    counts = count_each(answers, masks, num_classes).numpy()
    wanted = np.zeros_like(counts)
    for image in range(len(masks)):
        for true, said in zip(
            masks[image].flatten().tolist(), answers[image].flatten().tolist(), strict=True
        ):
            if true != IGNORE:
                wanted[image, true, said] += 1
    assert (counts == wanted).all()
    total = counts.sum(axis=0)
    ious, dices = class_scores(total[None].astype(float))
    for place in range(num_classes):
        both = total[place, place]
        true, said = total[place].sum(), total[:, place].sum()
        if true + said:
            assert math.isclose(ious[0, place], both / (true + said - both))
            assert math.isclose(dices[0, place], 2 * both / (true + said))
    found = compute_metrics(total)
    assert math.isclose(found["mean_dice"], np.nanmean(dices[0]))
    assert math.isclose(found["miou"], np.nanmean(ious[0]))


def naive_boundary(answer, mask, number, reach):
    """Boundary F1 of one class of one image, pixel by pixel."""
    high, wide = mask.shape

    def around(y, x, by):
        for other in range(max(0, y - by), min(high, y + by + 1)):
            for across in range(max(0, x - by), min(wide, x + by + 1)):
                yield other, across

    def edge(inside):
        found = set()
        for y in range(high):
            for x in range(wide):
                near = list(around(y, x, 1))
                if any(mask[place] == IGNORE for place in near):
                    continue
                if inside[y, x] and not all(inside[place] for place in near):
                    found.add((y, x))
        return found

    true, said = edge(mask == number), edge((answer == number) & (mask != IGNORE))
    if not true and not said:
        return math.nan
    recall = sum(any(p in said for p in around(*place, reach)) for place in true) / max(
        1, len(true)
    )
    precision = sum(any(p in true for p in around(*place, reach)) for place in said) / max(
        1, len(said)
    )
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10_000))
def test_boundary_scores_equal_a_loop_over_pixels(seed):
    answers, masks = drawn_masks(seed, 3, batch=2)
    found = boundary_scores(answers, masks, 3).numpy()
    for image in range(2):
        for number in range(3):
            wanted = naive_boundary(answers[image].numpy(), masks[image].numpy(), number, 1)
            assert (math.isnan(wanted) and math.isnan(found[image, number])) or math.isclose(
                found[image, number], wanted, abs_tol=1e-6
            )


def test_equal_masks_have_perfect_edges():
    masks = torch.from_numpy(made_shapes(2)[1]).long()
    masks[masks == 7] = IGNORE
    scores = boundary_scores(masks, masks, 3)
    assert torch.equal(scores[~scores.isnan()], torch.ones_like(scores[~scores.isnan()]))


# -- tiles -----------------------------------------------------------------------------------------


@given(st.integers(1, 400), st.integers(1, 64))
def test_tiles_cover_the_side_and_overlap(side, tile):
    starts = tile_starts(side, tile)
    covered = np.zeros(side, int)
    for start in starts:
        assert start >= 0
        assert side <= tile or start + tile <= side
        covered[start : start + tile] += 1
    assert covered.all()
    assert all(
        b - a <= tile - round(tile * 0.25) or tile == 1 for a, b in itertools.pairwise(starts)
    )


def by_brightness(images):
    """A network that looks at single pixels: dark is class 0, bright is class 1."""
    grey = images.mean(dim=1, keepdim=True)
    return torch.cat([-grey, grey], dim=1)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 1000), st.integers(16, 50), st.integers(16, 50))
def test_a_picture_in_tiles_is_answered_as_in_one_piece(seed, high, wide):
    pixels = torch.from_numpy(
        np.random.default_rng(seed).integers(0, 256, (1, 3, high, wide), dtype="u1")
    )

    def normalise(values):
        return values.float() / 255 - 0.5

    whole = by_brightness(normalise(pixels)).argmax(dim=1).to(torch.uint8)
    tiled = segment(by_brightness, pixels, (high, wide), (16, 12), normalise)
    assert torch.equal(tiled, whole)
    assert segment(by_brightness, pixels, (2 * high, wide), (high, wide), normalise).shape == (
        1,
        2 * high,
        wide,
    )


def test_large_pictures_keep_the_scale_of_training():
    scale = Scale((90, 120), most=(360, 480), share=(0.25, 0.25))
    assert scale.work_size((360, 480)) == (90, 120)
    assert scale.work_size((200, 480)) == (90, 120)
    assert scale.work_size((3600, 4800)) == (900, 1200)
    assert Scale((90, 120)).work_size((3600, 4800)) == (90, 120)


# -- files -----------------------------------------------------------------------------------------


def test_a_mask_is_read_back_as_values_and_colours(tmp_path):
    mask = np.random.default_rng(0).integers(0, 5, (13, 17), dtype="u1")
    (tmp_path / "m.png").write_bytes(encode_png(mask, palette()))
    with Image.open(tmp_path / "m.png") as read:
        assert read.mode == "P"
        assert (np.asarray(read) == mask).all()
        assert (np.asarray(read.convert("RGB")) == palette()[mask]).all()


def test_two_pictures_of_one_stem_have_two_masks():
    used: set[str] = set()
    assert [free_mask_name(name, used) for name in ("d/a.jpg", "d/a.png", "d/b.tif")] == [
        "d/a.png",
        "d/a.png.png",
        "d/b.png",
    ]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Pictures of 64 x 48 and their masks in a folder, packed at half their size, trained for an epoch."""
    root = tmp_path_factory.mktemp("masks")
    images, masks = made_shapes(20)
    for kind in ("images", "masks"):
        (root / kind).mkdir()
    for number, (image, mask) in enumerate(zip(images, masks, strict=True)):
        mask[mask == 7] = 0
        shown = Image.fromarray(np.moveaxis(image, 0, -1)).resize(
            (64, 48), Image.Resampling.NEAREST
        )
        shown.save(root / "images" / f"{number}.png")
        Image.fromarray(mask).resize((64, 48), Image.Resampling.NEAREST).save(
            root / "masks" / f"{number}.png"
        )
    run(
        *(
            "pack",
            "segmentation",
            "--images",
            root / "images",
            "--masks",
            root / "masks",
            root / "store",
        ),
        *("--size", "24x32", "--jobs", "1"),
    )
    options = [
        word
        for name, value in TINY.items()
        for word in ("--set", f"recipe.options.{name}={json.dumps(value)}")
    ]
    told = run(
        *(
            "train",
            "--config",
            "segmentation",
            "--store",
            root / "store",
            "--json",
            *ON_CPU,
            *options,
        ),
        *(
            "--set",
            f"run.dir={root / 'run'}",
            "--set",
            "training.epochs=2",
            "--set",
            "training.batch_size=4",
        ),
    )
    return root, json.loads(told)


def test_a_run_is_evaluated_per_class_beside_two_priors(trained):
    _, made = trained
    evaluation = made["evaluation"]
    assert {"miou", "mean_dice", "pixel_accuracy", "boundary_f1"} <= set(evaluation["metrics"])
    assert list(evaluation["baselines"]) == ["majority class", "prior of each pixel"]
    assert {"iou", "dice", "boundary_f1"} <= set(evaluation["groups"]["class"]["class 0"])
    assert np.array(evaluation["confusion"]["counts"]).sum() == 2 * 24 * 32
    assert set(evaluation["examples"][0]["pictures"]) == {"picture", "truth", "answer"}


def test_new_pictures_get_masks_of_their_own_size(trained):
    root, _ = trained
    new = root / "new"
    (new / "deep").mkdir(parents=True)
    with Image.open(root / "images" / "3.png") as small:
        small.save(new / "deep" / "a.png")
        small.resize((200, 150)).save(new / "large.jpg")
    (new / "broken.png").write_bytes(b"no picture")
    told = run("predict", root / "run" / "best.pt", new, root / "answered", *ON_CPU)
    assert "1 large picture went through in tiles of 32 x 24" in told
    for name, size in (("deep/a.png", (64, 48)), ("large.png", (200, 150))):
        with Image.open(root / "answered" / name) as mask:
            assert mask.size == size
    with (root / "answered" / "answers.csv").open() as file:
        rows = {row["file"]: row for row in csv.DictReader(file)}
    assert rows["broken.png"]["mask"] == ""
    assert "cannot be opened" in rows["broken.png"]["reason"]
    with (root / "answered" / "classes.csv").open() as file:
        assert [row["class"] for row in csv.DictReader(file)] == ["class 0", "class 1", "class 2"]
    assert "earlier prediction" not in told
    (root / "answered" / "notes.txt").write_text("mine")
    (new / "deep" / "a.png").unlink()
    told = run("predict", root / "run" / "best.pt", new, root / "answered", *ON_CPU)
    assert "2 masks of an earlier prediction removed" in told
    assert "1 file in" in told
    assert "not of this prediction: notes.txt" in told
    there = {path.name for path in (root / "answered").iterdir()}
    assert there == {".stoker", "answers.csv", "classes.csv", "large.png", "notes.txt"}
    with pytest.raises(InputError, match="has no rows"):
        write_masks(root / "answered", failing(), ["a"])
    assert (root / "answered" / "large.png").exists()  # of the last prediction that had answers


def failing():
    """Answers for input that turns out to have none."""
    raise InputError("it has no rows.", "rows", "a folder")
    yield


def test_a_folder_of_somebody_else_is_not_written_into(trained):
    root, _ = trained
    (root / "mine").mkdir()
    (root / "mine" / "thesis.txt").write_text("mine")
    with pytest.raises(InputError, match="which stoker did not write"):
        predict_file(
            load_trained(root / "run" / "best.pt"), root / "images", root / "mine", device="cpu"
        )
    assert [path.name for path in (root / "mine").iterdir()] == ["thesis.txt"]


def test_a_table_takes_masks_of_one_size_only(trained):
    import stoker

    root, _ = trained
    model = stoker.load_model(root / "run" / "best.pt")
    assert model.predict(root / "images" / "3.png", device="cpu").num_rows == 1
    mixed = root / "mixed"
    mixed.mkdir()
    Image.new("RGB", (30, 20)).save(mixed / "a.png")
    Image.new("RGB", (31, 20)).save(mixed / "b.png")
    with pytest.raises(InputError, match="a folder"):
        predict_file(model.trained, mixed, root / "mixed.parquet", device="cpu")
    found = model.predict(mixed, device="cpu").to_pylist()
    assert [(row["file"], row["height"], row["width"]) for row in found] == [
        ("a.png", 20, 30),
        ("b.png", 20, 31),
    ]
    for row in found:
        alone = model.predict(mixed / row["file"], device="cpu")
        assert alone["mask"].to_pylist() == [row["mask"]]


def test_a_store_gets_a_folder_of_masks_whatever_kind_it_is(trained):
    root, _ = trained
    checkpoint = root / "run" / "best.pt"
    run("predict", checkpoint, root / "store", root / "table.parquet")
    table = pq.read_table(root / "table.parquet")
    assert table.column_names == ["file", "sample", "mask"]
    assert table["sample"].to_pylist() == [*range(20)]
    assert sorted(table["file"].to_pylist()) == sorted(f"{n}.png" for n in range(20))
    told = run("predict", checkpoint, root / "store", root / "from-pixels")
    assert "resized" not in told
    run(
        *("pack", "segmentation", "--images", root / "images", "--masks", root / "masks"),
        *(root / "encoded", "--keep-encoded", "--jobs", "1"),
    )
    for _ in range(2):  # our own folder is replaced
        told = run("predict", checkpoint, root / "encoded", root / "from-files")
    assert "pictures are resized to 24 x 32, as in training" in told
    same = []
    for number in range(20):
        one, two = (
            np.asarray(Image.open(root / folder / f"{number}.png"))
            for folder in ("from-pixels", "from-files")
        )
        assert one.shape == two.shape == (24, 32)
        same.append((one == two).mean())
    # Packing and loading resize with the same filter; rounding may differ by one level.
    assert np.mean(same) > 0.97


def test_large_pictures_keep_the_scale_of_training_of_encoded_pictures(trained):
    from stoker.recipes.pictures import sized_store
    from stoker.recipes.segmentation.recipe import find_original_sizes
    from stoker.store.reader import open_store

    root, _ = trained
    with open_store(root / "store") as pixels, open_store(root / "encoded") as files:
        wanted = find_original_sizes(pixels)
        found = find_original_sizes(sized_store(files, (24, 32), (8, 8)))
    assert found["most"] == wanted["most"] == [48, 64]
    assert found["scale"] == pytest.approx(wanted["scale"])


def test_names_in_a_store_stay_below_the_folder_of_masks():
    used = set()
    names = ["../../a.png", "/etc/a.png", "..", "a.png", "a.png", "a.png"]
    made = [free_mask_name(name, used) for name in names]
    assert made == ["a.png", "etc/a.png", "mask.png", "a.png.png", "a.png-2.png", "a.png-3.png"]


def test_masks_beside_the_images_are_not_predicted(trained, tmp_path):
    root, _ = trained
    for kind in ("images", "masks"):
        (tmp_path / "new" / kind).mkdir(parents=True)
        for name in ("1.png", "2.png"):
            shutil.copy(root / kind / name, tmp_path / "new" / kind / name)
    told = run("predict", root / "run" / "best.pt", tmp_path / "new", tmp_path / "out", *ON_CPU)
    assert "masks holds masks: not predicted" in told
    assert "2 rows of mask" in told
