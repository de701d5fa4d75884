"""Networks from molecules to spectra: the NEIMS-style student and the GINE teacher.

Enters: fingerprint counts, masses and, for the teacher, graphs as `batch_graphs` joins them. Leaves:
`(batch, bins)` square roots of intensities, never negative, zero above the molecule's mass + 5. Costs:
the student's matrix products (8 million weights by default); for the teacher also gathers and sums over
bonds.

Shapes depend only on the batch's shapes, and nothing waits for the device. Graphs may end with padding
(`Loader.assemble` without totals). Padded atoms belong to no graph and padded bonds join padded atoms.
One spare row of each table collects their values, so padding changes no result. Normalisation is by
sample or by atom (LayerNorm where NEIMS has BatchNorm), so a prediction does not depend on its batch,
and accumulated batches equal one big batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from stoker.loader.ragged import batch_graphs
from stoker.recipes.massspec.metrics import unit_length, weighted_cosine
from stoker.recipes.massspec.options import MassSpecOptions, TeacherOptions
from stoker.sources.molecules.packed import ECFP_SIZE, NUM_ATOM_FEATURES, NUM_BOND_FEATURES

Tensor = torch.Tensor
ROOM_ABOVE_MASS = 5  # bins above the molecule's mass that may hold peaks: isotopes (NEIMS)


def highest_bin(mol_weight: Tensor) -> Tensor:
    """Return the last bin that may hold a peak: `round(mass) + 5`, halves to even as in NEIMS."""
    return mol_weight.float().round().to(torch.int64) + ROOM_ABOVE_MASS


def mask_above(raw: Tensor, highest: Tensor) -> Tensor:
    """Return `raw (batch, bins)` with zeros in the bins above `highest (batch,)`."""
    bins = torch.arange(raw.shape[1], device=raw.device)
    return raw.masked_fill(bins > highest[:, None], 0.0)


def reverse_from(raw: Tensor, highest: Tensor) -> Tensor:
    """Return `out[i, j] = raw[i, highest[i] - j]`, zero where there is no such bin.

    So column k of `raw` stands for a mass of k below the highest bin: a lost fragment instead of a kept one.
    """
    num_bins = raw.shape[1]
    source = highest[:, None] - torch.arange(num_bins, device=raw.device)
    inside = (source >= 0) & (source < num_bins)
    return raw.gather(1, source.clamp(0, num_bins - 1)).masked_fill(~inside, 0.0)


class BidirectionalHead(nn.Module):
    """Maps features to two spectra, indexed from m/z 0 and from the molecule's mass, and mixes them by a gate.

    `relu(g * forward + (1 - g) * reverse)`, with `g` a sigmoid for every bin.
    """

    def __init__(self, width: int, num_bins: int) -> None:
        super().__init__()
        self.bins = nn.Linear(width, 3 * num_bins)

    def forward(self, features: Tensor, mol_weight: Tensor) -> Tensor:
        """Return `(batch, num_bins)`."""
        highest = highest_bin(mol_weight)
        ahead, back, gate = self.bins(features).chunk(3, dim=1)
        gate = torch.sigmoid(gate)
        mixed = gate * mask_above(ahead, highest) + (1 - gate) * reverse_from(back, highest)
        return torch.relu(mixed)


class ResidualBlock(nn.Module):
    """Norm, ReLU, dropout, narrow linear; norm, ReLU, wide linear; added to the input."""

    def __init__(self, options: MassSpecOptions) -> None:
        super().__init__()
        width = options.width
        narrow = max(1, round(width * options.bottleneck))
        self.layers = nn.Sequential(
            nn.LayerNorm(width),
            nn.ReLU(),
            nn.Dropout(options.dropout),
            nn.Linear(width, narrow),
            nn.LayerNorm(narrow),
            nn.ReLU(),
            nn.Linear(narrow, width),
        )

    def forward(self, features: Tensor) -> Tensor:
        """Return `(batch, width)`."""
        changed: Tensor = self.layers(features)
        return features + changed


def _trunk(options: MassSpecOptions) -> nn.Sequential:
    blocks = [ResidualBlock(options) for _ in range(options.num_blocks)]
    return nn.Sequential(*blocks, nn.LayerNorm(options.width), nn.ReLU())


def _condition_layer(num_conditions: int, width: int) -> nn.Linear | None:
    return nn.Linear(num_conditions, width, bias=False) if num_conditions else None


class Student(nn.Module):
    """Fingerprint to spectrum: an MLP with residual blocks and a `BidirectionalHead`.

    Called with a mapping: `ecfp (batch, 4096)` counts and `mol_weight (batch,)`. Returns
    `{"spectrum": (batch, num_bins)}`.
    """

    def __init__(
        self,
        num_bins: int,  # `max_mz + 1`
        # number of measurement conditions, given as `conditions (batch, num_conditions)`; 0 for none
        num_conditions: int,
        options: MassSpecOptions,
    ) -> None:
        super().__init__()
        self.num_bins = num_bins
        self.inlet = nn.Linear(ECFP_SIZE, options.width)
        self.conditions = _condition_layer(num_conditions, options.width)
        self.trunk = _trunk(options)
        self.head = BidirectionalHead(options.width, num_bins)

    def forward(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the predicted spectra."""
        seen = self.inlet(inputs["ecfp"])
        if self.conditions is not None:
            seen = seen + self.conditions(inputs["conditions"])
        features = self.trunk(torch.relu(seen))
        return {"spectrum": self.head(features, inputs["mol_weight"])}


