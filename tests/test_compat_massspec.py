"""`LazyMassSpecDataset` and `NISTDataLoader`: documented names and lines, measured numbers."""

from __future__ import annotations

import pickle
import re
import shutil

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from molecule_makers import SMILES, inchikey, mol_block, msp_record, write_library, write_mols
from stoker.compat.massspec import LazyMassSpecDataset, NISTDataLoader, collate_molecules
from stoker.errors import InputError, QualityError, SourceError, StoreError
from stoker.sources.molecules.functional_groups import expand_functional_groups
from stoker.sources.molecules.packed import (
    expand_atoms,
    expand_bonds,
    pack_molecule,
    read_structure,
)

pytest.importorskip("rdkit")
SMALL = SMILES[:24]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return write_library(tmp_path_factory.mktemp("library"), SMALL)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache") / "lazy_cache"


@pytest.fixture(scope="module")
def dataset(library, cache):
    return LazyMassSpecDataset(*library, cache_dir=cache, jobs=1)


# -- items ---------------------------------------------------------------------------------------


def test_every_item_is_what_the_featuriser_says(dataset):
    assert len(dataset) == len(SMALL)
    for number, smiles in enumerate(SMALL):
        item = dataset[number]
        packed = pack_molecule(read_structure(mol_block(smiles, nist=number % 2 == 0), "mol"))
        edge_index, edge_attr = expand_bonds(packed.bonds)
        np.testing.assert_array_equal(item["node_features"], expand_atoms(packed.atoms))
        np.testing.assert_array_equal(item["edge_index"], edge_index)
        np.testing.assert_array_equal(item["edge_attr"], edge_attr)
        flags = expand_functional_groups(np.array([packed.functional_groups], np.uint64))[0]
        np.testing.assert_array_equal(item["functional_groups"], flags)
        ecfp = np.zeros(4096)
        ecfp[packed.ecfp_bits] = packed.ecfp_counts
        np.testing.assert_array_equal(item["ecfp"], ecfp)
        assert item["mol_weight"].item() == pytest.approx(packed.mol_weight, rel=1e-6)
        assert dataset.metadata(number)["inchikey"] == inchikey(smiles)


def test_shapes_and_types_are_the_documented_ones(dataset):
    item = dataset[6]
    atoms, bonds = 9, 9  # 1-phenylethanol
    shapes = {name: (tuple(value.shape), value.dtype) for name, value in item.items()}
    assert shapes == {
        "spectrum": ((501,), torch.float32),
        "node_features": ((atoms, 48), torch.float32),
        "edge_index": ((2, 2 * bonds), torch.int64),
        "edge_attr": ((2 * bonds, 6), torch.float32),
        "ecfp": ((4096,), torch.float32),
        "mol_weight": ((), torch.float32),
        "functional_groups": ((48,), torch.float32),
    }


def test_spectra_have_max_mz_plus_one_bins_and_the_last_one_is_kept(tmp_path):
    """The original gave 500 bins to a 501-wide dataset, and lost m/z = max_mz."""
    peaks = [(50, 200.0), (100, 400.0), (101, 999.0)]
    msp = tmp_path / "library.msp"
    msp.write_text(msp_record("one", ID="1", peaks=peaks))
    mols = write_mols(tmp_path, {"id1.mol": mol_block("CCO")}, "folder")
    dataset = LazyMassSpecDataset(msp, mols, max_mz=100, cache_dir=tmp_path / "cache", jobs=1)
    spectrum = dataset[0]["spectrum"]
    assert spectrum.shape == (101,)
    assert torch.nonzero(spectrum).flatten().tolist() == [50, 100]
    assert spectrum[100] == 1.0
    assert spectrum[50] == pytest.approx(0.5, rel=1e-3)


def test_single_atoms_have_a_graph_without_edges(dataset):
    item = dataset[SMALL.index("[He]")]
    assert item["node_features"].shape == (1, 48)
    assert item["edge_index"].shape == (2, 0)
    assert item["edge_attr"].shape == (0, 6)


def test_indices_count_from_both_ends_and_end(dataset):
    assert torch.equal(dataset[-1]["spectrum"], dataset[len(dataset) - 1]["spectrum"])
    for index in (len(dataset), -len(dataset) - 1):
        with pytest.raises(IndexError, match="0 to 23"):
            dataset[index]
    assert sum(1 for _ in dataset) == len(dataset)


# -- options have an effect ----------------------------------------------------------------------


def test_functional_groups_can_be_left_out(library, cache):
    dataset = LazyMassSpecDataset(*library, cache_dir=cache, use_functional_groups=False, jobs=1)
    assert "functional_groups" not in dataset[0]
    assert "functional_groups" not in collate_molecules([dataset[0], dataset[1]])


