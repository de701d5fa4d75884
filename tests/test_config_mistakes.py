"""Mistakes in config files: each has its place, what was given, what is allowed and what to type."""

from __future__ import annotations

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from stoker.config import parse_config, resolve
from stoker.config.load import key_schemas
from stoker.errors import ConfigError
from test_config import RAM, problems_of


@pytest.mark.parametrize(
    ("text", "where", "given", "allowed", "fix"),
    [
        ("training:\n  lr: '8e-4'", "2:3 training.lr", "'8e-4' is text (in quotes)", "above 0", "8e-4"),
        ("training:\n  lr: 1e30", "2:3 training.lr", "1e+30", "above 0", "0.0001"),
        ("training:\n  lr: '0.5'", "2:3 training.lr", "in quotes", "above 0", "0.5"),
        ("training: {lr: 0}", "1:12 training.lr", "is 0", "above 0", "0.0001"),
        ("training: {lr: .inf}", "1:12 training.lr", "Infinity", "above 0", "0.0001"),
        ("training: {lr: .nan}", "1:12 training.lr", "NaN", "above 0", "0.0001"),
        ("training: {lr: yes}", "1:12 training.lr", "true (a yes/no", "above 0", ""),
        ("training: {lr: 0,5}", "1:12 training.lr", "", "", ""),
        ("data:\n  num_workers: 4-6", "2:3 data.num_workers", "'4-6' is text", "0 to", "4 or 6"),
        ("data: {num_workers: -1}", "1:8 data.num_workers", "is -1", "0 to 1,024", ""),
        ("data: {num_workers: 2.5}", "1:8 data.num_workers", "2.5", "whole number", ""),
        ("data: {num_workers: 2.0}", "1:8 data.num_workers", "2.0", "whole number", "2"),
        ("data: {num_workers: 1e1}", "1:8 data.num_workers", "10.0", "whole number", "10"),
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
        ("training.lr: 0.1", "1:1 training.lr", "no key", "", "training: {lr: 0.0001}"),
        ("data: {qqqq: 1}", "1:8 data.qqqq", "no key 'qqqq'", "batch_size", "delete it"),
        ("recipe_options: {}", "1:1 recipe_options", "at the top level", "recipe", "recipe.options"),
        ("training_lr: 1", "1:1 training_lr", "at the top level", "training", "training.lr"),
        ("training: 5", "1:1 training", "is 5", "section with the keys epochs", "training: {"),
        ("- training", "1:1", "is a list", "gpu_optimization", "stoker config init"),
        ("just words", "1:1", "text", "gpu_optimization", "stoker config init"),
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
    assert said.startswith("f.yaml:") or "\n  f.yaml:" in said
    for part in (f"f.yaml:{where}", given, allowed, fix):
        assert part in said


def test_all_problems_are_reported_at_once_in_the_order_of_the_file():
    text = """\
training:
  lr: fast
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
    assert [line.split()[0] for line in lines] == [
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
        ("training.lr='8e-4'", "--set training.lr: '8e-4' is text"),
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


NUMBERS = sorted(
    key
    for key, schema in key_schemas().items()
    if not key.endswith("prefetch_factor")  # which also needs workers
    and any(
        option.get("type") in ("integer", "number") for option in [schema, *schema.get("anyOf", [])]
    )
)


@given(st.sampled_from(NUMBERS), st.floats() | st.integers())
def test_what_is_suggested_for_a_number_is_accepted(key, value):
    word = yaml.safe_dump(value).split("\n")[0]
    try:
        parse_config("{}", overrides=[f"{key}={word}"])
    except ConfigError as error:
        lines = str(error).split("\n")
        advice = next(line.removeprefix("Try: ") for line in lines if line.startswith("Try: "))
        for better in advice.removesuffix(" (the default), or delete the line").split(" or "):
            parse_config("{}", overrides=[f"{key}={better}"])
