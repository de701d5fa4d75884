"""Evaluation of predicted spectra: four similarities, library recall, and both by class of molecule.

Enters: predicted and measured spectra of the test samples as square roots of intensities; the store for fingerprints
and atoms. Leaves: an `Evaluation` beside two baselines: the mean training spectrum, and the measured spectrum of the
training compound whose fingerprint is nearest. Costs: for every similarity some passes over the spectra; for the
nearest compounds one product of test and training fingerprints (2 * queries * compounds * 4096 operations, in blocks).

With m = bin + 1 and intensities I and J:

    cosine               sum(I J) / (|I| |J|)
    weighted_cosine      the same of m I^0.5 (NEIMS; the powers of `mass_power` and 0.5)
    stein_scott_cosine   the same of m^3 I^0.6 (Stein and Scott, 1994)
    entropy_similarity   1 - (2 S(I/2 + J/2) - S(I) - S(J)) / ln 4 of intensities that sum to 1; those of a spectrum
                         with entropy S below 3 are raised to 0.25 + 0.25 S first (Li et al., 2021)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from stoker.recipes.massspec.metrics import (
    Library,
    Ranking,
    read_root_spectra,
    weighted_units,
)
from stoker.recipes.metrics import bootstrap
from stoker.runs.evaluation import Evaluation, Example
from stoker.sources.massspec.conditions import CONDITION_COLUMNS
from stoker.sources.molecules.packed import ECFP_SIZE, ELEMENTS
from stoker.sources.msp import Rounding
from stoker.store.fields import Array
from stoker.store.reader import Store

Tensor = torch.Tensor
BASE_PEAK = 999
NEAREST = "nearest neighbour by fingerprint"
_STEIN_MASS, _STEIN_INTENSITY = 3.0, 0.6
_LOW_ENTROPY = 3.0
_BLOCK = 4096
_LEAST_OF_A_GROUP, _MOST_GROUPS = 5, 20
_SHOWN_PEAKS = 60
_ENERGY_EDGES = (15.0, 30.0, 45.0)
_AROMATIC, _RING = 1 << 19, 1 << 20


# -- similarities --------------------------------------------------------------------------------


def cosines(first: Tensor, second: Tensor) -> Tensor:
    """Return `(n,)` cosines between rows; 0 if one of the two is empty."""
    units = (
        torch.nn.functional.normalize(rows.double(), dim=1, eps=1e-12) for rows in (first, second)
    )
    one, other = units
    return (one * other).sum(dim=1)


def stein_scott(first: Tensor, second: Tensor) -> Tensor:
    """Return `(n,)` cosines of `m^3 I^0.6` between rows of intensities."""
    masses = torch.arange(1, first.shape[1] + 1, dtype=torch.float64, device=first.device)
    weights = masses**_STEIN_MASS
    one, other = (weights * rows.double() ** _STEIN_INTENSITY for rows in (first, second))
    return cosines(one, other)


def entropy_similarity(first: Tensor, second: Tensor) -> Tensor:
    """Return `(n,)` spectral entropy similarities between rows of intensities; 0 if one of the two is empty."""
    one, other = _weighed(first), _weighed(second)
    apart = 2 * _entropy((one + other) / 2) - _entropy(one) - _entropy(other)
    both = (one.sum(dim=1) > 0) & (other.sum(dim=1) > 0)
    return torch.where(both, 1 - apart / math.log(4), 0.0)


def _weighed(rows: Tensor) -> Tensor:
    shares = rows.double() / rows.double().sum(dim=1, keepdim=True).clamp(min=1e-300)
    entropy = _entropy(shares)[:, None]
    power = torch.where(entropy < _LOW_ENTROPY, 0.25 + 0.25 * entropy, 1.0)
    raised = torch.where(shares > 0, shares**power, 0.0)
    return raised / raised.sum(dim=1, keepdim=True).clamp(min=1e-300)


def _entropy(shares: Tensor) -> Tensor:
    summed: Tensor = torch.special.xlogy(shares, shares).sum(dim=1)
    return -summed


def similarities(predicted: Tensor, measured: Tensor, power: float) -> dict[str, Array]:
    """Return the four similarities between rows of root spectra, `(n,)` each."""
    found: dict[str, list[Tensor]] = {}
    for low in range(0, len(measured), _BLOCK):
        roots = [rows[low : low + _BLOCK] for rows in (predicted, measured)]
        one, other = (root.clamp(min=0).double() ** 2 for root in roots)
        units = [weighted_units(root, power) for root in roots]
        for name, part in (
            ("weighted_cosine", (units[0] * units[1]).sum(dim=1)),
            ("cosine", cosines(one, other)),
            ("stein_scott_cosine", stein_scott(one, other)),
            ("entropy_similarity", entropy_similarity(one, other)),
        ):
            found.setdefault(name, []).append(part.double())
    return {name: torch.cat(parts).numpy() for name, parts in found.items()}


class SpectrumJudge:
    """Compares predicted with measured spectra, both as square roots of intensities; a `Judge`."""

    def __init__(self, mass_power: float) -> None:
        self._power = mass_power
        self._values: list[dict[str, Array]] = []

    def update(self, columns: Mapping[str, Array], truth: Array) -> None:
        """Add predicted and measured spectra."""
        known = truth.any(axis=1)  # a row of zeros means that the input has no spectrum
        if known.any():
            predicted = torch.from_numpy(columns["spectrum"][known])
            measured = torch.from_numpy(truth[known])
            self._values.append(similarities(predicted, measured, self._power))

    def evaluate(self) -> Evaluation | None:
        """Return the mean similarities."""
        if not self._values:
            return None
        values = {
            name: np.concatenate([each[name] for each in self._values]) for name in self._values[0]
        }
        intervals = {name: bootstrap(each) for name, each in values.items()}
        count = len(values["cosine"])
        return Evaluation(count, ("weighted_cosine", True), _means(values), intervals)


# -- at the end ----------------------------------------------------------------------------------


class FinalSpectrumMetrics:
    """Evaluates the best weights on the test spectra."""

    def __init__(
        self,
        store: Store,
        train: Array,
        library: Library,
        mean: Tensor,
        ranking: Ranking,
        rounding: Rounding,
    ) -> None:
        self._store, self._train, self._library, self._mean = store, train, library, mean
        self._ranking, self._rounding = ranking, rounding
        self._seen: list[tuple[Tensor, Tensor]] = []

    def update(self, outputs: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> None:
        """Add a batch."""
        self._seen.append((outputs["spectrum"].float().cpu(), targets["spectrum"].float().cpu()))

    def evaluate(self, model: torch.nn.Module, device: torch.device, samples: Array) -> Evaluation:
        """Return the evaluation over all batches; see `FinalMetrics`."""
        predicted, measured = (torch.cat(parts) for parts in zip(*self._seen, strict=True))
        values = self._values(predicted, measured, samples, device)
        chance = self._values(self._mean.expand_as(measured), measured, samples, device)
        nearest, shares, levels = self._nearest(samples, device)
        neighbours = self._values(nearest, measured, samples, device)
        return Evaluation(
            num_samples=len(samples),
            compared_by=("weighted_cosine", True),
            metrics=_means(values),
            intervals={name: bootstrap(each) for name, each in values.items()},
            baselines={"mean training spectrum": _means(chance), NEAREST: _means(neighbours)},
            groups=self._groups(samples, values),
            examples=tuple(self._examples(samples, predicted, measured, values)),
            notes=(
                f"{NEAREST}: by Tanimoto similarity of ECFP4 bits, {shares.mean():.2f} in the mean",
                *_level_words(levels, "conditions" in self._store.fields),
                "a neighbour's spectrum is in the library itself, so it is never ranked first there",
                f"recall: among {len(self._library.groups):,} measured training compounds and all predictions",
            ),
        )

    def _values(
        self, predicted: Tensor, measured: Tensor, samples: Array, device: torch.device
    ) -> dict[str, Array]:
        """Return every metric of every sample, `(n,)` each."""
        power = self._ranking.mass_power
        masses = torch.from_numpy(self._store.gather("mol_weight", samples)).to(device)
        groups = torch.from_numpy(self._store.gather("group", samples)).to(device)
        values = similarities(predicted, measured, power)
        answers = weighted_units(predicted, power).to(device)
        queries = weighted_units(measured, power).to(device)
        found = self._ranking.find(self._library, answers, queries, groups, masses)
        return values | {
            name: each.cpu().numpy().astype(np.float64) for name, each in found.items()
        }

    def _nearest(self, samples: Array, device: torch.device) -> tuple[Tensor, Array, Array]:
        """Return root spectra of the nearest training compounds, their similarities, and their condition levels."""
        groups = self._store.read_rows("group", 0, self._store.num_samples)
        chosen, shares = np.zeros(len(samples), np.int64), np.zeros(len(samples))
        levels = np.full(len(samples), -1)
        for level, codes in enumerate(condition_levels(self._store)):
            left = np.flatnonzero(levels < 0)
            for code in np.unique(codes[samples[left]]).tolist():
                alike = self._train[codes[self._train] == code]
                mine = left[codes[samples[left]] == code]
                if len(alike):
                    entries = np.sort(alike[np.unique(groups[alike], return_index=True)[1]])
                    chosen[mine], shares[mine] = self._nearest_of(samples[mine], entries, device)
                    levels[mine] = level
        known, back = np.unique(chosen, return_inverse=True)
        parts = read_root_spectra(self._store, known, len(self._mean) - 1, self._rounding)
        rows = torch.cat([spectra for _, spectra in parts])
        return rows[torch.from_numpy(back)], shares, levels

    def _nearest_of(
        self, samples: Array, entries: Array, device: torch.device
    ) -> tuple[Array, Array]:
        """Return for each sample the entry with the highest Tanimoto similarity, and that similarity."""
        best = torch.full((len(samples),), -1.0, device=device)
        place = torch.zeros(len(samples), dtype=torch.int64, device=device)
        queries = fingerprint_rows(self._store, samples).to(device)
        sizes = queries.sum(dim=1)
        for low in range(0, len(entries), _BLOCK):
            part = fingerprint_rows(self._store, entries[low : low + _BLOCK]).to(device)
            common = queries @ part.T
            shares = common / (sizes[:, None] + part.sum(dim=1) - common).clamp(min=1)
            near, where = shares.max(dim=1)
            place = torch.where(near > best, where + low, place)
            best = torch.maximum(best, near)
        return entries[place.cpu().numpy()], best.cpu().numpy()

    def _groups(
        self, samples: Array, values: Mapping[str, Array]
    ) -> dict[str, dict[str, dict[str, float]]]:
        elements, rings = [], []
        for sample in samples.tolist():
            words = self._store.read_values("atoms", sample)
            elements.append(element_class(words))
            rings.append(ring_class(words))
        kinds: dict[str, list[str]] = {"elements": elements, "rings": rings}
        for field in ("spectrum_kind", "adduct", "ion_mode", "collision_energy"):
            if field in self._store.fields:
                texts = (self._store.read_text(field, sample) for sample in samples.tolist())
                kinds[field.replace("_", " ")] = [text or "not stated" for text in texts]
        return {
            kind: rows
            for kind, labels in kinds.items()
            if len(rows := _by_label(np.array(labels, dtype=object), values)) > 1
        }

    def _examples(
        self, samples: Array, predicted: Tensor, measured: Tensor, values: Mapping[str, Array]
    ) -> Iterator[Example]:
        """Yield the three worst, middle and best predictions each, as mirror plots."""
        scores = values["weighted_cosine"]
        order = np.argsort(scores, kind="stable")
        middle = len(order) // 2
        chosen = dict.fromkeys([*order[:3], *order[middle : middle + 3], *order[-3:]])
        for place in map(int, chosen):
            sample = int(samples[place])
            name = self._store.read_text("name", sample) if "name" in self._store.fields else ""
            yield Example(
                "spectrum",
                name or f"sample {sample}",
                "measured, upwards",
                f"predicted, downwards; weighted cosine {scores[place]:.2f}",
                lines={"truth": peak_list(measured[place]), "answer": peak_list(predicted[place])},
            )


def condition_levels(store: Store) -> list[Array]:
    """Return for each level, from strict to loose, a code per sample; equal codes mean comparable conditions.

    The first level uses kind, ion mode, adduct, energy (below 15, 30, 45 or above) and type of instrument. The next
    ones leave out the instrument, then the energy, then the adduct, then everything. EI spectra have one level only.
    """
    anything = np.zeros(store.num_samples, np.int64)
    if "conditions" not in store.fields:
        return [anything]
    rows = store.read_rows("conditions", 0, store.num_samples)
    energy = CONDITION_COLUMNS.index("energy")
    known = rows[:, energy + 1] > 0
    bins = np.where(known, np.digitize(rows[:, energy] * 100, _ENERGY_EDGES), -1)
    kind, adducts = rows[:, :energy], rows[:, energy + 2 :]
    columns = [np.column_stack([kind, adducts, bins]), np.column_stack([kind, adducts]), kind]
    if "instrument_type" in store.fields:
        texts = [store.read_text("instrument_type", sample) for sample in range(store.num_samples)]
        types = np.unique(np.array(texts, dtype=object).astype(str), return_inverse=True)[1]
        columns.insert(0, np.column_stack([columns[0], types]))
    codes = [np.unique(each, axis=0, return_inverse=True)[1].reshape(-1) for each in columns]
    return [*codes, anything]


def _level_words(levels: Array, has_conditions: bool) -> list[str]:
    if not has_conditions:
        return []
    alike = int((levels == 0).sum())
    words = f"neighbours of like conditions for {alike:,} of {len(levels):,} test spectra"
    return [
        words
        if alike == len(levels)
        else f"{words}; of the others, the nearest conditions there are"
    ]


def _means(values: Mapping[str, Array]) -> dict[str, float]:
    return {name: float(each.mean()) for name, each in values.items()}


def _by_label(labels: Array, values: Mapping[str, Array]) -> dict[str, dict[str, float]]:
    """Return the metrics of each label with at least 5 samples, the most common first, and of all others together."""
    known, counts = np.unique(labels.astype(str), return_counts=True)
    large = np.argsort(-counts, kind="stable")[:_MOST_GROUPS]
    large = large[counts[large] >= _LEAST_OF_A_GROUP]
    chosen = {str(known[place]): labels == known[place] for place in large.tolist()}
    rest = ~np.isin(labels.astype(str), known[large])
    if chosen and rest.any():
        chosen[f"{len(known) - len(large)} more"] = rest
    return {
        name: {
            **_means({metric: each[mine] for metric, each in values.items()}),
            "samples": float(mine.sum()),
        }
        for name, mine in chosen.items()
    }


def peak_list(root: Tensor, most: int = _SHOWN_PEAKS) -> list[tuple[float, float]]:
    """Return the largest peaks of a root spectrum as (m/z, intensity), base peak 999, rising in m/z."""
    intensity = root.clamp(min=0).double() ** 2
    intensity[:1] = 0.0  # no ion has mass 0
    top = float(intensity.max()) if len(intensity) else 0.0
    if top <= 0:
        return []
    scaled = intensity * (BASE_PEAK / top)
    chosen = torch.argsort(scaled, descending=True)[:most].sort().values
    return [
        (float(mz), float(scaled[mz])) for mz in chosen.tolist() if round(float(scaled[mz])) >= 1
    ]


def fingerprint_rows(store: Store, samples: Array) -> Tensor:
    """Return `(n, 4096)` bits of the samples' fingerprints as float32, without their counts."""
    rows = torch.zeros(len(samples), ECFP_SIZE)
    for row, sample in enumerate(samples.tolist()):
        rows[row, store.read_values("ecfp_bits", sample).astype(np.int64)] = 1.0
    return rows


# -- classes of molecules ------------------------------------------------------------------------

_HALOGENS = frozenset(["F", "Cl", "Br", "I"])


def element_class(atom_words: Array) -> str:
    """Return the class of a molecule by its elements; the first match of `_ELEMENT_CLASSES` decides."""
    present = {ELEMENTS[int(code)] for code in np.unique(atom_words & 0xF)}
    for name, wanted in _ELEMENT_CLASSES:
        if wanted(present):
            return name
    return "hydrocarbon"


_ELEMENT_CLASSES: Sequence[tuple[str, Callable[[set[str]], Any]]] = (
    ("with other elements", lambda present: "other" in present),
    ("with silicon", lambda present: "Si" in present),
    ("with phosphorus", lambda present: "P" in present),
    ("with halogens", lambda present: present & _HALOGENS),
    ("with sulphur", lambda present: "S" in present),
    ("with nitrogen", lambda present: "N" in present),
    ("C, H and O only", lambda present: "O" in present),
)


def ring_class(atom_words: Array) -> str:
    """Return the class of a molecule by its rings."""
    if (atom_words & _AROMATIC).any():
        return "aromatic"
    return "rings, none aromatic" if (atom_words & _RING).any() else "no rings"
