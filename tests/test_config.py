"""Config files: every key has an effect, every mistake has a line, every default a source."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stoker.config import (
    Config,
    check_config,
    config_schema,
    describe_tree,
    dump_config,
    load_config,
    parse_config,
    resolve,
)
from stoker.config.load import describe_allowed
from stoker.config.resolve import QUESTIONS
from stoker.config.tree import default_of, key_schemas
from stoker.errors import ConfigError
from stoker.units import GIB

CONFIGS = Path(__file__).parent.parent / "configs"
RAM = "data.memory_efficient_mode.ram_32gb_mode"
AUGMENT_ON = {"training.use_gpu_augmentation": True}
WORKERS = {"data.num_workers": 3}

# Every leaf, the fields of Settings it changes, and what else must be written for that.
EFFECTS: dict[str, tuple[set[str], dict[str, object]]] = {
    "gpu_optimization.use_chunk_loader": ({"use_chunk_loader"}, {}),
    "gpu_optimization.chunk_size_gb": ({"chunk_bytes"}, {}),
    "gpu_optimization.batch_size": ({"batch_size"}, {}),
    "gpu_optimization.num_workers": (
        {"num_workers", "prefetch_factor", "persistent_workers"},
        {},
    ),
    "gpu_optimization.prefetch_factor": ({"prefetch_factor"}, WORKERS),
    "gpu_optimization.persistent_workers": ({"persistent_workers"}, WORKERS),
    "gpu_optimization.pin_memory": ({"pin_memory"}, {}),
    "gpu_optimization.drop_last": ({"drop_last"}, {}),
    "gpu_optimization.use_amp": ({"use_amp", "precision"}, {}),
    "gpu_optimization.gradient_accumulation_steps": ({"accumulation_steps"}, {}),
    "gpu_optimization.empty_cache_every_n_epochs": ({"empty_cache_every_n_epochs"}, {}),
    "gpu_optimization.log_gpu_stats_every_n_batches": ({"log_gpu_stats_every_n_batches"}, {}),
    "data.batch_size": ({"batch_size"}, {}),
    "data.num_workers": ({"num_workers", "prefetch_factor", "persistent_workers"}, {}),
    "data.prefetch_factor": ({"prefetch_factor"}, WORKERS),
    "data.persistent_workers": ({"persistent_workers"}, WORKERS),
    "data.pin_memory": ({"pin_memory"}, {}),
    "data.drop_last": ({"drop_last"}, {}),
    "data.memory_efficient_mode.enabled": ({"lazy_loading"}, {}),
    "data.memory_efficient_mode.use_lazy_loading": ({"lazy_loading"}, {}),
    "data.memory_efficient_mode.lazy_cache_dir": ({"lazy_cache_dir"}, {}),
    "data.memory_efficient_mode.precompute_graphs": ({"precompute_graphs"}, {}),
    f"{RAM}.max_training_samples": ({"max_training_samples"}, {}),
    f"{RAM}.gradient_accumulation": ({"accumulation_steps"}, {}),
    f"{RAM}.empty_cache_frequency": ({"empty_cache_every_n_batches"}, {}),
    "training.batch_size": ({"batch_size"}, {}),
    "training.num_workers": ({"num_workers", "prefetch_factor", "persistent_workers"}, {}),
    "training.gradient_accumulation_steps": ({"accumulation_steps"}, {}),
    "training.use_amp": ({"use_amp", "precision"}, {}),
    "training.use_gpu_augmentation": ({"augmentation"}, {}),
    "training.epochs": ({"epochs"}, {}),
    "training.precision": ({"use_amp", "precision"}, {}),
    "training.capture": ({"capture"}, {}),
    "training.compile": ({"compile"}, {}),
    "training.clip_norm": ({"clip_norm"}, {}),
    "training.nonfinite": ({"nonfinite"}, {}),
    "training.seed": ({"seed"}, {}),
    "training.read_every": ({"read_every"}, {}),
    "training.keep_last": ({"keep_last"}, {}),
    "training.checkpoint_every_epochs": ({"checkpoint_every_epochs"}, {}),
    "training.checkpoint_every_steps": ({"checkpoint_every_steps"}, {}),
    "training.tensorboard": ({"tensorboard"}, {}),
    "training.activation_checkpointing": ({"activation_checkpointing"}, {}),
    "training.survive_oom": ({"survive_oom"}, {}),
    "training.parallel": ({"parallel"}, {}),
    "training.stall_seconds": ({"stall_seconds"}, {}),
    "training.lr": ({"learning_rate"}, {}),
    "training.learning_rate": ({"learning_rate"}, {}),
    "training.init_gain": ({"init_gain"}, {}),
    "training.output_bound": ({"output_bound"}, {}),
    "training.output_bound_mode": ({"output_bound_mode"}, {"training.output_bound": 1.0}),
    "training.student_distill.batch_size": ({"batch_size"}, {}),
    "training.student_distill.num_workers": (
        {"num_workers", "prefetch_factor", "persistent_workers"},
        {},
    ),
    "training.student_distill.gradient_accumulation_steps": ({"accumulation_steps"}, {}),
    "gpu_augmentation.horizontal_flip_prob": ({"augmentation.horizontal_flip_prob"}, AUGMENT_ON),
    "gpu_augmentation.rotation_degrees": ({"augmentation.rotation_degrees"}, AUGMENT_ON),
    "gpu_augmentation.brightness": ({"augmentation.brightness"}, AUGMENT_ON),
    "gpu_augmentation.contrast": ({"augmentation.contrast"}, AUGMENT_ON),
    "gpu_augmentation.saturation": ({"augmentation.saturation"}, AUGMENT_ON),
    "recipe.name": ({"recipe"}, {}),
    "recipe.store": ({"store"}, {}),
    "recipe.options": ({"recipe_options"}, {"recipe.name": "forex"}),
    "run.dir": ({"run_dir"}, {}),
}


def nested(flat: dict[str, object]) -> str:
    tree: dict = {}
    for key, value in flat.items():
        *above, name = key.split(".")
        place = tree
        for part in above:
            place = place.setdefault(part, {})
        place[name] = value
    return yaml.safe_dump(tree)


def leaves_of(schema: dict, whole: dict, prefix: str = ""):
    """Walk the exported schema, so that the test knows no more than an editor does."""
    for name, part in schema["properties"].items():
        part = whole["$defs"][part["$ref"].rpartition("/")[2]] if "$ref" in part else part
        if "properties" in part:
            yield from leaves_of(part, whole, f"{prefix}{name}.")
        else:
            yield prefix + name, part


SCHEMA = config_schema()
LEAVES = dict(leaves_of(SCHEMA, SCHEMA))


def another_value(leaf: dict) -> object:
    """Return a legal value that is not the default."""
    default = leaf["default"]
    if isinstance(default, bool):
        return not default
    kinds = leaf.get("anyOf", [leaf])
    kind = next(option for option in kinds if option["type"] != "null")
    if "enum" in kind:
        return next(choice for choice in kind["enum"] if choice != default)
    if kind["type"] == "object":
        return {"d_model": 3, "ratios": [0.5, 0.25, 0.25]}
    if kind["type"] == "boolean":
        return False
    if kind["type"] == "string":
        return "elsewhere"
    if kind["type"] == "integer":
        return (default or 0) + 3
    return (default or 0.0) / 2 + 0.0625


def changed(before, after) -> set[str]:
    old, new = before.values(), after.values()
    if ("augmentation" in old) != ("augmentation" in new):
        names = {name for name in old | new if not name.startswith("augmentation")}
        return {"augmentation"} | {name for name in names if old[name] != new[name]}
    return {name for name in old if old[name] != new[name]}


def problems_of(text: str, overrides=()) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_config(text, "f.yaml", overrides)
    return str(caught.value).splitlines()


# --- every key -----------------------------------------------------------------------------


def test_effects_cover_every_leaf_of_the_schema():
    assert set(EFFECTS) == set(LEAVES) == set(key_schemas())


@pytest.mark.parametrize("key", EFFECTS)
def test_every_key_has_its_effect(key):
    fields, context = EFFECTS[key]
    before = resolve(parse_config(nested(context)))
    toggled = parse_config(nested(context | {key: another_value(LEAVES[key])}))
    after = resolve(toggled)
    assert changed(before, after) == fields
    for field in fields - {"augmentation"}:
        assert key in after.reasons[field] or after.reasons[field].startswith("default")
    assert any(after.reasons[f].startswith(key) for f in fields & set(after.reasons))


@pytest.mark.parametrize("key", EFFECTS)
def test_every_key_has_words_a_unit_or_kind_and_a_default(key):
    leaf = LEAVES[key]
    assert leaf["description"].endswith(".")
    assert "default" in leaf
    assert describe_allowed(leaf)
    kinds = {option.get("type") for option in leaf.get("anyOf", [leaf])}
    assert kinds <= {"integer", "number", "boolean", "string", "null"} | (
        {"object"} if key == "recipe.options" else set()
    )


def test_keys_of_one_question_share_one_default():
    for keys in QUESTIONS.values():
        defaults = {repr(default_of(key)) for names in keys for key in names.split("|")}
        assert len(defaults) == 1, keys


def test_documented_names_are_there():
    documented = """
    gpu_optimization: use_chunk_loader chunk_size_gb batch_size num_workers pin_memory use_amp
      gradient_accumulation_steps empty_cache_every_n_epochs log_gpu_stats_every_n_batches
      prefetch_factor persistent_workers drop_last
    data: batch_size num_workers prefetch_factor persistent_workers pin_memory drop_last
    data.memory_efficient_mode: enabled use_lazy_loading lazy_cache_dir precompute_graphs
    data.memory_efficient_mode.ram_32gb_mode: max_training_samples gradient_accumulation
      empty_cache_frequency
    training: use_gpu_augmentation use_amp batch_size num_workers gradient_accumulation_steps lr
    training.student_distill: batch_size num_workers gradient_accumulation_steps
    gpu_augmentation: horizontal_flip_prob rotation_degrees brightness contrast saturation
    """
    section = ""
    for word in documented.split():
        if word.endswith(":"):
            section = word
        else:
            assert section[:-1] + "." + word in LEAVES


# --- precedence ----------------------------------------------------------------------------

RANKED = {question: keys for question, keys in QUESTIONS.items() if len(keys) > 1}


def test_order_of_sections_is_the_documented_one():
    order = ["training.student_distill", "training", RAM, "data", "gpu_optimization"]
    for keys in RANKED.values():
        ranks = [order.index(key.rpartition(".")[0]) for key in keys]
        assert ranks == sorted(ranks)
    assert len(QUESTIONS["batch_size"]) == 4
    assert len(QUESTIONS["accumulation_steps"]) == 4


@pytest.mark.parametrize("question", RANKED)
def test_more_specific_wins_and_the_loser_is_noted(question):
    keys = RANKED[question]
    for i, winner in enumerate(keys[:-1]):
        loser = keys[i + 1]
        base = {} if "workers" in question and question != "persistent_workers" else dict(WORKERS)
        value, other = another_value(LEAVES[winner]), default_of(loser)
        if value is False and other is None:
            other = True
        if question == "num_workers":
            base = {}
        settled = resolve(parse_config(nested(base | {winner: value, loser: other}), "f.yaml"))
        assert settled.values()[question] == value
        assert settled.reasons[question].startswith(f"{winner} (f.yaml:")
        (note,) = settled.notes
        assert note.startswith(f"{loser}: ")
        assert winner in note
        assert "more specific" in note
        assert note.count("f.yaml:") == 2


def test_equal_values_at_two_ranks_make_no_note():
    settled = resolve(parse_config("training: {batch_size: 7}\ndata: {batch_size: 7}"))
    assert settled.batch_size == 7
    assert settled.notes == ()


def test_unwritten_keys_say_nothing():
    # data.batch_size has a default of its own; only gpu_optimization speaks.
    settled = resolve(parse_config("gpu_optimization: {batch_size: 9}\ndata: {num_workers: 1}"))
    assert settled.batch_size == 9
    assert settled.is_default("drop_last")
    assert not settled.is_default("batch_size")


def test_two_names_at_one_rank_must_agree():
    text = "training:\n  lr: 0.001\n  learning_rate: 0.002\n"
    (line, *_) = problems_of(text)
    assert "f.yaml:3:3 training.learning_rate: 0.002 disagrees with training.lr: 0.001" in line
    assert "f.yaml:2:3" in line
    same = parse_config("training: {lr: 0.5, learning_rate: 0.5}")
    assert resolve(same).learning_rate == 0.5
    with pytest.raises(ConfigError, match="disagrees"):
        resolve(Config.model_validate({"training": {"lr": 0.1, "learning_rate": 0.2}}))


def test_set_beats_a_more_specific_key_of_the_file():
    text = "training: {batch_size: 64}"
    settled = resolve(parse_config(text, "f.yaml", ["gpu_optimization.batch_size=16"]))
    assert settled.batch_size == 16
    assert settled.reasons["batch_size"] == "gpu_optimization.batch_size (--set)"
    assert "training.batch_size: 64 (f.yaml:1:12) is not used" in settled.notes[0]
    assert "command line" in settled.notes[0]


def test_set_replaces_the_same_key():
    settled = resolve(parse_config("data: {batch_size: 64}", "f.yaml", ["data.batch_size=16"]))
    assert settled.batch_size == 16
    assert settled.notes == ()


def test_s1_accumulation_clash_is_settled_for_the_stage():
    text = """
