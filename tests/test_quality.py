"""The quality gate: what it counts, what it refuses, and that parts give what the whole gives."""

from __future__ import annotations

import json
import shlex
from functools import reduce
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import InputError
from stoker.store import table_stats
from stoker.store.quality import (
    Finding,
    bad_rows,
    find_codes,
    judge,
    judge_time,
    limits_of,
)
from stoker.store.repairs import apply_repairs, fit_repairs, parse_repair
from stoker.store.row_sketch import RowHashes, hash_rows
from stoker.store.table_stats import HUGE, TableStats

SPECIALS = [0.0, -0.0, 1.0, -1.0, 7.5, 65504.0, 65505.0, -65536.0, 7e4, 3e9, -1e12, 1e15, -3e30]
ODD = [float("nan"), float("inf"), float("-inf"), 1e-40, -1e-42, 1e-38]
DTYPES = ["float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "bool"]


def clean(num_rows=2000, num_columns=6, dtype="float32", seed=0):
    return np.random.default_rng(seed).normal(size=(num_rows, num_columns)).astype(dtype)


def names_of(findings):
    return {(finding.name, finding.column_index) for finding in findings}


@st.composite
def tables(draw, dtypes=("float16", "float32", "float64")):
    """Small tables of ordinary numbers in which hostile ones are planted."""
    shape = (draw(st.integers(0, 40)), draw(st.integers(1, 5)))
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    values = rng.normal(size=shape) * draw(st.sampled_from([1e-3, 1.0, 1e5]))
    share = draw(st.sampled_from([0.0, 0.05, 0.5]))
    planted = rng.random(shape) < share
    values[planted] = rng.choice(SPECIALS + ODD, size=int(planted.sum()))
    if draw(st.booleans()) and shape[0] > 3:
        values[shape[0] // 2] = values[0]
    with np.errstate(over="ignore"):
        return values.astype(draw(st.sampled_from(dtypes)))


def brute(values):
    """Count by the definitions, column by column, in plain numpy."""
    wide = values.astype(np.float64)
    finite = np.isfinite(wide)
    size = np.abs(wide)
    tiny = np.finfo(values.dtype).tiny
    return {
        "num_nan": np.isnan(wide).sum(0),
        "num_inf": np.isinf(wide).sum(0),
        "num_zero": (wide == 0).sum(0),
        "num_denormal": (finite & (size > 0) & (size < tiny)).sum(0),
        "num_over_fp16": (finite & (size > 65504)).sum(0),
        "num_huge": (finite & (size >= HUGE)).sum(0),
    }


def same_stats(a: TableStats, b: TableStats):
    assert (a.columns, a.dtype, a.num_rows, a.inner) == (b.columns, b.dtype, b.num_rows, b.inner)
    for name in ("bins", *table_stats._COUNTS, "low", "high"):
        np.testing.assert_array_equal(getattr(a.values, name), getattr(b.values, name), name)
    assert a.values.first_rows == b.values.first_rows
    np.testing.assert_array_equal(a.sample.rows, b.sample.rows)
    np.testing.assert_array_equal(a.sample.values, b.sample.values)
    with np.errstate(all="ignore"):
        scale = np.sqrt(np.maximum(a.values.squares, b.values.squares)) + np.abs(a.values.mean)
    # Overflowed moments (float64 near its end) are unknown, not comparable.
    known = np.isfinite(scale) & np.isfinite(a.values.mean) & np.isfinite(b.values.mean)
    off = np.abs(a.values.mean - b.values.mean, where=known, out=np.zeros(len(known)))
    assert (off[known] <= 1e-9 * scale[known]).all()
    np.testing.assert_allclose(a.values.squares[known], b.values.squares[known], rtol=1e-6)
    assert (a.hashes is None) == (b.hashes is None)
    if a.hashes and b.hashes:
        assert a.hashes.num_duplicates == b.hashes.num_duplicates
        assert a.hashes.repeats == b.hashes.repeats
        np.testing.assert_array_equal(a.hashes.hashes, b.hashes.hashes)
        np.testing.assert_array_equal(a.hashes.rows, b.hashes.rows)


class TestScan:
    @given(tables())
    def test_counts_are_the_brute_force_counts(self, values):
        stats = TableStats.scan(values)
        for name, expected in brute(values).items():
            np.testing.assert_array_equal(getattr(stats.values, name), expected, name)

    @given(tables())
    def test_first_rows_are_the_first_rows(self, values):
        stats = TableStats.scan(values, first_row=1000)
        wide = values.astype(np.float64)
        for column in range(values.shape[1]):
            rows = np.flatnonzero(np.isnan(wide[:, column]))[:5] + 1000
            assert stats.values.rows_of("nan", column) == tuple(rows)
            large = np.abs(wide[:, column])
            rows = np.flatnonzero(np.isfinite(large) & (large >= 65536))[:5] + 1000
            assert stats.values.rows_from(143, column) == tuple(rows)

    @given(tables(), st.data())
    def test_parts_give_what_the_whole_gives(self, values, data):
        cuts = sorted(data.draw(st.lists(st.integers(0, len(values)), max_size=3)))
        edges = [0, *cuts, len(values)]
        parts = [TableStats.scan(values[a:b], first_row=a) for a, b in pairwise(edges)]
        whole = TableStats.scan(values)
        same_stats(reduce(TableStats.merge, parts), whole)
        right = parts[-1]
        for part in reversed(parts[:-1]):
            right = part.merge(right)
        same_stats(right, whole)

    @given(tables(), st.integers(1, 7), st.integers(1, 4))
    def test_block_and_chunk_sizes_do_not_matter(self, values, block_rows, chunk_rows):
        whole = TableStats.scan(values)
        row_bytes = values.shape[1] * values.itemsize
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(table_stats, "_MIN_BLOCK_ROWS", block_rows)
            patch.setattr(table_stats, "_BLOCK_VALUES", 1)
            patch.setattr(table_stats, "_CHUNK_BYTES", chunk_rows * row_bytes)
            same_stats(TableStats.scan(values), whole)

    def test_json_is_small(self):
        text = json.dumps(TableStats.scan(clean(20_000, 30)).to_json(), allow_nan=False)
        assert len(text) < 20_000

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_moments_agree_with_numpy(self, dtype):
        values = (clean(700, 4) * 40 + 60).clip(0, 127).astype(dtype)
        stats = TableStats.scan(values)
        wide = values.astype(np.float64)
        np.testing.assert_allclose(stats.values.mean, wide.mean(0), rtol=1e-9)
        np.testing.assert_allclose(stats.std, wide.std(0), rtol=1e-9, atol=1e-12)
        np.testing.assert_array_equal(stats.values.low, wide.min(0))
        np.testing.assert_array_equal(stats.values.high, wide.max(0))
        np.testing.assert_array_equal(stats.values.num_zero, (wide == 0).sum(0))

    def test_moments_survive_a_large_offset(self):
        values = clean(5000, 2, "float64") + 1.7e9
        np.testing.assert_allclose(TableStats.scan(values).std, values.std(0), rtol=1e-9)

    def test_big_endian_and_strided_values_are_read_right(self):
        values = clean()
        values[3, 1] = np.nan
        expected = TableStats.scan(np.ascontiguousarray(values[::2, ::2]))
        same_stats(TableStats.scan(values.astype(">f4")[::2, ::2]), expected)

    def test_sample_is_a_fair_sample(self):
        values = np.arange(100_000, dtype=np.float64)[:, None]
        stats = TableStats.scan(values)
        assert len(stats.sample.rows) == 4096
        quantiles = stats.quantiles([0.1, 0.5, 0.9], 0)
        np.testing.assert_allclose(quantiles, [10_000, 50_000, 90_000], atol=3000)

    def test_sample_of_a_pooled_field_covers_all_positions(self):
        pixels = np.tile(np.arange(3 * 64 * 64, dtype=np.float32).reshape(3, 64, 64), (60, 1, 1, 1))
        sampled = TableStats.scan(pixels).sampled(0)
        assert len(sampled) == 60 * 256
        assert len(np.unique(sampled)) > 3 * 64 * 64 * 0.5

    def test_memory_does_not_grow_with_the_rows(self):
        few, many = (TableStats.scan(clean(n, 3)) for n in (5_000, 80_000))
        assert many.sample.values.nbytes == few.sample.values.nbytes
        assert many.values.bins.nbytes == few.values.bins.nbytes

    def test_merging_different_fields_is_refused(self):
        stats = TableStats.scan(clean(10, 2))
        for other in (
            TableStats.scan(clean(10, 3)),
            TableStats.scan(clean(10, 2), ["a", "b"]),
            TableStats.scan(clean(10, 2, "float64")),
            TableStats.scan(clean(10, 2), field="targets"),
        ):
            with pytest.raises(InputError, match="cannot merge"):
                stats.merge(other)

    @pytest.mark.parametrize("values", [np.array(["a"]), np.array(1.0), np.array([1j])])
    def test_what_is_not_numbers_is_refused(self, values):
        with pytest.raises(InputError, match="cannot check values"):
            TableStats.scan(values)

    @pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0,), (1, 1), (5,), (2, 0, 3)])
    def test_empty_and_tiny_tables_pass(self, shape):
        stats = TableStats.scan(np.ones(shape, dtype=np.float32))
        assert stats.num_rows == shape[0]
        assert not [f for f in judge(stats) if f.severity == "refuse"]
        assert not bad_rows(np.ones(shape, dtype=np.float32), limits_of(stats)).any()


