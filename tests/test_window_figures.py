"""Windows as the model gets them: what is drawn is what is stored; a swapped close and a shifted label are named."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from kept_commands import invoke
from stoker.packing import PackOptions, pack
from stoker.packing.samples import Samples, sample_facts, samples_of, samples_section
from stoker.packing.window_figures import WARNING, Window, bars_of
from stoker.sources.bars import BarsSource
from stoker.store.manifest import PAGE_NAME
from stoker.store.reader import open_store


def write_bars(path, header="time,open,high,low,close,volume", rows=400, seed=0):
    """Write bars whose opens continue the close before; names in `header` say what the columns are taken for."""
    rng = np.random.default_rng(seed)
    close = 100 * np.exp(np.cumsum(rng.normal(0, 1e-3, rows)))
    opens = np.concatenate([[100.0], close[:-1]])
    high, low = np.maximum(opens, close) * 1.0004, np.minimum(opens, close) * 0.9996
    minutes = np.datetime64("2020-01-01T00:00") + 5 * np.arange(rows)
    lines = [
        f"{time},{a!r},{b!r},{c!r},{d!r},{10 + n % 7}".replace("T", " ")
        for n, (time, a, b, c, d) in enumerate(
            zip(minutes, opens.tolist(), high.tolist(), low.tolist(), close.tolist(), strict=True)
        )
    ]
    path.write_text("\n".join([header, *lines]) + "\n")
    return np.stack([opens, high, low, close])


@pytest.fixture
def bars(tmp_path):
    return write_bars(tmp_path / "AB_M5.csv")


def source(tmp_path):
    return BarsSource((tmp_path / "AB_M5.csv",), windows=(("M5", 24),), horizon=6)


def test_prices_are_drawn_back_from_what_is_stored(tmp_path, bars):
    pack(source(tmp_path), tmp_path / "s", PackOptions(jobs=1))
    with open_store(tmp_path / "s") as store:
        samples = samples_of(store)
        ends = store.read_series("M5", "ends")
        first = samples.rows[0]
        scaler = store.manifest.attributes["scalers"]["AB"]["M5"]
        columns = store.fields["M5"].columns
    drawn = bars_of(first["M5"], columns, scaler)
    at = np.log(bars[:, : int(ends[0]) + 6])  # the series begins at the file's first bar
    wanted = at[:, int(ends[0]) - 24 :] - at[3, int(ends[0]) - 1]
    for values, expected in zip(
        (drawn.open, drawn.high, drawn.low, drawn.close), wanted, strict=True
    ):
        np.testing.assert_allclose(values, expected, atol=2e-6)
    np.testing.assert_allclose(drawn.close[24:], first["targets"], atol=2e-6)
    facts = sample_facts(samples)
    assert facts["open against the close before"].split()[0] == "0.00"
    assert facts["targets are the bars after t"] == "in 23 of 23 windows"
    assert WARNING not in facts
    section = samples_section(samples)
    assert section is not None
    assert section.body.count("<polyline") == 12  # one target a window
    assert section.body.count("stroke-dasharray") == 12  # one t a window
    assert "t = 2020-01-01 02:00" in section.body


def test_raw_bars_show_the_same_as_the_store(tmp_path, bars):
    pack(source(tmp_path), tmp_path / "s", PackOptions(jobs=1))
    options = ("--windows", "M5=24", "--horizon", "6", "--json")
    raw = json.loads(invoke("inspect", tmp_path / "AB_M5.csv", *options).stdout)["facts"]
    stored = json.loads(invoke("inspect", tmp_path / "s", "--json").stdout)["facts"]
    for name in ("windows", "features", "t", "targets are the bars after t"):
        assert raw[name] == stored[name]


def test_a_swapped_close_is_named(tmp_path):
    write_bars(tmp_path / "AB_M5.csv", "time,close,high,low,open,volume")
    done = invoke("inspect", tmp_path / "AB_M5.csv", "--html", tmp_path / "p.html")
    assert "the close may be another column" in done.stdout
    assert "the close may be another column" in (tmp_path / "p.html").read_text()


@pytest.mark.parametrize("shift", [-1, 1, 3])
def test_a_shifted_label_is_named(tmp_path, bars, shift):
    own = source(tmp_path)
    preparation = own.prepare(tmp_path)
    built = own.build(preparation.parts[0], None)
    targets = built.fields["targets"]
    wrong = replace(targets, values=np.roll(targets.values, shift, axis=0))
    samples = Samples()
    samples.take({**built.fields, "targets": wrong}, "AB")
    samples.attributes = own.finish([built.extra])
    assert "the labels may be shifted" in sample_facts(samples)[WARNING]


def test_a_series_without_prices_is_drawn_as_lines(tmp_path):
    rows = np.stack([np.arange(40.0), np.full(40, np.nan)], axis=1)
    samples = Samples()
    # A field of another meaning may be called time, and a column may hold nothing.
    samples.rows = [{"x": Window(rows, 30, None), "labels": np.int64(1), "time": np.zeros(3)}]
    from stoker.store.manifest import FieldInfo

    info = FieldInfo(kind="series", dtype="<f8", shape=[2], columns=["a", "<b>"], window=30)
    samples.fields = {"x": info}
    section = samples_section(samples)
    assert section is not None
    assert section.body.count("<polyline") == 2
    assert "<b>" not in section.body
    assert "a 0 to 29" in section.body


def test_a_table_of_bars_says_how_to_see_its_windows(tmp_path):
    write_bars(tmp_path / "prices.csv", "time,open,high,low,close,volume")
    facts = json.loads(invoke("inspect", tmp_path / "prices.csv", "--json").stdout)["facts"]
    hint = next(value for value in facts.values() if "these are bars of M5" in value)
    typed = re.search(r"stoker inspect (\S+)", hint)
    assert typed is not None
    shown = json.loads(invoke("inspect", typed[1], "--json").stdout)["facts"]
    assert shown["windows"] == "M5 110 rows"
    as_table = invoke("inspect", tmp_path / "prices.csv", "--as", "table", "--json")
    assert "windows" not in json.loads(as_table.stdout)["facts"]


def test_every_pack_ends_with_a_page_in_the_store(tmp_path, bars):
    out = tmp_path / "s"
    words = ("pack", "bars", tmp_path / "AB_M5.csv", out, "--windows", "M5=24", "--horizon", "6")
    done = invoke(*words)
    assert done.exit_code == 0, done.stdout
    assert f"samples as the model gets them: {out / PAGE_NAME}" in done.stdout
    assert "targets are the bars after t: in 23 of 23 windows" in done.stdout
    text = (out / PAGE_NAME).read_text()
    assert "<polyline" in text
    # The page belongs to the store: the next pack replaces both.
    again = invoke(*words, "--force-recreate", "--json")
    assert json.loads(again.stdout)["page"] == str(out / PAGE_NAME)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["AB_M5.csv", "s"]


def test_arrays_without_anything_to_draw_have_a_page_too(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(60, dtype=np.float32).reshape(20, 3))
    done = invoke("pack", "arrays", tmp_path / "x.npy", tmp_path / "s")
    assert done.exit_code == 0, done.stdout
    assert (tmp_path / "s" / PAGE_NAME).read_text().startswith("<!doctype html>")
