"""Counts that must balance: found = packed + refused + ignored, and never a store without samples."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import QualityError, Refusal, count_kinds
from stoker.packing import PackOptions, pack
from stoker.sources.arrays import ArraysSource
from stoker.sources.contract import Account

REASONS = st.dictionaries(st.text(max_size=5), st.integers(0, 9), max_size=40)


@given(packed=st.integers(0, 99), refused=REASONS, ignored=REASONS, wrong=st.integers(-3, 3))
def test_an_account_balances_or_is_not_made(packed, refused, ignored, wrong):
    found = packed + sum(refused.values()) + sum(ignored.values())
    if wrong:
        with pytest.raises(RuntimeError, match="are accounted for"):
            Account("rows", found + wrong, packed, refused, ignored)
        return
    account = Account("rows", found, packed, refused, ignored)
    assert Account(**asdict(account)) == account
    assert len(account.refused) <= 21
    assert len(account.lines()) == 1 + len(account.refused) + len(account.ignored)


def test_refusals_are_counted_by_their_kind():
    listed = [Refusal("f", 1, "b is 'x'", kind="not a number"), Refusal("f", 2, "b is 'y'", kind="not a number"),
              Refusal("f", None, "cut", count=7)]  # fmt: skip
    assert count_kinds(listed) == {"not a number": 2, "cut": 7}


@pytest.mark.parametrize("budget", ["100%", "1000"])
def test_no_budget_makes_a_store_without_samples(tmp_path, budget):
    np.save(tmp_path / "features.npy", np.full((5, 2), np.nan, "f4"))
    options = PackOptions(jobs=1, on_bad="quarantine", bad_budget=budget)
    with pytest.raises(QualityError, match="no sample is left: 5 pieces of input"):
        pack(ArraysSource((tmp_path / "features.npy",)), tmp_path / "s", options)
    np.save(tmp_path / "features.npy", np.zeros((0, 2), "f4"))
    with pytest.raises(QualityError, match="the input holds no sample"):
        pack(ArraysSource((tmp_path / "features.npy",)), tmp_path / "s", options)
    assert not (tmp_path / "s").exists()
