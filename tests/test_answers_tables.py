"""Tables of strangers: a class that is called like a missing value."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stoker.errors import QualityError, SourceError
from stoker.packing import PackOptions, pack
from stoker.sources.tables import TableSource


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
    assert "'None' is read as missing, in 18 of 20 rows" in str(told.value)
    assert "'no None'" in told.value.fix


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
