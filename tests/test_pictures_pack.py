"""`pack images|segmentation --keep-encoded`: the files' own bytes, checked by one decode; what is refused, by name."""

from __future__ import annotations

import io
import json
import re
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from stoker.cli.main import app
from stoker.errors import InputError, QualityError, SourceError
from stoker.packing import PackOptions, pack
from stoker.sources.images import ImagesSource, KeepEncoded, SegmentationSource, encoded
from stoker.sources.images.decoding import decode, to_pixels
from stoker.sources.images.encoded import decode_bytes, turned_pixels
from stoker.store.manifest import FORMAT_VERSION, read_manifest
from stoker.store.reader import open_store

Image = pytest.importorskip("PIL.Image", reason="Pillow is not installed (extra 'vision')")
ONE = PackOptions(jobs=1)
LENIENT = PackOptions(jobs=1, on_bad="quarantine", bad_budget="100%")


def smooth(height, width, seed=0):
    small = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


def opened(path):
    with Image.open(path) as image:
        image.load()
        return image.copy()


def jpeg(image, **options):
    file = io.BytesIO()
    image.save(file, "JPEG", quality=90, **options)
    return file.getvalue()


@pytest.fixture
def folder(tmp_path):
    for number in range(6):
        home = tmp_path / "in" / "ab"[number % 2]
        home.mkdir(parents=True, exist_ok=True)
        picture = smooth(40 + number, 60 - number, number)
        form = ("JPEG", "PNG", "WEBP")[number % 3]
        picture.save(home / f"{number}.{form.lower()}", form)
    return tmp_path / "in"


def packed(folder, out, keep=None, options=ONE):
    return pack(ImagesSource((8, 8), 3, folder, keep_encoded=keep or KeepEncoded()), out, options)


def test_files_are_kept_bit_for_bit_with_their_sizes(folder, tmp_path):
    packed(folder, tmp_path / "s")
    with open_store(tmp_path / "s") as store:
        assert store.fields["images"].encoding == "picture"
        assert store.num_samples == 6
        for index in range(6):
            name = store.read_text("name", index)
            assert bytes(store.read_values("images", index)) == (folder / name).read_bytes()
            height, width = store.read_rows("image_size", index, index + 1)[0]
            assert (width, height) == opened(folder / name).size
            pixels = decode_bytes(store.read_values("images", index), 3)
            expected = np.asarray(opened(folder / name).convert("RGB")).transpose(2, 0, 1)
            assert (pixels == expected).all()
    assert read_manifest(tmp_path / "s").format_version == FORMAT_VERSION == 2


def test_a_store_of_pixels_keeps_the_older_format(folder, tmp_path):
    pack(ImagesSource((8, 8), 3, folder), tmp_path / "raw", ONE)
    assert read_manifest(tmp_path / "raw").format_version == 1


def test_orientation_is_stored_and_turns_as_pillow_does(tmp_path):
    home = tmp_path / "in" / "a"
    home.mkdir(parents=True)
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        smooth(16, 24).save(home / f"{orientation}.png", exif=exif)
    packed(tmp_path / "in", tmp_path / "s")
    with open_store(tmp_path / "s") as store:
        from PIL import ImageOps

        for index in range(8):
            found = int(store.read_rows("image_orientation", index, index + 1)[0])
            with Image.open(home / f"{found}.png") as lying:
                shown = ImageOps.exif_transpose(lying)
            upright = turned_pixels(decode_bytes(store.read_values("images", index), 3), found)
            assert (upright == np.asarray(shown).transpose(2, 0, 1)).all()
            size = store.read_rows("image_size", index, index + 1)[0]
            assert tuple(size) == upright.shape[1:]


