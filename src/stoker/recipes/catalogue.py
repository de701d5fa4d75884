"""The ready recipes by name, and what a config asks of one of them.

Enters: `Settings`. Leaves: a `Chosen` recipe with checked options, or a `ConfigError` that names the
file and line of the option at fault. Costs the import of all recipes (torch); reads no data.

Some keys of a config are older than the recipes (S3-4, S4-5): `gpu_augmentation.*`, `training.init_gain`
and `training.output_bound` reach the recipe that knows them here. Where the same thing is also written
under `recipe.options`, both must agree.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from stoker.config import Place, Problem, Settings
from stoker.config.resolve import as_error
from stoker.errors import ConfigError, InputError
from stoker.recipes.forex import ForexOptions, ForexRecipe
from stoker.recipes.massspec import (
    MassSpecRecipe,
    MassSpecTeacherRecipe,
    StudentOptions,
    TeacherOptions,
)
from stoker.recipes.options import as_overrides, parse_options
from stoker.recipes.segmentation import SegmentationOptions, SegmentationRecipe
from stoker.recipes.tabular import TabularOptions, TabularRecipe

TEACHER = "teacher"
"""An option of the recipe "massspec" that is no plain value: in a config, the path of a checkpoint."""

_JITTER = ("horizontal_flip_prob", "rotation_degrees", "brightness", "contrast", "saturation")
_BOUNDS = ("init_gain", "output_bound", "output_bound_mode")
_IDLE = (
    "num_workers",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory",
    "lazy_loading",
    "lazy_cache_dir",
    "precompute_graphs",
)


ReadyRecipe = (
    ForexRecipe | MassSpecRecipe | MassSpecTeacherRecipe | SegmentationRecipe | TabularRecipe
)


@dataclass(frozen=True)
class Entry:
    """A recipe and the dataclass of its options."""

    recipe: ReadyRecipe
    options: type[Any]


RECIPES: Mapping[str, Entry] = {
    "forex": Entry(ForexRecipe(), ForexOptions),
    "massspec": Entry(MassSpecRecipe(), StudentOptions),
    "massspec-teacher": Entry(MassSpecTeacherRecipe(), TeacherOptions),
    "segmentation": Entry(SegmentationRecipe(), SegmentationOptions),
    "tabular": Entry(TabularRecipe(), TabularOptions),
}


@dataclass(frozen=True)
class Chosen:
    """A recipe as a config asks for it.

    Attributes:
        recipe: Makes the job.
        options: An instance of its options, defaults included.
        teacher: Path of the checkpoint to learn from, for "massspec".
        notes: Keys of the config that have no effect here, and why.
    """

    recipe: ReadyRecipe
    options: Any
    teacher: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def plain(self) -> dict[str, Any]:
        """Every option by name, as `make_job` takes them."""
        return asdict(self.options)


def restore(name: str, options: Mapping[str, Any]) -> Chosen:
    """Return a recipe with options as a checkpoint keeps them."""
    entry = RECIPES.get(name)
    if entry is None:
        raise InputError(
            f"the checkpoint is of the recipe {name!r}.",
            ", ".join(RECIPES),
            "the stoker that wrote it, or a newer one",
        )
    return Chosen(entry.recipe, parse_options(entry.options, options, name))


def choose_recipe(settings: Settings) -> Chosen:
    """Return the recipe that a config asks for, with its options.

    Raises:
        ConfigError: No recipe is named, or an option is unknown, of a wrong type or out of range.
    """
    if settings.recipe is None:
        raise ConfigError(
            "the config names no recipe.",
            ", ".join(RECIPES),
            "stoker train --config configs/tabular.yaml --store STORE, or --set recipe.name=tabular",
        )
    entry = RECIPES[settings.recipe]
    given = dict(settings.recipe_options)
    teacher = _take_teacher(settings, given)
    _refuse_unknown(settings, given, [entry_field.name for entry_field in fields(entry.options)])
    given |= _from_other_keys(settings, given)
    try:
        options = parse_options(entry.options, given, settings.recipe)
    except InputError as error:
        named = next((name for name in given if f"'{name}'" in error.given), None)
        raise ConfigError(
            f"{_where(settings, named)}: {error.given}",
            error.allowed,
            as_overrides(error.fix, entry.options),
        ) from error
    return Chosen(entry.recipe, options, teacher, tuple(_idle_keys(settings)))


def _where(settings: Settings, option: str | None) -> str:
    """Return `file:line:column key`, as far as it is known."""
    asked = (f"recipe_options.{option}", option or "", "recipe_options")
    reason = next((settings.reasons[name] for name in asked if name in settings.reasons), "")
    key, _, place = reason.removesuffix(")").partition(" (")
    return f"{place} {key}".strip()


def _take_teacher(settings: Settings, given: dict[str, Any]) -> str | None:
    if settings.recipe != "massspec" or TEACHER not in given:
        return None
    path = given.pop(TEACHER)
    if path is not None and not isinstance(path, str):
        raise ConfigError(
            f"{_where(settings, TEACHER)}: {path!r} is no path.",
            "the checkpoint of a run of massspec-teacher, or null",
            "--set recipe.options.teacher=runs/massspec-teacher/best.pt",
        )
    return path


def _refuse_unknown(settings: Settings, given: Mapping[str, Any], known: list[str]) -> None:
    problems = []
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            problems.append(
                Problem(
                    Place(_where(settings, name)),
                    "",
                    f"the recipe {settings.recipe!r} has no option {name!r}",
                    ", ".join(known),
                    f"recipe.options.{near[0]}"
                    if near
                    else f"docs/recipes/{settings.recipe}.md lists them",
                )
            )
    if problems:
        raise as_error(problems)


# -- keys of the config that a recipe knows --------------------------------------------------


def _from_other_keys(settings: Settings, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return options that other sections of the config give; refuse those that disagree."""
    asked: dict[str, Any] = {}
    free: dict[str, Any] = {}
    if settings.recipe == "segmentation":
        asked = {"epochs": max(1, settings.epochs)} | _augmentation(settings, given)
    elif settings.recipe == "tabular":
        asked = {name: getattr(settings, name) for name in _BOUNDS if not settings.is_default(name)}
        free = {"batch_size": settings.samples_per_update}
    elif settings.recipe == "forex" and given.get("stateful"):
        free = {"lanes": settings.batch_size}
    for name, value in asked.items():
        if given.get(name, value) != value:
            source = settings.reasons.get(name) or settings.reasons.get(
                f"augmentation.{name}", "training.use_gpu_augmentation"
            )
            raise ConfigError(
                f"{_where(settings, name)}: {given[name]!r} disagrees with {value!r} by {source}.",
                "one of them, or the same value",
                f"delete recipe.options.{name}",
            )
    return {name: value for name, value in free.items() if name not in given} | asked


