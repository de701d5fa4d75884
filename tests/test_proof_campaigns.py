"""The engine of the long campaigns counts rightly, goes on, and isolates crashes and hangs."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections import deque
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = [str(ROOT / "benchmarks/proof"), str(ROOT / "benchmarks")]


@pytest.fixture(scope="module")
def proof():
    before = list(sys.path)
    sys.path[:0] = FOLDERS
    sys.modules.pop(
        "campaign", None
    )  # the folder of that name beside this file, where it was collected
    import exactly_once
    import figures

    import campaign

    yield {"campaign": campaign, "exactly_once": exactly_once, "figures": figures}
    sys.path[:] = before


def prepare(scratch):
    (scratch / "file").write_text("x")

    def trial(rng):
        number = trial.number
        trial.number += 1
        if number == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        if number == 1:
            raise ValueError("other data")
        return "refused" if rng.random() < 0.5 else ("right", 0.25)

    trial.number = 0
    return trial


@pytest.mark.timeout(60)
def test_crashes_and_wrong_answers_are_counted_once_and_the_rest_goes_on(proof, tmp_path, capsys):
    campaign = proof["campaign"]
    # A block of nine: the child that goes on behind a crash counts its own trials from 0 again.
    family = campaign.Family("f", prepare, block=9)
    out = tmp_path / "state.json"
    run = campaign.Campaign("test", [family], 20, 0, 50, out)
    run.run(60, 2)
    counts = json.loads(out.read_text())["result"]["families"]["f"]["counts"]
    assert sum(counts.values()) == 20
    # Children of 9 and 9 crash at their fourth trial, those that have the 5 left of them again, and 1, 1 and 2 end.
    assert counts["crash"] == 4
    assert counts["wrong"] == 5
    assert counts["hang"] == 0
    assert "crash" in capsys.readouterr().out
    assert not list(Path("/dev/shm").glob(f"stoker-proof-{os.getpid()}*"))


@pytest.mark.timeout(60)
def test_a_trial_that_hangs_is_ended_and_kept_by_its_number(proof, tmp_path):
    campaign = proof["campaign"]

    def sleeper(scratch):
        return lambda rng: time.sleep(60) if rng.random() < 0.05 else "right"

    numbers = [n for n in range(200) if random.Random(f"3 f {n}").random() < 0.05]
    out = tmp_path / "state.json"
    campaign.Campaign("test", [campaign.Family("f", sleeper)], numbers[0] + 1, 3, 2, out).run(60, 1)
    result = json.loads(out.read_text())["result"]
    assert numbers[0] in [entry["number"] for entry in result["found"] if entry["what"] == "hang"]
    assert sum(result["families"]["f"]["counts"].values()) == numbers[0] + 1


@pytest.mark.timeout(60)
def test_a_campaign_goes_on_from_its_state_without_repeating_a_number(proof, tmp_path):
    campaign = proof["campaign"]
    log = tmp_path / "log"

    def noting(scratch):
        def trial(rng):
            with log.open("a") as file:
                file.write(f"{rng.random()}\n")
            time.sleep(0.002)
            return "right"

        return trial

    for seconds, goal in ((0.15, 400), (0.15, 400), (60, 400)):
        family = campaign.Family("f", noting, block=50)
        campaign.Campaign("test", [family], goal, 1, 20, tmp_path / "state.json").run(seconds, 2)
    expected = {f"{random.Random(f'1 f {number}').random()}" for number in range(400)}
    lines = log.read_text().splitlines()
    assert len(lines) == 400
    assert set(lines) == expected
    with pytest.raises(SystemExit, match="has the seed 1"):
        campaign.Campaign("test", [family], 400, 2, 20, tmp_path / "state.json")


def test_a_sample_that_is_repeated_or_lost_is_noticed(proof, monkeypatch):
    once = proof["exactly_once"]
    for number in range(20):
        assert once.trial(random.Random(number)) == "right"
    real = once.hand_over
    monkeypatch.setattr(
        once,
        "hand_over",
        lambda begun, order, step: real(begun, order, max(step - 1, begun.first_step)),
    )
    with pytest.raises(AssertionError):
        deque(map(once.trial, map(random.Random, range(200))), maxlen=0)


def test_the_tables_of_the_page_are_those_of_the_files(proof):
    figures = proof["figures"]
    page = (ROOT / "docs/faults.md").read_text("utf-8")
    assert f"{figures.BEGIN}\n\n{figures.text()}\n{figures.END}" in page


def test_a_slope_is_found_and_noise_is_none(proof):
    import soak

    rng = random.Random(0)
    times = [float(second) for second in range(0, 3600, 5)]
    flat = soak.slope(times, [1e8 + rng.gauss(0, 1e6) for _ in times])
    grown = soak.slope(times, [1e8 + 2e4 * at + rng.gauss(0, 1e6) for at in times])
    assert not flat["grows"]
    assert flat["low"] < 0 < flat["high"]
    assert grown["grows"]
    assert grown["per_hour"] == pytest.approx(7.2e7, rel=0.05)
    assert soak.slope(times[:5], times[:5]) is None
    without = proof["figures"].without_largest_step
    assert without(grown) == pytest.approx(7.2e7, rel=0.1)
    once = soak.slope(times, [1e8 + 2e6 * (at > 400) for at in times])
    assert once["low"] > 0, "a straight line takes one block for growth"
    assert without(once) == pytest.approx(0.0, abs=1)
    assert without(soak.slope(times, [1e8 for _ in times])) == 0
