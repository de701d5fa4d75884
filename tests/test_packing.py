"""Packing: parallel equals serial, kills cost nothing, stale stores are found out, bad rows stop."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from packing_makers import NumbersSource
from stoker.errors import InputError, QualityError, SourceError, StokerError, StoreError
from stoker.packing import PackOptions, pack
from stoker.recipes.tabular.recipe import TabularRecipe
from stoker.sources.arrays import ArraysSource
from stoker.store.reader import open_store


@pytest.fixture
def numbers(tmp_path) -> Path:
    file = tmp_path / "numbers.txt"
    file.write_text("source")
    return file


def built(file: Path) -> list[int]:
    log = file.parent / "built.log"
    return [int(line) for line in log.read_text().split()] if log.exists() else []


def contents(path: Path) -> np.ndarray:
    with open_store(path) as store:
        return store.read_rows("features", 0, store.num_samples)[:, 0]


EXPECTED = np.concatenate([np.arange(5) + part * 1000 for part in range(3)]).astype("f4")


def tree(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(path.iterdir())}


def test_one_worker_and_several_give_the_same_bytes(started_packers, numbers, tmp_path):
    for jobs in (1, 3):
        result = pack(NumbersSource(numbers), tmp_path / f"s{jobs}", PackOptions(jobs=jobs))
        assert result.manifest.attributes["counts"] == [5, 5, 5]
        assert (contents(tmp_path / f"s{jobs}") == EXPECTED).all()
    assert tree(tmp_path / "s1") == tree(tmp_path / "s3")
    assert not list(tmp_path.glob("*.partial"))


def test_a_second_pack_does_nothing_and_a_touched_file_with_the_same_bytes_neither(
    numbers, tmp_path
):
    pack(NumbersSource(numbers), tmp_path / "s", PackOptions(jobs=1))
    os.utime(numbers, (1, 1))
    result = pack(NumbersSource(numbers), tmp_path / "s", PackOptions(jobs=1))
    assert result.reused
    assert len(built(numbers)) == 3


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda file, out: file.write_text("changed"), "source .*numbers.txt changed"),
        (lambda file, out: (out / "shard-00001.h5").unlink(), "shard shard-00001.h5 is missing"),
        (
            lambda file, out: os.truncate(out / "shard-00001.h5", 100),
            "shard shard-00001.h5 is missing or has the wrong size",
        ),
        (lambda file, out: (out / "store.json").write_text("{"), "its manifest cannot be read"),
    ],
)
def test_stale_or_broken_stores_are_rebuilt_with_the_reason(numbers, tmp_path, change, reason):
    out = tmp_path / "s"
    pack(NumbersSource(numbers), out, PackOptions(jobs=1))
    change(numbers, out)
    result = pack(NumbersSource(numbers), out, PackOptions(jobs=1))
    assert not result.reused
    assert __import__("re").search(reason, result.reason)
    assert (contents(out) == EXPECTED).all()


def test_changed_options_version_kind_and_force_rebuild(numbers, tmp_path, monkeypatch):
    out = tmp_path / "s"
    pack(NumbersSource(numbers), out, PackOptions(jobs=1))
    result = pack(NumbersSource(numbers, option="b"), out, PackOptions(jobs=1))
    assert result.reason == "option option changed from 'a' to 'b'"
    result = pack(NumbersSource(numbers, option="b"), out, PackOptions(jobs=1, force_recreate=True))
    assert result.reason == "asked to recreate it"
    monkeypatch.setattr(NumbersSource, "version", 2)
    result = pack(NumbersSource(numbers, option="b"), out, PackOptions(jobs=1))
    assert "version 1 to 2" in result.reason


def test_a_worker_that_dies_once_costs_nothing(numbers, tmp_path):
    source = NumbersSource(numbers, trouble=((1002, "die-once"),))
    result = pack(source, tmp_path / "s", PackOptions(jobs=2))
    assert (contents(tmp_path / "s") == EXPECTED).all()
    assert result.refused == []


@pytest.mark.parametrize("what", ["hang", "crash"])
def test_a_row_that_hangs_or_crashes_is_refused_and_everything_else_packed(numbers, tmp_path, what):
    source = NumbersSource(numbers, trouble=((1002, what),), row_limit_seconds=2.0)
    began = time.monotonic()
    result = pack(
        source, tmp_path / "s", PackOptions(jobs=1, on_bad="quarantine", bad_budget="10%")
    )
    assert time.monotonic() - began < 60
    assert (contents(tmp_path / "s") == EXPECTED[EXPECTED != 1002]).all()
    assert [(refusal.line, refusal.reason) for refusal in result.refused] == [
        (1002, "took longer than 2 s" if what == "hang" else "crashed the worker process twice")
    ]
    listed = [
        json.loads(line) for line in (tmp_path / "s" / "refused.jsonl").read_text().splitlines()
    ]
    assert listed[0]["line"] == 1002


def test_a_worker_that_keeps_dying_ends_the_pack_with_its_part(numbers, tmp_path):
    source = NumbersSource(numbers, trouble=((1002, "die"),))
    with pytest.raises(StokerError, match="the worker on 'part 1' died again and again"):
        pack(source, tmp_path / "s", PackOptions(jobs=2))


def test_an_error_in_a_worker_keeps_its_text_and_names_its_part(numbers, tmp_path):
    source = NumbersSource(numbers, trouble=((2000, "raise"),))
    with pytest.raises(RuntimeError, match="this source is broken") as caught:
        pack(source, tmp_path / "s", PackOptions(jobs=2))
    assert "while working on 'part 2'" in caught.value.__notes__
    assert not (tmp_path / "s").exists()


KILL_SCRIPT = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from packing_makers import NumbersSource
from stoker.packing import PackOptions, pack
source = NumbersSource(Path({file!r}), parts=4, trouble=((2001, "hang"),))
pack(source, Path({out!r}), PackOptions(jobs=1))
"""


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_pack_resumes_where_it_was(numbers, tmp_path, sign):
    out = tmp_path / "s"
    script = KILL_SCRIPT.format(tests=str(Path(__file__).parent), file=str(numbers), out=str(out))
    process = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 200
    while len(built(numbers)) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(sign)
    process.wait(200)
    assert not out.exists()
    source = NumbersSource(numbers, parts=4)
    pack(source, out, PackOptions(jobs=1))
    assert built(numbers)[:3] == [0, 1, 2]
    assert built(numbers)[3:] == [2, 3]  # the two finished parts were not built again
    fresh = tmp_path / "fresh"
    pack(source, fresh, PackOptions(jobs=1))
    assert tree(out) == tree(fresh)