def test_precomputed_graphs_are_the_same_graphs_from_memory(library, cache, dataset, monkeypatch):
    eager = LazyMassSpecDataset(*library, cache_dir=cache, precompute_graphs=True, jobs=1)
    assert eager.resident_bytes > dataset.resident_bytes
    read = []
    original = type(eager.store).read_values
    monkeypatch.setattr(
        type(eager.store),
        "read_values",
        lambda self, name, index: read.append(name) or original(self, name, index),
    )
    for number in range(len(eager)):
        theirs = eager[number]
        assert not {"atoms", "bonds"} & set(read)
        mine = dataset[number]
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
        read.clear()


def test_max_samples_has_a_cache_of_its_own(library, cache, dataset):
    few = LazyMassSpecDataset(*library, cache_dir=cache, max_samples=5, jobs=1)
    assert len(few) == 5
    assert few.store.path == cache / "spectra_n5"
    assert len(dataset) == len(SMALL), "the whole library's cache stands untouched"


def test_another_max_mz_has_a_cache_of_its_own(library, cache, dataset):
    before = [dataset[number]["spectrum"] for number in range(len(dataset))]
    other = LazyMassSpecDataset(*library, max_mz=30, cache_dir=cache, jobs=1)
    assert other[0]["spectrum"].shape == (31,)
    assert other.store.path == cache / "spectra_mz30"
    again = pickle.loads(pickle.dumps(dataset))  # as in a spawned worker
    assert all(torch.equal(again[n]["spectrum"], old) for n, old in enumerate(before))


def test_a_changed_library_builds_again_says_why_and_is_no_longer_the_pickled_one(tmp_path):
    lines = []
    library = write_library(tmp_path, SMALL[:6])
    options = {"cache_dir": tmp_path / "cache", "say": lines.append, "jobs": 1}
    text = pickle.dumps(LazyMassSpecDataset(*library, **options))
    (tmp_path / "other").mkdir()
    shutil.copy(write_library(tmp_path / "other", SMALL[:4])[0], library[0])
    assert len(LazyMassSpecDataset(*library, **options)) == 4
    assert any("again:" in line for line in lines)
    with pytest.raises(StoreError, match="was built again since this dataset was opened"):
        pickle.loads(text)


def test_memory_is_counted_and_small(dataset):
    offsets = sum(
        shard.whole(f"{name}/offsets").nbytes
        for shard in dataset.store.shards
        for name in ("mz", "intensity", "atoms", "bonds", "ecfp_bits", "ecfp_counts")
    )
    assert dataset.resident_bytes == offsets + len(dataset) * (8 + 4 + 8)
    assert dataset.resident_bytes / len(dataset) < 100


# -- lines ---------------------------------------------------------------------------------------


def test_the_documented_lines_of_the_first_and_of_later_runs(library, tmp_path, capsys):
    cache = tmp_path / "lazy_cache"
    dataset = LazyMassSpecDataset(*library, cache_dir=cache, jobs=1)
    megabytes = sum(file.stat().st_size for file in cache.rglob("*.h5")) / 1e6
    expected = [
        "Building metadata and spectrum cache...",
        "Parsing MSP file...",
        "Found 24 compounds with MOL files",
        "m/z is stored as uint16: every value is a whole number",
        "Building HDF5 spectrum cache...",
        "Processing: 24 of 24",
        "Saving metadata...",
        "Cache built: 24 samples",
        f"Spectrum cache: {cache}/spectra ({megabytes:.1f} MB)",
        "Dataset ready: 24 samples (Memory-efficient mode)",
        f"Estimated memory usage: ~{dataset.resident_bytes / 1e6:.1f} MB",
    ]
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in printed if line != "Processing: 0 of 24"] == expected
    LazyMassSpecDataset(*library, cache_dir=cache, jobs=1)
    assert capsys.readouterr().out.splitlines() == [
        f"Loading metadata from cache: {cache}/spectra/store.json",
        "Loaded metadata: 24 samples",
        "Dataset ready: 24 samples (Memory-efficient mode)",
        f"Estimated memory usage: ~{dataset.resident_bytes / 1e6:.1f} MB",
    ]


def test_say_takes_the_lines_and_nothing_is_printed(library, cache, dataset, capsys):
    lines = []
    LazyMassSpecDataset(*library, cache_dir=cache, say=lines.append, jobs=1)
    assert len(lines) == 4
    assert capsys.readouterr() == ("", "")


