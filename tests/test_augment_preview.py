"""`stoker augment preview` and the pictures of the docs: what is read, what is drawn, what is refused."""

from __future__ import annotations

import errno
import json
import re
from pathlib import Path

import numpy as np
import pytest
from docs_build.pictures import SIZE, draw_scene, write_pictures
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from kept_commands import invoke
from stoker.augment.compose import Compose
from stoker.augment.geometry import RandomCrop, RandomHorizontalFlip, RandomRotation
from stoker.augment.preview import (
    Sample,
    check_output,
    draw_columns,
    make_preview,
    read_samples,
    shown_size,
    write_png,
)
from stoker.augment.sheet import GAP, STRIP, Line, class_colour, colour_mask, make_sheet
from stoker.errors import InputError, MissingExtraError, SourceError
from stoker.ownership import SIGNATURE
from stoker.packing import pack
from stoker.sources.images import SegmentationSource

REPOSITORY = Path(__file__).resolve().parent.parent


def run(*args: object, code: int = 0) -> str:
    """Run the command line; errors of ours are returned as text, with their exit code checked."""
    result = invoke(*args)
    got = getattr(result.exception, "exit_code", result.exit_code)
    assert got == code, (got, result.output, result.exception)
    return result.output + str(result.exception or "")


def pixels(path: Path) -> np.ndarray:
    with Image.open(path) as opened:
        return np.asarray(opened.convert("RGB"), dtype=np.int64)


@pytest.fixture
def street(tmp_path) -> Path:
    """Three images of 24 x 32 with masks; the red of every image is its mask times 20."""
    rng = np.random.default_rng(0)
    for name in ("images", "masks"):
        (tmp_path / name).mkdir()
    for number in range(3):
        mask = rng.integers(0, 6, (24, 32), dtype=np.uint8)
        image = np.stack([mask * 20, rng.integers(0, 256, (24, 32), dtype=np.uint8), mask * 0], -1)
        Image.fromarray(image).save(tmp_path / "images" / f"{number}.png")
        Image.fromarray(mask).save(tmp_path / "masks" / f"{number}.png")
    return tmp_path


def test_a_folder_is_read_in_order_with_its_masks(street):
    samples = read_samples(street / "images", street / "masks", 2, None)
    assert [sample.name for sample in samples] == ["0.png", "1.png"]
    for sample in samples:
        assert sample.image.shape == (24, 32, 3)
        assert sample.mask is not None
        assert (sample.image[..., 0] == sample.mask * 20).all()


def test_one_image_and_one_mask(street):
    (sample,) = read_samples(street / "images/1.png", street / "masks/1.png", 4, (12, 16))
    assert sample.image.shape == (12, 16, 3)
    assert sample.mask is not None
    assert set(np.unique(sample.mask)) <= set(range(6)), "a mask is never interpolated"


def test_a_store_brings_its_own_masks(street):
    source = SegmentationSource(size=(24, 32), images=street / "images", masks=street / "masks")
    pack(source, street / "store")
    samples = read_samples(street / "store", None, 9, None)
    files = read_samples(street / "images", street / "masks", 9, None)
    assert len(samples) == 3
    for stored, file in zip(samples, files, strict=True):
        assert (stored.image == file.image).all()
        assert (stored.mask == file.mask).all()
    with pytest.raises(InputError, match="a store holds its own masks"):
        read_samples(street / "store", street / "masks", 3, None)
    with pytest.raises(InputError, match="24x32"):
        read_samples(street / "store", None, 3, (12, 12))


def test_a_store_without_images_says_what_it_has(tmp_path):
    np.save(tmp_path / "features.npy", np.ones((8, 4), "f4"))
    from stoker.sources.arrays import ArraysSource

    pack(ArraysSource((tmp_path / "features.npy",)), tmp_path / "store")
    with pytest.raises(InputError, match=r"no field images.*features"):
        read_samples(tmp_path / "store", None, 2, None)


def test_bad_images_and_masks_are_named(street, tmp_path):
    with pytest.raises(SourceError, match="does not exist"):
        read_samples(street / "nothing", None, 1, None)
    (street / "empty").mkdir()
    with pytest.raises(SourceError, match="holds no images"):
        read_samples(street / "empty", None, 1, None)
    (street / "note.png").write_text("not an image")
    with pytest.raises(SourceError, match=r"note\.png cannot be opened as an image"):
        read_samples(street / "note.png", None, 1, None)
    (street / "masks/2.png").unlink()
    with pytest.raises(InputError, match=r"no mask for 2\.png"):
        read_samples(street / "images", street / "masks", 3, None)
    Image.new("RGB", (32, 24)).save(street / "masks/2.png")
    with pytest.raises(SourceError, match="RGB, not one value per pixel"):
        read_samples(street / "images", street / "masks", 3, None)
    Image.new("L", (16, 24)).save(street / "masks/2.png")
    with pytest.raises(SourceError, match=r"16x24 and 2\.png is 32x24"):
        read_samples(street / "images", street / "masks", 3, None)
    with pytest.raises(InputError, match="one file for 3 images"):
        read_samples(street / "images", street / "masks/0.png", 3, None)


