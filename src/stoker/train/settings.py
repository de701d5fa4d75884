"""Settings of a `Trainer`: one frozen value, checked at once.

Enters: keywords, a mapping, `Settings` of a config file, or the file itself. Leaves: `TrainSettings`. Costs
nothing; torch is imported only to make an optimizer.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self, TypeAlias, cast

from pydantic import Field

from stoker.arguments import explained
from stoker.config import Config, Settings, TrainOptions, load_config, resolve
from stoker.config.options import (
    FORMER,
    LAYOUTS,
    SYNONYMS,
    Capture,
    JobOptions,
    NonFinite,
    Precision,
    options,
)
from stoker.config.tree import ROOMS, sections
from stoker.errors import ConfigError, InputError
from stoker.report import Note, Topic

if TYPE_CHECKING:
    import torch

__all__ = [
    "Capture",
    "Configured",
    "NonFinite",
    "Precision",
    "TrainSettings",
    "TrainerConfig",
    "read_config",
]

TrainerConfig: TypeAlias = "TrainOptions | Settings | Mapping[str, Any] | None"
_NOT_OURS = "no effect on a Trainer, which gets a loader and a model that are made already"


_TAKEN = {f"training.{entry.name}" for entry in fields(TrainOptions)}
_TAKEN |= {"training.lr", "training.use_amp", "run.dir"}


@explained("stoker.TrainSettings(epochs=3)")
@options
class TrainSettings(TrainOptions):
    """How to train: the keys of `training` that concern a Trainer (docs/config.md), and three of its own.

    Attributes:
        clip_norm: Largest norm of all gradients together. By default they are not clipped, as in a loop of one's own;
            config files have a default of 1.
        monitor: Metric of validation that decides the best checkpoint.
        maximise: Whether more of it is better.
        leak_bytes: Growth of device memory between epochs that is reported.
    """

    clip_norm: Annotated[float | None, Field(gt=0, le=1e30)] = None
    monitor: str = "loss"
    maximise: bool = False
    leak_bytes: Annotated[int, Field(ge=0, le=2**63)] = 100 << 20

    @classmethod
    def of(cls, config: TrainerConfig) -> TrainSettings:
        """Return the settings for any accepted `config`; see `read_config`."""
        return read_config(config)[0]

    def to_json(self) -> dict[str, Any]:
        """Return the settings as plain values, for run logs and checkpoints."""
        return asdict(self)


def read_config(
    config: TrainerConfig, rates: Sequence[float] = ()
) -> tuple[TrainSettings, list[str]]:
    """Return the settings of a trainer, and notes on entries of the config that a trainer does not use.

    Args:
        config: `TrainSettings`, `Settings` of a config file (`resolve(load_config(file))`), or a mapping of names
            to values with the keys of a config's section `training`. Of `Settings`, a trainer uses the section
            `training`.
        rates: Learning rates of the optimizer. A different rate in the config is noted.

    Raises:
        InputError: A name is unknown, two names of one thing disagree, or a value is of a wrong kind.
    """
    if isinstance(config, TrainSettings):
        return config, []
    if isinstance(config, Settings):
        told = config.origins["training.lr"]
        notes = _note_rate(str(told), config.training.lr, rates) if told.key else []
        others = [
            str(origin)
            for key, origin in config.origins.items()
            if origin.key and key not in _TAKEN and key.rpartition(".")[0] != "recipe.options"
        ]
        return _take(config.training), [*notes, *_note_others(others)]
    if isinstance(config, JobOptions):
        return _take(config), _note_rate("lr", config.lr, rates)
    given = {} if config is None else config
    if not isinstance(given, Mapping):
        raise InputError(
            f"config is of the type {type(given).__name__}.",
            "a mapping, TrainSettings, or Settings",
            "Trainer.from_config('my.yaml', model, ...)"
            if isinstance(given, str)
            else "config=resolve(load_config('my.yaml'))",
        )
    return _read_mapping(given, rates)


def _take(training: JobOptions) -> TrainSettings:
    return TrainSettings(
        **{entry.name: getattr(training, entry.name) for entry in fields(TrainOptions)}
    )


def clips_unasked(config: TrainerConfig) -> bool:
    """Whether gradients are clipped by the default of config files, not by the user's own setting."""
    return isinstance(config, Settings) and not config.origins["training.clip_norm"].key


def _homes() -> dict[str, str]:
    """Return a dict from every accepted name of a setting, former names included, to its current name."""
    homes = {entry.name: entry.name for entry in fields(TrainSettings)}
    for section in ("data", "training"):
        homes |= {entry.name: entry.name for entry in fields(ROOMS[section])}
    former = {**{key.rpartition(".")[2]: home for key, home in LAYOUTS.items()}, **FORMER}
    homes |= {
        name: home.rpartition(".")[2]
        for name, home in former.items()
        if home.partition(".")[0] in ("data", "training") and name not in (*homes, "enabled")
    }
    return homes


