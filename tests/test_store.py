"""Round trips, many readers, and everything a disk can do to a store."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import CorruptError, InputError, StokerError, StoreError, StoreVersionError
from stoker.store.fields import Dense, Ragged, Series, offsets_of
from stoker.store.hdf5 import Location, check_bounds
from stoker.store.manifest import seal
from stoker.store.reader import open_store
from stoker.store.shard import load_shard, write_shard
from store_makers import shard_data, simple_shard, write_store


def same(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal bit for bit, NaN included, apart from byte order."""
    return (
        a.shape == b.shape
        and a.astype(a.dtype.newbyteorder("<")).tobytes()
        == b.astype(b.dtype.newbyteorder("<")).tobytes()
    )


@given(data=shard_data())
def test_pack_then_read_gives_the_same_values(data, tmp_path_factory):
    store = write_store(tmp_path_factory.mktemp("s"), [data])
    with store:
        n = store.num_samples
        assert same(store.read_rows("dense", 0, n), data["dense"].values)
        values, offsets = store.read_ragged("ragged", 0, n)
        assert same(values, data["ragged"].values)
        assert same(offsets, data["ragged"].offsets)
        for part in ("rows", "time", "gap", "ends"):
            assert same(store.read_series("series", part), getattr(data["series"], part))
        for i in range(n):
            series, end = data["series"], int(data["series"].ends[i])
            assert same(store.read_window("series", i), series.rows[end - series.window : end])
        assert store.verify().problems == ()


@given(data=shard_data(), seed=st.integers(0, 9))
def test_a_loaded_shard_is_the_one_that_was_written_and_can_be_thinned(
    data, seed, tmp_path_factory
):
    store = write_store(tmp_path_factory.mktemp("s"), [data])
    loaded = load_shard(store.shards[0], store.fields)
    for name, field in data.items():
        for path, array in field.arrays(name).items():
            assert same(loaded[name].arrays(name)[path], array)
    keep = np.random.default_rng(seed).random(store.num_samples) < 0.5
    kept = {name: data.keep(keep) for name, data in loaded.items()}
    assert same(kept["dense"].values, data["dense"].values[keep])
    ragged = data["ragged"]
    for new, old in enumerate(np.flatnonzero(keep)):
        a, b = kept["ragged"].offsets[new : new + 2]
        assert same(
            kept["ragged"].values[a:b], ragged.values[ragged.offsets[old] : ragged.offsets[old + 1]]
        )
    assert same(kept["series"].ends, data["series"].ends[keep])


@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    picks=st.lists(st.integers(0, 10**6), max_size=20),
    cut=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
def test_reads_across_shards_equal_one_array(sizes, picks, cut, tmp_path_factory):
    rng = np.random.default_rng(0)
    shards = [simple_shard(rng, size) for size in sizes]
    whole = np.concatenate([shard["features"].values for shard in shards])
    with write_store(tmp_path_factory.mktemp("s"), shards) as store:
        n = store.num_samples
        low, high = sorted(int(share * n) for share in cut)
        assert same(store.read_rows("features", low, high), whole[low:high])
        values, offsets = store.read_ragged("peaks", low, high)
        assert len(offsets) == high - low + 1
        texts = [f"sample {i} é" for size in sizes for i in range(size)]
        for i in range(low, high):
            one, _ = store.read_ragged("peaks", i, i + 1)
            assert same(one, values[offsets[i - low] : offsets[i - low + 1]])
            assert store.read_text("name", i) == texts[i]
        if n:
            indices = np.array(picks, np.int64) % n
            assert same(store.gather("features", indices), whole[indices])


