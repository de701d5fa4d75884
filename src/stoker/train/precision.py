"""The number format of a step: decided once, with the reason.

Enters: the setting, the device, the model. Leaves: a frozen `PrecisionChoice`, which makes autocast
contexts and a gradient scaler. Costs nothing per step besides autocast itself.

The loss is computed in float32: `Step` casts outputs before the criterion. Outputs in float64 stay.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from stoker.errors import InputError
from stoker.train.settings import Precision


@dataclass(frozen=True)
class PrecisionChoice:
    """A number format, and why it was chosen.

    Attributes:
        name: "fp32", "tf32", "fp16" or "bf16".
        reason: Why, in words.
        dtype: Type of autocast; None for no autocast.
        scales: Whether gradients are scaled, so that small ones survive float16.
    """

    name: str
    reason: str
    dtype: torch.dtype | None
    scales: bool

    def autocast(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """Return the context of the forward pass.

        The weight cache is off: inside a CUDA graph it would keep casts of the capture alive.
        """
        if self.dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(device.type, self.dtype, cache_enabled=False)

    def make_scaler(self, device: torch.device) -> torch.amp.GradScaler:
        """Return the gradient scaler; a disabled one if gradients are not scaled."""
        return torch.amp.GradScaler(
            device.type,
            init_scale=2.0**16,
            growth_factor=2.0,
            backoff_factor=0.5,
            growth_interval=2000,
            enabled=self.scales,
        )

    @contextlib.contextmanager
    def alone(self, device: torch.device) -> Iterator[None]:
        """Context of this precision alone: TF32 if that was chosen, and no autocast of a script around it."""
        before = torch.get_float32_matmul_precision()
        if self.name == "tf32":
            torch.set_float32_matmul_precision("high")
        try:
            with without_autocast(device):
                yield
        finally:
            torch.set_float32_matmul_precision(before)


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return a context without the autocast that a script has entered.

    Where there is none, the context does nothing. At the end of the outermost autocast, torch drops the casts of
    weights that it keeps: a model with an autocast of its own would train on old ones inside another context.
    """
    if not torch.is_autocast_enabled(device.type):
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)


def choose_precision(
    asked: Precision, device: torch.device, model: torch.nn.Module
) -> PrecisionChoice:
    """Decide the precision.

    Args:
        asked: One of `Precision`; "auto" decides by device and model.
        device: Device of the model.
        model: Checked for recurrent layers: under autocast cuDNN runs them in float16, whatever the
            type of autocast is, so they need scaled gradients.
    """
    recurrent = any(isinstance(module, torch.nn.RNNBase) for module in model.modules())
    if asked == "auto":
        return _automatic(device, recurrent)
    if asked == "fp32":
        return PrecisionChoice("fp32", "fp32: it was asked for", None, False)
    if asked == "tf32":
        if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
            raise InputError(
                f"precision is 'tf32' on {_name(device)}, which has none.",
                "a GPU of compute capability 8.0 or more",
                "precision='fp32'",
            )
        return PrecisionChoice("tf32", "tf32: it was asked for", None, False)
    if asked == "fp16":
        if device.type == "cpu":
            raise InputError(
                "precision is 'fp16' on the CPU.",
                "fp32 or bf16 there: float16 is slow on a CPU and its gradients vanish",
                "precision='bf16'",
            )
        return PrecisionChoice("fp16", "fp16: it was asked for", torch.float16, True)
    if device.type == "cuda" and not torch.cuda.is_bf16_supported():
        raise InputError(
            f"precision is 'bf16' on {_name(device)}, which has none.",
            "a GPU of compute capability 8.0 or more",
            "precision='fp16'",
        )
    scaled = recurrent and device.type == "cuda"
    note = "; scaled, because cuDNN runs recurrent layers in float16 under autocast"
    return PrecisionChoice(
        "bf16", "bf16: it was asked for" + (note if scaled else ""), torch.bfloat16, scaled
    )


def _automatic(device: torch.device, recurrent: bool) -> PrecisionChoice:
    if device.type != "cuda":
        return PrecisionChoice("fp32", f"fp32: the device is {_name(device)}", None, False)
    if not torch.cuda.is_bf16_supported():
        reason = f"fp16 with scaled gradients: {_name(device)} has no bfloat16"
        return PrecisionChoice("fp16", reason, torch.float16, True)
    if recurrent:
        reason = (
            "fp16 with scaled gradients: cuDNN runs recurrent layers in float16 under autocast, "
            "whatever type is asked for"
        )
        return PrecisionChoice("fp16", reason, torch.float16, True)
    reason = f"bf16: {_name(device)} computes in it, and it needs no scaling"
    return PrecisionChoice("bf16", reason, torch.bfloat16, False)


def _name(device: torch.device) -> str:
    return (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"the {device.type.upper()}"
    )
