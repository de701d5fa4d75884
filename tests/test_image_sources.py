"""`pack images` and `pack segmentation`."""

from __future__ import annotations

import shlex
from dataclasses import replace

import numpy as np
import pytest

from stoker.errors import InputError, QualityError, SourceError
from stoker.packing import PackOptions, pack
from stoker.sources.images import ImagesSource, SegmentationSource, parse_size
from stoker.store.reader import open_store

Image = pytest.importorskip("PIL.Image", reason="Pillow is not installed (extra 'vision')")
ONE = PackOptions(jobs=1)


@pytest.fixture
def classes(tmp_path):
    rng = np.random.default_rng(0)
    for name in ("bird", "cat"):
        (tmp_path / "in" / name).mkdir(parents=True)
        for number in range(3):
            pixels = rng.integers(0, 256, (10, 12, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "in" / name / f"{number}.png")
    return tmp_path / "in"


def test_images_of_the_right_size_are_stored_bit_for_bit(classes, tmp_path):
    pack(ImagesSource((10, 12), 3, classes), tmp_path / "s", ONE)
    with open_store(tmp_path / "s") as store:
        assert store.manifest.attributes["classes"] == ["bird", "cat"]
        assert store.read_rows("labels", 0, 6).tolist() == [0, 0, 0, 1, 1, 1]
        for index in range(6):
            name = store.read_text("name", index).rpartition("/")[2]
            pixels = np.asarray(Image.open(classes / ("bird", "cat")[index // 3] / name))
            assert (
                store.read_rows("images", index, index + 1)[0] == pixels.transpose(2, 0, 1)
            ).all()


def test_resizing_palettes_grey_alpha_and_exif(classes, tmp_path):
    upright = np.zeros((8, 4, 3), np.uint8)
    upright[0] = 255
    exif = Image.Exif()
    exif[0x0112] = 6  # stored lying on its side
    Image.fromarray(np.rot90(upright)).save(classes / "cat" / "exif.png", exif=exif)
    Image.new("P", (5, 5)).save(classes / "cat" / "palette.png")
    Image.new("RGBA", (5, 5), (255, 0, 0, 128)).save(classes / "cat" / "alpha.png")
    Image.new("L", (5, 5), 7).save(classes / "cat" / "grey.png")
    pack(ImagesSource((8, 4), 3, classes), tmp_path / "s", ONE)
    with open_store(tmp_path / "s") as store:
        names = [store.read_text("name", i).rpartition("/")[2] for i in range(store.num_samples)]
        assert store.fields["images"].shape == [3, 8, 4]
        exif_image = store.read_rows(
            "images", names.index("exif.png"), names.index("exif.png") + 1
        )[0]
        assert exif_image[0, 0].tolist() == [255] * 4
        assert exif_image[0, 1:].max() == 0
        assert (
            store.read_rows("images", names.index("grey.png"), names.index("grey.png") + 1) == 7
        ).all()


def test_a_broken_image_is_refused_with_its_name(classes, tmp_path):
    (classes / "cat" / "broken.jpg").write_bytes(b"\xff\xd8\xff\xe0 not a jpeg")
    whole = (classes / "cat" / "0.png").read_bytes()
    (classes / "cat" / "cut.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(QualityError, match=r"(?s)broken\.jpg.*cut\.png"):
        pack(ImagesSource((10, 12), 3, classes), tmp_path / "s", ONE)
    options = PackOptions(jobs=1, on_bad="quarantine", bad_budget="30%")
    assert (
        pack(ImagesSource((10, 12), 3, classes), tmp_path / "s", options).manifest.num_samples == 6
    )


def test_masks_keep_their_values_when_resized(tmp_path):
    rng = np.random.default_rng(1)
    for folder in ("images", "masks"):
        (tmp_path / folder).mkdir()
    for number in range(3):
        Image.fromarray(rng.integers(0, 256, (20, 30, 3), dtype=np.uint8)).save(
            tmp_path / "images" / f"{number}.png"
        )
        Image.fromarray(rng.choice([0, 5, 11], (20, 30)).astype(np.uint8)).save(
            tmp_path / "masks" / f"{number}.png"
        )
    source = SegmentationSource((13, 17), 3, tmp_path / "images", tmp_path / "masks")
    pack(source, tmp_path / "s", ONE)
    with open_store(tmp_path / "s") as store:
        assert store.manifest.attributes["mask_values"] == [0, 5, 11]
        assert set(np.unique(store.read_rows("masks", 0, 3))) == {0, 5, 11}
        assert store.fields["masks"].shape == [13, 17]


def test_pairs_that_do_not_match_are_refused(tmp_path):
    for folder in ("images", "masks"):
        (tmp_path / folder).mkdir()
    for name in ("a", "b", "c"):
        Image.new("RGB", (8, 8)).save(tmp_path / "images" / f"{name}.png")
    Image.new("L", (8, 8), 1).save(tmp_path / "masks" / "a.png")
    Image.new("L", (9, 8), 1).save(tmp_path / "masks" / "b.png")
    Image.new("L", (8, 8), 1).save(tmp_path / "masks" / "z.png")
    source = SegmentationSource((8, 8), 3, tmp_path / "images", tmp_path / "masks")
    result = pack(
        source, tmp_path / "s", PackOptions(jobs=1, on_bad="quarantine", bad_budget="90%")
    )
    reasons = " ".join(str(refusal) for refusal in result.refused)
    for expected in (
        "c.png: there is no mask",
        "z.png: there is no image",
        "b.png is (9, 8) but its image is (8, 8)",
    ):
        assert expected in reasons
    assert result.manifest.num_samples == 1


def test_the_real_camvid_pairs_pack(shared_data, tmp_path):
    folder = shared_data / "segmentation"
    pack(
        SegmentationSource((360, 480), 3, folder / "images", folder / "masks"),
        tmp_path / "s",
        PackOptions(jobs=2),
    )
    with open_store(tmp_path / "s") as store:
        assert store.num_samples == 30
        assert max(store.manifest.attributes["mask_values"]) == 11
        name = store.read_text("name", 4)
        pixels = np.asarray(Image.open(folder / "images" / name)).transpose(2, 0, 1)
        assert (store.read_rows("images", 4, 5)[0] == pixels).all()


@pytest.mark.parametrize("text", ["", "x", "12y", "1x2x3", "-3"])
def test_sizes_that_are_none(text):
    with pytest.raises(InputError, match="as a size"):
        parse_size(text)


def test_sizes_and_folders():
    assert parse_size("512") == (512, 512)
    assert parse_size("360x480") == (360, 480)
    with pytest.raises(InputError, match="image size"):
        ImagesSource((0, 5))


def test_empty_folders_are_named(tmp_path):
    (tmp_path / "in").mkdir()
    with pytest.raises(SourceError, match="no class folders"):
        pack(ImagesSource((8, 8), 3, tmp_path / "in"), tmp_path / "s", ONE)
    (tmp_path / "in" / "cat").mkdir()
    with pytest.raises(SourceError, match="holds no images"):
        pack(ImagesSource((8, 8), 3, tmp_path / "in"), tmp_path / "s", ONE)


def test_masks_of_0_and_255_are_never_trained_as_one_class(tmp_path):
    from stoker.recipes.segmentation.recipe import SegmentationOptions, find_classes
    from stoker.store.fields import Dense
    from store_makers import write_store

    masks = np.zeros((4, 6, 6), np.uint8)
    masks[:, :3] = 255
    fields = {"images": Dense(np.zeros((4, 3, 6, 6), np.uint8)), "masks": Dense(masks)}
    with (
        write_store(tmp_path / "s", [fields]) as store,
        pytest.raises(InputError, match="0 and 255 only"),
    ):
        find_classes(store, SegmentationOptions())


def test_classes_that_lie_several_folders_deeper_are_no_single_class(tmp_path):
    """As an archive is unpacked: all pictures became one class, which has the archive's name."""
    for name in ("cat", "dog"):
        (tmp_path / "in" / "set-1.2" / "Images" / name).mkdir(parents=True)
        Image.new("L", (4, 4)).save(tmp_path / "in" / "set-1.2" / "Images" / name / "1.png")
    (tmp_path / "in" / "set-1.2" / "README.md").write_text("text")
    with pytest.raises(SourceError, match="Images': cat, dog") as refused:
        ImagesSource((4, 4), 1, tmp_path / "in").prepare(tmp_path)
    assert refused.value.fix.endswith(f"{tmp_path / 'in' / 'set-1.2' / 'Images'} OUT")


def test_a_single_class_is_told_with_the_table_beside_it(tmp_path):
    (tmp_path / "images").mkdir()
    Image.new("L", (4, 4)).save(tmp_path / "images" / "1.png")
    (tmp_path / "train.csv").write_text("image,label\\n1.png,3\\n")
    (note,) = ImagesSource((4, 4), 1, tmp_path).prepare(tmp_path).notes
    assert "one class, 'images'" in note
    assert f"--labels {tmp_path / 'train.csv'}" in note


@pytest.mark.parametrize(
    ("image", "mask", "typed"),
    [
        ("{}.png", "{}_mask.png", {"mask_suffix": "_mask"}),
        ("{}_sat.jpg", "{}_label.png", {"mask_suffix": "_label", "image_suffix": "_sat"}),
        ("{}_image.png", "{}_gt.png", {"mask_suffix": "_gt", "image_suffix": "_image"}),
    ],
)
def test_images_and_masks_in_one_folder_are_told_apart_by_a_word(tmp_path, image, mask, typed):
    for number in range(12):
        Image.new("L", (4, 4)).save(tmp_path / image.format(f"p{number}"))
        Image.new("L", (4, 4), number % 2).save(tmp_path / mask.format(f"p{number}"))
    source = SegmentationSource((4, 4), 1, tmp_path, tmp_path)
    with pytest.raises(SourceError, match="12 of 24 images find a mask") as refused:
        source.prepare(tmp_path)
    words = shlex.split(refused.value.fix)
    named = {
        name[2:].replace("-", "_"): value
        for name, value in zip(words[::2], words[1::2], strict=True)
    }
    assert named == typed
    assert sum(part.num_samples for part in replace(source, **typed).prepare(tmp_path).parts) == 12


def test_labels_behind_a_space(tmp_path):
    """As lists of ImageNet and Caffe have them; a name may have spaces too."""
    (tmp_path / "in").mkdir()
    for name in ("a 1.png", "b.png", "c.png"):
        Image.new("L", (4, 4)).save(tmp_path / "in" / name)
    (tmp_path / "val.txt").write_text("a 1.png 3\nb.png 17\nc.png 3\n")
    source = ImagesSource((4, 4), 1, tmp_path / "in", tmp_path / "val.txt")
    with open_store(pack(source, tmp_path / "s", ONE).path) as store:
        assert store.manifest.attributes["classes"] == ["3", "17"]
        assert store.read_rows("labels", 0, 3).tolist() == [0, 1, 0]
