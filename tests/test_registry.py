"""Recipes are found by their folders or as `package.module:Class`; no other code knows their names."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import stoker
from source_trees import nodes
from stoker.errors import InputError
from stoker.recipes.registry import find_recipe, ready_recipes

PACKAGE = Path(stoker.__file__).parent
# The documents' layouts, the demo, and raw files of the same name are not about recipes.
OTHERS = ("compat", "demo", "sources", "cli/demo.py")
FOLDERS = tuple(f"recipes/{target.split('.')[2]}" for target in ready_recipes().values())
# `stoker pack segmentation` and `stoker.sources.massspec` are kinds of raw files, `--config tabular` a shipped file.
KINDS = re.compile(
    r"stoker pack [\w|]+|--config \w+|stoker\.(sources|compat)\.\w+|stoker/(sources|compat)/\w+"
)
# `images` is left out: it is also the name of a field, which every room may use.
NAMES = re.compile(
    rf"(?<![\w-])({'|'.join(re.escape(name) for name in ready_recipes() if name != 'images')})(?![\w-])"
)


def names_in(text: str) -> list[str]:
    """Recipe names in the code of a module: texts, imports, names; not prose of docstrings."""
    prose = {
        id(node.body[0].value)
        for node in nodes(text, ast.Module, ast.ClassDef, ast.FunctionDef)
        if ast.get_docstring(node)
    }
    found = []
    for node in nodes(text, ast.Constant, ast.ImportFrom, ast.Attribute):
        words = ""
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            words = node.value
        elif isinstance(node, ast.ImportFrom):
            words = str(node.module)
        elif isinstance(node, ast.Attribute):
            words = node.attr
        found += [match[0] for match in NAMES.finditer(KINDS.sub("", words))]
    return found


def test_the_names_of_recipes_stand_in_their_folders_only():
    found = {}
    for path in PACKAGE.rglob("*.py"):
        place = path.relative_to(PACKAGE).as_posix()
        if place.startswith((*OTHERS, *FOLDERS)):
            continue
        if names := names_in(path.read_text("utf-8")):
            found[place] = names
    assert found == {}


def test_the_rule_about_names_can_fail():
    for text in (
        "if recipe == 'forex': pass",
        "from stoker.recipes.tabular.recipe import X",
        "x = 'configs/forex.yaml'",
        "y = {'massspec-teacher': 1}",
    ):
        assert names_in(text), text
    assert not names_in(
        '"""forex"""\nfrom stoker.sources.massspec import X\nx = "stoker pack massspec --help"'
    )


def test_ours_are_listed_without_torch():
    assert {"forex", "massspec", "massspec-teacher", "segmentation", "tabular"} <= set(
        ready_recipes()
    )
    code = (
        "import sys; from stoker.recipes.registry import ready_recipes; ready_recipes();"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", ready_recipes())
def test_ours_meet_the_protocol(name):
    recipe = find_recipe(name)
    assert recipe.name == name
    assert recipe.pack_command.startswith("stoker pack ")
    assert {each.setting for each in recipe.defaults} >= {"training.lr", "training.epochs"}
    assert all(each.reason for each in recipe.defaults)


# -- somebody else's -------------------------------------------------------------------------------

WHOLE = """
from dataclasses import dataclass
from stoker.recipes.contract import Default, Recipe

@dataclass(frozen=True)
class Options:
    width: int = 4

class Whole(Recipe):
    name = "whole"
    Options = Options
    def make_job(self, store, options, seed): ...
    def describe(self, job): ...
    def rebuild(self, options, facts): ...

class Half(Recipe):
    name = "half"
    def make_job(self, store, options, seed): ...

class Strange(Whole):
    defaults = (Default("learning", 1.0, "a slip"),)

class NoDataclass(Whole):
    Options = dict

class Asking(Whole):
    def __init__(self, more): ...

value = 5
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "modules", {**sys.modules})
    return tmp_path


def test_a_class_of_the_working_folder_is_found(here):
    (here / "mine_found").mkdir()
    (here / "mine_found" / "jobs.py").write_text(WHOLE)
    recipe = find_recipe("mine_found.jobs:Whole")
    assert (recipe.name, recipe.defaults, recipe.export_layout(None, {})) == ("whole", (), None)
    assert sys.path[0] == str(here)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("forx", ["no recipe 'forx'", "package.module:Class", "Try: forex"]),
        ("mine.jobs", ["no recipe 'mine.jobs'", "Try: mine.jobs:CLASS"]),
        ("http://u:p@h/x", ["no recipe", "forex"]),
        ("nowhere.jobs:Whole", ["no module 'nowhere'", "PYTHONPATH=FOLDER", "holds nowhere"]),
        ("jobs:Whol", ["has no class 'Whol'", "jobs:Whole", "Try: jobs:Whole"]),
        ("jobs:value", ["has no class 'value'"]),
        ("jobs:Half", ["has no Options, describe, rebuild", "inherits", "docs/extending.md"]),
        ("jobs:Strange", ["name learning", "training.lr"]),
        ("jobs:NoDataclass", ["Options of the recipe", "a frozen dataclass"]),
        ("jobs:Asking", ["cannot be made", "without arguments"]),
        ("needy:Whole", ["needy imports 'librosa_is_not_here'", "pip install librosa_is_not_here"]),
        ("broken:Whole", ["ZeroDivisionError", "broken.py:2: 1 / 0", "import broken"]),
        ("torch:Tensor", ["has no Options, pack_command", "inherits"]),
    ],
)
def test_what_is_missing_is_named(name, words, here):
    (here / "jobs.py").write_text(WHOLE)
    (here / "needy.py").write_text("import librosa_is_not_here.audio")
    (here / "broken.py").write_text("x = 1\n1 / 0\n")
    with pytest.raises(InputError) as caught:
        find_recipe(name)
    for word in words:
        assert word in str(caught.value)
