"""Suggests what was probably meant by words that no verb takes: the line "Try: ..." after typer's own message.

Enters: the whole command, typer's error, the words as typed. Leaves: a command or an option to type, or "".
Costs nothing until a mistake is made; then the paths among the words are looked at.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from stoker.display import command, quoted

_VERBS = {
    "pack": "convert import build prepare ingest",
    "inspect": "info describe stats stat show head ls list check validate",
    "train": "fit run learn start",
    "predict": "infer inference eval evaluate test score",
    "export": "onnx convert-model",
    "doctor": "diagnose why analyze analyse perf",
    "monitor": "watch top gpu smi nvitop status",
    "machine": "devices device env system hardware",
    "report": "html summary results page",
}
_KINDS = {
    "stoker pack table": "csv tsv parquet feather arff json jsonl excel xlsx dataframe",
    "stoker pack arrays": "array hdf5 h5 npy npz numpy zarr",
    "stoker pack series": "timeseries time-series tokens text signal signals sequence sequences",
    "stoker pack images": "image photos pictures jpg jpeg png folder imagefolder",
    "stoker pack segmentation": "masks mask coco voc",
    "stoker pack bars": "ohlc ohlcv candles stocks prices",
    "stoker pack massspec": "msp mgf spectra spectrum nist ms",
}
_OPTIONS = {
    "--target": "label labels y target-column label-column class-column",
    "--jobs": "workers num-workers n-jobs processes",
    "--sep": "delimiter separator",
    "--store": "data dataset",
    "--run-dir": "o out output output-dir save-dir out-dir logdir",
    "--gpus": "nproc-per-node devices num-gpus",
    "--config": "recipe cfg configuration config-file yaml",
}
_OUTPUTS = {
    "pack": "store",
    "predict": "predictions.csv",
    "export": "model.onnx",
    "augment": "preview.png",
}


def _by_word(words: Mapping[str, str]) -> dict[str, str]:
    return {word: name for name, several in words.items() for word in several.split()}


def advise(whole: Any, error: Any, typed: Sequence[str]) -> str:
    """Return what to type instead of words that a verb does not take; "" if unknown."""
    context, option = getattr(error, "ctx", None), getattr(error, "option_name", None)
    kind = type(error).__name__
    if context is None or not typed or kind in ("NoArgsIsHelpError", "BadParameter"):
        return ""
    if option is not None:
        return _for_option(whole, context, option, typed)
    lacks = getattr(getattr(error, "param", None), "opts", None)
    if kind == "MissingParameter" and lacks and lacks[0] == "out" and typed[0] in _OUTPUTS:
        return command("stoker", *typed, _OUTPUTS[typed[0]])
    better = _for_words(whole, context, typed)
    if not better and lacks and kind == "MissingParameter":
        if lacks[0] == "--window":  # the only one that is no file
            return command("stoker", *typed, lacks[0], 64)
        better = _with_option(lacks[0], typed)
    return better


def _for_option(whole: Any, context: Any, option: str, typed: Sequence[str]) -> str:
    """Return the option that was meant, the argument in its place, or the verb that has the option."""
    from stoker.config.options import LAYOUTS, SYNONYMS
    from stoker.config.tree import key_schemas

    dashed = [word for word in typed if word.startswith("-") and _exists(word)]
    if dashed:  # a file, not an option
        return command("stoker", *(f"./{word}" if word in dashed else word for word in typed))
    known = {name for each in context.command.params for name in each.opts}
    name = option.lstrip("-").replace("-", "_")
    last = [each.name for each in context.command.params if each.param_type_name == "argument"]
    is_output = name in ("o", "out", "output") and (typed[0] == "pack" or last[-1:] == ["out"])
    if last[-1:] == [name] or is_output:
        return command("stoker", *_as_argument(option, typed))
    ours = _by_word(_OPTIONS).get(option.lstrip("-").replace("_", "-"))
    if ours in known:
        renamed = (
            f"{ours}{word[len(option) :]}" if word.partition("=")[0] == option else word
            for word in typed
        )
        return command("stoker", *renamed)
    keys = [key for key in key_schemas() if key.rpartition(".")[2] == name]
    key = SYNONYMS.get(name) or (LAYOUTS.get(keys[0], keys[0]) if keys else None)
    if key and "--set" in known:
        at = next((at for at, word in enumerate(typed) if word.partition("=")[0] == option), -1)
        value = typed[at].partition("=")[2] or next(iter(typed[at + 1 :]), "VALUE")
        return f"--set {quoted(f'{key}={value}')} instead of {option}"
    raw = next((word for word in typed if _exists(word) and _is_raw(Path(word))), None)
    if raw and "--config" in known:
        return command("stoker", "pack", _kind_of(Path(raw)), raw, "OUT")
    verbs = [path for path, one in _verbs(whole) if any(option in each.opts for each in one.params)]
    kind = next((_kind_of(Path(word)) for word in typed if _exists(word)), "")
    # Those of the same group first, that for the kind of file, and those that read raw files.
    verbs.sort(key=lambda path: (path[0] != typed[0], path[-1] != kind, path[0] != "pack"))
    help_of = command("stoker", *verbs[0], "--help") if verbs else ""
    return help_of and f"{help_of}: that verb has {option}"


def _for_words(whole: Any, context: Any, typed: Sequence[str]) -> str:
    """Return the verb, the kind or the option that was meant by an unknown word."""
    here = [word for word in typed if _exists(word)]
    depth = len(context.command_path.split())
    if depth == 1:
        return _for_verb(whole, typed, here)
    known = {name for each in context.command.params for name in each.opts}
    if "--config" in known:
        return _for_training(typed, here)
    if depth == 2 and typed[:1] == ["augment"] and here:
        return command("stoker", "augment", "preview", *typed[1:])
    if depth == 2 and typed[:1] == ["pack"]:
        if typed[1:2] == here[:1] and here:
            return command("stoker", "pack", _kind_of(Path(here[0])), *typed[1:])
        if kind := _by_word(_KINDS).get(typed[1].lower() if typed[1:] else ""):
            return f"{kind} {command(*typed[2:])}".strip()
    return ""


def _for_verb(whole: Any, typed: Sequence[str], here: Sequence[str]) -> str:
    word, rest = typed[0], typed[1:]
    if word in ("help", "version"):
        return command("stoker", *rest[: word == "help"], f"--{word}")
    if word in ("init", "new", "create"):
        return command("stoker", "config", "init", *(rest or ["--help"]))
    if Path(next(iter(rest), "")).suffix in (".yaml", ".yml") and word in ("check", "validate"):
        return command("stoker", "config", "check", *rest)
    if verb := _by_word(_VERBS).get(word.lower()):
        return command("stoker", verb, *rest)
    if word in ("compare", "explain"):
        return command("stoker", "doctor", *typed)
    for words, _ in _verbs(whole):
        if words[-1] == word:  # a verb below another one, such as `schema`
            return command("stoker", *words, *rest)
    if here[:1] != [word]:
        return ""
    path = Path(word)
    if path.suffix == ".py":
        return command("stoker", "doctor", "--", "python", *typed)
    if path.suffix in (".yaml", ".yml"):
        return command("stoker", "train", "--config", *typed)
    return command("stoker", "report" if (path / "run.jsonl").exists() else "inspect", *typed)


def _for_training(typed: Sequence[str], here: Sequence[str]) -> str:
    """Return the option for a config, a recipe or a store that was typed without one."""
    from stoker.config.load import shipped_configs

    names = shipped_configs()
    if "--config" not in typed:
        for word in typed[1:]:
            if (word in here and Path(word).suffix in (".yaml", ".yml")) or word in names:
                return f"--config {quoted(word)}"
    stores = [word for word in here if word in typed[1:]]
    if not stores or "--store" in typed:
        return ""
    if _is_raw(Path(stores[0])):
        return command("stoker", "pack", _kind_of(Path(stores[0])), stores[0], "OUT")
    return f"--store {quoted(stores[0])}"


def _exists(word: str) -> bool:
    return os.path.exists(word)  # noqa: PTH110  a Path raises for a name that is too long


def _kind_of(path: Path) -> str:
    from stoker.store.hdf5 import PACKED_BY

    return PACKED_BY.get(path.suffix.lower(), "images" if path.is_dir() else "KIND")


def _is_raw(path: Path) -> bool:
    return path.is_file() and _kind_of(path) != "KIND"


def _as_argument(option: str, typed: Sequence[str]) -> list[str]:
    """Return the words with an option's value moved to the end, as an argument."""
    at = next(at for at, word in enumerate(typed) if word.partition("=")[0] == option)
    _, joined, value = typed[at].partition("=")
    rest = [*typed[:at], *typed[at + (1 if joined else 2) :]]
    return [*rest, value if joined else next(iter(typed[at + 1 :]), option.lstrip("-").upper())]


def _with_option(lacks: str, typed: Sequence[str]) -> str:
    """Return the command with the missing option before its first existing file; "" without a file."""
    at = next((at for at, word in enumerate(typed) if _exists(word) and at > 1), 0)
    if not lacks.startswith("--") or not at or typed[at - 1].startswith("-"):
        return ""
    return command("stoker", *typed[:at], lacks, *typed[at:])


def _verbs(whole: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the words and the command of every listed verb."""
    for name, verb in whole.commands.items():
        if not verb.hidden:
            yield (name,), verb
            for below, one in getattr(verb, "commands", {}).items():
                yield (name, below), one
