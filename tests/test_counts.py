"""found = packed + refused + ignored, in the manifest and on the screen; nothing packed is an error."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import numpy as np
import pytest
from typer.testing import CliRunner

from packing_makers import NumbersSource
from stoker.cli.main import app
from stoker.errors import QualityError, Refusal
from stoker.packing import PackOptions, pack
from stoker.sources.contract import Account, Part, PartContext, PartData, Preparation
from stoker.store.manifest import read_manifest


@dataclass(frozen=True)
class CountingSource(NumbersSource):
    """Ignores the first row of every part, refuses `num_refused` more, and says what it found."""

    num_refused: int = 1
    num_found: int | None = 16

    def prepare(self, scratch) -> Preparation:
        made = super().prepare(scratch)
        return replace(made, ignored={"another ending": 1}, found=self.num_found)

    def build(self, part: Part, context: PartContext) -> PartData:
        built = super().build(part, context)
        skipped = 1 + self.num_refused
        fields = {
            "features": replace(
                built.fields["features"], values=built.fields["features"].values[skipped:]
            )
        }
        refused = [
            Refusal(str(self.file), row, f"row {row} is bad", kind="bad")
            for row in range(1, skipped)
        ]
        return PartData(fields, refused, built.extra, {"a header": 1})


@pytest.fixture
def file(tmp_path):
    file = tmp_path / "numbers.txt"
    file.write_text("x")
    return file


LENIENT = PackOptions(jobs=1, on_bad="quarantine", bad_budget="100%")


def test_the_manifest_balances_and_names_the_reasons(file, tmp_path):
    result = pack(CountingSource(file), tmp_path / "out", LENIENT)
    counts = read_manifest(tmp_path / "out").counts
    assert counts == {
        "unit": "samples",
        "found": 16,
        "packed": 9,
        "refused": {"bad": 3},
        "ignored": {"a header": 3, "another ending": 1},
    }
    assert result.manifest.num_refused == 3
    assert Account(**counts).lines()[0] == ("16 samples found = 9 packed + 3 refused + 4 ignored")


def test_counts_survive_a_resumed_pack(file, tmp_path, monkeypatch):
    import stoker.packing.driver as driver

    def stop(*_: object) -> None:
        raise QualityError("stop", "", "")

    with monkeypatch.context() as patched:
        patched.setattr(driver, "_check_budget", stop)
        with pytest.raises(QualityError):
            pack(CountingSource(file), tmp_path / "out", LENIENT)
    built = (tmp_path / "built.log").read_text()
    pack(CountingSource(file), tmp_path / "out", LENIENT)
    assert (tmp_path / "built.log").read_text() == built
    assert read_manifest(tmp_path / "out").counts["ignored"] == {"a header": 3, "another ending": 1}


def test_a_piece_that_is_lost_without_a_word_is_a_fault(file, tmp_path):
    with pytest.raises(RuntimeError, match="17 samples were found, but 16 are accounted for"):
        pack(CountingSource(file, num_found=17), tmp_path / "out", LENIENT)
    assert not (tmp_path / "out").exists()


def test_a_store_of_nothing_is_an_error_whatever_the_budget(file, tmp_path):
    with pytest.raises(QualityError, match="no sample is left: 12 pieces") as error:
        pack(CountingSource(file, num_refused=4), tmp_path / "out", LENIENT)
    assert "ignored 3: a header" not in str(error.value)
    assert "row 1 is bad" in str(error.value)
    assert not (tmp_path / "out").exists()


def test_rows_that_the_gate_leaves_out_are_refused_by_name(tmp_path):
    values = np.ones((200, 2), "f4") * np.arange(200, dtype="f4")[:, None]
    values[7, 1] = np.nan
    np.save(tmp_path / "a.npy", values)
    words = ["pack", "arrays", str(tmp_path / "a.npy"), str(tmp_path / "out"), "-j", "1"]
    outcome = CliRunner().invoke(app, [*words, "--on-bad", "quarantine", "--json"])
    counts = json.loads(outcome.stdout)["counts"]
    assert (counts["found"], counts["packed"]) == (200, 199)
    assert list(counts["refused"].values()) == [1]
    assert "quality gate: a:" in next(iter(counts["refused"]))
    shown = CliRunner().invoke(app, [*words, "--on-bad", "quarantine"])
    assert "200 rows found = 199 packed + 1 refused + 0 ignored" in shown.output
