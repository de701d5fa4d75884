"""`LazyMassSpecDataset` and `NISTDataLoader`: mass spectra under their documented names (S1-4, S1-5).

Enters: an MSP library and its MOL files. Leaves: a torch Dataset of spectra and graphs, and three
DataLoaders whose compounds do not mix. Costs: the first run packs the library once (about 0.8 ms of
CPU per molecule); later runs open the store. In memory only offsets and three numbers per molecule
(`resident_bytes`, about 70 bytes each). Reading and unpacking an item takes 0.5 ms, in a batch of 32
0.1 ms (one busy core, ARM); the DataLoaders here read whole batches.

The documents trade memory for time: lazy graphs, or 5 GB of precomputed ones. Packed graphs need
200 bytes a molecule, so there is nothing to trade; `precompute_graphs=True` keeps the packed ones in
memory. The cache is a store (`stoker inspect` opens it), one for each `max_mz` and `max_samples`, rebuilt
when the library or the featuriser changes. For batches built on the GPU use `stoker.Loader` on `dataset.store`.

The lines that the documents print go to `say`, by default to stdout; sizes and counts in them are measured.
"""

from __future__ import annotations

import logging
import numbers
import operator
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
import torch
from torch.utils import data as torch_data

from stoker.arguments import explained
from stoker.display import printable, show
from stoker.errors import InputError, StokerError, StoreError
from stoker.loader.splits import split_by_group
from stoker.packing import PackOptions, pack
from stoker.sources.massspec import MassSpecSource
from stoker.sources.molecules.functional_groups import expand_functional_groups
from stoker.sources.molecules.packed import ECFP_SIZE, expand_atoms, expand_bonds
from stoker.sources.msp import bin_spectrum
from stoker.store.fields import Array, offsets_of
from stoker.store.manifest import MANIFEST_NAME, REFUSED_NAME, read_manifest
from stoker.store.reader import Store, open_store
from stoker.units import MB, usable_count

Say = Callable[[str], None]
Item = dict[str, torch.Tensor]

_LOGGER = logging.getLogger("stoker.massspec")
_PER_ITEM = ("mz", "intensity", "atoms", "bonds", "ecfp_bits", "ecfp_counts")
_COLUMNS = ("functional_groups", "mol_weight", "group")
_GRAPH = ("x", "batch", "ptr")
_MAX_MZ = 500
_TEXTS = ("name", "inchikey", "formula", "identifier")


class _OutOfRangeError(StokerError, IndexError):
    """An item that the dataset does not have."""


