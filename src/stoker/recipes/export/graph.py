"""A trained recipe as one function of plain tensors: named inputs in, named predictions out.

Enters: a model from a checkpoint, and the sizes that shall be fixed. Leaves: a module whose inputs and outputs
are single tensors, so that it can be traced; values to try it with. Costs nothing; reads no data.

What belongs to a prediction is inside: the repairs of the training store, scalers, the normalisation of
images, softmax, and the way back to the units of the targets. Outputs have the names of `stoker predict`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch

from stoker.errors import InputError
from stoker.recipes.blueprint import Columns
from stoker.recipes.export.repairs import Repairs
from stoker.recipes.forex.model import ForexModel
from stoker.recipes.inference import Trained
from stoker.recipes.scaling import RobustScale
from stoker.recipes.tabular.model import TabularModel
from stoker.sources.molecules.packed import ECFP_SIZE, NUM_ATOM_FEATURES, NUM_BOND_FEATURES
from stoker.store.repairs import FittedRepair

Tensor = torch.Tensor
BATCH = "batch"
IMAGE_SIZES = ("height", "width")


# -- inputs --------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Port:
    """One input of the graph.

    Attributes:
        key: What the recipe calls it.
        shape: A number, or the name of a size that is free.
        dtype: As it must come.
        about: What it is, for people.
        below: Values to try it with are from 0 to below this number, or this size; None for numbers
            around 0, or around `scaler`.
        scaler: Says where the training values lie.
        name: In the graph; the key, as a plain word, where it is empty.
    """

    key: str
    shape: tuple[int | str, ...]
    dtype: torch.dtype
    about: str
    below: float | str | None = None
    scaler: RobustScale | None = None
    name: str = ""

    def draw(self, sizes: Mapping[str, int], dice: torch.Generator) -> Tensor:
        """Return values of the right shape and kind.

        Args:
            sizes: Of all free sizes.
            dice: Draws them.
        """
        shape = [sizes[size] if isinstance(size, str) else size for size in self.shape]
        if self.below is None:
            values = torch.randn(shape, generator=dice)
            if self.scaler is not None:
                # A series has one column more in the model than in the store: its gap flag.
                center, scale = (
                    part[: shape[-1]] for part in (self.scaler.center, self.scaler.scale)
                )
                values = center + scale * values
            return values
        top = sizes[self.below] if isinstance(self.below, str) else self.below
        return (torch.rand(shape, generator=dice) * top).to(self.dtype)


@dataclass(frozen=True)
class Sizes:
    """Sizes of inputs that shall be fixed; the others stay free.

    Attributes:
        batch: Samples; None leaves it free.
        image: Height and width for "segmentation"; None leaves them free.
    """

    batch: int | None = None
    image: tuple[int, int] | None = None


Read = Callable[[Mapping[str, Tensor]], Any]
Predict = Callable[[Any, Any], Columns]
Layout = tuple[list[Port], Read, Predict]


def _lay_out_forex(trained: Trained, sizes: Sizes) -> Layout:
    del sizes
    model, facts = cast(ForexModel, trained.model), trained.facts
    ports = []
    for name in facts["inputs"]:
        encoder: Any = model.encoders[name]
        bars = f"bars_{name}"
        columns = f": {', '.join(facts['columns'][name])}" if facts["columns"][name] else ""
        ports += [
            Port(
                name,
                (BATCH, bars, facts["features"][name]),
                torch.float32,
                f"the last bars of {name}, oldest first{columns}",
                scaler=encoder.scaler,
            ),
            Port(
                f"{name}/gap",
                (BATCH, bars),
                torch.uint8,
                f"1 where bars of {name} are missing before this one, else 0",
                below=2,
            ),
        ]
    return ports, trained.made.unpack, trained.made.predict


def _lay_out_tabular(trained: Trained, sizes: Sizes) -> Layout:
    del sizes
    model, facts = cast(TabularModel, trained.model), trained.facts
    (field,) = facts["inputs"]
    rows = () if facts["window"] is None else (int(facts["window"]),)
    names = facts["columns"][field]
    columns = f": {', '.join(names)}" if names else ""
    shown = f"windows of {rows[0]} rows, oldest first" if rows else "rows"
    ports = [
        Port(
            field,
            (BATCH, *rows, facts["num_features"]),
            torch.float32,
            f"{shown}{columns}",
            scaler=model.scaler,
        )
    ]
    if facts["is_series"]:
        ports.append(
            Port(
                f"{field}/gap",
                (BATCH, *rows),
                torch.uint8,
                "1 where rows are missing before this one, else 0",
                below=2,
            )
        )
    return ports, trained.made.unpack, trained.made.predict


def _lay_out_massspec(trained: Trained, sizes: Sizes) -> Layout:
    del sizes
    size, heaviest = ECFP_SIZE, trained.facts["num_bins"]
    ports = [
        Port(
            "ecfp",
            (BATCH, size),
            torch.float32,
            f"counts of the {size} ECFP4 bits",
            below=3,
            name="fingerprint_counts",
        ),
        Port("mol_weight", (BATCH,), torch.float32, "mass of the molecule in Da", below=heaviest),
    ]
    if "atoms" in trained.facts["inputs"]:
        atoms, edges = "atoms", "edges"
        ports += [
            Port(
                "x",
                (atoms, NUM_ATOM_FEATURES),
                torch.float32,
                "features of all atoms of the batch",
                below=2,
                name="atom_features",
            ),
            Port(
                "edge_index",
                (2, edges),
                torch.int64,
                "from and to: numbers of atoms over the batch; every bond twice, there and back",
                below=atoms,
                name="bond_atoms",
            ),
            Port(
                "edge_attr",
                (edges, NUM_BOND_FEATURES),
                torch.float32,
                "features of bonds, in the order of bond_atoms",
                below=2,
                name="bond_features",
            ),
            Port(
                "batch",
                (atoms,),
                torch.int64,
                "molecule of each atom, from 0",
                below=BATCH,
                name="atom_molecule",
            ),
        ]
    return ports, dict, trained.made.predict


def _lay_out_segmentation(trained: Trained, sizes: Sizes) -> Layout:
    facts = trained.facts
    height, width = sizes.image or IMAGE_SIZES
    ports = [
        Port(
            "images",
            (BATCH, facts["channels"], height, width),
            torch.uint8,
            "pixels from 0 to 255, channel by channel",
            below=256,
        )
    ]
    per_channel = torch.tensor([facts["mean"], facts["std"]]).view(2, 1, -1, 1, 1)
    return ports, partial(_normalise, per_channel=per_channel), _segment


def _normalise(named: Mapping[str, Tensor], per_channel: Tensor) -> Tensor:
    mean, std = per_channel
    normal: Tensor = (named["images"].float() * (1 / 255) - mean) * (1 / std)
    return normal


def _segment(model: Any, images: Tensor) -> Columns:
    scores = model(images)
    return {"mask": scores.argmax(dim=1).to(torch.uint8), "scores": scores}


_LAY_OUT: Mapping[str, Callable[[Trained, Sizes], Layout]] = {
    "forex": _lay_out_forex,
    "tabular": _lay_out_tabular,
    "massspec": _lay_out_massspec,
    "massspec-teacher": _lay_out_massspec,
    "segmentation": _lay_out_segmentation,
}


# -- the graph -----------------------------------------------------------------------------------


class Deployed(torch.nn.Module):
    """What is exported: `forward` takes one tensor per port, and returns one per name of `outputs`.

    Attributes:
        ports: The inputs, in order.
        outputs: Names of the predictions, in order.
        repaired: Fields that are repaired inside.
    """

    def __init__(self, trained: Trained, layout: Layout, repairs: bool) -> None:
        super().__init__()
        ports, self._read, self._predict = layout
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
        self.ports: tuple[Port, ...] = tuple(ports)
        with torch.no_grad():
            self.outputs = tuple(self.columns(*self.draw({})))
        self.ports = tuple(replace(port, name=self._name(port)) for port in ports)
        self.eval().requires_grad_(False)

    def _name(self, port: Port) -> str:
        name = re.sub(r"\W", "_", port.name or port.key)
        return f"input_{name}" if name in self.outputs else name

    def columns(self, *values: Tensor) -> Columns:
        """Return the predictions by name."""
        named = {port.key: value for port, value in zip(self.ports, values, strict=True)}
        for field, repair in zip(self.repaired, self.repairs, strict=True):
            named[field] = repair(named[field])
        return self._predict(self.model, self._read(named))

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

    Raises:
        InputError: A size that this recipe does not have, or below 1.
    """
    recipe = trained.chosen.recipe.name
    if sizes.image is not None and recipe != "segmentation":
        raise InputError(
            f"--size was given for the recipe {recipe!r}.",
            "--size for segmentation: the others take no images",
            "leave --size out",
        )
    if sizes.batch is not None and sizes.batch < 1:
        raise InputError(f"--batch is {sizes.batch}.", "dynamic, or 1 or more", "--batch dynamic")
    ports, read, predict = _LAY_OUT[recipe](trained, sizes)
    if sizes.batch is not None:
        ports = [replace(port, shape=_fixed(port.shape, sizes.batch)) for port in ports]
    return Deployed(trained, (ports, read, predict), repairs)


def _fixed(shape: Sequence[int | str], batch: int) -> tuple[int | str, ...]:
    return tuple(batch if size == BATCH else size for size in shape)
