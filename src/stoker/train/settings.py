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
_LEAST = {"accumulation_steps": 1, "read_every": 1, "keep_last": 1}


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
        for entry in fields(self):
            value = getattr(self, entry.name)
            wanted = _refusal(entry.name, str(entry.type), value)
            if wanted is not None:
                raise InputError(
                    f"{entry.name} is {value!r}.", wanted, f"{entry.name}={entry.default!r}"
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


def _refusal(name: str, kind: str, value: Any) -> str | None:
    """Return what is allowed where a value is not of its field's kind; None where it is."""
    if value is None and kind.endswith("| None"):
        return None
    or_none = ", or None" if kind.endswith("| None") else ""
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    least = _LEAST.get(name, 0)
    if kind.startswith("int") and not (is_whole and value >= least):
        return f"a whole number, {least} or more{or_none}"
    if kind.startswith("float") and not ((is_whole or isinstance(value, float)) and value > 0):
        return f"a number above 0{or_none}"
    if kind == "bool" and not isinstance(value, bool):
        return "True or False"
    if kind == "str" and not isinstance(value, str):
        return "a name"
    return None
