"""Pictures in memory are answered as their files are, or have a reason."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from PIL import Image

from stoker.recipes.images.recipe import PictureReader
from stoker.recipes.pictures import given_pictures
from stoker.recipes.segmentation.masks import ScenePictures


def read(given, channels=3, value_range=None):
    """Return the keys, the pixels and the reasons of pictures."""
    facts = {"size": (6, 5), "channels": channels, "value_range": value_range}
    reader = PictureReader.open(given, facts | {"first_frame": False}, 2)
    batches = list(reader)
    keys = [key for batch in batches for key in batch.keys.tolist()]
    pixels = torch.cat([batch.batch["images"] for batch in batches])
    return reader.key, keys, pixels, [reason for batch in batches for reason in batch.reasons]


@pytest.fixture
def drawn(tmp_path):
    """Return three pictures as an array, and the paths of their files."""
    pixels = np.random.default_rng(0).integers(0, 256, (3, 6, 5, 3), dtype=np.uint8)
    paths = [tmp_path / f"{place}.png" for place in range(3)]
    for path, each in zip(paths, pixels, strict=True):
        Image.fromarray(each).save(path)
    return pixels, paths


def test_every_kind_of_picture_in_memory_is_the_picture_of_its_file(drawn):
    pixels, paths = drawn
    want = read(paths)[2]
    assert torch.equal(want, torch.from_numpy(pixels).movedim(-1, 1))
    first = np.moveaxis(pixels, -1, 1)
    for what, given in {
        "an array": pixels,
        "channels first": first,
        "a tensor": torch.from_numpy(first.copy()),
        "floats": torch.from_numpy(first / 255.0),
        "arrays": list(pixels),
        "images": [Image.open(path) for path in paths],
        "mixed": [paths[0], pixels[1], Image.open(paths[2])],
        "objects": np.array([str(path) for path in paths], dtype=object),
    }.items():
        key, keys, found, reasons = read(given)
        assert torch.equal(found, want), what
        assert reasons == [None] * 3
        is_paths = what == "objects"
        assert (key, keys) == (("file", list(map(str, paths))) if is_paths else ("row", [0, 1, 2]))
    key, keys, found, _ = read({"a": pixels[0], "b": pixels[1]})
    assert (key, keys) == ("file", ["a", "b"])
    assert torch.equal(found, want[:2])
    for one in (pixels[0], Image.fromarray(pixels[0]), torch.from_numpy(first[0].copy())):
        assert torch.equal(read(one)[2], want[:1])


def test_grey_deep_and_turned_pictures_follow_the_rule_of_files(tmp_path):
    grey = np.arange(30, dtype=np.uint8).reshape(6, 5)
    assert read(grey, channels=1)[2].flatten().tolist() == grey.flatten().tolist()
    assert read(grey > 9, channels=1)[2].unique().tolist() == [0, 255]
    deep = (grey.astype(np.uint16) * 1000).reshape(6, 5)
    Image.fromarray(deep).save(tmp_path / "deep.png")
    assert torch.equal(read(deep, 1)[2], read([tmp_path / "deep.png"], 1)[2])
    ranged = read(grey.astype(np.float32), 1, (0.0, 255.0))[2]
    assert ranged.flatten().tolist() == grey.flatten().tolist()
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(grey.T.copy()).save(tmp_path / "turned.jpg", exif=exif, quality=100)
    with Image.open(tmp_path / "turned.jpg") as opened:
        assert torch.equal(read(opened, 1)[2], read([tmp_path / "turned.jpg"], 1)[2])


def test_what_is_no_picture_has_a_reason_and_what_may_be_none_is_not_taken():
    good = np.zeros((6, 5, 3), np.uint8)
    strange = [
        good,
        np.zeros((6, 5, 7), np.uint8),
        np.full((6, 5, 3), 7.0),
        np.zeros((6, 5, 3), np.int64),
        np.zeros(4, np.uint8),
    ]
    reasons = read(strange)[3]
    assert reasons[0] is None
    assert "shape (6, 5, 7)" in reasons[1]
    assert "float values from 7 to 7" in reasons[2]
    assert "int64" in reasons[3]
    assert "shape (4,)" in reasons[4]
    for given in ([1, 2], 3, {"a": [1.0]}, None):
        assert given_pictures(given) is None


def test_masks_are_made_of_pictures_in_memory(drawn):
    pixels, paths = drawn
    facts = {"size": (6, 5), "channels": 3, "value_range": None, "first_frame": False}
    facts["original_sizes"] = None
    made = [
        list(ScenePictures.open(given, facts, 2, is_table=True)) for given in (list(pixels), paths)
    ]
    for one, other in zip(*made, strict=True):
        assert torch.equal(one.batch["images"], other.batch["images"])
    assert [key for batch in made[0] for key in batch.keys.tolist()] == [0, 1, 2]


def test_pictures_in_other_units_are_told(tmp_path):
    """A float picture from 0 to 1 is black where training had a camera's 0 to 4095."""
    shades = np.linspace(0, 1, 30, dtype=np.float32).reshape(6, 5)
    Image.fromarray(shades).save(tmp_path / "float.tif")
    Image.fromarray((shades * 4095).astype(np.uint16)).save(tmp_path / "good.tif")
    Image.fromarray(np.zeros((6, 5), np.uint16)).save(tmp_path / "lens_cap.tif")
    facts = {"size": (6, 5), "channels": 1, "value_range": (0.0, 4095.0), "first_frame": False}
    reader = PictureReader.open(tmp_path, facts, 3)
    assert reader is not None
    assert len(list(reader)) == 1
    (note,) = reader.notes()
    assert note == (
        "1 picture of one grey in the value range of training: other units? float.tif with values 0 to 1"
    )


def test_a_file_that_is_no_picture_is_left_to_the_error_and_gets_no_row(tmp_path):
    table, odd = tmp_path / "rows.csv", tmp_path / "scan.dat"
    table.write_text("a,b\n1,2\n")
    Image.new("L", (4, 3)).save(odd, format="PNG")
    assert given_pictures(table) is None
    assert given_pictures(str(table)) is None
    assert len(given_pictures(odd).keys) == 1
    assert len(given_pictures([odd, table]).keys) == 2, "in a list it has a row with its reason"


def test_names_that_are_not_utf8_are_escaped_in_answers(tmp_path):
    strange = tmp_path / os.fsdecode(b"\xff.png")
    Image.new("L", (5, 6)).save(tmp_path / "x.png")
    strange.write_bytes((tmp_path / "x.png").read_bytes())
    _, keys, found, reasons = read(tmp_path)
    assert (sorted(keys), len(found), reasons) == (["\\udcff.png", "x.png"], 2, [None, None])
