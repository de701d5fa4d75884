"""Bars of strangers to the end: hourly coins, several symbols, names without a timeframe, no bars at all."""

from __future__ import annotations

import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import feather

from run_makers import settings_for
from stoker.errors import InputError, SourceError
from stoker.packing import PackOptions, pack
from stoker.recipes.answers import load_model
from stoker.recipes.forex.labels import describe_cut, plan_labels
from stoker.recipes.forex.options import ForexOptions
from stoker.recipes.run import run_recipe
from stoker.sources.bars import BarsSource
from stoker.sources.bars.reading import read_bars
from stoker.store.reader import open_store
from test_bars import WINDOWS, write_symbol

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bars")
    (folder / "raw").mkdir()
    write_symbol(folder / "raw", "BTC_USDT", 1500)
    write_symbol(folder / "raw", "ETH_USDT", 1500)
    source = BarsSource((folder / "raw",), windows=WINDOWS, horizon=4)
    pack(source, folder / "store", PackOptions(jobs=1))
    return run_recipe(settings_for("forex", folder / "store", folder / "run"), device="cpu")


def test_several_symbols_are_evaluated_in_the_order_of_time_and_each_by_itself(run):
    made = run.evaluation
    assert made is not None
    symbols = made.groups["symbol"]
    assert list(symbols) == ["BTC_USDT", "ETH_USDT"]
    assert sum(row["samples"] for row in symbols.values()) == made.num_samples
    whole = sum(row["net_pips"] * row["samples"] for row in symbols.values()) / made.num_samples
    assert whole == pytest.approx(made.metrics["net_pips"])
    # Symbols lie behind one another in the store: examples of a span name theirs, and their times rise.
    keys = [example.key.split(" ", 1) for example in made.examples]
    assert {symbol for symbol, _ in keys} <= set(symbols)
    assert [time for _, time in keys] == sorted(time for _, time in keys)
    # One unit is shared by the decisions of a horizon, of both symbols.
    earned = made.curves[0].lines["buy and hold"][-1][1]
    assert earned == pytest.approx(
        made.baselines["buy and hold"]["net_pips"] * made.num_samples / (4 * 2), rel=1e-6
    )


@pytest.mark.parametrize(("size", "is_cut"), [(6e-3, True), (1e-4, False), (2e-6, True)])
def test_sizes_that_are_cut_are_said_with_a_pip_that_fits(size, is_cut):
    returns = np.cumsum(np.random.default_rng(0).normal(0, size, (500, 12)), axis=1)
    plan = plan_labels(returns, ForexOptions())
    notes = describe_cut(plan, returns, 1.0)
    assert bool(notes) == is_cut
    if notes:
        pip, cost = map(float, re.findall(r"options\.\w+=(\S+)", notes[0]))
        assert cost * pip == pytest.approx(1e-4, rel=0.1)  # the same cost
        assert describe_cut(plan_labels(returns, ForexOptions(pip=pip)), returns, cost) == []


def test_an_exported_graph_says_that_its_bars_are_scaled(run):
    trained = load_model(run.best).trained
    layout = trained.chosen.recipe.export_layout(trained.made, trained.facts)
    about = {port.key: port.about for port in layout.ports}
    assert "bars.scalers" in about["M5"]
    assert set(trained.facts["bars"]["scalers"]) == {"BTC_USDT", "ETH_USDT"}


def test_files_without_a_timeframe_are_named_with_what_to_type(tmp_path):
    (tmp_path / "raw").mkdir()
    lines = ["time,open,high,low,close"]
    lines += [f"2020-01-{day:02} 0{hour}:00,1,2,1,2" for day in range(1, 20) for hour in range(9)]
    (tmp_path / "raw" / "GOOG.csv").write_text("\n".join(lines))
    for given in ("raw", "raw/GOOG.csv"):
        with pytest.raises((InputError, SourceError)) as told:
            pack(BarsSource((tmp_path / given,)), tmp_path / "store", PackOptions(jobs=1))
        assert f"GOOG:H1={tmp_path / 'raw' / 'GOOG.csv'}" in str(told.value), given
    with pytest.raises(SourceError, match="does not exist"):
        pack(BarsSource((tmp_path / "absent",)), tmp_path / "store", PackOptions(jobs=1))


def test_a_header_without_bars_is_called_so(run, tmp_path):
    model = load_model(run.best)
    with open_store(run.best.parent.parent / "store") as store:
        names = [name for name in store.fields if name in dict(WINDOWS)]
    empty = pa.table(
        {name: pa.array([], pa.float64()) for name in ("open", "high", "low", "close")}
    )
    empty = empty.append_column("time", pa.array([], pa.timestamp("s")))
    with pytest.raises(InputError, match="has a header and no bars"):
        model.predict({("BTC_USDT", name): empty for name in names})


@pytest.mark.parametrize("ending", ["parquet", "feather"])
def test_a_file_without_lines_is_counted_in_rows(tmp_path, ending):
    """Arrow files have no header line: rows count from 0, and every row is accounted for."""
    minutes = np.arange(200) * 60 * 10**9
    high = np.full(200, 2.0)
    high[7] = 0.5
    table = pa.table(
        {
            "time": pa.array(minutes, pa.timestamp("ns")),
            "open": np.ones(200),
            "high": high,
            "low": np.full(200, 0.9),
            "close": np.ones(200),
        }
    )
    path = tmp_path / f"EURUSD_M1.{ending}"
    if ending == "parquet":
        pq.write_table(table, path)
    else:
        feather.write_feather(table, path)
    bars = read_bars(path)
    assert (bars.num_lines, len(bars), bars.ignored) == (200, 199, {})
    assert bars.lines.tolist() == [row for row in range(200) if row != 7]
    assert [str(refusal) for refusal in bars.refused] == [f"{path} row 7: high is below low"]
    source = BarsSource((path,), windows=(("M1", 8),), horizon=4)
    kept = PackOptions(jobs=1, on_bad="quarantine")
    account = pack(source, tmp_path / "store", kept).manifest.attributes["accounts"][0]
    assert (account["unit"], account["found"]) == ("rows of M1", 200)
    assert account["found"] == account["packed"] + sum(account["refused"].values()) + sum(
        account["ignored"].values()
    )
