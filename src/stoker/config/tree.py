"""The tree of keys that a config file may write, made from the models in `options.py`.

Enters: plain values. Leaves: a `Config`, which is what was written and where; the JSON Schema of a file. Costs
microseconds.

A section is a model, and each of its fields is a key. `stoker.config.options.LAYOUTS` adds the other places where
files already have a key; `stoker.config.resolve` decides which one wins. A key that is not written never
wins, whatever its default.

`recipe.options` is the one open leaf: its names are those of the recipe, which checks them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from pydantic import BaseModel, Field, create_model
from pydantic.fields import FieldInfo

from stoker.config.options import (
    LAYOUTS,
    STRICT,
    AugmentOptions,
    JobOptions,
    LoadingOptions,
    RecipeOptions,
    RunOptions,
    read_docstring,
)
from stoker.config.yaml_lines import Place

SCHEMA_DIALECT = "https://json-schema.org/draft/2020-12/schema"
ROOMS: Mapping[str, type[Any]] = {
    "recipe": RecipeOptions,
    "data": LoadingOptions,
    "training": JobOptions,
    "gpu_augmentation": AugmentOptions,
    "run": RunOptions,
}
"""Sections, and the models of their keys."""
_TEXTS = {
    "": "Everything a stoker config file may say; see docs/config.md.",
    "gpu_optimization": "Loading for the GPU: other places of keys.",
    "data.memory_efficient_mode": "Loading with little memory: other places of keys.",
    "data.memory_efficient_mode.ram_32gb_mode": "Limits for a machine with 32 GB of RAM: other places of keys.",
    "training.student_distill": "The distillation stage: other places of keys, the most specific of all.",
}


class Section(BaseModel):
    """A group of keys: strict types, no unknown names."""

    model_config = STRICT


def _fields() -> dict[str, FieldInfo]:
    """Return every key with its type, default and meaning: those of the models, then their other places."""
    found: dict[str, FieldInfo] = {}
    for section, model in ROOMS.items():
        for name, info in model.__pydantic_fields__.items():
            key = copy(info)
            if key.default_factory is not None:  # shown in the schema as well
                key.default, key.default_factory = key.default_factory(), None
            found[f"{section}.{name}"] = key
    for other, key_name in LAYOUTS.items():
        key = copy(found[key_name])
        key.description = f"Another place of {key_name}. {key.description}"
        found[other] = key
    return found


def _make_section(prefix: str, keys: Mapping[str, FieldInfo]) -> type[Section]:
    members: dict[str, Any] = {}
    for key, info in keys.items():
        name, _, below = key.removeprefix(prefix).partition(".")
        if key.startswith(prefix) and name not in members:
            if below:
                section = _make_section(f"{prefix}{name}.", keys)
                members[name] = (section, Field(default_factory=section))
            else:
                members[name] = (info.annotation, info)
    dotted = prefix.rstrip(".")
    text = _TEXTS.get(dotted) or read_docstring(ROOMS[dotted])[0]
    title = "".join(part.capitalize() for part in dotted.replace(".", "_").split("_")) or "Config"
    return create_model(title, __base__=Section, __doc__=text, **members)


@cache
def sections() -> Mapping[str, type[Section]]:
    """Return every section by its dotted name; "" is the whole tree."""
    found: dict[str, type[Section]] = {"": _make_section("", _fields())}

    def walk(section: type[Section], prefix: str) -> None:
        for name, info in section.model_fields.items():
            kind = info.annotation
            if isinstance(kind, type) and issubclass(kind, Section):
                found[prefix + name] = kind
                walk(kind, f"{prefix}{name}.")

    walk(found[""], "")
    return found


@cache
def key_schemas() -> Mapping[str, Mapping[str, Any]]:
    """Return the JSON Schema of every leaf by its dotted key, in the order of the tree."""
    return {
        f"{section}.{name}": properties
        for section, model in sections().items()
        if section
        for name, properties in model.model_json_schema()["properties"].items()
        if f"{section}.{name}" not in sections()
    }


@cache
def open_leaves() -> frozenset[str]:
    """Return the leaves that hold free names, which are not checked here."""
    return frozenset(key for key, schema in key_schemas().items() if schema.get("type") == "object")


def default_of(key: str) -> Any:
    """Return the default of a dotted leaf key."""
    section, _, name = key.rpartition(".")
    return sections()[section].model_fields[name].default


def home_of(key: str) -> str:
    """Return the usual key of `key`, which may be another place of it."""
    return LAYOUTS.get(key, key)


def config_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a config file, for editors.

    Every key has a description, its range, its unit (under `unit`) and its default. A default
    holds when no section writes another value (docs/config.md).
    """
    schema = sections()[""].model_json_schema()
    return {"$schema": SCHEMA_DIALECT, **schema, "title": "stoker config"}


@dataclass(frozen=True)
class Config:
    """The keys that a config file and `--set` write, as a tree of sections. `resolve` adds the defaults.

    `places` say where each key stands. Two configs that say the same are equal, wherever they say it.
    """

    tree: Mapping[str, Any] = field(default_factory=dict)
    places: Mapping[str, Place] = field(default_factory=dict, compare=False)

    @classmethod
    def model_validate(cls, tree: Mapping[str, Any]) -> Config:
        """Return a config of plain values.

        Raises:
            pydantic.ValidationError: A name or a value is not allowed.
        """
        checked = sections()[""].model_validate(tree)
        return cls(checked.model_dump(exclude_unset=True))

    @classmethod
    def of(cls, written: Mapping[str, Any], places: Mapping[str, Place]) -> Config:
        """Return a config of values by dotted key, checked as by `model_validate`."""
        tree: dict[str, Any] = {}
        for key, value in written.items():
            *above, name = key.split(".")
            section = tree
            for part in above:
                section = section.setdefault(part, {})
            section[name] = value
        return replace(cls.model_validate(tree), places=places)

    def place_of(self, key: str) -> Place | None:
        """Return where a dotted key was written; None when not in a file or on `--set`."""
        return self.places.get(key)

    def written(self) -> dict[str, Any]:
        """Return what was written, flat: dotted key to value."""
        return dict(_flatten(self.tree))


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if prefix + name in sections():
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
