"""The recipe that a config or a checkpoint names, with its checked options.

Enters: `Settings`, or the name and options of a checkpoint. Leaves: a `Chosen` recipe with checked options,
or a `ConfigError` that names the file and line of the option at fault. Costs the import of the recipe
(torch); reads no data.

Some keys of a config are older than the recipes. A recipe translates those that it knows into its options
(`Recipe.from_settings`). If an option is also written under `recipe.options`, both values must be equal.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import xxhash

import stoker
from stoker.address import as_url
from stoker.augment import Compose, ProgressiveAugmentation
from stoker.config import Place, Problem, Settings, shipped_configs
from stoker.config.resolve import OPTIONS, as_error, as_key
from stoker.display import command
from stoker.errors import ConfigError, InputError, StokerError, refuse_special
from stoker.loader.gather import Augments
from stoker.recipes.contract import Facts, Job, Rebuilt, Recipe
from stoker.recipes.gate import SPLITS
from stoker.recipes.options import OptionError, as_overrides, parse_options
from stoker.recipes.registry import OWN, blamed, find_recipe, ready_recipes
from stoker.store.fields import Array
from stoker.store.manifest import read_manifest
from stoker.store.reader import Store
from stoker.strict_json import exact_text, parse_json

# Settings that only recipes with the key in `uses` read.
OPTIONAL = (
    "training.init_gain",
    "training.output_bound",
    "training.output_bound_mode",
    "training.use_gpu_augmentation",
)


@dataclass(frozen=True)
class Chosen:
    """A recipe with the options that a config or a checkpoint gives."""

    key: str  # a name of ours, or `package.module:Class`; `find_recipe` takes it
    recipe: Recipe
    options: Any  # an instance of its options, defaults included
    # settings of the config, with the recipe's defaults; None for a checkpoint
    settings: Settings | None = None
    notes: tuple[str, ...] = ()  # keys of the config that have no effect here, and why

    @property
    def noted_settings(self) -> Settings:
        """The settings, with the recipe's notes added to theirs."""
        assert self.settings is not None  # None only for a checkpoint's recipe
        return replace(self.settings, notes=(*self.settings.notes, *self.notes))

    @property
    def plain(self) -> dict[str, Any]:
        """All options by name."""
        return asdict(self.options)

    @property
    def kept(self) -> dict[str, Any]:
        """Options as a checkpoint keeps and compares them."""
        left_out = {*self.recipe.transient, *self.recipe.files}
        return {name: value for name, value in self.plain.items() if name not in left_out}

    @property
    def file_digests(self) -> dict[str, str | None]:
        """For each option that is a path: the digest of the file's bytes, or None without a file."""
        paths = {name: getattr(self.options, name) for name in self.recipe.files}
        for name, path in paths.items():
            if path is not None:
                refuse_special(path, name)
        return {
            name: None if path is None else xxhash.xxh3_64_hexdigest(Path(path).read_bytes())
            for name, path in paths.items()
        }

    def make_job(self, store: Store, seed: int) -> Job:
        """Return the recipe's job for a store; splits that it leaves out are empty."""
        with blamed(self.recipe, "make_job"):
            job = self.recipe.make_job(store, self.options, seed)
            samples: dict[str, Array] = {
                name: np.asarray(job.samples.get(name, ()), np.int64) for name in SPLITS
            }
        if not len(samples["train"]):
            raise InputError(
                f"the recipe {self.recipe.name!r} finds no training samples in {store.name}.",
                "at least one",
                f"{command('stoker', 'inspect', store.name)} shows its fields and its split",
            )
        if job.strata is not None and len(job.strata) != len(samples["train"]):
            raise InputError(
                f"the recipe {self.recipe.name!r} gives {len(job.strata)} strata.",
                f"one for each of the {len(samples['train'])} training samples, or None",
                "a Job without strata",
            )
        return replace(job, samples=samples)


def restore(key: str, options: Mapping[str, Any]) -> Chosen:
    """Return the recipe of a checkpoint with the options that the checkpoint keeps."""
    try:
        recipe = find_recipe(key)
    except InputError as error:
        fix = error.fix if ":" in key else "the stoker that wrote it, or a newer one"
        raise InputError(
            f"the checkpoint cannot be used: {error.given}",
            error.allowed,
            fix,
            error.details,
        ) from error
    return Chosen(key, recipe, parse_options(recipe.Options, options, recipe.name))


def _fitting_recipe(store: str | None) -> str:
    """Return the recipe whose `pack_command` makes stores of this kind; that of tables for any other store."""
    recipes = {
        find_recipe(name).pack_command.split()[2]: name for name in reversed([*ready_recipes()])
    }
    if store and as_url(store) is None:
        with contextlib.suppress(StokerError):  # a plain HDF5 file, or nothing
            made_of = read_manifest(Path(store)).provenance
            return recipes.get(made_of.kind if made_of else "", recipes["table"])
    return recipes["table"]


