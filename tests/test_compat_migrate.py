"""Older config files: every key taken over or dropped with a reason, and the settings stay the same."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from stoker.cli.main import app
from stoker.compat.migrate import NAMES, RECIPE_OPTIONS, find_target, migrate_config
from stoker.config import parse_config, resolve
from stoker.config.resolve import PLACES
from stoker.config.tree import key_schemas
from stoker.errors import ConfigError
from stoker.recipes.registry import find_recipe, ready_recipes
from test_config import configs, legal, nested

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = sorted((ROOT / "src" / "stoker" / "configs").glob("*.yaml"))
PAGE = (ROOT / "docs" / "migrate.md").read_text(encoding="utf-8")


def count_leaves(tree, above=()):
    """Leaves of a plain tree; those of `recipe.options` are its entries."""
    total = 0
    for name, value in tree.items():
        path = (*above, name)
        deeper = isinstance(value, dict) and value and above != ("recipe", "options")
        empty = value in (None, {}) and ".".join(path) == "recipe.options"
        total += count_leaves(value, path) if deeper else not empty
    return total


def new_values(made):
    return {entry.new: entry.value for entry in made.moved}


def reasons(made):
    return {entry.old: entry.reason for entry in made.dropped}


# -- the same settings -----------------------------------------------------------------------------


def check(text):
    """Migrate; the result is sound, no key is lost, and what was accepted comes to the same."""
    made = migrate_config(text, "old.yaml")
    new = resolve(parse_config(made.text, "new.yaml"))
    assert len(made.moved) + len(made.dropped) == count_leaves(yaml.safe_load(text) or {})
    fine = ("output_bound_mode", "no effect in `stoker train`")
    assert all(any(word in note for word in fine) for note in new.notes)
    for entry in made.dropped:
        assert entry.reason
    try:
        old = resolve(parse_config(text, "old.yaml"))
    except ConfigError:
        return made
    assert new == old
    for name in new.reasons:
        # Nobody asks for these: the size of chunks without their loader, options that are none.
        unasked = {"recipe.options", "data.use_lazy_loading"}
        unasked |= set() if new.data.use_chunk_loader else {"data.chunk_size_gb"}
        if name not in unasked:
            assert new.is_default(name) == old.is_default(name), name
    return made


@given(configs)
def test_any_mix_of_known_keys_comes_to_the_same_settings(flat):
    made = check(nested(flat))
    again = migrate_config(made.text)
    assert again.dropped == ()
    assert all(entry.old == entry.new for entry in again.moved)
    assert new_values(again) == new_values(made)


@pytest.mark.parametrize("key", key_schemas())
def test_every_known_key_alone_is_taken_over(key):
    @settings(max_examples=3, deadline=None)
    @given(legal(key_schemas()[key]))
    def one(value):
        made = check(nested({key: value}))
        needs_more = key.startswith("gpu_augmentation.") or key in (
            "recipe.options",
            "data.prefetch_factor",
            "gpu_optimization.prefetch_factor",
            "data.persistent_workers",
            "gpu_optimization.persistent_workers",
        )
        # A path has no NUL: such a text is listed as not taken over.
        needs_more = needs_more or (isinstance(value, str) and "\0" in value)
        # Its section counts unless it is false.
        needs_more = needs_more or (key == "data.memory_efficient_mode.enabled" and value)
        assert needs_more or value == {} or list(new_values(made).values()) == [value]

    one()


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_our_own_files_come_to_the_same_settings(path):
    made = check(path.read_text())
    assert {entry.old for entry in made.dropped} <= {"data.memory_efficient_mode.enabled"}
    assert made.text.startswith(path.read_text().splitlines()[0])


def test_names_lead_to_keys():
    assert NAMES["learning_rate"] == "training.lr"
    assert NAMES["empty_cache_frequency"] == "training.empty_cache_every_n_batches"
    assert set(NAMES.values()) <= {*PLACES, "data.memory_efficient_mode.enabled"}


def test_options_that_are_taken_over_are_options_of_their_recipe():
    from dataclasses import fields

    assert set(RECIPE_OPTIONS) == set(ready_recipes())
    for recipe, names in RECIPE_OPTIONS.items():
        known = {entry.name for entry in fields(find_recipe(recipe).Options)}
        assert set(names.values()) <= known, recipe


# -- the documents' files --------------------------------------------------------------------------

S0 = """\
# the chunk loader
gpu_optimization:
  # big batches
  use_chunk_loader: true
  chunk_size_gb: 12.0        # 16 GB of GPU memory
  batch_size: 128
  num_workers: 0
  pin_memory: true
  use_amp: true              # FP16
  gradient_accumulation_steps: 1
  empty_cache_every_n_epochs: 1
  log_gpu_stats_every_n_batches: 100