def test_records_without_a_structure_are_left_out_counted_and_listed(tmp_path):
    records = [msp_record(f"c{n}", ID=str(n)) for n in range(4)]
    msp = tmp_path / "library.msp"
    msp.write_text("".join(records))
    mols = write_mols(tmp_path, {"id1.mol": mol_block("CCO"), "id3.mol": mol_block("C")}, "zip")
    lines = []
    dataset = LazyMassSpecDataset(msp, mols, cache_dir=tmp_path / "cache", say=lines.append, jobs=1)
    assert [dataset.metadata(n)["name"] for n in range(len(dataset))] == ["c1", "c3"]
    assert dataset.num_refused == 2
    listing = dataset.store.path / "refused.jsonl"
    assert f"Left out: 2 records, with reasons in {listing}" in lines
    assert len(listing.read_text().splitlines()) == 2


# -- loaders -------------------------------------------------------------------------------------


def replicated(folder):
    """Three spectra per compound, as libraries have them."""
    texts, blocks = [], {}
    for number, smiles in enumerate(SMILES[5:45]):
        for replicate in range(3):
            name = str(3 * number + replicate)
            texts.append(msp_record(f"c{number}", ID=name, InChIKey=inchikey(smiles)))
            blocks[f"id{name}.mol"] = mol_block(smiles)
    msp = folder / "library.msp"
    msp.write_text("".join(texts))
    return msp, write_mols(folder, blocks, "zip")


@pytest.fixture(scope="module")
def replicates(tmp_path_factory):
    folder = tmp_path_factory.mktemp("replicates")
    return LazyMassSpecDataset(*replicated(folder), cache_dir=folder / "cache", jobs=1)


def members(loader):
    return set(loader.dataset.indices)


def test_no_compound_stands_on_two_sides_and_every_sample_on_one(replicates):
    loaders = NISTDataLoader.create_dataloaders(replicates, num_workers=0)
    sides = [members(loader) for loader in loaders]
    assert set().union(*sides) == set(range(len(replicates)))
    assert sum(map(len, sides)) == len(replicates)
    compounds = [set(replicates.groups[sorted(side)].tolist()) for side in sides]
    assert not compounds[0] & compounds[1]
    assert not compounds[0] & compounds[2]
    assert not compounds[1] & compounds[2]
    assert len(sides[0]) > len(replicates) / 2


def test_ratios_and_seed_have_an_effect(replicates):
    everything, nothing, rest = NISTDataLoader.create_dataloaders(
        replicates, num_workers=0, train_ratio=1.0, val_ratio=0.0
    )
    assert (len(everything.dataset), len(nothing.dataset), len(rest.dataset)) == (120, 0, 0)
    assert list(nothing) == []
    one, again, other = (
        members(NISTDataLoader.create_dataloaders(replicates, num_workers=0, seed=seed)[0])
        for seed in (1, 1, 2)
    )
    assert one == again != other


@pytest.mark.parametrize("num_workers", [0, 2])
def test_every_sample_arrives_once_from_workers_too(replicates, num_workers):
    for loader in NISTDataLoader.create_dataloaders(replicates, 7, num_workers):
        assert loader.num_workers == num_workers
        batches = list(loader)
        assert len(batches) == len(loader)
        assert sum(len(batch["spectrum"]) for batch in batches) == len(loader.dataset)
        weights = sorted(float(w) for batch in batches for w in batch["mol_weight"])
        chosen = replicates._columns["mol_weight"][sorted(members(loader))]
        assert weights == sorted(chosen.tolist())
        del batches


def test_training_is_shuffled_and_the_rest_is_in_order(replicates):
    train, val, _ = NISTDataLoader.create_dataloaders(replicates, 8, 0, val_ratio=0.2)
    first, second = ([b["mol_weight"].tolist() for b in train] for _ in range(2))
    assert first != second
    again, _, _ = NISTDataLoader.create_dataloaders(
        replicates, np.int64(8), np.uint8(0), val_ratio=0.2
    )
    assert [b["mol_weight"].tolist() for b in again] == first, "the seed repeats the run"
    expected = replicates._columns["mol_weight"][sorted(members(val))].tolist()
    assert [w for batch in val for w in batch["mol_weight"].tolist()] == expected


def test_batched_graphs_are_what_pytorch_geometric_takes(dataset):
    items = [dataset[number] for number in range(len(dataset))]
    batch = collate_molecules(items)
    assert batch["ptr"].tolist()[0] == 0
    assert batch["ptr"][-1] == len(batch["x"]) == len(batch["batch"])
    assert batch["edge_attr"].shape == (batch["edge_index"].shape[1], 6)
    source, target = batch["edge_index"]
    assert torch.equal(batch["batch"][source], batch["batch"][target]), "no edge leaves its graph"
    for number, item in enumerate(items):
        low, high = batch["ptr"][number], batch["ptr"][number + 1]
        assert torch.equal(batch["x"][low:high], item["node_features"])
        mine = batch["batch"][source] == number
        assert torch.equal(batch["edge_index"][:, mine] - low, item["edge_index"])
        assert torch.equal(batch["edge_attr"][mine], item["edge_attr"])
    assert batch["spectrum"].shape == (len(items), 501)
    assert batch["functional_groups"].shape == (len(items), 48)


