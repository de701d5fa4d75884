"""Changed configs: the values asked for and no others, comments and order kept."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.config import parse_config, shipped_configs
from stoker.config.load import _yaml_word, find_key, rewrite_config
from stoker.errors import ConfigError

CONFIGS = sorted(shipped_configs().values())
CHANGES = {
    "training.batch_size": st.integers(1, 10_000),
    "training.capture": st.sampled_from(["auto", "on", "off"]),
    "training.lr": st.floats(1e-6, 1.0),
    "training.clip_norm": st.none() | st.floats(0.1, 10),
    "training.student_distill.gradient_accumulation_steps": st.integers(1, 64),
    "gpu_optimization.use_chunk_loader": st.booleans(),
    "gpu_optimization.chunk_size_gb": st.none() | st.floats(0.001, 100),
    "data.memory_efficient_mode.ram_32gb_mode.empty_cache_frequency": st.integers(0, 100),
    "recipe.store": st.text(min_size=1, max_size=20),
    "recipe.options.hidden": st.lists(st.integers(1, 512), max_size=3),
    "run.dir": st.text("abc #:'\"{}[],\n\t-", min_size=1, max_size=12),
}
TEXTS = [
    "",
    "# only a comment\n",
    "training: {batch_size: 4}",
    "training: {}\nrun: {dir: a}\n",
    "training:\n",
    "training:\n  # a comment before all\n  batch_size: 4 # and behind\n\n\n# the end\n",
    "data: &a {batch_size: 3}\ntraining: *a\n",
    "training: {batch_size: 4,\n  lr: 0.1}\nrecipe:\n  options:\n    hidden: [3, 4]\n  name: tabular\n",
    "recipe:\n  options:\n    deep: {a: [1, 2]}\n",
    'run:\n    dir: "quoted # no comment"\n',
]


@st.composite
def some_changes(draw):
    keys = draw(st.lists(st.sampled_from(sorted(CHANGES)), min_size=1, max_size=4, unique=True))
    return {key: draw(CHANGES[key]) for key in keys}


@given(st.sampled_from([*TEXTS, *(path.read_text() for path in CONFIGS)]), some_changes())
def test_it_reads_as_the_same_keys_typed_with_set_would(text, changes):
    overrides = [f"{key}={_yaml_word(value)}" for key, value in changes.items()]
    try:
        wanted = parse_config(text, overrides=overrides)
    except ConfigError:
        with pytest.raises(ConfigError):
            rewrite_config(text, changes)
        return
    made = rewrite_config(text, changes, notes=["why"])
    assert parse_config(made) == wanted
    assert "# why\n" in made


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_nothing_else_changes_in_our_own_configs(path):
    text = path.read_text()
    key = find_key(parse_config(text), "training.batch_size")
    made = rewrite_config(text, {key: 7777})
    before, after = text.splitlines(), made.splitlines()
    different = [(a, b) for a, b in zip(before, after, strict=True) if a != b]
    assert len(different) == 1
    old, new = different[0]
    assert "batch_size: 7777" in new
    assert old.partition("#")[2] == new.partition("#")[2]


def test_the_key_that_decides_is_the_one_to_write():
    assert find_key(parse_config(""), "training.batch_size") == "training.batch_size"
    assert (
        find_key(parse_config("data: {batch_size: 3}"), "training.batch_size") == "data.batch_size"
    )
    both = parse_config("data: {batch_size: 3}\ntraining: {student_distill: {batch_size: 4}}")
    assert find_key(both, "training.batch_size") == "training.student_distill.batch_size"
    assert find_key(parse_config(""), "data.chunk_size_gb") == "data.chunk_size_gb"
    assert find_key(parse_config("training: {learning_rate: 0.1}"), "training.lr") == (
        "training.learning_rate"
    )


def test_what_cannot_be_edited_in_place_becomes_a_clean_file():
    text = "data: &a {batch_size: 3} # shared\ntraining: *a\n"
    made = rewrite_config(text, {"training.batch_size": 9})
    assert parse_config(made).written() == {"data.batch_size": 3, "training.batch_size": 9}
    with pytest.raises(ConfigError, match=r"training\.epocs"):
        rewrite_config("training: {batch_size: 1}", {"training.epocs": 3})
