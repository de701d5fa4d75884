"""The multi-timeframe network: an LSTM with pooling per timeframe, then attention over the timeframes.

Enters: per timeframe a window `(batch, bars, features)` and its gap flags; with carried state also a
dict of tensors. Leaves: a dict with `direction` (batch, 3) scores, and `scalp`, `swing` (pips) and
`trend` (batch,). Costs: about 1.6 M parameters at the default sizes; the LSTMs take nearly all of
the time, because their steps follow one another.

    M1  (480 bars) ─ scale ─ mask gaps ─ LSTM x 2 ─ LayerNorm ─ pool (learned query) ─┐
    M5  (288 bars) ─ ...                                                              ├─ attention
    ...                                                                               │  over the
    H4  ( 48 bars) ─ ...                                                             ─┘  timeframes
                                                                   ─ FFN x 4 ─ mean ─ four heads

The forward pass never synchronises with the host and packs no sequences, so a step can be captured in a CUDA graph.
Under autocast on a GPU an LSTM runs as one kernel per layer in each pass (`lstm.py`), and the timeframes run in
parallel on streams of their own. Dropout between the LSTM layers is a separate layer: the one inside cuDNN has a
random state outside torch's generator. That state changes with every call and is in no checkpoint, so a replayed
step would differ from an eager one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, cast, overload

import numpy as np
import torch
from torch import nn

from stoker.errors import InputError
from stoker.recipes.forex import lstm as recurrence
from stoker.recipes.forex.options import ForexOptions
from stoker.recipes.scaling import RobustScale

State = dict[str, torch.Tensor]
Outputs = dict[str, torch.Tensor]

SCALP_PIPS = (0.5, 2.0)
SWING_PIPS = (2.0, 5.0)
DOWN, NEUTRAL, UP = 0, 1, 2
NAMES = ("down", "neutral", "up")
# Shortest timeframe first, as the fusion document lists them.
_DOCUMENT_WEIGHTS = {
    "scalp": (0.35, 0.30, 0.20, 0.10, 0.05),
    "swing": (0.20, 0.20, 0.25, 0.20, 0.15),
}


class Recurrent(nn.Module):
    """A stack of LSTM layers with explicit state `(layers, batch, d_model)`."""

    def __init__(self, num_inputs: int, d_model: int, num_layers: int, dropout: float) -> None:
        super().__init__()
        self.num_layers = num_layers
        self.d_model = d_model
        per_call = 1 if dropout > 0 else num_layers
        widths = [num_inputs] + [d_model] * (num_layers // per_call - 1)
        self.calls = nn.ModuleList(
            nn.LSTM(width, d_model, per_call, batch_first=True) for width in widths
        )
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, rows: torch.Tensor, hidden: torch.Tensor, cell: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the last layer's rows `(batch, bars, d_model)` and the state after the last bar."""
        if rows.device.type == "cpu" and torch.is_autocast_enabled("cpu"):
            # oneDNN has no bfloat16 LSTM on most processors, and raises instead of falling back.
            with torch.autocast("cpu", enabled=False):
                return self._run(rows.float(), hidden, cell)
        return self._run(rows, hidden, cell)

    def _run(
        self, rows: torch.Tensor, hidden: torch.Tensor, cell: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        per_call = self.num_layers // len(self.calls)
        hiddens, cells = [], []
        for number, lstm in enumerate(self.calls):
            rows = self.dropout(rows) if number else rows
            part = slice(number * per_call, (number + 1) * per_call)
            rows, last_hidden, last_cell = recurrence.run_lstm(
                cast(nn.LSTM, lstm), rows, hidden[part].contiguous(), cell[part].contiguous()
            )
            hiddens.append(last_hidden)
            cells.append(last_cell)
        return rows, torch.cat(hiddens), torch.cat(cells)


class TimeframeEncoder(nn.Module):
    """Encodes the window of one timeframe as one vector."""

    steps: torch.Tensor

    def __init__(self, num_features: int, options: ForexOptions) -> None:
        super().__init__()
        self.pooling = options.pooling
        self.scaler = RobustScale(np.zeros(num_features), np.ones(num_features), options.input_clip)
        self.gaps = options.gaps
        # 1 for each feature that compares a bar with the previous one, else 0
        self.register_buffer("steps", torch.zeros(num_features))
        width, dropout = options.d_model, options.dropout
        num_inputs = num_features + (options.gaps != "ignore")
        self.recurrent = Recurrent(num_inputs, width, options.layers, dropout)
        self.norm = nn.LayerNorm(width)
        if self.pooling != "last":
            self.query = nn.Parameter(torch.empty(1, 1, width))
            nn.init.normal_(self.query, std=width**-0.5)
            self.pool = nn.MultiheadAttention(
                width, options.heads, dropout=dropout, batch_first=True
            )

    def prepare(self, window: torch.Tensor, gap: torch.Tensor) -> torch.Tensor:
        """Scale a window, and mask features that reach over missing bars."""
        rows: torch.Tensor = self.scaler(window)
        if self.gaps == "ignore":
            return rows
        flag = (gap != 0).to(rows.dtype).unsqueeze(-1)
        if self.gaps == "mask":
            # 0 is the training median: the jump over the gap becomes an ordinary step.
            rows = rows * (1 - flag * self.steps)
        return torch.cat([rows, flag], dim=-1)

    def forward(
        self, window: torch.Tensor, gap: torch.Tensor, hidden: torch.Tensor, cell: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the summary `(batch, d_model)` and the state after the window."""
        rows, hidden, cell = self.recurrent(self.prepare(window, gap), hidden, cell)
        rows = self.norm(rows)
        if self.pooling == "last":
            return rows[:, -1], hidden, cell
        query = self.query.to(rows.dtype).expand(rows.shape[0], -1, -1)
        pooled, _ = self.pool(query, rows, rows, need_weights=False)
        summary = pooled.squeeze(1)
        # Attention with a learned query ignores order. The last row tells which bar is the current one.
        summary = summary + rows[:, -1] if self.pooling == "attention+last" else summary
        return summary, hidden, cell


class ForexModel(nn.Module):
    """The whole network: stateless as `model(inputs)`, with carried state as `model(inputs, state)`."""

    def __init__(
        self,
        features: Mapping[str, int],  # timeframe, shortest first, to the number of its columns
        options: ForexOptions,
        carried: Sequence[str] = (),  # timeframes whose LSTM state is carried from batch to batch
    ) -> None:
        super().__init__()
        width = options.d_model
        self.timeframes = tuple(features)
        self.carried = tuple(carried)
        self.parallel_streams = options.parallel_streams
        self.encoders = nn.ModuleDict(
            {name: TimeframeEncoder(count, options) for name, count in features.items()}
        )
        self.fusion = nn.TransformerEncoderLayer(
            width,
            options.heads,
            options.ffn_factor * width,
            options.dropout,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        self.norm = nn.LayerNorm(width)
        self.register_buffer("head_weights", _weigh(options.head_weights, self.timeframes))
        sizes = {"direction": 3, "scalp": 1, "swing": 1, "trend": 1}
        self.heads = nn.ModuleDict({name: nn.Linear(width, n) for name, n in sizes.items()})

    head_weights: torch.Tensor

    # -- state carried from batch to batch -------------------------------------------------

    @property
    def stateful(self) -> bool:
        """Whether the trainer has a state to carry."""
        return bool(self.carried)

    def initial_state(self, batch_size: int, device: torch.device | str) -> State:
        """Return the state before the first bar: zeros `(layers, batch, d_model)` per timeframe."""
        return dict(self._zeros(self.carried, batch_size, torch.device(device)))

    def reset_state(self, state: Mapping[str, torch.Tensor], reset: torch.Tensor) -> State:
        """Return the state with zeros in the rows that `reset` (batch,) bool selects."""
        keep = ~reset.bool()[None, :, None]
        return {name: torch.where(keep, value, 0.0) for name, value in state.items()}

    def _zeros(
        self, names: Sequence[str], batch_size: int, device: torch.device
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for name in names:
            stack: Any = self.encoders[name]
            shape = (stack.recurrent.num_layers, batch_size, stack.recurrent.d_model)
            for part in ("hidden", "cell"):
                yield f"{name}/{part}", torch.zeros(shape, device=device)

    # -- forward ---------------------------------------------------------------------------

    @overload
    def forward(self, inputs: Mapping[str, torch.Tensor]) -> Outputs: ...
    @overload
    def forward(
        self, inputs: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor]
    ) -> tuple[Outputs, State]: ...
    def forward(
        self,
        # per timeframe "M5" `(batch, bars, features)` and "M5/gap" `(batch, bars)`
        inputs: Mapping[str, torch.Tensor],
        # from `initial_state`, the previous batch, or `reset_state`. None: every window starts from zeros.
        state: Mapping[str, torch.Tensor] | None = None,
    ) -> Outputs | tuple[Outputs, State]:
        """Return the outputs; with `state` also the next state, detached, in float32."""
        first = inputs[self.timeframes[0]]
        started = dict(self._zeros(self.timeframes, first.shape[0], first.device))
        started.update(state or {})
        if self.parallel_streams and first.is_cuda:
            encoded = self._encode_on_streams(inputs, started)
        else:
            encoded = [self._encode(name, inputs, started) for name in self.timeframes]
        outputs = self._heads(torch.stack([summary for summary, _, _ in encoded], dim=1))
        if state is None:
            return outputs
        after: State = {}
        for name, (_, hidden, cell) in zip(self.timeframes, encoded, strict=True):
            if name in self.carried:
                # Values are carried to the next batch, gradients are not.
                after[f"{name}/hidden"] = hidden.detach().float()
                after[f"{name}/cell"] = cell.detach().float()
        return outputs, after

    def predict(self, inputs: Mapping[str, torch.Tensor]) -> Outputs:
        """Return the predictions for users: direction, probabilities in the order of `NAMES`, scalp, swing, trend."""
        outputs = self(inputs)
        chances = outputs.pop("direction").float().softmax(dim=1)
        return {"class": chances.argmax(dim=1), "probability": chances} | {
            name: value.float() for name, value in outputs.items()
        }

    def _encode(
        self, name: str, inputs: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        encoder = self.encoders[name]
        started = state[f"{name}/hidden"], state[f"{name}/cell"]
        encoded: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
        encoded = encoder(inputs[name], inputs[f"{name}/gap"], *started)
        return encoded

    def _encode_on_streams(
        self, inputs: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor]
    ) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Encode all timeframes in parallel; autograd runs each backward on the stream of its forward."""
        device = inputs[self.timeframes[0]].device
        main = torch.cuda.current_stream(device)
        streams = [_side_stream(device, number) for number in range(len(self.timeframes))]
        encoded = []
        for name, stream in zip(self.timeframes, streams, strict=True):
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                encoded.append(self._encode(name, inputs, state))
        for made, stream in zip(encoded, streams, strict=True):
            main.wait_stream(stream)
            for tensor in made:
                tensor.record_stream(main)
        return encoded

    def _heads(self, summaries: torch.Tensor) -> Outputs:
        """Fuse `(batch, timeframes, d_model)` and return the outputs of the heads."""
        fused = self.norm(self.fusion(summaries))
        mean, scalp, swing = torch.einsum("btd,ht->hbd", fused, self.head_weights.to(fused.dtype))
        return {
            "direction": self.heads["direction"](mean),
            "scalp": _within(self.heads["scalp"](scalp), SCALP_PIPS),
            "swing": _within(self.heads["swing"](swing), SWING_PIPS),
            "trend": torch.tanh(self.heads["trend"](mean).float().squeeze(1)),
        }


def _within(raw: torch.Tensor, band: tuple[float, float]) -> torch.Tensor:
    low, high = band
    return low + (high - low) * torch.sigmoid(raw.float().squeeze(1))


def _weigh(how: str, timeframes: Sequence[str]) -> torch.Tensor:
    """Return weights of the timeframes `(3, timeframes)`: for direction and trend, for scalp, for swing."""
    equal = torch.full((3, len(timeframes)), 1 / len(timeframes))
    if how == "mean":
        return equal
    if len(timeframes) != 5:
        raise InputError(
            f"head_weights is 'document' for {len(timeframes)} timeframes ({', '.join(timeframes)}).",
            "five timeframes, for which fixed weights are known",
            "head_weights='mean'",
        )
    equal[1] = torch.tensor(_DOCUMENT_WEIGHTS["scalp"])
    equal[2] = torch.tensor(_DOCUMENT_WEIGHTS["swing"])
    return equal


@lru_cache(maxsize=64)
def _side_stream(device: torch.device, number: int) -> torch.cuda.Stream:
    """Return the same stream for the same arguments. Kept outside the model, since streams cannot be copied."""
    del number
    return torch.cuda.Stream(device)
