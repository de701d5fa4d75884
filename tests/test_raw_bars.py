"""Predictions for raw bars: the answers of the packed store, one per bar under its time, without a look ahead."""

from __future__ import annotations

import re

import numpy as np
import pyarrow.csv as arrow_csv
import pyarrow.parquet as pq
import pytest

from run_makers import settings_for
from stoker.errors import InputError
from stoker.packing import PackOptions, pack
from stoker.recipes.answers import Model, load_model, predict_file
from stoker.recipes.run import run_recipe
from stoker.sources.bars import BarsSource
from stoker.store.reader import open_store
from stoker.train.predict import is_written_here
from test_bars import WINDOWS, make_minutes, resample, write_bars, write_symbol

NAMES = arrow_csv.ReadOptions(column_names=["time", "open", "high", "low", "close", "volume"])
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Model:
    folder = tmp_path_factory.mktemp("bars")
    (folder / "raw").mkdir()
    write_symbol(folder / "raw", "EURUSD", 1500)
    source = BarsSource((folder / "raw",), windows=WINDOWS, horizon=4)
    pack(source, folder / "store", PackOptions(jobs=1))
    run = run_recipe(settings_for("forex", folder / "store", folder / "run"), device="cpu")
    assert run.best is not None
    return load_model(run.best)


@pytest.fixture
def folder(model):
    return model.trained.loaded.saved.path.parent.parent