data: {memory_efficient_mode: {ram_32gb_mode: {gradient_accumulation: 4}}}
training: {student_distill: {gradient_accumulation_steps: 2}, batch_size: 8}
"""
    settled = resolve(parse_config(text))
    assert settled.accumulation_steps == 2
    assert settled.samples_per_update == 16
    assert f"{RAM}.gradient_accumulation: 4" in settled.notes[0]


@pytest.mark.parametrize(
    ("text", "note"),
    [
        (
            "data: {memory_efficient_mode: {enabled: false, lazy_cache_dir: x}}",
            'lazy_cache_dir: "x" (f.yaml:1:48) has no effect: data.memory_efficient_mode.enabled',
        ),
        (
            "data: {memory_efficient_mode: {enabled: no, ram_32gb_mode: {gradient_accumulation: 3}}}",
            "gradient_accumulation: 3",
        ),
        ("gpu_optimization: {use_chunk_loader: false, chunk_size_gb: 3}", "chunk_size_gb: 3"),
        ("gpu_augmentation: {contrast: 0.3}", "use_gpu_augmentation is false"),
        ("training: {output_bound_mode: clamp}", "output_bound is null"),
    ],
)
def test_a_key_without_effect_is_noted(text, note):
    settled = resolve(parse_config(text, "f.yaml"))
    (said,) = settled.notes
    assert note in said
    assert "has no effect" in said


def test_disabled_memory_mode_takes_its_keys_back():
    off = (
        "data: {memory_efficient_mode: {enabled: false, ram_32gb_mode: {gradient_accumulation: 3}}}"
    )
    settled = resolve(parse_config(off))
    assert settled.accumulation_steps == 1
    assert settled.lazy_loading is False
    assert "enabled" in settled.reasons["lazy_loading"]


def test_chunk_size_means_gib():
    assert resolve(parse_config("gpu_optimization: {chunk_size_gb: 12.0}")).chunk_bytes == 12 * GIB
    assert resolve(parse_config("gpu_optimization: {chunk_size_gb: 0.5}")).chunk_bytes == GIB // 2


def test_workers_decide_what_null_means():
    without, with_two = resolve(Config()), resolve(parse_config("data: {num_workers: 2}"))
    assert (without.prefetch_factor, without.persistent_workers) == (None, False)
    assert (with_two.prefetch_factor, with_two.persistent_workers) == (2, True)
    torch_says = parse_config("data: {num_workers: 2, persistent_workers: false}")
    assert resolve(torch_says).persistent_workers is False


# --- precision and capture -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "precision", "use_amp"),
    [
        ("", "auto", True),
        ("training: {use_amp: true}", "auto", True),
        ("training: {use_amp: false}", "fp32", False),
        ("gpu_optimization: {use_amp: false}", "fp32", False),
        ("training: {use_amp: false, precision: auto}", "fp32", False),
        ("training: {use_amp: false, precision: tf32}", "tf32", False),
        ("training: {use_amp: true, precision: bf16}", "bf16", True),
        ("training: {precision: fp32}", "fp32", False),
        ("training: {precision: fp16}", "fp16", True),
    ],
)
def test_precision_and_use_amp_say_one_thing(text, precision, use_amp):
    settled = resolve(parse_config(text))
    assert (settled.precision, settled.use_amp) == (precision, use_amp)
    assert settled.notes == ()


@pytest.mark.parametrize(
    ("amp", "precision", "allowed"),
    [("false", "bf16", "fp32 or tf32"), ("true", "fp32", "auto, fp16 or bf16")],
)
def test_precision_against_use_amp_is_an_error_with_both_lines(amp, precision, allowed):
    text = f"training:\n  use_amp: {amp}\n  precision: {precision}\n"
    said = "\n".join(problems_of(text))
    assert f'f.yaml:3:3 training.precision: "{precision}" disagrees with training.use_amp' in said
    assert "(f.yaml:2:3)" in said
    assert allowed in said
    with pytest.raises(ConfigError, match="disagrees"):
        resolve(
            Config.model_validate({"training": {"use_amp": amp == "true", "precision": precision}})
        )


@pytest.mark.parametrize(
    ("text", "override", "precision", "loser"),
    [
        ("use_amp: true", "training.precision=fp32", "fp32", "use_amp"),
        ("use_amp: false", "training.precision=bf16", "bf16", "use_amp"),
        ("use_amp: false", "training.precision=auto", "auto", "use_amp"),
        ("precision: bf16", "training.use_amp=false", "fp32", "precision"),
        ("precision: fp32", "gpu_optimization.use_amp=true", "auto", "precision"),
    ],
)
def test_what_is_typed_decides_between_precision_and_use_amp(text, override, precision, loser):
    settled = resolve(parse_config(f"training: {{{text}}}", "f.yaml", [override]))
    assert settled.precision == precision
    assert settled.use_amp == (precision not in ("fp32", "tf32"))
    (note,) = settled.notes
    assert note.startswith(f"training.{loser}: ")
    assert "typed on the command line" in note


@pytest.mark.parametrize(
    ("written", "capture"),
    [
        ("on", "on"),
        ("off", "off"),
        ("true", "on"),
        ("false", "off"),
        ("auto", "auto"),
        ("'on'", "on"),
    ],
)
def test_capture_takes_the_words_that_yaml_reads_as_booleans(written, capture):
    assert resolve(parse_config(f"training: {{capture: {written}}}")).capture == capture
    assert resolve(parse_config("", overrides=[f"training.capture={written}"])).capture == capture


def test_capture_suggests_its_words():
    assert "try: off" in problems_of("training: {capture: offf, lr: 0}")[1]


# --- recipes -------------------------------------------------------------------------------


def test_options_keep_their_values_and_places():
    text = """\
