"""Networks for rows and windows of numbers: an MLP, and a patch transformer after PatchTST.

Enters: `(batch, features)` or `(batch, time, features)` of any number type, as stored. Leaves:
`(batch, outputs)`: class scores, or values in units of the training targets' spread. Costs: MLP
256-512-512-3 has 0.4 M parameters; the transformer (d 256, 3 layers) 2.4 M plus its patches and head.

Outputs are bounded softly. A clamp has no gradient outside its bounds: an output that has run away stays
there, and the loss does not show it. `bound * tanh(x / bound)` bounds as well and pulls it back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import nn

from stoker.errors import InputError
from stoker.recipes.scaling import Ramps, RobustScale
from stoker.store.fields import Array

BoundMode = Literal["soft", "clamp"]
Channels = Literal["mixed", "independent"]


def bound_outputs(values: torch.Tensor, bound: float | None, mode: BoundMode) -> torch.Tensor:
    """Return outputs within plus or minus `bound`, in float32.

    "soft" keeps a gradient as long as float32 can tell tanh from 1 (up to 9 times the bound) and is
    within 4 % of x for x below a third of the bound. "clamp" is there to compare with.
    """
    values = values.float()
    if bound is None:
        return values
    return (
        bound * torch.tanh(values / bound) if mode == "soft" else torch.clamp(values, -bound, bound)
    )


def set_gain(module: nn.Module, gain: float) -> None:
    """Initialise all matrices by Xavier's rule times `gain`, and all biases of such layers to 0."""
    for part in module.modules():
        if isinstance(part, nn.Linear):
            nn.init.xavier_uniform_(part.weight, gain)
            if part.bias is not None:
                nn.init.zeros_(part.bias)
        if isinstance(part, nn.MultiheadAttention) and part.in_proj_weight is not None:
            nn.init.xavier_uniform_(part.in_proj_weight, gain)
            nn.init.zeros_(part.in_proj_bias)


class RowMlp(nn.Sequential):
    """Linear, GELU and dropout per hidden layer, then a linear output; windows are laid flat."""

    def __init__(
        self, num_inputs: int, hidden: Sequence[int], num_outputs: int, dropout: float
    ) -> None:
        widths = [num_inputs, *hidden]
        layers: list[nn.Module] = [nn.Flatten()]
        for before, after in pairwise(widths):
            layers += [nn.Linear(before, after), nn.GELU(), nn.Dropout(dropout)]
        super().__init__(*layers, nn.Linear(widths[-1], num_outputs))


@dataclass(frozen=True)
class PatchShape:
    """Sizes of the patch transformer."""

    d_model: int = 256  # width
    layers: int = 3  # transformer layers
    heads: int = 4  # attention heads
    ffn_factor: int = 4  # width of the feed-forward part over `d_model`
    patch: int = 16  # rows per patch
    stride: int = 8  # rows from one patch to the next
    # "mixed" embeds all features of a patch together; "independent" runs every feature by itself with shared
    # weights, as PatchTST does, for `features` times the work
    channels: Channels = "mixed"

    def num_patches(self, window: int) -> int:
        """Return the patches of a window; the first one may begin before it."""
        return -(-(window - self.patch) // self.stride) + 1


class PatchTransformer(nn.Module):
    """Overlapping patches of a window as tokens; the last patch ends with the last row."""

    def __init__(
        self, window: int, num_features: int, shape: PatchShape, num_outputs: int, dropout: float
    ) -> None:
        super().__init__()
        if not 1 <= shape.patch <= window:
            raise InputError(
                f"patches of {shape.patch} rows for windows of {window}.",
                f"1 to {window}",
                f"patch={max(1, window // 4)}, stride={max(1, window // 8)}",
            )
        self.shape = shape
        count = shape.num_patches(window)
        # A window that the stride does not divide is filled up at its old end, by its first row.
        self.missing = shape.patch + (count - 1) * shape.stride - window
        width = shape.patch * (num_features if shape.channels == "mixed" else 1)
        self.embed = nn.Linear(width, shape.d_model)
        self.places = nn.Parameter(torch.empty(1, count, shape.d_model))
        nn.init.normal_(self.places, std=0.02)
        layer = nn.TransformerEncoderLayer(
            shape.d_model,
            shape.heads,
            shape.ffn_factor * shape.d_model,
            dropout,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        self.encoder = nn.TransformerEncoder(
            layer, shape.layers, nn.LayerNorm(shape.d_model), enable_nested_tensor=False
        )
        self.head = nn.Sequential(
            nn.Flatten(), nn.Dropout(dropout), nn.Linear(count * shape.d_model, num_outputs)
        )

    def forward(self, window: torch.Tensor) -> torch.Tensor:
        """Return `(batch, outputs)` for `(batch, time, features)`."""
        batch, _, features = window.shape
        if self.missing:
            window = torch.cat([window[:, :1].expand(-1, self.missing, -1), window], dim=1)
        # (batch, patches, features, patch)
        patches = window.unfold(1, self.shape.patch, self.shape.stride)
        if self.shape.channels == "mixed":
            tokens = patches.flatten(2)
        else:
            tokens = patches.transpose(1, 2).flatten(0, 1)
        tokens = self.encoder(self.embed(tokens) + self.places)
        if self.shape.channels == "independent":
            tokens = tokens.view(batch, features, *tokens.shape[1:]).mean(dim=1)
        made: torch.Tensor = self.head(tokens)
        return made


class TabularModel(nn.Module):
    """Scaling, a network, bounded outputs; and the way back to the units of the targets."""

    target_center: torch.Tensor
    target_scale: torch.Tensor
    classes: torch.Tensor

    def __init__(
        self,
        scaler: RobustScale,  # fitted on training rows
        body: nn.Module,  # `RowMlp` or `PatchTransformer`
        *,
        bound: float | None = None,  # largest magnitude of an output; None for no bound
        bound_mode: BoundMode = "soft",  # how it is bounded
        # `(classes,)` the targets' own numbers for them; None for regression
        classes: Array | None = None,
        target_center: Array | float = 0.0,  # `(outputs,)` for regression
        target_scale: Array | float = 1.0,  # `(outputs,)` for regression
        ramps: Ramps | None = None,  # between scaler and body, for rows; None is without
    ) -> None:
        super().__init__()
        self.scaler = scaler
        self.ramps = ramps
        self.body = body
        self.bound = bound
        self.bound_mode: BoundMode = bound_mode
        self.is_classifier = classes is not None
        self.register_buffer("classes", torch.as_tensor([] if classes is None else classes))
        for name, value in (("target_center", target_center), ("target_scale", target_scale)):
            self.register_buffer(name, torch.as_tensor(value, dtype=torch.float32))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return `(batch, outputs)` in float32."""
        rows = self.scaler(inputs)
        if self.ramps is not None:
            rows = self.ramps(rows)
        return bound_outputs(self.body(rows), self.bound, self.bound_mode)

    def predict(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return class and probabilities, or values in the units of the stored targets."""
        outputs = self(inputs)
        if not self.is_classifier:
            return {"value": outputs * self.target_scale + self.target_center}
        chances = outputs.softmax(dim=1)
        return {"class": self.classes[chances.argmax(dim=1)], "probability": chances}
