"""Graphs and spectra of 300,000 molecules: batches from the resident store against per-sample building.

    python benchmarks/ragged.py [--molecules 300000] [--workers 8]

Peers build each graph when it is asked for, in torch's DataLoader: from the MOL block with RDKit (as a
lazy dataset does), and from the packed words with numpy. Needs rdkit and the MassBank sample.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import zipfile
from pathlib import Path

import numpy as np
import psutil
import torch

from harness import publish
from massspec import make_library, run_pack
from stoker.loader.loader import Loader
from stoker.loader.ragged import batch_graphs, bin_spectra
from stoker.sources.molecules.packed import (
    expand_atoms,
    expand_bonds,
    pack_molecule,
    read_structure,
)
from stoker.sources.msp import bin_spectrum
from stoker.store.reader import open_store

FIELDS = ["atoms", "bonds", "mz", "intensity", "functional_groups"]


class FromWords(torch.utils.data.Dataset):
    """A graph and a spectrum per sample, from the packed store, with numpy."""

    def __init__(self, path: Path) -> None:
        self.store = open_store(path, threads=1)

    def __len__(self) -> int:
        return len(self.store)

    def graph(self, index: int) -> tuple:
        atoms, bonds = (
            self.store.read_values("atoms", index),
            self.store.read_values("bonds", index),
        )
        return expand_atoms(atoms), *expand_bonds(bonds)

    def __getitem__(self, index: int) -> tuple:
        mz, intensity = (
            self.store.read_values("mz", index),
            self.store.read_values("intensity", index),
        )
        spectrum = bin_spectrum(mz, intensity.astype("f4"), np.array([0, len(mz)]), 500).spectra[0]
        return *(torch.from_numpy(part) for part in self.graph(index)), torch.from_numpy(spectrum)


class FromMol(FromWords):
    """The same, with the graph built by RDKit from the MOL block, as the document's dataset does."""

    def __init__(self, path: Path, mols: Path) -> None:
        super().__init__(path)
        self.mols, self.archive, self.names = mols, None, None

    def graph(self, index: int) -> tuple:
        if self.archive is None:
            self.archive = zipfile.ZipFile(self.mols)
            self.names = self.archive.namelist()
        packed = pack_molecule(
            read_structure(self.archive.read(self.names[index % len(self.names)]).decode(), "mol")
        )
        return expand_atoms(packed.atoms), *expand_bonds(packed.bonds)


def collate(samples: list[tuple]) -> tuple:
    """Join graphs with node offsets: what PyTorch Geometric's collate does."""
    counts = torch.tensor([len(sample[0]) for sample in samples])
    first = torch.cumsum(counts, 0) - counts
    edges = torch.cat(
        [sample[1] + start for sample, start in zip(samples, first.tolist(), strict=True)], dim=1
    )
    return (
        torch.cat([sample[0] for sample in samples]),
        edges,
        torch.cat([sample[2] for sample in samples]),
        torch.repeat_interleave(torch.arange(len(samples)), counts),
        torch.stack([sample[3] for sample in samples]),
    )


def peer_rate(
    dataset: torch.utils.data.Dataset, batch: int, workers: int, batches: int, device: torch.device
) -> float:
    cuda = device.type == "cuda"
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(0))[
        : batch * (batches + 8)
    ]
    loader = torch.utils.data.DataLoader(
        dataset,
        batch,
        sampler=order.tolist(),
        num_workers=workers,
        collate_fn=collate,
        pin_memory=cuda,
        prefetch_factor=4,
    )
    began, seen = 0.0, 0
    for number, parts in enumerate(loader):
        for part in parts:
            part.to(device, non_blocking=True)
        if number == 7:  # the workers have started
            began = time.perf_counter()
        elif number > 7:
            seen += batch
    return seen / (time.perf_counter() - began)


def stoker_rate(loader: Loader, repeats: int) -> float:
    sync = torch.cuda.synchronize if loader.device.type == "cuda" else lambda: None
    rates = []
    for _ in range(repeats + 1):
        sync()
        began = time.perf_counter()
        for batch in loader:
            batch_graphs(batch)
            bin_spectra(batch["mz"], batch["intensity"], batch["mz/offsets"], 500)
        sync()
        rates.append(len(loader.samples) / (time.perf_counter() - began))
    return float(np.median(rates[1:]))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--molecules", type=int, default=300_000)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    device = torch.device(args.device)
    with tempfile.TemporaryDirectory() as folder_text:
        folder = Path(folder_text)
        msp, mols = make_library(folder, args.molecules)
        run_pack(msp, mols, folder / "store", args.workers)
        few = np.arange(min(4096, args.molecules))
        with Loader(folder / "store", args.batch, device, fields=FIELDS, samples=few) as loader:
            stoker_rate(
                loader, 1
            )  # the CUDA context and torch's kernels are not the loader's memory
        rss = psutil.Process().memory_info().rss
        with Loader(
            folder / "store", args.batch, device, order="shuffled", fields=FIELDS
        ) as loader:
            ours = stoker_rate(loader, 3)
            grown = psutil.Process().memory_info().rss - rss
            device_bytes = loader.device_bytes
        result = {
            "molecules": args.molecules,
            "batch": args.batch,
            "workers": args.workers,
            "stoker_samples_per_second": ours,
            "from_mol_samples_per_second": peer_rate(
                FromMol(folder / "store", mols), 256, args.workers, 60, device
            ),
            "from_words_samples_per_second": peer_rate(
                FromWords(folder / "store"), 256, args.workers, 200, device
            ),
            "device_bytes": device_bytes,
            "rss_growth_mb": grown / 1e6,
        }
    result["times_from_mol"] = ours / result["from_mol_samples_per_second"]
    result["times_from_words"] = ours / result["from_words_samples_per_second"]
    for name, value in result.items():
        print(f"  {name:34s} {round(value, 2)}")
    publish("ragged", result)


if __name__ == "__main__":
    main()