def test_raw_bars_and_packed_bars_get_the_same_answers(model, folder, tmp_path):
    predict_file(model.trained, folder / "store", tmp_path / "s.parquet", device="cpu")
    want = pq.read_table(tmp_path / "s.parquet")
    with open_store(folder / "store") as store:
        time = store.read_rows("time", 0, store.num_samples)
    assert want.column_names[:2] == ["time", "sample"]
    assert (want["time"].cast("int64").to_numpy() * 1000 == time).all()
    report = predict_file(model.trained, folder / "raw", tmp_path / "r.parquet", device="cpu")
    got = pq.read_table(tmp_path / "r.parquet")
    assert report.num_rows == got.num_rows == 1500 // 5  # a row for every bar of the base timeframe
    keys = np.array([key.timestamp() for key in got["time"].to_pylist()])
    rows = np.flatnonzero(np.isin(keys, time // 10**9))
    assert len(rows) == len(time)
    for name in ("probability", "scalp", "trend"):
        found = np.array(got[name].take(rows).to_pylist())
        np.testing.assert_allclose(found, want[name].to_pylist(), rtol=1e-5, atol=1e-6)
    # The last bars have no label, and an answer; the first ones have no window, and a reason.
    assert got["class"].null_count == int(np.count_nonzero(keys < time[0] / 1e9))
    assert got["reason"][0].as_py() == "too few bars before this one for a window"
    assert got["class"][-1].as_py() in ("down", "neutral", "up")


def test_the_future_changes_no_answer_of_the_past(model, folder, tmp_path):
    """Bars after a time are replaced by others: every answer up to it is the same, bit for bit."""
    minutes, rows = make_minutes(1500, 0)
    other = rows.copy()
    other[1000:, :4] *= 1.5
    made = {}
    for name, values in (("one", rows), ("two", other)):
        (tmp_path / name).mkdir()
        for timeframe, _ in WINDOWS:
            write_bars(tmp_path / name, "EURUSD", timeframe, *resample(minutes, values, timeframe))
        made[name] = model.predict(tmp_path / name, device="cpu")
    known = minutes[1000]
    keys = made["one"]["time"].cast("int64").to_numpy() * 1000
    past = keys <= known
    assert past.sum() > 150
    nothing = [np.nan] * 3
    shares = {n: [row or nothing for row in made[n]["probability"].to_pylist()] for n in made}
    np.testing.assert_array_equal(*(np.array(rows)[past] for rows in shares.values()))
    for name in ("scalp", "swing", "trend"):
        one, two = (made[which][name].to_numpy(zero_copy_only=False) for which in ("one", "two"))
        np.testing.assert_array_equal(one[past], two[past])
        assert (one[~past] != two[~past]).any()


def test_bars_that_training_did_not_have_are_refused(model, tmp_path):
    (tmp_path / "other").mkdir()
    write_symbol(tmp_path / "other", "USDJPY", 200)
    with pytest.raises(InputError, match="bars of USDJPY, which the model was not trained on"):
        model.predict(tmp_path / "other")
    (tmp_path / "few").mkdir()
    write_symbol(tmp_path / "few", "EURUSD", 200)
    for path in (tmp_path / "few").glob("*_M15.csv"):
        path.unlink()
    with pytest.raises(InputError, match="has no file for M15"):
        model.predict(tmp_path / "few")
    with pytest.raises(InputError, match="a dict of bars without a timeframe"):
        model.predict({"close": [1.0]})


def read_frames(folder):
    return {
        timeframe: arrow_csv.read_csv(next(folder.glob(f"*_{timeframe}.csv")), NAMES)
        for timeframe, _ in WINDOWS
    }


def with_symbol(table, symbol):
    return table.append_column("symbol", [[symbol] * table.num_rows])


def test_frames_get_the_answers_of_files(model, folder):
    want = model.predict(folder / "raw", device="cpu")
    frames = read_frames(folder / "raw")
    given = {
        "by timeframe": frames,
        "by symbol": {"EURUSD": frames},
        "by both": {("eurusd", name): frame for name, frame in frames.items()},
        "columns": {name: frame.to_pydict() for name, frame in frames.items()},
        "a column of symbols": {n: with_symbol(f, "EURUSD") for n, f in frames.items()},
    }
    for what, each in given.items():
        assert model.predict(each, device="cpu").equals(want), what


def test_a_pandas_index_of_times_is_the_time(model, folder):
    pd = pytest.importorskip("pandas")
    want = model.predict(folder / "raw", device="cpu")
    frames = {}
    for name, table in read_frames(folder / "raw").items():
        frame = table.to_pandas()
        frames[name] = frame.set_index(pd.to_datetime(frame.pop("time"), utc=True))
        frames[name].index.name = None
    assert model.predict(frames, device="cpu").equals(want)


def test_frames_that_cannot_be_used_are_answered_with_what_to_type(model, folder):
    frames = read_frames(folder / "raw")
    base = frames["M5"]
    foreign = [name if name != "close" else "Schluss" for name in base.column_names]
    said = "predict({" + ", ".join(f"{name!r}: frame" for name, _ in WINDOWS) + "})"
    for given, match in (
        (base, "a Table of bars without a timeframe"),
        ({**frames, "M15": None}, "a NoneType that is no table"),
        ({"M5": base}, "EURUSD has no file for"),
        ({n: with_symbol(f, "USDJPY") for n, f in frames.items()}, "bars of USDJPY, which"),
        ({**frames, "M5": base.rename_columns(foreign)}, "names no close"),
        ({**frames, "M5": base.slice(0, 0)}, "the frame of EURUSD M5"),
    ):
        with pytest.raises(InputError, match=re.escape(match)) as found:
            model.predict(given)
        assert "/tmp" not in str(found.value)
        if "without" in match:
            assert found.value.fix == said


def test_answers_for_bars_are_written_by_ending_and_may_be_replaced(model, folder, tmp_path):
    for name in ("o.csv", "o.jsonl", "o.parquet"):
        predict_file(model.trained, folder / "raw", tmp_path / name, device="cpu")
        assert is_written_here(tmp_path / name)
    head = (tmp_path / "o.csv").read_text().splitlines()[0]
    shares = '"probability_down","probability_neutral","probability_up"'
    assert head == f'"time","class",{shares},"scalp","swing","trend","reason"'
    (tmp_path / "mine.csv").write_text('"time","open","up","down"\n')
    assert not is_written_here(tmp_path / "mine.csv")
