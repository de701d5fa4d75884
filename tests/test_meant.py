"""What was probably meant by a word that is wrong: paths that are not there, and words that a verb does not take."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from stoker import PackOptions, pack
from stoker.cli import main
from stoker.display import meant_path
from stoker.sources.arrays import ArraysSource
from stoker.sources.images.source import ImagesSource


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("pump.csv", "pumps.csv"),
        ("ok.yml", "ok.yaml"),
        ("$PLACE/pumps.csv", "pumps.csv"),
        ("nope.pt", None),  # near note.txt, which is no checkpoint
        ("nowhere.yaml", None),  # its ending alone makes it like ok.yaml
        ("pumps.csv", None),  # it is there: what is wrong is something else
        ("nowhere/pumps.csv", None),
        ("~$pumps.csv", "pumps.csv"),  # no user is called "$pumps.csv"
    ],
)
def test_a_missing_path_is_answered_with_the_nearest_one(typed, meant, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PLACE", str(tmp_path))
    for name in ("pumps.csv", "ok.yaml", "note.txt"):
        Path(name).touch()
    found = meant_path(Path(typed))
    assert (found and found.name) == meant
    assert found is None or found.exists()


@given(st.text(max_size=12))
def test_no_name_is_too_odd_to_look_for(name):
    meant_path(Path("nowhere") / name)


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (["train", "ok.yaml"], "--config ok.yaml"),
        (["train", "--epochs", "3"], "--set training.epochs=3 instead of --epochs"),
        (["train", "--batch-size=7"], "--set training.batch_size=7 instead of --batch-size"),
        (["train", "--max-epochs", "3"], "--set training.epochs=3 instead of --max-epochs"),
        (["pack", "a b.csv", "store"], "stoker pack table 'a b.csv' store"),
        (["pack", "folder", "store"], "stoker pack images folder store"),
        (["pack", "table", "x.csv", "out", "--window", "5"], "stoker pack series --help: that verb has --window"),
        (["pack", "table", "a b.csv", "--out", "st", "--target", "y"], "stoker pack table 'a b.csv' --target y st"),
        (["config", "init", "tabular", "--out=my.yaml"], "stoker config init tabular my.yaml"),
        (["predict", "best.pt", "store", "--out"], "stoker predict best.pt store OUT"),
        (["pack", "massspec", "a b.csv", "out"], "stoker pack massspec --msp 'a b.csv' out"),
        (["pack", "massspec", "--structures", "folder", "out"], None),
        (["train", "--nonsense", "ok.yaml"], None),
        (["train", "--out", "my run"], "stoker train --run-dir 'my run'"),
        (["train", "--csv", "a b.csv"], "stoker pack table 'a b.csv' OUT"),
        (["train", "--target", "y"], "stoker pack table --help: that verb has --target"),
        (["pack", "table", "a b.csv", "--output", "st"], "stoker pack table 'a b.csv' st"),
        (["augment", "folder"], "stoker augment preview folder"),
        (["pack", "csv", "a b.csv", "out"], "stoker pack table 'a b.csv' out"),
        (["pack", "hdf5", "x.h5", "out"], "stoker pack arrays x.h5 out"),
        (["pack", "table", "a b.csv", "out", "--label=y"], "stoker pack table 'a b.csv' out --target=y"),
        (["pack", "table", "a b.csv", "out", "--workers", "2"], "stoker pack table 'a b.csv' out --jobs 2"),
        (["train", "a b.csv"], "stoker pack table 'a b.csv' OUT"),
        (["train", "folder"], "--store folder"),
        (["train", "tabular"], "--config tabular"),
        (["tune", "x.h5"], "--store x.h5"),
        (["help", "pack", "table"], "stoker pack --help"),
        (["help"], "stoker --help"),
        (["version"], "stoker --version"),
        (["init"], "stoker config init --help"),
        (["schema"], "stoker config schema"),
        (["pack", "series", "x.h5", "out"], "stoker pack series x.h5 out --window 64"),
        (["pack", "table", "-a.csv", "out"], "stoker pack table ./-a.csv out"),
        (["pack", "table", "out", "a b.csv"], "'a b.csv' out"),
        (["inspect", "a b.csv", "--repair", "clip"], "stoker pack table --help: that verb has --repair"),
        (["inspect", "a b.csv", "--html", "page.pdf"], "--html page.html"),
        (["report", "first", "--out", "page.png"], "--out page.html"),
        (["train", "--recipe", "tabular"], "stoker train --config tabular"),
        (["predict", "best.pt", "x.h5"], "stoker predict best.pt x.h5 predictions.csv"),
        (["predict", "x.h5", "best.pt", "o.csv"], "stoker predict best.pt x.h5 o.csv"),
        (["explain", "no-workers"], "stoker doctor explain no-workers"),
        (["table", "a b.csv", "out"], "stoker pack table 'a b.csv' out"),
        (["check", "ok.yaml"], "stoker config check ok.yaml"),
        (["info", "x.h5"], "stoker inspect x.h5"),
        (["evaluate", "best.pt", "store"], "stoker predict best.pt store"),
        (["train.py", "--lr", "1"], "stoker doctor -- python train.py --lr 1"),
        (["ok.yaml"], "stoker train --config ok.yaml"),
        (["x.h5"], "stoker inspect x.h5"),
        (["first"], "stoker report first"),
        (["nonsense"], None),
        ([], None),
        (["tune", "--seconds-per-try", "x", "--store", "folder"], None),
        (["augment", "preview", "folder"], "stoker augment preview folder preview.png"),
        (["x" * 5000], None),
    ],
)  # fmt: skip
def test_words_that_a_verb_does_not_take_are_answered(words, advice, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["stoker", *words])
    Path("ok.yaml").touch()
    Path("a b.csv").touch()
    Path("-a.csv").touch()
    Path("folder").mkdir()
    for name in ("x.h5", "train.py", "first/run.jsonl"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).touch()
    with pytest.raises(SystemExit) as ended:
        main.run()
    assert ended.value.code == 2
    tried = re.findall(r"^Try: (.*)$", capsys.readouterr().err, re.MULTILINE)
    assert tried == ([advice] if advice else [])


@pytest.mark.parametrize("words", [["pack", "table"], ["inspect"], ["pack", "bars"]])
def test_help_shows_defaults_that_are_found_out(words, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("sys.argv", ["stoker", *words, "--help"])
    with pytest.raises(SystemExit):
        main.run()
    shown = capsys.readouterr().out
    assert "[default: (found" in shown
    assert not re.search(r"\w \.(\s|$)", shown)  # what rich takes for markup leaves a space behind


def test_a_training_without_a_recipe_names_the_one_that_fits_the_store(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    for kind in ("cat", "dog"):
        Path("photos", kind).mkdir(parents=True)
        for number in range(3):
            Image.new("RGB", (8, 8), (number, 9, 9)).save(Path("photos", kind, f"{number}.png"))
    np.savez("rows.npz", features=np.ones((9, 2), "f4"), targets=np.arange(9))
    pack(ImagesSource(size=(8, 8), folder=Path("photos")), "pictures", PackOptions(jobs=1))
    pack(ArraysSource((Path("rows.npz"),)), "rows", PackOptions(jobs=1))
    for store, recipe in (("pictures", "images"), ("rows", "tabular"), ("nowhere", "tabular")):
        monkeypatch.setattr("sys.argv", ["stoker", "train", "--store", store])
        with pytest.raises(SystemExit):
            main.run()
        assert f"Try: stoker train --config {recipe} --store {store}" in capsys.readouterr().err
