"""Names, labels, maps and damaged pictures, whatever is in them: an answer, or an error with a name."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stoker.errors import InputError, StokerError
from stoker.sources.images.decoding import decode, to_pixels
from stoker.sources.images.labels import NameIndex, read_labels, read_lists
from stoker.sources.images.listing import list_pictures
from stoker.sources.images.masks import (
    MaskMap,
    check_values,
    classes_of,
    parse_mask_map,
    read_colour_table,
)
from stoker.sources.images.pairing import NO_IMAGE, Affixes, divide, pair_names, suggest

Image = pytest.importorskip("PIL.Image", reason="Pillow is not installed (extra 'vision')")

STEMS = st.sampled_from(["a", "b", "c", "a_L", "b_L", "a_mask", "a_mask_1", "mask_a", "x1", "x2"])
PATHS = st.builds(
    lambda folder, stem, ending: f"{folder}{stem}{ending}",
    st.sampled_from(["", "train/", "val/", "a/", "a/images/", "a/masks/", "masks/a/", "p/q/"]),
    STEMS,
    st.sampled_from([".png", ".jpg", ".tif"]),
)
AFFIXES = st.sampled_from(
    [
        Affixes(),
        Affixes("_L"),
        Affixes("_mask"),
        Affixes(mask_prefix="mask_"),
        Affixes("_L", "_mask"),
    ]
)


@given(images=st.sets(PATHS, max_size=12), masks=st.sets(PATHS, max_size=12), affixes=AFFIXES)
def test_every_file_is_in_one_pair_or_refused_or_ignored(images, masks, affixes):
    made = pair_names(sorted(images), sorted(masks), affixes)
    paired = [image for image, _ in made.pairs]
    used = [mask for _, names in made.pairs for mask in names]
    assert len(set(paired)) == len(paired)
    assert len(set(used)) == len(used)
    refused_images = [each.file for each in made.refused if each.kind != NO_IMAGE]
    refused_masks = [each.file for each in made.refused if each.kind == NO_IMAGE]
    assert not {*paired} & {*refused_images}
    assert not {*used} & {*refused_masks}
    left = sum(made.ignored.values())
    # A mask whose image is refused goes with it: it is counted in `num_masks`.
    assert len(paired) + len(refused_images) + made.num_masks + len(refused_masks) + left == len(
        images
    ) + len(masks)


@given(pictures=st.sets(PATHS, max_size=12), affixes=AFFIXES)
def test_a_folder_with_both_is_divided_without_loss(pictures, affixes):
    images, masks = divide(sorted(pictures), affixes)
    assert sorted(images + masks) == sorted(pictures)


@given(
    stems=st.sets(st.text("abc12", min_size=1, max_size=6), min_size=1, max_size=8),
    suffix=st.text("_-LM", min_size=1, max_size=4),
    is_prefix=st.booleans(),
)
def test_a_suffix_that_all_masks_have_is_found_and_works(stems, suffix, is_prefix):
    images = [f"{stem}.png" for stem in sorted(stems)]
    masks = [
        f"{suffix}{stem}.png" if is_prefix else f"{stem}{suffix}.png" for stem in sorted(stems)
    ]
    found = suggest(images, masks)
    assert found is not None
    affixes, hits, looked_at = found
    assert hits == looked_at == len(images)
    assert len(pair_names(images, masks, affixes).pairs) == len(images)


@given(text=st.text("0123456789-=,#abf othrkep", max_size=24))
@example("255=1")
@example("99999=1")
def test_a_map_is_read_or_refused(text):
    try:
        made = parse_mask_map([text])
    except InputError:
        return
    assert made is None or isinstance(made, MaskMap)
    for low, high, number in (made or MaskMap()).values:
        assert 0 <= low <= 65535
        assert high <= 65535
        assert 0 <= number <= 255


@given(
    values=st.lists(st.integers(0, 255), min_size=1, max_size=20),
    mapped=st.dictionaries(st.integers(0, 255), st.integers(0, 255), max_size=6),
    other=st.none() | st.integers(0, 255),
)
def test_a_map_does_to_each_pixel_what_it_says(values, mapped, other):
    chosen = MaskMap(tuple((value, value, number) for value, number in mapped.items()), (), other)
    image = Image.fromarray(np.array([values], dtype=np.uint8))
    expected = [mapped.get(value, value if other is None else other) for value in values]
    try:
        made = classes_of(image, "PNG", Path("m.png"), chosen)
    except StokerError:
        # Refused only where a value that is not named would fall on a class that another is mapped to.
        assert other is None
        assert any(value not in mapped and value in mapped.values() for value in values)
        return
    assert made.tolist() == [expected]


@given(st.binary(max_size=200) | st.text("rgb,0123456789 \n#ab", max_size=80).map(str.encode))
def test_a_colour_table_is_read_or_refused(tmp_path_factory, raw):
    path = tmp_path_factory.mktemp("table") / "colors.csv"
    path.write_bytes(raw)
    try:
        made = read_colour_table(path)
    except StokerError:
        return
    assert all(0 <= colour <= 0xFFFFFF and 0 <= number <= 255 for colour, number in made.colours)
    assert len(made.names) == max(number for _, number in made.colours) + 1


@given(
    st.binary(max_size=200)
    | st.text('imagelbx,;\t\n"0123.png', max_size=120).map(str.encode)
    | st.lists(
        st.sampled_from(["a,cat", "b.png,dog", "x/c,cat", "zz,dog", "a,dog", ",,", "a,"])
    ).map(lambda rows: "\n".join(["name,label", *rows]).encode())
)
def test_labels_are_read_or_refused(tmp_path_factory, raw):
    path = tmp_path_factory.mktemp("labels") / "labels.csv"
    path.write_bytes(raw)
    pictures = ["a.png", "b.png", "x/c.jpg", "y/c.jpg"]
    try:
        made = read_labels(path, pictures)
    except StokerError:
        return
    assert set(made.label) <= set(pictures)
    assert all(0 <= number < len(made.classes) for number in made.label.values())
    assert all(refusal.kind and refusal.line for refusal in made.refused)


@given(
    st.lists(st.sampled_from(["a", "b.png", "./x/c.jpg", "/root/a.png 3", "c", "none", " ", "y/c"]))
)
def test_lists_name_pictures_or_are_refused_line_by_line(tmp_path_factory, lines):
    path = tmp_path_factory.mktemp("lists") / "train.txt"
    path.write_text("\n".join(lines))
    split, refused = read_lists([("train", path)], ["a.png", "b.png", "x/c.jpg", "y/c.jpg"])
    assert set(split.values()) <= {0}
    wrong = [line for line in lines if line in ("c", "none")]
    assert len(refused) == len(wrong)


def test_a_name_that_two_pictures_have_is_ambiguous():
    index = NameIndex(["x/c.jpg", "y/c.jpg", "d.png", "d.jpg"])
    assert index.find("x/c.jpg") == ["x/c.jpg"]
    assert len(index.find("c")) == len(index.find("d")) == 2


def test_a_link_that_leads_back_ends_the_walk(tmp_path):
    (tmp_path / "in" / "cat").mkdir(parents=True)
    (tmp_path / "in" / "cat" / "loop").symlink_to(tmp_path / "in")
    Image.new("L", (2, 2)).save(tmp_path / "in" / "cat" / "0.png")
    (tmp_path / "in" / "kitten").symlink_to(tmp_path / "in" / "cat")
    listing = list_pictures(tmp_path / "in")
    assert listing.pictures == ["cat/0.png"]
    assert listing.ignored == {"in a folder that a link shows twice": 1}


def _file(mode: str, form: str) -> bytes:
    buffer = io.BytesIO()
    Image.new(mode, (9, 7), 3).save(buffer, form)
    return buffer.getvalue()


WHOLE = [
    _file("L", "PNG"),
    _file("P", "GIF"),
    _file("RGB", "JPEG"),
    _file("I;16", "TIFF"),
    _file("F", "TIFF"),
    _file("RGBA", "PNG"),
    _file("CMYK", "JPEG"),
    _file("RGB", "WEBP"),
]


@given(
    whole=st.sampled_from(WHOLE),
    changes=st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), min_size=1, max_size=6),
    cut=st.none() | st.integers(0, 400),
)
def test_a_damaged_picture_is_decoded_or_refused(tmp_path_factory, whole, changes, cut):
    raw = bytearray(whole[:cut])
    for place, value in changes:
        if raw:
            raw[place % len(raw)] = value
    path = tmp_path_factory.getbasetemp() / "damaged.png"
    path.write_bytes(raw)
    try:
        pixels = to_pixels(decode(path), path, (4, 5), 3)
    except StokerError:
        return
    assert pixels.values.shape == (4, 5, 3)
    assert pixels.values.dtype == np.uint8


@pytest.mark.parametrize(
    ("values", "is_refused"),
    [
        ([0, 1, 2, 255], False),
        ([0, 1, 15, 255], False),
        (list(range(34)), False),
        ([0, 255], True),
        ([255], True),
        ([0, 128], True),
        ([0, 85, 170, 255], True),
    ],
)
def test_grey_levels_are_told_from_classes(values, is_refused):
    pixels = dict.fromkeys(values, 9)
    if is_refused:
        with pytest.raises(StokerError, match="--mask-map"):
            check_values(pixels)
    else:
        check_values(pixels)