def bad_files():
    good = jpeg(smooth(40, 60))
    frames = io.BytesIO()
    smooth(9, 9).save(frames, "WEBP", save_all=True, append_images=[smooth(9, 9, 1)])
    deep = io.BytesIO()
    Image.fromarray(np.arange(64, dtype=np.uint16).reshape(8, 8) * 900).save(deep, "PNG")
    header = b"IHDR" + struct.pack(">IIBBBBB", 30000, 30000, 8, 2, 0, 0, 0)
    whole = io.BytesIO()
    Image.fromarray(np.arange(64, dtype=np.int32).reshape(8, 8)).save(whole, "TIFF")
    bomb = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + header
    bomb += struct.pack(">I", zlib.crc32(header)) + struct.pack(">I", 4) + b"IDATxxxx0000"
    return {
        "truncated.jpg": (good[: len(good) // 2], "cannot be decoded"),
        "ending.png": (good, "wrong ending"),
        "cmyk.jpg": (jpeg(smooth(9, 9).convert("CMYK")), "CMYK JPEG"),
        "progressive.jpg": (jpeg(smooth(40, 60), progressive=True), "progressive JPEG"),
        "deep.png": (deep.getvalue(), "16-bit values"),
        "whole.tif": (whole.getvalue(), "32-bit values"),
        "animated.webp": (frames.getvalue(), "several frames in one file"),
        "bomb.png": (bomb, "too large to decode"),
        "empty.jpg": (b"", "empty file"),
        "text.jpg": (b"not a picture", "cannot be decoded"),
    }


def test_broken_pictures_are_refused_by_name_with_a_count(folder, tmp_path):
    files = bad_files()
    for name, (data, _) in files.items():
        (folder / "a" / name).write_bytes(data)
    with pytest.raises(QualityError):
        packed(folder, tmp_path / "s")
    result = packed(folder, tmp_path / "s", options=LENIENT)
    lines = (tmp_path / "s" / "refused.jsonl").read_text().splitlines()
    refused = {json.loads(line)["file"].rpartition("/")[2]: json.loads(line) for line in lines}
    assert {name: refused[name]["kind"] for name in files} == {
        name: kind for name, (_, kind) in files.items()
    }
    assert result.manifest.num_samples == 6
    assert result.manifest.num_refused == len(files)


def test_a_quality_takes_what_is_refused_otherwise(folder, tmp_path):
    files = bad_files()
    for name in ("cmyk.jpg", "progressive.jpg"):
        (folder / "a" / name).write_bytes(files[name][0])
    smooth(9, 9).save(folder / "b" / "plain.bmp")
    result = packed(folder, tmp_path / "s", KeepEncoded(quality=95))
    assert result.manifest.num_samples == 9
    assert result.manifest.attributes["encoded"]["encoded_anew"] == 3


def test_larger_pictures_are_made_smaller_and_the_others_kept(folder, tmp_path):
    packed(folder, tmp_path / "s", KeepEncoded(max_side=57))
    with open_store(tmp_path / "s") as store:
        sizes = store.read_rows("image_size", 0, 6)
        assert sizes.max() == 57
        for index in range(6):
            name = store.read_text("name", index)
            is_same = bytes(store.read_values("images", index)) == (folder / name).read_bytes()
            assert is_same == (max(opened(folder / name).size) <= 57)


@pytest.mark.parametrize("quality", [None, 80])
def test_what_is_made_smaller_stays_lossless_unless_a_quality_is_given(tmp_path, quality):
    home = tmp_path / "in" / "a"
    home.mkdir(parents=True)
    picture = smooth(40, 60)
    for name, options in {
        "a.png": {}, "b.bmp": {}, "c.webp": {"lossless": True}, "d.webp": {"quality": 80}, "e.jpg": {},
        "f.webp": {"lossless": True, "exif": Image.Exif(), "icc_profile": bytes(200)},
    }.items():  # fmt: skip
        picture.save(home / name, **options)
    packed(tmp_path / "in", tmp_path / "s", KeepEncoded(20, quality))
    smaller = np.asarray(picture.resize((20, 13), Image.Resampling.BICUBIC))
    with open_store(tmp_path / "s") as store:
        for index in range(6):
            name, data = (
                store.read_text("name", index),
                bytes(store.read_values("images", index)),
            )
            is_lossless = quality is None and name[2] in "abcf"
            assert Image.open(io.BytesIO(data)).format == ("PNG" if is_lossless else "JPEG"), name
            if is_lossless:
                assert (decode_bytes(data, 3).transpose(1, 2, 0) == smaller).all(), name


def test_a_part_of_large_pictures_holds_fewer(tmp_path):
    """A part lies in a worker's memory: 512 photographs of a camera would be gigabytes."""
    (tmp_path / "in" / "a").mkdir(parents=True)
    for number in range(5):
        with (tmp_path / "in" / "a" / f"{number}.jpg").open("wb") as file:
            file.truncate(30 << 20)  # takes no room on the disk
    for max_side, expected in ((None, [2, 2, 1]), (256, [5])):
        source = ImagesSource((8, 8), 3, tmp_path / "in", keep_encoded=KeepEncoded(max_side))
        parts = source.prepare(tmp_path).parts
        assert [part.num_samples for part in parts] == expected
        names = [name for part in parts for name, _, _ in part.payload.items]
        assert names == [f"a/{number}.jpg" for number in range(5)]


def test_parts_that_were_cut_otherwise_are_built_again(folder, tmp_path, monkeypatch):
    """As after a change of stoker: a part of the same number may be of other pictures."""
    build = ImagesSource.build

    def fail(source, part, context):
        if part.index == 2:
            raise SourceError("no more", "", "")
        return build(source, part, context)

    with monkeypatch.context() as patch:
        patch.setattr("stoker.sources.images.source._LEAST_ENCODED", 2)
        patch.setattr(ImagesSource, "build", fail)
        with pytest.raises(SourceError, match="no more"):
            packed(folder, tmp_path / "s")
    assert len([*(tmp_path / "s.partial").rglob("shard-*.h5")]) == 2
    monkeypatch.setattr("stoker.sources.images.source._LEAST_ENCODED", 3)
    assert packed(folder, tmp_path / "s").manifest.num_samples == 6


@pytest.mark.parametrize(("marker", "kind"), [(0xC9, "arithmetic-coded"), (0xC3, "lossless")])
def test_a_jpeg_that_no_gpu_decodes_is_refused_by_name(tmp_path, monkeypatch, marker, kind):
    """The marker of the frame is enough. Pillow decodes such files as a whole, and not at an eighth of their size."""
    data = jpeg(smooth(16, 16))
    at = data.index(b"\xff\xc0")
    (tmp_path / "in" / "a").mkdir(parents=True)
    (tmp_path / "in" / "a" / "x.jpg").write_bytes(data[: at + 1] + bytes([marker]) + data[at + 2 :])

    def decode_whole(path, first_frame, data, *, small):
        assert not small
        return decode(path, first_frame, data.replace(bytes([0xFF, marker]), b"\xff\xc0", 1))

    monkeypatch.setattr(encoded, "decode", decode_whole)
    with pytest.raises(QualityError, match=f"{kind} JPEG"):
        packed(tmp_path / "in", tmp_path / "s")


@pytest.mark.parametrize("keep", [None, KeepEncoded()], ids=["as pixels", "encoded"])
def test_a_picture_with_exif_that_cannot_be_read_is_taken_as_it_lies_and_counted(tmp_path, keep):
    """Pillow raises for the first, for its resolution is known otherwise, and finds nothing in the second."""
    home = tmp_path / "in" / "a"
    home.mkdir(parents=True)
    exif = b"Exif\0\0MM\x13*\0\0\0\x08"
    (home / "x.jpg").write_bytes(jpeg(smooth(16, 16), dpi=(72, 72), exif=exif))
    (home / "y.jpg").write_bytes(jpeg(smooth(16, 16), exif=exif))
    cut = io.BytesIO()
    smooth(64, 64).save(cut, "PNG")  # of a PNG, Pillow reads the pixels before its EXIF data
    (home / "z.png").write_bytes(cut.getvalue()[:-200])
    source = ImagesSource((16, 16), 3, tmp_path / "in", keep_encoded=keep)
    with pytest.raises(QualityError, match=r"z\.png: cannot be decoded"):
        pack(source, tmp_path / "s", ONE)
    pack(source, tmp_path / "s", LENIENT)
    with open_store(tmp_path / "s") as store:
        said = " ".join(map(str, store.manifest.attributes["notes"]))
    assert "2 pictures have EXIF data that cannot be read" in said


def twelve_bits(data):
    at = data.index(b"\xff\xc0")
    return data[: at + 1] + b"\xc1" + data[at + 2 : at + 4] + b"\x0c" + data[at + 5 :]


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (twelve_bits, "a JPEG of 12 bits a channel"),
        (lambda data: data[:2] + bytes(40), "a JPEG whose header is damaged or unknown to Pillow"),
        (
            lambda _: b"\x89PNG\r\n\x1a\n" + bytes(40),
            "a PNG whose header is damaged or unknown to Pillow",
        ),
        (lambda _: b"RIFF\0\0\0\0WEBPxxxx", "a WebP whose header is damaged or unknown to Pillow"),
        (lambda _: b"\0\0\0\x18ftypqt  ", "a file of kind 'qt'"),
        (lambda _: b"\n<!DOCTYPE html><title>404</title>", "a web page"),
        (lambda _: b"nothing", "of no known kind"),
    ],
)
def test_a_file_that_pillow_does_not_know_is_named_by_its_first_bytes(tmp_path, make, kind):
    home = tmp_path / "in" / "a"
    home.mkdir(parents=True)
    (home / "x.jpg").write_bytes(make(jpeg(smooth(16, 16))))
    for given in (None, (home / "x.jpg").read_bytes()):
        with pytest.raises(SourceError, match=re.escape(f"opened as an image: {kind}.")):
            decode(home / "x.jpg", data=given)