class GineLayer(nn.Module):
    """`x_i + MLP((1 + e) n_i + sum_j relu(n_j + W b_ij))` with `n` the norm of `x` (Hu 2020)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.bond = nn.Linear(NUM_BOND_FEATURES, width)
        self.own = nn.Parameter(torch.zeros(()))
        self.mix = nn.Sequential(
            nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width)
        )

    def forward(
        self, atoms: Tensor, edge_index: Tensor, edge_attr: Tensor, kept: Tensor | None = None
    ) -> Tensor:
        """Return the atoms' next features.

        Args:
            atoms: `(n, width)`.
            edge_index: `(2, edges)`: from, to.
            edge_attr: `(edges, 6)`.
            kept: `(edges, 1)` zeros and ones: which edges carry a message; None is all.
        """
        normal = self.norm(atoms)
        source, target = edge_index.unbind(0)
        messages = torch.relu(normal.index_select(0, source) + self.bond(edge_attr))
        if kept is not None:
            messages = messages * kept
        heard = messages.new_zeros(atoms.shape).index_add(0, target, messages)
        changed: Tensor = self.mix((1 + self.own) * normal + heard)
        return atoms + changed


class Teacher(nn.Module):
    """Graph and fingerprint to spectrum: pooled GINE layers, added to a linear layer on the fingerprint counts.

    Called with the student's mapping, which also contains a graph: `x`, `edge_index`, `edge_attr`, `batch`,
    as in `GraphBatch`. Returns `{"spectrum": (batch, num_bins)}`.
    """

    def __init__(self, num_bins: int, num_conditions: int, options: TeacherOptions) -> None:
        super().__init__()
        width, graph_width = options.width, options.graph_width
        self.num_bins = num_bins
        self.drop_edge = options.drop_edge
        self.conditions = _condition_layer(num_conditions, width)
        self.atom = nn.Linear(NUM_ATOM_FEATURES, graph_width)
        self.layers = nn.ModuleList(GineLayer(graph_width) for _ in range(options.num_layers))
        self.pooled = nn.LayerNorm(2 * graph_width)
        self.graph = nn.Linear(2 * graph_width, width)
        self.fingerprint = nn.Linear(ECFP_SIZE, width)
        self.trunk = _trunk(options)
        self.head = BidirectionalHead(width, num_bins)

    def forward(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the predicted spectra."""
        graphs = self.graph(self.pooled(self.embed_graphs(inputs)))
        seen = graphs + self.fingerprint(inputs["ecfp"])
        if self.conditions is not None:
            seen = seen + self.conditions(inputs["conditions"])
        features = self.trunk(torch.relu(seen))
        return {"spectrum": self.head(features, inputs["mol_weight"])}

    def embed_graphs(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return `(batch, 2 * graph_width)`: the mean and the sum of each graph's atoms."""
        edge_index, edge_attr = inputs["edge_index"], inputs["edge_attr"]
        # One spare atom: padded bonds point at the index after the last atom.
        atoms = nn.functional.pad(self.atom(inputs["x"]), (0, 0, 0, 1))
        kept = self._draw_edges(edge_index.shape[1], edge_attr)
        for layer in self.layers:
            atoms = layer(atoms, edge_index, edge_attr, kept)
        return pool_graphs(atoms[:-1], inputs["batch"], inputs["mol_weight"].shape[0])

    def _draw_edges(self, num_edges: int, like: Tensor) -> Tensor | None:
        if not self.training or self.drop_edge == 0:
            return None
        drawn = torch.rand(num_edges // 2, 1, device=like.device) >= self.drop_edge
        return drawn.to(like.dtype).repeat_interleave(2, dim=0)


def pool_graphs(atoms: Tensor, owner: Tensor, num_graphs: int) -> Tensor:
    """Return `(num_graphs, 2 * width)`: mean and sum over the atoms of each graph.

    The owner of padding is `num_graphs`.
    """
    # In float32 also under autocast: bfloat16 counts exactly only to 256.
    ones = torch.ones(atoms.shape[0], 1, device=atoms.device)
    columns = torch.cat([atoms.float(), ones], dim=1)
    sums = columns.new_zeros(num_graphs + 1, columns.shape[1]).index_add(0, owner, columns)
    total, count = sums[:num_graphs, :-1], sums[:num_graphs, -1:]
    return torch.cat([total / count.clamp(min=1), total], dim=1)


def graph_inputs(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the graph inputs of the teacher."""
    graphs = batch_graphs(batch)._asdict()
    del graphs["ptr"]
    return graphs


# -- learning from a teacher ------------------------------------------------------------------------


_FLOOR = 1e-3  # keeps the gradient of the power finite where a spectrum is zero


def soften(spectra: Tensor, temperature: Tensor) -> Tensor:
    """Return spectra of length 1 with small peaks raised; zero stays zero."""
    power = 1 / temperature
    raised: Tensor = (unit_length(spectra) + _FLOOR) ** power
    return raised - _FLOOR**power


def cosine_loss(
    outputs: Mapping[str, Tensor], targets: Mapping[str, Tensor], mass_power: float = 1.0
) -> Tensor:
    """Return the mean over samples of 1 - weighted cosine with the measured spectrum."""
    return 1 - weighted_cosine(outputs["spectrum"], targets["spectrum"], mass_power).mean()


class DistillationLoss:
    """Loss against measured spectra and a teacher's predictions: a weighted sum of three terms, each from 0 to 1.

    hard    1 - weighted cosine with the measured spectrum
    soft    1 - weighted cosine with the teacher's spectrum, both softened
    shape   1 - plain cosine with the teacher's spectrum: mass weights almost ignore peaks below m/z 50

    A spectrum is softened by `(x + e)^(1/T) - e^(1/T)` after scaling it to length 1: a softmax with temperature over
    log intensities, up to scale. The temperature is a tensor on the device, so a captured step reads its new value.
    """

    def __init__(
        self, weights: tuple[float, float, float], temperature: float, mass_power: float = 1.0
    ) -> None:
        self.weights = weights
        self.mass_power = mass_power
        self._temperature = torch.tensor(float(temperature))

    def __call__(self, outputs: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> Tensor:
        """Return the mean over samples."""
        student, teacher = outputs["spectrum"], targets["teacher"]
        # The first call moves it to the device; it happens before any capture.
        temperature = self._temperature = self._temperature.to(student.device)
        softened = soften(student, temperature), soften(teacher, temperature)
        hard, soft, shape = self.weights
        return (
            hard * cosine_loss(outputs, targets, self.mass_power)
            + soft * (1 - weighted_cosine(*softened, self.mass_power).mean())
            + shape * (1 - weighted_cosine(student, teacher, 0.0).mean())
        )

    def set_temperature(self, value: float) -> None:
        """Set the temperature in place, without waiting for the device."""
        self._temperature.fill_(value)

    @property
    def temperature(self) -> float:
        """The current temperature; waits for the device."""
        return float(self._temperature)


def temperature_at(update: int, num_updates: int, start: float, end: float) -> float:
    """Return the temperature of an update, interpolated linearly from the first update to the last."""
    return start + (end - start) * min(1.0, update / max(1, num_updates - 1))


class RateAndTemperature:
    """A learning rate scheduler that also sets the temperature; stepped after every update."""

    def __init__(
        self,
        rate: LambdaLR,  # scheduler of the learning rate
        set_temperature: Callable[[float], None],  # receives the temperature of the next update
        temperature_of: Callable[[int], float],  # temperature of update 0, 1, ...
    ) -> None:
        self._rate = rate
        self._set_temperature = set_temperature
        self._temperature_of = temperature_of
        self._follow()

    def step(self) -> None:
        """Advance to the next update."""
        self._rate.step()
        self._follow()

    def get_last_lr(self) -> list[Any]:
        """Return the current rate of every parameter group."""
        return list(self._rate.get_last_lr())

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the run, from which the temperature is computed."""
        return dict(self._rate.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the position, and set its temperature."""
        self._rate.load_state_dict(state)
        self._follow()

    def _follow(self) -> None:
        self._set_temperature(self._temperature_of(self._rate.last_epoch))