def test_many_threads_read_into_the_callers_buffers(tmp_path):
    rng = np.random.default_rng(1)
    values = rng.normal(size=(3000, 40, 41)).astype("f4")  # 20 MB: several pieces, several blocks
    store = write_store(tmp_path / "s", [{"features": Dense(values)}], block_bytes=1 << 20)
    out = [np.full((3000, 40, 41), np.nan, "f4") for _ in range(4)]
    threads = [
        threading.Thread(target=store.read_rows, args=("features", 0, 3000, buffer))
        for buffer in out
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(same(buffer, values) for buffer in out)


def test_a_store_crosses_to_another_process(tmp_path):
    store = write_store(tmp_path / "s", [simple_shard(np.random.default_rng(2), 20)])
    store.read_rows("features", 0, 20)
    copy = pickle.loads(pickle.dumps(store))
    assert same(copy.read_rows("features", 3, 9), store.read_rows("features", 3, 9))


def test_a_forked_child_reads_with_its_parents_store(tmp_path):
    values = np.arange(3_000_000, dtype="f4").reshape(3000, 1000)
    store = write_store(tmp_path / "s", [{"features": Dense(values)}], block_bytes=1 << 20)
    store.read_rows("features", 0, 3000)  # starts the reader threads, which a fork does not keep
    child = os.fork()
    if child == 0:
        os._exit(0 if same(store.read_rows("features", 0, 3000), values) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_somebody_without_stoker_reads_the_shard_with_h5py(tmp_path):
    data = simple_shard(np.random.default_rng(3), 10)
    write_store(tmp_path / "s", [data])
    code = (
        "import h5py, sys\n"
        "assert not any(name.startswith('stoker') for name in sys.modules)\n"
        f"f = h5py.File({str(tmp_path / 's' / 'shard-00000.h5')!r})\n"
        "o = f['peaks/offsets'][:]\n"
        "print(f['features'].shape, f['features'].chunks, f['M1/rows'].shape, f['M1'].attrs['window'],"
        " f['M1'].attrs['columns'].split(),"
        " bytes(f['name/values'][f['name/offsets'][3]:f['name/offsets'][4]]).decode(),"
        " int(f['features'][:].astype('f8').sum() * 1e6))\n"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    total = int(data["features"].values.astype("f8").sum() * 1e6)
    assert shown.strip() == f"(10, 7, 5) None (26, 4) 16 ['o', 'h', 'l', 'c'] sample 3 é {total}"


def test_h5ls_lists_a_shard(tmp_path):
    if not shutil.which("h5ls"):
        pytest.skip("h5ls is not installed (Debian: hdf5-tools)")
    write_store(tmp_path / "s", [simple_shard(np.random.default_rng(3), 10)])
    shard = tmp_path / "s" / "shard-00000.h5"
    shown = subprocess.run(
        ["h5ls", "-r", str(shard)], capture_output=True, text=True, check=True
    ).stdout
    assert "/features" in shown
    assert "{10, 7, 5}" in shown


# -- faults --------------------------------------------------------------------------------


@pytest.fixture
def store_path(tmp_path) -> Path:
    rng = np.random.default_rng(4)
    write_store(tmp_path / "s", [simple_shard(rng, 300), simple_shard(rng, 200)]).close()
    return tmp_path / "s"


def read_all(path: Path) -> None:
    with open_store(path) as store:
        for name, info in store.fields.items():
            if info.kind == "dense":
                store.read_rows(name, 0, store.num_samples)
            elif info.kind == "ragged":
                store.read_ragged(name, 0, store.num_samples)
            else:
                for number in range(len(store.shards)):
                    for part in ("rows", "time", "gap", "ends"):
                        store.read_series(name, part, number)


def test_a_truncated_shard_is_named(store_path):
    shard = store_path / "shard-00001.h5"
    os.truncate(shard, shard.stat().st_size - 5000)
    with pytest.raises(CorruptError, match=r"shard-00001\.h5 has \d+ bytes"):
        read_all(store_path)


def test_a_flipped_data_byte_is_found_at_its_block_on_first_read(store_path):
    shard = store_path / "shard-00000.h5"
    with open_store(store_path) as store:
        location = store.shards[0].arrays["features"].location
    at = location.offset + 4096 * 3 + 17
    with shard.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x40]))
    with open_store(store_path) as store:
        good = store.read_rows("features", 0, 10)  # other blocks still read
        assert good.shape == (10, 7, 5)
        with pytest.raises(
            CorruptError,
            match=r"shard-00000\.h5: dataset 'features' fails its checksum in block 3 \(bytes",
        ):
            store.read_rows("features", 0, 300)
        with pytest.raises(CorruptError, match="block 3"):  # a small row inside the bad block
            store.gather("features", np.array([(4096 * 3 + 17) // 140]))
        problems = store.verify().problems
    assert len(problems) == 1
    assert "block 3" in problems[0]


def test_a_missing_shard_is_named(store_path):
    (store_path / "shard-00001.h5").unlink()
    with open_store(store_path) as store:
        store.read_rows("features", 0, 300)  # the first shard is whole
        with pytest.raises(
            StoreError, match=r"shard .*shard-00001\.h5 of the store cannot be found"
        ):
            store.read_rows("features", 0, 301)
        assert len(store.verify().problems) == 1


def test_swapped_shards_are_found_out_even_when_the_sizes_agree(tmp_path):
    rng = np.random.default_rng(5)
    for name in ("a", "b"):
        write_store(tmp_path / name, [{"features": Dense(rng.normal(size=(50, 8)))}]).close()
    shutil.copy(tmp_path / "a" / "shard-00000.h5", tmp_path / "b" / "shard-00000.h5")
    with pytest.raises(CorruptError, match="not the shard that the manifest describes"):
        read_all(tmp_path / "b")


def test_a_manifest_newer_than_the_code_is_refused(store_path):
    manifest = json.loads((store_path / "store.json").read_text())
    manifest["format_version"] = 99
    manifest["something_new"] = True
    (store_path / "store.json").write_text(json.dumps(manifest))
    with pytest.raises(StoreVersionError, match="format version 99") as caught:
        open_store(store_path)
    assert "git pull" in caught.value.fix


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not JSON"),
        ("[]", "fails its own checksum"),
        ('{"num_samples": 1}', "fails its own checksum"),
        (seal({"num_samples": 1}), "fields: Field required"),
        ("{" * 100_000, "is not JSON"),
    ],
)
def test_a_damaged_manifest_is_named(store_path, text, message):
    (store_path / "store.json").write_text(text)
    with pytest.raises(CorruptError, match=message):
        open_store(store_path)


def test_an_edited_manifest_is_found_out(store_path):
    text = (store_path / "store.json").read_text()
    (store_path / "store.json").write_text(text.replace("<f4", "<i4"))
    with pytest.raises(CorruptError, match="fails its own checksum"):
        open_store(store_path)


def test_damaged_hdf5_structures_do_not_reach_the_reader(store_path):
    shard = store_path / "shard-00000.h5"
    data = bytearray(shard.read_bytes())
    with open_store(store_path) as store:
        good = store.read_rows("features", 0, 300)
    data[8:96] = os.urandom(88)  # the superblock: h5py cannot open the file any more
    shard.write_bytes(data)
    with open_store(store_path) as store:
        assert same(store.read_rows("features", 0, 300), good)


def test_a_manifest_that_points_outside_its_folder_is_refused(store_path):
    manifest = json.loads((store_path / "store.json").read_text())
    manifest["shards"][0]["file"] = "../../etc/passwd"
    del manifest["manifest_checksum"]
    (store_path / "store.json").write_text(seal(manifest))
    with pytest.raises(CorruptError, match="is not a file name"):
        open_store(store_path)


def test_a_folder_without_manifest_says_so(tmp_path):
    with pytest.raises(StoreError, match=r"has no store\.json"):
        open_store(tmp_path)
    with pytest.raises(StoreError, match="does not exist"):
        open_store(tmp_path / "nothing")


def test_a_read_only_store_reads(store_path):
    for path in (*store_path.iterdir(), store_path):
        path.chmod(0o555 if path.is_dir() else 0o444)
    read_all(store_path)


def test_a_file_on_a_read_only_disk_reads(store_path, tmp_path):
    place = tmp_path / "mounted"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "--bind", str(store_path), str(place)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("cannot mount here (needs root)")
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", str(place)], check=True)
        with pytest.raises(OSError, match="Read-only"):
            (place / "x").write_text("")
        read_all(place)
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_wrong_buffers_ranges_and_fields_are_refused(store_path):
    with open_store(store_path) as store:
        with pytest.raises(InputError, match=r"within 0 to 500|samples 0 to 501"):
            store.read_rows("features", 0, 501)
        with pytest.raises(InputError, match="no dense field 'peaks'"):
            store.read_rows("peaks", 0, 1)
        with pytest.raises(InputError, match="the buffer for field 'features' is float64"):
            store.read_rows("features", 0, 2, np.empty((2, 7, 5)))
        with pytest.raises(InputError, match="indices from -1"):
            store.gather("features", np.array([-1]))
        with pytest.raises(InputError, match="is not text"):
            store.read_text("peaks", 0)


def test_offsets_beyond_two_to_the_31_and_63_are_exact():
    shape = (2**40, 2**13, 3)
    location = Location(Path("x"), "d", shape, np.dtype("f8"), "contiguous", offset=2048)
    end = 2048 + 2**40 * 2**13 * 3 * 8
    assert location.row_bytes == 2**13 * 3 * 8
    check_bounds(location, end)
    with pytest.raises(CorruptError, match=f"needs bytes 2048 to {end}, .* ends at {end - 1}"):
        check_bounds(location, end - 1)


def test_rows_beyond_two_to_the_31_elements_read_from_a_sparse_file(tmp_path):
    path = tmp_path / "big.h5"
    rows = 2**31 // 1024 + 5
    with h5py.File(path, "w") as file:
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        plist.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        space = h5py.h5s.create_simple((rows, 1024))
        h5py.h5d.create(file.id, b"features", h5py.h5t.STD_U8LE, space, plist)
        file["features"][rows - 2] = np.arange(1024) % 251
    assert path.stat().st_blocks * 512 < 50e6  # it costs no disk
    with open_store(path) as store:
        assert (store.read_rows("features", rows - 2, rows - 1)[0] == np.arange(1024) % 251).all()
        assert (
            store.gather("features", np.array([0, rows - 2, 7]))[1] == np.arange(1024) % 251
        ).all()


# -- what cannot be stored ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Dense(np.array(["a"])), "dtype <U1"),
        (lambda: Dense(np.array(1.0)), "scalar"),
        (lambda: Dense(np.zeros((2, 2)), ("a",)), "1 column names for 2 columns"),
        (lambda: Ragged(np.zeros(3), np.array([0, 2])), "do not span 3 values"),
        (lambda: Ragged(np.zeros(3), np.array([0, 4, 3])), "fall after row 1"),
        (
            lambda: Series(
                np.zeros((3, 1)), np.array([0, 2, 1]), np.array([3]), 1, np.zeros(3), ("a",), 1
            ),
            "backwards",
        ),
        (
            lambda: Series(
                np.zeros((3, 1)), np.arange(3), np.array([1]), 2, np.zeros(3), ("a",), 1
            ),
            "window ends run",
        ),
    ],
)
def test_impossible_fields_are_refused(make, message):
    with pytest.raises(InputError, match=message):
        make()


