"""Repairs: read from text, fitted on a sample, replayed bit for bit."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from stoker.errors import InputError
from stoker.store.quality import judge
from stoker.store.repairs import (
    FittedRepair,
    RepairSpec,
    apply_repairs,
    fit_repairs,
    parse_repair,
)
from stoker.store.table_stats import TableStats

COLUMNS = ("a", "b", "c")
NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
NAMES = st.text(min_size=1, max_size=12)
TEXTS = st.sampled_from(
    ["clip", "clip:0.1,0.9", "robust", "asinh", "asinh:scale=3", "fill:median", "fill:-2.5",
     "clip@b", "robust@a,c", "min-denominator:c=a/b,min=0.01"]
)  # fmt: skip


@st.composite
def specs(draw):
    name = draw(st.sampled_from(["clip", "robust", "asinh", "fill", "min-denominator"]))
    if name == "min-denominator":
        least = draw(st.floats(min_value=1e-300, max_value=1e300))
        return RepairSpec(name, (least,), tuple(draw(NAMES) for _ in range(3)))
    columns = draw(st.none() | st.lists(NAMES, min_size=1, max_size=4, unique=True).map(tuple))
    if name in ("clip", "robust"):
        low, high = sorted(draw(st.tuples(st.floats(0, 1), st.floats(0, 1))))
        assume(low < high)
        return RepairSpec(name, (low, high), columns)
    if name == "asinh":
        return RepairSpec(name, draw(st.just(()) | st.tuples(st.floats(1e-300, 1e300))), columns)
    return RepairSpec(name, draw(st.just(()) | st.tuples(NUMBERS)), columns)


@st.composite
def tables(draw, dtypes=("float16", "float32", "float64")):
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    values = rng.normal(size=(draw(st.integers(1, 50)), 3)) * 10.0 ** rng.integers(-3, 4)
    odd = rng.random(values.shape) < draw(st.sampled_from([0.0, 0.3]))
    values[odd] = rng.choice([np.nan, np.inf, -np.inf, 0.0, 1e15, -1e30], size=int(odd.sum()))
    values[0] = [1.0, 2.0, 3.0]
    with np.errstate(over="ignore"):
        return values.astype(draw(st.sampled_from(dtypes)))


def bits(values):
    return values.shape, values.dtype, values.tobytes()


class TestParse:
    @given(specs())
    def test_text_and_spec_are_the_same_thing(self, spec):
        assert parse_repair(str(spec)) == spec

    @pytest.mark.parametrize(
        ("text", "spec"),
        [
            ("clip", RepairSpec("clip", (0.001, 0.999))),
            (" clip : 0.05, 0.95 ", RepairSpec("clip", (0.05, 0.95))),
            ("robust", RepairSpec("robust", (0.25, 0.75))),
            ("asinh", RepairSpec("asinh")),
            ("asinh:scale=1", RepairSpec("asinh", (1.0,))),
            ("fill:median", RepairSpec("fill")),
            ("fill:0", RepairSpec("fill", (0.0,))),
            ("clip@Flow Bytes/s, Idle Min", RepairSpec("clip", (0.001, 0.999),
                                                       ("Flow Bytes/s", " Idle Min"))),
            (r"asinh@a\,b,c@d", RepairSpec("asinh", (), ("a,b", "c@d"))),
            ("min-denominator:ratio=close/vwap,min=0.01",
             RepairSpec("min-denominator", (0.01,), ("ratio", "close", "vwap"))),
            (r"min-denominator:min=1,r=a\/s/b", RepairSpec("min-denominator", (1.0,),
                                                           ("r", "a/s", "b"))),
            (r"min-denominator:\min=a/b,min=2", RepairSpec("min-denominator", (2.0,),
                                                           ("min", "a", "b"))),
        ],
    )  # fmt: skip
    def test_examples(self, text, spec):
        assert parse_repair(text) == spec

    @pytest.mark.parametrize(
        ("text", "why"),
        [
            ("", "no repair ''"),
            ("clamp", "no repair 'clamp'"),
            ("clip:0.9,0.1", "two rising quantiles"),
            ("clip:0.1", "two rising quantiles"),
            ("clip:a,b", "'a' is not a number"),
            ("robust:-1,2", "two rising quantiles"),
            ("asinh:1", "'1' is not an option"),
            ("asinh:scale=0", "above zero"),
            ("asinh:scale=inf", "not a finite number"),
            ("fill", "'' is not a number"),
            ("fill:mean", "'mean' is not a number"),
            ("fill:nan", "not a finite number"),
            ("clip@", "is empty"),
            ("clip@a,a", "named twice"),
            ("min-denominator", "not of the form name=value"),
            ("min-denominator:min=1", "it takes ratio="),
            ("min-denominator:r=a/b", "it takes ratio="),
            ("min-denominator:r=a,min=1", "numerator/denominator"),
            ("min-denominator:r=a/b,min=0", "above zero"),
            ("min-denominator:r=a/b,min=1@c", "takes no '@'"),
        ],
    )
    def test_errors_say_what_was_given_what_is_allowed_and_what_to_type(self, text, why):
        with pytest.raises(InputError) as caught:
            parse_repair(text)
        assert why in caught.value.given
        assert caught.value.allowed
        assert caught.value.fix


class TestApply:
    @given(tables(), st.lists(TEXTS, max_size=4))
    def test_json_replays_bit_identically(self, values, texts):
        fitted = fit_repairs([parse_repair(text) for text in texts], values, COLUMNS)
        stored = json.dumps([repair.to_json() for repair in fitted], allow_nan=False)
        back = [FittedRepair.from_json(repair) for repair in json.loads(stored)]
        assert back == fitted
        new = np.concatenate([values[::-1], values * 2])
        first, second = (apply_repairs(new, each, COLUMNS) for each in (fitted, back))
        assert bits(first) == bits(second)
        assert bits(first)[1] == values.dtype

    @given(tables(), st.lists(TEXTS, max_size=3), st.integers(0, 50))
    def test_parts_give_what_the_whole_gives(self, values, texts, cut):
        fitted = fit_repairs([parse_repair(text) for text in texts], values, COLUMNS)
        whole = apply_repairs(values, fitted, COLUMNS)
        parts = [apply_repairs(part, fitted, COLUMNS) for part in (values[:cut], values[cut:])]
        assert bits(np.concatenate(parts)) == bits(whole)

    @given(tables(), TEXTS)
    def test_only_fill_touches_nan_and_the_input_never_changes(self, values, text):
        before = values.copy()
        (repair,) = fit_repairs([parse_repair(text)], values, COLUMNS)
        repaired = apply_repairs(values, [repair], COLUMNS)
        assert bits(values) == bits(before)
        if text.startswith("fill"):
            assert not np.isnan(repaired).any()
            kept = ~np.isnan(values)
            np.testing.assert_array_equal(repaired[kept], values[kept])
        elif not text.startswith("min"):
            np.testing.assert_array_equal(np.isnan(repaired), np.isnan(values))

    @given(tables(), st.sampled_from(["clip", "clip:0.2,0.7", "fill:median"]))
    def test_clip_and_fill_are_idempotent(self, values, text):
        fitted = fit_repairs([parse_repair(text)], values, COLUMNS)
        once = apply_repairs(values, fitted, COLUMNS)
        assert bits(apply_repairs(once, fitted, COLUMNS)) == bits(once)

    @given(tables())
    def test_clip_leaves_nothing_infinite(self, values):
        once = apply_repairs(values, fit_repairs([parse_repair("clip")], values, COLUMNS), COLUMNS)
        assert not np.isinf(once).any()

    def test_a_bound_beyond_float16_does_not_become_infinite(self):
        wide = np.full((4, 3), 1e6)
        wide[0] = 1.0
        fitted = fit_repairs([parse_repair("clip:0,1")], wide, COLUMNS)
        narrow = np.full((2, 3), np.inf, dtype=np.float16)
        assert (apply_repairs(narrow, fitted, COLUMNS) == np.float16(65504)).all()

    def test_one_outlier_does_not_move_the_clip_bounds(self):
        values = np.random.default_rng(0).normal(size=(4000, 3)).astype(np.float32)
        values[5, 1] = 1e15
        (repair,) = fit_repairs([parse_repair("clip")], values, COLUMNS)
        assert max(repair.high) < 5
        repaired = apply_repairs(values, [repair], COLUMNS)
        assert not [f for f in judge(TableStats.scan(repaired)) if f.severity == "refuse"]

    def test_robust_centres_and_scales(self):
        values = np.random.default_rng(0).normal(50, 8, size=(4001, 3))
        fitted = fit_repairs([parse_repair("robust@b")], values, COLUMNS)
        repaired = apply_repairs(values, fitted, COLUMNS)
        assert np.median(repaired[:, 1]) == 0
        spread = np.subtract(*np.quantile(repaired[:, 1], [0.75, 0.25]))
        assert spread == pytest.approx(1, rel=1e-3)
        np.testing.assert_array_equal(repaired[:, [0, 2]], values[:, [0, 2]])

    def test_asinh_is_asinh_over_the_median_magnitude(self):
        values = np.array([[0.0, -4.0, 1e15], [0.0, 4.0, 2.0], [0.0, 8.0, 2.0]])
        (repair,) = fit_repairs([parse_repair("asinh")], values, COLUMNS)
        assert repair.high == (1.0, 4.0, 2.0)
        assert repair.notes == ("a: asinh found only zeros; scale 1 is used",)
        repaired = apply_repairs(values, [repair], COLUMNS)
        np.testing.assert_allclose(repaired, np.arcsinh(values / [1.0, 4.0, 2.0]), rtol=1e-15)

    def test_min_denominator_undoes_the_tiny_volume(self):
        """S4: close / VWAP where the volume, and so the VWAP, is next to nothing."""
        close = np.array([1.1, 1.2, 1.3, 1.4, -1.5])
        vwap = np.array([1.0, 1e-15, 0.0, -1e-15, np.nan])
        with np.errstate(divide="ignore"):
            values = np.stack([close / vwap, close, vwap], axis=1).astype(np.float32)
        columns = ("ratio", "close", "vwap")
        spec = parse_repair("min-denominator:ratio=close/vwap,min=0.01")
        repaired = apply_repairs(values, fit_repairs([spec], values, columns), columns)
        np.testing.assert_allclose(repaired[:, 0], [1.1, 120, 130, -140, np.nan], rtol=1e-6)
        np.testing.assert_array_equal(repaired[:, 1:], values[:, 1:])

    def test_repairs_are_fitted_one_after_the_other(self):
        values = np.full((100, 3), np.nan)
        values[:10] = 4.0
        specs = [parse_repair("fill:0"), parse_repair("fill:median"), parse_repair("robust:0,1")]
        fitted = fit_repairs(specs, values, COLUMNS)
        assert fitted[2].low == (0.0, 0.0, 0.0)
        assert fitted[2].high == (4.0, 4.0, 4.0)

    def test_windows_are_repaired_along_their_last_axis(self):
        values = np.random.default_rng(0).normal(size=(5, 7, 3)).astype(np.float32)
        fitted = fit_repairs([parse_repair("clip:0.2,0.8")], values, COLUMNS)
        flat = apply_repairs(values.reshape(-1, 3), fitted, COLUMNS)
        assert bits(apply_repairs(values, fitted, COLUMNS).reshape(-1, 3)) == bits(flat)

    def test_order_of_the_columns_does_not_matter(self):
        values = np.random.default_rng(0).normal(size=(50, 3))
        fitted = fit_repairs([parse_repair("clip:0.2,0.8@a,c")], values, COLUMNS)
        turned = apply_repairs(values[:, ::-1], fitted, COLUMNS[::-1])
        assert bits(np.ascontiguousarray(turned[:, ::-1])) == bits(
            apply_repairs(values, fitted, COLUMNS)
        )

    def test_a_clip_that_flattens_a_column_says_so(self):
        values = np.zeros((5000, 3))
        values[0] = 9
        (repair,) = fit_repairs([parse_repair("clip@b")], values, COLUMNS)
        assert repair.notes == ("b: clip leaves one value, 0; use asinh instead",)


class TestRefusals:
    def test_integers(self):
        with pytest.raises(InputError, match="dtype int64"):
            apply_repairs(np.zeros((3, 3), dtype=np.int64), [], COLUMNS)

    def test_a_column_that_is_not_there(self):
        with pytest.raises(InputError, match="'d', which is not there"):
            fit_repairs([parse_repair("clip@d")], np.zeros((3, 3)), COLUMNS)

    def test_a_column_without_numbers(self):
        values = np.full((3, 3), np.nan)
        with pytest.raises(InputError, match="no finite value"):
            fit_repairs([parse_repair("clip")], values, COLUMNS)

    def test_wrong_number_of_names(self):
        with pytest.raises(InputError, match="2 column names"):
            apply_repairs(np.zeros((3, 3)), [], ("a", "b"))
