"""The NEIMS metrics: similarity of spectra, and recall of compounds in a library of predictions.

Enters: predicted and measured spectra as square roots of intensities, `(batch, bins)` on the device.
Leaves: the mean weighted cosine and recall@k, once, at the end of a validation. Costs: per batch two
passes over it and no host synchronisation; at the end one product of all queries with the library
(2 * queries * compounds * bins operations, in blocks: 12 GFLOP for 1,148 queries of MassBank).

Weighted cosine (NEIMS, mass power a = 1, intensity power b = 0.5), with m = bin + 1:

    sum_j (m^a I^b)(m^a J^b) / (|m^a I^b| |m^a J^b|)

Models predict I^b itself, so b is applied to measured spectra only, once, by `root_spectra`.

Library recall@k, as NEIMS defines it. Queries: every held-out measured spectrum, replicates included.
Library: one spectrum per compound. A training compound has the first of its measured spectra, a
held-out compound the prediction for the first of its records. A query is found at k when fewer than k
other compounds are at least as similar to it as its own prediction. NEIMS counts ties in favour of the
prediction; here they count against it. Otherwise, predicting the same spectrum for all would win.
With the mass filter, only compounds within the tolerance of the query's true mass are candidates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from stoker.sources.msp import Rounding, bin_spectrum
from stoker.store.fields import Array
from stoker.store.reader import Store

Tensor = torch.Tensor
_TINY = 1e-6
_TIE = 1e-6  # scores this close count as equal: the order of summation changes them by as much
_BLOCK_QUERIES, _BLOCK_LIBRARY = 1024, 16384
_READ_SAMPLES = 4096


def root_spectra(spectra: Tensor) -> Tensor:
    """Return the square roots of intensities, each spectrum of length (L2 norm) 1."""
    return unit_length(spectra.sqrt())


def unit_length(rows: Tensor) -> Tensor:
    """Return rows of length (L2 norm) 1; a row of zeros stays zero."""
    return torch.nn.functional.normalize(rows, dim=1, eps=_TINY)


def weighted_units(spectra: Tensor, mass_power: float = 1.0) -> Tensor:
    """Return spectra times their mass weights `(bin + 1) ^ mass_power`, each scaled to length 1.

    The dot product of two results is the weighted cosine. An empty spectrum stays zero.
    """
    masses = torch.arange(1, spectra.shape[1] + 1, device=spectra.device, dtype=torch.float32)
    return unit_length(spectra.float() * masses**mass_power)


def weighted_cosine(first: Tensor, second: Tensor, mass_power: float = 1.0) -> Tensor:
    """Return `(batch,)` cosines between spectra given as square roots of intensities."""
    units = weighted_units(first, mass_power), weighted_units(second, mass_power)
    return (units[0] * units[1]).sum(dim=1)


@dataclass(frozen=True)
class Library:
    """Measured spectra of compounds, which compete with the predictions for each query."""

    units: Tensor  # `(compounds, bins)` from `weighted_units`, on the CPU
    groups: Tensor  # `(compounds,)` int64 compound numbers, all different
    masses: Tensor  # `(compounds,)` in dalton


@dataclass(frozen=True)
class Ranking:
    """Settings of the ranking. `tolerance`, of the mass filter, is in dalton."""

    recall_at: tuple[int, ...] = (1, 10)
    tolerance: float = 5.0
    mass_power: float = 1.0

    def name(self, k: int, filtered: bool) -> str:
        """Return the name of a recall, without or with the mass filter."""
        return f"recall@{k}_within_{self.tolerance:g}da" if filtered else f"recall@{k}"

    def find(
        self, library: Library, predicted: Tensor, measured: Tensor, groups: Tensor, masses: Tensor
    ) -> dict[str, Tensor]:
        """Return for each recall by name `(queries,)` bool: which queries are found; see `rank_queries`."""
        found: dict[str, Tensor] = {}
        for filtered in (False, True):
            tolerance = self.tolerance if filtered else None
            ranks = rank_queries(library, predicted, measured, groups, masses, tolerance)
            found |= {self.name(k, filtered): ranks <= k for k in self.recall_at}
        return found


class SpectrumMetrics:
    """Weighted cosine and library recall of one validation.

    Outputs are `{"spectrum": ...}`; targets contain `spectrum`, `mol_weight` and `group`. Two spectra,
    a mass and a group per sample are kept on the device until the end.
    """

    def __init__(self, library: Library, ranking: Ranking) -> None:
        self._library = library
        self._ranking = ranking
        self._seen: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []

    def update(self, outputs: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> None:
        """Add a batch."""
        with torch.no_grad():
            predicted = weighted_units(outputs["spectrum"], self._ranking.mass_power)
            measured = weighted_units(targets["spectrum"], self._ranking.mass_power)
        # The batch's own tensors may be overwritten by the next batch of a captured step.
        self._seen.append(
            (predicted, measured, targets["mol_weight"].clone(), targets["group"].clone())
        )

    def state(self) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Return the accumulated batches, for `merge`."""
        return list(self._seen)

    def merge(self, states: Sequence[list[tuple[Tensor, Tensor, Tensor, Tensor]]]) -> None:
        """Replace the accumulated batches by those of all `states` together."""
        self._seen = [batch for state in states for batch in state]

    def compute(self) -> dict[str, float]:
        """Return the metrics; waits for the device."""
        if not self._seen:
            return {}
        predicted, measured, masses, groups = (
            torch.cat(parts) for parts in zip(*self._seen, strict=True)
        )
        result = {"weighted_cosine": float((predicted * measured).sum(dim=1).double().mean())}
        found = self._ranking.find(self._library, predicted, measured, groups, masses)
        return result | {name: float(each.double().mean()) for name, each in found.items()}


