"""The configs that come with stoker: found by name, and trained as shipped after the command in their head."""

from __future__ import annotations

import contextlib
import re
import shlex
import tomllib
from dataclasses import fields
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
import pytest

from molecule_makers import mol_block, msp_record
from stoker.cli.main import app
from stoker.config import (
    AugmentOptions,
    find_config,
    load_config,
    parse_config,
    resolve,
    shipped_configs,
)
from stoker.config.load import FOLDER
from stoker.errors import StokerError
from stoker.recipes.catalogue import choose_recipe
from stoker.recipes.registry import ready_recipes
from test_bars import make_minutes, resample, write_bars
from test_recipe_massspec import made_molecules
from test_recipe_segmentation import TINY, made_shapes

NAMES = list(shipped_configs())
SIZES = re.compile(r"--size \d+x\d+")
# Small networks: this is about the files, not about learning.
SMALL = {
    "forex": ["d_model=8", "heads=2", "layers=1"],
    "images": ["network=resnet9", "width=4"],
    "massspec": ["width=16", "num_blocks=1"],
    "segmentation": [f"{name}={value}" for name, value in TINY.items()],
    "tabular": ["hidden=[8]"],
}

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Raw files under the names that the head comments use."""
    from PIL import Image

    folder = tmp_path_factory.mktemp("shipped")
    for name in ("BARS", "MOLS", "IMAGES", "MASKS"):
        (folder / name).mkdir()
    time, rows = make_minutes(48 * 240 + 1600)
    for timeframe in ("M1", "M5", "M15", "H1", "H4"):
        write_bars(folder / "BARS", "EURUSD", timeframe, *resample(time, rows, timeframe))
    records = []
    for number, (smiles, peaks) in enumerate(made_molecules()[:30]):
        records.append(msp_record(f"c{number}", peaks=peaks, ID=str(number)))
        (folder / "MOLS" / f"ID{number}.MOL").write_text(mol_block(smiles, title=f"c{number}"))
    (folder / "LIBRARY.msp").write_text("".join(records))
    for number, (image, mask) in enumerate(zip(*made_shapes(20), strict=True)):
        Image.fromarray(image.transpose(1, 2, 0)).save(folder / "IMAGES" / f"{number:02}.png")
        Image.fromarray(mask).save(folder / "MASKS" / f"{number:02}.png")
        place = folder / "FOLDER" / ("test" if number % 5 == 0 else "train") / "ab"[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.transpose(1, 2, 0)).save(place / f"{number:02}.png")
    values = np.random.default_rng(0).normal(size=(60, 3))
    lines = [f"{a:.4f},{b:.4f},{int(c > 0)}" for a, b, c in values]
    (folder / "FILE.csv").write_text("\n".join(["a,b,COLUMN", *lines]) + "\n")
    return folder


def head_commands(name: str) -> list[str]:
    lines = shipped_configs()[name].read_text(encoding="utf-8").splitlines()
    return re.findall(r"^#   (stoker .*)$", "\n".join(lines), re.M)


def pack_once(command: str, store: Path) -> None:
    if not store.exists():
        words = shlex.split(SIZES.sub("--size 32x32", command))[1:]
        app([*words, "--jobs", "1"], standalone_mode=False)


@pytest.mark.parametrize("name", NAMES)
def test_each_can_be_trained_as_shipped_after_the_pack_command_in_its_head(
    name, folder, monkeypatch, capsys
):
    monkeypatch.chdir(folder)
    pack, train, *_ = head_commands(name)
    assert train == f"stoker train --config {name}"
    settings = resolve(load_config(name))
    assert f" {settings.recipe.store}" in pack
    pack_once(pack, Path(settings.recipe.store))
    tiny = ["training.epochs=1", "data.max_training_samples=16"]
    tiny += [f"recipe.options.{text}" for text in SMALL[settings.recipe.name]]
    options = [word for text in tiny for word in ("--set", text)]
    app([*shlex.split(train)[1:], "--device", "cpu", *options], standalone_mode=False)
    said = capsys.readouterr()
    assert "no effect" not in said.err
    assert f"{settings.recipe.name}: best checkpoint against chance" in said.out
    assert list(Path(settings.run.dir).glob("*.pt"))


def taken_in(text: str) -> str:
    """Return the text with every default written out."""
    return re.sub(r"^( *)#(\w+:)", r"\1\2", text, flags=re.M)


@pytest.mark.parametrize("recipe", ready_recipes())
def test_init_writes_a_complete_config_that_trains_as_it_is(
    recipe, folder, monkeypatch, capsys, tmp_path
):
    monkeypatch.chdir(tmp_path)
    app(["config", "init", recipe, "my.yaml"], standalone_mode=False)
    text = Path("my.yaml").read_text()
    app(["config", "check", "my.yaml"], standalone_mode=False)
    told = capsys.readouterr()
    assert "note:" not in told.out
    assert "stoker train --config my.yaml" in told.err
    # The defaults are true: written out, they come to the same settings and options.
    plain = choose_recipe(resolve(parse_config(text)))
    whole = choose_recipe(resolve(parse_config(taken_in(text))))
    drawn = [] if recipe != "segmentation" else [item.name for item in fields(AugmentOptions)]
    one, other = plain.settings, whole.settings
    bare = {"recipe.options": {}, "training.use_gpu_augmentation": False}
    assert other.changed(bare) == one.changed(bare)
    for name, value in plain.plain.items():
        assert name in drawn or whole.plain[name] == value
    # Every option is there, or the key that says it.
    names = set(re.findall(r"^ *#?(\w+):", text, re.M))
    # Its comments are complete: they send nobody to a name of the source, nor to a document.
    assert not re.search(r"[Ss]ee `|\bS[0-4]\b|the documents?\b", text)
    assert {entry.name for entry in fields(plain.recipe.Options)} <= names
    with pytest.raises(StokerError, match="exists"):
        app(["config", "init", recipe, "my.yaml"], standalone_mode=False)
    # It trains, on the store of the shipped config.
    small = recipe.removesuffix("-teacher")
    source = folder / "stores" / small
    with contextlib.chdir(folder):
        pack_once(head_commands(small)[0], source)
    Path("stores").mkdir()
    Path("stores", recipe).symlink_to(source)
    tiny = ["training.epochs=1", "data.max_training_samples=16"]
    tiny += [f"recipe.options.{text}" for text in SMALL[small]]
    options = [word for text in tiny for word in ("--set", text)]
    app(["train", "--config", "my.yaml", "--device", "cpu", *options], standalone_mode=False)
    assert f"{recipe}: best checkpoint against chance" in capsys.readouterr().out


def test_init_of_no_recipe_is_refused(tmp_path):
    with pytest.raises(StokerError, match="there is no recipe 'forx'") as caught:
        app(["config", "init", "forx", str(tmp_path / "x.yaml")], standalone_mode=False)
    assert caught.value.exit_code == 2
    assert not (tmp_path / "x.yaml").exists()


def test_low_memory_flips_and_does_nothing_else():
    from stoker.recipes.segmentation.recipe import make_augmentation

    options = choose_recipe(resolve(load_config("segmentation_low_memory"))).options
    ops = [type(op).__name__ for op in make_augmentation(options, [0.5] * 3, [0.2] * 3, 0).ops]
    assert ops == ["RandomHorizontalFlip", "Normalize"]


def test_they_are_found_by_name_and_by_their_old_place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, path in shipped_configs().items():
        assert find_config(name) == find_config(f"configs/{name}.yaml") == path
    assert find_config("configs/s1_massspec.yaml") == FOLDER / "massspec_32gb.yaml"
    for own in ("forex.yml", "elsewhere/forex.yaml", "forx", "other/forex", "/forex"):
        assert find_config(own) == Path(own)
    Path("forex").mkdir()
    assert find_config("forex") == FOLDER / "forex.yaml"
    Path("forex.yaml").write_text("")
    assert find_config("forex.yaml") == Path("forex.yaml")


def test_the_wheel_has_all_of_them():
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["stoker"]
    for path in FOLDER.iterdir():
        assert any(fnmatch(f"configs/{path.name}", pattern) for pattern in patterns), path