@given(st.integers(1, 9000), st.integers(1, 9000))
def test_shown_images_fit_and_keep_their_shape(height, width):
    shown = shown_size((height, width))
    assert 1 <= max(shown) <= 384
    assert min(shown) >= 1
    if max(height, width) <= 384:
        assert shown == (height, width)
    else:
        assert max(shown) == 384
        assert abs(shown[0] * width - shown[1] * height) <= max(height, width)


@given(st.integers(0, 255), st.integers(0, 300))
def test_the_ignore_index_cannot_be_taken_for_a_class(ignore, other):
    mask = np.full((16, 16), ignore, np.int64)
    mask[:8] = other
    shown = colour_mask(mask, ignore)
    assert len(np.unique(shown[8:].reshape(-1, 3), axis=0)) == 2, "hatched: two shades"
    if other != ignore:
        assert len(np.unique(shown[:8].reshape(-1, 3), axis=0)) == 1
        assert tuple(shown[0, 0]) == class_colour(min(other, 255))


def test_the_first_classes_differ_from_each_other():
    colours = [class_colour(number) for number in range(20)]
    assert len(set(colours)) == 20
    apart = [
        sum(abs(a - b) for a, b in zip(first, second, strict=True))
        for number, first in enumerate(colours)
        for second in colours[:number]
    ]
    assert min(apart) > 30


def test_tiles_stand_where_they_belong():
    red = np.full((10, 12, 3), (200, 10, 10), np.uint8)
    blue = np.full((6, 8, 3), (10, 10, 200), np.uint8)
    sheet = np.asarray(make_sheet([Line([red, blue], "names"), Line([blue])], ["a", "b"], "end"))
    assert sheet.shape == (
        GAP + STRIP + STRIP + 10 + GAP + 6 + GAP + STRIP,
        2 * (12 + GAP) + GAP,
        3,
    )
    top = GAP + STRIP + STRIP
    assert (sheet[top : top + 10, GAP : GAP + 12] == red).all()
    left = GAP + 12 + GAP + 2
    assert (sheet[top + 2 : top + 8, left : left + 8] == blue).all(), "smaller tiles are centred"
    assert (sheet[top + 10 + GAP : top + 16 + GAP, GAP + 2 : GAP + 10] == blue).all()


def test_columns_are_the_steps_of_an_epoch_and_masks_follow():
    rng = np.random.default_rng(0)
    samples = []
    for _ in range(2):
        mask = rng.integers(0, 12, (16, 20))
        image = np.repeat((mask * 20).astype(np.uint8)[..., None], 3, axis=2)
        samples.append(Sample("x", image, mask))
    compose = Compose([RandomHorizontalFlip(0.5)], seed=5, backend="torch")
    draws = draw_columns(samples, compose, 12, 3)
    flipped = 0
    for images, masks in draws:
        for sample, image, mask in zip(samples, images, masks, strict=True):
            assert (image[..., 0] == mask * 20).all(), "image and mask got the same draw"
            flipped += bool((mask == sample.mask[:, ::-1]).all())
            assert (mask == sample.mask).all() or (mask == sample.mask[:, ::-1]).all()
    assert 0 < flipped < 24
    again = draw_columns(samples, compose, 12, 3)
    other = draw_columns(samples, compose, 12, 4)
    same = [np.array_equal(a[0][n], b[0][n]) for a, b in zip(draws, again, strict=True) for n in (0, 1)]  # fmt: skip
    moved = [np.array_equal(a[0][n], b[0][n]) for a, b in zip(draws, other, strict=True) for n in (0, 1)]  # fmt: skip
    assert all(same)
    assert not all(moved), "another epoch, other draws"


def test_a_preview_shows_the_original_and_hatches_corners():
    scene = draw_scene()
    compose = Compose([RandomRotation((30, 30))], backend="torch", ignore_index=255)
    sheet = np.asarray(make_preview([scene], compose, columns=3, epoch=0, ignore_index=255))
    height, width = SIZE
    top = GAP + STRIP + STRIP
    assert (sheet[top : top + height, GAP : GAP + width] == scene.image).all()
    corner = sheet[top + height + GAP :, GAP + width + GAP :][:8, :8]
    assert len(np.unique(corner.reshape(-1, 3), axis=0)) == 2, "the rotated-in corner is hatched"


