"""Arguments and attributes of other libraries' trainers that a `Trainer` does not have: errors that say what to type.

Enters: arguments and names of attributes that a `Trainer` does not have. Leaves: an error. Costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from stoker.config.options import SYNONYMS, TrainOptions
from stoker.display import nearest
from stoker.errors import InputError

ARGUMENTS = (
    "model", "train_loader", "val_loader", "criterion", "optimizer", "scheduler", "config", "device",
    "gpu_augmentation", "unpack", "metrics", "run_dir", "identity", "progress", "scheduler_interval",
)  # fmt: skip
_CALLED = {
    "train_loader": "trainloader train_dataloader train_dataloaders train_dataset train_data data loader dataloader",
    "val_loader": "valloader valid_loader validation_loader val_dataloader val_dataloaders eval_dataset eval_loader",
    "criterion": "loss loss_fn loss_func loss_function",
    "optimizer": "optim optimizers opt",
    "scheduler": "lr_scheduler schedulers sched",
    "device": "accelerator devices gpus gpu",
    "metrics": "compute_metrics metric",
    "gpu_augmentation": "augment augmentation transform transforms",
    "run_dir": "default_root_dir output_dir save_dir log_dir logdir checkpoint_dir workdir",
}
_RENAMED = {word: name for name, words in _CALLED.items() for word in words.split()}
_OF_THE_LOADER = (
    "batch_size",
    "shuffle",
    "num_workers",
    "pin_memory",
    "drop_last",
    "collate_fn",
    "sampler",
)
_OF_THE_OPTIMIZER = ("lr", "learning_rate", "weight_decay", "momentum", "betas")
_INSTEAD = {
    "train": "trainer.fit() trains",
    "run": "trainer.fit() trains",
    "evaluate": "trainer.validate() evaluates on val_loader",
    "eval": "trainer.validate() evaluates on val_loader",
    "test": "trainer.validate() evaluates on val_loader",
    "predict": "trainer.model is the trained model",
    "save_checkpoint": "trainer.save() writes one into run_dir",
    "save_model": "torch.save(trainer.model.state_dict(), 'model.pt')",
    "load_checkpoint": "trainer.resume() goes on from the last one in run_dir",
    "load": "trainer.resume() goes on from the last one in run_dir",
    "config": "trainer.settings is what was read from it",
    "losses": "trainer.history.losses has one per step",
    "train_loader": "the loader that you gave to it is the one that it uses",
    "val_loader": "the loader that you gave to it is the one that it uses",
}  # fmt: skip


def _in_config(name: str, value: Any) -> str | None:
    """Return what to type in `config` for this name or a synonym of it; None if it is no training setting."""
    known = ["use_amp", *(entry.name for entry in fields(TrainOptions))]
    meant = SYNONYMS.get(name, name).rpartition(".")[2]
    if meant == "use_amp" and isinstance(value, str):
        meant = "precision"
    return f"config={{{meant!r}: {value!r}}}" if meant in known else None


def _typed(value: Any) -> str:
    """Return the source text of a plain value; three dots for other objects."""
    return repr(value) if value is None or isinstance(value, str | int | float) else "..."


def check_arguments(others: Mapping[str, Any]) -> None:
    """Raise an InputError for the first keyword that `Trainer` does not accept."""
    for name, value in others.items():
        given = f"a Trainer has no argument {name!r}."
        if typed := _in_config(name, value):
            raise InputError(given, "settings of the training in config", typed)
        if name in _RENAMED:
            raise InputError(given, ", ".join(ARGUMENTS), f"{_RENAMED[name]}={_typed(value)}")
        if name in _OF_THE_OPTIMIZER:
            typed = f"optimizer=torch.optim.AdamW(model.parameters(), {name}={value!r})"
            typed = typed.replace("learning_rate=", "lr=")
            raise InputError(given, "it with the optimizer, which you make", typed)
        if name in _OF_THE_LOADER:
            typed = f"train_loader=stoker.Loader(store, {name}={value!r})"
            raise InputError(given, "it with the loader, which you make", typed)
        near = nearest(name, ARGUMENTS)
        fix = f"{near}={_typed(value)}" if near else f"leave {name} out"
        raise InputError(given, ", ".join(ARGUMENTS), fix)


def check_fit(given: Sequence[Any], others: Mapping[str, Any]) -> None:
    """Raise an InputError for the first argument that `Trainer.fit` does not accept."""
    allowed = "resume and quiet; what is trained, on what and for how long is given to the Trainer"
    if given:
        first = given[0]
        is_count = isinstance(first, int) and not isinstance(first, bool)
        typed = f"Trainer(..., config={{'epochs': {first}}}), then fit()" if is_count else "fit()"
        shown = first if is_count else f"a {type(first).__name__}"
        raise InputError(f"fit was given {shown}.", allowed, typed)
    for name, value in others.items():
        known = _RENAMED.get(name, name)
        typed = _in_config(name, value) or (
            f"{known}={_typed(value)}" if known in ARGUMENTS else ""
        )
        fix = f"Trainer(..., {typed}), then fit()" if typed else f"leave {name} out"
        raise InputError(f"fit has no argument {name!r}.", allowed, fix)


class Answers:
    """Base class of `Trainer`: for attributes of other libraries' trainers, the error names the equivalent here."""

    if not TYPE_CHECKING:  # a type checker would accept every name

        def __getattr__(self, name: str) -> Any:
            instead = f": {_INSTEAD[name]}" if name in _INSTEAD else ""
            raise AttributeError(f"a Trainer has no attribute {name!r}{instead}")
