"""`stoker monitor` before, during and after a run; `stoker report` of runs on a machine that others used as well."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from run_folders import BEGAN, Clock, write_run
from stoker.cli.main import app
from stoker.cli.monitor import bar, one_line, sparkline, view
from stoker.cli.terminal import make_console
from stoker.errors import InputError
from stoker.monitor import Monitor
from stoker.report import LOG_NAME, RunLog
from stoker.runs.follow import RunFollower
from stoker.runs.reading import read_run
from stoker.runs.record import compare
from stoker.runs.run_page import run_page, verdict
from stoker.runs.telemetry import TELEMETRY_NAME, TelemetryLog
from stoker.train.run_folder import RunLock


class NoNvml:
    """A driver that is not there."""

    class NVMLError(Exception):
        pass

    def __getattr__(self, name):
        def fail(*_):
            raise self.NVMLError("no driver")

        return fail


def shown(monitor) -> str:
    console = make_console(width=200)
    with console.capture() as capture:
        console.print(view(monitor.look(), monitor.history))
    return capture.get()


# -- waiting and time left --------------------------------------------------------------------------


def test_a_folder_that_comes_later_is_waited_for_and_said_so(tmp_path):
    with Monitor(tmp_path / "runs" / "later", nvml=NoNvml()) as monitor:
        for text in (shown(monitor), one_line(monitor.look())):
            assert "later: waiting for its first line; there is no such folder yet" in text
        (tmp_path / "runs" / "later").mkdir(parents=True)
        assert "waiting for its first line\n" in shown(monitor)
        write_run(tmp_path / "runs" / "later", epochs=2)
        assert "later: done" in shown(monitor)


@pytest.mark.parametrize("once", [["--once"], []])
def test_a_run_that_has_not_begun_is_refused_at_once_or_after_the_time_that_was_given(
    tmp_path, once
):
    (tmp_path / "no run").mkdir()
    for name in ("later", "no run"):
        for wait in ([], ["--wait", "300ms"]):
            words = ["monitor", str(tmp_path / name), "--interval", "100ms", *once, *wait]
            result = CliRunner().invoke(app, words)
            assert isinstance(result.exception, InputError)
            assert "--wait 10min waits for one" in str(result.exception)
            assert ("waiting for its first line" in result.output) == bool(wait and not once)


def test_a_run_that_begins_in_time_is_watched(tmp_path, monkeypatch):
    def sleep(_: float) -> None:
        write_run(tmp_path / "later", epochs=2)

    clock = SimpleNamespace(monotonic=time.monotonic, sleep=sleep)
    monkeypatch.setattr("stoker.cli.monitor.time", clock)
    words = ["monitor", str(tmp_path / "later"), "--once", "--wait", "1min"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0
    assert "later: done" in result.output


def test_a_file_is_no_run(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="is a file"):
        Monitor(tmp_path / "file")


def test_time_left_is_that_of_the_epochs_to_come(tmp_path):
    clock = Clock()
    with RunLock(tmp_path), RunLog(tmp_path / LOG_NAME, clock=clock) as log:
        follower = RunFollower(tmp_path, clock)
        log.write("config", {"settings": {"training.epochs": 10}})
        assert follower.look().seconds_left is None
        for number, took in enumerate((50.0, 20.0, 22.0)):  # the first has the warm-up
            clock.now += took
            log.write("epoch", {"epoch": number, "train_loss": 0.5, "metrics": {}}, epoch=number)
        assert follower.look().seconds_left == pytest.approx(7 * 21.0)
        clock.now += 10
        assert follower.look().seconds_left == pytest.approx(7 * 21.0 - 10)
        clock.now += 10_000
        assert follower.look().seconds_left == 0.0
        with Monitor(tmp_path, nvml=NoNvml()) as monitor:
            assert "time left: " in shown(monitor)
        log.write("config", {"settings": {"training.epochs": 10}})  # resumed
        assert follower.look().seconds_left is None
    assert follower.look().seconds_left is None, "it does not go on"


@given(st.floats(-1, 2), st.integers(1, 40))
def test_a_bar_has_its_width_and_grows_with_the_share(share, width):
    assert len(bar(share, width)) == width
    more = bar(min(1.0, share + 0.25), width)
    assert bar(share, width).count("█") <= more.count("█")
    assert bar(None, width) == "·" * width


@given(st.lists(st.none() | st.floats(0, 1e6), max_size=70))
def test_a_sparkline_has_a_column_per_number(values):
    line = sparkline(values)
    if all(value is None for value in values):
        assert line == ""
    else:
        assert len(line) == len(values)
        assert [column == " " for column in line] == [value is None for value in values]


# -- other work on the machine ----------------------------------------------------------------------


def add_load(folder, other_cores, num_cores=4):
    with RunLog(folder / TELEMETRY_NAME, clock=Clock(BEGAN + 1)) as log:
        for _ in range(30):
            log.write("telemetry", {"host": {"other_cores": other_cores, "num_cores": num_cores}})
    return folder


def test_a_speed_up_is_no_headline_where_others_used_the_machine(tmp_path):
    slow = add_load(write_run(tmp_path / "slow", rate=100.0), 3.0)
    fast = add_load(write_run(tmp_path / "fast", rate=177.0), 0.1)
    runs = [read_run(slow), read_run(fast)]
    said = verdict(runs)
    assert "times as fast" not in said
    assert said.startswith("The machine was busy with other work (3.0 cores in slow)")
    assert "slow 100, fast 177" in said
    assert [row["is_disturbed"] for row in compare(runs)] == [True, False]
    assert "Other work, mean" in run_page(runs)


def test_quiet_machines_and_older_logs_are_compared_as_before(tmp_path):
    slow, fast = write_run(tmp_path / "slow", rate=100.0), write_run(tmp_path / "fast", rate=177.0)
    assert "fast trains 1.77 times as fast as slow" in verdict([read_run(slow), read_run(fast)])
    for folder in (slow, fast):
        add_load(folder, 0.3)
    assert "1.77 times as fast" in verdict([read_run(slow), read_run(fast)])


def test_telemetry_counts_the_cores_of_others(tmp_path):
    log = TelemetryLog(tmp_path, first_seconds=0.15, most_seconds=0.15, nvml=NoNvml())
    path, until = tmp_path / TELEMETRY_NAME, time.monotonic() + 60
    with log:
        while not (path.exists() and '"other_cores"' in path.read_text()):
            assert time.monotonic() < until, "no reading counts them"
            time.sleep(0.05)
    assert '"num_cores"' in path.read_text()
