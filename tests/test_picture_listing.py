"""A folder of pictures: the order of reading, what describes it, and the smallest files in it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from stoker.packing import PackOptions, pack
from stoker.sources import fingerprint
from stoker.sources.images import ImagesSource, listing
from stoker.sources.images.encoded import KeepEncoded, read_encoded


@given(st.lists(st.sampled_from(["a.jpg", "gone.jpg", "pipe", "folder"]), max_size=40))
@settings(max_examples=40, deadline=None)
def test_paths_come_in_order_and_each_is_asked_for_once_before_it_comes(names):
    names = [f"{number}-{name}" for number, name in enumerate(names)]
    asked = []
    kept, listing._expect = listing._expect, asked.append
    try:
        for number, path in enumerate(listing.read_ahead(Path("root"), names)):
            assert path == Path("root") / names[number]
            assert path in asked
            assert len(asked) == min(len(names), number + listing._AHEAD)
    finally:
        listing._expect = kept
    assert asked == [Path("root") / name for name in names]


@pytest.mark.parametrize("size", [(1, 1), (1, 9), (7, 3), (8, 8)])
def test_a_tiny_jpeg_is_kept(tmp_path, size):
    path = tmp_path / "tiny.jpg"
    Image.new("RGB", size, "red").save(path)
    kept, decoded = read_encoded(path, 3, KeepEncoded(), False)
    assert (kept.size, decoded.size) == (size[::-1], size)


def test_what_cannot_be_read_ahead_is_passed_over(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_bytes(b"1")
    names = ["pipe", "folder", "gone", "file"]
    assert [path.name for path in listing.read_ahead(tmp_path, names)] == names


def test_a_folder_is_described_by_its_files_as_it_always_was(tmp_path):
    """Stores that were packed earlier stay up to date; a picture behind a link to a folder makes them stale."""
    for name in ("b/x.jpg", "b/c/é.jpg", "a.jpg", "b.jpg"):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_bytes(name.encode())
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "seen.jpg").write_bytes(b"1")
    (tmp_path / "in" / "file-link").symlink_to(tmp_path / "other" / "seen.jpg")
    (tmp_path / "in" / "broken-link").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "in" / "pipe")
    wanted = xxhash.xxh3_128()
    for path in sorted((tmp_path / "in").rglob("*"), key=lambda each: each.as_posix()):
        if path.is_file():
            name, found = path.relative_to(tmp_path / "in").as_posix(), path.stat()
            wanted.update(f"{name}\0{found.st_size}\0{found.st_mtime_ns}\0".encode())
    described = fingerprint._describe_folder(tmp_path / "in").digest
    assert described == wanted.hexdigest()
    (tmp_path / "in" / "link").symlink_to(tmp_path / "other")
    (tmp_path / "other" / "back").symlink_to(tmp_path / "in")
    linked = fingerprint._describe_folder(tmp_path / "in").digest
    (tmp_path / "other" / "seen.jpg").write_bytes(b"other bytes")
    assert len({described, linked, fingerprint._describe_folder(tmp_path / "in").digest}) == 3


def test_a_picture_whose_name_is_not_utf8_is_refused_by_name_and_the_others_are_packed(tmp_path):
    (tmp_path / "in" / "a").mkdir(parents=True)
    Image.new("L", (4, 4)).save(tmp_path / "in" / "a" / "ü.png")
    strange = tmp_path / "in" / "a" / os.fsdecode(b"\xff.png")
    strange.write_bytes((tmp_path / "in" / "a" / "ü.png").read_bytes())
    options = PackOptions(jobs=1, on_bad="quarantine", bad_budget=1)
    result = pack(ImagesSource((4, 4), 3, tmp_path / "in"), tmp_path / "s", options)
    assert result.manifest.num_samples == 1
    (line,) = (tmp_path / "s" / "refused.jsonl").read_text().splitlines()
    assert json.loads(line)["kind"] == "name that is not UTF-8"