def test_a_pack_that_fails_leaves_the_old_store_as_it_was(numbers, tmp_path):
    out = tmp_path / "s"
    pack(NumbersSource(numbers), out, PackOptions(jobs=1))
    before = tree(out)
    numbers.write_text("other")
    with pytest.raises(RuntimeError):
        pack(NumbersSource(numbers, trouble=((1, "raise"),)), out, PackOptions(jobs=1))
    assert tree(out) == before


def test_two_packers_on_one_target_are_refused(numbers, tmp_path):
    from stoker.packing.work_folder import WorkFolder
    from stoker.sources.fingerprint import fingerprint

    source = NumbersSource(numbers)
    with (
        WorkFolder(tmp_path / "s", fingerprint(source, {}), print),
        pytest.raises(StoreError, match="another process is packing"),
    ):
        pack(source, tmp_path / "s", PackOptions(jobs=1))


def test_other_peoples_folders_and_files_are_not_replaced(numbers, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(InputError, match="other things in it"):
        pack(NumbersSource(numbers), tmp_path / "mine")
    with pytest.raises(InputError, match="is a file"):
        pack(NumbersSource(numbers), numbers)


def test_no_room_on_the_disk_is_said_before_anything_is_written(numbers, tmp_path, monkeypatch):
    import shutil
    from collections import namedtuple

    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1000, 999, 1))
    with pytest.raises(StoreError, match=r"needs 1000 B"):
        pack(NumbersSource(numbers), tmp_path / "s", PackOptions(jobs=1))


def test_sources_that_are_missing_are_named(tmp_path):
    with pytest.raises(SourceError, match=r"source .*nothing\.txt' does not exist"):
        pack(NumbersSource(tmp_path / "nothing.txt"), tmp_path / "s")


# -- gate ----------------------------------------------------------------------------------


@pytest.fixture
def dirty(tmp_path) -> Path:
    values = np.random.default_rng(0).normal(size=(1000, 40)).astype("f4")
    values[17, 37] = 1e15
    values[500, 3] = np.nan
    np.save(tmp_path / "features.npy", values)
    return tmp_path / "features.npy"


def test_a_1e15_in_column_37_stops_the_pack_and_is_named(dirty, tmp_path):
    with pytest.raises(
        QualityError,
        match=r"(?s)nan features\['3'\].*extreme features\['37'\].*1e\+15.*first row 17",
    ):
        pack(ArraysSource((dirty,)), tmp_path / "s", PackOptions(jobs=1))
    assert not (tmp_path / "s").exists()