recipe:
  name: forex
  options:
    d_model: 64
    ratios: [0.7, 0.2, 0.1]
    embargo: null
"""
    config = parse_config(text, "f.yaml", ["recipe.options.layers=3", "recipe.options.d_model=32"])
    settled = resolve(config)
    assert settled.recipe_options == {
        "d_model": 32, "ratios": [0.7, 0.2, 0.1], "embargo": None, "layers": 3,
    }  # fmt: skip
    assert settled.reasons["recipe_options.ratios"] == "recipe.options.ratios (f.yaml:5:5)"
    assert settled.reasons["recipe_options.d_model"] == "recipe.options.d_model (--set)"
    assert config.written()["recipe.options"] == settled.recipe_options
    assert parse_config(dump_config(config)) == config
    assert parse_config(describe_tree(config)).written() == config.written()
    json.dumps(settled.to_json())
    hash(settled)


def test_options_without_a_recipe_have_no_effect():
    settled = resolve(parse_config("recipe: {options: {d_model: 64}}", "f.yaml"))
    assert settled.recipe_options == {}
    assert "recipe.options" in settled.notes[0]
    assert "recipe.name is null" in settled.notes[0]


@pytest.mark.parametrize(
    ("text", "override", "said"),
    [
        ("recipe: {name: forx}", "", "forex"),
        ("recipe: {options: 5}", "", "a section of names and values"),
        ("recipe: {options: [a]}", "", "a list"),
        ("recipe: {options: {d: 010}}", "", "base 8"),
        ("", "recipe.options.a.b=1", "recipe.options is not a section"),
        ("", "recipe.opts.a=1", "no key 'opts'"),
        ("recipe: {store: ''}", "", "text"),
    ],
)
def test_mistakes_of_recipes(text, override, said):
    assert said in "\n".join(problems_of(text, [override] if override else []))


def test_an_empty_options_section_is_nothing():
    assert parse_config("recipe:\n  name: forex\n  options:\n    # d_model: 3\n").written() == {
        "recipe.name": "forex"
    }


# --- mistakes ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "where", "given", "allowed", "fix"),
    [
        ("training:\n  lr: 8e-4", "2:3 training.lr", "'8e-4' is text", "above 0", "8.0e-4 or 0.0008"),
        ("training:\n  lr: 1e5", "2:3 training.lr", "text", "above 0", "1.0e+5 or 100000"),
        ("training:\n  lr: '0.5'", "2:3 training.lr", "in quotes", "above 0", "0.5"),
        ("training: {lr: 0}", "1:12 training.lr", "is 0", "above 0", "0.0001"),
        ("training: {lr: .inf}", "1:12 training.lr", "Infinity", "above 0", "0.0001"),
        ("training: {lr: .nan}", "1:12 training.lr", "NaN", "above 0", "0.0001"),
        ("training: {lr: yes}", "1:12 training.lr", "true (a yes/no", "above 0", ""),
        ("training: {lr: 0,5}", "1:12 training.lr", "", "", ""),
        ("data:\n  num_workers: 4-6", "2:3 data.num_workers", "'4-6' is text", "0 to", "4 or 6"),
        ("data: {num_workers: -1}", "1:8 data.num_workers", "is -1", "0 to 1,024", ""),
        ("data: {num_workers: 2.5}", "1:8 data.num_workers", "2.5", "whole number", ""),
        ("data: {num_workers: 2.0}", "1:8 data.num_workers", "2.0", "whole number", ""),
        ("data: {num_workers: 1e1}", "1:8 data.num_workers", "text", "whole number", "10"),
        ("data: {batch_size: 0}", "1:8 data.batch_size", "is 0", "1 or more", "128"),
        ("data: {batch_size: true}", "1:8 data.batch_size", "yes/no", "whole number", "128"),
        ("data: {batch_size: }", "1:8 data.batch_size", "empty", "whole number", "128"),
        ("data: {batch_size: [1]}", "1:8 data.batch_size", "a list", "whole number", "128"),
        ("data: {batch_size: {a: 1}}", "1:8 data.batch_size", "a section", "whole number", "128"),
        ("data: {batch_size: 010}", "1:20 data.batch_size", "base 8", "decimal", "10"),
        ("data: {batch_size: 1:30}", "1:20 data.batch_size", "base 60", "decimal", "130"),
        ("data: {pin_memory: 1}", "1:8 data.pin_memory", "is 1", "true or false", "true"),
        ("data: {pin_memory: 'True'}", "1:8 data.pin_memory", "text", "true or false", "true"),
        ("data: {prefetch_factor: 0}", "1:8 data.prefetch_factor", "is 0", "or null", "null"),
        ("gpu_optimization: {chunk_size_gb: 0}", "1:20", "is 0", "above 0", "null"),
        ("gpu_optimization: {chunk_size_gb: 12GB}", "1:20", "'12GB' is text", "above 0", "12"),
        ("gpu_augmentation: {horizontal_flip_prob: 1.01}", "1:20", "1.01", "from 0 to 1", "0.5"),
        ("gpu_augmentation: {rotation_degrees: 181}", "1:20", "181", "0 to 180", "15.0"),
        ("training: {output_bound_mode: Clamp}", "1:12", "'Clamp'", "soft or clamp", "clamp"),
        ("training: {batch_sizes: 3}", "1:12", "no key 'batch_sizes'", "lr", "training.batch_size"),
        ("trainng: {lr: 3}", "1:1 trainng", "no key 'trainng'", "training", "training"),
        ("use_amp: true", "1:1 use_amp", "at the top level", "", "training.use_amp"),
        ("data: {ram_32gb_mode: {}}", "1:8", "no key 'ram_32gb_mode'", "", RAM),
        ("training.lr: 0.1", "1:1 training.lr", "no key", "", "nest it: training: {lr: …}"),
        ("data: {qqqq: 1}", "1:8 data.qqqq", "no key 'qqqq'", "batch_size", "delete it"),
        ("training: 5", "1:1 training", "is 5", "section with the keys batch_size", "training: {"),
        ("- training", "1:1", "is a list", "gpu_optimization", "gpu_optimization:"),
        ("just words", "1:1", "text", "gpu_optimization", "gpu_optimization:"),
        ("data: {1: 2}", "1:8 data", "'1' is not text", "names", "'1':"),
        ("data: {on: 2}", "1:8 data", "'on' is not text", "names", ""),
        ("data: {batch_size: 2020-01-01}", "1:20 data.batch_size", "timestamp", "numbers", ""),
        ("data: {batch_size: !!python/name:os.system x}", "1:20", "python/name", "numbers", ""),
        ("data: {batch_size: !!int x}", "1:20 data.batch_size", "cannot be read as int", "", ""),
        ("data:\n\tbatch_size: 3", "2:1", "a tab", "spaces", "expand -t 2 f.yaml"),
        ("data: {batch_size: 3", "", "not YAML", "", ""),
        ("data: {}\n---\ntraining: {}", "2:1", "second document", "one document", "---"),
        ("data: \x07", "1:7", "U+0007", "printable", "delete"),
        ("a: &a [*a]", "1:4 a", "contains itself", "no cycles", "write it out"),
        ("data: {<<: 5}", "1:12 data", "not a section", "alias", "<<: *name"),
    ],
)  # fmt: skip
def test_each_mistake_has_place_given_allowed_and_fix(text, where, given, allowed, fix):
    with pytest.raises(ConfigError) as caught:
        parse_config(text, "f.yaml")
    said = str(caught.value)
    assert said.startswith("f.yaml:") or "\nf.yaml:" in said
    for part in (f"f.yaml:{where}", given, allowed, fix):
        assert part in said


def test_all_problems_are_reported_at_once_in_the_order_of_the_file():
    text = """\
