"""A trained recipe as one function of plain tensors: named inputs in, named predictions out.

Enters: a model from a checkpoint, and the sizes that shall be fixed. Leaves: a module whose inputs and outputs
are single tensors, so that it can be traced; values to try it with. Costs nothing; reads no data.

What belongs to a prediction is inside: the repairs of the training store, scalers, the normalisation of
images, softmax, and the way back to the units of the targets. Outputs have the names of `stoker predict`.
The recipe says what its inputs are (`Recipe.export_layout`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from stoker.display import command
from stoker.errors import InputError
from stoker.recipes.contract import BATCH, IMAGE_SIZES, Columns, Layout, Port, Sizes
from stoker.recipes.inference import Trained
from stoker.recipes.registry import blamed
from stoker.store.repairs import FittedRepair

Tensor = torch.Tensor


class Deployed(torch.nn.Module):
    """What is exported: `forward` takes one tensor per port, and returns one per name of `outputs`."""

    def __init__(self, trained: Trained, layout: Layout, repairs: bool) -> None:
        super().__init__()
        self.layout = layout
        self.model = trained.model
        facts = trained.facts
        self.repaired = tuple(facts["repairs"]) if repairs else ()
        self.repairs = torch.nn.ModuleList(
            Repairs(
                [FittedRepair.from_json(entry) for entry in facts["repairs"][field]],
                facts["columns"][field],
            )
            for field in self.repaired
        )
        self.ports: tuple[Port, ...] = tuple(layout.ports)
        with torch.no_grad():
            self.outputs = tuple(self.columns(*self.draw({})))
        self.ports = tuple(replace(port, name=self._name(port)) for port in layout.ports)
        self.eval().requires_grad_(False)

    def _name(self, port: Port) -> str:
        name = re.sub(r"\W", "_", port.name or port.key)
        return f"input_{name}" if name in self.outputs else name

    def columns(self, *values: Tensor) -> Columns:
        """Return the predictions by name."""
        named = {port.key: value for port, value in zip(self.ports, values, strict=True)}
        for field, repair in zip(self.repaired, self.repairs, strict=True):
            named[field] = repair(named[field])
        return self.layout.predict(self.model, self.layout.read(named))

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Return the predictions in the order of `outputs`."""
        return tuple(self.columns(*values).values())

    @property
    def free(self) -> tuple[str, ...]:
        """Names of the sizes that a caller may choose, each once."""
        named = [size for port in self.ports for size in port.shape if isinstance(size, str)]
        return tuple(dict.fromkeys(named))

    def draw(self, sizes: Mapping[str, int], seed: int = 0) -> tuple[Tensor, ...]:
        """Return values for every port.

        Args:
            sizes: Of the free ones; those left out are small.
            seed: The same values for the same seed.
        """
        dice = torch.Generator().manual_seed(seed)
        # From 2 up, each another: to torch a size of 1 is not free, and equal sizes might be one.
        small = {name: 5 + 2 * number for number, name in enumerate(self.free)}
        small |= {BATCH: 2, "height": 40, "width": 48}
        return tuple(port.draw({**small, **sizes}, dice) for port in self.ports)


def deploy(trained: Trained, sizes: Sizes, *, repairs: bool = True) -> Deployed:
    """Return the graph of a trained recipe.

    Args:
        trained: Of float weights.
        sizes: What shall be fixed.
        repairs: Make the repairs of the training store inside; without, inputs must come repaired.
    """
    recipe = trained.chosen.recipe
    if sizes.batch is not None and sizes.batch < 1:
        raise InputError(f"--batch is {sizes.batch}.", "dynamic, or 1 or more", "--batch dynamic")
    with blamed(recipe, "export_layout"):
        layout = recipe.export_layout(trained.made, trained.facts)
    if layout is None:
        raise InputError(
            f"the recipe {recipe.name!r} has no ONNX graph: it does not define export_layout.",
            "its weights as .safetensors, or a recipe with export_layout",
            command("stoker", "export", trained.loaded.saved.path, "weights.safetensors"),
        )
    fixed: dict[int | str, int] = {} if sizes.batch is None else {BATCH: sizes.batch}
    if sizes.image is not None:
        if not {*IMAGE_SIZES} & {size for port in layout.ports for size in port.shape}:
            raise InputError(
                f"--size was given, and the recipe {recipe.name!r} takes no images.",
                "--size for a recipe of images",
                "leave --size out",
            )
        fixed |= dict(zip(IMAGE_SIZES, sizes.image, strict=True))
    ports = [
        replace(port, shape=tuple(fixed.get(size, size) for size in port.shape))
        for port in layout.ports
    ]
    return Deployed(trained, replace(layout, ports=ports), repairs)


# -- the repairs of a training store, for tensors ---------------------------------------------------


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
