"""The document's `quantize_dynamic(model, {LSTM, Linear}, dtype=torch.qint8)`: an int8 copy for inference on the CPU.

Enters: a model. Leaves: its copy with int8 weights. Costs a copy of the model. `stoker.train.quantize` does the work,
and also measures what the change costs in size, time and accuracy.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn

from stoker.arguments import explained
from stoker.errors import InputError
from stoker.train import quantize


@explained("stoker.quantize_dynamic(model)")
def quantize_dynamic(
    model: nn.Module,
    qconfig_spec: Collection[type[nn.Module]] | None = None,
    dtype: torch.dtype = torch.qint8,
) -> nn.Module:
    """Return a copy of a model with int8 weights, for inference on the CPU.

    Args:
        model: Not changed.
        qconfig_spec: Types of modules to convert; None is Linear, LSTM and GRU.
        dtype: torch.qint8, or torch.int8.

    Raises:
        InputError: Another type of number, or a model with nothing to convert.
    """
    if dtype not in (torch.qint8, torch.int8):
        raise InputError(f"dtype is {dtype}.", "torch.qint8", "dtype=torch.qint8")
    kinds = None if qconfig_spec is None else tuple(qconfig_spec)
    left = [
        name
        for name, module in model.named_modules()
        if kinds is not None
        and isinstance(module, nn.Linear | nn.LSTM | nn.GRU)
        and not isinstance(module, kinds)
    ]
    small, _ = quantize.quantize_dynamic(model, exclude=left)
    return small
