"""What the forex recipe may be told.

Enters: plain values of a config. Leaves: checked `ForexOptions`, which the split, the labels and the network read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from stoker.recipes.options import AtLeastOne, CheckedOptions, Range, Share, require

LossWeights = tuple[float, float, float, float]


@dataclass(frozen=True)
class ForexOptions(CheckedOptions):
    """What the forex recipe may be told.

    Attributes:
        timeframes: Series to use; None takes all of the store, shortest first.
        d_model: Width of LSTMs and attention.
        layers: LSTM layers per timeframe.
        heads: Heads of both attentions; divides `d_model`.
        dropout: Between LSTM layers and in the attentions.
        ffn_factor: Width of the feed-forward part over `d_model`.
        pooling: "attention" with a learned query, the "last" row, or the sum of both:
            the query alone cannot tell which bar is the last.
        head_weights: "mean", or "document" for fixed timeframe weights of scalp and swing.
        gaps: "mask" what reaches over missing bars and flag it, only "flag" it, or "ignore" it.
        input_clip: Largest scaled input; None for no limit.
        label_gaps: "keep" samples whose label runs over missing bars, or "drop" them.
        pip: Log return of one pip. 1e-4 is the basis point; a pip of EURUSD at 1.17 is 0.85 of it.
        cost_pips: What one trade costs in pips, both ways, in the evaluation: spread, commission, slippage.
        neutral_share: Share of the training samples that are to be NEUTRAL.
        direction_step: Bars ahead that decide the direction; None is the whole horizon.
        scalp_step: Bars ahead of the scalp move; None finds the step whose median training move is
            nearest to the middle of 0.5 to 2 pips.
        swing_step: The same for 2 to 5 pips.
        loss_weights: Weights of direction (cross-entropy), scalp (Huber 0.3), swing (Huber 0.5), trend (MSE).
        ratios: Shares of train, val and test in time order, for stores without a split.
        embargo: Decisions left out after each border, for stores without a split; None is the
            horizon.
        fold: Fold and number of folds of a walk forward, such as [2, 5], instead of the split: the last 60 % of the
            time in equal test spans, each after everything that is trained on. `stoker train --folds 5` trains all.
        weight_decay: Weight decay of AdamW, on matrices only.
        warmup_share: Share of the updates in which the rate rises.
        order: "shuffled", or "time". Each sample carries its whole past, so shuffling is right.
        stateful: Carry the LSTM state from batch to batch, over lanes.
        lanes: Rows of a batch when `stateful`: batch size times ranks.
        carried: Timeframes whose state is carried; None is the store's base timeframe.
        max_gap_rows: Bars that may be missing in a row without breaking a carried state.
        parallel_streams: On a GPU, run the timeframes' LSTMs side by side.
    """

    timeframes: tuple[str, ...] | None = None
    d_model: AtLeastOne = 128
    layers: AtLeastOne = 2
    heads: AtLeastOne = 4
    dropout: Share = 0.1
    ffn_factor: AtLeastOne = 4
    pooling: Literal["attention+last", "attention", "last"] = "attention+last"
    head_weights: Literal["mean", "document"] = "mean"
    gaps: Literal["mask", "flag", "ignore"] = "mask"
    input_clip: float | None = 10.0
    label_gaps: Literal["keep", "drop"] = "keep"
    pip: Annotated[float, Range("a return above 0", lambda pip: pip > 0)] = 1e-4
    cost_pips: Annotated[float, Range("0 or more", lambda pips: pips >= 0)] = 1.0
    neutral_share: Share = 1 / 3
    direction_step: int | None = None
    scalp_step: int | None = None
    swing_step: int | None = None
    loss_weights: Annotated[
        LossWeights,
        Range(
            "four weights of 0 or more, not all 0",
            lambda weights: min(weights) >= 0 and sum(weights) > 0,
        ),
    ] = (0.40, 0.35, 0.15, 0.10)
    ratios: tuple[float, float, float] = (0.70, 0.15, 0.15)
    embargo: int | None = None
    fold: Annotated[
        tuple[int, int] | None,
        Range("[1, N] to [N, N]", lambda fold: 1 <= fold[0] <= fold[1], (1, 5)),
    ] = None
    weight_decay: float = 1e-2
    warmup_share: Share = 0.05
    order: Literal["shuffled", "time"] = "shuffled"
    stateful: bool = False
    lanes: AtLeastOne = 16
    carried: tuple[str, ...] | None = None
    max_gap_rows: int = 0
    parallel_streams: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.d_model % self.heads == 0,
            "heads",
            self.heads,
            f"a divisor of d_model, which is {self.d_model}",
            "heads=4",
        )