def _read_mapping(
    config: Mapping[str, Any], rates: Sequence[float]
) -> tuple[TrainSettings, list[str]]:
    """Read a mapping whose keys are names in config files or in `TrainSettings`."""
    own, homes = {entry.name for entry in fields(TrainSettings)}, _homes()
    written: dict[str, str] = {}
    for name, value in config.items():
        if name not in homes:
            raise _unknown_name(name, list(homes))
        first = written.setdefault(homes[name], name)
        if first != name and config[first] != value:
            raise InputError(
                f"{name} is {value!r}, and {first} is {config[first]!r}.",
                "one of the two names",
                f"leave {name} out",
            )
    values = {home: config[name] for home, name in written.items() if home in own}
    if "use_amp" in written:
        values["precision"] = _precision_of(config[written["use_amp"]], values.get("precision"))
    notes = _note_rate(written["lr"], config[written["lr"]], rates) if "lr" in written else []
    others = [name for home, name in written.items() if home not in (*own, "lr", "use_amp")]
    return TrainSettings(**values), [*notes, *_note_others(others)]


CLIPPED = "gradients are clipped to a norm of 1.0, the default of config files: training.clip_norm null leaves them"


class Configured:
    """The way from a config file to a `Trainer`, which inherits this."""

    @classmethod
    def from_config(
        cls,
        path: str | Path,
        model: torch.nn.Module,
        train_loader: Any,
        val_loader: Any,
        criterion: Any,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: Any = None,
        *,
        overrides: Sequence[str] = (),
        **more: Any,
    ) -> Self:
        """Return a trainer for your own model, with the settings of a config file.

        Args:
            path: The YAML file, or the name of a shipped one.
            model: As for `Trainer`.
            train_loader: As for `Trainer`. `batch_size` of the file is noted, not used.
            val_loader: As for `Trainer`.
            criterion: `(outputs, targets) -> mean loss of the batch`.
            optimizer: Over the model's parameters; None makes AdamW with the file's `training.lr`.
            scheduler: As for `Trainer`, or None.
            overrides: `key=value` texts that replace what the file says, as `--set` does.
            more: Other arguments of `Trainer`. `run_dir` is the file's `run.dir` unless it is given.

        Raises:
            ConfigError: The file cannot be read, or is not sound; every problem has its line.
        """
        settings = resolve(load_config(path, overrides))
        rate, notes = settings.training.lr, []
        if optimizer is None:
            from torch.optim import AdamW

            optimizer = AdamW(model.parameters(), lr=rate)
            notes.append(f"AdamW, learning rate {rate:g}: {settings.origins['training.lr']}")
        make: Any = cls
        more = {"run_dir": settings.run.dir, **more}
        made = make(
            model, train_loader, val_loader, criterion, optimizer, scheduler, settings, **more
        )
        for note in notes:
            made.note(Note(note, Topic.OPTIMIZER))
        return cast(Self, made)


def present_names(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint's identity with the current names of settings; old checkpoints have former names."""
    settings = identity.get("settings")
    if not isinstance(settings, Mapping):
        return dict(identity)
    own = {entry.name for entry in fields(TrainSettings)}
    named = {
        name if name in own else FORMER.get(name, name).rpartition(".")[2]: value
        for name, value in settings.items()
    }
    return {**identity, "settings": named}


def _precision_of(use_amp: Any, precision: Any) -> Any:
    """Return the `precision` that results from `use_amp` and `precision` together, as in config files."""
    if not isinstance(use_amp, bool):
        raise InputError(f"use_amp is {use_amp!r}.", "True or False", "use_amp=True")
    beside = {} if precision is None else {"precision": precision}
    # `TrainSettings` refuses an unknown format afterwards, with a better message.
    if precision not in (None, "auto", "fp32", "tf32", "fp16", "bf16"):
        return precision
    try:
        return resolve(
            Config.model_validate({"training": {"use_amp": use_amp, **beside}})
        ).training.precision
    except ConfigError as error:
        raise InputError(
            f"precision is {precision!r}, and use_amp is {use_amp}.",
            error.allowed,
            "leave use_amp out",
        ) from None


def _unknown_name(name: Any, known: Sequence[str]) -> InputError:
    if name in sections():
        return InputError(
            f"config has the section {name!r}.",
            "names of one section",
            "config=resolve(load_config('my.yaml')), or the section's names alone",
        )
    if SYNONYMS.get(name) == "run.dir":
        return InputError(
            f"there is no training setting {name!r}: the folder is an argument of its own.",
            "run_dir= of the Trainer, beside config=",
            "run_dir='runs/first'",
        )
    near = [one for one in [SYNONYMS.get(name, "").rpartition(".")[2]] if one in known]
    near = near or difflib.get_close_matches(str(name), known, n=1)
    return InputError(
        f"there is no training setting {name!r}.", ", ".join(known), near[0] if near else known[0]
    )


def _note_others(others: Sequence[str]) -> list[str]:
    return [f"{', '.join(others)}: {_NOT_OURS}"] if others else []


def _note_rate(name: str, rate: float, rates: Sequence[float]) -> list[str]:
    if not rates or rate in rates:
        return []
    has = ", ".join(f"{each:g}" for each in dict.fromkeys(rates))
    return [f"{name} is {rate}, but the optimizer was made with {has}, which is used"]
