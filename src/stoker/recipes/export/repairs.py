"""The repairs of a training store as part of a graph.

Enters: fitted repairs, and tensors `(..., columns)`. Leaves: the tensors as `stoker.store.repairs` would have
made them. Costs a few passes in float64 per repair.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from stoker.store.repairs import FittedRepair

Tensor = torch.Tensor
_LARGEST = float(np.finfo(np.float32).max)


class Repairs(torch.nn.Module):
    """`stoker.store.repairs.apply_repairs` for tensors: float64 inside, rounded once per repair."""

    def __init__(self, fitted: Sequence[FittedRepair], columns: Sequence[str]) -> None:
        super().__init__()
        self.fitted = tuple(fitted)
        self.places = [[columns.index(name) for name in repair.columns] for repair in fitted]
        for number, (repair, places) in enumerate(zip(fitted, self.places, strict=True)):
            changed = places[:1] if repair.spec.name == "min-denominator" else places
            mask = torch.zeros(len(columns), dtype=torch.bool)
            mask[changed] = True
            # Columns that are left alone get numbers that nothing goes wrong with.
            low, high = (torch.ones(len(columns), dtype=torch.float64) for _ in range(2))
            if repair.low:
                low[places] = torch.tensor(repair.low, dtype=torch.float64)
                high[places] = torch.tensor(repair.high, dtype=torch.float64)
            if repair.spec.name == "clip":
                # A bound that float32 cannot hold would turn back into the infinity it replaces.
                low, high = low.clamp(min=-_LARGEST), high.clamp(max=_LARGEST)
            for name, value in (("mask", mask), ("low", low), ("high", high)):
                self.register_buffer(f"{name}_{number}", value)

    def forward(self, values: Tensor) -> Tensor:
        """Return repaired `(..., columns)`."""
        values = values if values.dtype == torch.float64 else values.float()
        for number, repair in enumerate(self.fitted):
            mask, low, high = (
                getattr(self, f"{part}_{number}") for part in ("mask", "low", "high")
            )
            x = values.double()
            if repair.spec.name == "min-denominator":
                _, top, bottom = (x[..., place : place + 1] for place in self.places[number])
                least = torch.clamp(bottom.abs(), min=repair.spec.numbers[0])
                made = top / torch.where(bottom < 0, -least, least)
            else:
                made = _repair(repair.spec.name, x, low, high)
            values = torch.where(mask, made.to(values.dtype), values)
        return values


def _repair(name: str, x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    if name == "clip":
        # By comparison: what a runtime's minimum makes of NaN differs from one to the next.
        return torch.where(x < low, low, torch.where(x > high, high, x))
    if name == "robust":
        return (x - low) / high
    if name == "asinh":
        return _asinh(x / high)
    return torch.where(torch.isnan(x), low, x)


def _asinh(x: Tensor) -> Tensor:
    """Return asinh in float64 by logarithms: onnxruntime 1.31 has it for float32 only."""
    size = x.abs()
    # 1 + size loses the digits of a small size; its first terms keep them.
    small = size - size**3 / 6 + 3 * size**5 / 40
    made = torch.where(size < 1e-3, small, torch.log(size + torch.sqrt(size * size + 1)))
    return torch.where(x < 0, -made, made)