def test_crops_make_smaller_tiles():
    compose = Compose([RandomCrop((40, 50))], backend="torch")
    ((images, masks),) = draw_columns([draw_scene()], compose, 1, 0)
    assert images[0].shape == (40, 50, 3)
    assert masks[0].shape == (40, 50)
    assert make_preview([draw_scene()], compose, columns=2, epoch=0, ignore_index=255).width > 256


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("images", "is a folder"),
        ("out.jpg", "does not end in .png"),
        ("nowhere/out.png", "does not exist"),
        ("fake.png", "is not a PNG"),
        ("images/new.png", "which images are read from"),
        ("images/0.png", "which images are read from"),
    ],
)
def test_nothing_but_an_older_picture_is_overwritten(street, name, words):
    (street / "fake.png").write_text("my notes")
    before = {path: path.read_bytes() for path in street.rglob("*") if path.is_file()}
    with pytest.raises(InputError, match=words):
        check_output(street / name, (street / "images", None))
    text = run("augment", "preview", street / "images", street / name, code=2)
    assert words in text
    assert "Allowed:" in text
    assert before == {path: path.read_bytes() for path in street.rglob("*") if path.is_file()}


def test_an_image_cannot_be_replaced_by_its_own_preview(street):
    with pytest.raises(InputError, match="which images are read from"):
        check_output(street / "images/0.png", (street / "images/0.png", None))
    check_output(street / "images/new.png", (street / "images/0.png", None))


def test_writing_is_all_or_nothing(tmp_path):
    class Broken:
        def save(self, path, **_):
            Path(path).write_bytes(b"half")
            raise OSError(errno.ENOSPC, "disk full")

    out = tmp_path / "p.png"
    older = f"older, {SIGNATURE}".encode()
    out.write_bytes(older)
    with pytest.raises(OSError, match=r"(?i)no space|disk full"):
        write_png(Broken(), out)
    assert out.read_bytes() == older
    assert list(tmp_path.iterdir()) == [out]


def test_the_verb_writes_a_picture_and_says_what_it_shows(street):
    out = street / "p.png"
    text = run(
        "augment", "preview", street / "images", out, "--masks", street / "masks",
        "--rows", 2, "--columns", 3, "--preset", "strong",
    )  # fmt: skip
    assert "2 images of 24x32, 2 draws each, strong" in text
    assert "GaussianBlur" in text
    with Image.open(out) as opened:
        size = opened.size
    assert size == (3 * (32 + GAP) + GAP, GAP + STRIP + 2 * (STRIP + 2 * (24 + GAP)) + STRIP)
    facts = json.loads(run("augment", "preview", street / "images", out, "--json"))
    assert facts["images"] == ["0.png", "1.png", "2.png"]
    assert facts["masks"] is False
    assert facts["augmentation"] == "standard"


def test_a_config_decides_what_is_shown(street):
    config = street / "c.yaml"
    config.write_text(
        "training: {use_gpu_augmentation: true}\n"
        "gpu_augmentation: {rotation_degrees: 45, horizontal_flip_prob: 0.25}\n"
    )
    out = street / "p.png"
    text = run("augment", "preview", street / "images", out, "--config", config)
    assert "RandomHorizontalFlip(p=0.25)" in text
    assert "45.0" in text
    config.write_text("training: {use_gpu_augmentation: false}\n")
    assert "use_gpu_augmentation: true" in run(
        "augment", "preview", street / "images", out, "--config", config, code=2
    )
    assert "one of them" in run(
        *("augment", "preview", street / "images", out, "--config", config, "--preset", "minimal"),
        code=2,
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--preset", "wild"], "--preset is 'wild'"),
        (["--rows", "0"], "--rows is 0"),
        (["--columns", "1"], "--columns is 1"),
        (["--seed", "-1"], "--seed is -1"),
        (["--size", "huge"], "cannot read 'huge' as a size"),
        (["--size", "1x9000"], "--size is 1x9000"),
        (["--masks", "nowhere"], "nowhere does not exist"),
    ],
)
def test_bad_options_end_with_code_2_and_no_picture(street, options, words):
    out = street / "p.png"
    assert words in run("augment", "preview", street / "images", out, *options, code=2)
    assert not out.exists()


def test_without_pillow_the_extra_is_named(street, monkeypatch):
    import builtins

    plain = builtins.__import__

    def no_pillow(name, *args, **kwargs):
        if name.split(".")[0] == "PIL":
            raise ImportError(name)
        return plain(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_pillow)
    with pytest.raises(MissingExtraError, match=r"\[vision\]"):
        read_samples(street / "images", None, 1, None)


def test_the_pictures_of_the_docs_are_made_by_this_code(tmp_path):
    written = {path.name: path for path in write_pictures(tmp_path)}
    page = (REPOSITORY / "docs/augmentation.md").read_text()
    shown = set(re.findall(r"\(images/augmentation/([a-z_]+\.png)\)", page))
    kept = {path.name: path for path in (REPOSITORY / "docs/images/augmentation").iterdir()}
    assert shown == set(written) == set(kept)
    assert sum(path.stat().st_size for path in kept.values()) < 400_000
    for name, path in written.items():
        new, old = pixels(path), pixels(kept[name])
        assert new.shape == old.shape, name
        # Fonts and palettes differ a little between versions of Pillow.
        assert np.abs(new - old).mean() < 2.0, f"{name}: run python -m docs_build.pictures"
