"""Zarr folders, both versions, read as numpy wrote them; what cannot be read is named."""

from __future__ import annotations

import gzip
import importlib.util
import json
import pickle
import zlib
from itertools import product

import numpy as np
import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from stoker.cli.main import app
from stoker.doctor import ablation
from stoker.errors import CorruptError, StoreError
from stoker.loader.loader import Loader
from stoker.store.reader import open_store
from stoker.store.zarr import crc32c

COMPRESS = {
    None: lambda raw: raw,
    "zlib": zlib.compress,
    "gzip": gzip.compress,
    "zstd": lambda raw: pyarrow.Codec("zstd").compress(raw, asbytes=True),
}


def chunk_bytes(values, chunks, numbers, fill, order="C") -> bytes | None:
    """One chunk, padded to its whole shape; None where all values are the fill value."""
    whole = np.full(chunks, fill, values.dtype)
    part = values[tuple(slice(n * c, (n + 1) * c) for n, c in zip(numbers, chunks, strict=True))]
    whole[tuple(map(slice, part.shape))] = part
    return None if (part == fill).all() else whole.tobytes(order)


def write_array(folder, values, chunks, version=3, codec="zstd", fill=0, order="C", separator="/"):
    folder.mkdir(parents=True)
    numbers = list(product(*(range(-(-n // c)) for n, c in zip(values.shape, chunks, strict=True))))
    for place in numbers:
        raw = chunk_bytes(values, chunks, place, fill, order)
        if raw is None:
            continue
        words = [*(["c"] if version == 3 else []), *map(str, place)]
        path = folder / separator.join(words)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(COMPRESS[codec](raw) + (b"sum!" if version == 3 else b""))
    shown = "NaN" if fill != fill else fill
    if version == 2:
        facts = {
            "zarr_format": 2, "shape": values.shape, "chunks": chunks, "dtype": values.dtype.str,
            "compressor": codec and {"id": codec, "level": 1}, "fill_value": shown, "order": order,
            "filters": None, "dimension_separator": separator,
        }  # fmt: skip
    else:
        endian = "big" if values.dtype.str.startswith(">") else "little"
        codecs = [{"name": "bytes", "configuration": {"endian": endian}}]
        codecs += [{"name": codec, "configuration": {}}] if codec else []
        facts = {
            "zarr_format": 3, "node_type": "array", "shape": values.shape, "fill_value": shown,
            "data_type": values.dtype.name, "codecs": [*codecs, {"name": "crc32c"}],
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunks}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": separator}},
        }  # fmt: skip
    (folder / ("zarr.json" if version == 3 else ".zarray")).write_text(json.dumps(facts))


def write_group(folder, version=3, **attributes):
    folder.mkdir(parents=True, exist_ok=True)
    if version == 3:
        facts = {"zarr_format": 3, "node_type": "group", "attributes": attributes}
        (folder / "zarr.json").write_text(json.dumps(facts))
    else:
        (folder / ".zgroup").write_text('{"zarr_format": 2}')
        (folder / ".zattrs").write_text(json.dumps(attributes))


@given(
    version=st.sampled_from([2, 3]),
    codec=st.sampled_from([None, "gzip", "zstd", "zlib"]),
    shape=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    chunk=st.lists(st.integers(1, 9), min_size=3, max_size=3),
    dtype=st.sampled_from(["<f4", ">f8", "<i2", "|u1", ">u4"]),
    order=st.sampled_from("CF"),
    separator=st.sampled_from("./"),
    fill=st.sampled_from([0, 7]),
    seed=st.integers(0, 99),
)
def test_every_layout_reads_as_it_was_written(
    version, codec, shape, chunk, dtype, order, separator, fill, seed, tmp_path_factory
):
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 3, shape).astype(dtype) + np.array(fill, dtype)
    folder = tmp_path_factory.mktemp("z") / "x.zarr"
    write_group(folder, version)
    chunks = tuple(chunk[: len(shape)])
    order = order if version == 2 else "C"
    write_array(folder / "features", values, chunks, version, codec, fill, order, separator)
    with open_store(folder) as store:
        n = len(store)
        assert n == shape[0]
        low, high = sorted(rng.integers(0, n + 1, 2))
        assert (store.read_rows("features", low, high) == values[low:high]).all()
        picks = rng.integers(0, n, 9)
        assert (store.gather("features", picks) == values[picks]).all()
        assert store.read_rows("features", 0, n).dtype.isnative


@pytest.fixture
def table(tmp_path):
    write_group(tmp_path / "t.zarr")
    write_array(tmp_path / "t.zarr/x", np.arange(60.0, dtype="f4").reshape(20, 3), (8, 2))
    write_array(tmp_path / "t.zarr/deep/y", np.arange(20), (8,), 2, "zlib")
    write_array(tmp_path / "t.zarr/bins", np.arange(4), (4,))
    return tmp_path / "t.zarr"


def test_arrays_are_chosen_as_in_hdf5(table):
    with pytest.raises(StoreError, match="which counts samples is not clear") as caught:
        open_store(table)
    assert "20 rows: " in caught.value.allowed
    with open_store(table, rows=20) as store:
        assert set(store.fields) == {"x", "deep/y"}
        twin = pickle.loads(pickle.dumps(store))
        assert twin.read_rows("deep/y", 3, 9).tolist() == [3, 4, 5, 6, 7, 8]
        assert store.num_bytes == sum(f.stat().st_size for f in table.rglob("*") if f.is_file())
        report = store.verify()
        assert not report.problems
        assert not report.checksummed
        with Loader(store, 6, "cpu", fields=["x"]) as loader:
            rows = np.concatenate([batch["x"].numpy() for batch in loader])
        assert (rows == np.arange(60.0).reshape(20, 3)).all()


def test_the_doctor_reads_the_chunks_with_and_without_decoding_them(table):
    with open_store(table, rows=20) as store, Loader(store, 6, "cpu", fields=["x"]) as loader:
        read, _, _, hdf5 = ablation._read(loader, 6)
    assert [facts.chunks for facts in hdf5] == [(8, 2)]
    assert read > 0


def test_a_folder_is_inspected_and_packed(table, monkeypatch):
    monkeypatch.chdir(table.parent)
    assert CliRunner().invoke(app, ["inspect", "t.zarr", "--rows", "20"]).exit_code in (0, 3)
    words = ["pack", "arrays", "t.zarr", "out", "--rows", "20", "--jobs", "1"]
    run = CliRunner().invoke(app, words)
    assert run.exit_code == 0, run.output
    with open_store("out") as store:
        assert store.read_rows("deep_y", 0, 20).tolist() == list(range(20))


def test_a_single_array_and_a_sparse_matrix(tmp_path):
    values = np.arange(12.0).reshape(6, 2)
    write_array(tmp_path / "one.zarr", values, (4, 2), fill=float("nan"))
    with open_store(tmp_path / "one.zarr") as store:
        assert (store.read_rows("features", 0, 6) == values).all()
    (tmp_path / "one.zarr/c/1/0").unlink()
    with open_store(tmp_path / "one.zarr") as store:
        assert np.isnan(store.read_rows("features", 4, 6)).all()
    root = tmp_path / "cells.zarr"
    write_group(root, **{"encoding-type": "anndata"})
    write_group(root / "X", **{"encoding-type": "csr_matrix", "shape": [3, 9]})
    for name, numbers in (("data", [1.0, 2, 3]), ("indices", [4, 8, 0]), ("indptr", [0, 2, 2, 3])):
        write_array(root / "X" / name, np.array(numbers), (2,))
    write_array(root / "obs/size", np.arange(3), (3,))
    with open_store(root) as store:
        assert len(store) == 3
        assert store.read_values("X/indices", 0).tolist() == [4, 8]
        assert set(store.fields) == {"X/data", "X/indices", "obs/size"}


def change(folder, **facts):
    path = folder / "zarr.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | facts))


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"data_type": "string"}, "has dtype string"),
        ({"data_type": "complex128"}, "has dtype complex128"),
        ({"codecs": [{"name": "bytes"}, {"name": "sharding_indexed"}]}, "has the codec sharding_indexed"),
        ({"codecs": [{"name": "transpose"}, {"name": "bytes"}]}, "has the codec transpose"),
        ({"codecs": [{"name": "bytes"}, {"name": "nobody"}]}, "nobody"),
        ({"shape": [], "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": []}}}, "is a single value"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_left_aside_by_name(facts, words, table):
    change(table / "bins", **facts)
    with open_store(table) as store:
        assert words in store.left_aside("bins")
        assert set(store.fields) == {"x", "deep/y"}


