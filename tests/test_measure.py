"""The room that measures: the clock of a loop, rates of blocks, readings that creep, the search over sizes."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stoker.measure import laps as laps_module
from stoker.measure.laps import LEAST_LAPS, Lap, Patience, Stopwatch, block_rates
from stoker.measure.readings import CREEP_HOST_BYTES, creep
from stoker.measure.search import Outcome, climb

CPU = torch.device("cpu")


# -- laps ------------------------------------------------------------------------------------------


class Clock:
    def __init__(self, monkeypatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(laps_module.time, "perf_counter", lambda: self.now)

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def run_loop(watch, epochs, step=lambda: None):
    taken = []
    for batches in epochs:
        for batch in watch.timed(batches):
            taken.append(batch)
            step()
    return taken


@given(st.lists(st.integers(0, 6), max_size=8), st.integers(0, 4), st.integers(1, 12))
def test_as_many_laps_as_were_asked_for_across_epochs(lengths, warm_up, steps):
    watch = Stopwatch(Patience(warm_up, steps, 1e9), CPU)
    numbers = iter(range(100))
    taken = run_loop(watch, [[next(numbers) for _ in range(length)] for length in lengths])
    wanted = min(sum(lengths), warm_up + steps)
    assert taken == list(range(wanted))  # nothing left out, nothing after it is enough
    assert watch.num_batches == wanted
    assert watch.is_enough() == (sum(lengths) >= warm_up + steps)
    laps = watch.laps()
    assert all(lap.seconds >= lap.wait_seconds >= 0 for lap in laps)
    if watch.is_enough():
        assert len(laps) == steps or len(laps) == min(wanted, LEAST_LAPS)


def test_waits_and_steps_are_told_apart(monkeypatch):
    clock = Clock(monkeypatch)

    def slow(batches):
        for batch in batches:
            clock.sleep(0.25)
            yield batch

    watch = Stopwatch(Patience(1, 6, 60), CPU)
    run_loop(watch, [slow(range(4)), slow(range(9))], step=lambda: clock.sleep(2.0))
    laps = watch.laps()
    assert [(lap.wait_seconds, lap.seconds) for lap in laps] == [(0.25, 2.25)] * 6
    assert [lap.began for lap in laps] == [2.25 * number for number in range(6)]


@pytest.mark.parametrize(("step_seconds", "expected"), [(0.125, 2 + 17), (1.0, 2 + LEAST_LAPS)])
def test_when_time_is_over_fewer_laps_are_enough(monkeypatch, step_seconds, expected):
    clock = Clock(monkeypatch)
    watch = Stopwatch(Patience(2, 1000, 2.0), CPU)
    taken = run_loop(watch, [range(1000)], step=lambda: clock.sleep(step_seconds))
    assert len(taken) == expected


def test_each_is_called_once_for_every_batch_and_once_at_the_end():
    calls = []
    watch = Stopwatch(Patience(0, 7, 1e9), CPU, lambda: calls.append(watch.num_batches))
    run_loop(watch, [range(3), range(3), range(9)])
    assert calls == [0, 1, 2, 3, 4, 5, 6, 7]


def test_what_lies_between_epochs_counts_only_where_it_is_asked_for(monkeypatch):
    clock = Clock(monkeypatch)
    watch = Stopwatch(Patience(2, 6, 1e9), CPU)
    for _ in range(4):
        clock.now += 100.0
        for _ in watch.timed(range(3)):
            clock.now += 1.0
    assert [lap.seconds for lap in watch.laps(with_epoch_ends=False)] == [1.0] * 6
    whole = watch.laps()
    assert [lap.seconds for lap in whole] == [101.0, 1.0, 1.0, 101.0, 1.0, 1.0]
    assert [lap.wait_seconds for lap in whole] == [0.0] * 6
    assert [lap.began for lap in whole] == list(
        itertools.accumulate((lap.seconds for lap in whole[:-1]), initial=0.0)
    )


def test_time_is_counted_from_the_end_of_the_warm_up(monkeypatch):
    clock = Clock(monkeypatch)
    watch = Stopwatch(Patience(4, 1000, 10.0, least=2), CPU)
    for _ in watch.timed(range(1000)):
        clock.now += 20.0 if watch.num_batches <= 4 else 3.0
    assert watch.num_batches == 4 + 4


def lap(seconds: float, samples: int = 4) -> Lap:
    return Lap(0.0, 0.0, seconds, samples)


@given(st.integers(1, 60), st.integers(1, 9), st.integers(1, 7))
def test_blocks_hold_whole_updates_and_all_of_them(num_updates, num_blocks, batches):
    # The last batch of an update takes longer: a block that cut updates would show another rate.
    laps = [lap(1.0 if n % batches else 3.0, samples=2) for n in range(num_updates * batches)]
    rates = block_rates([*laps, *[lap(50.0)] * (batches - 1)], num_blocks, batches)
    assert 1 <= len(rates) <= num_blocks
    assert rates == pytest.approx([2 * batches / (batches + 2)] * len(rates))
    assert block_rates(laps, 1, count=lambda _: 1) == pytest.approx(
        [len(laps) / (num_updates * (batches + 2))]
    )
    assert block_rates([], num_blocks) == []


# -- readings and search ---------------------------------------------------------------------------


@given(st.integers(20, 200), st.integers(100_000, 5_000_000), st.randoms(use_true_random=False))
def test_creep_is_told_from_settling_and_breathing(length, slope, dice):
    noise = [dice.randrange(slope // 2 + 1) for _ in range(length)]
    creeping = [10**9 + slope * at + noise[at] for at in range(length)]
    found = creep(creeping, CREEP_HOST_BYTES)
    if found:
        assert found == pytest.approx(slope, rel=0.35)
    else:
        assert slope * length < 16 << 20  # too little to tell
    settling = [10**9 + slope * min(at, length // 3) for at in range(length)]
    assert not creep(settling, CREEP_HOST_BYTES)
    breathing = [10**9 + slope * (at % 10) for at in range(length)]
    assert not creep(breathing, CREEP_HOST_BYTES)


def test_too_few_readings_say_nothing():
    assert creep([n << 24 for n in range(14)], CREEP_HOST_BYTES) is None
    assert creep([None] * 100, CREEP_HOST_BYTES) is None
    with_holes = [n << 24 if n % 2 else None for n in range(60)]
    assert creep(with_holes, CREEP_HOST_BYTES) == pytest.approx(1 << 24)


@pytest.mark.parametrize(("misses", "tried"), [(0, [0, 1, 2]), (1, [0, 1, 2, 3, 4, 5])])
def test_a_search_may_pass_over_one_level_that_does_not_pay(misses, tried):
    rates = [1.0, 2.0, 1.9, 3.0, 3.0, 3.0, 9.0]
    found = climb(
        len(rates), 0, lambda level: Outcome(rates[level], True), 0.05, most_misses=misses
    )
    assert list(found) == tried
