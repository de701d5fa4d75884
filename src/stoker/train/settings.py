"""What a training run is asked to do: one frozen value, checked at once.

Enters: keywords, or a mapping. Leaves: `TrainSettings`. Costs nothing; no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from stoker.errors import InputError

Precision = Literal["auto", "fp32", "tf32", "fp16", "bf16"]
Capture = Literal["auto", "on", "off"]
NonFinite = Literal["stop", "skip", "rollback"]


@dataclass(frozen=True)
class TrainSettings:
    """How to train.

    Attributes:
        epochs: Passes over the training samples.
        precision: "auto" decides by the device and says why.
        accumulation_steps: Batches per optimizer update; equal to one batch of their sum.
        clip_norm: Largest norm of all gradients together; None does not clip.
        capture: Replay the whole step as one CUDA graph: "auto" where it works and is right.
        compile: Compile the model with torch.compile first.
        nonfinite: What to do about a loss that is not finite: stop with its cause, skip the update,
            or go back to the last good state and leave the batch out.
        read_every: Steps between two reads of losses from the device.
        seed: Of torch's, numpy's and Python's generators, set when a run begins (not when it goes on);
            None leaves them as they are.
        keep_last: Checkpoints kept besides the best.
        checkpoint_every_epochs: 0 is never.
        checkpoint_every_steps: Within an epoch; 0 is never.
        monitor: Metric of validation that decides the best checkpoint.
        maximise: Whether more of it is better.
        empty_cache_every_n_epochs: 0 is never.
        empty_cache_every_n_batches: 0 is never.
        log_gpu_stats_every_n_batches: 0 is never.
        leak_bytes: Growth of device memory between epochs that is reported.
        survive_oom: Climb down the ladder when memory runs out, instead of ending.
        activation_checkpointing: Recompute activations in the backward pass.
        tensorboard: Write scalars for TensorBoard beside the run log.
    """

    epochs: int = 1
    precision: Precision = "auto"
    accumulation_steps: int = 1
    clip_norm: float | None = 1.0
    capture: Capture = "auto"
    compile: bool = False
    nonfinite: NonFinite = "stop"
    read_every: int = 50
    seed: int | None = None
    keep_last: int = 2
    checkpoint_every_epochs: int = 1
    checkpoint_every_steps: int = 0
    monitor: str = "loss"
    maximise: bool = False
    empty_cache_every_n_epochs: int = 0
    empty_cache_every_n_batches: int = 0
    log_gpu_stats_every_n_batches: int = 0
    leak_bytes: int = 100 << 20
    survive_oom: bool = True
    activation_checkpointing: bool = False
    tensorboard: bool = False

    def __post_init__(self) -> None:
        for name, allowed in (
            ("precision", get_args(Precision)),
            ("capture", get_args(Capture)),
            ("nonfinite", get_args(NonFinite)),
        ):
            if getattr(self, name) not in allowed:
                raise InputError(
                    f"{name} is {getattr(self, name)!r}.",
                    ", ".join(allowed),
                    f"{name}={allowed[0]!r}",
                )
        least = {"epochs": 0, "accumulation_steps": 1, "read_every": 1, "keep_last": 1}
        for entry in fields(self):
            value = getattr(self, entry.name)
            optional = entry.type == "int | None"
            if (entry.type == "int" or (optional and value is not None)) and (
                isinstance(value, bool)
                or not isinstance(value, int)
                or value < least.get(entry.name, 0)
            ):
                raise InputError(
                    f"{entry.name} is {value!r}.",
                    f"a whole number, {least.get(entry.name, 0)} or more{', or None' if optional else ''}",
                    f"{entry.name}={entry.default!r}",
                )
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise InputError(
                f"clip_norm is {self.clip_norm!r}.", "a number above 0, or None", "clip_norm=1.0"
            )

    @classmethod
    def of(cls, config: TrainSettings | Mapping[str, Any] | None) -> TrainSettings:
        """Return settings from what a user passes as `config`; unknown names are refused."""
        if isinstance(config, TrainSettings):
            return config
        given = {} if config is None else dict(config)
        known = [entry.name for entry in fields(cls)]
        unknown = [name for name in given if name not in known]
        if unknown:
            raise InputError(
                f"unknown training settings {', '.join(map(repr, unknown))}.",
                ", ".join(known),
                "Trainer(..., config={'epochs': 10, 'precision': 'bf16'})",
            )
        return cls(**given)

    def to_json(self) -> dict[str, Any]:
        """Return the settings as plain values, for run logs and checkpoints."""
        return asdict(self)
