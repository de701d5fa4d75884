"""Every input has a bound that is said before memory or disk is taken.

Memory is measured in processes of their own: `measured` runs a script under a limit of its address space, so that
what would take gigabytes fails at once.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import shutil
import struct
import subprocess
import sys
import textwrap
import zipfile
import zlib
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kept_commands import invoke
from stoker import bounds
from stoker.errors import Refusal, RefusalList, SourceError, StoreError, count_refused
from stoker.loader.loader import Loader
from stoker.packing import PackOptions, pack
from stoker.sources import tables
from stoker.sources.arrays import ArraysSource
from stoker.sources.bars.reading import read_bars
from stoker.sources.msp import blocks, read_msp, text
from stoker.sources.tables import reading
from stoker.store import manifest
from stoker.store.fields import Ragged
from stoker.store.manifest import seal
from stoker.store.reader import open_store
from store_makers import simple_shard, write_store

ONE = PackOptions(jobs=1)


def memory_of(imports: str, work: str, *words: object) -> tuple[int, str]:
    """Run a script in its own process; return the bytes that `work` took beyond `imports`, and what it printed."""
    peak = "resource.getrusage(resource.RUSAGE_SELF).ru_maxrss"
    script = [
        "import resource, sys",
        textwrap.dedent(imports),
        f"before = {peak}",
        textwrap.dedent(work),
        f"print({peak} - before)",
    ]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(script), *map(str, words)],
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    *lines, last = done.stdout.splitlines()
    return int(last) * 1024, "\n".join(lines)


def run(*words: object) -> tuple[int, str]:
    """Run a command; return its exit code and what it said."""
    result = invoke(*words)
    said = result.output + str(result.exception or "")
    code = getattr(result.exception, "exit_code", result.exit_code)
    return code, said


# -- the rule ------------------------------------------------------------------------------


@given(most=st.integers(0, 2**60), found=st.integers(0, 2**61))
def test_a_bound_refuses_what_exceeds_it_and_nothing_else(most, found):
    bound = bounds.Bound("a thing", most)
    if found <= most:
        bound.check(found, "x")
        return
    with pytest.raises(SourceError, match="limit of a thing"):
        bound.check(found, "x", "type this")


def test_memory_and_disk_are_compared_with_what_there_is(tmp_path, monkeypatch):
    monkeypatch.setattr(bounds, "available_memory", lambda: 10**9)
    bounds.require_memory(10**9, "a row")
    with pytest.raises(
        StoreError, match=r"a row needs 1.86 GiB of memory\.\nAllowed: at most 953.7 MiB"
    ):
        bounds.require_memory(2 * 10**9, "a row", error=StoreError)
    bounds.require_disk(tmp_path / "not" / "yet", 1, "a file")
    with pytest.raises(SourceError, match=r"a file needs 1048576.0 TiB on the disk"):
        bounds.require_disk(tmp_path, 2**60, "a file")


def test_a_stream_without_end_stops_at_the_bound():
    taken = []

    def endless():
        while True:
            taken.append(1)
            yield bytes(1000)

    with pytest.raises(StoreError, match=r"has 10.7 KiB or more"):
        bounds.read_within(bounds.Bound("it", 10_000), endless(), "x", "", StoreError)
    assert len(taken) == 11


def test_unpacking_stops_before_the_disk_is_full(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(
        bounds.shutil, "disk_usage", lambda _: usage._replace(free=bounds.DISK_RESERVE_BYTES + 10)
    )
    out = io.BytesIO()
    assert bounds.copy_to_disk(io.BytesIO(bytes(10)), out, tmp_path, "x") == 10
    with pytest.raises(SourceError, match="was full after 0 B were unpacked"):
        bounds.copy_to_disk(io.BytesIO(bytes(11)), out, tmp_path, "x")


# -- archives ------------------------------------------------------------------------------


def zip_of_zeros(path: Path, num_bytes: int, shape: str, name: str = "x.npy") -> Path:
    """Write an archive with one member of float32 zeros, packed 1,000 to 1."""
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}"
    header += " " * (117 - len(header)) + "\n"
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open(name, "w", force_zip64=True) as member,
    ):
        member.write(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode())
        for _ in range(num_bytes >> 20):
            member.write(bytes(1 << 20))
    return path


def test_an_archive_is_inspected_as_a_stream(tmp_path):
    """96 MB in a file of 96 kB: neither the memory nor the disk holds it."""
    path = zip_of_zeros(tmp_path / "a.npz", 96 << 20, f"({24 << 20},)")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    taken, seen = memory_of(
        """
        from pathlib import Path
        from stoker.sources.arrays import ArraysSource
        from stoker.store.inspection import inspect_parts
        """,
        """
        blocks = ArraysSource((Path(sys.argv[1]),)).blocks(Path(sys.argv[2]))
        print(inspect_parts(fields for _, fields in blocks).stats["x"].num_rows)
        """,
        path,
        scratch,
    )
    assert seen == str(24 << 20)
    assert taken < 130 << 20
    assert not any(scratch.iterdir())


def test_an_archive_in_fortran_order_is_inspected_too(tmp_path):
    values = np.asfortranarray(np.arange(12.0, dtype="f4").reshape(4, 3))
    np.savez(tmp_path / "a.npz", x=values)
    blocks = [fields for _, fields in ArraysSource((tmp_path / "a.npz",)).blocks(tmp_path)]
    assert (np.concatenate([fields["x"].values for fields in blocks]) == values).all()


def test_one_row_of_gigabytes_is_refused_before_it_is_read(tmp_path, monkeypatch):
    path = zip_of_zeros(tmp_path / "a.npz", 64 << 20, f"(1, {16 << 20})")
    monkeypatch.setattr(bounds, "available_memory", lambda: 100 << 20)
    for act in ("inspect", "pack"):
        words = ["inspect", path] if act == "inspect" else ["pack", "arrays", path, tmp_path / "s"]
        code, said = run(*words)
        assert code == 2
        assert "one row of" in said
        assert "needs 192.0 MiB of memory" in said
    assert not (tmp_path / "s").exists()


def test_an_archive_that_does_not_fit_the_disk_is_refused_before_it_is_written(
    tmp_path, monkeypatch
):
    path = zip_of_zeros(tmp_path / "a.npz", 8 << 20, f"({2 << 20},)")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(
        bounds.shutil, "disk_usage", lambda _: usage._replace(free=bounds.DISK_RESERVE_BYTES + 100)
    )
    with pytest.raises(
        SourceError, match=r"unpacking .*a.npz \(\S+ KiB\) needs 8.00 MiB on the disk"
    ):
        ArraysSource((path,)).prepare(tmp_path / "scratch")
    assert not (tmp_path / "scratch").exists()


def claim(path: Path, num_bytes: int) -> None:
    """Let the directory of an archive, and the member itself, claim another size."""
    raw = bytearray(path.read_bytes())
    at = raw.rfind(b"PK\x01\x02")
    struct.pack_into("<I", raw, at + 24, num_bytes)
    struct.pack_into("<I", raw, raw.find(b"PK\x03\x04") + 22, num_bytes)
    path.write_bytes(raw)


@pytest.mark.parametrize("size", [100, 128 + 4 * 1000 - 1, 128 + 4 * 1000 + 1, 2**32 - 2])
def test_an_archive_whose_member_has_another_size_than_it_claims(tmp_path, size):
    path = tmp_path / "a.npz"
    np.savez_compressed(path, x=np.random.default_rng(0).random(1000, dtype="f4"))
    claim(path, size)
    for act in (
        lambda: ArraysSource((path,)).prepare(tmp_path / "scratch"),
        lambda: list(ArraysSource((path,)).blocks(tmp_path / "scratch")),
    ):
        with pytest.raises(SourceError, match=r"a\.npz"):
            act()


def test_a_header_that_claims_gigabytes_is_not_read(tmp_path):
    path = tmp_path / "a.npy"
    with path.open("wb") as file:
        file.write(b"\x93NUMPY\x02\x00" + struct.pack("<I", 3 << 30))
        file.truncate(3 << 30)
    with pytest.raises(
        SourceError, match=r"header of a.npy has 3.00 GiB\.\nAllowed: at most 64.0 KiB"
    ):
        ArraysSource((path,)).prepare(tmp_path)


def test_a_shape_without_its_bytes_is_refused(tmp_path):
    zip_of_zeros(tmp_path / "a.npz", 1 << 20, f"({2**45},)")
    for act in (
        lambda: ArraysSource((tmp_path / "a.npz",)).prepare(tmp_path),
        lambda: list(ArraysSource((tmp_path / "a.npz",)).blocks(tmp_path)),
    ):
        with pytest.raises(SourceError, match=r"x.npy says shape \(35184372088832,\)"):
            act()


def test_headers_that_are_damaged_are_named(tmp_path):
    for number, header in enumerate(["-" * 9000, "(" * 9000, "{'descr': '|O'}", "[]", ""]):
        path = tmp_path / f"{number}.npy"
        path.write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode())
        with pytest.raises(SourceError, match="cannot be read as a numpy file"):
            ArraysSource((path,)).prepare(tmp_path)


# -- keys ----------------------------------------------------------------------------------


@given(
    keys=st.lists(
        st.text(st.sampled_from("ab/_"), min_size=1, max_size=4),
        min_size=1,
        max_size=4,
        unique=True,
    )
)
def test_every_key_of_an_archive_becomes_a_field_or_is_refused_by_name(keys, tmp_path_factory):
    folder = tmp_path_factory.mktemp("k")
    with zipfile.ZipFile(folder / "a.npz", "w") as archive:
        for number, key in enumerate(keys):
            with archive.open(f"{key}.npy", "w") as member:
                np.lib.format.write_array(member, np.full(3, number, dtype="f4"))
    fields = [key.replace("/", "_") for key in keys]
    source = ArraysSource((folder / "a.npz",))
    if len(set(fields)) < len(keys) or any(field.startswith("_") for field in fields):
        with pytest.raises(SourceError, match="would"):
            source.prepare(folder)
        return
    pack(source, folder / "s", ONE)
    with open_store(folder / "s") as store:
        got = {name: int(store.read_rows(name, 0, 1)[0]) for name in store.fields}
    assert got == {field: number for number, field in enumerate(fields)}


def test_train_and_val_of_one_name_are_kept_apart_and_said(tmp_path):
    np.savez(tmp_path / "a.npz", **{"train/x": np.zeros(3, "f4"), "val/x": np.ones(3, "f4")})
    preparation = ArraysSource((tmp_path / "a.npz",)).prepare(tmp_path / "scratch")
    assert "array 'val/x' is stored as field 'val_x'" in preparation.notes
    code, said = run("inspect", tmp_path / "a.npz", "--json")
    assert code == 0
    assert '"train_x"' in said
    assert '"val_x"' in said


def test_names_given_for_keys_that_would_be_one_field(tmp_path):
    np.savez(tmp_path / "a.npz", **{"a/b": np.zeros(3, "f4"), "a_b": np.ones(3, "f4")})
    code, said = run("pack", "arrays", tmp_path / "a.npz", tmp_path / "s")
    assert code == 2
    assert "'a/b' and 'a_b' would both be the field 'a_b'" in said
    assert "--names field0,field1" in said
    code, said = run("pack", "arrays", tmp_path / "a.npz", tmp_path / "s", "--names", "p,q")
    assert code == 0, said
    with open_store(tmp_path / "s") as store:
        assert store.read_rows("q", 0, 3).tolist() == [1, 1, 1]


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_one_key_twice_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        for number in range(2):
            with archive.open("x.npy", "w") as member:
                np.lib.format.write_array(member, np.full(3, number, dtype="f4"))
    with pytest.raises(SourceError, match="holds two arrays called 'x'"):
        ArraysSource((tmp_path / "a.npz",)).prepare(tmp_path)


# -- HDF5 files of others ------------------------------------------------------------------


def hostile_hdf5(path: Path, kind: str) -> Path:
    """Write an HDF5 file of some kilobytes that claims gigabytes."""
    with h5py.File(path, "w") as file:
        if kind == "chunk":
            data = file.create_dataset("x", (2**29,), "f4", chunks=(2**29,), compression="gzip")
            data.id.write_direct_chunk((0,), zlib.compress(b""))
        elif kind == "virtual":
            layout = h5py.VirtualLayout((2**45,), "f4")
            with h5py.File(path.with_name("source.h5"), "w") as source:
                source.create_dataset("x", (2**45,), "f4", chunks=(1024,))
            layout[:] = h5py.VirtualSource("source.h5", "x", (2**45,))
            file.create_virtual_dataset("x", layout)
        elif kind == "deep":
            group = file.id
            for _ in range(5000):
                group = h5py.h5g.create(group, b"a")
            h5py.Group(group)["x"] = np.zeros(3, "f4")
        elif kind == "wide":
            file.create_dataset("x", (3, 2**42), "f4", chunks=(1, 2**20))
        else:
            options = {
                "chunked": {"chunks": (1024,)},
                "lzf": {"chunks": (9,), "compression": "lzf"},
            }
            file.create_dataset("x", (2**45,), "f4", **options.get(kind, {}))
    return path


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("chunk", "one chunk of dataset 'x', (536870912,) of float32, has 2.00 GiB"),
        ("contiguous", "the unwritten part of dataset 'x' of shape (35184372088832,)"),
        ("chunked", "has 128.0 TiB"),
        ("lzf", "has 128.0 TiB"),
        ("virtual", "has 128.0 TiB"),
        ("wide", "has 48.0 TiB"),
        ("deep", "has 201 nested groups"),
    ],
)
def test_an_hdf5_file_that_claims_gigabytes_is_refused_when_it_is_opened(tmp_path, kind, said):
    path = hostile_hdf5(tmp_path / "a.h5", kind)
    for words in (["inspect", path], ["verify", path], ["pack", "arrays", path, tmp_path / "s"]):
        code, output = run(*words)
        assert code == 2, output
        assert said in output
        assert "Allowed: at most" in output
    with pytest.raises(StoreError):
        Loader(path, batch_size=2)


def test_the_copy_without_chunks_that_is_advised_can_be_read(tmp_path, monkeypatch):
    values = np.arange(300.0, dtype="f4").reshape(100, 3)
    with h5py.File(tmp_path / "it's.h5", "w") as file:
        file.create_dataset("g/x", data=values, chunks=(50, 3), compression="gzip")
        file["y"] = np.arange(100)
        file["one"] = 3
    monkeypatch.setattr(bounds, "CHUNK", bounds.Bound("an HDF5 chunk", 100))
    with pytest.raises(StoreError, match="the limit of an HDF5 chunk") as caught:
        open_store(tmp_path / "it's.h5")
    typed = caught.value.fix.replace("python3", sys.executable, 1)
    subprocess.run(["bash", "-c", typed], check=True)
    with open_store(tmp_path / "it's-plain.h5") as store:
        assert (store.read_rows("g/x", 0, 100) == values).all()
        assert store.read_rows("y", 99, 100)[0] == 99


def test_links_loops_and_second_names_are_walked_once(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        group = file.create_group("b")
        group["x"] = np.zeros(3, "f4")
        group["again"] = group
        file["a"] = group["x"]
        file["soft"] = h5py.SoftLink("/b/x")
        file["absent"] = h5py.ExternalLink("absent.h5", "/x")
    with open_store(tmp_path / "a.h5") as store:
        assert list(store.fields) == ["a"]


def test_a_chunk_table_that_claims_more_than_the_chunk_is_not_believed(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        data = file.create_dataset("x", (1000,), "f4", chunks=(1000,), compression="gzip")
        data.id.write_direct_chunk((0,), bytes(1 << 20))
    with (
        open_store(tmp_path / "a.h5") as store,
        pytest.raises(StoreError, match="its table says 1048576 bytes, for 4000"),
    ):
        store.read_rows("x", 0, 1)


# -- manifests -----------------------------------------------------------------------------


def changed(folder: Path, change) -> Path:
    """Write a store whose manifest was changed and sealed again."""
    write_store(folder, [simple_shard(np.random.default_rng(0), 20)]).close()
    document = json.loads((folder / "store.json").read_text())
    del document["manifest_checksum"]
    change(document)
    (folder / "store.json").write_text(seal(document))
    return folder


def more_samples(document) -> None:
    document["num_samples"] = document["shards"][0]["num_samples"] = 2**45


def more_rows(document) -> None:
    more_samples(document)
    shard = document["shards"][0]
    for name in shard["rows"]:
        shard["rows"][name] = 2**45 + name.endswith("offsets")


def nothing_behind(document) -> None:
    more_rows(document)
    offsets = document["shards"][0]["offsets"]
    document["shards"][0]["offsets"] = dict.fromkeys(offsets)


def no_fields(document) -> None:
    more_samples(document)
    document["fields"] = {}


def large_file(document) -> None:
    nothing_behind(document)
    document["shards"][0]["size_bytes"] = 2**50


@pytest.mark.parametrize("change", [more_samples, more_rows, nothing_behind, no_fields, large_file])
def test_a_manifest_that_claims_samples_without_bytes_is_not_sound(tmp_path, change):
    code, said = run("verify", changed(tmp_path / "s", change))
    assert code == 2
    assert "sound" not in said


@pytest.mark.parametrize(
    ("key", "value"),
    [("dtype", "|O8"), ("dtype", "?!"), ("dtype", "<f16"), ("shape", [-1]), ("kind", "series")],
)
def test_fields_that_cannot_be_are_named(tmp_path, key, value):
    def change(document) -> None:
        document["fields"]["features"][key] = value

    code, said = run("verify", changed(tmp_path / "s", change))
    assert code == 2
    assert "features" in said


def test_offsets_that_point_beyond_their_values_are_a_problem(tmp_path):
    write_store(tmp_path / "s", [{"t": Ragged(np.zeros(9, "f4"), np.array([0, 4, 9]))}]).close()
    with open_store(tmp_path / "s") as store:
        assert not store.verify().problems
        shard = store.shards[0]
        for wrong in ([0, 4, 10], [0, 2**60, 9], [1, 4, 9], [0, 9, 4]):
            shard.whole = lambda _, wrong=wrong: np.array(wrong)
            assert "has offsets outside of its 9 values" in store.verify().problems[0]
        shard.whole = lambda _: np.array([0, 4, 2**50])
        with pytest.raises(StoreError, match="field 't' has offsets"):
            store.read_ragged("t", 0, 2)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 100_000, "9" * 10_000, "[" * 990 + "]" * 990]
)
def test_deep_and_odd_json_is_an_error_of_the_input(tmp_path, text):
    (tmp_path / "store.json").write_text(text)
    code, said = run("verify", tmp_path)
    assert code == 2
    assert "store.json" in said


def test_a_giant_manifest_is_not_read(tmp_path):
    (tmp_path / "store.json").touch()
    os.truncate(tmp_path / "store.json", 3 << 30)
    code, said = run("verify", tmp_path)
    assert code == 2
    assert "has 3.00 GiB" in said
    assert "the limit of a store.json" in said


def test_a_manifest_that_could_not_be_read_again_is_not_written(monkeypatch):
    monkeypatch.setattr(manifest, "MANIFEST", bounds.Bound("a store.json", 100))
    with pytest.raises(StoreError, match="the manifest of this store"):
        seal({"a": "b" * 100})


# -- pictures ------------------------------------------------------------------------------


def png(path: Path, width: int, height: int) -> Path:
    """Write a picture of a few bytes that claims to be large."""

    def block(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    path.parent.mkdir(parents=True, exist_ok=True)
    blocks = block(b"IHDR", header) + block(b"IDAT", zlib.compress(bytes(100)))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + blocks + block(b"IEND", b""))
    return path


@pytest.mark.parametrize(("width", "height"), [(14_000, 14_000), (60_000, 60_000), (2**30, 2**30)])
def test_a_picture_that_claims_too_many_pixels_is_refused_by_name(tmp_path, width, height):
    png(tmp_path / "in" / "cat" / "bomb.png", width, height)
    code, said = run("pack", "images", tmp_path / "in", tmp_path / "s", "--size", "8x8")
    assert code == 3, said
    assert f"bomb.png claims {width * height:,} pixels, and at most 178,956,970" in said


def test_a_picture_that_does_not_fit_the_memory_is_refused_before_it_is_decoded(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(bounds, "available_memory", lambda: 100 << 20)
    png(tmp_path / "in" / "cat" / "a.png", 5000, 5000)
    code, said = run(
        "pack", "images", tmp_path / "in", tmp_path / "s", "--size", "8x8", "--jobs", 1
    )
    assert code == 3
    assert "needs 286.1 MiB of memory" in said


# -- text ----------------------------------------------------------------------------------


def packed_text(path: Path, *pieces: bytes, repeat: int) -> Path:
    """Write gzipped text: the first piece, the second many times, the third."""
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(pieces[0])
        for _ in range(repeat):
            file.write(pieces[1])
        file.write(b"".join(pieces[2:]))
    return path


MB = 1 << 20


@pytest.mark.parametrize(
    ("start", "piece", "most", "said"),
    [
        (b"a,b\n1,", b"1" * MB, 8, "a line, or a quoted cell, of more than 8.00 MiB"),
        (b'a,b\n1,"', b"1\n" * (MB // 16), 1, "a line, or a quoted cell, of more than 1.00 MiB"),
        (b"", b"a" * MB, 8, "cannot be read as a table"),
    ],
)
def test_a_table_with_a_line_without_end(tmp_path, monkeypatch, start, piece, most, said):
    monkeypatch.setattr("stoker.sources.tables.reading.CSV_BLOCK_BYTES", most * MB)
    path = packed_text(tmp_path / "a.csv.gz", start, piece, repeat=40)
    code, output = run("inspect", path)
    assert code == 2
    assert said in output


@given(count=st.integers(0, 30), most=st.integers(1, 10))
def test_refusals_are_listed_up_to_a_number_and_all_counted(count, most):
    kept = type("Few", (RefusalList,), {"MOST": most})()
    kept.extend(Refusal("f", number, "why") for number in range(count))
    assert len(kept) <= most + 1
    assert count_refused(kept) == count
    assert [refusal.line for refusal in kept[:most]] == list(range(min(count, most)))


def test_a_file_of_noise_is_counted_whole_and_listed_in_part(tmp_path, monkeypatch):
    monkeypatch.setattr(RefusalList, "MOST", 50)
    (tmp_path / "a.csv").write_text("a,b\n" + "1,2\n2,3\n1,2,3\n" * 1000)
    code, said = run("pack", "table", tmp_path / "a.csv", tmp_path / "s")
    assert code == 3, said
    assert "1,000 pieces of input refused" in said
    code, said = run("inspect", tmp_path / "a.csv")
    assert "refused 1 of 1000" in said


def test_a_file_of_nothing_but_noise_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(RefusalList, "MOST", 500)
    monkeypatch.setattr(reading, "HEAD_BYTES", 40)
    path = packed_text(tmp_path / "a.csv.gz", b"a,b\n" + b"1,2\n" * 10, b"1,2,3\n" * 600, repeat=1)
    with pytest.raises(SourceError, match=r"Row #512: Expected 2 columns, got 3"):
        tables.TableSource((path,)).prepare(tmp_path)
    few = packed_text(tmp_path / "b.csv.gz", b"a,b\n", b"1,2\n1,2\n1,2,3\n" * 600, repeat=1)
    preparation = tables.TableSource((few,)).prepare(tmp_path)
    assert count_refused(preparation.refused) == 600
    assert len(preparation.refused) == 501


def test_wide_rows_make_parts_shorter(tmp_path, monkeypatch):
    monkeypatch.setattr("stoker.sources.tables.source._PART_BYTES", 1000)
    monkeypatch.setattr(reading, "CSV_BLOCK_BYTES", 1000)
    rows = [f"{number},{number / 7:.9f}" for number in range(500)]
    (tmp_path / "a.csv").write_text("a,b\n" + "\n".join(rows) + "\n")
    preparation = tables.TableSource((tmp_path / "a.csv",)).prepare(tmp_path)
    assert len(preparation.parts) > 5
    assert sum(part.num_samples for part in preparation.parts) == 500


def test_bars_of_gigabytes_are_refused_by_memory_and_by_line(tmp_path, monkeypatch):
    start = b"time,open,high,low,close\n2020-01-01 00:00,1,1,1,"
    path = packed_text(tmp_path / "EURUSD_M5.csv.gz", start, b"1" * MB, b"\n", repeat=40)
    with pytest.raises(SourceError, match="the limit of a line of text"):
        read_bars(path)
    monkeypatch.setattr(bounds, "available_memory", lambda: 100 << 20)
    with pytest.raises(SourceError, match=r"unpacked so far, needs .* of memory"):
        read_bars(path)


@pytest.mark.parametrize("line", [b"10 20\n", b"Comment: aa\n"])
def test_a_record_without_end_is_refused(tmp_path, monkeypatch, line):
    monkeypatch.setattr(text, "RECORD", bounds.Bound("one record or structure", MB // 4))
    monkeypatch.setattr(blocks, "_OPEN_BYTES", MB // 16)
    monkeypatch.setattr(blocks, "CHUNK_BYTES", MB // 16)
    path = packed_text(tmp_path / "a.msp.gz", b"Name: x\n", line * (MB // 60), repeat=5)
    with pytest.raises(SourceError, match="the limit of one record"):
        list(read_msp(path))


def test_a_library_without_empty_lines_is_no_record_without_end(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "RECORD", bounds.Bound("one record or structure", MB // 4))
    monkeypatch.setattr(blocks, "_OPEN_BYTES", MB // 16)
    monkeypatch.setattr(blocks, "CHUNK_BYTES", MB // 16)
    record = b"Name: x\nNum Peaks: 2\n10 20\n11 21\n"
    (tmp_path / "a.msp").write_bytes(record * 10_000)
    assert sum(len(batch.records) for batch in read_msp(tmp_path / "a.msp")) == 10_000


def test_a_line_without_end_in_a_library(tmp_path):
    path = packed_text(tmp_path / "a.msp.gz", b"Name: x\nNum Peaks: 1\n", b"1" * MB, repeat=40)
    with pytest.raises(SourceError, match="a line of more than 16 MiB"):
        list(read_msp(path))


@pytest.mark.parametrize("large", [False, True], ids=["32 bits", "64 bits"])
def test_a_list_of_files_without_end_is_refused_before_it_is_read(tmp_path, large):
    """The records at an archive's end say how long its list is; here 3 GB, in a file of 100 bytes."""
    length = 3 << 30
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 1, 1, 0xFFFFFFFF if large else length, 0, 0)
    record = struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, 1, 1, length, 0)
    locator = struct.pack("<4sIQI", b"PK\6\7", 0, 0, 1)
    path = tmp_path / "a.npz"
    path.write_bytes((record + locator if large else b"") + end)
    with pytest.raises(SourceError, match=r"list of files in .* has 3\.00 GiB[\s\S]*64\.0 MiB"):
        bounds.open_zip(path)
    np.savez(tmp_path / "b.npz", **{f"x{n}": np.zeros(2) for n in range(30)})
    with bounds.open_zip(tmp_path / "b.npz") as archive:
        assert len(archive.namelist()) == 30
