"""COCO outlines, Pascal VOC and folders of splits as people share them."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from typer.testing import CliRunner

from stoker.cli.main import app
from stoker.errors import SourceError
from stoker.packing import PackOptions, pack
from stoker.sources.images import ImagesSource, SegmentationSource, find_scenes
from stoker.sources.images.coco import Outlines, find_coco, read_coco
from stoker.sources.images.labels import read_labels
from stoker.sources.images.listing import find_split, split_of
from stoker.store.reader import open_store

WIDE, HIGH = 40, 30
SQUARE = [[4, 4, 14, 4, 14, 14, 4, 14]]


def picture(path, shade=90, size=(WIDE, HIGH)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (shade, shade, shade)).save(path)


def coco(path, names, shapes, categories=((7, "cat"), (3, "owl"), (9, "unused"))):
    """Write a file whose first picture has the shapes: (category, segmentation, area)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    images = [
        {"id": 10 + n, "file_name": name, "width": WIDE, "height": HIGH}
        for n, name in enumerate(names)
    ]
    made = {
        "images": images,
        "categories": [{"id": key, "name": name} for key, name in categories],
        "annotations": [
            {"id": n, "image_id": 10, "category_id": key, "segmentation": shape, "area": area, "bbox": [0, 0, 3, 3]}
            for n, (key, shape, area) in enumerate(shapes)
        ],
    }  # fmt: skip
    path.write_text(json.dumps(made))


def packed_masks(store):
    with open_store(store) as opened:
        names = [opened.read_text("name", n) for n in range(opened.num_samples)]
        return (
            names,
            opened.read_rows("masks", 0, opened.num_samples),
            dict(opened.manifest.attributes),
        )


def test_outlines_become_masks_with_the_names_of_their_categories(tmp_path):
    for name in ("a.jpg", "b.jpg", "c.jpg"):
        picture(tmp_path / "data/train2017" / name)
    inner = {"counts": _runs(inside(20, 10, 24, 14)), "size": [HIGH, WIDE]}
    coco(
        tmp_path / "data/annotations/instances_train2017.json",
        ["a.jpg", "b.jpg"],
        [(3, inner, 16), (7, [[18, 8, 30, 8, 30, 20, 18, 20]], 144), (7, SQUARE, 100)],
    )
    source = SegmentationSource((HIGH, WIDE), images=tmp_path / "data", masks=tmp_path / "data")
    store = pack(source, tmp_path / "store", PackOptions(jobs=1))
    names, masks, facts = packed_masks(store.path)
    assert names == ["train2017/a.jpg", "train2017/b.jpg"]
    assert facts["classes"] == [
        "background",
        "owl",
        "cat",
    ]  # by their ids; one without objects is none
    assert masks[0, 12, 22] == 1  # the small one is drawn over the large one, though it comes first
    assert masks[0, 17, 28] == masks[0, 8, 8] == 2
    assert not masks[1].any()
    assert (masks[0] == 1).sum() == 16
    assert any("1 pictures without an object" in note for note in _notes(source, tmp_path))
    assert store.manifest.attributes["accounts"][0]["ignored"]["in no COCO file"] == 1


def _notes(source, scratch):
    return source.prepare(scratch).notes


def inside(left, top, right, bottom):
    mask = np.zeros((HIGH, WIDE), bool)
    mask[top:bottom, left:right] = True
    return mask


def _runs(mask):
    flat = np.concatenate([[False], mask.T.ravel(), [False]])
    edges = np.flatnonzero(np.diff(flat.astype(int)))
    cuts = np.concatenate([[0], edges, [mask.size]])
    return np.diff(cuts).tolist()


def _packed(runs):
    """Write runs as `pycocotools` does."""
    text = ""
    for place, run in enumerate(runs):
        value = run - (runs[place - 2] if place > 2 else 0)
        more = True
        while more:
            bits = value & 0x1F
            value >>= 5
            more = value != (-1 if bits & 0x10 else 0)
            text += chr((bits | (0x20 if more else 0)) + 48)
    return text


@given(seed=st.integers(0, 10**6), is_text=st.booleans())
@settings(max_examples=60, deadline=None)
def test_runs_come_back_as_the_pixels_they_were(seed, is_text):
    random = np.random.default_rng(seed)
    mask = random.random((HIGH, WIDE)) < random.random()
    runs = _runs(mask)
    shape = {"counts": _packed(runs) if is_text else runs}
    drawn = np.asarray(Outlines((WIDE, HIGH), ((5, shape),), "x.json").draw())
    np.testing.assert_array_equal(drawn, mask * 5)


@pytest.mark.parametrize(
    "shape",
    [{"counts": [5]}, {"counts": "~"}, {"counts": [-3, 3]}, {"counts": None}, [["x"] * 6], [7]],
)
def test_an_outline_that_cannot_be_drawn_refuses_its_picture(tmp_path, shape):
    for name in ("a.jpg", "b.jpg"):
        picture(tmp_path / "data" / name)
    coco(tmp_path / "c.json", ["a.jpg", "b.jpg"], [(7, shape, 1), (7, SQUARE, 1)])
    source = SegmentationSource((8, 8), images=tmp_path / "data", masks=tmp_path / "c.json")
    made = pack(source, tmp_path / "s", PackOptions(jobs=1, on_bad="quarantine", bad_budget="60%"))
    assert [refusal.kind for refusal in made.refused] == ["outline that cannot be drawn"]


