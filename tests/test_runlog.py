"""The run log: one event per line, whole after a crash, and honest about what is not finite."""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import CorruptError, InputError, MissingExtraError, StoreError
from stoker.report import LogLine, RunLog, open_tensorboard, read_run_log


def test_every_event_is_one_json_object_with_the_documented_names(tmp_path):
    with RunLog(tmp_path / "deep" / "run.jsonl", clock=lambda: 12.3456789) as log:
        log.write("read", {"loss": 0.5, "note": "Größe"}, step=3, epoch=1)
        log.write("end")
    lines = (tmp_path / "deep" / "run.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(lines[0]) == {
        "time": 12.345679,
        "step": 3,
        "epoch": 1,
        "event": "read",
        "values": {"loss": 0.5, "note": "Größe"},
    }
    assert json.loads(lines[1])["values"] == {}
    assert read_run_log(log.path) == [
        LogLine(12.345679, "read", 3, 1, {"loss": 0.5, "note": "Größe"}),
        LogLine(12.345679, "end"),
    ]


plain_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text().filter(lambda text: text not in {"nan", "inf", "-inf"}),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(st.dictionaries(st.text(), plain_values, max_size=4), max_size=4))
def test_what_is_written_is_what_is_read(tmp_path_factory, events):
    path = tmp_path_factory.mktemp("log") / "run.jsonl"
    with RunLog(path) as log:
        for values in events:
            log.write("e", values)
    # repr, since nan is not equal to itself.
    assert [repr(dict(line.values)) for line in read_run_log(path)] == [repr(v) for v in events]


def test_a_line_is_in_the_file_before_the_log_is_closed(tmp_path):
    log = RunLog(tmp_path / "run.jsonl")
    log.write("read", {"loss": 1.0})
    assert [line.event for line in read_run_log(log.path)] == ["read"]
    log.close()
    log.close()
    with pytest.raises(InputError, match="closed"):
        log.write("late")


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_torn_last_line_is_ignored_and_cut_off_on_reopen(tmp_path, cut):
    path = tmp_path / "run.jsonl"
    with RunLog(path) as log:
        log.write("one")
        log.write("two", {"x": 1})
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    assert [line.event for line in read_run_log(path)] == ["one"]
    with RunLog(path) as log:
        assert log.num_torn_bytes == len(whole.splitlines(keepends=True)[1]) - cut
        log.write("three")
    assert [line.event for line in read_run_log(path)] == ["one", "three"]


@pytest.mark.parametrize("junk", [b"\0" * 4096, b"\0" * 100 + b"\n", b"x" * (3 << 20)])
def test_what_a_power_cut_leaves_behind_is_cut_off(tmp_path, junk):
    path = tmp_path / "run.jsonl"
    with RunLog(path) as log:
        log.write("one")
    with path.open("ab") as file:
        file.write(junk)
    assert [line.event for line in read_run_log(path)] == ["one"]
    with RunLog(path) as log:
        assert log.num_torn_bytes == len(junk)
        log.write("two")
    assert [line.event for line in read_run_log(path)] == ["one", "two"]


def test_an_empty_log_is_a_log(tmp_path):
    RunLog(tmp_path / "run.jsonl").close()
    assert read_run_log(tmp_path / "run.jsonl") == []
    (tmp_path / "torn.jsonl").write_bytes(b'{"time"')
    RunLog(tmp_path / "torn.jsonl").close()
    assert (tmp_path / "torn.jsonl").read_bytes() == b""


def test_a_bad_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "run.jsonl"
    with RunLog(path) as log:
        log.write("one")
    path.write_bytes(path.read_bytes() + b"{}\n" + path.read_bytes())
    with pytest.raises(CorruptError, match="line 2 is not an event"):
        read_run_log(path)


def test_a_missing_log_is_an_error_with_three_parts(tmp_path):
    with pytest.raises(StoreError) as caught:
        read_run_log(tmp_path / "no.jsonl")
    assert str(tmp_path / "no.jsonl") in caught.value.given
    assert caught.value.allowed
    assert caught.value.fix


