"""A trained recipe's weights as a safetensors file: numbers and text only, no code.

Enters: a model from a checkpoint; for reading, the file. Leaves: a `.safetensors` file with the identity of the
run as JSON in its metadata (recipe, options, facts and the rest); for reading, what `load_trained` needs,
bit for bit. Costs one write or read of the weights, and one hash of them.

The optimizer is left out: a run is resumed from its checkpoint, not from this file. The format has no
checksum, so the metadata contains one over names, types, shapes, bytes and the other metadata.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash

import stoker
from stoker.display import command, look_for
from stoker.errors import CorruptError, InputError, MissingExtraError, StoreError, unwritable
from stoker.ownership import free_name, writing
from stoker.strict_json import exact_text, parse_json
from stoker.train.checkpoint import Loaded
from stoker.train.checkpoint_file import Saved

SUFFIX = ".safetensors"
_MARK = "stoker_version"
_DIGEST = "digest"
_SAVED = ("number", "step", "epoch", "metrics")


def write_weights(loaded: Loaded, out: str | Path) -> None:
    """Write the weights of a checkpoint; an older file of this name is replaced when the new one is complete."""
    save = _package().torch.save_file
    # Copied, since the weights of an LSTM share one block of memory, which the format refuses.
    weights = {
        name: value.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, value in loaded.state["model"].items()
    }
    about = {name: exact_text(value) for name, value in loaded.identity.items()}
    saved = {name: getattr(loaded.saved, name) for name in _SAVED}
    about |= {
        "format": "pt",
        _MARK: stoker.__version__,
        "checkpoint": exact_text({**saved, "saved_at": round(time.time(), 3)}),
    }
    about[_DIGEST] = _digest(weights, about)
    path = Path(out)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with writing(path, is_weights) as temporary:
            save(weights, temporary, about)
    except OSError as error:
        raise unwritable(path, error) from error


def is_weights(path: Path) -> bool:
    """Whether stoker wrote this file of weights."""
    package = _package()
    try:
        with package.safe_open(path, framework="pt") as file:
            return _MARK in (file.metadata() or {})
    except package.SafetensorError:
        return False


def read_weights(path: str | Path) -> Loaded:
    """Read and verify what `write_weights` wrote.

    Raises:
        InputError: Another program wrote the file.
        CorruptError: Bytes are missing or changed.
        StoreError: There is no such file.
    """
    package, path = _package(), Path(path)
    if not path.is_file():
        raise StoreError(
            f"cannot read the weights {path}: no such file.",
            "an existing file",
            look_for(path, "-l"),
        )
    try:
        with package.safe_open(path, framework="pt") as file:
            about = dict(file.metadata() or {})
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except package.SafetensorError as error:
        raise _corrupt(path, str(error)) from error
    if _MARK not in about:
        raise InputError(
            f"{path} was not written by stoker: its metadata names no recipe.",
            "weights of `stoker export`",
            "stoker export runs/NAME/best.pt OUT.safetensors",
        )
    if about.pop(_DIGEST, None) != _digest(weights, about):
        raise _corrupt(path, "its bytes do not match their digest")
    known = parse_json(about.pop("checkpoint"))
    for name in ("format", _MARK):
        about.pop(name, None)
    identity = {name: parse_json(value) for name, value in about.items()}
    saved = Saved(path=path, size_bytes=path.stat().st_size, **known)
    return Loaded(saved, {"model": weights}, identity)


def _package() -> Any:
    try:
        import safetensors
        import safetensors.torch
    except ImportError as error:
        raise MissingExtraError.for_package(
            "safetensors", "safetensors", "a .safetensors file"
        ) from error
    return safetensors


def _corrupt(path: Path, what: str) -> CorruptError:
    return CorruptError(
        f"{path} is not as it was written: {what}.",
        "the bytes as they were saved",
        command("stoker", "export", "CKPT", free_name(path)),
    )


def _digest(weights: Mapping[str, torch.Tensor], about: Mapping[str, str]) -> str:
    digest = xxhash.xxh3_128(exact_text(about, sort_keys=True).encode())
    for name in sorted(weights):
        value = weights[name]
        digest.update(exact_text([name, str(value.dtype), list(value.shape)]).encode())
        digest.update(value.contiguous().view(-1).view(torch.uint8).numpy().data)
    return str(digest.hexdigest())
