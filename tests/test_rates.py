"""Rates of a run between two readings, also where a batch takes longer than the time between them."""

from __future__ import annotations

from stoker.runs.telemetry import RunCounters, _Rates


def counters(samples: int, seconds: float, epoch: int = 0) -> RunCounters:
    return RunCounters(samples, seconds, 0.0, epoch, None, None, None)


def test_slow_batches_give_their_own_rate_and_no_zeros():
    rates, seen = _Rates(), []
    for second in range(0, 41, 2):  # a batch of 128 ends every 10 s
        made = counters(128 * (second // 10), float(second))
        seen.append(rates.since_last(made, float(second))["samples_per_second"])
    assert seen[:5] == [None] * 5
    assert set(seen[5:]) == {12.8}


def test_a_run_that_stands_still_has_a_rate_of_zero():
    rates = _Rates()
    rates.since_last(counters(0, 0.0), 0.0)
    assert rates.since_last(counters(64, 2.0), 2.0)["samples_per_second"] == 32.0
    assert rates.since_last(counters(64, 50.0), 50.0)["samples_per_second"] == 32.0
    assert rates.since_last(counters(64, 70.0), 70.0)["samples_per_second"] == 0.0


def test_validation_has_no_rate():
    rates = _Rates()
    rates.since_last(counters(0, 0.0), 0.0)
    rates.since_last(counters(64, 2.0), 2.0)
    assert rates.since_last(counters(64, 2.0), 12.0)["samples_per_second"] is None
