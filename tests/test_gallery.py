"""Every file of the gallery: the outcome in its table is the outcome, and the docs page has all of them."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from gallery.case import GalleryCase
from stoker.cli.main import app
from stoker.packing.workers import Workers
from stoker.store.reader import open_store

MODULES = sorted(path.stem for path in (Path(__file__).parent / "gallery").glob("cases_*.py"))
CASES = [
    pytest.param(case, id=f"{name.removeprefix('cases_')}: {case.what}")
    for name in MODULES
    for case in importlib.import_module(f"gallery.{name}").CASES
]


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch):
    """Build spectra without a process of their own, half a second for each case."""
    made = Workers.__init__

    def init(self: Workers, *args: Any, **named: Any) -> None:
        made(self, *args, **named)
        self.isolated = False

    monkeypatch.setattr(Workers, "__init__", init)
    # A fifth of a pack: pages of stores are looked at in test_quality_page.py and test_samples.py.
    monkeypatch.setattr("stoker.cli.pack._write_page", lambda result: {})
    # Another fifth, of which no case reads a word.
    monkeypatch.setattr("stoker.cli.pack.store_table", lambda store: "")


@pytest.mark.parametrize("case", CASES)
def test_the_outcome_is_the_one_of_the_table(case: GalleryCase, tmp_path, monkeypatch):
    case.make(tmp_path)
    monkeypatch.chdir(tmp_path)
    words = case.words or [*case.verb, case.name, "out", "--jobs", "1", *case.options]
    result = CliRunner(env={"COLUMNS": "400"}).invoke(app, list(words))
    said = result.output + str(result.exception or "")
    code = getattr(result.exception, "exit_code", result.exit_code)
    assert code == case.code or (case.code is None and code in (2, 3)), said
    missing = [text for text in case.says if text not in said]
    assert not missing, said
    if case.code != 0:
        assert not (tmp_path / "out").exists()
        return
    with open_store(tmp_path / "out") as store:
        for name, wanted in case.fields.items():
            found = store.read_rows(name, 0, len(wanted))
            wanted = np.asarray(wanted, found.dtype)
            assert np.array_equal(found, wanted), found
        if case.columns is not None:
            assert store.fields["features"].columns == list(case.columns)
        for name, wanted in case.attributes.items():
            assert store.manifest.attributes[name] == wanted
        if case.packed is not None:
            assert store.num_samples == case.packed
        if case.check is not None:
            case.check(store)
        accounts = store.manifest.attributes["accounts"]
        assert accounts[-1] == store.manifest.counts
        if case.account is not None:
            last = accounts[-1]
            counts = (
                last["found"],
                last["packed"],
                sum(last["refused"].values()),
                sum(last["ignored"].values()),
            )
            assert counts == case.account


def test_the_page_has_every_case():
    from docs_build.pages import gallery_page

    page = gallery_page()
    for param in CASES:
        assert param.values[0].what in page
        assert param.values[0].does in page
