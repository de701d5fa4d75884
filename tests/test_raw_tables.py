"""Predictions for raw tables: what packing did to the training rows is done to new ones, and every row is answered."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from run_makers import settings_for
from stoker.errors import InputError
from stoker.packing import PackOptions, pack
from stoker.recipes.answers import load_model, predict_file
from stoker.recipes.inference import Trained, load_trained
from stoker.recipes.run import run_recipe
from stoker.recipes.scaling import RobustScale
from stoker.sources.tables import TableSource
from stoker.strict_json import parse_json
from stoker.train.predict import is_written_here

pytestmark = pytest.mark.usefixtures("one_thread")
KINDS = ("red", "green", "blue")


def people(count: int = 160) -> list[dict[str, str]]:
    rng = np.random.default_rng(0)
    rows = []
    for number in range(count):
        kind = KINDS[number % 3]
        rows.append({
            "id": f"n{number}", "kind": kind, "age": "" if number % 7 == 0 else str(rng.integers(1, 90)),
            "ms": str(1_600_000_000_000 + 60_000 * number), "when": f"2020-03-{number % 28 + 1:02d} 1{number % 10}:00",
            "ok": "yes" if number % 2 else "no", "size": f"{rng.random():.4f}", "label": f"is {kind}",
        })  # fmt: skip
    return rows


def write_csv(path, rows, names=None, delimiter=","):
    names = names or list(rows[0])
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names, extrasaction="ignore", delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Trained:
    folder = tmp_path_factory.mktemp("raw")
    source = TableSource((write_csv(folder / "t.csv", people()),), "label", ("id",), missing="keep")
    pack(source, folder / "store", PackOptions(jobs=1, repairs=("fill:median", "robust")))
    run = run_recipe(settings_for("tabular", folder / "store", folder / "run"), device="cpu")
    return load_trained(run.best)


def answers(path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_raw_rows_and_packed_rows_get_the_same_answers(trained, tmp_path):
    """Columns in another order, with and without the target, in other formats: bit for bit the same."""
    rows = people()
    store = trained.loaded.saved.path.parent.parent / "store"
    predict_file(trained, store, tmp_path / "a.parquet", device="cpu")
    want = pq.read_table(tmp_path / "a.parquet")
    names = ["size", "ok", "when", "ms", "age", "kind", "extra"]
    write_csv(tmp_path / "b.csv", rows, names, delimiter="\t")
    typed = pa.table({name: [row.get(name) for row in rows] for name in reversed(names[:-1])})
    pq.write_table(typed, tmp_path / "c.parquet")
    for name in ("b.csv", "c.parquet"):
        report = predict_file(trained, tmp_path / name, tmp_path / "o.parquet", device="cpu")
        got = pq.read_table(tmp_path / "o.parquet")
        assert got["class"].to_pylist() == want["class"].to_pylist()
        assert got["probability"].to_pylist() == want["probability"].to_pylist()
        assert got["reason"].null_count == len(rows) == report.num_rows
        assert any("made here as in training (fill:median, robust" in note for note in report.notes)
    assert set(want["class"].to_pylist()) <= {"is red", "is green", "is blue"}


def test_every_row_gets_an_answer_or_a_reason(trained, tmp_path):
    rows = people(6)
    rows[1] |= {"age": ""}  # filled in training: answered
    rows[2] |= {"kind": "violet"}  # a text that training did not have
    rows[3] |= {"size": "big"}
    rows[4] |= {"when": "yesterday", "ok": "maybe"}
    path = write_csv(tmp_path / "n.csv", rows, list(rows[0])[:-1])
    text = path.read_text().splitlines()
    path.write_text("\n".join([*text[:6], "1,2", *text[6:]]) + "\n")
    report = predict_file(trained, path, tmp_path / "o.csv", device="cpu")
    made = answers(tmp_path / "o.csv")
    assert [row["row"] for row in made] == [str(number) for number in range(7)]
    reasons = [row["reason"] for row in made]
    assert reasons[0] == reasons[1] == reasons[6] == ""
    assert reasons[2] == "kind is 'violet', which training did not have"
    assert reasons[3] == "column 'size' holds 'big', not a number"
    assert "not a date" in reasons[4]
    assert reasons[5] == "2 cells instead of 7"
    assert [bool(row["class"]) for row in made] == [True, True, True, False, False, False, True]
    assert sum(float(made[0][f"probability_is {kind}"]) for kind in KINDS) == pytest.approx(
        1, abs=1e-5
    )
    assert "3 rows without an answer; see 'reason'" in report.notes


def test_rows_without_a_text_or_without_anything_are_told(trained, tmp_path):
    """Repairs would make an answer of a row with nothing in it, and a missing text is a row of zeros."""
    rows = people(4)
    rows[1] |= {"kind": " "}
    rows[2] = dict.fromkeys(rows[2], "")
    report = predict_file(
        trained, write_csv(tmp_path / "n.csv", rows), tmp_path / "o.csv", device="cpu"
    )
    made = answers(tmp_path / "o.csv")
    assert made[1]["reason"] == "no value in kind, which training always had"
    assert made[2]["reason"] == "no value in any column"
    assert [bool(row["class"]) for row in made] == [True, True, False, True]
    assert "1 row without an answer; see 'reason'" in report.notes


def test_missing_columns_are_named_all_at_once(trained, tmp_path):
    path = write_csv(tmp_path / "n.csv", people(3), ["kind", "age", "ok"])
    with pytest.raises(InputError, match="lacks 3 columns of the training table: ms, when, size"):
        predict_file(trained, path, tmp_path / "o.csv", device="cpu")


def test_only_predictions_are_replaced(trained, tmp_path):
    path = write_csv(tmp_path / "n.csv", people(3))
    for name in ("o.csv", "o.parquet"):
        predict_file(trained, path, tmp_path / name, device="cpu")
        predict_file(trained, path, tmp_path / name, device="cpu")
    (tmp_path / "mine.csv").write_text('"row","x"\n1,2\n')
    assert not is_written_here(tmp_path / "mine.csv")
    with pytest.raises(InputError, match="stoker did not write it"):
        predict_file(trained, path, tmp_path / "mine.csv", device="cpu")
    with pytest.raises(InputError, match="is read by this command"):
        predict_file(trained, path, path, device="cpu")
    with pytest.raises(InputError, match="a name that ends in"):
        predict_file(trained, path, tmp_path / "o.xls", device="cpu")


def test_a_model_that_was_not_trained_on_a_table_says_so(tmp_path):
    from run_makers import make_store

    store = make_store("tabular", tmp_path / "s")
    run = run_recipe(settings_for("tabular", store.path, tmp_path / "run"), device="cpu")
    path = write_csv(tmp_path / "n.csv", people(3))
    with pytest.raises(InputError, match=r"recipe tabular, which does not read .*n\.csv"):
        predict_file(load_trained(run.best), path, tmp_path / "o.csv", device="cpu")


def test_times_that_float32_would_merge_reach_the_model_apart(trained):
    """44,640 millisecond times stay 44,640 values, behind the scaler too."""
    times = 1_600_000_000_000 + 60_000 * np.arange(44_640, dtype=np.float64)
    assert len(np.unique(times.astype(np.float32))) < 25_000
    center, scale = np.array([np.median(times)]), np.array([times.std()])
    wide = RobustScale(center, scale, None, torch.float64)
    scaled = wide(torch.from_numpy(times[:, None]))
    assert scaled.dtype == torch.float32
    assert len(torch.unique(scaled)) == len(times)
    assert trained.facts["is_wide"]
    assert trained.model.scaler.center.dtype == torch.float64


# -- frames in memory, folders, other endings ------------------------------------------------------


def test_frames_of_all_kinds_get_the_answers_of_the_file(trained, tmp_path):
    rows = people(20)
    path = write_csv(tmp_path / "n.csv", rows)
    model = load_model(trained.loaded.saved.path)
    want = model.predict(path, device="cpu")
    frames = [
        pa.Table.from_pylist(rows), rows, {name: [row[name] for row in rows] for name in rows[0]},
        pa.Table.from_pylist(rows).to_batches()[0],
    ]  # fmt: skip
    for frame in frames:
        got = model.predict(frame, device="cpu")
        assert got["class"].to_pylist() == want["class"].to_pylist()
        assert got["probability"].to_pylist() == want["probability"].to_pylist()
        assert got["row"].to_pylist() == list(range(20))
    assert model.class_names == ["is blue", "is green", "is red"]
    assert "recipe tabular" in repr(model)


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (np.zeros((3, 2)), "an array of shape"),
        ({"kind": ["red"]}, "the dict lacks 5 columns"),
        (7, "a int that is no table"),
        ({"kind": [["red"], 3]}, "that is no table"),
    ],
)
def test_frames_that_cannot_be_used_are_refused(trained, frame, words):
    with pytest.raises(InputError, match=words):
        load_model(trained.loaded.saved.path).predict(frame)


def test_no_rows_is_an_error_and_leaves_no_file(trained, tmp_path):
    path = tmp_path / "n.csv"
    path.write_text(",".join(people(1)[0]) + "\n")
    model = load_model(trained.loaded.saved.path)
    with pytest.raises(InputError, match=r"n\.csv has no rows"):
        predict_file(trained, path, tmp_path / "o.csv", device="cpu")
    assert not (tmp_path / "o.csv").exists()
    with pytest.raises(InputError, match="has no rows"):
        model.predict(pa.Table.from_pylist(people(1))[:0])


def test_a_folder_of_tables_keeps_file_and_row(trained, tmp_path):
    rows = people(9)
    (tmp_path / "days").mkdir()
    write_csv(tmp_path / "days" / "a.csv", rows[:4])
    write_csv(tmp_path / "days" / "b.csv", rows[4:], list(reversed(rows[0])))
    predict_file(trained, tmp_path / "days", tmp_path / "o.csv", device="cpu")
    made = answers(tmp_path / "o.csv")
    assert [row["row"] for row in made] == ["0", "1", "2", "3", "0", "1", "2", "3", "4"]
    assert [row["file"].rpartition("/")[2] for row in made] == ["a.csv"] * 4 + ["b.csv"] * 5
    whole = predict_file(
        trained, write_csv(tmp_path / "w.csv", rows), tmp_path / "w.jsonl", device="cpu"
    )
    lines = [parse_json(line) for line in (tmp_path / "w.jsonl").read_text().splitlines()]
    assert whole.num_rows == 9
    assert [line["class"] for line in lines] == [row["class"] for row in made]
    assert set(lines[0]["probability"]) == {"is red", "is green", "is blue"}
    assert is_written_here(tmp_path / "w.jsonl")


def test_rows_with_targets_are_evaluated(trained, tmp_path):
    rows = people(60)
    rows[3] |= {"label": "is violet"}  # a class that training did not have
    rows[4] |= {"label": ""}
    report = predict_file(
        trained, write_csv(tmp_path / "n.csv", rows), tmp_path / "o.csv", device="cpu"
    )
    made = answers(tmp_path / "o.csv")
    right = [row["label"] == got["class"] for row, got in zip(rows, made, strict=True)]
    assert report.evaluation is not None
    assert report.evaluation.num_samples == 58
    assert report.evaluation.metrics["accuracy"] == pytest.approx(sum(right) / 58)
    assert report.evaluation.confusion is not None
    assert report.evaluation.confusion.names == ("is blue", "is green", "is red")
    assert any("2 rows whose 'label' is empty or a class" in note for note in report.notes)
    without = write_csv(tmp_path / "w.csv", rows, list(rows[0])[:-1])
    assert predict_file(trained, without, tmp_path / "o.csv", device="cpu").evaluation is None


def test_a_value_is_called_by_its_target(tmp_path):
    file = write_csv(tmp_path / "t.csv", people(), ("kind", "ok", "size"))
    pack(TableSource((file,), "size"), tmp_path / "store", PackOptions(jobs=1))
    run = run_recipe(settings_for("tabular", tmp_path / "store", tmp_path / "run"), device="cpu")
    trained = load_trained(run.best)
    for given, out in ((file, "a.csv"), (tmp_path / "store", "b.csv"), (file, "a.csv")):
        report = predict_file(trained, given, tmp_path / out, device="cpu")
        assert report.columns[0] == "value_size"
        assert report.evaluation.metrics["mae"] > 0
    rows, packed = answers(tmp_path / "a.csv"), answers(tmp_path / "b.csv")
    assert [row["value_size"] for row in rows] == [row["value_size"] for row in packed]
    frame = load_model(run.best).predict(file, device="cpu")
    assert frame.schema.field("value_size").type == pa.float32()


def test_values_in_other_units_are_told(trained, tmp_path):
    rows = [row | {"size": str(1e6 * float(row["size"]) + 1e5)} for row in people(20)]
    report = predict_file(
        trained, write_csv(tmp_path / "n.csv", rows), tmp_path / "o.csv", device="cpu"
    )
    assert any("of size lie far outside of what training had" in note for note in report.notes)
    report = predict_file(
        trained, write_csv(tmp_path / "n.csv", people(20)), tmp_path / "o.csv", device="cpu"
    )
    assert not any("far outside" in note for note in report.notes)
    # Metres for centimetres: ten spreads away, of many rows. Of two rows it may be the tail.
    scaler = trained.made.model.scaler
    moved = 10 * float(scaler.scale[trained.facts["columns"]["features"].index("size")])
    rows = [row | {"size": str(float(row["size"]) - moved)} for row in people(20)]
    for count, is_told in ((20, True), (2, False)):
        path = write_csv(tmp_path / "n.csv", rows[:count])
        report = predict_file(trained, path, tmp_path / "o.csv", device="cpu")
        assert any("of size lie far outside" in note for note in report.notes) == is_told


def test_a_missing_column_is_not_said_to_be_one_that_is_used(trained, tmp_path):
    rows = [{name: value for name, value in row.items() if name != "size"} for row in people(3)]
    with pytest.raises(InputError, match="lacks 1 column of the training table: size") as error:
        predict_file(trained, write_csv(tmp_path / "n.csv", rows), tmp_path / "o.csv", device="cpu")
    assert error.value.fix == "a file with these columns"
    rows = [{**row, "sizes": "1"} for row in rows]
    with pytest.raises(InputError) as error:
        predict_file(trained, write_csv(tmp_path / "n.csv", rows), tmp_path / "o.csv", device="cpu")
    assert error.value.fix == "rename: 'size' may be sizes"
    with pytest.raises(InputError, match="does not exist") as error:
        predict_file(trained, tmp_path / "none.csv", tmp_path / "o.csv", device="cpu")
    assert "CSV or Parquet files with the columns of training; or a store" in str(error.value)


def test_a_store_is_predicted_by_the_command_and_not_as_a_frame(trained, tmp_path):
    store = trained.loaded.saved.path.parent.parent / "store"
    with pytest.raises(InputError, match="is a store") as error:
        load_model(trained.loaded.saved.path).predict(store)
    assert error.value.fix.startswith("stoker predict ")
    assert predict_file(trained, store, tmp_path / "o.csv", device="cpu").num_rows == 160
    path = write_csv(tmp_path / "n.csv", people(3))
    with pytest.raises(InputError, match="--split is 'test'"):
        predict_file(trained, path, tmp_path / "o.csv", split="test", device="cpu")


def test_the_python_of_the_page_on_tables_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"age": str(20 + n % 50), "sex": ("male", "female")[n % 2], "ok": "yes" if n % 2 else "no"}
            for n in range(80)]  # fmt: skip
    pack(TableSource((write_csv(tmp_path / "t.csv", rows),), "ok"), "store", PackOptions(jobs=1))
    run_recipe(settings_for("tabular", "store", tmp_path / "runs" / "first"), device="cpu")
    page = (Path(__file__).parents[1] / "docs" / "tables.md").read_text("utf-8")
    example = page.partition("```python\n")[2].partition("```")[0]
    names: dict = {}
    exec(compile(example, "docs/tables.md", "exec"), names)
    assert names["answers"].num_rows == 2
    assert set(names["answers"]["class"].to_pylist()) <= {"yes", "no"}
