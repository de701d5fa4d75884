"""The walks of docs/extending.md, typed as a user types them; and a recipe of somebody else met by every verb."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from docs_build.blocks import code_blocks
from typer.testing import CliRunner

from stoker.cli.main import app
from stoker.config import parse_config, resolve
from stoker.errors import InputError
from stoker.recipes.catalogue import choose_recipe
from stoker.recipes.contract import Sizes
from stoker.recipes.export.graph import deploy
from stoker.recipes.inference import load_trained
from stoker.recipes.run import run_recipe
from stoker.store.fields import Dense
from store_makers import write_store

pytestmark = pytest.mark.usefixtures("one_thread")

PAGE = Path(__file__).resolve().parent.parent / "docs" / "extending.md"
WALK = PAGE.read_text("utf-8").partition("## A recipe of your own\n")[2].partition("\n## ")[0]
RNG = np.random.default_rng(0)
ROWS = (RNG.normal(size=(300, 2)) @ RNG.normal(size=(2, 6))).astype("f4")
CODE, TYPED = (block.text for block in code_blocks(WALK))


def type_in(line: str, code: int = 0) -> str:
    """Run a command of the page; return what it printed."""
    words = shlex.split(line)
    assert words[0] == "stoker"
    done = CliRunner().invoke(app, words[1:])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == code, done.output
    return done.output


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with the page's module and its raw file, and a Python that has not met it."""
    monkeypatch.chdir(tmp_path)
    outside = [place for place in sys.path if place not in ("", str(tmp_path))]
    monkeypatch.setattr(sys, "path", outside)
    monkeypatch.delitem(sys.modules, "my_recipes", raising=False)
    (tmp_path / "my_recipes.py").write_text(CODE)
    np.savez(tmp_path / "rows.npz", x=ROWS)
    yield tmp_path
    sys.modules.pop("my_recipes", None)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packed")
    write_store(folder / "rows.store", [{"x": Dense(ROWS)}]).close()
    return folder / "rows.store"


@pytest.fixture
def packed(here, store):
    """The same, with the page's first command done."""
    (here / "rows.store").symlink_to(store)
    return here


def settings_for(*overrides: str):
    given = ["recipe.name=my_recipes:Autoencoder", "recipe.store=rows.store", *overrides]
    return resolve(parse_config("", overrides=[*given, "training.precision=fp32"]))


def test_the_recipe_of_the_page_is_short_and_goes_all_the_way(here):
    assert len(CODE.splitlines()) < 60
    commands = [line for line in TYPED.splitlines() if line]
    pack, train, resume, predict = commands
    type_in(pack)
    first = json.loads(type_in(f"{train} --device cpu --json"))
    assert (first["recipe"], len(first["epochs"])) == ("autoencoder", 2)
    assert "learning rate 0.001: the recipe's default, Adam's usual rate" in first["notes"]
    again = json.loads(type_in(f"{resume} --device cpu --json"))
    assert len(again["epochs"]) == 1
    assert again["test"]["loss"] < first["epochs"][0]["train_loss"]
    type_in(f"{predict} --device cpu")
    errors = pq.read_table("errors.parquet")["error"].to_numpy()
    assert len(errors) == 30
    assert errors.mean() == pytest.approx(again["test"]["loss"], rel=1e-4)
    about = load_trained("runs/Autoencoder/best.pt")
    assert about.loaded.identity["recipe"] == "my_recipes:Autoencoder"