def test_an_empty_group_is_listed_with_a_command_for_folders(tmp_path):
    write_group(tmp_path / "empty")
    with pytest.raises(StoreError, match="holds no numeric array") as caught:
        open_store(tmp_path / "empty")
    assert caught.value.fix == f"ls {tmp_path / 'empty'}"


@pytest.mark.skipif(importlib.util.find_spec("numcodecs") is not None, reason="numcodecs is here")
def test_blosc_says_what_to_install(tmp_path):
    write_array(tmp_path / "b.zarr", np.arange(9), (9,))
    change(tmp_path / "b.zarr", codecs=[{"name": "bytes"}, {"name": "blosc"}])
    with pytest.raises(StoreError, match="compressed by blosc") as caught:
        open_store(tmp_path / "b.zarr")
    assert "[zarr]" in caught.value.fix


def test_a_folder_that_only_zarr_can_read_gets_a_command(tmp_path):
    write_array(tmp_path / "b.zarr", np.arange(9), (9,))
    change(tmp_path / "b.zarr", codecs=[{"name": "transpose"}, {"name": "bytes"}])
    with pytest.raises(StoreError, match="transpose") as caught:
        open_store(tmp_path / "b.zarr")
    assert "import h5py, zarr" in caught.value.fix


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("x/c/1/0", b"damaged", "x/c/1/0: .*ZSTD"),
        ("x/c/0/1", COMPRESS["zstd"](bytes(7)) + b"sum!", "x/c/0/1: "),
        ("x/zarr.json", b"{", "zarr.json: it is not JSON"),
        ("x/zarr.json", b"[]", "not a JSON object"),
        ("x/zarr.json", b'{"node_type": "array", "zarr_format": 3}', "metadata is wrong: KeyError"),
    ],
)
def test_damage_names_the_file(name, content, words, table):
    (table / name).write_bytes(content)
    with pytest.raises(CorruptError, match=words):  # noqa: SIM117
        with open_store(table, rows=20) as store:
            store.read_rows("x", 0, 20)


