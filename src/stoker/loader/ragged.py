"""Spectra and molecules on the device: bins, fingerprints and graphs from packed batches.

Enters: a `Batch` with ragged fields as the mass-spectra store has them. Leaves: dense spectra and
fingerprints, and graphs in the form PyTorch Geometric takes. Costs: a few passes over the batch on
the device; no host synchronisation. The numpy functions of `stoker.sources` are the reference that
the tests hold these against.

With static shapes (`Loader.assemble` without totals) ragged values end with padding; every function
here leaves the padding out by the offsets.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch

from stoker.sources.molecules.packed import ATOM_FIELDS, BOND_FIELDS, ECFP_SIZE, BitField


class GraphBatch(NamedTuple):
    """Graphs of a batch as one graph: `torch_geometric.data.Batch(**graphs._asdict())` takes it.

    Attributes:
        x: `(atoms, 48)` float features.
        edge_index: `(2, 2 bonds)`, both directions, numbered over the batch.
        edge_attr: `(2 bonds, 6)` float features.
        batch: `(atoms,)` graph of each atom.
        ptr: `(graphs + 1,)` first atom of each graph.
    """

    x: torch.Tensor
    edge_index: torch.Tensor
    edge_attr: torch.Tensor
    batch: torch.Tensor
    ptr: torch.Tensor


def bin_spectra(
    mz: torch.Tensor,
    intensity: torch.Tensor,
    offsets: torch.Tensor,
    max_mz: int,
    rounding: Literal["nearest", "floor"] = "nearest",
) -> torch.Tensor:
    """Return `(batch, max_mz + 1)` float32: the maximum per whole m/z, base peak 1.

    Nearest whole m/z with halves up, or its floor; bin `max_mz` is kept, peaks above are dropped.
    """
    num_spectra, num_bins = len(offsets) - 1, max_mz + 1
    mz = _plain(mz).to(torch.float32)
    floor = mz.floor()
    bins = (floor + (mz - floor >= 0.5) if rounding == "nearest" else floor).to(torch.int64)
    owner = owners(offsets, len(mz))
    kept = (bins < num_bins) & (owner < num_spectra)
    # Dropped values go to one spare cell, so that the shapes stay static.
    cell = torch.where(kept, owner * num_bins + bins, num_spectra * num_bins)
    flat = torch.zeros(num_spectra * num_bins + 1, dtype=torch.float32, device=mz.device)
    flat.scatter_reduce_(0, cell, intensity.to(torch.float32), reduce="amax", include_self=True)
    spectra = flat[:-1].view(num_spectra, num_bins)
    base = spectra.amax(dim=1, keepdim=True)
    return spectra / torch.where(base > 0, base, 1)


def dense_rows(
    values: torch.Tensor,
    columns: torch.Tensor,
    offsets: torch.Tensor,
    num_columns: int,
    keep: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return `(batch, num_columns)` float32 rows of a sparse matrix, such as `X` of an AnnData file.

    Values of the same row and column are added. A column outside of the matrix makes its row NaN: raising here would
    have to wait for the device.

    Args:
        values: Values of all rows of the batch, `batch["X/data"]`.
        columns: Column of each value, `batch["X/indices"]`.
        offsets: First value of each row, `batch["X/data/offsets"]`.
        num_columns: Columns of the matrix.
        keep: Numbers of the columns to return, in this order (a gene subset); all by default. Each at most once.
    """
    num, width = len(offsets) - 1, num_columns if keep is None else len(keep)
    owner = owners(offsets, len(columns))
    place = _plain(columns).to(torch.int64)
    outside = (place < 0) | (place >= num_columns)
    values = torch.where(outside, torch.nan, values.to(torch.float32))
    place = torch.where(outside, 0, place)
    if keep is not None:
        table = torch.full((num_columns,), -1, dtype=torch.int64, device=place.device)
        table[keep.to(place.device)] = torch.arange(width, device=place.device)
        place = torch.where(outside, 0, table[place])
    # Dropped values go to one spare cell, so that the shapes stay static.
    used = (owner < num) & (place >= 0)
    cell = torch.where(used, owner * width + place, num * width)
    flat = torch.zeros(num * width + 1, dtype=torch.float32, device=values.device)
    return flat.index_add_(0, cell, values)[:-1].view(num, width)


def expand_fingerprint(
    bits: torch.Tensor, counts: torch.Tensor, offsets: torch.Tensor, size: int = ECFP_SIZE
) -> torch.Tensor:
    """Return `(batch, size)` float32 counts of a sparse fingerprint."""
    return dense_rows(counts, bits, offsets, size)


def expand_atoms(words: torch.Tensor) -> torch.Tensor:
    """Return `(atoms, 48)` float32 features of atom words."""
    return _one_hot(_plain(words).to(torch.int64), ATOM_FIELDS)


def expand_bonds(words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return first atoms, second atoms and `(bonds, 6)` float32 features of bond words."""
    numbers = _plain(words).to(torch.int64)
    begin, end = (numbers >> field.shift & field.mask for field in BOND_FIELDS[:2])
    return begin, end, _one_hot(numbers, BOND_FIELDS)


def _one_hot(words: torch.Tensor, fields: tuple[BitField, ...]) -> torch.Tensor:
    columns = []
    for field in fields:
        value = words >> field.shift & field.mask
        if field.classes:
            classes = torch.arange(len(field.classes), device=words.device)
            columns.append((value[:, None] == classes).to(torch.float32))
        elif field.bits == 1:
            columns.append(value[:, None].to(torch.float32))
    return torch.cat(columns, dim=1)


def batch_graphs(
    batch: Mapping[str, torch.Tensor], atoms: str = "atoms", bonds: str = "bonds"
) -> GraphBatch:
    """Join the graphs of a batch, with node numbers that run over the whole batch.

    Args:
        batch: Batch with exact ragged fields, as iterating a Loader gives them.
        atoms: Field of atom words.
        bonds: Field of bond words.
    """
    ptr, bond_offsets = batch[f"{atoms}/offsets"], batch[f"{bonds}/offsets"]
    begin, end, features = expand_bonds(batch[bonds])
    first = ptr[owners(bond_offsets, len(begin))]
    begin, end = begin + first, end + first
    # Each bond's two directions stand side by side, as the numpy reference has them.
    edge_index = torch.stack(
        [torch.stack([begin, end], 1).view(-1), torch.stack([end, begin], 1).view(-1)]
    )
    return GraphBatch(
        x=expand_atoms(batch[atoms]),
        edge_index=edge_index,
        edge_attr=features.repeat_interleave(2, dim=0),
        batch=owners(ptr, len(batch[atoms])),
        ptr=ptr,
    )


def owners(offsets: torch.Tensor, count: int) -> torch.Tensor:
    """Return the sample of each of `count` values; values past the last offset get the number of samples."""
    return torch.searchsorted(offsets[1:], torch.arange(count, device=offsets.device), right=True)


def _plain(words: torch.Tensor) -> torch.Tensor:
    """View wide unsigned words as their signed twins, which every kernel knows.

    Callers mask off the sign bits when they extract a field; uint16 values are widened.
    """
    if words.dtype == torch.uint16:
        return words.view(torch.int16).to(torch.int32) & 0xFFFF
    twins = {torch.uint32: torch.int32, torch.uint64: torch.int64}
    return words.view(twins[words.dtype]) if words.dtype in twins else words