class TestLayout:
    @pytest.mark.parametrize(
        ("shape", "dtype", "columns", "expected", "inner"),
        [
            ((9,), "float32", None, ("0",), 1),
            ((9, 3), "float32", None, ("0", "1", "2"), 1),
            ((9, 2, 2), "float32", None, ("0", "1", "2", "3"), 1),
            ((9, 360, 16), "float32", None, tuple(map(str, range(16))), 360),
            ((9, 5, 2), "float32", ("a", "b"), ("a", "b"), 5),
            ((9, 2, 2), "float32", ("a", "b", "c", "d"), ("a", "b", "c", "d"), 1),
            ((9, 3, 64, 64), "float32", None, ("all",), 12288),
            ((9, 8, 8, 3), "uint8", ("r", "g", "b"), ("r", "g", "b"), 64),
        ],
    )
    def test_columns(self, shape, dtype, columns, expected, inner):
        stats = TableStats.scan(np.zeros(shape, dtype=dtype), columns)
        assert (stats.columns, stats.inner) == (expected, inner)
        assert stats.num_values == 9 * inner

    def test_wrong_number_of_names_is_refused(self):
        with pytest.raises(InputError, match="2 column names"):
            TableStats.scan(clean(5, 3), ["a", "b"])

    def test_a_value_inside_a_window_is_reported_by_sample(self):
        values = np.random.default_rng(0).normal(size=(50, 40, 3)).astype(np.float32)
        values[7, 5:30, 1] = np.nan
        values[9, 1, 1] = np.nan
        found = judge(TableStats.scan(values, ["a", "b", "c"]))
        assert [(f.name, f.column, f.count, f.first_rows) for f in found] == [
            ("nan", "b", 26, (7, 9))
        ]