@given(facts=st.dictionaries(
    st.sampled_from(["shape", "data_type", "codecs", "chunk_grid", "fill_value", "chunk_key_encoding", "zarr_format"]),
    st.none() | st.integers(-2, 9) | st.text(max_size=4) | st.lists(st.integers(-2, 5), max_size=3),
    min_size=1, max_size=2,
))  # fmt: skip
def test_any_metadata_is_read_or_refused(facts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("z") / "x.zarr"
    write_array(folder, np.arange(12.0).reshape(6, 2), (4, 2))
    change(folder, **facts)
    try:
        with open_store(folder) as store:
            store.read_rows("features", 0, min(3, len(store)))
    except StoreError:
        pass


def write_sharded(folder, values, chunks, counts, codec="zstd", at_end=True, checked=True, fill=0):
    """Write an array in shards of `counts` chunks each, as the specification has it."""
    folder.mkdir(parents=True)
    shard = tuple(size * count for size, count in zip(chunks, counts, strict=True))
    compress = COMPRESS[codec]
    for place in product(*(range(-(-n // s)) for n, s in zip(values.shape, shard, strict=True))):
        body, entries = [], []
        size = 16 * int(np.prod(counts)) + 4 * checked
        offset = 0 if at_end else size
        for inner in product(*map(range, counts)):
            numbers = [p * c + i for p, c, i in zip(place, counts, inner, strict=True)]
            inside = all(n * c < s for n, c, s in zip(numbers, chunks, values.shape, strict=True))
            raw = chunk_bytes(values, chunks, numbers, fill) if inside else None
            if raw is None:
                entries.append((2**64 - 1, 2**64 - 1))
                continue
            packed = compress(raw)
            entries.append((offset, len(packed)))
            body.append(packed)
            offset += len(packed)
        if not body:
            continue
        index = np.array(entries, "<u8").tobytes()
        index += crc32c(index).to_bytes(4, "little") if checked else b""
        path = folder / "/".join(["c", *map(str, place)])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"".join([*body, index] if at_end else [index, *body]))
    little = {"name": "bytes", "configuration": {"endian": "little"}}
    inside = {
        "chunk_shape": chunks,
        "codecs": [little, *([{"name": codec, "configuration": {}}] if codec else [])],
        "index_codecs": [little, *([{"name": "crc32c"}] if checked else [])],
        "index_location": "end" if at_end else "start",
    }
    facts = {
        "zarr_format": 3, "node_type": "array", "shape": values.shape, "fill_value": fill,
        "data_type": values.dtype.name,
        "codecs": [{"name": "sharding_indexed", "configuration": inside}],
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": shard}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
    }  # fmt: skip
    (folder / "zarr.json").write_text(json.dumps(facts))


def test_the_checksum_is_that_of_castagnoli():
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA  # RFC 3720, appendix B.4


@given(
    shape=st.lists(st.integers(1, 14), min_size=1, max_size=3),
    chunk=st.lists(st.integers(1, 5), min_size=3, max_size=3),
    counts=st.lists(st.integers(1, 4), min_size=3, max_size=3),
    codec=st.sampled_from([None, "gzip", "zstd"]),
    at_end=st.booleans(),
    checked=st.booleans(),
    seed=st.integers(0, 99),
)
def test_shards_read_as_they_were_written(
    shape, chunk, counts, codec, at_end, checked, seed, tmp_path_factory
):
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 2, shape).astype("<f4")
    folder = tmp_path_factory.mktemp("z") / "x.zarr"
    dims = len(shape)
    write_sharded(folder, values, chunk[:dims], counts[:dims], codec, at_end, checked)
    with open_store(folder) as store:
        assert (store.read_rows("features", 0, len(store)) == values).all()
        picks = rng.integers(0, len(store), 9)
        assert (store.gather("features", picks) == values[picks]).all()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda raw: raw[:-1] + bytes([raw[-1] ^ 1]), "the checksum of its index"),
        (lambda raw: raw[:20], "too few for its index"),
        (lambda raw: bytes([raw[0] ^ 255, *raw[1:]]), "x.zarr/c/0: "),
        (lambda raw: raw[:-20] + bytes(16) + crc32c(raw[-68:-20] + bytes(16)).to_bytes(4, "little"), "x.zarr/c/0: "),
    ],
)  # fmt: skip
def test_a_damaged_shard_names_the_file(damage, words, tmp_path):
    write_sharded(tmp_path / "x.zarr", np.arange(1, 17.0), (4,), (4,))
    file = tmp_path / "x.zarr/c/0"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(CorruptError, match=words):  # noqa: SIM117
        with open_store(tmp_path / "x.zarr") as store:
            store.read_rows("features", 0, 16)


def test_shards_that_do_not_fit_are_refused(tmp_path):
    write_sharded(tmp_path / "x.zarr", np.arange(1, 17.0), (4,), (4,))
    facts = json.loads((tmp_path / "x.zarr/zarr.json").read_text())
    facts["chunk_grid"]["configuration"]["chunk_shape"] = [13]
    (tmp_path / "x.zarr/zarr.json").write_text(json.dumps(facts))
    with pytest.raises(CorruptError, match="do not fill shards"):
        open_store(tmp_path / "x.zarr")