@pytest.mark.parametrize("name", ["_checksums", "a/b", "", ".."])
def test_names_that_would_clash_inside_the_file_are_refused(name, tmp_path):
    with pytest.raises(InputError, match="is not a field name"):
        write_shard(tmp_path / "x.h5", {name: Dense(np.zeros(3))}, "x")


def test_fields_of_different_lengths_are_refused(tmp_path):
    with pytest.raises(InputError, match="different numbers of samples"):
        write_shard(
            tmp_path / "x.h5",
            {"a": Dense(np.zeros(3)), "b": Ragged(np.zeros(0), offsets_of(np.zeros(2, int)))},
            "x",
        )


def test_a_full_disk_leaves_nothing_behind(tmp_path):
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(place)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("cannot mount here (needs root)")
    try:
        with pytest.raises(StokerError, match="cannot write"):
            write_shard(place / "x.h5", {"a": Dense(np.ones(10**6))}, "x")
        assert list(place.iterdir()) == []
    finally:
        subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize("offset_rows", [0, 1, 7])
def test_direct_reads_of_cold_data_give_the_same_bytes(tmp_path, offset_rows):
    values = np.random.default_rng(0).normal(size=(900, 1251)).astype("f4")  # rows of 5,004 bytes
    write_store(tmp_path / "s", [{"features": Dense(values)}], block_bytes=1 << 20).close()
    store = open_store(tmp_path / "s")
    array = store.shards[0].arrays["features"]
    array.file.direct = True
    array.file._is_cold = lambda offset: True  # the page cache cannot be dropped without root
    assert same(store.read_rows("features", offset_rows, 900), values[offset_rows:])
    assert same(store.read_rows("features", offset_rows, 700), values[offset_rows:700])
