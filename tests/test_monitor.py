"""`stoker monitor` and the telemetry of a run: readings that fail, logs that grow, processes that end."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import warm_stoker
from run_folders import BEGAN, Clock, write_run
from run_makers import make_store, settings_for
from stoker.cli.monitor import one_line, view
from stoker.errors import InputError, StoreError
from stoker.loader.loader import Loader
from stoker.monitor import CSV_COLUMNS, CsvLog, Monitor
from stoker.recipes.run import RunProgress, run_recipe
from stoker.report import RunEnd, RunLog, Silent, read_run_log
from stoker.runs.follow import LogTail, RunFollower
from stoker.runs.reading import LOG_NAME, lock_holder
from stoker.runs.telemetry import (
    BUSY,
    MEMORY,
    TELEMETRY_NAME,
    TEMPERATURE,
    Meter,
    RunCounters,
    TelemetryLog,
    judge_gpu,
)
from stoker.train.run_folder import RunLock
from test_machine import FIELDS_OF, BrokenNvml

ENV = {**os.environ, "COLUMNS": "160", "PYTHONWARNINGS": "error"}


def command(*args: object) -> list[str]:
    return [sys.executable, "-m", "stoker", "monitor", *map(str, args)]


def stoker_monitor(*args: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return warm_stoker.stoker("monitor", *args, cwd=cwd, env=ENV)


# -- readings ------------------------------------------------------------------------------------


@pytest.mark.parametrize("failing", ["", *FIELDS_OF])
def test_one_reading_that_fails_leaves_the_others(failing):
    with Meter(nvml=BrokenNvml(failing)) as meter:
        (gpu,) = meter.read_gpus()
        (again,) = meter.read_gpus()
    assert gpu.index == again.index == 0
    assert bool(meter.notes) == bool(failing)
    missing = FIELDS_OF.get(failing, set())
    assert (gpu.memory_share is None) == ("memory_total_bytes" in missing)
    assert (gpu.temperature_celsius is None) == ("temperature_celsius" in missing)
    assert (gpu.utilization_percent is None) == ("utilization_percent" in missing)


def test_only_the_gpu_that_is_meant_is_read():
    nvml = BrokenNvml(count=2)
    nvml.nvmlDeviceGetHandleByIndex = lambda index: index
    nvml.nvmlDeviceGetUUID = lambda handle: f"GPU-{handle}"
    read = []
    for uuid in ("GPU-1", "GPU-0", None, "GPU-unknown"):
        with Meter(gpu_uuid=uuid, nvml=nvml) as meter:
            read.append([gpu.index for gpu in meter.read_gpus()])
    assert read == [[1], [0], [0, 1], [0, 1]]  # a name that NVML does not know hides nothing


def gpu_with(**values: object) -> SimpleNamespace:
    return SimpleNamespace(index=0, pcie_bytes_per_second=60e9, **values)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ((0, 0), (4_000_000_000, 1_000_000), (2e9, 5e5)),
        ((5, 5), (5, 5), (0.0, 0.0)),
        ((None, 5), (10, None), (None, None)),
        ((10, 10), (3, 20), (None, 5.0)),  # a counter that wrapped
        ((0, 0), (10**12, 10**9), (None, 5e8)),  # more than the slot can carry
    ],
)
def test_pcie_rates_come_from_counters(before, after, expected):
    clock = Clock(100.0)
    meter = Meter(nvml=BrokenNvml(), clock=clock)
    gpu = gpu_with(pcie_received_bytes=before[0], pcie_sent_bytes=before[1])
    assert meter._pcie_rates(gpu) == (None, None)
    clock.now += 2.0
    gpu = gpu_with(pcie_received_bytes=after[0], pcie_sent_bytes=after[1])
    assert meter._pcie_rates(gpu) == expected


def test_pcie_rates_are_sampled_where_counters_wrap():
    """An H200 counts in 32 bits: 0.1 s of a full link."""
    short = SimpleNamespace(nvmlReturn=0, valueType=1, value=SimpleNamespace(uiVal=7))
    nvml = BrokenNvml()
    nvml.answers["nvmlDeviceGetFieldValues"] = [short, short]
    with Meter(nvml=nvml) as meter:
        (first,) = meter.read_gpus()
        assert first.pcie_received_bytes_per_second == first.pcie_sent_bytes_per_second == 2.048e9
        nvml.failing = "nvmlDeviceGetPcieThroughput"
        (second,) = meter.read_gpus()
    assert (second.pcie_received_bytes_per_second, second.pcie_sent_bytes_per_second) == (
        None,
        None,
    )


def test_a_process_is_followed_and_may_go():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        clock = Clock(100.0)
        meter = Meter(pid=child.pid, nvml=BrokenNvml("nvmlInit"), clock=clock)
        first = meter.read_process()
        assert first is not None
        assert (first.pid, first.cpu_cores) == (child.pid, None)
        assert first.resident_bytes > 0  # it may not have begun yet
        clock.now += 1.0
        second = meter.read_process()
        assert second is not None
        assert second.cpu_cores is not None
        clock.now += 0.01  # a last reading right after another one would tell of 0 cores
        third = meter.read_process()
        assert third is not None
        assert third.cpu_cores is None
    finally:
        child.kill()
        child.wait()
    assert meter.read_process() is None
    meter.pid = os.getpid()
    assert meter.read_process() is not None
    meter.pid = 0
    assert meter.read_process() is None


@pytest.mark.parametrize(
    ("target", "value", "verdict"),
    [
        (BUSY, 84, "below"), (BUSY, 85, "within"), (BUSY, 95, "within"), (BUSY, 96, "above"),
        (MEMORY, 69.9, "below"), (MEMORY, 70, "within"), (MEMORY, 90, "within"), (MEMORY, 90.1, "above"),
        (TEMPERATURE, 0, "within"), (TEMPERATURE, 79, "within"), (TEMPERATURE, 80, "above"),
        (BUSY, None, None),
    ],
)  # fmt: skip
def test_targets_are_those_of_the_document(target, value, verdict):
    assert target.judge(value) == verdict


# -- telemetry of a run --------------------------------------------------------------------------


def events(folder: Path) -> list[str]:
    return [line.event for line in read_run_log(folder / TELEMETRY_NAME)]


def quick(folder: Path, counters=None, nvml=None) -> TelemetryLog:
    return TelemetryLog(
        folder, counters, first_seconds=0.01, most_seconds=0.01, nvml=nvml or BrokenNvml()
    )


def wait_for(ready, seconds: float = 10.0) -> None:
    until = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < until, "nothing happened"
        time.sleep(0.005)


def test_telemetry_is_written_by_a_thread_that_ends(tmp_path):
    before = set(threading.enumerate())
    with quick(tmp_path) as log:
        wait_for(lambda: log.path.exists() and len(events(tmp_path)) > 5)
        log.end = RunEnd("terminated")
    assert set(threading.enumerate()) <= before  # threads of earlier tests may end meanwhile
    assert events(tmp_path)[0] == "begin"
    assert set(events(tmp_path)[1:-1]) == {"telemetry"}
    lines = read_run_log(tmp_path / TELEMETRY_NAME)
    assert lines[0].values == {"pid": os.getpid(), "host": socket.gethostname()}
    assert lines[-1].values == {"ended": "terminated", "error": ""}
    (gpu,) = lines[1].values["gpus"]
    assert (gpu["utilization_percent"], gpu["temperature_celsius"]) == (93, 71)
    assert gpu["throttle_reasons"] == ["power cap", "hardware thermal slowdown"]
    assert lines[1].values["process"]["pid"] == os.getpid()


def test_nvml_that_fails_in_the_middle_is_a_note(tmp_path):
    nvml = BrokenNvml()
    with quick(tmp_path, nvml=nvml) as log:
        wait_for(lambda: log.path.exists() and "telemetry" in events(tmp_path))
        nvml.failing = "nvmlDeviceGetMemoryInfo"
        wait_for(lambda: bool(log.notes))
    notes = [line.values for line in read_run_log(log.path) if line.event == "note"]
    assert notes == [{"topic": "other", "text": "GPU 0: memory: Unknown Error"}]
    last = [line for line in read_run_log(log.path) if line.event == "telemetry"][-1]
    assert "memory_used_bytes" not in last.values["gpus"][0]
    assert last.values["gpus"][0]["power_watts"] == 200.5


def test_without_nvml_the_rest_is_written(tmp_path):
    with quick(tmp_path, nvml=BrokenNvml("nvmlInit")) as log:
        wait_for(lambda: log.path.exists() and "telemetry" in events(tmp_path))
    lines = read_run_log(log.path)
    assert lines[1].values["gpus"] == []
    assert [line.values["text"] for line in lines if line.event == "note"] == [
        "no GPU readings, NVML cannot be started: Unknown Error"
    ]


@pytest.mark.parametrize(
    ("error", "ended"),
    [
        (KeyboardInterrupt(), "interrupted"),
        (ValueError("a\nb"), "failed: ValueError: a"),
        (None, "done"),
    ],
)
def test_how_a_run_ended_is_written(tmp_path, error, ended):
    def run() -> None:
        with quick(tmp_path):
            if error is not None:
                raise error

    if error is None:
        run()
    else:
        with pytest.raises(type(error)):
            run()
    last = read_run_log(tmp_path / TELEMETRY_NAME)[-1]
    assert str(RunEnd.read(last)) == ended
    assert set(last.values) == {"ended", "error"}


def test_telemetry_never_ends_a_run(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with quick(tmp_path / "file" / "run") as log:
        wait_for(lambda: bool(log.notes))
    assert "cannot write the run log" in log.notes[0]

    def broken() -> RunCounters:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with quick(tmp_path / "run", broken) as log:
        wait_for(lambda: log.path.exists() and "telemetry" in events(tmp_path / "run"))
    assert all("run" not in line.values for line in read_run_log(log.path))
    assert events(tmp_path / "run")[-1] == "end"


def test_rates_are_those_between_two_looks(tmp_path):
    counted = [RunCounters(0, 0.0, 0.0, 0), RunCounters(500, 0.5, 0.1, 0, 1.5)]
    asked = iter([*counted, *[counted[-1]] * 1000])
    with quick(tmp_path, lambda: next(asked)) as log:
        wait_for(lambda: log.path.exists() and len(events(tmp_path)) > 4)
    lines = [line for line in read_run_log(log.path) if line.event == "telemetry"]
    runs = [line.values["run"] for line in lines]
    rates = [(run.get("samples_per_second"), run.get("wait_share")) for run in runs[:3]]
    # Before the first difference nothing is known; while nothing is trained, neither.
    assert rates == [(None, None), (1000.0, pytest.approx(0.2)), (None, None)]
    assert runs[1]["loss"] == 1.5
    assert lines[1].epoch == 0


def test_a_recipe_writes_what_the_report_needs(tmp_path, one_thread):
    store = make_store("tabular", tmp_path / "store")
    began = time.monotonic()
    run_recipe(settings_for("tabular", store.path, tmp_path / "run"), device="cpu")
    took = time.monotonic() - began
    lines = read_run_log(tmp_path / "run" / LOG_NAME)
    told = {line.event: line.values for line in lines}
    assert [line.event for line in lines[:3]] == ["config", "plan", "machine"]
    assert told["config"]["settings"]["training.batch_size"] == 16
    assert "training.batch_size" in told["config"]["reasons"]["training.batch_size"]
    assert told["plan"]["tier"] == "resident"
    assert told["machine"]["python"]
    readings = read_run_log(tmp_path / "run" / TELEMETRY_NAME)
    assert RunEnd.read(readings[-1]) == RunEnd("done")
    last = [line for line in readings if line.event == "telemetry"][-1].values["run"]
    epochs = [line.values for line in lines if line.event == "epoch"]
    assert last["samples"] == sum(epoch["num_samples"] for epoch in epochs) > 0
    assert last["epoch"] == 1
    assert 0 < last["trained_seconds"] < took
    assert 0 <= last["waited_seconds"] < took


def test_a_wait_that_goes_on_is_counted(tmp_path):
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file["x"] = np.zeros((4, 2), np.float32)
    loader = Loader(tmp_path / "data.h5", 4, "cpu")
    seen = []

    def slow(batches):
        time.sleep(0.03)
        seen.append(loader.waited_seconds)
        yield from batches

    loader.on_iteration = slow
    assert len(list(loader)) == 1
    assert seen[0] >= 0.03
    assert loader.waited_seconds >= seen[0]
    after = loader.waited_seconds
    time.sleep(0.01)
    assert loader.waited_seconds == after


def test_what_lies_between_epochs_is_not_training():
    device = SimpleNamespace(type="cpu")
    loader = SimpleNamespace(
        batch_size=4, samples=range(8), waited_seconds=0.0, device=device, epoch=0
    )
    progress = RunProgress(Silent(), loader, epochs=1)  # type: ignore[arg-type]
    progress.start("epoch 1", 2, "batches")
    progress.advance()
    assert progress.count().samples == 4
    progress.advance()
    done = progress.count()
    time.sleep(0.02)
    loader.epoch = 1
    assert progress.count() == done
    assert (done.samples, done.epoch) == (8, 0)


# -- following -----------------------------------------------------------------------------------


@given(
    texts=st.lists(st.text(max_size=20), max_size=8),
    cuts=st.lists(st.integers(0, 400), max_size=6),
)
def test_a_log_read_in_pieces_is_the_log(tmp_path_factory, texts, cuts):
    folder = tmp_path_factory.mktemp("tail")
    with RunLog(folder / "whole.jsonl") as log:
        for number, text in enumerate(texts):
            log.write("note", {"text": text}, step=number)
    data = (folder / "whole.jsonl").read_bytes()
    growing = folder / "growing.jsonl"
    tail, seen = LogTail(growing), []
    for start, end in zip([0, *sorted(cuts)], [*sorted(cuts), len(data)], strict=True):
        with growing.open("ab") as file:
            file.write(data[start:end])
        seen += tail.read()
    assert seen == read_run_log(folder / "whole.jsonl")


def test_a_tail_begins_near_the_end_and_notices_a_new_file(tmp_path):
    path = tmp_path / "a.jsonl"
    tail = LogTail(path, first_bytes=300)
    assert tail.read() == []
    with RunLog(path) as log:
        log.write("config", {"settings": {"epochs": 9}})
        for number in range(2000):
            log.write("steps", {"loss": 1.0}, step=number)
    first = tail.read()
    assert first[0].event == "config"
    assert first[-1].step == 1999
    assert len(first) < 1000
    assert tail.read() == []
    path.unlink()
    path.write_bytes(b'rubbish\n{"time": 1, "step": 5, "epoch": 0, "event": "x", "values": {}}\n')
    assert [line.step for line in tail.read()] == [5]


def test_a_run_is_followed_from_before_it_begins_to_its_end(tmp_path):
    clock = Clock(BEGAN + 1000)
    follower = RunFollower(tmp_path, clock)
    now = follower.look()
    assert (now.state, now.epoch, now.samples_per_second) == ("waiting", None, None)
    with RunLock(tmp_path):
        write_run(tmp_path, epochs=2, finished=False, rate=1000.0, wait_share=0.25)
        now = follower.look()
        assert (now.state, now.pid) == ("running", os.getpid())
        assert (now.epoch, now.num_epochs) == (2, 2)
        assert now.samples_per_second == 1000.0
        assert now.wait_share == 0.25
        assert now.age_seconds is not None
        assert now.age_seconds > 0
    assert follower.look().state == "not running"
    with RunLog(tmp_path / TELEMETRY_NAME) as log:
        log.write("end", {"ended": "terminated"})
    assert follower.look().state == "terminated"
    assert follower.look().pid is None


def test_the_loss_of_a_finished_epoch_is_the_epochs(tmp_path):
    clock = Clock()
    with (
        RunLog(tmp_path / LOG_NAME, clock=clock) as log,
        RunLog(tmp_path / TELEMETRY_NAME, clock=clock) as telemetry,
    ):
        follower = RunFollower(tmp_path, clock)

        def look(epoch, loss):
            clock.now += 1
            telemetry.write("telemetry", {"run": {"epoch": epoch, "loss": loss}})
            return follower.look().loss

        assert look(0, 0.9) == 0.9
        clock.now += 1
        log.write("epoch", {"epoch": 0, "train_loss": 0.7, "metrics": {"loss": 0.6}}, epoch=1)
        assert follower.look().loss == 0.7
        # What is read after an epoch is still that of its last batches.
        assert look(0, 0.9) == 0.7
        assert look(1, 0.5) == 0.5
        clock.now += 1
        log.write("config", {"settings": {"epochs": 3}})  # a resume begins the epoch again
        assert look(0, 0.8) == 0.8
    assert follower.look().val_loss == 0.6


def test_a_plain_trainers_log_is_enough(tmp_path):
    with RunLog(tmp_path / LOG_NAME) as log:
        log.write("note", {"text": "precision fp32"}, step=0, epoch=0)
        log.write("steps", {"loss": 0.5, "count": 50}, step=49, epoch=0)
        epoch = {
            "epoch": 0,
            "train_loss": 0.6,
            "samples_per_second": 70.0,
            "wait_share": 0.1,
            "metrics": {"loss": 0.4},
        }
        log.write("epoch", epoch, step=50, epoch=1)
        log.write("steps", {"loss": "nan", "count": "many"}, step=99, epoch=1)
    now = RunFollower(tmp_path).look()
    assert (now.epoch, now.step, now.loss, now.val_loss) == (2, 99, 0.6, 0.4)
    assert (now.samples_per_second, now.wait_share) == (70.0, 0.1)
    assert now.note == "precision fp32"


def test_who_works_on_a_run(tmp_path):
    assert lock_holder(tmp_path) is None
    with RunLock(tmp_path):
        assert lock_holder(tmp_path) == (os.getpid(), socket.gethostname(), True)
    assert lock_holder(tmp_path) is None
    lock = tmp_path / "lock"
    lock.write_text(f"process {2**22 + 1} on {socket.gethostname()}\n")
    assert lock_holder(tmp_path) == (2**22 + 1, socket.gethostname(), False)
    lock.write_text(f"process {os.getpid()} on {socket.gethostname()}\n")
    os.utime(lock, (1, 1))  # written before this process began: the number was given again
    assert lock_holder(tmp_path) == (os.getpid(), socket.gethostname(), False)
    lock.write_text("process 7 on elsewhere\n")
    assert lock_holder(tmp_path) == (7, "elsewhere", None)
    lock.write_text("rubbish")
    assert lock_holder(tmp_path) is None


# -- snapshots -----------------------------------------------------------------------------------


def test_a_snapshot_says_everything_and_is_json(tmp_path):
    write_run(tmp_path / "run")
    with Monitor(tmp_path / "run", nvml=BrokenNvml(count=2)) as monitor:
        snapshot = monitor.look_once()
    document = json.loads(json.dumps(snapshot.to_json()))
    assert [gpu["verdicts"] for gpu in document["gpus"]] == [
        {"busy": "within", "memory": "below", "temperature": "within"}
    ] * 2
    assert document["run"]["state"] == "done"
    assert document["host"]["ram_total_bytes"] > document["host"]["ram_used_bytes"] > 0
    assert document["host"]["cpu_percent"] is not None


def test_the_view_marks_what_is_outside_its_target_without_colour(tmp_path):
    from rich.console import Console

    write_run(tmp_path / "run", notes=("step [bold]captured[/bold]",))
    nvml = BrokenNvml()
    nvml.answers["nvmlDeviceGetMemoryInfo"] = SimpleNamespace(total=100, free=5)
    nvml.answers["nvmlDeviceGetUtilizationRates"] = SimpleNamespace(gpu=41, memory=1)
    nvml.answers["nvmlDeviceGetTemperature"] = 79
    with Monitor(tmp_path / "run", nvml=nvml) as monitor:
        snapshot = monitor.look()
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(view(snapshot))
    text = console.export_text()
    for part in (
        "41 % ↓", "95% ↑", "79 °C ✓", "200 of 450 W", "gen 1 x8", "power cap", "not occupancy",
        "busy 85 to 95 %, SM 80 to 95 %, memory 70 to 90 %, below 80 °C", "epoch 8/8", "step [bold]captured[/bold]",
        f"{snapshot.run.samples_per_second:,.0f} samples/s, waited {snapshot.run.wait_share:.1%}",
    ):  # fmt: skip
        assert part in text, part
    assert "busy 41 %, memory 95%, 200 W, 79 °C" in one_line(snapshot)
    assert "run done: epoch 8" in one_line(snapshot)


def test_looking_costs_little(tmp_path):
    from rich.console import Console

    write_run(tmp_path / "run")
    with (
        Path(os.devnull).open("w") as nowhere,
        Monitor(tmp_path / "run", BrokenNvml(count=8)) as monitor,
    ):
        console = Console(width=160, file=nowhere, force_terminal=True)
        console.print(view(monitor.look()))
        began = time.process_time()
        for _ in range(20):
            console.print(view(monitor.look()))
        per_look = (time.process_time() - began) / 20
    # 3.5 ms here, so 0.4 % of a core at one look per second; ten times as much would fail.
    assert per_look < 0.035


def test_a_short_interval_and_a_file_are_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="is a file"):
        Monitor(tmp_path / "file")
    with (
        Monitor(nvml=BrokenNvml("nvmlInit")) as monitor,
        pytest.raises(InputError, match="interval"),
    ):
        next(monitor.looks(0.01, threading.Event()))


def test_looks_come_at_their_times_until_told_to_stop():
    stop = threading.Event()
    with Monitor(nvml=BrokenNvml("nvmlInit")) as monitor:
        times = []
        for snapshot in monitor.looks(0.1, stop):
            times.append(snapshot.time)
            if len(times) == 4:
                stop.set()
    assert 0.29 < times[-1] - times[0] < 2.0


@pytest.mark.gpu
def test_a_real_gpu_is_read():
    with Monitor() as monitor:
        snapshot = monitor.look_once()
    assert snapshot.gpus
    for gpu in snapshot.gpus:
        assert gpu.memory_total_bytes
        assert gpu.utilization_percent is not None
        assert judge_gpu(gpu)["temperature"] in ("within", "above")


# -- CSV -----------------------------------------------------------------------------------------


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_csv_has_the_documents_columns_and_more(tmp_path):
    write_run(tmp_path / "run")
    path = tmp_path / "gpu_log.csv"
    nvml = BrokenNvml(count=2)
    nvml.answers["nvmlDeviceGetName"] = 'odd, "name"\nof a GPU'
    for _ in range(2):  # the second one goes on where the first one ended
        with Monitor(tmp_path / "run", nvml=nvml) as monitor, CsvLog(path) as log:
            log.write(monitor.look())
    assert [name.partition(" ")[0] for name in CSV_COLUMNS[:4]] == [
        "timestamp", "memory.used", "memory.total", "utilization.gpu",
    ]  # fmt: skip
    rows = rows_of(path)
    assert [row["index"] for row in rows] == ["0", "1"] * 2
    for row in rows:
        assert set(row) == set(CSV_COLUMNS)
        assert row["memory.used [MiB]"] == "1024"
        assert row["memory.total [MiB]"] == "16384"
        assert row["utilization.gpu [%]"] == "93"
        assert row["power.draw [W]"] == "200.5"
        assert row["clocks_event_reasons"] == "power cap; hardware thermal slowdown"
        assert row["name"] == 'odd, "name"\nof a GPU'
        assert row["run.state"] == "done"
        assert float(row["run.samples_per_second"]) == pytest.approx(20_000, rel=0.3)
        time.strptime(row["timestamp"].partition(".")[0], "%Y/%m/%d %H:%M:%S")


def test_csv_without_a_gpu_has_empty_cells(tmp_path):
    path = tmp_path / "log.csv"
    with Monitor(nvml=BrokenNvml("nvmlInit")) as monitor, CsvLog(path) as log:
        log.write(monitor.look_once())
    (row,) = rows_of(path)
    assert row["utilization.gpu [%]"] == row["index"] == row["run.state"] == ""
    assert float(row["host.ram.used [MiB]"]) > 0


def test_csv_refuses_files_of_others(tmp_path):
    other = tmp_path / "other.csv"
    other.write_text("a,b\n1,2\n")
    with pytest.raises(InputError, match="does not begin like a log"):
        CsvLog(other)
    assert other.read_text() == "a,b\n1,2\n"
    with pytest.raises(StoreError, match="cannot write"):
        CsvLog(tmp_path / "no" / "such" / "folder.csv")


# -- the docs ------------------------------------------------------------------------------------


def test_the_docs_example_runs(tmp_path, monkeypatch, capsys):
    write_run(tmp_path / "runs" / "a")
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).resolve().parent.parent / "docs/monitor.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(compile(example, "docs/monitor.md", "exec"), {})
    assert len(rows_of(tmp_path / "gpu_log.csv")) == max(
        1, len(capsys.readouterr().out.split("\n")) - 1
    )
    for column in CSV_COLUMNS[:4]:
        assert f"`{column}`" in page
    targets = ("85 to 95 %", "70 to 90 %", "below 80 °C", "at least one kernel running")
    assert all(words in page for words in targets)


# -- the command ---------------------------------------------------------------------------------


def test_once_as_json_and_as_text(tmp_path):
    write_run(tmp_path / "run")
    done = stoker_monitor("run", "--once", "--json", "--csv", "log.csv", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["run"]["folder"] == "run"
    assert len(rows_of(tmp_path / "log.csv")) == max(1, len(document["gpus"]))
    # From 1 everywhere, as on the screen.
    assert document["run"]["epoch"] == 8
    assert rows_of(tmp_path / "log.csv")[0]["run.epoch"] == "8"
    plain = stoker_monitor("run", "--once", cwd=tmp_path)
    assert plain.returncode == 0
    assert "epoch 8/8" in plain.stdout
    assert "run   run: done" in plain.stdout


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("nowhere",), "'nowhere' does not exist"),
        ((__file__, "--once"), "is not the folder of a run"),
        (("--interval", "1ms"), "an interval of 0.001 s"),
        (("--interval", "soon"), "cannot read 'soon'"),
        (("--once", "--interval", "0"), "an interval of 0 s"),
        (("--once", "--csv", "no/log.csv"), "cannot write no/log.csv"),
    ],
)
def test_mistakes_end_with_2_and_say_what_to_type(tmp_path, args, words):
    done = stoker_monitor(*args, cwd=tmp_path)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)], ids=["term", "int"]
)
def test_it_ends_cleanly_when_told_to(tmp_path, number, code):
    (tmp_path / "run").mkdir()
    log = tmp_path / "log.csv"
    process = subprocess.Popen(
        command("run", "--interval", "100ms", "--wait", "1min", "--csv", log),
        cwd=tmp_path,
        env=ENV,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_for(lambda: log.exists() and len(log.read_text().splitlines()) > 3, 30)
        process.send_signal(number)
        out, err = process.communicate(timeout=200)
    finally:
        process.kill()
    assert process.returncode == code, err
    assert "Traceback" not in err
    assert "run run: waiting for its first line" in out
    assert log.read_text().endswith("\n")


def test_a_terminal_gets_a_table_that_is_drawn_again(tmp_path):
    import pty

    write_run(tmp_path / "run")
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command("run", "--interval", "100ms"),
        cwd=tmp_path, env=ENV | {"TERM": "xterm"}, stdout=theirs, stderr=theirs, stdin=theirs,
    )  # fmt: skip
    os.close(theirs)
    seen: list[bytes] = []

    def drain() -> None:
        # The end of the other side reads as an error on Linux.
        with contextlib.suppress(OSError):
            while part := os.read(ours, 65536):
                seen.append(part)

    reader = threading.Thread(target=drain, daemon=True)
    reader.start()
    try:
        wait_for(lambda: b"".join(seen).count(b"samples/s") >= 3 or process.poll() is not None, 60)
        process.send_signal(signal.SIGTERM)
        code = process.wait(200)
    finally:
        process.kill()
        process.wait()
        reader.join(60)
        os.close(ours)
    text = b"".join(seen)
    assert code == 0, text[-2000:]
    assert b"\x1b[1A" in text or b"\x1b[2K" in text