training:
  lr: 8e-4
  batch_sise: 3
data:
  num_workers: 4-6
  batch_size: 1
  batch_size: 2
gpu_augmentation: 3
other: 1
"""
    first, *lines = problems_of(text, ["training.init_gain=zero"])
    assert first == "7 problems:"
    assert [line.split(" ")[0] for line in lines] == [
        "f.yaml:2:3", "f.yaml:3:3", "f.yaml:5:3", "f.yaml:7:3", "f.yaml:8:1", "f.yaml:9:1", "--set",
    ]  # fmt: skip
    assert all("; allowed: " in line and "; try: " in line for line in lines)


def test_duplicate_keys_name_both_lines():
    (line, *_) = problems_of("data:\n  batch_size: 1\n  num_workers: 2\n  batch_size: 3\n")
    assert line == "f.yaml:4:3 data.batch_size: written twice, on lines 2 and 4"


@pytest.mark.parametrize(
    ("text", "key", "needs"),
    [
        ("data:\n  prefetch_factor: 2", "data.prefetch_factor", "by default"),
        (
            "data:\n  prefetch_factor: 2\ngpu_optimization:\n  num_workers: 0",
            "data.prefetch_factor",
            "by gpu_optimization.num_workers (f.yaml:4:3)",
        ),
        ("gpu_optimization:\n  persistent_workers: true", "persistent_workers", "by default"),
    ],
)
def test_worker_options_need_workers(text, key, needs):
    said = "\n".join(problems_of(text))
    assert f"f.yaml:2:3 {'' if '.' in key else 'gpu_optimization.'}{key}" in said
    assert "num_workers is 0" in said
    assert needs in said
    assert "data.num_workers: 4, or delete" in said


def test_torch_agrees_that_worker_options_need_workers():
    torch_data = pytest.importorskip("torch.utils.data")
    for option in ({"prefetch_factor": 2}, {"persistent_workers": True}):
        with pytest.raises(ValueError, match="num_workers"):
            torch_data.DataLoader([1], num_workers=0, **option)


def test_nothing_left_to_train_on_is_refused():
    text = """\
