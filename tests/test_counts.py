"""found = packed + refused + ignored, in the manifest and on the screen; nothing packed is an error."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from packing_makers import NumbersSource
from stoker.cli.main import app
from stoker.errors import QualityError, Refusal, StokerError
from stoker.packing import PackOptions, pack
from stoker.packing.counts import MOST_REASONS, OTHER_REASONS, balance, counts_lines
from stoker.sources.contract import Part, PartContext, PartData, Preparation
from stoker.store.manifest import read_manifest


@dataclass(frozen=True)
class CountingSource(NumbersSource):
    """Ignores the first row of every part, refuses `num_refused` more, and says what it found."""

    num_refused: int = 1
    num_found: int | None = 16

    def prepare(self, scratch) -> Preparation:
        made = super().prepare(scratch)
        return replace(made, ignored={"another ending": 1}, num_found=self.num_found)

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
        "found": 16,
        "packed": 9,
        "refused": {"bad": 3},
        "ignored": {"a header": 3, "another ending": 1},
    }
    assert result.manifest.num_refused == 3
    assert counts_lines(counts)[0] == "found 16 = packed 9 + refused 3 + ignored 4"


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
    with pytest.raises(StokerError, match="found 17 pieces"):
        pack(CountingSource(file, num_found=17), tmp_path / "out", LENIENT)
    assert not (tmp_path / "out").exists()


def test_a_store_of_nothing_is_an_error_whatever_the_budget(file, tmp_path):
    with pytest.raises(QualityError, match="nothing is left to pack") as error:
        pack(CountingSource(file, num_refused=4), tmp_path / "out", LENIENT)
    assert "refused 12: bad" in str(error.value)
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
    assert "found 200 = packed 199 + refused 1 + ignored 0" in shown.output


@given(
    st.integers(0, 50),
    st.lists(st.tuples(st.text(max_size=3), st.integers(1, 9)), max_size=60),
    st.lists(st.dictionaries(st.text(max_size=3), st.integers(1, 9)), max_size=60),
)
def test_the_sum_is_kept_whatever_the_reasons(packed, refused, ignored):
    refusals = [Refusal("f", None, reason, count=count) for reason, count in refused]
    counts = balance(None, packed, refusals, ignored)
    total = counts.packed + sum(counts.refused.values()) + sum(counts.ignored.values())
    assert counts.found == total
    assert balance(total, packed, refusals, ignored) == counts
    assert max(len(counts.refused), len(counts.ignored)) <= MOST_REASONS
    if (
        len(counts.refused) == MOST_REASONS
        and len({reason for reason, _ in refused}) > MOST_REASONS
    ):
        assert OTHER_REASONS in counts.refused
