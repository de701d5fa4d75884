"""Config files: every key is an answer, every mistake has a line, every default a source."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import yaml
from hypothesis import assume, example, given
from hypothesis import strategies as st

import stoker
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
from stoker.config.load import rewrite_config
from stoker.config.options import LAYOUTS, LAZY, RAM, describe_allowed
from stoker.config.resolve import PLACES
from stoker.config.tree import default_of, key_schemas
from stoker.errors import ConfigError
from stoker.units import GIB

CONFIGS = Path(stoker.__file__).parent / "configs"
AUGMENT_ON = {"training.use_gpu_augmentation": True}
WORKERS = {"data.num_workers": 3}

_NUM_WORKERS = {"data.num_workers", "data.prefetch_factor", "data.persistent_workers"}
_AMP = {"training.use_amp", "training.precision"}
# What must be written as well for a key to be heard.
CONTEXT: dict[str, dict[str, object]] = {
    "training.output_bound_mode": {"training.output_bound": 1.0},
    "recipe.options": {"recipe.name": "forex"},
    **{key: AUGMENT_ON for key in key_schemas() if key.startswith("gpu_augmentation.")},
    **{
        key: WORKERS
        for key in key_schemas()
        if key.endswith(("prefetch_factor", "persistent_workers"))
    },
}


def moved_by(key: str) -> set[str]:
    """Return the keys of Settings that another value of a key changes: itself, and what follows from it."""
    home = LAYOUTS.get(key, key)
    for group, first in ((_NUM_WORKERS, "data.num_workers"), (_AMP, "")):
        if home in group and first in ("", home):
            return group
    return {home}


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
    return {key for key in old.keys() & new.keys() if old[key] != new[key]}


def problems_of(text: str, overrides=()) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_config(text, "f.yaml", overrides)
    return str(caught.value).splitlines()


# --- every key -----------------------------------------------------------------------------


def test_the_schema_has_every_place_of_every_key():
    assert (
        set(LEAVES) == set(key_schemas()) == {place for all_ in PLACES.values() for place in all_}
    )


@pytest.mark.parametrize("key", key_schemas())
def test_every_key_is_heard(key):
    keys, context = moved_by(key), CONTEXT.get(key, {})
    before = resolve(parse_config(nested(context)))
    toggled = parse_config(nested(context | {key: another_value(LEAVES[key])}))
    after = resolve(toggled)
    assert changed(before, after) == keys
    for each in keys:
        assert key in after.reasons[each] or after.reasons[each].startswith("default")
    assert any(after.reasons[each].startswith(key) for each in keys)


def test_every_key_has_words_a_unit_or_kind_and_a_default():
    for key in key_schemas():
        leaf = LEAVES[key]
        assert leaf["description"].endswith("."), key
        assert "default" in leaf, key
        assert describe_allowed(leaf), key
        kinds = {option.get("type") for option in leaf.get("anyOf", [leaf])}
        objects = {"object"} if key == "recipe.options" else set()
        assert kinds <= {"integer", "number", "boolean", "string", "null"} | objects, key


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

RANKED = {
    home: [key for key in places if key not in ("training.learning_rate", f"{LAZY}.enabled")]
    for home, places in PLACES.items()
    if len(places) > 1 and home != "training.lr"
}


def test_order_of_sections_is_the_documented_one():
    order = ["training.student_distill", "training", RAM, LAZY, "data", "gpu_optimization"]
    for keys in RANKED.values():
        ranks = [order.index(key.rpartition(".")[0]) for key in keys]
        assert ranks == sorted(ranks)
    assert len(PLACES["training.batch_size"]) == 4
    assert len(PLACES["training.gradient_accumulation_steps"]) == 4


@pytest.mark.parametrize("question", RANKED)
def test_more_specific_wins_and_the_loser_is_noted(question):
    keys = RANKED[question]
    for i, winner in enumerate(keys[:-1]):
        loser = keys[i + 1]
        base = {} if question == "data.num_workers" else dict(WORKERS)
        value, other = another_value(LEAVES[winner]), default_of(loser)
        if value is False and other is None:
            other = True
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
    assert settled.training.batch_size == 7
    assert settled.notes == ()


def test_unwritten_keys_say_nothing():
    # data.batch_size has a default of its own; only gpu_optimization speaks.
    settled = resolve(parse_config("gpu_optimization: {batch_size: 9}\ndata: {num_workers: 1}"))
    assert settled.training.batch_size == 9
    assert settled.is_default("data.drop_last")
    assert not settled.is_default("training.batch_size")


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
    assert settled.training.batch_size == 16
    assert settled.reasons["training.batch_size"] == "gpu_optimization.batch_size (--set)"
    assert "training.batch_size: 64 (f.yaml:1:12) is not used" in settled.notes[0]
    assert "command line" in settled.notes[0]


def test_set_replaces_the_same_key():
    settled = resolve(parse_config("data: {batch_size: 64}", "f.yaml", ["data.batch_size=16"]))
    assert settled.training.batch_size == 16
    assert settled.notes == ()


def test_s1_accumulation_clash_is_settled_for_the_stage():
    text = """