def test_files_of_splits_divide_the_pictures(tmp_path):
    for part in ("train", "valid", "test"):
        picture(tmp_path / part / "same.jpg")
        coco(tmp_path / part / "_annotations.coco.json", ["same.jpg"], [(7, SQUARE, 1)])
    made = read_coco(
        find_coco(tmp_path), tmp_path, [f"{part}/same.jpg" for part in ("train", "valid", "test")]
    )
    assert made.splits == {"train/same.jpg": 0, "valid/same.jpg": 1, "test/same.jpg": 2}
    assert not made.refused


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "not a COCO file"),
        ('{"images": [], "annotations": []}', "not a COCO file"),
        ('{"images": [{"id": 1}], "annotations": [], "categories": []}', "not a COCO file"),
        ('{"images": [], "annotations": [], "categories": []}', "no annotations"),
        ('{"images": [], "annotations": [{"bbox": [1, 2, 3, 4]}], "categories": []}', "1 boxes and no outlines"),
    ],
)  # fmt: skip
def test_what_holds_no_outlines_is_named(tmp_path, content, said):
    picture(tmp_path / "a.jpg")
    (tmp_path / "c.json").write_text(content)
    with pytest.raises(SourceError, match=said):
        read_coco([tmp_path / "c.json"], tmp_path, ["a.jpg"])


def test_pascal_voc_is_taken_with_its_lists(tmp_path):
    root = tmp_path / "VOCdevkit/VOC2007"
    for number in range(4):
        picture(root / f"JPEGImages/p{number}.jpg")
        mask = Image.fromarray(np.full((HIGH, WIDE), number % 2, np.uint8))
        (root / "SegmentationClass").mkdir(exist_ok=True)
        mask.save(root / f"SegmentationClass/p{number}.png")
    lists = root / "ImageSets/Segmentation"
    lists.mkdir(parents=True)
    (lists / "train.txt").write_text("p0\np1\n")
    (lists / "val.txt").write_text("p2\np3\n")
    (lists / "test.txt").write_text("")
    found = find_scenes(tmp_path)
    assert (found.images.name, found.masks.name) == ("JPEGImages", "SegmentationClass")
    made = CliRunner().invoke(
        app, ["pack", "segmentation", str(tmp_path), str(tmp_path / "s"), "--size", "8",
              "--class-names", "ground, water"]
    )  # fmt: skip
    assert made.exit_code == 0, made.output
    with open_store(tmp_path / "s") as store:
        assert store.read_rows("split", 0, 4).tolist() == [0, 0, 1, 1]
        assert store.manifest.attributes["classes"] == ["ground", "water"]


@pytest.mark.parametrize(
    ("name", "split"),
    [("train2017", "train"), ("training_set", "training"), ("seg_test", "test"), ("Val", "val"),
     ("test tube", None), ("train-test", None), ("street", None), ("2017", None)],
)  # fmt: skip
def test_names_of_splits(name, split):
    assert find_split(name) == split


def test_folders_of_splits_are_no_classes(tmp_path):
    for part in ("train2017", "val2017"):
        picture(tmp_path / "flat" / part / "a.jpg")
    coco(tmp_path / "flat/annotations/instances_val2017.json", ["a.jpg"], [(7, SQUARE, 1)])
    for name in ("seg_train", "seg_test", "seg_pred"):
        picture(tmp_path / "intel" / name / "forest" / "a.jpg")
    for name in ("JPEGImages", "SegmentationClass"):
        picture(tmp_path / "voc" / name / "a.jpg")
    for folder, said in (
        ("flat", "segmentation"),
        ("intel", "intel/seg_train"),
        ("voc", "segmentation"),
    ):
        with pytest.raises(SourceError) as told:
            ImagesSource((8, 8), folder=tmp_path / folder).prepare(tmp_path)
        assert said in told.value.fix
    for part in ("training_set", "test_set"):
        for kind in ("cats", "dogs"):
            picture(tmp_path / "twice" / part / part / kind / "a.jpg")
    made = ImagesSource((8, 8), folder=tmp_path / "twice").prepare(tmp_path)
    assert made.parts[0].payload.classes == ["cats", "dogs"]
    assert [item[2] for item in made.parts[0].payload.items] == [2, 2, 0, 0]
    assert split_of(["train", "car"]) == {}


def test_labels_without_a_header_and_names_that_repeat(tmp_path):
    for folder in ("left", "right"):
        for name in ("1.jpg", "2.jpg"):
            picture(tmp_path / "data" / folder / name)
    names = [f"{folder}/{name}" for folder in ("left", "right") for name in ("1.jpg", "2.jpg")]
    (tmp_path / "bare.csv").write_text("left/1.jpg,cat\nleft/2.jpg,dog\nright/1,cat\n")
    made = read_labels(tmp_path / "bare.csv", names)
    assert made.label == {"left/1.jpg": 0, "left/2.jpg": 1, "right/1.jpg": 0}
    assert any("no header" in note for note in made.notes)
    rows = [
        "side,file,label",
        *(f"{n.split('/')[0]},{n.split('/')[1]},k{i}" for i, n in enumerate(names)),
    ]
    (tmp_path / "two.csv").write_text("\n".join(rows))
    made = read_labels(tmp_path / "two.csv", names, "label")
    assert made.label == {name: place for place, name in enumerate(names)}
    assert not made.refused