class TestJudge:
    @given(st.integers(0, 2**32 - 1), st.sampled_from(["float32", "float64", "float16"]))
    def test_nothing_is_wrong_with_normal_data(self, seed, dtype):
        values = clean(500, 5, "float64", seed) * 3 + 1
        findings = judge(TableStats.scan(values.astype(dtype)))
        assert [f for f in findings if f.name not in ("denormal",)] == []

    def test_1e15_in_column_37_is_named_with_its_row(self):
        values = clean(6311, 77)
        values[4321, 37] = 1e15
        columns = [f"feature {index}" for index in range(77)]
        (found, overflow) = judge(TableStats.scan(values, columns))
        assert (found.name, found.severity, found.column) == ("extreme", "refuse", "feature 37")
        assert (found.column_index, found.count, found.first_rows) == (37, 1, (4321,))
        assert "1e+15" in found.evidence
        assert "row 4321" in found.evidence
        assert "--repair 'clip@feature 37'" in found.remedy
        assert (overflow.name, overflow.severity) == ("overflows-fp16", "warn")

    @pytest.mark.parametrize(
        ("code", "low", "high"),
        [(-200, 2, 1400), (-9, 0, 8), (-999, -20, 40), (999.9, 0, 359), (99.99, 0, 8), (99999, 0, 41310),
         (65535, 100, 4000), (-32768, -500, 500), (-88, 1, 40), (9999999, 0, 50)],
    )  # fmt: skip
    @pytest.mark.parametrize("dtype", ["f4", "f8"])
    def test_a_number_that_may_stand_for_a_missing_value(self, code, low, high, dtype):
        values = np.random.default_rng(0).uniform(low, high, (9000, 2)).astype(dtype)
        values[7::20, 1] = code
        (found,) = (f for f in judge(TableStats.scan(values, ["a", "b c"])) if "code" in f.name)
        assert (found.severity, found.column) == ("warn", "b c")
        assert f"are {code}, which" in found.evidence
        assert "about" in found.evidence
        assert abs(found.count - 450) < 90
        assert set(found.first_rows) <= set(range(7, 9000, 20))
        assert f"--missing-code 'b c={code}' --missing median" in found.remedy
        few = judge(TableStats.scan(values[:400], ["a", "b c"]))
        (exact,) = (f for f in few if f.name == "missing-code")
        assert (exact.count, exact.first_rows) == (20, (7, 27, 47, 67, 87))

    @pytest.mark.parametrize(
        "values",
        [
            np.tile([-100, 0, 100], 50),  # three values of a scale
            np.tile([-1, 0, 1, 2, 5], 50),
            np.arange(10000) % 1000,  # 999 is the last of many
            np.tile(np.arange(-300, 300, 20), 50),  # -200 among others
            np.append(np.arange(300.0), [-999, -999]),  # not repeated often
            np.tile([0.0, 99], 50),
            np.tile([1, 5, 9, 255], 50),
        ],
    )
    def test_numbers_that_are_no_codes(self, values):
        values = values.astype(np.float32)[:, None]
        names = {f.name for f in judge(TableStats.scan(values, ["a"]))}
        assert "missing-code" not in names

    def test_a_code_of_many_columns_is_told_once(self):
        values = np.random.default_rng(0).random((60, 30))
        values[::7, 3:] = -999
        (found,) = judge(TableStats.scan(values, [f"c{number}" for number in range(30)]))
        assert (found.name, found.column, found.count) == ("missing-code", None, 27 * 9)
        assert "27 columns ('c3', 'c4', 'c5', 'c6', 'c7', ...) hold -999" in found.evidence
        assert found.remedy == "if so, --missing-code -999 --missing median"
        (found,) = judge(TableStats.scan(values, field="t2m"))
        assert "numpy.median(x[x != -999])" in found.remedy

    def test_two_codes_at_both_ends(self):
        values = np.tile(np.append(np.arange(50.0), [-999, -998, 9999]), 5)
        assert sorted(code for code, *_ in find_codes(values)) == [-999, -998, 9999]
        assert {(low, high) for _, low, high in find_codes(values)} == {(0, 49)}

    @pytest.mark.parametrize("bad", [np.nan, np.inf, 1e15])
    def test_no_repair_is_named_for_targets_which_repairs_do_not_reach(self, bad):
        values = clean(2000, 1)
        values[5] = bad
        found = judge(TableStats.scan(values, field="targets"))
        refused = [finding for finding in found if finding.severity == "refuse"]
        assert refused
        assert all("--on-bad quarantine" in finding.remedy for finding in refused)
        assert not [finding for finding in found if "--repair" in finding.remedy]

    @given(st.integers(0, 2**32 - 1), st.integers(1, 120))
    def test_the_clip_it_names_removes_the_extremes_however_many(self, seed, count):
        rng = np.random.default_rng(seed)
        values = clean(1200, 2, seed=seed)
        values[rng.choice(1200, count, replace=False), 1] = 1e15
        (found,) = [f for f in judge(TableStats.scan(values)) if f.name == "extreme"]
        text = shlex.split(found.remedy.split(";")[0])[1]
        columns = list(TableStats.scan(values).columns)
        fitted = fit_repairs([parse_repair(text)], values, columns)
        after = judge(TableStats.scan(apply_repairs(values, fitted, columns)))
        assert [f for f in after if f.severity == "refuse"] == []

    @given(st.data())
    def test_every_planted_defect_is_found_and_nothing_else(self, data):
        # The seventh column stays clean, so that no two rows become equal.
        values = clean(400, 7, "float32", data.draw(st.integers(0, 1000)))
        kinds = st.sampled_from(["nan", "inf", "extreme", "overflows-fp16", "constant", "denormal"])
        expected = set()
        for column in range(6):
            kind = data.draw(st.none() | kinds)
            row = data.draw(st.integers(0, 399))
            if kind == "constant":
                values[:, column] = 5
            elif kind is not None:
                planted = {"nan": np.nan, "inf": -np.inf, "extreme": -1e12, "denormal": 1e-41}
                values[row, column] = planted.get(kind, 70_000.0)
            expected |= {(kind, column)} if kind else set()
            expected |= {("overflows-fp16", column)} if kind == "extreme" else set()
        assert names_of(judge(TableStats.scan(values))) == expected

    def test_a_heavy_tailed_duration_is_not_refused(self):
        rng = np.random.default_rng(0)
        values = np.exp(rng.normal(np.log(3e4), 2.5, size=(20_000, 2)))
        values[5] = 1.2e8
        for dtype in (np.float32, np.float64, np.int64):
            refused = [
                f for f in judge(TableStats.scan(values.astype(dtype))) if f.severity == "refuse"
            ]
            assert refused == []

    def test_1e15_everywhere_is_refused_in_float32_and_allowed_in_float64(self):
        values = 1e15 * (1 + np.abs(clean(500, 2, "float64")))
        assert ("extreme", 0) in names_of(judge(TableStats.scan(values.astype(np.float32))))
        assert ("extreme", 0) not in names_of(judge(TableStats.scan(values)))

    def test_what_float16_cannot_hold_is_named(self):
        values = clean(500, 2)
        values[3, 1] = 65505.0
        (found,) = judge(TableStats.scan(values))
        assert (found.name, found.severity, found.first_rows) == ("overflows-fp16", "warn", (3,))
        values[3, 1] = 65504.0
        assert judge(TableStats.scan(values)) == []

    def test_integers_can_be_extreme_constant_or_duplicated_only(self):
        values = np.random.default_rng(0).integers(1, 100, size=(300, 3))
        values[:, 0] = 70_000 + np.arange(300)
        values[:, 1] = 4
        values[17, 2] = 10**12
        assert names_of(judge(TableStats.scan(values))) == {("constant", 1), ("extreme", 2)}

    def test_duplicates_are_counted_with_their_rows(self):
        values = clean(100, 4)
        values[[20, 50, 51]] = values[[3, 3, 7]]
        (found,) = judge(TableStats.scan(values))
        assert (found.name, found.count, found.first_rows) == ("duplicate-rows", 3, (20, 50, 51))
        assert found.severity == "warn"
        parts = [TableStats.scan(values[i : i + 10], first_row=i) for i in range(0, 100, 10)]
        assert judge(reduce(TableStats.merge, parts)) == [found]

    def test_a_single_column_may_repeat(self):
        labels = np.arange(100) % 3
        assert judge(TableStats.scan(labels)) == []

    def test_label_leak(self):
        values = clean(1000, 3)
        target = values[:, 1] * 3 - 7
        values[5, 1] = np.nan
        target = TableStats.scan(target, field="targets")
        leaks = [f for f in judge(TableStats.scan(values), target=target) if f.name == "label-leak"]
        assert [(f.column_index, f.severity) for f in leaks] == [(1, "warn")]
        other = TableStats.scan(clean(1000, 1, seed=9), field="targets")
        assert "label-leak" not in {f.name for f in judge(TableStats.scan(values), target=other)}

    def test_findings_are_sorted_and_travel_as_json(self):
        values = clean(300, 4)
        values[:, 0] = 1
        values[2, 3] = np.nan
        values[3, 2] = 1e-40
        found = judge(TableStats.scan(values))
        assert [f.severity for f in found] == ["refuse", "warn", "note"]
        assert [Finding.from_json(json.loads(json.dumps(f.to_json()))) for f in found] == found

    def test_lines_are_one_line_each_whatever_the_name(self):
        values = clean(300, 2)
        values[2] = np.nan
        lines = list(map(str, judge(TableStats.scan(values, ["a\nb\x1b[31m", "x" * 10_000]))))
        assert len(lines) == 2
        assert lines[0].startswith("refuse nan features['a\\nb\\x1b[31m']: 1 of 300 values")


