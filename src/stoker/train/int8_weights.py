"""Int8 weights as plain tensors, so that an int8 checkpoint loads without running code.

Enters: the float weights of a model and the names of the modules that became int8. Leaves: a state with
one byte per weight of these modules, and from it float weights that give the very same int8 model when
they are converted again. Costs one pass over the weights.

torch's own int8 LSTM saves objects that only an unsafe load accepts. What it holds follows from the
float weights by `round(w / scale)`, with `scale` the largest magnitude over 127.5; so the rounded
numbers, and the exact largest weight that the scale is found by, are all that has to be kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

_HALF_RANGE = 127.5
"""Of torch.ao's symmetric observer for qint8: (127 + 128) / 2."""
_LEAST_SCALE = torch.finfo(torch.float32).eps
"""The same observer's smallest scale."""


def pack_int8(state: Mapping[str, torch.Tensor], modules: Iterable[str]) -> dict[str, Any]:
    """Return the state with the weights of `modules` as int8, everything else as it is.

    Args:
        state: Of the float model.
        modules: Names of the converted modules.
    """
    prefixes = tuple(f"{name}." if name else "" for name in modules)
    return {
        name: _pack(value) if _is_weight(name, value, prefixes) else value
        for name, value in state.items()
    }


def unpack_int8(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return float weights that convert to the int8 weights which were packed."""
    return {
        name: _unpack(value) if isinstance(value, Mapping) else value
        for name, value in state.items()
    }


def _is_weight(name: str, value: torch.Tensor, prefixes: tuple[str, ...]) -> bool:
    for prefix in prefixes:
        if name.startswith(prefix):
            rest = name.removeprefix(prefix)
            # Not of modules inside: those that are converted are named themselves.
            if "." not in rest and rest.startswith("weight") and value.dim() == 2:
                return True
    return False


def _pack(weight: torch.Tensor) -> dict[str, Any]:
    weight = weight.float()
    peak = int(weight.abs().argmax())
    largest = weight.reshape(-1)[peak].clone()
    scale = _scale(largest)
    return {
        # torch's own arithmetic: a tie decided the other way would be another int8 model.
        "int8": torch.round(weight * scale.reciprocal()).clamp(-128, 127).to(torch.int8),
        "largest": largest,
        "peak": peak,
    }


def _unpack(packed: Mapping[str, Any]) -> torch.Tensor:
    weight: torch.Tensor = packed["int8"].float() * _scale(packed["largest"])
    weight.reshape(-1)[packed["peak"]] = packed["largest"]
    return weight


def _scale(largest: torch.Tensor) -> torch.Tensor:
    return (largest.abs() / _HALF_RANGE).clamp(min=_LEAST_SCALE)