def choose_recipe(settings: Settings) -> Chosen:
    """Return the recipe that a config asks for, with its options."""
    if settings.recipe.name is None:
        name, store = _fitting_recipe(settings.recipe.store), settings.recipe.store
        shipped = name in shipped_configs()
        chosen = ("--config", name) if shipped else ("--set", f"recipe.name={name}")
        raise ConfigError(
            "the config names no recipe.",
            f"{', '.join(ready_recipes())}, or {OWN}",
            command("stoker", "train", *chosen, "--store", store)
            if store
            else command("stoker", "config", "init", name, "my.yaml"),
        )
    try:
        recipe = find_recipe(settings.recipe.name)
    except InputError as error:
        raise ConfigError(
            f"{_where(settings, 'recipe.name')}: {error.given}",
            error.allowed,
            error.fix,
            error.details,
        ) from error
    settings = with_defaults(settings, recipe)
    given = dict(settings.recipe.options)
    known = [entry.name for entry in fields(recipe.Options)]
    problems = []
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            problems.append(
                Problem(
                    Place(_where(settings, name)),
                    "",
                    f"the recipe {settings.recipe.name!r} has no option {name!r}",
                    ", ".join(known) or "no options",
                    f"recipe.options.{near[0]}" if near else f"delete recipe.options.{name}",
                )
            )
    if problems:
        raise as_error(problems)
    with blamed(recipe, "from_settings"):
        asked = recipe.from_settings(settings, given)
    _refuse_disagreement(settings, given, asked)
    try:
        with blamed(recipe, "Options"):
            options = parse_options(recipe.Options, {**given, **asked}, recipe.name)
    except InputError as error:
        named = error.option if isinstance(error, OptionError) else None
        raise ConfigError(
            f"{_where(settings, named)}: {error.given}",
            error.allowed,
            as_overrides(error.fix, recipe.Options),
        ) from error
    notes = tuple(_idle_keys(settings, recipe, options))
    return Chosen(str(settings.recipe.name), recipe, options, settings, notes)


def with_defaults(settings: Settings, recipe: Recipe) -> Settings:
    """Return settings in which the recipe's defaults replace values that the user did not set."""
    return settings.with_recipe_defaults(
        {as_key(each.setting): (each.value, each.reason) for each in recipe.defaults}
    )


def _where(settings: Settings, option: str | None) -> str:
    """Return `file:line:column key` of an option, or the parts that are known."""
    asked = (f"{OPTIONS}.{option}", as_key(option or ""), OPTIONS)
    origin = next((settings.origins[name] for name in asked if name in settings.origins), None)
    return "" if origin is None else f"{origin.place or ''} {origin.key}".strip()


def _refuse_disagreement(
    settings: Settings, given: Mapping[str, Any], asked: Mapping[str, Any]
) -> None:
    for name, value in asked.items():
        if given.get(name, value) != value:
            reasons = settings.reasons
            keys = (as_key(name), f"gpu_augmentation.{name}")
            source = next((reasons[key] for key in keys if key in reasons), "another key")
            raise ConfigError(
                f"{_where(settings, name)}: {given[name]!r} disagrees with {value!r} by {source}.",
                "one of them, or the same value",
                f"delete recipe.options.{name}",
            )


def _idle_keys(settings: Settings, recipe: Recipe, options: Any) -> list[str]:
    """Return notes on keys that this recipe, with these options, does not read."""
    with blamed(recipe, "note_settings"):
        notes = list(recipe.note_settings(settings, options))
    used = [as_key(name) for name in recipe.uses]
    unused = [
        settings.reasons[key]
        for key in OPTIONAL
        if key not in used
        and not settings.is_default(key)
        and settings.get(key) not in (None, False)
    ]
    if unused:
        notes.append(f"{'; '.join(unused)}: no effect, the recipe {recipe.name} does not use it")
    return notes


# -- what a checkpoint keeps of a job ---------------------------------------------------------------
# Plain values, so that a prediction needs neither the training store nor targets: the result of `Recipe.describe`,
# the columns of the inputs, and the repairs, which are applied to new data as well.


_TABLE_FIELD, _BARS = "features", "bars"


def describe_job(recipe: Recipe, job: Job, store: Store) -> dict[str, Any]:
    """Return what `rebuild` needs besides the options, as plain JSON values."""
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
    # For predictions on raw rows: how each column of the raw table is converted, and the names of the classes.
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
    """Return the model that `describe_job` described, without its weights."""
    with blamed(chosen.recipe, "rebuild"):
        made = chosen.recipe.rebuild(chosen.options, facts)
        made.model.eval().requires_grad_(False)
    return made


def as_augments(augmentation: Compose | ProgressiveAugmentation | None) -> Augments | None:
    """Return the argument, cast for mypy, which does not see that overloads fit the loader's protocol."""
    return cast("Augments | None", augmentation)


def fingerprint(store: Store) -> str:
    """Return a digest of a store's content: the same data packed again gives the same digest."""
    about = store.manifest.model_dump(mode="json", include={"num_samples", "fields", "repairs"})
    about["shards"] = [[shard.size_bytes, shard.checksum] for shard in store.manifest.shards]
    return xxhash.xxh3_64_hexdigest(exact_text(about, sort_keys=True).encode())


def code_digest(recipe: Recipe) -> str:
    """Return a digest of the source of stoker and of the recipe's own module."""
    made = _package_digest().copy()
    own = inspect.getsourcefile(type(recipe))
    if own and Path(stoker.__file__).parent not in Path(own).parents:
        with contextlib.suppress(OSError):
            made.update(Path(own).read_bytes())
    return f"stoker {stoker.__version__}, {made.hexdigest()}"


@functools.cache  # the imported code does not change, and reading the files takes 20 ms
def _package_digest() -> xxhash.xxh3_64:
    made = xxhash.xxh3_64()
    for path in sorted(Path(stoker.__file__).parent.rglob("*.py")):
        with contextlib.suppress(OSError):
            made.update(path.read_bytes())
    return made


def check_columns(store: Store, facts: Facts) -> None:
    """Raise when a store does not hold what the model was trained on, in the same order."""
    for name, trained in facts["columns"].items():
        if name not in store.fields:
            raise InputError(
                f"{store.name} has no field {name!r}; it holds {', '.join(store.fields)}.",
                f"a store with {', '.join(facts['inputs'])}, as in training",
                "pack the new data like the training data",
            )
        have = store.fields[name].columns
        # A plain HDF5 file has no column names: the model itself checks the shape.
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