class TestBadRows:
    @given(tables())
    def test_equals_brute_force(self, values):
        limits = limits_of(TableStats.scan(values))
        wide = values.astype(np.float64)
        with np.errstate(invalid="ignore"):
            refused = ~np.isfinite(wide) | (np.abs(wide) >= limits.refuse_from)
        np.testing.assert_array_equal(bad_rows(values, limits), refused.any(axis=1))

    @given(tables())
    def test_without_the_bad_rows_nothing_is_refused_by_these_limits(self, values):
        stats = TableStats.scan(values)
        bad = bad_rows(values, limits_of(stats))
        refused = [f for f in judge(stats) if f.severity == "refuse"]
        assert bool(refused) == bool(bad.any())
        assert all(bad[list(finding.first_rows)].all() for finding in refused)

    def test_limit_is_a_million_times_the_median_and_above_fp16(self):
        values = np.abs(clean(1001, 3, "float64")) + 1
        values *= [1e-9, 1.0, 3e4]
        limits = limits_of(TableStats.scan(values)).refuse_from
        assert limits[0] == 2.0**16
        assert 1e6 <= limits[1] / np.median(values[:, 1]) <= 2.2e6
        assert 1e6 <= limits[2] / np.median(values[:, 2]) <= 2.2e6

    def test_windows(self):
        values = np.zeros((6, 50, 3), dtype=np.float32) + 1
        values[4, 49, 2] = np.inf
        limits = limits_of(TableStats.scan(values, ["a", "b", "c"]))
        assert bad_rows(values, limits).tolist() == [False] * 4 + [True, False]

    def test_other_shapes_are_refused(self):
        with pytest.raises(InputError, match="do not fit limits"):
            bad_rows(clean(5, 4), limits_of(TableStats.scan(clean(5, 3))))


