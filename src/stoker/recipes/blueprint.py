"""What a checkpoint must hold, besides weights, to build its model again: plain values only.

Enters: a job and its options; later the plain values. Leaves: the blueprint; later the model without
its weights, and how it reads batches. Costs nothing; reads no data.

A recipe finds some sizes in the store it trains on (timeframes, columns, classes). `Recipe.describe`
writes them down, so that a prediction needs neither that store nor targets. What all recipes need is added
here: the columns of the inputs, and the repairs of the training store, which new data needs too.
"""

from __future__ import annotations

import contextlib
import inspect
from pathlib import Path
from typing import Any, cast

import xxhash

import stoker
from stoker.augment import Compose, ProgressiveAugmentation
from stoker.errors import InputError
from stoker.loader.gather import Augments
from stoker.recipes.catalogue import Chosen
from stoker.recipes.contract import Facts, Job, Rebuilt, Recipe
from stoker.recipes.registry import blamed
from stoker.store.reader import Store
from stoker.strict_json import exact_text, parse_json

_TABLE_FIELD, _BARS = "features", "bars"


def describe_job(recipe: Recipe, job: Job, store: Store) -> dict[str, Any]:
    """Return what `rebuild` needs besides the options, as JSON would give it back.

    Raises:
        InputError: The recipe names no inputs of this store, or values that JSON does not know.
    """
    with blamed(recipe, "describe"):
        facts = dict(recipe.describe(job))
        named = list(facts["inputs"])
    # A recipe's inputs may be parts of fields ("M5/gap"); these have no columns of their own.
    inputs = [name for name in named if name in store.fields]
    if not inputs:
        raise InputError(
            f"describe of the recipe {recipe.name!r} names the inputs {', '.join(named) or 'none'}.",
            f"one or more of {', '.join(store.fields)}, the fields of {store.name}",
            "docs/extending.md has a whole recipe",
        )
    facts["columns"] = {name: store.fields[name].columns for name in inputs}
    facts["repairs"] = {
        name: fitted for name, fitted in store.manifest.repairs.items() if name in inputs
    }
    attributes = store.manifest.attributes
    # What a column of the raw table becomes, and what the classes are called: for predictions on raw rows.
    if attributes.get("classes"):
        facts["class_names"] = list(attributes["classes"])
    if "table" in attributes and _TABLE_FIELD in inputs:
        facts["table"] = attributes["table"]
    made_by = store.manifest.provenance
    if made_by is not None and made_by.kind == _BARS and "scalers" in attributes:
        facts["bars"] = {"options": made_by.options, "scalers": attributes["scalers"]}
    with blamed(recipe, "describe"):
        return cast(dict[str, Any], parse_json(exact_text(facts)))


def rebuild(chosen: Chosen, facts: Facts) -> Rebuilt:
    """Return the model that `describe_job` saw, without its weights."""
    with blamed(chosen.recipe, "rebuild"):
        made = chosen.recipe.rebuild(chosen.options, facts)
        made.model.eval().requires_grad_(False)
    return made


def as_augments(augmentation: Compose | ProgressiveAugmentation | None) -> Augments | None:
    """Return the same; mypy does not see that overloads fit the loader's protocol."""
    return cast("Augments | None", augmentation)


def fingerprint(store: Store) -> str:
    """Return a digest of what is in a store: the same data packed again gives the same."""
    about = store.manifest.model_dump(mode="json", include={"num_samples", "fields", "repairs"})
    about["shards"] = [[shard.size_bytes, shard.checksum] for shard in store.manifest.shards]
    return xxhash.xxh3_64_hexdigest(exact_text(about, sort_keys=True).encode())


def code_digest(recipe: Recipe) -> str:
    """Return a digest of the source of stoker and of the recipe's own module: another one is other code."""
    files = set(Path(stoker.__file__).parent.rglob("*.py"))
    own = inspect.getsourcefile(type(recipe))
    files |= {Path(own)} if own else set()
    made = xxhash.xxh3_64()
    for path in sorted(files):
        with contextlib.suppress(OSError):
            made.update(path.read_bytes())
    return f"stoker {stoker.__version__}, {made.hexdigest()}"


def check_columns(store: Store, facts: Facts) -> None:
    """Raise when a store does not hold what the model was trained on, in the same order.

    Raises:
        InputError: A field is missing, or its columns are others; both are shown.
    """
    for name, trained in facts["columns"].items():
        if name not in store.fields:
            raise InputError(
                f"{store.name} has no field {name!r}; it holds {', '.join(store.fields)}.",
                f"a store with {', '.join(facts['inputs'])}, as in training",
                "pack the new data like the training data",
            )
        have = store.fields[name].columns
        # A plain HDF5 file has no names: its shape is checked by the model itself.
        if trained and have and list(have) != list(trained):
            first = next(
                (pair for pair in zip(trained, have, strict=False) if pair[0] != pair[1]),
                (f"{len(trained)} columns", f"{len(have)}"),
            )
            raise InputError(
                f"field {name!r} of {store.name} has other columns than in training: "
                f"{first[0]!r} was trained on, {first[1]!r} stands there.",
                f"the columns {', '.join(map(str, trained[:8]))}{', ...' if len(trained) > 8 else ''}",
                "pack the new data with the same columns in the same order",
            )