def _augmentation(settings: Settings, given: Mapping[str, Any]) -> dict[str, Any]:
    if settings.is_default("augmentation"):
        return {}  # nobody asked: the recipe has its own
    if settings.augmentation is None:
        return {"augmentation": "none"}
    # Beside a preset that the user names, only numbers that were written are theirs.
    named = "augmentation" in given
    return {
        name: getattr(settings.augmentation, name)
        for name in _JITTER
        if not (named and settings.is_default(f"augmentation.{name}"))
    }


def _idle_keys(settings: Settings) -> list[str]:
    notes = []
    idle = [settings.reasons[name] for name in _IDLE if not settings.is_default(name)]
    if idle:
        why = "the loader reads the store with threads of this process, through pinned memory"
        notes.append(f"{'; '.join(dict.fromkeys(idle))}: no effect here, {why}")
    if settings.recipe != "tabular":
        bound = [settings.reasons[name] for name in _BOUNDS if not settings.is_default(name)]
        if bound:
            notes.append(f"{'; '.join(bound)}: no effect, only the recipe tabular knows it")
    if settings.recipe != "segmentation" and settings.augmentation is not None:
        notes.append(f"{settings.reasons['augmentation']}: no effect, there are no images")
    return notes


def without_epochs(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options as a checkpoint compares them: a resumed run may be longer."""
    return {name: value for name, value in options.items() if name != "epochs"}