@explained("stoker.LazyMassSpecDataset('library.msp', 'mols')")
class LazyMassSpecDataset(torch_data.Dataset[Item]):
    """Spectra with their molecular graphs, read from a packed cache when they are asked for.

    An item is a dict: `spectrum (max_mz + 1,)` with base peak 1, `node_features (atoms, 48)`,
    `edge_index (2, 2 bonds)`, `edge_attr (2 bonds, 6)`, `ecfp (4096,)` counts, `mol_weight ()` and,
    unless turned off, `functional_groups (48,)`. Pickles by the path of its store, and may be read by
    threads, forked and spawned workers.

    Args:
        msp_file: The library, `.msp` or gzipped.
        mol_files_dir: A folder of MOL files, a zip of them, or one SDF.
        max_mz: Last bin of a spectrum; peaks above are dropped.
        cache_dir: Where the store is made; delete it to build again.
        use_functional_groups: Give the 48 flags with every item.
        precompute_graphs: Keep all packed graphs in memory instead of reading each from the disk.
        max_samples: Take only the first so many compounds that have a structure.
        say: Takes the lines about the cache and the dataset; by default they are printed.
        jobs: Processes that build the cache; 0 means one per usable core.

    Attributes:
        store: The packed store.
        groups: `(n,)` compound of each sample; replicates and stereoisomers share one.
        num_refused: Records of the library that were left out; listed in the store's refused.jsonl.
    """

    def __init__(
        self,
        msp_file: str | Path,
        mol_files_dir: str | Path,
        max_mz: int = _MAX_MZ,
        cache_dir: str | Path = "data/processed/lazy_cache",
        use_functional_groups: bool = True,
        precompute_graphs: bool = False,
        max_samples: int | None = None,
        *,
        say: Say | None = None,
        jobs: int = 0,
    ) -> None:
        self._say = say or _print_line
        source = MassSpecSource(
            Path(msp_file),
            Path(mol_files_dir),
            max_mz=max_mz,
            max_samples=max_samples,
            structure_advice="LazyMassSpecDataset(msp_file, mol_files_dir)",
        )
        # The store's content depends on both: another dataset must not replace it.
        suffix = "" if max_samples is None else f"_n{max_samples}"
        suffix += "" if max_mz == _MAX_MZ else f"_mz{max_mz}"
        folder = Path(cache_dir) / f"spectra{suffix}"
        # Libraries always have records without a structure: they are left out, counted and listed.
        options = PackOptions(jobs=jobs, on_bad="quarantine", bad_budget="100%")
        is_again = (folder / MANIFEST_NAME).exists()
        result = pack(source, folder, options, _BuildLines(self._say, is_again))
        self._open(str(folder), max_mz, use_functional_groups, precompute_graphs)
        count = self.store.num_samples
        if result.reused:
            self._say(f"Loading metadata from cache: {self.store.path / MANIFEST_NAME}")
            self._say(f"Loaded metadata: {count:,} samples")
        else:
            self._say(f"Cache built: {count:,} samples")
            self._say(f"Spectrum cache: {self.store.path} ({self.store.num_bytes / MB:.1f} MB)")
        if self.num_refused:
            listing = self.store.path / REFUSED_NAME
            self._say(f"Left out: {self.num_refused:,} records, with reasons in {listing}")
        self._say(f"Dataset ready: {count} samples (Memory-efficient mode)")
        self._say(f"Estimated memory usage: ~{self.resident_bytes / MB:.1f} MB")

    @classmethod
    def from_store(cls, folder: str | Path, precompute_graphs: bool = False) -> Self:
        """Open the dataset over an existing store, without reading the library."""
        dataset = cls.__new__(cls)
        dataset._say = _LOGGER.info
        max_mz = int(read_manifest(Path(folder)).attributes["max_mz"])
        dataset._open(str(folder), max_mz, True, precompute_graphs)
        return dataset

    def _open(self, folder: str, max_mz: int, functional_groups: bool, graphs: bool) -> None:
        self._options = (folder, max_mz, functional_groups, graphs)
        self.max_mz = max_mz
        self.use_functional_groups = functional_groups
        self.precompute_graphs = graphs
        # Items are small: one thread reads them faster than a hand-over would.
        self.store: Store = open_store(folder, threads=1)
        self.num_refused = self.store.manifest.num_refused
        self._columns = {
            name: self.store.read_rows(name, 0, self.store.num_samples) for name in _COLUMNS
        }
        self._graphs: dict[str, tuple[Array, Array]] = {}
        if graphs:
            count = self.store.num_samples
            self._graphs = {
                name: self.store.read_ragged(name, 0, count) for name in ("atoms", "bonds")
            }
        # Read now, so that forked workers share them.
        self._offset_bytes = sum(
            shard.whole(f"{name}/offsets").nbytes
            for shard in self.store.shards
            for name in _PER_ITEM
        )

    def __getstate__(self) -> tuple[str, tuple[str, int, bool, bool]]:
        return self._identity, self._options

    def __setstate__(self, state: tuple[str, tuple[str, int, bool, bool]]) -> None:
        identity, options = state
        self._say = _LOGGER.info
        self._open(*options)
        if identity != self._identity:
            raise StoreError(
                f"{self.store.path} was built again since this dataset was opened.",
                "the store that was there",
                "open the dataset again, and give each one a cache_dir of its own",
            )

    @property
    def _identity(self) -> str:
        """Identity of the store's content: the checksums of its shards."""
        return " ".join(shard.checksum for shard in self.store.manifest.shards)

    def __len__(self) -> int:
        return int(self.store.num_samples)

    @property
    def groups(self) -> Array:
        """The compound of each sample."""
        return self._columns["group"]

    @property
    def resident_bytes(self) -> int:
        """Bytes that the dataset keeps in memory, whatever the size of the library on disk."""
        graphs = sum(array.nbytes for pair in self._graphs.values() for array in pair)
        columns = sum(column.nbytes for column in self._columns.values())
        return self._offset_bytes + columns + graphs

    def metadata(self, index: int) -> dict[str, str]:
        """Return name, InChIKey, formula and identifier of a sample; empty texts where the library has none."""
        index = self._check(index)
        return {name: self.store.read_text(name, index) for name in _TEXTS}

    def __getitem__(self, index: int) -> Item:
        batch = self.read_batch([index])
        graph = {
            "node_features": batch["x"],
            "edge_index": batch["edge_index"],
            "edge_attr": batch["edge_attr"],
        }
        rows = {name: batch[name][0] for name in batch.keys() - {*_GRAPH, *graph}}
        return {**rows, **graph}

    def __getitems__(self, indices: Sequence[int]) -> Sequence[Item]:
        """Return items that are read on access, or all at once by `collate_molecules`."""
        return _Chosen(self, indices)

    def read_batch(self, indices: Sequence[int]) -> dict[str, torch.Tensor]:
        """Return the batch that `collate_molecules` makes of these items, unpacked at once: 5 times as fast."""
        rows = [self._check(index) for index in indices]
        if not rows:
            raise InputError("a batch of no items.", "1 or more", "dataset.read_batch([0, 1])")
        words = {name: self._join(name, rows) for name in _PER_ITEM}
        mz, peaks = words["mz"]
        atoms, ptr = words["atoms"]
        bonds, bond_offsets = words["bonds"]
        edge_index, edge_attr = expand_bonds(bonds)
        edge_index += np.repeat(ptr[:-1], 2 * np.diff(bond_offsets))
        ecfp = np.zeros((len(rows), ECFP_SIZE), np.float32)
        bits, bit_offsets = words["ecfp_bits"]
        ecfp[_owners(bit_offsets), bits] = words["ecfp_counts"][0]
        batch = {
            "spectrum": bin_spectrum(mz, words["intensity"][0], peaks, self.max_mz).spectra,
            "x": expand_atoms(atoms),
            "edge_index": edge_index,
            "edge_attr": edge_attr,
            "batch": _owners(ptr),
            "ptr": ptr,
            "ecfp": ecfp,
            "mol_weight": self._columns["mol_weight"][rows],
        }
        if self.use_functional_groups:
            flags = self._columns["functional_groups"][rows]
            batch["functional_groups"] = expand_functional_groups(flags)
        return {name: torch.from_numpy(value) for name, value in batch.items()}

    def _join(self, name: str, rows: Sequence[int]) -> tuple[Array, Array]:
        """Return the concatenated values of some samples, and their offsets."""
        if name in self._graphs:
            values, offsets = self._graphs[name]
            pieces = [values[offsets[row] : offsets[row + 1]] for row in rows]
        else:
            pieces = [self.store.read_values(name, row) for row in rows]
        lengths = np.fromiter(map(len, pieces), dtype=np.int64, count=len(pieces))
        return (pieces[0] if len(pieces) == 1 else np.concatenate(pieces)), offsets_of(lengths)

    def _check(self, index: int) -> int:
        count = len(self)
        try:
            index = operator.index(index)
        except TypeError:
            raise InputError(
                f"item {index!r} of a dataset.", "a whole number", "dataset[0]"
            ) from None
        if not -count <= index < count:
            raise _OutOfRangeError(
                f"item {index} of a dataset with {count} samples.", f"0 to {count - 1}", ""
            )
        return int(index) % count