def test_quarantine_leaves_exactly_the_bad_rows_out_and_lists_them(dirty, tmp_path):
    source = ArraysSource((dirty,), part_bytes=16_000)  # ten parts
    result = pack(source, tmp_path / "s", PackOptions(jobs=2, on_bad="quarantine"))
    values = np.load(dirty)
    keep = np.ones(1000, bool)
    keep[[17, 500]] = False
    with open_store(tmp_path / "s") as store:
        assert (store.read_rows("features", 0, 998) == values[keep]).all()
    assert sorted(refusal.line for refusal in result.refused) == [17, 500]
    assert result.inspection.refused == []


def test_a_quarantine_over_its_budget_is_refused(dirty, tmp_path):
    with pytest.raises(QualityError, match=r"2 pieces of input refused"):
        pack(
            ArraysSource((dirty,)),
            tmp_path / "s",
            PackOptions(jobs=1, on_bad="quarantine", bad_budget="0.1%"),
        )


def test_repairs_are_recorded_and_replay_to_the_same_values(dirty, tmp_path):
    from stoker.store.repairs import FittedRepair, apply_repairs

    options = PackOptions(jobs=1, repairs=("fill:median", "clip", "robust"))
    result = pack(ArraysSource((dirty,)), tmp_path / "s", options)
    fitted = [FittedRepair.from_json(repair) for repair in result.manifest.repairs["features"]]
    replayed = apply_repairs(np.load(dirty), fitted, [str(number) for number in range(40)])
    with open_store(tmp_path / "s") as store:
        stored = store.read_rows("features", 0, 1000)
    assert np.isfinite(stored).all()
    assert (stored == replayed).all()


def test_repairs_are_fitted_on_the_training_rows_only(tmp_path):
    values = np.arange(1000, dtype="f4").reshape(-1, 1)
    np.save(tmp_path / "features.npy", values)
    np.save(tmp_path / "split.npy", (np.arange(1000) >= 500).astype(np.uint8))
    source = ArraysSource((tmp_path / "features.npy", tmp_path / "split.npy"))
    result = pack(source, tmp_path / "s", PackOptions(jobs=1, repairs=("robust",)))
    changed = values.copy()
    changed[500:] *= 1000
    np.save(tmp_path / "features.npy", changed)
    again = pack(source, tmp_path / "s", PackOptions(jobs=1, repairs=("robust",)))
    assert again.reason.endswith("features.npy changed")
    assert again.manifest.repairs == result.manifest.repairs
    assert "notes" not in result.manifest.attributes


def test_a_repair_that_was_fitted_on_all_rows_says_so(tmp_path):
    """Without a split in the store, the rows of a later test part have their share in it."""
    np.save(tmp_path / "features.npy", np.arange(1000, dtype="f4").reshape(-1, 1))
    np.save(tmp_path / "targets.npy", np.arange(1000) % 2)
    names = ("features.npy", "targets.npy")
    source = ArraysSource(tuple(tmp_path / name for name in names))
    options = PackOptions(jobs=1, repairs=("fill:0", "robust", "fill:median"))
    (note,) = pack(source, tmp_path / "s", options).manifest.attributes["notes"]
    assert note.startswith("robust:0.25,0.75, fill:median: fitted on all rows")
    constant = PackOptions(jobs=1, repairs=("fill:0",))
    assert "notes" not in pack(source, tmp_path / "other", constant).manifest.attributes
    with open_store(tmp_path / "s") as store:
        job = TabularRecipe().make_job(store, {}, 0)
    assert any("when packed, robust:0.25,0.75, fill:median was fitted" in n for n in job.notes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"jobs": -1}, "--jobs is -1"),
        ({"on_bad": "ignore"}, "--on-bad is 'ignore'"),
        ({"repairs": ("magic",)}, "magic"),
        ({"on_bad": "quarantine", "bad_budget": "plenty"}, "plenty"),
        ({"on_bad": "quarantine", "bad_budget": "150%"}, "0% to 100%"),
        ({"bad_budget": "200%"}, "0% to 100%"),
        ({"bad_budget": "5%"}, "it has no effect"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        PackOptions(**options)


@pytest.mark.parametrize(
    ("budget", "allowed"),
    [("1%", 10), ("0.5", 500), ("1", 1), ("0", 0), ("25", 25), ("100%", 1000)],
)
def test_a_budget_is_a_number_of_pieces_or_a_share(budget, allowed):
    assert PackOptions(on_bad="quarantine", bad_budget=budget).allowance(1000) == allowed
    assert PackOptions().allowance(1000) == 0
