"""Networks for rows and windows of numbers: an MLP, and a patch transformer after PatchTST.

Enters: `(batch, features)` or `(batch, time, features)` of any number type, as stored. Leaves:
`(batch, outputs)`: class scores, or values in units of the training targets' spread. Costs: an MLP
256-512-512-3 has 0.4 M parameters; the transformer (d 256, 3 layers) 2.4 M plus its patches and head.

Outputs may be bounded (`output_bound`), by default softly. A clamp has no gradient outside its bounds: an output
that left them stays there, and the loss does not show it. `bound * tanh(x / bound)` has a gradient that pulls it back.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import nn

from stoker.errors import InputError
from stoker.recipes.contract import Facts
from stoker.recipes.scaling import Ramps, RobustScale
from stoker.recipes.tabular.options import BoundMode, TabularOptions


def bound_outputs(values: torch.Tensor, bound: float | None, mode: BoundMode) -> torch.Tensor:
    """Return outputs within plus or minus `bound`, in float32.

    "soft" has a gradient as long as float32 can tell tanh from 1 (up to 9 times the bound). For x below
    a third of the bound it is within 4 % of x. "clamp" exists for comparison.
    """
    values = values.float()
    if bound is None:
        return values
    return (
        bound * torch.tanh(values / bound) if mode == "soft" else torch.clamp(values, -bound, bound)
    )


def set_gain(module: nn.Module, gain: float) -> None:
    """Initialise the matrices of linear and attention layers by Xavier's rule times `gain`, their biases to 0."""
    for part in module.modules():
        if isinstance(part, nn.Linear):
            nn.init.xavier_uniform_(part.weight, gain)
            if part.bias is not None:
                nn.init.zeros_(part.bias)
        if isinstance(part, nn.MultiheadAttention) and part.in_proj_weight is not None:
            nn.init.xavier_uniform_(part.in_proj_weight, gain)
            nn.init.zeros_(part.in_proj_bias)


class RowMlp(nn.Sequential):
    """Linear, GELU and dropout per hidden layer, then a linear output; windows are flattened."""

    def __init__(
        self, num_inputs: int, hidden: Sequence[int], num_outputs: int, dropout: float
    ) -> None:
        widths = [num_inputs, *hidden]
        layers: list[nn.Module] = [nn.Flatten()]
        for before, after in pairwise(widths):
            layers += [nn.Linear(before, after), nn.GELU(), nn.Dropout(dropout)]
        super().__init__(*layers, nn.Linear(widths[-1], num_outputs))


class PatchTransformer(nn.Module):
    """Overlapping patches of a window as tokens; the last patch ends with the last row."""

    def __init__(
        self, window: int, num_features: int, options: TabularOptions, num_outputs: int
    ) -> None:
        super().__init__()
        self.patch, self.stride = options.patch, options.stride
        self.is_mixed = options.channels == "mixed"
        if self.patch > window:
            raise InputError(
                f"patches of {self.patch} rows for windows of {window}.",
                f"1 to {window}",
                f"patch={max(1, window // 4)}, stride={max(1, window // 8)}",
            )
        # If patches do not fill the window exactly, the first patch begins before it, filled with its first row.
        count = -(-(window - self.patch) // self.stride) + 1
        self.missing = self.patch + (count - 1) * self.stride - window
        width = options.d_model
        self.embed = nn.Linear(self.patch * (num_features if self.is_mixed else 1), width)
        self.places = nn.Parameter(torch.empty(1, count, width))
        nn.init.normal_(self.places, std=0.02)
        layer = nn.TransformerEncoderLayer(
            width,
            options.heads,
            options.ffn_factor * width,
            options.dropout,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        self.encoder = nn.TransformerEncoder(
            layer, options.layers, nn.LayerNorm(width), enable_nested_tensor=False
        )
        self.head = nn.Sequential(
            nn.Flatten(), nn.Dropout(options.dropout), nn.Linear(count * width, num_outputs)
        )

    def forward(self, window: torch.Tensor) -> torch.Tensor:
        """Return `(batch, outputs)` for `(batch, time, features)`."""
        batch, _, features = window.shape
        if self.missing:
            window = torch.cat([window[:, :1].expand(-1, self.missing, -1), window], dim=1)
        # (batch, patches, features, patch)
        patches = window.unfold(1, self.patch, self.stride)
        tokens = patches.flatten(2) if self.is_mixed else patches.transpose(1, 2).flatten(0, 1)
        tokens = self.encoder(self.embed(tokens) + self.places)
        if not self.is_mixed:
            tokens = tokens.view(batch, features, *tokens.shape[1:]).mean(dim=1)
        made: torch.Tensor = self.head(tokens)
        return made


def make_scaler(options: TabularOptions, facts: Facts) -> RobustScale:
    """Return the scaler of a model's inputs, not yet fitted."""
    num_columns = facts["num_features"] + facts["is_series"]
    return RobustScale(
        np.zeros(num_columns),
        np.ones(num_columns),
        options.input_clip if options.scale_inputs else None,
        torch.float64 if facts.get("is_wide") else torch.float32,
        is_squashed=facts.get("is_squashed", False),
    )


class TabularModel(nn.Module):
    """Input scaling, a network, and bounded outputs; `predict` converts them to the units of the targets."""

    target_center: torch.Tensor
    target_scale: torch.Tensor
    classes: torch.Tensor

    def __init__(self, options: TabularOptions, facts: Facts) -> None:
        """Make the model with initial weights. Buffers that are fitted later start as the identity."""
        super().__init__()
        num_outputs, num_ramps = facts["num_outputs"], facts.get("num_ramps", 0)
        num_columns, window = facts["num_features"] + facts["is_series"], facts["window"] or 1
        self.scaler = make_scaler(options, facts)
        self.ramps = Ramps(*np.zeros((3, num_ramps))) if num_ramps else None
        self.body: nn.Module
        if facts["body"] == "mlp":
            width = num_columns * window + num_ramps
            self.body = RowMlp(width, options.hidden, num_outputs, options.dropout)
        else:
            self.body = PatchTransformer(window, num_columns, options, num_outputs)
        if options.init_gain is not None:
            set_gain(self.body, options.init_gain)
        self.bound = options.output_bound
        self.bound_mode = options.output_bound_mode
        self.is_classifier = facts["is_classifier"]
        # Target values of the classes; or center and scale of regression targets.
        classes = np.zeros(num_outputs, np.int64) if self.is_classifier else np.zeros(0, np.float32)
        units = () if self.is_classifier else (num_outputs,)
        self.register_buffer("classes", torch.from_numpy(classes))
        self.register_buffer("target_center", torch.zeros(units))
        self.register_buffer("target_scale", torch.ones(units))

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