def _owners(offsets: Array) -> Array:
    return np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))


class _Chosen(Sequence[Item]):
    """Some items of a dataset, not read yet."""

    def __init__(self, dataset: LazyMassSpecDataset, indices: Sequence[int]) -> None:
        self.dataset = dataset
        self.indices = indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, number: Any) -> Any:
        return self.dataset[self.indices[number]]


def _print_line(line: str) -> None:
    """Print a line, as the document's scripts do. A worker that unpickles the dataset prints none."""
    show(f"{printable(line)}\n", sys.stdout)


class _BuildLines:
    """Turns the packer's progress into the documented lines; with `is_again`, also says why the cache is rebuilt."""

    def __init__(self, say: Say, is_again: bool) -> None:
        self._say = say
        self._is_again, self._has_begun = is_again, False
        self._stage = ""
        self._total = self._done = self._told = 0

    def start(self, label: str, total: int | None, unit: str) -> None:  # noqa: ARG002  Progress
        if label == "reading":
            self._say("Parsing MSP file...")
        elif label == "packing":
            self._say("Building HDF5 spectrum cache...")
        elif self._stage == "packing":
            self._say("Saving metadata...")
        self._stage, self._total, self._done, self._told = label, total or 0, 0, -1

    def advance(self, count: int = 1) -> None:
        self._done += count
        tenth = 10 * self._done // max(1, self._total)
        if self._stage == "packing" and self._total and tenth > self._told:
            self._told = tenth
            self._say(f"Processing: {self._done:,} of {self._total:,}")

    def say(self, line: str) -> None:
        if self._has_begun:
            self._say(line)
            return
        # The packer's first line says why it builds; where nothing has to be built it says none.
        self._has_begun = True
        self._say("Building metadata and spectrum cache...")
        if self._is_again:
            self._say(f"(again: {line})")