data:
  batch_size: 32
  drop_last: true
  memory_efficient_mode: {ram_32gb_mode: {max_training_samples: 31}}
"""
    assert "31 samples are less than one batch of 32" in "\n".join(problems_of(text))
    assert resolve(parse_config(text.replace("31", "32"))).max_training_samples == 32
    assert resolve(parse_config(text.replace("true", "false"))).max_training_samples == 31


def test_an_unreadable_key_makes_no_second_problem():
    # num_workers was meant to be 4 or 6, so prefetch_factor is no mistake.
    said = problems_of("data:\n  num_workers: 4-6\n  prefetch_factor: 2\n")
    assert "4-6" in said[0]
    assert "prefetch" not in "".join(said)
    # Here the unreadable key would have lost anyway.
    said = problems_of(
        "data:\n  num_workers: 0\n  prefetch_factor: 2\ngpu_optimization:\n  num_workers: 4-6\n"
    )
    assert said[0] == "2 problems:"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("training.lr", "--set: 'training.lr' has no '='; allowed: key=value"),
        ("training.lr=8e-4", "--set training.lr: '8e-4' is text"),
        ("training={lr: 1}", "is a section"),
        ("trainin.lr=1", "no key 'trainin' at the top level"),
        ("training.lrr=1", "no key 'lrr'"),
        ("training.lr.x=1", "training.lr is not a section"),
        ("=1", "'=1' has no key"),
        ("training.lr=[", "not YAML"),
        ("training.lr=", "is empty"),
        ("data.prefetch_factor=2", "needs workers"),
    ],
)
def test_overrides_are_checked_like_the_file(override, said):
    text = "\n".join(problems_of("", [override]))
    assert text.startswith("--set")
    assert said.removeprefix("--set: ").split(";")[0] in text


def test_overrides_given_twice():
    assert "given twice" in problems_of("", ["data.batch_size=1", "data.batch_size=2"])[0]
    config = parse_config("", overrides=["data.batch_size=3", "data.batch_size=3"])
    assert resolve(config).batch_size == 3


def test_alias_bomb_and_deep_nesting_end_quickly():
    bomb = "a: &a [1,1,1,1,1,1,1,1,1,1]\n"
    for name, below in zip("bcdefghi", "abcdefgh", strict=True):
        bomb += f"{name}: &{name} [{','.join([f'*{below}'] * 10)}]\n"
    assert any("unfold" in line for line in problems_of(bomb))
    assert any("nested too deep" in line or "unfold" in line for line in problems_of("[" * 5000))
    assert any("levels" in line for line in problems_of("a: " + "[" * 60 + "]" * 60))


# --- what is fine --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["", "\n", "# nothing\n", "---\n", "{}", "null", "training:\n", "data:\n  # x\n"]
)
def test_an_empty_file_or_section_is_the_defaults(text):
    config = parse_config(text)
    assert config == Config()
    assert resolve(config) == resolve(Config())
    assert all(reason.startswith("default") for reason in resolve(config).reasons.values())


def test_anchors_merges_and_yes_no():
    text = """\
