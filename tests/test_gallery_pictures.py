"""Pictures and masks of every kind: made here, packed by the command, compared with the table."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stoker.cli.main import app
from stoker.errors import StokerError
from stoker.store.reader import open_store

pytest.importorskip("PIL.Image", reason="Pillow is not installed (extra 'vision')")
sys.path.insert(0, str(Path(__file__).parent / "gallery"))
from cases_pictures import CASES, Case


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.kind)
def test_a_picture_of_this_kind_has_this_outcome(case: Case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    case.make(tmp_path)
    outcome = CliRunner(env={"COLUMNS": "400"}).invoke(app, ["pack", *case.words.split()])
    if outcome.exception and not isinstance(outcome.exception, StokerError | SystemExit):
        raise outcome.exception
    said = f"{outcome.output}\n{outcome.exception or ''}"
    for text in case.says:
        assert text in said
    if case.packed is None:
        assert isinstance(outcome.exception, StokerError)
        assert not (tmp_path / "out").exists()
        return
    assert outcome.exit_code == 0, said
    with open_store(tmp_path / "out") as store:
        counts = store.manifest.counts
        assert store.num_samples == case.packed == counts["packed"]
        left_out = sum(counts["refused"].values()) + sum(counts["ignored"].values())
        assert counts["found"] == counts["packed"] + left_out
        if case.check is not None:
            case.check(store)


def test_every_kind_is_named_once():
    kinds = [case.kind for case in CASES]
    assert len(set(kinds)) == len(kinds)
