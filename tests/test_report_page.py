"""`stoker report`: any state of a run's files gives a sound page; numbers, ratios, curves, a browser."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import warm_stoker
from browser import browse, check_widths
from run_folders import BEGAN, FINDINGS, Clock, write_run
from stoker.errors import InputError, MissingExtraError, StoreError
from stoker.page.charts import MAX_POINTS, Chart, Line, Mark, line_chart, round_ticks, thin
from stoker.report import Note, RunEnd, RunLog, Topic
from stoker.runs.figures import (
    all_charts,
    gpu_charts,
    loss_charts,
    memory_charts,
    speed_charts,
    write_plots,
)
from stoker.runs.follow import RunFollower
from stoker.runs.reading import DOCTOR_NAME, LOG_NAME, read_run
from stoker.runs.record import QUANTITIES, compare
from stoker.runs.run_page import run_page, verdict, with_unique_names
from stoker.runs.telemetry import TELEMETRY_NAME
from stoker.train.run_folder import RunLock
from test_quality_page import HOSTILE, Strict

ENV = {**os.environ, "PYTHONWARNINGS": "error"}


def stoker_report(*args: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    return warm_stoker.stoker("report", *args, cwd=cwd, env=ENV)


def page_of(*folders: Path) -> tuple[str, Strict]:
    text = run_page([read_run(folder) for folder in folders])
    parsed = Strict(text)
    assert len(parsed.ids) == len(set(parsed.ids))
    return text, parsed


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[Path, Path]:
    """A slow run and a fast one."""
    folder = tmp_path_factory.mktemp("pair")
    slow = write_run(
        folder / "naive", rate=5_000.0, wait_share=0.4, batch_size=128, findings=FINDINGS
    )
    note = "memory ran out with 139.2 GB in use (2.0 GB after letting go): 512 samples at once, now 384"
    fast = write_run(folder / "ours", rate=30_000.0, epoch_seconds=5.0, notes=(note,), seed=1)
    return slow, fast


# -- reading -------------------------------------------------------------------------------------


class TestReading:
    def test_a_finished_run_is_read_whole(self, pair):
        run = read_run(pair[0])
        assert (run.state, run.told, run.num_sessions) == ("done", "Done: 8 epochs.", 1)
        assert run.samples_per_second == 5_000.0
        assert run.wait_share == pytest.approx(0.4)
        assert run.epoch_seconds == 30.0
        assert [epoch.number for epoch in run.epochs] == list(range(8))
        assert run.seconds == pytest.approx(8 * 33.0)
        assert run.gpu_indices == (0,)
        assert len(run.gpu_track(0, "power_watts")) == 120
        assert run.peak_device_bytes == max(
            value for _, value in run.track("run", "reserved_bytes")
        )
        assert 0 < run.throttle_shares["power cap"] < 0.5
        assert run.config["training.batch_size"] == 128
        assert run.findings[0]["name"] == "sync-every-step"
        assert run.problems == ()
        assert read_run(pair[0] / LOG_NAME).folder == pair[0]

    def test_the_first_epoch_warms_up(self, tmp_path):
        with RunLog(tmp_path / LOG_NAME) as log:
            for number, seconds in enumerate((10.0, 2.0, 2.0)):
                epoch = {"epoch": number, "num_samples": 100, "seconds": seconds, "wait_share": 0.5}
                log.write("epoch", epoch, step=number, epoch=number)
        run = read_run(tmp_path)
        assert (run.samples_per_second, run.epoch_seconds, run.wait_share) == (50.0, 2.0, 0.5)

    def test_no_run_is_an_error_that_says_what_one_is(self, tmp_path):
        for path, words in (
            (tmp_path, "is not the folder of a run"),
            (tmp_path / "x", "not exist"),
        ):
            with pytest.raises(InputError, match=words):
                read_run(path)

    def test_an_empty_log_is_a_run_that_has_not_begun(self, tmp_path):
        (tmp_path / LOG_NAME).write_bytes(b"")
        run = read_run(tmp_path)
        assert run.state == "empty"
        assert "is empty" in run.problems[0]
        text, _ = page_of(tmp_path)
        assert "Nothing is written yet." in text

    def test_a_log_of_random_bytes_is_said_to_be_unreadable(self, tmp_path):
        (tmp_path / LOG_NAME).write_bytes(bytes(range(256)) * 20)
        run = read_run(tmp_path)
        assert run.state == "empty"
        text, _ = page_of(tmp_path)
        assert f"Nothing in {LOG_NAME} can be read" in text
        assert "Nothing is written yet." not in text

    @given(share=st.floats(0, 1), which=st.sampled_from([LOG_NAME, TELEMETRY_NAME]))
    def test_logs_cut_anywhere_give_a_page(self, pair, tmp_path_factory, share, which):
        folder = tmp_path_factory.mktemp("cut")
        for name in (LOG_NAME, TELEMETRY_NAME):
            data = (pair[0] / name).read_bytes()
            (folder / name).write_bytes(data[: int(len(data) * share)] if name == which else data)
        run = read_run(folder)
        left = (folder / which).read_bytes()
        torn = bool(left) and not left.endswith(b"\n")
        cut = [text for text in run.problems if "cut in the middle of its last line" in text]
        assert len(cut) == torn
        page_of(folder)

    def test_a_bad_line_in_the_middle_is_named_and_left_out(self, pair, tmp_path):
        lines = (pair[0] / LOG_NAME).read_bytes().splitlines(keepends=True)
        lines[3] = b"\xff\x00 rubbish\n"
        lines[7] = b'{"half": \n'
        (tmp_path / LOG_NAME).write_bytes(b"".join(lines))
        run = read_run(tmp_path)
        assert len(run.epochs) == 8
        assert any("2 lines that cannot be read, the first is line 4" in p for p in run.problems)
        assert any("No telemetry" in problem for problem in run.problems)
        text, _ = page_of(tmp_path)
        assert "2 lines that cannot be read" in text

    def test_a_run_that_goes_on_says_so(self, tmp_path):
        write_run(tmp_path, epochs=3, finished=False)
        with RunLock(tmp_path):
            run = read_run(tmp_path, now=Clock(BEGAN + 105))
            assert run.state == "running"
            assert (
                run.told
                == f"Still running: process {os.getpid()} on {os.uname().nodename}, last heard of 6.00 s ago."
            )
            text, _ = page_of(tmp_path)
            assert "Make the page again later." in text

    @pytest.mark.parametrize(
        ("ended", "state", "words"),
        [
            ("interrupted", "stopped", "Stopped before its end (interrupted); 2 epochs finished."),
            ("terminated", "stopped", "`--resume` goes on"),
            ("failed: NonFiniteError: the loss", "failed", "Ended by an error: NonFiniteError: the loss"),
            (None, "cut short", "Its log ends without an ending"),
        ],
    )  # fmt: skip
    def test_how_a_run_ended(self, tmp_path, ended, state, words):
        write_run(tmp_path, epochs=2, finished=False)
        with RunLog(tmp_path / LOG_NAME, clock=Clock(BEGAN)) as log:
            log.write("config", {"settings": {"epochs": 5}})
        if ended is not None:
            with RunLog(tmp_path / TELEMETRY_NAME, clock=Clock(BEGAN + 500)) as log:
                log.write("end", {"ended": ended})
        run = read_run(tmp_path)
        assert run.state == state
        assert words in run.told
        assert ended is None or ("ended", ended) in [
            (event.kind, event.text) for event in run.events
        ]

    @pytest.mark.parametrize(
        ("error", "state", "words"),
        [
            (None, "cut short", "2 epochs finished, its evaluation is not. `--resume` goes on."),
            (KeyboardInterrupt(), "stopped", "(interrupted); 2 epochs finished, its evaluation is not."),
            (ValueError("odd"), "failed", "ValueError: odd 2 epochs finished, its evaluation is not."),
        ],
    )  # fmt: skip
    def test_an_evaluation_that_was_not_finished_is_told(self, tmp_path, error, state, words):
        write_run(tmp_path, epochs=2, finished=False)
        with RunLog(tmp_path / TELEMETRY_NAME, clock=Clock(BEGAN + 500)) as log:
            log.write("end", {"ended": "done"})
        with RunLog(tmp_path / LOG_NAME, clock=Clock(BEGAN + 501)) as log:
            log.write("end", {"ended": "done"})
            log.write("evaluation", {})
            if error is not None:
                log.write("end", vars(RunEnd.by(error)))
        run = read_run(tmp_path)
        assert run.state == state
        assert words in run.told
        assert RunFollower(tmp_path).look().state == (
            str(RunEnd.by(error)) if error else "not running"
        )
        assert error is None or str(RunEnd.by(error)) in [event.text for event in run.events]
        with RunLog(tmp_path / LOG_NAME) as log:
            log.write("evaluation", {})
            log.write("result", {"test": {}})
        assert read_run(tmp_path).state == "done"

    def test_a_refused_resume_does_not_undo_the_end(self, tmp_path):
        write_run(tmp_path)
        with RunLog(tmp_path / LOG_NAME) as log, RunLog(tmp_path / TELEMETRY_NAME) as telemetry:
            log.write("config", {"settings": {"epochs": 99}})
            telemetry.write("begin", {"pid": 1, "host": "h"})
            telemetry.write("end", {"ended": "failed: StoreError: is of another run"})
        assert read_run(tmp_path).state == "done"

    def test_a_resumed_run_is_one_curve_without_the_pause(self, tmp_path):
        write_run(tmp_path, epochs=2, finished=False)
        length = read_run(tmp_path).seconds
        clock = Clock(BEGAN + 100_000)
        with (
            RunLog(tmp_path / LOG_NAME, clock=clock) as log,
            RunLog(tmp_path / TELEMETRY_NAME, clock=clock) as telemetry,
        ):
            log.write("config", {"settings": {"epochs": 3}})
            telemetry.write("begin", {"pid": 1, "host": "h"})
            first = read_run(tmp_path).losses
            repeated = first[len(first) // 2][0]
            clock.now += 10
            log.write("steps", {"loss": 77.0}, step=repeated, epoch=1)
            clock.now += 10
            epoch = {"epoch": 1, "train_loss": 0.25, "num_samples": 9, "seconds": 3.0}
            log.write("epoch", epoch, step=repeated, epoch=2)
            telemetry.write("telemetry", {"gpus": []})
        run = read_run(tmp_path)
        assert run.num_sessions == 2
        assert run.seconds == pytest.approx(length + 20)
        assert run.telemetry[-1][0] == pytest.approx(length + 20)
        assert run.losses[-1] == (repeated, 77.0)
        assert [epoch.number for epoch in run.epochs] == [0, 1]
        assert run.epochs[1].train_loss == 0.25
        assert "Resumed" in page_of(tmp_path)[0]

    @pytest.mark.parametrize("late_seconds", [-1, 1, 3])
    def test_telemetry_that_begins_late_is_no_resume(self, tmp_path, late_seconds):
        clock = Clock(BEGAN + 10)
        with (
            RunLog(tmp_path / LOG_NAME, clock=clock) as log,
            RunLog(tmp_path / TELEMETRY_NAME, clock=clock) as telemetry,
        ):
            log.write("config", {"settings": {"epochs": 3}})
            for second, event in enumerate(("fit", "steps", "steps")):
                clock.now = BEGAN + 20 + second
                log.write(event, {"loss": 1.0}, step=second, epoch=0)
            clock.now = BEGAN + 20 + late_seconds - 0.5
            telemetry.write("begin", {"pid": 1, "host": "h"})
            clock.now = BEGAN + 30
            telemetry.write("telemetry", {"gpus": []})
        run = read_run(tmp_path)
        assert (run.num_sessions, run.seconds) == (1, 20)

    def test_a_note_is_an_event_or_a_choice_by_its_topic_not_by_its_words(self, tmp_path):
        with RunLog(tmp_path / LOG_NAME) as log:
            log.write("config", {"settings": {}})
            log.write("note", Note("memory ran out of ideas", Topic.OTHER).to_json())
            log.write("note", Note("two passes now", Topic.MEMORY).to_json(), step=3)
            log.write("note", {"text": "memory ran out with 3 GB in use"}, step=4)  # an older log
            log.write("note", {"text": "of a newer version", "topic": "weather"})
        run = read_run(tmp_path)
        assert run.notes == ("memory ran out of ideas", "of a newer version")
        assert [(event.kind, event.step) for event in run.events] == [("memory", 3), ("memory", 4)]

    @pytest.mark.parametrize(
        ("values", "told"),
        [
            ({"ended": "failed", "error": "OSError: x"}, "Ended by an error: OSError: x"),
            ({"ended": "failed: OSError: x"}, "Ended by an error: OSError: x"),  # an older log
            ({"ended": "terminated", "error": ""}, "Stopped before its end (terminated)"),
        ],
    )
    def test_how_a_run_ended_is_read_from_new_and_older_logs(self, tmp_path, values, told):
        with RunLog(tmp_path / LOG_NAME) as log, RunLog(tmp_path / TELEMETRY_NAME) as telemetry:
            log.write("config", {"settings": {}})
            telemetry.write("end", values)
        assert read_run(tmp_path).told.startswith(told)

    def test_a_doctors_file_that_cannot_be_read_is_a_problem(self, pair, tmp_path):
        for number, content in enumerate(("{", "[]", '{"findings": 3}', '{"findings": ["text"]}')):
            folder = shutil.copytree(pair[1], tmp_path / str(number))
            (folder / DOCTOR_NAME).write_text(content)
            run = read_run(folder)
            assert run.findings == ()
            assert any(DOCTOR_NAME in problem for problem in run.problems) == (number < 3)


# -- the page ------------------------------------------------------------------------------------


class TestPage:
    def test_one_run_is_told_whole(self, pair):
        text, parsed = page_of(pair[0])
        for section in ("summary", "findings", "speed", "metrics", "memory", "gpu", "plan", "epochs",
                        "config", "machine"):  # fmt: skip
            assert f'<section id="{section}">' in text
        assert {"throughput", "waits", "loss-t", "device-memory", "busy", "power", "temperature",
                "pcie", "findings-0-table", "plan-0-lines"} <= set(parsed.ids)  # fmt: skip
        for words in ("5,000 samples/s, 40.0 % of the time waiting", "NVIDIA H200", "all rows, as float16",
                      "resident: 12.0 GB of data fit", "loss.item() at train.py:41", "× 1.6 (1.3 to 1.8)",
                      "not occupancy", "target 85 to 95 %", "target 70 to 90 %", "target below 80 °C",
                      "AMD EPYC 9654", "Clocks held down by: power cap"):  # fmt: skip
            assert words in text, words

    def test_the_ladder_is_told(self, pair):
        text, _ = page_of(pair[1])
        assert '<section id="events">' in text
        assert "memory ran out with 139.2 GB" in text.partition('<section id="events">')[2]
        assert "memory ran out" not in text.partition("What the run chose")[2]

    def test_it_needs_nothing_from_outside(self, pair):
        text, parsed = page_of(*pair)
        assert not {"script", "link", "img", "iframe", "object"} & set(parsed.tags)
        assert not re.search(r"https?:|url\(|@import", text)
        assert "default-src 'none'" in text

    def test_several_runs_with_their_ratio(self, pair):
        text, parsed = page_of(*pair)
        assert {"comparison", "config-differences"} <= set(parsed.ids)
        assert "ours trains 6.00 times as fast as naive: 30,000 samples/s." in text
        rows = re.findall(r"<tr>(.*?)</tr>", text.partition('id="comparison"')[2], re.DOTALL)
        cells = [re.sub("<[^>]+>", "", cell) for cell in re.findall(r"<td.*?</td>", rows[2])]
        assert cells == ["Samples/s", "5,000", "30,000", "× 6.00"]
        assert "The same for all runs." in text  # the machine
        first, second = (entry["figures"] for entry in compare([read_run(p) for p in pair]))
        assert second["samples_per_second"] / first["samples_per_second"] == 6.0
        assert first["batch_size"] == 128

    def test_energy_is_power_over_rate(self, pair):
        run = read_run(pair[0])
        watts = [value for _, value in run.gpu_track(0, "power_watts")]
        (energy,) = [q for q in QUANTITIES if q.key == "watt_hours_per_million"]
        expected = sum(watts) / len(watts) * (1e6 / 5_000.0) / 3600
        assert energy.value(run) == pytest.approx(expected)

    def test_runs_of_the_same_name_can_be_told_apart(self, pair, tmp_path):
        twin = shutil.copytree(pair[0], tmp_path / "naive")
        names = [run.name for run in with_unique_names([read_run(p) for p in (*pair, twin, twin)])]
        assert len(set(names)) == 4
        assert str(pair[0]) in names
        page_of(pair[0], twin, twin)

    def test_runs_without_anything_in_common(self, pair, tmp_path):
        write_run(tmp_path / "cpu", num_gpus=0)
        (tmp_path / "empty").mkdir()
        (tmp_path / "empty" / LOG_NAME).touch()
        folders = (tmp_path / "empty", pair[0], tmp_path / "cpu")
        text, _ = page_of(*folders)
        assert "3 runs; there is no rate to compare." in text
        alone, _ = page_of(tmp_path / "cpu")
        assert "No GPU was read" in alone
        assert "device-memory" not in alone
        assert verdict([read_run(pair[1]), read_run(pair[0])]) == (
            "ours is the fastest of 2: 30,000 samples/s."
        )

    @pytest.mark.parametrize("hostile", HOSTILE)
    def test_hostile_names_are_shown_not_run(self, tmp_path, hostile):
        text, parsed = self.poisoned(tmp_path, hostile)
        assert not {"script", "img"} & set(parsed.tags)
        assert not [name for name in parsed.attributes if name.startswith("on")]
        assert len(text) < 250_000
        text.encode("utf-8")

    def poisoned(self, folder: Path, hostile: str) -> tuple[str, Strict]:
        finding = dict.fromkeys(("name", "title", "remedy"), hostile) | {"evidence": [hostile]}
        notes = (hostile, f"memory ran out with {hostile}")
        write_run(folder / "run", epochs=2, name=hostile, notes=notes, findings=[finding])
        with RunLog(folder / "run" / LOG_NAME) as log:
            log.write("config", {"settings": {hostile: hostile}, "reasons": {hostile: hostile}})
            line = {"where": hostile, "what": hostile, "num_bytes": hostile, "reason": hostile}
            log.write("plan", {"lines": [line, hostile], "reasons": [hostile]})
            log.write("machine", {"cpu": hostile, "gpus": [{"name": hostile}], "disk": hostile})
        with RunLog(folder / "run" / TELEMETRY_NAME) as log:
            gpu = {"index": 0, "name": hostile, "throttle_reasons": [hostile]}
            log.write("telemetry", {"gpus": [gpu, hostile], "run": hostile, "process": [hostile]})
            log.write("note", {"text": hostile})
            log.write("end", {"ended": hostile})
        runs = [replace(read_run(folder / "run"), name=name) for name in (hostile, "plain")]
        text = run_page(runs)
        Strict(run_page(runs[:1]))
        return text, Strict(text)

    @given(
        st.lists(
            st.tuples(
                st.sampled_from(["config", "plan", "machine", "epoch", "steps", "note", "nonfinite",
                                 "result", "telemetry", "begin", "end", "x"]),
                st.recursive(
                    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
                    lambda inner: st.lists(inner, max_size=3)
                    | st.dictionaries(
                        st.sampled_from(["gpus", "run", "process", "settings", "reasons", "lines", "epoch",
                                         "metrics", "loss", "index", "name", "throttle_reasons", "seconds",
                                         "num_samples", "text", "baseline", "val", "samples_per_second"]),
                        inner, max_size=5),
                    max_leaves=12),
                st.none() | st.integers(-2, 10**6),
            ),
            max_size=12,
        )
    )  # fmt: skip
    def test_any_log_gives_a_sound_page(self, tmp_path_factory, lines):
        folder = tmp_path_factory.mktemp("any")
        with RunLog(folder / LOG_NAME) as log, RunLog(folder / TELEMETRY_NAME) as telemetry:
            for number, (event, values, step) in enumerate(lines):
                values = values if isinstance(values, dict) else {"text": values, "gpus": values}
                (telemetry if number % 2 else log).write(event, values, step=step, epoch=step)
        page_of(folder)
        page_of(folder, folder)


# -- charts --------------------------------------------------------------------------------------

numbers = st.floats(-1e12, 1e12, allow_nan=False)


class TestCharts:
    @given(numbers, st.floats(1e-9, 1e12))
    def test_ticks_are_even_and_cover_the_values(self, low, span):
        high = low + span
        ticks = round_ticks(low, high)
        assert 2 <= len(ticks) <= 8
        if span > 1e-9 * abs(low):
            step = ticks[1] - ticks[0]
            assert ticks[0] <= low + step * 1e-6
            assert ticks[-1] >= high - step * 1e-6
            assert all(math.isclose(b - a, step, rel_tol=1e-3) for a, b in pairwise(ticks))

    @given(
        st.lists(st.none() | st.floats(-1e6, 1e6), max_size=400),
        st.integers(4, 50),
        st.booleans(),
    )
    def test_thinned_lines_are_short_and_keep_their_range(self, values, most, peaks):
        points = [(float(number), value) for number, value in enumerate(values)]
        made = thin(points, most, peaks=peaks)
        assert len(made) <= most
        xs = [x for x, _ in made]
        assert xs == sorted(xs)
        known = [value for value in values if value is not None]
        kept = [value for _, value in made if value is not None]
        assert bool(known) == bool(kept)
        assert all(min(known) - 1e-6 <= value <= max(known) + 1e-6 for value in kept)
        if peaks and known:
            assert max(kept) == max(known)

    @given(
        st.lists(st.tuples(st.floats(0, 1e6), st.none() | st.floats()), max_size=30),
        st.booleans(),
        st.sampled_from(["time", "count"]),
    )
    def test_any_curve_is_drawn_inside_its_box(self, points, is_log, scale):
        line = Line("a", sorted(points, key=lambda point: point[0]), 1)
        chart = Chart("k", "t", [line], "u", scale, marks=[Mark("m", 2.0, 3.0)], is_log=is_log)
        text = line_chart(chart)
        Strict(text)
        assert "nan" not in text.lower().replace("finance", "")
        for path in re.findall(
            r'class="curve[^"]*" d="([^"]*)"', text.partition('class="plot"')[2]
        ):
            places = re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", path)
            assert len(places) == len(line.values)
            assert all(0 <= float(x) <= 1000 and 0 <= float(y) <= 100 for x, y in places)

    def test_a_gap_breaks_the_curve(self):
        points = [(0.0, 1.0), (1.0, 2.0), (2.0, None), (3.0, 1.0), (4.0, math.nan), (5.0, 2.0)]
        text = line_chart(Chart("k", "t", [Line("", points)], "u"))
        (path,) = re.findall(r'class="curve c0" d="([^"]*)"', text)
        assert path.count("M") == 3
        assert path.count("h0") == 2

    def test_axes_have_round_names_and_units(self):
        points = [(float(second), 12_000.0 + second) for second in range(0, 700, 7)]
        text = line_chart(Chart("k", "Rate <b>", [Line("", points)], "samples/s"))
        assert re.findall(r'left:[\d.]+%">([^<]+)<', text) == ["0", "5 min", "10 min"]
        assert re.findall(r'top:[\d.]+%">([^<]+)<', text) == ["0", "5k", "10k", "15k"]
        assert "Rate &lt;b&gt;" in text
        assert "100 values from 12,000 to 12,693, the last 12,693 samples/s." in text
        losses = [(float(step), 10.0 ** (-step / 10)) for step in range(1, 40)]
        text = line_chart(Chart("k", "t", [Line("", losses)], "", "count", is_log=True))
        assert re.findall(r'top:[\d.]+%">([^<]+)<', text) == ["0.001", "0.01", "0.1"]

    def test_an_empty_chart_says_so(self):
        for lines in ([], [Line("a", [])], [Line("a", [(0.0, None), (1.0, math.inf)])]):
            chart = Chart("k", "Power", lines, "W", absent="Nothing was read.")
            assert chart.is_empty
            assert "Nothing was read." in line_chart(chart)

    def test_long_runs_stay_small(self, tmp_path):
        write_run(tmp_path, epochs=100)
        run = read_run(tmp_path)
        charts = [
            *speed_charts([run]),
            *loss_charts([run]),
            *memory_charts([run]),
            *gpu_charts([run]),
        ]
        assert max(len(line.points) for chart in charts for line in chart.lines) <= MAX_POINTS
        assert len(run_page([run])) < 250_000


# -- plots and the command -----------------------------------------------------------------------


class TestPlots:
    def test_every_chart_becomes_a_file(self, pair, tmp_path):
        pytest.importorskip("matplotlib")
        hostile = write_run(tmp_path / "_$x_{値段", epochs=2, name="$a_{", seed=3)
        charts = all_charts([read_run(path) for path in (*pair, hostile)])
        charts = [
            chart for chart in charts if chart.key in ("throughput", "loss", "busy", "metric-0")
        ]
        files = write_plots(charts, tmp_path / "png")
        assert [file.stem for file in files] == [chart.key for chart in charts]
        assert len(files) == 4
        for file in files:
            head = file.read_bytes()[:24]
            assert head.startswith(b"\x89PNG")
            assert int.from_bytes(head[16:20]) == 1020

    def test_without_matplotlib_it_says_what_to_install(self, pair, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        with pytest.raises(MissingExtraError, match=r"pip install .*\[plots\]'"):
            write_plots(all_charts([read_run(pair[0])]), tmp_path / "png")

    def test_a_folder_that_cannot_be_made_is_named(self, pair, tmp_path):
        pytest.importorskip("matplotlib")
        (tmp_path / "file").touch()
        with pytest.raises(StoreError, match="cannot write plots"):
            write_plots(all_charts([read_run(pair[0])]), tmp_path / "file" / "png")


class TestCommand:
    def test_the_page_lands_beside_the_run_or_where_asked(self, pair, tmp_path):
        run = shutil.copytree(pair[0], tmp_path / "run")
        done = stoker_report("run", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert done.stdout.endswith("page: run/report.html\n")
        assert (run / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
        done = stoker_report("run", pair[1], "--json", cwd=tmp_path)
        document = json.loads(done.stdout)
        assert document["page"] == "report.html"
        assert document["runs"][1]["ratios"]["samples_per_second"] == 6.0
        assert (tmp_path / "report.html").exists()

    @pytest.mark.parametrize(
        ("args", "words"),
        [
            (("nowhere",), "'nowhere' does not exist"),
            (("rum",), "Try: run\n"),
            (("stor",), "Try: ls .\n"),  # a store is no run, however near its name is
            ((".",), "is not the folder of a run"),
            ((), "Missing argument"),
            (("run", "--out", "no/page.html"), "cannot write the page no/page.html"),
        ],
    )
    def test_mistakes_end_with_2_and_say_what_to_type(self, pair, tmp_path, args, words):
        (tmp_path / "run").symlink_to(pair[0])
        (tmp_path / "store").mkdir()
        done = stoker_report(*args, cwd=tmp_path)
        assert done.returncode == 2
        assert words in done.stderr
        assert "Traceback" not in done.stderr


class TestDocs:
    PAGE = (Path(__file__).parents[1] / "docs" / "report.md").read_text(encoding="utf-8")

    def test_the_example_runs(self, pair, tmp_path, monkeypatch):
        (tmp_path / "runs").mkdir()
        (tmp_path / "runs" / "a").symlink_to(pair[0])
        monkeypatch.chdir(tmp_path)
        (example,) = re.findall(r"```python\n(.*?)```", self.PAGE, re.DOTALL)
        state: dict = {}
        exec(compile(example, "docs/report.md", "exec"), state)
        assert state["page"].startswith("<!doctype html>")

    def test_its_sections_are_those_of_the_page(self, pair):
        text, _ = page_of(*pair)
        titles = re.findall(r"<h2>([^<]+)</h2>", text)
        rows = re.findall(r"^\| ([A-Z][\w ,]+) \| ", self.PAGE, re.MULTILINE)
        told = [title for row in rows for title in row.split(", ")]
        # Only of a run of `stoker train`; test_evaluation_page.py has one.
        recipe_only = ["Evaluation", "Since the last run", "Data"]
        assert [title for title in told if title not in titles] == recipe_only
        assert titles == [title for title in told if title not in recipe_only]


# -- a browser -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("browser")
    hostile, *_ = HOSTILE
    text, _ = TestPage().poisoned(folder, f"{hostile} {'long' * 400} {HOSTILE[4]}")
    write_run(folder / "plain", num_gpus=2, findings=FINDINGS)
    (folder / "page.html").write_text(text, encoding="utf-8")
    both = [read_run(folder / "run"), read_run(folder / "plain")]
    (folder / "both.html").write_text(run_page(both), encoding="utf-8")
    return folder


class TestInBrowser:
    def test_it_renders_without_a_complaint(self, written):
        dom, said = browse(written / "both.html")
        assert 'id="comparison"' in dom
        assert dom.count('class="chart"') > 10
        assert "CONSOLE" not in said
        # The check can fail: a page with a script that the policy forbids does complain.
        bad = written / "bad.html"
        text = (written / "both.html").read_text(encoding="utf-8")
        bad.write_text(text.replace("</body>", "<script>1</script></body>"), encoding="utf-8")
        assert "CONSOLE" in browse(bad)[1]

    def test_no_horizontal_scroll_on_a_phone(self, written):
        check_widths(written, {"page.html": [320, 390], "both.html": [320, 390]})