data: {memory_efficient_mode: {ram_32gb_mode: {gradient_accumulation: 4}}}
training: {student_distill: {gradient_accumulation_steps: 2}, batch_size: 8}
"""
    settled = resolve(parse_config(text))
    assert settled.training.gradient_accumulation_steps == 2
    assert settled.training.samples_per_update == 16
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
    assert settled.training.gradient_accumulation_steps == 1
    assert settled.data.use_lazy_loading is False
    assert "enabled" in settled.reasons["data.use_lazy_loading"]


def test_chunk_size_means_gib():
    assert (
        resolve(parse_config("gpu_optimization: {chunk_size_gb: 12.0}")).data.chunk_bytes
        == 12 * GIB
    )
    assert (
        resolve(parse_config("gpu_optimization: {chunk_size_gb: 0.5}")).data.chunk_bytes == GIB // 2
    )


def test_workers_decide_what_null_means():
    without, with_two = resolve(Config()), resolve(parse_config("data: {num_workers: 2}"))
    assert (without.data.prefetch_factor, without.data.persistent_workers) == (None, False)
    assert (with_two.data.prefetch_factor, with_two.data.persistent_workers) == (2, True)
    torch_says = parse_config("data: {num_workers: 2, persistent_workers: false}")
    assert resolve(torch_says).data.persistent_workers is False


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
    assert (settled.training.precision, settled.training.use_amp) == (precision, use_amp)
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
    assert settled.training.precision == precision
    assert settled.training.use_amp == (precision not in ("fp32", "tf32"))
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
    assert resolve(parse_config(f"training: {{capture: {written}}}")).training.capture == capture
    assert (
        resolve(parse_config("", overrides=[f"training.capture={written}"])).training.capture
        == capture
    )


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
    assert settled.recipe.options == {
        "d_model": 32, "ratios": [0.7, 0.2, 0.1], "embargo": None, "layers": 3,
    }  # fmt: skip
    assert settled.reasons["recipe.options.ratios"] == "recipe.options.ratios (f.yaml:5:5)"
    assert settled.reasons["recipe.options.d_model"] == "recipe.options.d_model (--set)"
    assert config.written()["recipe.options"] == settled.recipe.options
    assert parse_config(dump_config(config)) == config
    assert parse_config(describe_tree(config)).written() == config.written()
    json.dumps(settled.to_json())
    hash(settled)


def test_options_without_a_recipe_have_no_effect():
    settled = resolve(parse_config("recipe: {options: {d_model: 64}}", "f.yaml"))
    assert settled.recipe.options == {}
    assert "recipe.options" in settled.notes[0]
    assert "recipe.name is null" in settled.notes[0]


@pytest.mark.parametrize(
    ("text", "override", "said"),
    [
        ("recipe: {name: ''}", "", "text"),
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
    assert resolve(load_config(file)).training.batch_size == 3
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
    with pytest.raises(AttributeError, match="cannot assign"):
        config.tree = {}
    twin = pickle.loads(pickle.dumps(config))
    assert twin == config
    assert twin.place_of("data.batch_size") == config.place_of("data.batch_size")
    settled = resolve(config)
    assert pickle.loads(pickle.dumps(settled)) == settled
    assert settled.changed({"training.batch_size": 5}).training.batch_size == 5
    json.dumps(settled.to_json())


@given(
    st.from_regex(
        r"[-+]?([0-9]{1,6}(\.[0-9]{0,4})?|\.[0-9]{1,4})[eE][-+]?[0-9]{1,2}", fullmatch=True
    )
)
@example("8e-4")
@example("1E3")
@example(".5e+2")
def test_a_number_with_an_exponent_is_a_number_everywhere(word):
    text = f"recipe: {{name: forex, options: {{a: {word}, b: [{word}], c: '{word}'}}}}\n"
    for config in (
        parse_config(text),
        parse_config("recipe: {name: forex}", overrides=[f"recipe.options.{name}={value}" for name, value in
            (("a", word), ("b", f"[{word}]"), ("c", f"'{word}'"))]),
    ):  # fmt: skip
        assert config.written()["recipe.options"] == {
            "a": float(word),
            "b": [float(word)],
            "c": word,
        }
        assert parse_config(dump_config(config)) == config
        assert parse_config(describe_tree(config)) == config
    changed = rewrite_config(text, {"recipe.options.a": word, "recipe.options.c": float(word)})
    assert parse_config(changed).written()["recipe.options"]["a"] == word
    assert parse_config(changed).written()["recipe.options"]["c"] == float(word)


def test_a_learning_rate_with_an_exponent_needs_no_point():
    assert resolve(parse_config("training: {lr: 8e-4}")).training.lr == 8e-4
    assert resolve(parse_config("", overrides=["training.lr=1E-3"])).training.lr == 1e-3


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


@example({"data.memory_efficient_mode.lazy_cache_dir": "\n"})
@example({"data.memory_efficient_mode.lazy_cache_dir": "a\x85b\u2028"})
@example({"data.memory_efficient_mode.lazy_cache_dir": "a: b # c" * 40})
@given(configs)
def test_dump_round_trips(flat):
    assume("\0" not in str(list(flat.values())).replace("\\x00", "\0"))  # refused in any text
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
    for key in PLACES:
        assert any(line.strip().startswith(key.rpartition(".")[2] + ":") for line in everything)


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