def collate_molecules(items: Sequence[Item]) -> dict[str, torch.Tensor]:
    """Join items into one batch whose graphs PyTorch Geometric's layers take as they are.

    Returns:
        `x`, `edge_index` (nodes numbered over the batch), `edge_attr`, `batch` (the graph of each
        node), `ptr` (the first node of each graph), and one row per item of all other entries.
    """
    if isinstance(items, _Chosen):
        return items.dataset.read_batch(items.indices)
    sizes = torch.tensor([len(item["node_features"]) for item in items])
    ptr = torch.zeros(len(items) + 1, dtype=torch.int64)
    torch.cumsum(sizes, 0, out=ptr[1:])
    batch = {
        "x": torch.cat([item["node_features"] for item in items]),
        "edge_index": torch.cat(
            [item["edge_index"] + first for item, first in zip(items, ptr.tolist(), strict=False)],
            dim=1,
        ),
        "edge_attr": torch.cat([item["edge_attr"] for item in items]),
        "batch": torch.repeat_interleave(torch.arange(len(items)), sizes),
        "ptr": ptr,
    }
    for name in items[0].keys() - {"node_features", "edge_index", "edge_attr"}:
        batch[name] = torch.stack([item[name] for item in items])
    return batch


class NISTDataLoader:
    """Train, validation and test loaders over a mass-spectra dataset."""

    @staticmethod
    def create_dataloaders(
        dataset: LazyMassSpecDataset,
        batch_size: int = 32,
        num_workers: int = 4,
        train_ratio: float = 0.8,
        val_ratio: float = 0.1,
        *,
        seed: int = 42,
    ) -> tuple[torch_data.DataLoader[Any], torch_data.DataLoader[Any], torch_data.DataLoader[Any]]:
        """Return `(train, val, test)`; batches are those of `collate_molecules`.

        The split is by compound: replicates and stereoisomers stay on one side, so the ratios hold
        for compounds, on average. Which side a compound is on depends on it and the seed alone.

        Args:
            dataset: A `LazyMassSpecDataset`.
            batch_size: Samples per batch.
            num_workers: Worker processes per loader; 0 reads in this process.
            train_ratio: Expected share of compounds in training, which is shuffled.
            val_ratio: Expected share in validation; the rest is test.
            seed: Of the split and the shuffle.
        """
        _check_options(dataset, train_ratio, val_ratio)
        batch_size = usable_count("batch_size", batch_size, example=32)
        num_workers = usable_count("num_workers", num_workers, least=0)
        ratios = (train_ratio, val_ratio, max(0.0, 1 - train_ratio - val_ratio))
        assignment = split_by_group(dataset.groups, ratios, seed)
        members = [np.flatnonzero(assignment == number) for number in range(3)]
        if not len(members[0]):
            raise InputError(
                f"no compound of {len(dataset)} samples fell into training.",
                "at least one",
                "another seed, a larger train_ratio, or more data",
            )
        train, val, test = (
            torch_data.DataLoader(
                torch_data.Subset(dataset, cast("Sequence[int]", chosen.tolist())),
                batch_size=batch_size,
                shuffle=number == 0,
                generator=torch.Generator().manual_seed(seed) if number == 0 else None,
                num_workers=num_workers,
                persistent_workers=num_workers > 0,
                collate_fn=collate_molecules,
            )
            for number, chosen in enumerate(members)
        )
        return train, val, test


def _check_options(dataset: Any, train_ratio: float, val_ratio: float) -> None:
    if not isinstance(getattr(dataset, "groups", None), np.ndarray):
        raise InputError(
            f"the dataset is {type(dataset).__name__}, which has no compound groups to split by.",
            "a LazyMassSpecDataset",
            "LazyMassSpecDataset(msp_file, mol_files_dir)",
        )
    ratios = (train_ratio, val_ratio)
    if (
        not all(isinstance(ratio, numbers.Real) for ratio in ratios)
        or not min(ratios) >= 0
        or not sum(ratios) <= 1 + 1e-9
    ):
        raise InputError(
            f"train_ratio is {train_ratio} and val_ratio is {val_ratio}.",
            "two shares of 0 or more that add up to at most 1; the rest is test",
            "train_ratio=0.8, val_ratio=0.1",
        )
