"""Spectra and graphs on the device equal the numpy reference of `stoker.sources`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from stoker.loader import ragged
from stoker.loader.loader import Loader
from stoker.sources.molecules.packed import expand_atoms, expand_bonds
from stoker.sources.msp import bin_spectrum
from stoker.store.fields import Ragged, offsets_of
from store_makers import write_store

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=8)


def on(device, array: np.ndarray) -> torch.Tensor:
    signed = {"uint16": "int16", "uint32": "int32", "uint64": "int64"}.get(array.dtype.name)
    if signed is None:
        return torch.from_numpy(array).to(device)
    return torch.from_numpy(array.view(signed)).to(device).view(getattr(torch, array.dtype.name))


@pytest.mark.parametrize("device", DEVICES)
@given(
    lengths=LENGTHS,
    seed=st.integers(0, 99),
    whole=st.booleans(),
    rounding=st.sampled_from(["nearest", "floor"]),
)
def test_binning_equals_the_reference(device, lengths, seed, whole, rounding):
    rng = np.random.default_rng(seed)
    offsets = offsets_of(np.array(lengths))
    mz = (
        rng.integers(0, 130, offsets[-1]).astype(np.uint16)
        if whole
        else (rng.random(offsets[-1]) * 130).astype("f4")
    )
    if not whole and len(mz):
        mz[0] = 99.5
    intensity = rng.random(offsets[-1]).astype(np.float16)
    want = bin_spectrum(
        mz.astype("f8"), intensity.astype("f4"), offsets, 100, rounding=rounding
    ).spectra
    got = ragged.bin_spectra(
        on(device, mz), on(device, intensity), on(device, offsets), 100, rounding
    )
    assert np.allclose(got.cpu().numpy(), want, atol=1e-7)
    padded = (
        np.concatenate([mz, np.full(5, 50, mz.dtype)]),
        np.concatenate([intensity, np.ones(5, np.float16)]),
    )
    again = ragged.bin_spectra(
        on(device, padded[0]), on(device, padded[1]), on(device, offsets), 100, rounding
    )
    assert torch.equal(again, got)


@pytest.mark.parametrize("device", DEVICES)
@given(
    atoms=hnp.arrays(np.uint32, st.integers(0, 20)), bonds=hnp.arrays(np.uint32, st.integers(0, 20))
)
def test_words_expand_as_the_reference_does(device, atoms, bonds):
    assert (ragged.expand_atoms(on(device, atoms)).cpu().numpy() == expand_atoms(atoms)).all()
    begin, end, features = ragged.expand_bonds(on(device, bonds))
    edges, attributes = expand_bonds(bonds)
    assert (begin.cpu().numpy() == edges[0, ::2]).all()
    assert (end.cpu().numpy() == edges[1, ::2]).all()
    assert (features.cpu().numpy() == attributes[::2]).all()


@pytest.mark.parametrize("device", DEVICES)
@given(lengths=LENGTHS, seed=st.integers(0, 9))
def test_fingerprints_expand(device, lengths, seed):
    rng = np.random.default_rng(seed)
    offsets = offsets_of(np.array(lengths))
    bits = rng.integers(0, 4096, offsets[-1]).astype(np.uint16)
    counts = rng.integers(1, 9, offsets[-1]).astype(np.uint8)
    want = np.zeros((len(lengths), 4096), "f4")
    np.add.at(want, (np.repeat(np.arange(len(lengths)), lengths), bits), counts)
    got = ragged.expand_fingerprint(on(device, bits), on(device, counts), on(device, offsets))
    assert (got.cpu().numpy() == want).all()


@pytest.mark.parametrize("device", DEVICES)
def test_graphs_join_as_pytorch_geometric_joins_them(device):
    rng = np.random.default_rng(0)
    sizes = [3, 1, 5, 2]
    bonds_of = [2, 0, 6, 1]
    words, bonds = [], []
    for size, count in zip(sizes, bonds_of, strict=True):
        words.append(rng.integers(0, 2**21, size).astype(np.uint32))
        ends = rng.integers(0, size, (count, 2)).astype(np.uint32)
        bonds.append(
            ends[:, 0] | ends[:, 1] << 14 | rng.integers(0, 16, count).astype(np.uint32) << 28
        )
    batch = {
        "atoms": on(device, np.concatenate(words)),
        "atoms/offsets": on(device, offsets_of(np.array(sizes))),
        "bonds": on(device, np.concatenate(bonds).astype(np.uint32)),
        "bonds/offsets": on(device, offsets_of(np.array(bonds_of))),
    }
    graphs = ragged.batch_graphs(batch)
    first, edges, attributes = 0, [], []
    for atoms, bond in zip(words, bonds, strict=True):
        index, features = expand_bonds(bond)
        edges.append(index + first)
        attributes.append(features)
        first += len(atoms)
    assert (graphs.edge_index.cpu().numpy() == np.concatenate(edges, axis=1)).all()
    assert (graphs.edge_attr.cpu().numpy() == np.concatenate(attributes)).all()
    assert graphs.batch.tolist() == np.repeat(np.arange(4), sizes).tolist()
    geometric = pytest.importorskip(
        "torch_geometric.data", reason="torch-geometric is not installed"
    )
    singles = [
        geometric.Data(
            torch.from_numpy(expand_atoms(a)),
            torch.from_numpy(expand_bonds(b)[0]),
            torch.from_numpy(expand_bonds(b)[1]),
        )
        for a, b in zip(words, bonds, strict=True)
    ]
    theirs = geometric.Batch.from_data_list(singles)
    for name in ("x", "edge_index", "edge_attr", "batch", "ptr"):
        assert torch.equal(getattr(graphs, name).cpu(), getattr(theirs, name)), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("first", [np.nan, np.inf, 7.0])
@pytest.mark.parametrize("chunk_bytes", [None, 16])
def test_the_padding_of_static_shapes_is_zero_whatever_the_first_value_is(
    tmp_path, device, first, chunk_bytes
):
    values = np.array([first, np.nan, 1, 2, 3, 4, 5], "f4")
    fields = {
        "r": Ragged(values, np.array([0, 2, 2, 5, 7])),
        "words": Ragged(values > 2, [0, 1, 1, 4, 7]),
    }
    store = write_store(tmp_path / "store", [fields])
    with Loader(store, 2, device, chunk_bytes=chunk_bytes) as loader:
        for index in loader.index_batches():
            exact = loader.assemble(index.indices, index.totals)
            padded = loader.assemble(index.indices)
            for name in fields:
                held = len(exact[name])
                np.testing.assert_array_equal(padded[name][:held].cpu(), exact[name].cpu())
                assert padded[name].dtype == exact[name].dtype
                assert not padded[name][held:].any()
