"""The inputs of an exported graph: what a recipe says about them, without building the graph.

Enters: names, shapes and types of inputs, and how they become predictions. Leaves: a `Layout`; values to
try it with. Costs nothing; reads no data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from stoker.recipes.scaling import RobustScale

Tensor = torch.Tensor
BATCH = "batch"
IMAGE_SIZES = ("height", "width")


@dataclass(frozen=True, eq=False)
class Port:
    """One input of the graph.

    Attributes:
        key: What the recipe calls it.
        shape: A number, or the name of a size that is free: `BATCH`, `IMAGE_SIZES`, or another word.
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
        """Return values of the right shape and kind."""
        shape = [sizes[size] if isinstance(size, str) else size for size in self.shape]
        if self.below is None:
            values = torch.randn(shape, generator=dice)
            if self.scaler is not None:
                # A series has one column more in the model than in the store: its gap flag.
                center, scale = (
                    part[: shape[-1]] for part in (self.scaler.center, self.scaler.scale)
                )
                values = (center + scale * values).to(self.dtype)
            return values
        top = sizes[self.below] if isinstance(self.below, str) else self.below
        return (torch.rand(shape, generator=dice) * top).to(self.dtype)


@dataclass(frozen=True)
class Layout:
    """How a trained recipe becomes a graph.

    Attributes:
        ports: The inputs, in order.
        read: Tensors by the keys of the ports to the model's inputs.
        predict: Model and inputs to named predictions.
        tracing: Wraps the trace of the graph where torch needs help with it; gives what
            `torch.onnx.export` takes as `custom_translation_table`.
    """

    ports: Sequence[Port]
    read: Callable[[Mapping[str, Tensor]], Any]
    predict: Callable[[Any, Any], dict[str, Tensor]]
    tracing: Callable[[torch.nn.Module], AbstractContextManager[dict[Any, Any]]] | None = None


@dataclass(frozen=True)
class Sizes:
    """Sizes of inputs that shall be fixed; the others stay free.

    Attributes:
        batch: Samples; None leaves it free.
        image: Height and width, where the recipe takes images; None leaves them free.
    """

    batch: int | None = None
    image: tuple[int, int] | None = None
