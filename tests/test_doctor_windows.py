"""Windows of steps in which the probe times no calls: where the time of a step comes from."""

from __future__ import annotations

import pytest

from stoker.doctor.measurements import MachineFacts
from stoker.doctor.probe.recorder import PROFILED, UNWATCHED, is_watched
from stoker.doctor.transcript import Process
from stoker.doctor.transcript_measures import measure
from test_doctor_attach import row, state


def measured(rows, **values):
    values = {"num_steps": len(rows), **values}
    return measure([Process(rows, [], state(**values))], "python train.py", MachineFacts(cores=2))


def test_the_first_steps_are_watched_and_then_half_of_them():
    assert all(map(is_watched, range(20)))
    assert not any(map(is_watched, range(20, 36)))
    short = [is_watched(number, 0.0015) for number in range(512, 1536)]
    assert sum(short) == 256, "of short steps there are many: a quarter is enough"
    assert len({number // 64 for number, on in enumerate(short, 512) if on}) == 4, "windows of 64"
    assert [is_watched(n, 0.0015) for n in range(128)] == [is_watched(n) for n in range(128)]
    later = [is_watched(number) for number in range(512, 1536)]
    assert 0.4 < sum(later) / len(later) < 0.6


@pytest.mark.parametrize("period", [8, 16, 32, 50, 64, 128])
def test_work_that_repeats_falls_into_both_halves(period):
    found = {is_watched(number) for number in range(64, 4096, period)}
    assert found == {True, False}


def mixed(slow=0.012, fast=0.010, num_watched=20, num_plain=30):
    plain = [row(seconds=fast, cpu=fast, flags=UNWATCHED) for _ in range(num_plain)]
    return [row(seconds=slow) for _ in range(num_watched)] + plain


def test_the_time_of_a_step_is_that_of_steps_that_were_left_alone():
    found = measured(mixed())
    assert found.step_seconds.median == pytest.approx(0.010)
    # Three are the warm-up; the other watched ones lose what watching costs.
    assert found.steps == 47
    assert found.mean_step_seconds == pytest.approx(0.010)


def test_a_few_steps_that_were_left_alone_are_not_enough():
    assert measured(mixed(num_plain=8)).step_seconds.median == pytest.approx(0.012)


def test_a_rare_long_step_still_counts_in_the_rate():
    rows = mixed()
    rows[10] = row(seconds=1.0)
    found = measured(rows)
    assert found.step_seconds.median == pytest.approx(0.010)
    assert found.seconds == pytest.approx(47 * 0.010 + 0.99, rel=0.01)


def test_calls_are_divided_by_the_steps_in_which_they_were_timed():
    site = {"where": "a.py:3", "call": "item", "calls": 20, "seconds": 0.02, "bytes": 0}
    rows = [one._replace(sync=0.001, cpu=0.01) if not one.flags else one for one in mixed()]
    found = measured(rows, num_watched=20, sites=[{"family": "sync", **site}])
    (call,) = found.syncs
    assert call.calls_per_step == pytest.approx(1.0)
    assert call.seconds_per_step == pytest.approx(0.001 - 4e-6)
    # Housekeeping is timed in every step.
    (call,) = measured(mixed(), num_watched=20, sites=[{"family": "host", **site}]).host_calls
    assert call.calls_per_step == pytest.approx(20 / 50)


def test_timing_thousands_of_calls_is_not_their_own_cost():
    site = {
        "where": "a.py:3",
        "call": "item",
        "calls": 20 * 10_000,
        "seconds": 20 * 0.055,
        "bytes": 0,
    }
    watched = [row(seconds=0.060, sync=0.055, cpu=0.06) for _ in range(20)]
    rows = watched + [row(seconds=0.035, cpu=0.035, flags=UNWATCHED) for _ in range(30)]
    found = measured(rows, num_watched=20, sites=[{"family": "sync", **site}])
    # 5 ms of a step are no call, whether calls are timed or not.
    assert found.syncs[0].seconds_per_step == pytest.approx(0.035 - 0.005)


def test_steps_after_the_profiler_count_only_if_there_are_few_before():
    late = [row(seconds=0.020, flags=PROFILED) for _ in range(40)]
    assert measured(mixed() + late).step_seconds.median == pytest.approx(0.010)
    early = [row(seconds=0.010) for _ in range(10)]
    assert measured(early + late).step_seconds.median == pytest.approx(0.020)