def test_scalars_of_numpy_are_taken_and_arrays_are_refused_by_name(tmp_path):
    with RunLog(tmp_path / "run.jsonl") as log:
        log.write(
            "e", {"a": np.float32(0.5), "b": np.int64(3), "c": np.float64("nan"), "p": tmp_path}
        )
        with pytest.raises(InputError, match=r"e\.x\[1\] is a ndarray"):
            log.write("e", {"x": [1, np.zeros(3)]})
        with pytest.raises(InputError, match=r"e\.f is a function"):
            log.write("e", {"f": test_an_empty_log_is_a_log})
    (line,) = read_run_log(log.path)
    assert line.values["a"] == 0.5
    assert line.values["b"] == 3
    assert math.isnan(line.values["c"])
    assert line.values["p"] == str(tmp_path)


def test_a_file_name_that_is_not_utf8_does_not_end_the_log(tmp_path):
    name = os.fsdecode(b"caf\xe9.csv")
    with RunLog(tmp_path / "run.jsonl") as log:
        log.write("refused", {"file": name})
    assert read_run_log(log.path)[0].values["file"] == name


@pytest.mark.parametrize("room", [0, 11])
def test_a_full_disk_leaves_no_part_of_a_line(tmp_path, monkeypatch, room):
    log = RunLog(tmp_path / "run.jsonl")
    log.write("one")
    real, left = os.write, [room]

    def full(file, data):
        if not left[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        size, left[0] = left[0], 0
        return real(file, data[:size])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(StoreError, match="No space left on device"):
        log.write("two")
    monkeypatch.setattr(os, "write", real)
    log.write("three")
    log.close()
    assert [line.event for line in read_run_log(log.path)] == ["one", "three"]


def test_a_folder_that_cannot_be_made_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot write the run log"):
        RunLog(tmp_path / "file" / "run.jsonl")


def test_a_killed_writer_leaves_whole_lines(tmp_path):
    path = tmp_path / "run.jsonl"
    code = (
        "import sys\nfrom stoker.report import RunLog\n"
        "log, step = RunLog(sys.argv[1]), 0\n"
        "while True:\n log.write('read', {'text': 'x' * 500}, step=step); step += 1\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(path)])
    while not path.exists() or path.stat().st_size < 100_000:
        assert child.poll() is None
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.wait()
    steps = [line.step for line in read_run_log(path)]
    with RunLog(path) as log:
        log.write("resumed")
    assert steps == list(range(len(steps)))
    assert [line.step for line in read_run_log(path)] == [*steps, None]


class Points:
    def __init__(self):
        self.points, self.closed = [], 0

    def add_scalar(self, tag, value, step):
        self.points.append((tag, value, step))

    def flush(self):
        pass

    def close(self):
        self.closed += 1


def test_numbers_with_a_step_also_become_scalars(tmp_path):
    points = Points()
    with RunLog(tmp_path / "run.jsonl", scalars=points) as log:
        log.write("train", {"loss": 0.5, "bad": math.inf, "ok": True, "name": "x"}, step=7)
        log.write("oom", {"bytes": 5})
    assert points.points == [("train/loss", 0.5, 7), ("train/bad", math.inf, 7)]
    assert points.closed == 1


def test_tensorboard_is_opened_where_it_is_installed(tmp_path, monkeypatch):
    made = []
    fake = types.ModuleType("torch.utils.tensorboard")
    fake.SummaryWriter = lambda folder: made.append(folder) or Points()
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    assert isinstance(open_tensorboard(tmp_path), Points)
    assert made == [str(tmp_path)]


def test_without_tensorboard_the_error_says_what_to_type(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MissingExtraError) as caught:
        open_tensorboard(tmp_path)
    assert "pip install tensorboard" in caught.value.fix
    assert caught.value.allowed


def test_report_loads_no_torch_and_nothing_above_it():
    check = (
        "import sys, stoker.report\n"
        "mine = {m for m in sys.modules if m.startswith('stoker.')}\n"
        "lower = {'errors', 'units', 'lifetime', 'ownership', 'report', 'address', 'display', 'strict_json'}\n"
        "assert mine <= {f'stoker.{name}' for name in lower}, mine\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", check], check=True)


def test_the_path_may_be_text(tmp_path):
    with RunLog(str(tmp_path / "run.jsonl")) as log:
        assert log.path == Path(tmp_path / "run.jsonl")
