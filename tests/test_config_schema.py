"""The config's schema, its presets, and the files that ship."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from docs_build.config_table import config_table
from hypothesis import given
from hypothesis import strategies as st

from stoker.config import (
    Config,
    load_config,
    resolve,
)
from stoker.config.yaml_lines import read_yaml
from test_config import CONFIGS, LEAVES, SCHEMA, nested


def schema_accepts(schema: dict, value: object, whole: dict) -> bool:
    """Judge by the part of JSON Schema that ours uses; unknown words fail."""
    known = {"$schema", "$defs", "title", "description", "default", "unit", "$ref", "type", "enum",
             "anyOf", "properties", "additionalProperties", "minimum", "maximum",
             "exclusiveMinimum", "minLength"}  # fmt: skip
    assert set(schema) <= known, set(schema) - known
    if "$ref" in schema:
        return schema_accepts(whole["$defs"][schema["$ref"].rpartition("/")[2]], value, whole)
    if "anyOf" in schema:
        return any(schema_accepts(option, value, whole) for option in schema["anyOf"])
    kinds = {"object": dict, "string": str, "boolean": bool, "null": type(None)}
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if schema["type"] in ("integer", "number"):
        return (
            number
            and (schema["type"] == "number" or isinstance(value, int))
            and value >= schema.get("minimum", value)
            and value <= schema["maximum"]
            and ("exclusiveMinimum" not in schema or value > schema["exclusiveMinimum"])
        )
    if not isinstance(value, kinds[schema["type"]]):
        return False
    if isinstance(value, dict) and "properties" not in schema:
        assert schema["additionalProperties"] is True
        return True
    if isinstance(value, dict):
        assert schema["additionalProperties"] is False
        return all(
            name in schema["properties"]
            and schema_accepts(schema["properties"][name], below, whole)
            for name, below in value.items()
        )
    return value in schema.get("enum", [value]) and (
        not isinstance(value, str) or len(value) >= schema.get("minLength", 0)
    )


ANY_SCALAR = st.one_of(
    st.none(), st.booleans(), st.integers(-5, 2**33), st.floats(-2, 200, allow_nan=False), st.text()
)


@given(st.sampled_from(sorted(LEAVES)), ANY_SCALAR)
def test_schema_and_types_agree_on_every_leaf(key, value):
    tree = yaml.safe_load(nested({key: value}))
    value = tree
    while isinstance(value, dict):
        value = next(iter(value.values()))
    try:
        Config.model_validate(tree)
        accepted = True
    except ValueError:
        accepted = False
    assert schema_accepts(SCHEMA, tree, SCHEMA) == accepted


def test_schema_says_what_editors_need():
    schema = SCHEMA
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["additionalProperties"] is False
    assert LEAVES["gpu_optimization.chunk_size_gb"]["unit"] == "GiB"
    assert LEAVES["data.batch_size"]["minimum"] == 1


PRESETS: dict[str, dict[str, object]] = {
    "segmentation_best": {
        "recipe.name": "segmentation", "training.batch_size": 32, "training.use_amp": True,
        "gpu_augmentation.horizontal_flip_prob": 0.5, "gpu_augmentation.rotation_degrees": 15.0,
        "gpu_augmentation.brightness": 0.2, "gpu_augmentation.contrast": 0.2,
    },
    "segmentation_low_memory": {
        "recipe.name": "segmentation", "training.batch_size": 16, "training.use_amp": True,
        "gpu_augmentation.horizontal_flip_prob": 0.5, "recipe.options": {"augmentation": "minimal"},
    },
    "segmentation_debug": {
        "recipe.name": "segmentation", "training.batch_size": 8, "training.use_amp": False,
        "training.use_gpu_augmentation": False,
        "training.capture": "off",
    },
    "forex_16gb": {
        "recipe.name": "forex", "data.use_chunk_loader": True, "data.chunk_size_gb": 12.0,
        "training.batch_size": 128,
        "training.use_amp": True, "training.gradient_accumulation_steps": 1, "data.drop_last": False,
        "training.empty_cache_every_n_epochs": 1,
        "training.log_gpu_stats_every_n_batches": 100,
    },
    "massspec_32gb": {
        "recipe.name": "massspec", "training.batch_size": 32, "training.gradient_accumulation_steps": 2,
        "data.max_training_samples": None,
        "training.empty_cache_every_n_batches": 50,
    },
    "tabular_large_batch": {
        "recipe.name": "tabular", "training.batch_size": 1024, "training.gradient_accumulation_steps": 1,
        "training.init_gain": 0.5,
        "training.output_bound": 10.0, "training.lr": 1e-4,
    },
    "forex": {
        "recipe.name": "forex", "recipe.store": "stores/forex", "run.dir": "runs/forex",
        "training.batch_size": 128,
        "training.epochs": 20, "training.lr": 1e-3, "training.precision": "auto", "training.capture": "auto",
        "training.clip_norm": 1.0, "training.checkpoint_every_steps": 1000,
    },
    "images": {
        "recipe.name": "images", "recipe.store": "stores/images", "run.dir": "runs/images",
        "training.batch_size": 128, "training.epochs": 30, "training.lr": 2e-3,
    },
    "cifar": {
        "recipe.name": "images", "recipe.store": "stores/cifar", "run.dir": "runs/cifar",
        "training.batch_size": 512, "training.epochs": 24, "training.lr": 4e-3,
    },
    "massspec": {
        "recipe.name": "massspec", "recipe.store": "stores/massspec", "run.dir": "runs/massspec",
        "training.batch_size": 100, "training.epochs": 30, "training.lr": 1e-3,
    },
    "segmentation": {
        "recipe.name": "segmentation", "recipe.store": "stores/segmentation", "run.dir": "runs/segmentation",
        "training.batch_size": 32, "training.epochs": 100, "training.lr": 8e-4,
        "gpu_augmentation.horizontal_flip_prob": 0.5, "gpu_augmentation.rotation_degrees": 15.0,
        "gpu_augmentation.brightness": 0.2, "gpu_augmentation.contrast": 0.2,
    },
    "tabular": {
        "recipe.name": "tabular", "recipe.store": "stores/tabular", "run.dir": "runs/tabular",
        "training.batch_size": 128, "training.epochs": 40, "training.lr": 1e-3,
    },
}  # fmt: skip


def test_every_shipped_config_has_documented_values():
    assert {file.stem for file in CONFIGS.glob("*.yaml")} == set(PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_give_the_documented_values(name):
    file = CONFIGS / f"{name}.yaml"
    text = file.read_text(encoding="utf-8")
    settled = resolve(load_config(file))
    assert settled.notes == ()
    values = settled.values()
    assert {key: values[key] for key in PRESETS[name]} == PRESETS[name]
    assert schema_accepts(SCHEMA, read_yaml(text, name).values, SCHEMA)


@pytest.mark.parametrize("name", PRESETS)
def test_shipped_configs_give_options_that_the_recipe_takes(name):
    from stoker.recipes.catalogue import choose_recipe

    chosen = choose_recipe(resolve(load_config(name)))
    assert chosen.recipe.name == PRESETS[name]["recipe.name"]
    assert chosen.noted_settings.notes == ()


def test_the_docs_table_is_that_of_the_models():
    page = (Path(__file__).parent.parent / "docs" / "config.md").read_text(encoding="utf-8")
    assert page.endswith(config_table()), (
        "put what `python -m docs_build.config_table` prints at the page's end"
    )
    assert not re.search(r"\bS[0-4]-\d", page)
