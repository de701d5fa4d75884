"""Tables of strangers: a class that is called like a missing value."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from run_makers import settings_for
from stoker.errors import InputError, QualityError, SourceError
from stoker.packing import PackOptions, pack
from stoker.recipes.answers import load_model
from stoker.recipes.raw_tables import RawTable
from stoker.recipes.run import run_recipe
from stoker.sources.tables import TableSource, parse_codes, parse_words
from stoker.sources.tables.columns import find_kind
from stoker.sources.tables.reading import TableFile
from stoker.store.reader import open_store


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_a_class_that_reads_as_missing_is_named(tmp_path, ending):
    """Damage after a collision is "None", "Minor" or "Substantial" in public tables: nine rows of ten."""
    damage = ["Minor", "Substantial", *["None"] * 18]
    path = tmp_path / f"t.{ending}"
    if ending == "csv":
        path.write_text(
            "speed,damage\n" + "".join(f"{n},{word}\n" for n, word in enumerate(damage))
        )
    else:
        pq.write_table(pa.table({"speed": range(20), "damage": damage}), path)
    with pytest.raises(SourceError) as told:
        pack(TableSource((path,), target="damage"), tmp_path / "store", PackOptions(jobs=1))
    assert "'None' is read as missing (--value damage=None makes it a class), in 18 of" in str(
        told.value
    )
    assert told.value.fix == "--value damage=None"
    source = TableSource((path,), target="damage", words={"damage": ["None"]})
    with open_store(pack(source, tmp_path / "store", PackOptions(jobs=1)).path) as store:
        assert store.manifest.attributes["classes"] == ["Minor", "None", "Substantial"]
        assert store.num_samples == 20


def test_few_rows_of_such_a_class_say_it_too(tmp_path):
    damage = ["Minor", "Substantial"] * 9 + ["None", ""]
    rows = "".join(f"{n},{word}\n" for n, word in enumerate(damage))
    (tmp_path / "t.csv").write_text("speed,damage\n" + rows)
    with pytest.raises(QualityError) as told:
        pack(
            TableSource((tmp_path / "t.csv",), target="damage"),
            tmp_path / "store",
            PackOptions(jobs=1),
        )
    assert "no value in the target column 'damage': 'None' is read as missing" in str(told.value)
    assert str(told.value).count("is read as missing") == 1  # the empty cell is empty


def test_a_word_that_is_a_value_is_one_for_new_rows_too(tmp_path):
    """In the target and in a feature; of another column, and without the option, it is missing as before."""
    rows = [f"{n},{'NA' if n % 3 else 'flat'},{'None' if n % 2 else 'Minor'}" for n in range(200)]
    (tmp_path / "t.csv").write_text("speed,roof,damage\n" + "\n".join(rows))
    source = TableSource(
        (tmp_path / "t.csv",),
        target="damage",
        words={"damage": ["None"], "roof": ["NA"]},
    )
    store = pack(source, tmp_path / "store", PackOptions(jobs=1)).path
    with open_store(store) as opened:
        assert opened.fields["features"].columns == ["speed", "roof=NA", "roof=flat"]
    run = run_recipe(settings_for("tabular", store, tmp_path / "run"), device="cpu")
    new = {"speed": ["1", "2", "3"], "roof": ["NA", "None", ""], "damage": ["None", "Minor", "NA"]}
    answers = load_model(run.best).predict(pa.table(new))
    assert set(answers.column("class").to_pylist()) <= {"Minor", "None"}
    reasons = answers.column("reason").to_pylist()
    assert reasons[0] is None
    assert reasons[1:] == ["no value in roof, which training always had"] * 2


@pytest.mark.parametrize("given", ["None", "=None", "damage", "damage=Minor"])
def test_a_value_that_is_never_missing_is_no_use(given):
    with pytest.raises(InputError, match="usually read as missing"):
        parse_words([given])


def test_a_word_in_a_column_of_numbers_is_refused(tmp_path):
    (tmp_path / "t.csv").write_text("speed,x\n" + "1,2\n" * 20)
    for words, dtypes, said in (
        ({"x": ["NA"]}, {"x": "number"}, "--dtype x=category"),
        ({"spede": ["NA"]}, {}, "--value speed=NA"),
    ):
        source = TableSource((tmp_path / "t.csv",), words=words, dtypes=dtypes)
        with pytest.raises(SourceError) as told:
            pack(source, tmp_path / "store", PackOptions(jobs=1))
        assert told.value.fix == said


@pytest.mark.parametrize("given", ["", "x", "nan", "=5", "a=b", "a="])
def test_a_code_is_a_number(given):
    with pytest.raises(InputError, match="--missing-code is"):
        parse_codes([given])


def test_numbers_that_stand_for_missing_values_are_missing_in_training_and_in_answers(tmp_path):
    rng = np.random.default_rng(0)
    rows = [[f"{rng.random():.3f}", f"{rng.normal():.2f}", "ab"[n % 2]] for n in range(90)]
    for n in range(0, 90, 9):
        rows[n][0] = ("-200", "-200.0", "-2e2")[n // 9 % 3]
        rows[n][1] = "-999"
    (tmp_path / "t.csv").write_text(
        "CO;T;kind\n" + "\n".join(map(";".join, rows)).replace(".", ",")
    )
    pq.write_table(
        pa.table({"CO": pa.array([float(row[0]) for row in rows], pa.float32()), "T": pa.array(
            [float(row[1]) for row in rows]), "kind": [row[2] for row in rows]}), tmp_path / "t.parquet")  # fmt: skip
    stores = []
    for name in ("t.csv", "t.parquet"):
        codes = parse_codes(["CO=-200", "-999"])
        source = TableSource((tmp_path / name,), "kind", missing="flag", codes=codes)
        options = PackOptions(jobs=1, repairs=("fill:median",))
        stores.append(open_store(pack(source, tmp_path / f"{name} store", options).path))
    one, other = (store.gather("features", np.arange(90)) for store in stores)
    np.testing.assert_array_equal(one, other)
    assert stores[0].fields["features"].columns == ["CO", "CO_missing", "T", "T_missing"]
    assert one[::9, 1].tolist() == [1.0] * 10 == one[::9, 3].tolist()
    assert one[:, :3:2].min() > -10
    assert not [f for f in stores[0].manifest.quality["findings"] if "code" in f["name"]]
    settings = settings_for("tabular", stores[0].path, tmp_path / "run")
    model = load_model(run_recipe(settings, device="cpu").best)
    new = model.predict(pa.table({"CO": [-200.0, None], "T": [-999.0, None]}), device="cpu")
    first, second = new.column("probability").to_pylist()
    assert first == second
    with pytest.raises(SourceError) as told:
        pack(TableSource((tmp_path / "t.csv",), codes={"co": [-200]}), tmp_path / "no")
    assert told.value.fix == "--missing-code CO=-200"


def test_a_target_that_is_a_code_is_left_out(tmp_path):
    (tmp_path / "t.csv").write_text(
        "x,y\n" + "".join(f"{n},{n % 3}\n" for n in range(30)) + "1,-9\n" * 4
    )
    source = TableSource((tmp_path / "t.csv",), "y", codes=parse_codes(["-9"]))
    packed = pack(
        source, tmp_path / "s", PackOptions(jobs=1, on_bad="quarantine", bad_budget="20%")
    )
    with open_store(packed.path) as store:
        assert store.manifest.attributes["classes"] == ["0", "1", "2"]
        assert store.num_samples == 30


def test_a_missing_date_is_named_by_its_column():
    """A date becomes days, month, weekday and seconds: the reader of the reason knows the column only."""
    kinds = pa.table({"when": ["2020-03-01 10:00", "2020-03-25 11:30"], "speed": ["1", "2"]})
    columns = [find_kind(name, kinds.column(name), ".", None) for name in kinds.column_names]
    recorded = [column.to_json() for column in columns]
    facts = {"table": {"columns": recorded, "dtype": "float32", "classes": []}, "repairs": {}}
    new = pa.table({"when": ["2020-03-02 10:00", None, None], "speed": ["1", "2", "x"]})
    file = TableFile(Path("new"), "frame", tuple(new.column_names), table=new)
    (batch,) = RawTable([file], facts)
    assert batch.reasons == [None, "no value in when", "column 'speed' holds 'x', not a number"]