def rank_queries(
    library: Library,  # compounds without a prediction; must not contain any of `groups`
    predicted: Tensor,  # `(queries, bins)` weighted units of the predictions
    measured: Tensor,  # `(queries, bins)` weighted units of the queries
    groups: Tensor,  # `(queries,)` compound numbers
    masses: Tensor,  # `(queries,)` masses of the compounds in dalton
    tolerance: float | None = None,  # of the mass filter in dalton; None does not filter
) -> Tensor:
    """Return `(queries,)` int64 ranks, 1 being best; the module's docstring has the rule."""
    compounds, own = torch.unique(groups, return_inverse=True)
    first = _first_of_each(own, len(compounds))
    ranks = torch.ones_like(own)
    with _exact_products():
        for low in range(0, len(groups), _BLOCK_QUERIES):
            rows = slice(low, low + _BLOCK_QUERIES)
            scores = measured[rows] @ predicted[first].T
            mine = own[rows, None]
            limit = scores.gather(1, mine) - _TIE
            close = _within(masses[rows], masses[first], tolerance)
            other = torch.arange(len(compounds), device=own.device) != mine
            ranks[rows] += ((scores >= limit) & other & close).sum(dim=1)
            for part, part_masses in _parts(library, measured.device):
                close = _within(masses[rows], part_masses, tolerance)
                ranks[rows] += ((measured[rows] @ part.T >= limit) & close).sum(dim=1)
    return ranks


def _first_of_each(own: Tensor, count: int) -> Tensor:
    """Return the first index in `own` of each of the numbers 0 to count - 1."""
    places = torch.arange(len(own), device=own.device)
    first = torch.full((count,), len(own), dtype=torch.int64, device=own.device)
    return first.scatter_reduce(0, own, places, reduce="amin")


def _within(queries: Tensor, candidates: Tensor, tolerance: float | None) -> Tensor:
    if tolerance is None:
        return torch.ones((), dtype=torch.bool, device=queries.device)
    return (queries[:, None] - candidates).abs() <= tolerance


def _parts(library: Library, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    for low in range(0, len(library.groups), _BLOCK_LIBRARY):
        rows = slice(low, low + _BLOCK_LIBRARY)
        yield library.units[rows].to(device), library.masses[rows].to(device)


@contextmanager
def _exact_products() -> Iterator[None]:
    """Compute matrix products in full float32: TF32 has 10 bits, which would change ties and ranks."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


# -- from a store --------------------------------------------------------------------------------


def read_root_spectra(
    store: Store, samples: Array, max_mz: int, rounding: Rounding
) -> Iterator[tuple[Array, Tensor]]:
    """Yield the samples (sorted numbers) in parts, each with `(n, max_mz + 1)` root spectra on the CPU."""
    for low in range(0, store.num_samples, _READ_SAMPLES):
        high = min(low + _READ_SAMPLES, store.num_samples)
        first, last = np.searchsorted(samples, (low, high))
        if last == first:
            continue
        mz, offsets = store.read_ragged("mz", low, high)
        intensity, _ = store.read_ragged("intensity", low, high)
        binned = bin_spectrum(
            mz.astype(np.float64), intensity.astype(np.float32), offsets, max_mz, rounding=rounding
        )
        chosen = samples[first:last]
        yield chosen, root_spectra(torch.from_numpy(binned.spectra[chosen - low]))


def make_library(
    store: Store, train: Array, max_mz: int, rounding: Rounding, mass_power: float
) -> tuple[Library, Tensor]:
    """Return the library of the training compounds and the mean training spectrum `(bins,)`."""
    groups = store.read_rows("group", 0, store.num_samples)
    masses = store.read_rows("mol_weight", 0, store.num_samples)
    entries = np.sort(train[np.unique(groups[train], return_index=True)[1]])
    total = torch.zeros(max_mz + 1, dtype=torch.float64)
    units = [torch.empty(0, max_mz + 1)]
    for chosen, spectra in read_root_spectra(store, train, max_mz, rounding):
        total += spectra.double().sum(dim=0)
        units.append(weighted_units(spectra[np.isin(chosen, entries)], mass_power))
    library = Library(
        torch.cat(units), torch.from_numpy(groups[entries]), torch.from_numpy(masses[entries])
    )
    return library, (total / max(1, len(train))).float()


def chance_metrics(
    store: Store,
    samples: Array,
    library: Library,
    mean: Tensor,
    ranking: Ranking,
    rounding: Rounding,
) -> dict[str, float]:
    """Return the metrics of chance: the mean training spectrum as every answer, and a random rank."""
    if not len(samples):
        return {}
    cosine = 0.0
    for _, spectra in read_root_spectra(store, samples, len(mean) - 1, rounding):
        cosine += float(weighted_cosine(spectra, mean[None], ranking.mass_power).double().sum())
    groups, masses = store.gather("group", samples), store.gather("mol_weight", samples)
    held_out = masses[np.unique(groups, return_index=True)[1]]
    candidates = np.sort(np.concatenate([library.masses.numpy(), held_out]))
    inside = np.searchsorted(candidates, masses + ranking.tolerance, side="right")
    inside = inside - np.searchsorted(candidates, masses - ranking.tolerance, side="left")
    result = {"weighted_cosine": cosine / len(samples)}
    for k in ranking.recall_at:
        result[ranking.name(k, filtered=False)] = min(1.0, k / len(candidates))
        # Isotopologues share a compound but not a mass, so a query's own compound may lie outside its window.
        share = np.minimum(1.0, k / np.maximum(1, inside))
        result[ranking.name(k, filtered=True)] = float(share.mean())
    return result