@pytest.mark.parametrize("graphs", [False, True])
def test_a_batch_read_at_once_is_the_batch_of_its_items(library, cache, dataset, graphs):
    dataset = LazyMassSpecDataset(*library, cache_dir=cache, precompute_graphs=graphs, jobs=1)
    for chosen in ([0], [3, 3, 1], [5, -1, 2, 0, 11], list(range(len(dataset)))):
        at_once = collate_molecules(dataset.__getitems__(chosen))
        one_by_one = collate_molecules(list(dataset.__getitems__(chosen)))
        assert at_once.keys() == one_by_one.keys()
        for name, tensor in at_once.items():
            assert tensor.dtype == one_by_one[name].dtype, name
            assert torch.equal(tensor, one_by_one[name]), name


def test_a_message_passing_sum_over_the_batch_is_that_of_each_graph(dataset):
    items = [dataset[number] for number in range(6, 14)]
    batch = collate_molecules(items)

    def aggregate(x, edge_index):
        return torch.zeros_like(x).index_add_(0, edge_index[1], x[edge_index[0]])

    alone = [aggregate(item["node_features"], item["edge_index"]) for item in items]
    assert torch.equal(aggregate(batch["x"], batch["edge_index"]), torch.cat(alone))


def test_it_pickles_by_its_path(dataset):
    text = pickle.dumps(dataset)
    assert len(text) < 2000
    copy = pickle.loads(text)
    assert torch.equal(copy[3]["spectrum"], dataset[3]["spectrum"])
    assert copy.groups.tolist() == dataset.groups.tolist()


# -- refusals ------------------------------------------------------------------------------------


def test_bad_input_says_what_is_allowed(dataset, library, tmp_path):
    create = NISTDataLoader.create_dataloaders
    cases = [
        (lambda: create(TensorDataset(torch.zeros(3))), "no compound groups"),
        (lambda: create(dataset, batch_size=0), "batch_size is 0"),
        (lambda: create(dataset, num_workers="4-6"), "num_workers is '4-6'"),
        (lambda: create(dataset, train_ratio=0.9, val_ratio=0.2), "add up to at most 1"),
        (lambda: create(dataset, train_ratio="a"), "train_ratio is a"),
        (lambda: create(dataset, train_ratio=float("nan")), "train_ratio is nan"),
        (lambda: dataset[0:2], "item slice(0, 2, None)"),
        (lambda: dataset[1.7], "item 1.7"),
        (lambda: dataset.read_batch([]), "a batch of no items"),
        (lambda: create(dataset, train_ratio=0.0, val_ratio=0.5), "fell into training"),
        (lambda: LazyMassSpecDataset(*library, max_mz=0, cache_dir=tmp_path), "max_mz is 0"),
    ]
    for make, words in cases:
        with pytest.raises(InputError, match=re.escape(words)) as caught:
            make()
        assert caught.value.allowed


def test_a_missing_library_is_named_and_nothing_is_left_behind(tmp_path):
    with pytest.raises(SourceError, match=r"nowhere\.msp"):
        LazyMassSpecDataset(
            tmp_path / "nowhere.msp", tmp_path / "mol", cache_dir=tmp_path / "cache"
        )
    assert not list(tmp_path.iterdir())


def test_a_library_of_which_nothing_is_usable_is_an_error(tmp_path):
    msp = tmp_path / "library.msp"
    msp.write_text(msp_record("lost", ID="1"))
    mols = write_mols(tmp_path, {"id9.mol": mol_block("C")}, "folder")
    with pytest.raises(QualityError, match="no sample is left"):
        LazyMassSpecDataset(msp, mols, cache_dir=tmp_path / "cache", jobs=1)


def test_the_real_library(shared_data, tmp_path):
    folder = shared_data / "massspec"
    dataset = LazyMassSpecDataset(
        folder / "massbank_ei.msp.gz",
        folder / "massbank_ei_mol.zip",
        cache_dir=tmp_path,
        max_samples=300,
    )
    assert 250 < len(dataset) <= 300
    train, val, test = NISTDataLoader.create_dataloaders(dataset, num_workers=0)
    assert sum(len(loader.dataset) for loader in (train, val, test)) == len(dataset)
    for batch in train:
        assert batch["spectrum"].amax(dim=1).eq(1).all()