"""

S1 = """\
data:
  memory_efficient_mode:
    enabled: true
    use_lazy_loading: true
    lazy_cache_dir: "data/processed/lazy_cache"
    precompute_graphs: false
    ram_32gb_mode:
      max_training_samples: null
      gradient_accumulation: 2
      empty_cache_frequency: 50
training:
  student_distill:
    batch_size: 32
    num_workers: 4
    gradient_accumulation_steps: 2
"""


def test_the_chunk_loaders_file():
    made = check(S0)
    assert made.dropped == ()
    assert made.text == (
        "# the chunk loader\n"
        "data:\n"
        "  # big batches\n"
        "  use_chunk_loader: true\n"
        "  chunk_size_gb: 12.0 # 16 GB of GPU memory\n"
        "  num_workers: 0\n"
        "  pin_memory: true\n"
        "training:\n"
        "  gradient_accumulation_steps: 1\n"
        "  empty_cache_every_n_epochs: 1\n"
        "  log_gpu_stats_every_n_batches: 100\n"
        "  batch_size: 128\n"
        "  use_amp: true # FP16\n"
    )


def test_the_mass_spectra_file():
    made = check(S1)
    assert reasons(made) == {
        "data.memory_efficient_mode.ram_32gb_mode.gradient_accumulation": "says the same as "
        "training.student_distill.gradient_accumulation_steps",
        "data.memory_efficient_mode.enabled": "the keys beside it count without it",
    }
    assert new_values(made)["training.gradient_accumulation_steps"] == 2
    moved = migrate_config(S1.replace("memory_efficient_mode:\n    enabled", "x:\n    enabled"))
    assert "training.empty_cache_every_n_batches" in new_values(moved)


def test_sections_at_other_depths_and_names_in_other_sections():
    made = migrate_config(
        "trainer:\n"
        "  gpu_optimization: {batch_size: 64, chunk_size_gb: 6}\n"
        "  optimizer: {type: AdamW, lr: 1e-3}\n"
        "data: {ram_32gb_mode: {empty_cache_frequency: 50}, hdf5_path: data/aligned_train.h5}\n"
        "use_amp: false\n"
        "seed: 42\n"
        "validation: {batch_size: 7}\n"
    )
    assert new_values(made) == {
        "data.chunk_size_gb": 6,
        "training.empty_cache_every_n_batches": 50,
        "training.batch_size": 64,
        "training.use_amp": False,
        "training.seed": 42,
        "training.lr": 0.001,
        "recipe.store": "data/aligned_train.h5",
    }
    assert "own optimizer" in reasons(made)["trainer.optimizer.type"]
    assert "no section of training" in reasons(made)["validation.batch_size"]


def test_the_segmentation_file_names_its_recipe_by_its_model():
    made = migrate_config(
        "model: {name: MicroSegFormer, dropout: 0.15, use_lmsa: true}\n"
        "loss: {ce_weight: 1.0, dice_weight: 1.5}\n"
        "data: {batch_size: 32, num_workers: 4-6}\n"
        "training: {learning_rate: 8e-4, warmup_epochs: 5, use_gpu_augmentation: true}\n"
        "gpu_augmentation: {rotation: 15, brightness: 0.3}\n"
    )
    assert new_values(made) == {
        "training.batch_size": 32,
        "data.num_workers": 4,
        "training.use_gpu_augmentation": True,
        "training.lr": 0.0008,
        "gpu_augmentation.rotation_degrees": 15,
        "gpu_augmentation.brightness": 0.3,
        "recipe.name": "segmentation",
        "recipe.options.dropout": 0.15,
        "recipe.options.ce_weight": 1.0,
        "recipe.options.dice_weight": 1.5,
        "recipe.options.warmup_epochs": 5,
    }
    assert reasons(made) == {"model.use_lmsa": "the recipe brings its own model"}


def test_names_that_stand_where_a_section_should():
    """`stoker config check` advises the same for them."""
    made = migrate_config("layers: 2\nrecipe: tabular\nstore: st\nepochs: 3\n")
    assert new_values(made) == {
        "recipe.name": "tabular",
        "recipe.store": "st",
        "recipe.options.layers": 2,
        "training.epochs": 3,
    }
    assert new_values(migrate_config("data: {store: st}\n")) == {"recipe.store": "st"}
    for word in ("resnet", "[tabular]", "3"):  # of other programs
        made = migrate_config(f"recipe: {word}\nepochs: 3\n")
        assert "no recipe" in reasons(made)["recipe"]
        assert new_values(made) == {"training.epochs": 3}


def test_the_trading_file_and_a_recipe_that_is_typed():
    old = (
        "model: {d_model: 256, e_layers: 3, n_heads: 4, patch_len: 16, stride: 8}\n"
        "training: {batch_size: 1024, weight_decay: 1e-2, xavier_gain: 0.5, output_clip: 10}\n"
    )
    assert set(reasons(migrate_config(old))) == {
        f"model.{name}" for name in ("d_model", "e_layers", "n_heads", "patch_len", "stride")
    } | {"training.weight_decay"}
    made = migrate_config(old, recipe="tabular")
    assert made.dropped == ()
    assert resolve(parse_config(made.text)).recipe_options == {
        "d_model": 256,
        "layers": 3,
        "heads": 4,
        "patch": 16,
        "stride": 8,
        "weight_decay": 0.01,
    }
    other = migrate_config("recipe: {name: forex}", recipe="tabular")
    assert reasons(other) == {"recipe.name": "--recipe says tabular"}


# -- values ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "key", "value", "note"),
    [
        ("training: {lr: 8e-4}", "training.lr", 0.0008, ""),
        ("training: {lr: '1e-3'}", "training.lr", 0.001, "(in quotes)"),
        ("data: {num_workers: 4-6}", "data.num_workers", 4, "6 would do as well"),
        ("data: {num_workers: 2 to 4}", "data.num_workers", 2, "4 would do as well"),
        ("data: {batch_size: '32'}", "training.batch_size", 32, "(in quotes)"),
        ("data: {batch_size: 32.0}", "training.batch_size", 32, "whole number"),
        ("data: {batch_size: 010}", "training.batch_size", 10, "base 8"),
        ("data: {batch_size: 1_024}", "training.batch_size", 1024, ""),
        ("training: {epochs: 1e2}", "training.epochs", 100, "whole number"),
        ("gpu_optimization: {chunk_size_gb: 12GB}", "data.chunk_size_gb", 12, "text"),
        ("training: {use_amp: 'True'}", "training.use_amp", True, "true or false"),
        ("training: {use_amp: 1}", "training.use_amp", True, "true or false"),
        ("training: {clip_norm: None}", "training.clip_norm", None, "'None' is text"),
        ("training: {precision: BF16}", "training.precision", "bf16", "none of the names"),
        ("training: {precision: float16}", "training.precision", "fp16", "none of the names"),
        ("run: {dir: 12}", "run.dir", "12", "is a number"),
    ],
)
def test_values_are_corrected_with_a_note(old, key, value, note):
    made = migrate_config(old)
    assert made.dropped == ()
    (entry,) = made.moved
    assert (entry.new, entry.value) == (key, value)
    assert note in entry.note
    assert bool(entry.note) == bool(note)
    resolve(parse_config(made.text))


@pytest.mark.parametrize(
    ("old", "key", "reason"),
    [
        ("data: {batch_size: 0}", "data.batch_size", "a whole number, 1 or more"),
        ("data: {batch_size: many}", "data.batch_size", "'many' is text"),
        ("data: {batch_size: 1:30}", "data.batch_size", "'1:30' is no plain value"),
        ("data: {batch_size: [1, 2]}", "data.batch_size", "is a list"),
        ("data: {batch_size: }", "data.batch_size", "is empty"),
        ("data: {batch_sizes: 3}", "data.batch_sizes", "perhaps training.batch_size"),
        ("data: {shuffle: false}", "data.shuffle", "recipe.options.order"),
        ("device: cuda", "device", "--device"),
        ("data: {msp_file: a.msp}", "data.msp_file", "stoker pack massspec"),
        ("made_on: 2025-07-01", "made_on", "no such key"),
        ("training: {weight_decay: 0.1}", "training.weight_decay", "--recipe"),
        ("recipe: {options: {d_model: 8}}", "recipe.options.d_model", "no recipe is named"),
        ("data: {prefetch_factor: 4}", "data.prefetch_factor", "needs workers"),
        ("gpu_augmentation: {contrast: 0.1}", "gpu_augmentation.contrast", "is false"),
        ("training: {lr: 0.1, learning_rate: 0.2}", "training.learning_rate", "disagrees"),
        ("training: {precision: fp16, use_amp: false}", "training.use_amp", "disagrees"),
        ("training: {batch_size: 3}\ndata: {batch_size: 4}", "data.batch_size", "more specific"),
        ("training: {use_amp: true}\nuse_amp: false", "use_amp", "training.use_amp says true"),
        ("use_amp: false\ntraining: {use_amp: true}", "use_amp", "training.use_amp says true"),
        ("lr: 1.0\nlearning_rate: 1.0", "learning_rate", "says the same as lr"),
    ],
)
def test_what_has_no_place_is_dropped_with_the_reason(old, key, reason):
    made = migrate_config(old)
    assert list(reasons(made)) == [key]
    assert reason in reasons(made)[key]
    assert f"#   {key}: " in made.text
    resolve(parse_config(made.text))


@pytest.mark.parametrize(
    ("old", "words"),
    [
        ("data: {batch_size: 1, batch_size: 2}", "written twice"),
        ("data: [", "not YAML"),
        ("- 1\n- 2", "not a section"),
        ("1: 2", "not text"),
        ("a: b\n---\nc: d", "second document"),
    ],
)
def test_no_guess_is_made_about_a_file_that_says_two_things(old, words):
    with pytest.raises(ConfigError, match=words):
        migrate_config(old)


names = st.text("abz_.#:'\" \n\x07\x85é", max_size=6)
scalars = st.none() | st.booleans() | st.integers(-3, 99) | st.floats(-1, 9) | st.text(max_size=8)
trees = st.recursive(
    scalars | st.lists(scalars, max_size=2),
    lambda below: st.dictionaries(
        names | st.sampled_from(["data", "training", "lr", "batch_size", "recipe", "options"]),
        below,
        max_size=4,
    ),
    max_leaves=12,
)


@given(st.dictionaries(names | st.sampled_from(["data", "training", "recipe"]), trees, max_size=4))
def test_any_file_becomes_a_sound_one(tree):
    made = migrate_config(yaml.safe_dump(tree))
    new = resolve(parse_config(made.text))
    for entry in made.moved:
        if entry.new.startswith("recipe.options."):
            assert new.recipe.options[entry.new.removeprefix("recipe.options.")] == entry.value


# -- comments --------------------------------------------------------------------------------------


def test_comments_follow_their_keys():
    made = migrate_config(
        "\ufeff# a header\n"
        "# of two lines\n"
        "\n"
        "# about loading\n"
        "data:\n"
        "  # how many\n"
        "  batch_size: 4 # a few\n"
        "  pin_memory: true\n"
        "  lazy_cache_dir: 'a # b' # a folder\n"
        "  shuffle: true # gone\n"
    )
    assert made.text == (
        "# a header\n"
        "# of two lines\n"
        "data:\n"
        "  pin_memory: true\n"
        "  lazy_cache_dir: 'a # b' # a folder\n"
        "training:\n"
        "  # about loading\n"
        "  # how many\n"
        "  batch_size: 4 # a few\n"
        "# Not taken over:\n"
        "#   data.shuffle: true (<text>:10:3): the order belongs to the recipe (forex: "
        "recipe.options.order); the others shuffle\n"
    )


# -- the page ------------------------------------------------------------------------------------


def test_the_page_shows_what_the_command_does(tmp_path, monkeypatch):
    old, new = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    Path("old.yaml").write_text(old)
    shown = run("old.yaml", "new.yaml")
    assert Path("new.yaml").read_text() == new
    assert f"```\n{shown.stdout}```" in PAGE


def test_the_page_names_the_names():
    table = PAGE.partition("| old name | here |")[2].partition("\n\n")[0]
    rows = [re.findall(r"`([^`]+)`", line) for line in table.splitlines() if "`" in line]
    assert len(rows) == 12
    for *names, key in rows:
        assert {find_target((name,)) for name in names} == {key}


# -- the command -----------------------------------------------------------------------------------


def run(*args):
    return CliRunner().invoke(app, ["config", "migrate", *map(str, args)])


def test_the_command_says_what_became_of_every_key(tmp_path):
    old, new = tmp_path / "old.yaml", tmp_path / "new.yaml"
    old.write_text("data: {num_workers: 4-6, shuffle: true}\nmodel: {dropout: 0.2}\n")
    shown = run(old, new, "--recipe", "segmentation")
    assert shown.exit_code == 0, shown.exception
    assert "moved    model.dropout to recipe.options.dropout" in shown.stdout
    assert "fixed    data.num_workers" in shown.stdout
    assert "dropped  data.shuffle: true" in shown.stdout
    assert "2 keys of" in shown.stdout
    checked = CliRunner().invoke(app, ["config", "check", str(new), "--json"])
    assert json.loads(checked.stdout)["settings"]["data.num_workers"]["value"] == 4
    before = new.read_text()
    again = run(old, new)
    assert "exists already" in str(again.exception)
    assert new.read_text() == before
    facts = json.loads(run(old, tmp_path / "other.yaml", "--json").stdout)
    assert [each["old"] for each in facts["dropped"]] == ["data.shuffle", "model.dropout"]


def test_the_command_refuses_by_name(tmp_path):
    old, new = tmp_path / "old.yaml", tmp_path / "new.yaml"
    assert "does not exist" in str(run(old, new).exception)
    old.write_text("model: {dropout: 7, width: wide}\n")
    said = str(run(old, new, "--recipe", "tabul").exception)
    assert "--recipe is 'tabul'" in said
    assert "Try: --recipe tabular" in said
    shown = run(old, new, "--recipe", "massspec")
    assert "'dropout' is 7" in shown.stdout
    assert "'width' of the recipe 'massspec' is 'wide'" in shown.stdout
    old.write_bytes(b"\xff\xfe")
    assert "not UTF-8" in str(run(old, tmp_path / "b.yaml").exception)
    assert not (tmp_path / "b.yaml").exists()
    old.write_text("lr: 0.1")
    assert "cannot write" in str(run(old, tmp_path / "no" / "folder.yaml").exception)


def test_the_old_spelling_names_the_new_one():
    shown = CliRunner().invoke(app, ["migrate-config", "old.yaml", "new.yaml"])
    assert "stoker config migrate old.yaml new.yaml" in str(shown.exception)