def test_every_other_verb_takes_it(packed):
    Path("job.yaml").write_text(
        "recipe: {name: 'my_recipes:Autoencoder', store: rows.store, options: {code: 2}}\n"
        "training: {epochs: 1, batch_size: 64, init_gain: 0.5}\nrun: {dir: run}\n"
    )
    assert "my_recipes:Autoencoder" in type_in("stoker config check job.yaml")
    noted = choose_recipe(resolve(parse_config(Path("job.yaml").read_text(), "job.yaml"))).notes
    assert any("training.init_gain" in note and "does not use it" in note for note in noted)
    assert "code: 4" in type_in("stoker config init my_recipes:Autoencoder")
    type_in("stoker train --config job.yaml --device cpu")
    type_in("stoker report run")
    assert "my_recipes:Autoencoder" in Path("run/report.html").read_text()
    assert "samples/s" in type_in(
        "stoker tune --config job.yaml --device cpu --seconds-per-try 0.05"
    )
    type_in("stoker doctor --config job.yaml --device cpu --seconds 1")
    type_in("stoker export run/best.pt weights.safetensors")
    type_in("stoker export run/best.pt int8.pt --int8")
    for weights in ("weights.safetensors", "int8.pt"):
        type_in(f"stoker predict {weights} rows.store {weights}.parquet --device cpu")
    with pytest.raises(
        InputError, match="has no ONNX graph: it does not define export_layout"
    ) as no:
        type_in("stoker export run/best.pt model.onnx")
    type_in(no.value.fix.replace("weights", "again"))
    with pytest.raises(InputError, match="--msp or --mol-dir was given; the recipe is autoencoder"):
        type_in("stoker train --config job.yaml --msp x.msp")
    broken = resolve(
        parse_config(Path("job.yaml").read_text().replace("code: 2", "code: 0"), "b.yaml")
    )
    with pytest.raises(InputError, match=r"b\.yaml:1:\d+ recipe\.options\.code.*'code' is 0"):
        choose_recipe(broken)


def test_a_checkpoint_whose_code_is_elsewhere_says_what_to_type(packed, monkeypatch):
    best = run_recipe(settings_for("training.epochs=1"), device="cpu").best
    del sys.modules["my_recipes"]
    sys.path.remove(str(packed))
    elsewhere = packed / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    with pytest.raises(
        InputError, match="the checkpoint cannot be used: the recipe 'my_recipes:Auto"
    ) as caught:
        load_trained(packed / best)
    assert "there is no module 'my_recipes'" in caught.value.given
    assert "PYTHONPATH=FOLDER" in caught.value.fix
    monkeypatch.syspath_prepend(packed)
    assert load_trained(packed / best).facts["width"] == 6


LAYOUT = """
    def export_layout(self, made, facts):
        from stoker.recipes.contract import BATCH, Layout, Port

        port = Port("x", (BATCH, facts["width"]), torch.float32, "rows")
        return Layout([port], lambda named: named["x"], made.predict)
"""


def test_an_own_recipe_can_be_exported(packed):
    (packed / "my_recipes.py").write_text(CODE + LAYOUT)
    best = run_recipe(settings_for("training.epochs=1"), device="cpu").best
    graph = deploy(load_trained(best), Sizes(batch=3))
    assert (graph.outputs, graph.ports[0].shape) == (("error",), (3, 6))
    assert graph(torch.from_numpy(ROWS[:3]))[0].shape == (3,)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("options.field]", "options.feeld]", ["make_job", "AttributeError", "my_recipes.py:"]),
        ('"inputs": list(job.fields), ', "", ["describe", "KeyError: 'inputs'"]),
        ("list(job.fields)", '["y"]', ["names the inputs y", "one or more of x"]),
        ("job.model[0].in_features}", "job.model}", ["describe", "not JSON serializable"]),
        ('("train", "val", "test")', '("val",)', ["finds no training samples", "stoker inspect"]),
        (
            "nn.functional.mse_loss,",
            "lambda outputs, targets: outputs.mean() / 0 + targets.nothing,",
            ["training of the recipe 'autoencoder' ended with AttributeError", "my_recipes.py:"],
        ),
        ("fields=[options.field],\n        )", "strata=[1], fields=[options.field])", ["1 strata"]),
    ],
)
def test_a_mistake_in_an_own_recipe_is_shown_where_it_is(old, new, words, packed):
    assert old in CODE
    (packed / "my_recipes.py").write_text(CODE.replace(old, new, 1))
    with pytest.raises(InputError) as caught:
        run_recipe(settings_for("training.epochs=1"), device="cpu")
    for word in words:
        assert word in str(caught.value)


def test_without_validation_or_test_samples(packed):
    lone = CODE.replace('("train", "val", "test")', '("train",)')
    (packed / "my_recipes.py").write_text(lone)
    run = run_recipe(settings_for("training.epochs=2"), device="cpu")
    assert (run.ended, run.test, len(run.epochs)) == ("done", {}, 2)
