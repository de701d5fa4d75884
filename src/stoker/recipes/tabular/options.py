"""What the tabular recipe may be told.

Enters: plain values of a config. Leaves: checked `TabularOptions`, which the split, the tasks and the networks read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from stoker.recipes.options import AtLeastOne, CheckedOptions, Range, Share, require
from stoker.recipes.schedule import LrRule

SplitMode = Literal["auto", "store", "time", "random", "distinct"]
BoundMode = Literal["soft", "clamp"]
ClassWeights = Literal["none", "balanced"] | tuple[float, ...]
RegressionLoss = Literal["huber", "mse"]
_ABOVE_0 = Range("above 0", lambda value: value > 0, 1)


@dataclass(frozen=True)
class TabularOptions(CheckedOptions):
    """What the tabular recipe may be told.

    Attributes:
        field: Inputs; None takes `features`, else the base series, else the only field of numbers.
        target_field: What is predicted.
        model: "mlp", "patchtst", or "auto": the MLP for rows, the patch transformer for windows.
        task: "auto" decides by the type of the targets: whole numbers are classes.
        hidden: Widths of the MLP's hidden layers.
        d_model: Width of the transformer.
        layers: Transformer layers.
        heads: Attention heads; divides `d_model`.
        ffn_factor: Width of the feed-forward part over `d_model`.
        patch: Rows per patch.
        stride: Rows from one patch to the next.
        channels: "mixed" embeds all columns of a patch together; "independent" runs every column by
            itself with shared weights, for as many times the work as there are columns.
        dropout: Dropout in both networks.
        init_gain: Gain of the Xavier initialisation, such as 0.5; None keeps torch's own.
        output_bound: Largest magnitude of an output: class scores, or values in units of the
            training targets' spread, such as 10; None for no bound.
        output_bound_mode: "soft" keeps gradients; "clamp" does not and is there to compare with.
        scale_inputs: Scale by median and quartiles of training rows, inside the model.
        input_tails: "log" passes scaled inputs through sign(x) log(1 + |x|), which keeps the order of values far out;
            "cut" leaves that to `input_clip` alone.
        input_clip: Largest scaled input; None for no limit.
        input_ramps: Ramps that the MLP gets beside each column, between its quantiles in training rows; fewer
            where a table has many columns, 0 for none.
        class_weights: "none"; "balanced" by the training shares; or a weight per class.
        quiet_class: Name of the class that should raise no alarm, for the rate of false alarms; None finds one that is
            called benign, normal, negative or the like.
        loss: Loss of a regression on scaled targets: Huber with delta 1, or mean squares.
        split: "store" as packed; "time" in order; "random"; "distinct" is random with equal rows on one
            side; "auto" takes the first of these that can be right.
        ratios: Shares of train, val and test where the store has no split.
        embargo: Samples left out after a border in time; None is a window.
        batch_size: Samples per update, accumulation included, that the rate is scaled for; None
            leaves it as given.
        reference_batch: Samples per update at which the given rate is right.
        lr_rule: How the rate grows with the samples per update: "linear", "sqrt", or "none".
        weight_decay: Weight decay of AdamW, on matrices only.
        warmup_share: Share of the updates in which the rate rises.
    """

    field: str | None = None
    target_field: str = "targets"
    model: Literal["auto", "mlp", "patchtst"] = "auto"
    task: Literal["auto", "classification", "regression"] = "auto"
    hidden: Annotated[
        tuple[int, ...], Range("widths of 1 or more", lambda widths: min(widths, default=1) >= 1)
    ] = (512, 512)
    d_model: AtLeastOne = 256
    layers: AtLeastOne = 3
    heads: AtLeastOne = 4
    ffn_factor: AtLeastOne = 4
    patch: AtLeastOne = 16
    stride: AtLeastOne = 8
    channels: Literal["mixed", "independent"] = "mixed"
    dropout: Share = 0.1
    init_gain: Annotated[float | None, _ABOVE_0] = None
    output_bound: Annotated[float | None, _ABOVE_0] = None
    output_bound_mode: BoundMode = "soft"
    scale_inputs: bool = True
    input_tails: Literal["log", "cut"] = "log"
    input_clip: Annotated[float | None, _ABOVE_0] = 10.0
    input_ramps: Annotated[int, Range("0 or more", lambda ramps: ramps >= 0)] = 32
    class_weights: ClassWeights = "none"
    quiet_class: str | None = None
    loss: RegressionLoss = "huber"
    split: SplitMode = "auto"
    ratios: tuple[float, float, float] = (0.8, 0.1, 0.1)
    embargo: int | None = None
    batch_size: Annotated[int | None, _ABOVE_0] = None
    reference_batch: Annotated[int, _ABOVE_0] = 128
    lr_rule: LrRule = "linear"
    weight_decay: float = 1e-2
    warmup_share: Share = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.d_model % self.heads == 0,
            "heads",
            self.heads,
            f"a divisor of d_model, which is {self.d_model}",
            "heads=4",
        )