def test_what_must_be_converted_or_unpacked_first_says_how(tmp_path):
    (tmp_path / "in" / "a").mkdir(parents=True)
    (tmp_path / "in" / "a" / "x.heic").write_bytes(b"\0\0\0\x18ftypheic" + bytes(40))
    with pytest.raises(QualityError, match=r"(?s)is HEIC.*heif-convert"):
        packed(tmp_path / "in", tmp_path / "s")
    (tmp_path / "in.zip").write_bytes(b"PK")
    with pytest.raises(SourceError, match=r"unzip \S+in\.zip -d"):
        packed(tmp_path / "in.zip", tmp_path / "s")


@pytest.mark.parametrize("compression", [None, "tiff_lzw", "tiff_deflate"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_tiff_is_turned_once(tmp_path, compression, orientation):
    """Pillow turns TIFF files when it loads them, and reads the plain ones of them by a map of the wrong width."""
    picture = smooth(6, 10).convert("L")
    path = tmp_path / "x.tif"
    picture.save(path, tiffinfo={0x0112: orientation}, compression=compression)
    made = decode(path)
    expected = turned_pixels(np.asarray(picture)[None], orientation)[0]
    assert (np.asarray(made.image) == expected).all()
    assert made.size == expected.shape[::-1]
    assert made.stored_size == (10, 6)
    assert (made.orientation, made.has_orientation) == (orientation, True)


def tiff_of_16_bits(planes):
    """A TIFF of 6 x 4 pixels of 16-bit colours, side by side (planes=1) or in a plane for each (2), and its values."""
    deep = np.arange(4 * 6 * 3, dtype="<u2").reshape(4, 6, 3) * 800
    data = (deep if planes == 1 else deep.transpose(2, 0, 1)).tobytes()
    count, begin = (1, 3)[planes - 1], 200
    starts = [begin + number * len(data) // count for number in range(count)]
    tags = {256: [6], 257: [4], 258: [16] * 3, 259: [1], 262: [2], 273: starts, 277: [3], 278: [4],
            279: [len(data) // count] * count, 284: [planes]}  # fmt: skip
    entries = more = b""
    for tag, values in tags.items():
        held = struct.pack(f"<{len(values)}I", *values)
        if len(values) > 1:
            held, more = struct.pack("<I", 14 + 12 * len(tags) + len(more)), more + held
        entries += struct.pack("<HHI", tag, 4, len(values)) + held
    head = struct.pack("<2sHIH", b"II", 42, 8, len(tags)) + entries + bytes(4) + more
    return head.ljust(begin, b"\0") + data, deep


def test_a_tiff_that_pillow_misreads_is_refused(tmp_path):
    """Pillow 13 makes noise of the second."""
    data, deep = tiff_of_16_bits(planes=1)
    assert (np.asarray(decode(tmp_path / "x.tif", data=data).image) == deep >> 8).all()
    with pytest.raises(SourceError, match="a plane for each colour"):
        decode(tmp_path / "x.tif", data=tiff_of_16_bits(planes=2)[0])


def test_the_transparent_value_of_a_deep_picture_becomes_white(tmp_path):
    """Pillow would convert such a picture by cutting its values at 255."""
    deep = np.array([[0, 300, 65535], [2570, 5140, 32639]], np.uint16)
    Image.fromarray(deep).save(tmp_path / "x.png", transparency=300)
    made = decode(tmp_path / "x.png")
    assert made.kind == "16-bit"
    pixels = to_pixels(made, tmp_path / "x.png", (2, 3), 1).values
    assert pixels[..., 0].tolist() == [[0, 255, 255], [10, 20, 127]]


def test_masks_stay_lossless_and_follow_their_picture(tmp_path):
    rng = np.random.default_rng(0)
    for name in ("images", "masks"):
        (tmp_path / name).mkdir()
    masks = {}
    for number in range(4):
        smooth(30, 44, number).save(tmp_path / "images" / f"{number}.jpg", quality=90)
        masks[number] = rng.integers(0, 5, (30, 44), dtype=np.uint8)
        Image.fromarray(masks[number]).save(tmp_path / "masks" / f"{number}.png")
    source = SegmentationSource(
        (8, 8), 3, tmp_path / "images", tmp_path / "masks", keep_encoded=KeepEncoded()
    )
    pack(source, tmp_path / "s", ONE)
    with open_store(tmp_path / "s") as store:
        for index in range(4):
            assert (decode_bytes(store.read_values("masks", index), 1)[0] == masks[index]).all()
    small = SegmentationSource(
        (8, 8), 3, tmp_path / "images", tmp_path / "masks", keep_encoded=KeepEncoded(22)
    )
    pack(small, tmp_path / "small", ONE)
    with open_store(tmp_path / "small") as store:
        assert decode_bytes(store.read_values("masks", 0), 1).shape == (1, 15, 22)
        assert tuple(store.read_rows("image_size", 0, 1)[0]) == (15, 22)


def test_the_command_says_what_it_did_and_what_goes_together(folder, tmp_path):
    run = CliRunner().invoke
    done = run(app, ["pack", "images", str(folder), str(tmp_path / "s"), "--keep-encoded", "-j1"])
    assert done.exit_code == 0, done.output
    assert "6 pictures found = 6 packed" in done.output
    for words, told in (
        (["--keep-encoded", "--size", "64"], "leave --size out"),
        (["--max-side", "64"], "--keep-encoded --max-side 64"),
        (["--keep-encoded", "--quality", "0"], "1 to 100"),
    ):
        failed = run(app, ["pack", "images", str(folder), str(tmp_path / "t"), *words])
        assert isinstance(failed.exception, InputError)
        assert told in str(failed.exception)
    shown = run(app, ["inspect", str(tmp_path / "s"), "--html", str(tmp_path / "page.html")])
    assert shown.exit_code == 0
    assert "40 x 60 to 45 x 55" in shown.output


@pytest.mark.parametrize("given", [{"max_side": 0}, {"quality": 101}])
def test_sizes_and_qualities_are_checked(given):
    with pytest.raises(InputError):
        KeepEncoded(**given)


@pytest.mark.parametrize("options", [{}, {"subsampling": 0}, {"quality": 30}, {"optimize": True}])
def test_a_look_at_a_small_picture_finds_the_damage_that_a_whole_one_shows(options):
    """JPEG is checked at an eighth of its size: every byte is read all the same."""
    file = io.BytesIO()
    smooth(90, 120).save(file, "JPEG", **options)
    whole = file.getvalue()
    rng = np.random.default_rng(3)

    def is_refused(data, small):
        try:
            decoded = decode(Path("a.jpg"), data=bytes(data), small=small)
        except SourceError:
            return True
        assert decoded.size == decoded.stored_size
        assert (decoded.image.size == decoded.size) is not small
        return False

    found = []
    for number in range(120):
        data = bytearray(whole)
        if number % 3 == 0:
            del data[rng.integers(150, len(data)) :]
        else:
            for place in rng.integers(2, len(data), 1 + number % 4):
                data[place] = rng.integers(256)
        try:
            same_size = Image.open(io.BytesIO(data)).size == (120, 90)
        except OSError:
            same_size = True
        if (
            same_size
        ):  # else a damaged header claims a size of its own, maybe too small to be made smaller
            found.append(is_refused(data, True))
            assert found[-1] == is_refused(data, False)
    assert 20 < sum(found) < len(found) - 20