class TestRowHashes:
    @given(st.integers(1, 60), st.integers(0, 2**32 - 1), st.integers(1, 20))
    def test_equal_bytes_equal_hash(self, width, seed, num_rows):
        rng = np.random.default_rng(seed)
        rows = rng.integers(0, 2, size=(num_rows, width), dtype=np.uint8)
        hashes = hash_rows(rows)
        distinct = {row.tobytes() for row in rows}
        assert len(set(hashes.tolist())) == len(distinct)

    def test_whole_floats_do_not_collide(self):
        # Few mantissa bits set: the case in which a plain multiply-and-add hash fails.
        grid = np.stack(np.meshgrid(np.arange(300.0), np.arange(300.0)), -1).reshape(-1, 2)
        for dtype in (np.float32, np.float64):
            for width in (2, 100):
                rows = np.tile(grid.astype(dtype), (1, width // 2))
                assert len(np.unique(hash_rows(rows))) == len(grid)

    def test_above_the_cap_the_count_is_an_estimate(self):
        rng = np.random.default_rng(0)
        rows = rng.integers(0, 30_000, size=(60_000, 1)) * np.ones((1, 3))
        exact = len(rows) - len(np.unique(rows[:, 0]))
        hashes = RowHashes.take(rows[:0], 0, cap=4000)
        for start in range(0, len(rows), 5000):
            part = RowHashes.take(rows[start : start + 5000], start, cap=4000)
            hashes = hashes.merge(part)
        assert hashes.level == 3
        assert len(hashes.hashes) <= 4000
        assert abs(hashes.num_duplicates - exact) < exact * 0.1
        whole = RowHashes.take(rows, 0, cap=4000)
        assert whole.num_duplicates == hashes.num_duplicates


class TestTime:
    @given(st.lists(st.integers(-5, 5), max_size=30))
    def test_counts_steps_that_do_not_go_forward(self, steps):
        found = judge_time(np.cumsum(np.array(steps, dtype=np.int64)))
        counts = {finding.name: finding.count for finding in found}
        assert counts.get("time-backwards", 0) == sum(step < 0 for step in steps[1:])
        assert counts.get("time-repeats", 0) == sum(step == 0 for step in steps[1:])

    def test_findings(self):
        found = judge_time(np.array([10, 20, 15, 15, 30]), first_row=100, field="bars")
        assert [(f.name, f.severity, f.count, f.first_rows) for f in found] == [
            ("time-backwards", "refuse", 1, (102,)),
            ("time-repeats", "refuse", 1, (103,)),
        ]
        assert judge_time(np.arange(5)) == []

    def test_extremes_of_int64_do_not_overflow(self):
        time = np.array([np.iinfo(np.int64).min, np.iinfo(np.int64).max])
        assert judge_time(time) == []
        assert [finding.count for finding in judge_time(time[::-1])] == [1]


@pytest.fixture(scope="module")
def flows(shared_data):
    path = shared_data / "tabular" / "cicids2017_sample.csv"
    if not path.exists():
        pytest.skip(f"{path} is not there")
    csv = pytest.importorskip("pyarrow.csv").read_csv(path)
    columns = csv.schema.names[:-1]
    arrays = [csv[name].cast("float64").to_numpy(zero_copy_only=False) for name in columns]
    return np.stack(arrays, axis=1).astype(np.float32), columns


class TestRealData:
    def test_infinities_and_blanks_are_found_where_numpy_finds_them(self, flows):
        values, columns = flows
        found = judge(TableStats.scan(values, columns))
        refused = {(f.name, f.column): f.count for f in found if f.severity == "refuse"}
        expected = {}
        for index, column in enumerate(columns):
            for name, test in (("nan", np.isnan), ("inf", np.isinf)):
                count = int(test(values[:, index]).sum())
                expected |= {(name, column): count} if count else {}
        assert refused == expected
        assert sum(count for (name, _), count in refused.items() if name == "inf") == 24
        assert {column for _, column in refused} == {"Flow Bytes/s", "Flow Packets/s"}

    def test_everything_else_agrees_with_numpy_too(self, flows):
        values, columns = flows
        found = judge(TableStats.scan(values, columns))
        finite = np.where(np.isfinite(values), values, np.nan)
        over = {f.column_index: f.count for f in found if f.name == "overflows-fp16"}
        counts = (np.abs(finite) > 65504).sum(0)
        assert over == {int(i): int(counts[i]) for i in np.flatnonzero(counts)}
        constant = {f.column_index for f in found if f.name == "constant"}
        spread = np.nanmax(finite, 0) - np.nanmin(finite, 0)
        assert constant == set(np.flatnonzero(spread == 0).tolist())
        (duplicates,) = [f for f in found if f.name == "duplicate-rows"]
        assert duplicates.count == len(values) - len({row.tobytes() for row in values})

    def test_bad_rows_are_the_rows_with_infinities_or_blanks(self, flows):
        values, columns = flows
        bad = bad_rows(values, limits_of(TableStats.scan(values, columns)))
        np.testing.assert_array_equal(bad, ~np.isfinite(values).all(axis=1))

    def test_a_planted_1e15_is_named(self, flows):
        values, columns = flows
        values = values.copy()
        values[57, 37] = 1e15
        (found,) = [f for f in judge(TableStats.scan(values, columns)) if f.name == "extreme"]
        assert (found.column, found.first_rows) == (columns[37], (57,))

    def test_the_remedies_named_are_remedies(self, flows):
        values, columns = flows
        found = judge(TableStats.scan(values, columns))
        remedies = [f.remedy for f in found if f.severity == "refuse"]
        texts = [shlex.split(remedy.split(", or")[0])[1] for remedy in remedies]
        fitted = fit_repairs([parse_repair(text) for text in texts], values[:5000], columns)
        repaired = apply_repairs(values, fitted, columns)
        after = judge(TableStats.scan(repaired, columns))
        assert len(texts) == 3
        assert [f for f in after if f.severity == "refuse"] == []
