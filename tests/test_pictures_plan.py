"""Which kind of picture store is better here: a pure rule, and `stoker plan` with the rate that it measures."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from stoker.cli.main import app
from stoker.plan.pictures import PictureBytes, choose_kind, picture_bytes
from stoker.store.manifest import FieldInfo, Manifest, ShardInfo

GB = 10**9


def imagenet(kind="encoded"):
    return PictureBytes(1_281_167, kind, 1_281_167 * 3 * 256 * 256, (256, 256), 22 * GB)


@pytest.mark.parametrize(
    ("gpu", "ram", "kind", "raw_where"),
    [
        (16 * GB, 64 * GB, "encoded", "read from disk in every epoch"),
        (16 * GB, 512 * GB, "raw", "resident in RAM"),
        (400 * GB, 64 * GB, "raw", "resident on the GPU"),
        (None, 8 * GB, "encoded", "read from disk in every epoch"),
    ],
)
def test_pixels_where_they_fit_and_files_where_they_do_not(gpu, ram, kind, raw_where):
    choice = choose_kind(imagenet(), gpu, ram, 20_000.0)
    assert choice.kind == kind
    assert raw_where in choice.reasons[1]
    assert "20,000 pictures/s" in choice.reasons[2]


@given(
    raw=st.integers(1, 10**13), encoded=st.integers(1, 10**13), ram=st.integers(1, 10**13),
    more=st.integers(0, 10**13), gpu=st.none() | st.integers(1, 10**13),
)  # fmt: skip
def test_more_memory_never_takes_pixels_away(raw, encoded, ram, more, gpu):
    pictures = PictureBytes(10, "raw", raw, (8, 8), encoded)
    before = choose_kind(pictures, gpu, ram).kind
    after = choose_kind(pictures, gpu, ram + more).kind
    assert before == after or (before, after) == ("encoded", "raw")


def test_unknown_bytes_and_rates_are_said_to_be_unknown():
    choice = choose_kind(PictureBytes(10, "raw", 1000, (8, 8), None), None, 10**9)
    assert choice.kind == "raw"
    assert "not known" in choice.reasons[1]
    assert "not measured" in choose_kind(imagenet(), None, 10**9).reasons[2]


def test_the_command_says_which_and_why(tmp_path):
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed (extra 'vision')")
    (tmp_path / "in" / "a").mkdir(parents=True)
    for number in range(4):
        image.new("RGB", (30 + number, 20)).save(tmp_path / "in" / "a" / f"{number}.jpg")
    run = CliRunner().invoke
    for out, words in (("encoded", ["--keep-encoded"]), ("raw", ["--size", "16"])):
        done = run(
            app, ["pack", "images", str(tmp_path / "in"), str(tmp_path / out), "-j1", *words]
        )
        assert done.exit_code == 0
        shown = run(app, ["plan", str(tmp_path / out), "--gpu-memory", "16GB", "--json"])
        found = json.loads(shown.stdout)["pictures"]
        assert found["kind"] == "raw"
        assert found["bytes"]["kind"] == out
        assert found["bytes"]["encoded_bytes"] == sum(
            file.stat().st_size for file in (tmp_path / "in").rglob("*.jpg")
        )
        assert (found["decoded_per_second"] is None) == (out == "raw")
    told = run(app, ["plan", str(tmp_path / "encoded"), "--ram", "1GB"]).stdout
    assert "pictures/s are decoded here" in told
    assert "raw pixels are better here" in told


def test_pictures_of_one_size_are_counted_at_that_size_with_their_masks():
    def field(kind, shape, encoding=None):
        return FieldInfo(kind=kind, dtype="|u1", shape=shape, encoding=encoding)

    shard = ShardInfo(
        file="a", label="", num_samples=5, size_bytes=0, checksum="",
        rows={"images/values": 700, "masks/values": 80},
    )  # fmt: skip
    for size, expected in (([30, 40], (30, 40)), ([31, 40], (224, 224))):
        stored = Manifest(
            num_samples=5, shards=[shard],
            fields={name: field("ragged", [], "picture") for name in ("images", "masks")},
            attributes={"channels": 3, "encoded": {"smallest": [30, 40], "largest": size}},
        )  # fmt: skip
        raw = 5 * 4 * expected[0] * expected[1]
        assert picture_bytes(stored) == PictureBytes(5, "encoded", raw, expected, 780)
    pixels = Manifest(
        num_samples=5, shards=[],
        fields={"images": field("dense", [3, 8, 9]), "masks": field("dense", [8, 9])},
    )  # fmt: skip
    assert picture_bytes(pixels).raw_bytes == 5 * 4 * 8 * 9
