"""What a training run is asked to do: one frozen value, checked at once.

Enters: keywords, a mapping, or the `Settings` of a config file. Leaves: `TrainSettings`. Costs nothing; no torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from stoker.errors import InputError

if TYPE_CHECKING:
    from stoker.config import Settings

Precision = Literal["auto", "fp32", "tf32", "fp16", "bf16"]
Capture = Literal["auto", "on", "off"]
NonFinite = Literal["stop", "skip", "rollback"]
_OF_RUNS = ("recipe.", "run.", "data.memory_efficient_mode.enabled")
_LEAST = {"max_steps": 1, "accumulation_steps": 1, "read_every": 1, "keep_last": 1}

TrainerConfig: TypeAlias = "TrainSettings | Settings | Mapping[str, Any] | None"


@dataclass(frozen=True)
class TrainSettings:
    """How to train.

    Attributes:
        epochs: Passes over the training samples.
        max_steps: Batches to train on in the whole run, at most; it may end within an epoch.
        patience: End the run after so many epochs without a better `monitor`; 0 never does.
        min_delta: By how much an epoch must be better to count; None is any amount.
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
        survive_oom: Repeat the update with less memory when the device runs out of it, instead of ending.
        activation_checkpointing: Recompute activations in the backward pass.
        tensorboard: Write scalars for TensorBoard beside the run log.
    """

    epochs: int = 1
    max_steps: int | None = None
    patience: int = 0
    min_delta: float | None = None
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
    def of(cls, config: TrainerConfig) -> TrainSettings:
        """Return settings from what a user passes as `config`; see `read_config`."""
        return read_config(config)[0]

    def to_json(self) -> dict[str, Any]:
        """Return the settings as plain values, for run logs and checkpoints."""
        return asdict(self)


def read_config(
    config: TrainerConfig, rates: Sequence[float] = ()
) -> tuple[TrainSettings, list[str]]:
    """Return the settings of a trainer, and notes on what of the config is not the trainer's to do.

    Args:
        config: `TrainSettings`; `Settings` of a config file (`resolve(load_config(file))`), of which the
            trainer takes what concerns it; or a mapping with the names of config files
            (`gradient_accumulation_steps`, `use_amp`) or of `TrainSettings`.
        rates: Learning rates of the optimizer; a config that says another one is noted.

    Raises:
        InputError: A name is unknown, two names of one thing disagree, or a value is of a wrong kind.
    """
    from stoker.config import Settings

    if isinstance(config, TrainSettings):
        return config, []
    own = [entry.name for entry in fields(TrainSettings)]
    if isinstance(config, Settings):
        values = {name: getattr(config, name) for name in own if hasattr(config, name)}
        origin, rate = config.origins["learning_rate"], config.learning_rate
        is_other = bool(origin.key) and bool(rates) and rate not in rates
        return TrainSettings(**values), [_other_rate(str(origin), rate, rates)] if is_other else []
    given = {} if config is None else config
    if not isinstance(given, Mapping):
        raise InputError(
            f"config is of the type {type(given).__name__}.",
            "a mapping, TrainSettings, or Settings",
            "config=resolve(load_config('my.yaml'))",
        )
    return _read_mapping(given, own, rates)


def _read_mapping(
    config: Mapping[str, Any], own: Sequence[str], rates: Sequence[float]
) -> tuple[TrainSettings, list[str]]:
    """Read a mapping by the names of config files and of `TrainSettings`."""
    from stoker.config.resolve import QUESTIONS

    fields_of = {
        key.rpartition(".")[2]: question
        for question, ranks in QUESTIONS.items()
        for names in ranks
        for key in names.split("|")
        if not key.startswith(_OF_RUNS)
    }
    fields_of |= {name: name for name in own}
    given = _without_amp(config)
    said: dict[str, str] = {}
    others: list[str] = []
    notes: list[str] = []
    for name, value in given.items():
        field = fields_of.get(name)
        if field is None:
            raise _unknown_name(name, list(fields_of))
        first = said.setdefault(field, name)
        if first != name and given[first] != value:
            raise InputError(
                f"{name} is {value!r}, and {first} is {given[first]!r}.",
                "one of the two names",
                f"leave {name} out",
            )
        if field == "learning_rate":
            notes += [_other_rate(name, value, rates)] if rates and value not in rates else []
        elif field not in own:
            others.append(name)
    values = {field: given[name] for field, name in said.items() if field in own}
    if isinstance(values.get("capture"), bool):  # YAML reads a bare `on` as true
        values["capture"] = "on" if values["capture"] else "off"
    if others:
        why = "not the Trainer's to do: loader and model are made before it"
        notes.append(f"{', '.join(others)}: {why}")
    return TrainSettings(**values), notes


def _without_amp(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a mapping in which `precision` says what `use_amp` does, as in config files."""
    given = dict(config)
    if "use_amp" not in given:
        return given
    use_amp, precision = given.pop("use_amp"), given.get("precision", "auto")
    if not isinstance(use_amp, bool):
        raise InputError(f"use_amp is {use_amp!r}.", "True or False", "use_amp=True")
    if precision == "auto":
        return given | {"precision": "auto" if use_amp else "fp32"}
    if use_amp is (precision in ("fp32", "tf32")):
        allowed = "auto, fp16 or bf16" if use_amp else "auto, fp32 or tf32"
        raise InputError(
            f"precision is {precision!r}, and use_amp is {use_amp}.",
            f"{allowed} beside it",
            "leave use_amp out",
        )
    return given


def _unknown_name(name: Any, known: Sequence[str]) -> InputError:
    from stoker.config.names import SYNONYMS
    from stoker.config.tree import sections

    if name in sections():
        return InputError(
            f"config has the section {name!r}.",
            "names of one section",
            "config=resolve(load_config('my.yaml')), or the section's names alone",
        )
    if name in SYNONYMS:
        near = [SYNONYMS[name].rpartition(".")[2]]
    else:
        near = difflib.get_close_matches(str(name), known, n=1)
    return InputError(
        f"there is no training setting {name!r}.", ", ".join(known), near[0] if near else known[0]
    )


def _other_rate(name: str, rate: float, rates: Sequence[float]) -> str:
    has = ", ".join(f"{each:g}" for each in dict.fromkeys(rates))
    return f"{name} says {rate}, and the optimizer was made with {has}: the optimizer's counts"


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