data: &loading
  batch_size: 16
  pin_memory: no
gpu_optimization:
  num_workers: 1_0
  <<: *loading
  batch_size: 8
training:
  use_amp: off
"""
    config = parse_config(text, "f.yaml")
    assert config.written() == {
        "data.batch_size": 16,
        "data.pin_memory": False,
        "gpu_optimization.num_workers": 10,
        "gpu_optimization.batch_size": 8,
        "gpu_optimization.pin_memory": False,
        "training.use_amp": False,
    }
    assert str(config.place_of("gpu_optimization.batch_size")) == "f.yaml:7:3"
    assert str(config.place_of("gpu_optimization.pin_memory")) == "f.yaml:3:3"


def test_the_first_of_merged_sections_wins():
    text = """\
data: &a {batch_size: 1}
gpu_optimization: &b {batch_size: 2, pin_memory: false}
training: {student_distill: {<<: [*a], num_workers: 1}, <<: [*a, *b]}
"""
    with pytest.raises(ConfigError, match="pin_memory"):
        parse_config(text)
    config = parse_config(text.replace(", pin_memory: false", ""), "f.yaml")
    assert config.written()["training.batch_size"] == 1
    assert str(config.place_of("training.batch_size")) == "f.yaml:1:11"


def test_files(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_bytes(b"\xef\xbb\xbfdata: {batch_size: 3}\r\n")
    assert resolve(load_config(file)).batch_size == 3
    assert load_config(file).place_of("data").column == 1
    file.write_bytes(b"\xef\xbb\xbf# only a comment")
    assert load_config(file) == Config()
    file.write_bytes(b"data:\n  batch_size: 3 # caf\xe9\n")
    with pytest.raises(ConfigError, match=r"c\.yaml:2:22: byte 0xe9 at offset 27 is not UTF-8"):
        load_config(file)
    file.write_bytes("data: {}".encode("utf-16"))
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_config(file)
    file.write_bytes(b"#" * (1024 * 1024 + 1))
    with pytest.raises(ConfigError, match="bytes"):
        load_config(file)
    with pytest.raises(ConfigError, match="Is a directory"):
        load_config(tmp_path)
    with pytest.raises(ConfigError, match="No such file"):
        load_config(tmp_path / "absent.yaml")
    file.write_text("data: {batch_size: 0}")
    config, problems = check_config(str(file))
    assert config is None
    assert problems[0].key == "data.batch_size"
    assert problems[0].place.line == 1


def test_a_config_cannot_be_changed_and_travels():
    config = parse_config("data: {batch_size: 3}")
    with pytest.raises(ValueError, match="frozen"):
        config.data.batch_size = 4
    twin = pickle.loads(pickle.dumps(config))
    assert twin == config
    assert twin.place_of("data.batch_size") == config.place_of("data.batch_size")
    settled = resolve(config)
    assert pickle.loads(pickle.dumps(settled)) == settled
    assert replace(settled, batch_size=5).batch_size == 5
    json.dumps(settled.to_json())


# --- writing -------------------------------------------------------------------------------


def legal(leaf: dict) -> st.SearchStrategy:
    options = []
    for kind in leaf.get("anyOf", [leaf]):
        if "enum" in kind:
            options.append(st.sampled_from(kind["enum"]))
        elif kind["type"] == "integer":
            options.append(st.integers(kind["minimum"], kind["maximum"]))
        elif kind["type"] == "number":
            low = kind.get("minimum", kind.get("exclusiveMinimum"))
            above = "exclusiveMinimum" in kind
            options.append(st.floats(low, kind["maximum"], exclude_min=above, allow_nan=False))
        elif kind["type"] == "string":
            options.append(st.text(min_size=1))
        elif kind["type"] == "object":
            plain = st.none() | st.booleans() | st.integers() | st.floats(-9, 9) | st.text()
            some = plain | st.lists(plain, max_size=3)
            options.append(st.dictionaries(st.text(max_size=20), some, max_size=3))
        else:
            options.append({"boolean": st.booleans(), "null": st.none()}[kind["type"]])
    return st.one_of(options)


configs = st.fixed_dictionaries({}, optional={key: legal(leaf) for key, leaf in LEAVES.items()})


@settings(max_examples=60, deadline=None)
@example({"data.memory_efficient_mode.lazy_cache_dir": "\n"})
@example({"data.memory_efficient_mode.lazy_cache_dir": "a\x85b\u2028"})
@example({"data.memory_efficient_mode.lazy_cache_dir": "a: b # c" * 40})
@given(configs)
def test_dump_round_trips(flat):
    tree = yaml.safe_load(nested(flat)) or {}
    config = Config.model_validate(tree)
    text = dump_config(config)
    try:
        again = parse_config(text)
    except ConfigError:
        with pytest.raises(ConfigError):
            resolve(config)  # it is refused either way: keys that cannot stand together
        return
    assert again == config
    assert again.written() == config.written()
    assert resolve(again) == resolve(config)
    assert parse_config(describe_tree(config)).written() == config.written()


def test_describe_tree_lists_every_key_and_says_nothing():
    text = describe_tree(Config())
    assert parse_config(text).written() == {}
    everything = text.replace("# ", "").splitlines()
    for key in LEAVES:
        assert any(line.strip().startswith(key.rpartition(".")[2] + ":") for line in everything)


@settings(max_examples=300, deadline=None)
@given(
    st.one_of(
        st.text(max_size=60),
        st.lists(
            st.sampled_from(
                ["data:", "training:", "\n", "  ", "lr", ": ", "&a", "*a", "<<", "[", "]", "{", "}",
                 "8e-4", "~", "!!int", "'", '"', "- ", "num_workers", "?", "|", ">", "%", "\t", "9"]
            ),
            max_size=25,
        ).map("".join),
    )
)  # fmt: skip
def test_any_text_gives_a_config_or_a_config_error(text):
    said = ""
    try:
        parse_config(text, "f.yaml")
    except ConfigError as error:
        said = str(error)
    assert not said or "f.yaml" in said


# --- schema and presets --------------------------------------------------------------------


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


@settings(max_examples=200, deadline=None)
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


def test_shipped_schema_is_in_step():
    shipped = json.loads((CONFIGS / "schema.json").read_text(encoding="utf-8"))
    assert shipped == config_schema(), "run: stoker config schema > configs/schema.json"


PRESETS: dict[str, dict[str, object]] = {
    "segmentation_best": {
        "batch_size": 32, "num_workers": 4, "use_amp": True,
        "augmentation.horizontal_flip_prob": 0.5, "augmentation.rotation_degrees": 15.0,
        "augmentation.brightness": 0.2, "augmentation.contrast": 0.2,
    },
    "segmentation_low_memory": {
        "batch_size": 16, "num_workers": 2, "use_amp": True,
        "augmentation.horizontal_flip_prob": 0.5, "augmentation.rotation_degrees": 0.0,
        "augmentation.brightness": 0.0, "augmentation.contrast": 0.0,
        "augmentation.saturation": 0.0,
    },
    "segmentation_debug": {
        "batch_size": 8, "num_workers": 0, "use_amp": False, "augmentation": None,
    },
    "s0_chunk_loader": {
        "use_chunk_loader": True, "chunk_bytes": 12 * GIB, "batch_size": 128, "num_workers": 0,
        "pin_memory": True, "use_amp": True, "accumulation_steps": 1, "prefetch_factor": None,
        "persistent_workers": False, "drop_last": False, "empty_cache_every_n_epochs": 1,
        "log_gpu_stats_every_n_batches": 100,
    },
    "s1_massspec": {
        "batch_size": 32, "num_workers": 4, "accumulation_steps": 2, "lazy_loading": True,
        "lazy_cache_dir": "data/processed/lazy_cache", "precompute_graphs": False,
        "max_training_samples": None, "empty_cache_every_n_batches": 50,
    },
    "s4_tabular": {
        "batch_size": 1024, "accumulation_steps": 1, "num_workers": 8, "persistent_workers": True,
        "pin_memory": True, "prefetch_factor": 4, "init_gain": 0.5, "output_bound": 10.0,
        "learning_rate": 1e-4,
    },
    "forex": {
        "recipe": "forex", "store": "stores/forex", "run_dir": "runs/forex", "batch_size": 128,
        "epochs": 20, "learning_rate": 1e-3, "precision": "auto", "capture": "auto",
        "clip_norm": 1.0, "checkpoint_every_steps": 1000,
    },
    "massspec": {
        "recipe": "massspec", "store": "stores/massspec", "run_dir": "runs/massspec",
        "batch_size": 100, "epochs": 30, "learning_rate": 1e-3,
    },
    "segmentation": {
        "recipe": "segmentation", "store": "stores/segmentation", "run_dir": "runs/segmentation",
        "batch_size": 32, "epochs": 100, "learning_rate": 8e-4,
        "augmentation.horizontal_flip_prob": 0.5, "augmentation.rotation_degrees": 15.0,
        "augmentation.brightness": 0.2, "augmentation.contrast": 0.2,
    },
    "tabular": {
        "recipe": "tabular", "store": "stores/tabular", "run_dir": "runs/tabular",
        "batch_size": 1024, "epochs": 20, "learning_rate": 1e-4, "init_gain": 0.5,
        "output_bound": 10.0,
    },
}  # fmt: skip


def test_every_shipped_config_has_documented_values():
    assert {file.stem for file in CONFIGS.glob("*.yaml")} == set(PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_give_the_documented_values(name):
    file = CONFIGS / f"{name}.yaml"
    text = file.read_text(encoding="utf-8")
    assert text.startswith("# yaml-language-server: $schema=schema.json\n")
    settled = resolve(load_config(file))
    assert settled.notes == ()
    values = settled.values()
    assert {key: values[key] for key in PRESETS[name]} == PRESETS[name]
    assert schema_accepts(SCHEMA, yaml.safe_load(text), SCHEMA)


@pytest.mark.parametrize("name", [name for name in PRESETS if "recipe" in PRESETS[name]])
def test_configs_of_recipes_give_options_that_the_recipe_takes(name):
    from stoker.recipes.catalogue import choose_recipe

    chosen = choose_recipe(resolve(load_config(CONFIGS / f"{name}.yaml")))
    assert chosen.recipe.name == name
    assert chosen.notes == ()


def test_docs_name_every_key():
    page = (CONFIGS.parent / "docs" / "config.md").read_text(encoding="utf-8")
    for key, leaf in LEAVES.items():
        (row,) = [line for line in page.splitlines() if line.startswith(f"| `{key}` |")]
        assert leaf["description"] in row, f"{key}: the page tells something else"
        assert f"| {describe_allowed(leaf)} |" in row
