"""Attaching to somebody's script: nothing of it is touched, and what it does is seen."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

import forked_scripts
from doctor_scripts import LIGHT, OPTIONAL, script
from stoker.doctor import attach
from stoker.doctor.attach import Attached, end, probe_variables, run_script
from stoker.doctor.measurements import MachineFacts
from stoker.doctor.probe import hdf5, operators, sampling
from stoker.doctor.probe.recorder import Fetch, Row
from stoker.doctor.transcript import Process, read_folder
from stoker.doctor.transcript_measures import measure
from stoker.errors import InputError


def attached(path, **options) -> Attached:
    return run_script([sys.executable, str(path)], **options)


# -- untouched -------------------------------------------------------------------------------------


def talk(command, **options):
    """Run a command with something to read, and return what it said."""
    streams = {"input": "hello", "capture_output": True, "text": True}
    return subprocess.run(command, check=False, **streams, **options)


def doctor_of(path, argument="a b"):
    """Return a command that runs a script under the doctor, for tests that look at its streams."""
    code = "import sys; from stoker.doctor.attach import run_script\n"
    code += f"sys.exit(run_script([sys.executable, {str(path)!r}, {argument!r}]).exit_code)"
    return [sys.executable, "-c", code]


def test_output_input_arguments_and_exit_code_are_the_scripts_own(tmp_path):
    path = script(
        tmp_path,
        "talker",
        """
        import sys
        asked = sys.stdin.read()
        for _ in range(300):
            sys.stdout.write("x" * 9999 + "\\n")
        print(asked, sys.argv[1:], __name__, "sitecustomize" in sys.modules, file=sys.stderr)
        sys.exit(7)
        """,
        head="",
    )
    alone = talk([sys.executable, str(path), "a b"])
    doctored = talk(doctor_of(path))
    assert doctored.returncode == alone.returncode == 7
    assert doctored.stdout == alone.stdout
    assert len(doctored.stdout) == 3_000_000
    assert doctored.stderr.replace("True", "False") == alone.stderr.replace("True", "False")


def test_the_machines_own_sitecustomize_still_runs(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import builtins; builtins.there_was_one = 'yes'")
    path = script(
        tmp_path,
        "look",
        """
        import sys, builtins, sitecustomize
        assert builtins.there_was_one == "yes"
        assert sitecustomize.__file__.startswith(sys.argv[1]), sitecustomize.__file__
        assert not any("probe/entry" in entry for entry in sys.path)
        import stoker_is_not_here
        """,
        head="",
    )
    done = talk(doctor_of(path, str(tmp_path)), env={**os.environ, "PYTHONPATH": str(tmp_path)})
    # It gets past the assertions, to the import that cannot work.
    assert done.returncode == 1
    assert "stoker_is_not_here" in done.stderr


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ([], "no command"),
        (["train.py"], "stoker doctor -- python train.py"),
        (["no-such-program"], "look at the spelling, and at PATH"),
    ],
)
def test_a_command_that_cannot_run_says_what_to_type(command, words):
    with pytest.raises(InputError, match=words):
        run_script(command)


@pytest.mark.parametrize("limits", [{"steps": 0}, {"seconds": -1.0}])
def test_limits_are_above_zero(limits):
    with pytest.raises(InputError, match="above 0"):
        run_script(["true"], **limits)


def test_a_command_without_python_measures_nothing_and_says_so():
    came = run_script(["sh", "-c", "exit 3"])
    assert came.exit_code == 3
    assert came.measurements.steps == 0
    assert "no Python process" in came.measurements.notes[0]
    assert came.measurements.notes[0].endswith("it ended with exit code 3 before its first step")


def test_a_signal_of_its_own_is_its_exit_code():
    came = run_script(
        [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGUSR1)"]
    )
    assert came.exit_code == -signal.SIGUSR1
    assert came.stopped == ""


# -- endings ---------------------------------------------------------------------------------------


def test_it_stops_after_so_many_steps_and_tries_other_arguments(tmp_path):
    path = script(
        tmp_path,
        "endless",
        """
        loader = DataLoader(data, 4, persistent_workers=False)
        if __name__ == "__main__":
            print(os.getpid(), file=open(sys.argv[1], "w"), flush=True)
            for x, y in rounds(loader):
                update(x, y)
        """,
        LIGHT,
    )
    pid_file = tmp_path / "pid"
    run_script(
        ["true"]
    )  # from the first of all runs on stoker has a process that ends what is left behind
    before = {one.pid for one in psutil.Process().children(recursive=True)}
    tried = {"batch_size": 16, "num_workers": 1, "persistent_workers": True}
    came = run_script(
        [sys.executable, str(path), str(pid_file)],
        steps=20,
        loader_arguments={**tried, "multiprocessing_context": "spawn"},
    )
    assert came.stopped == "steps"
    assert came.exit_code is None
    # Steps that were disturbed by the probe are not among them.
    assert 15 <= came.measurements.steps <= 25
    assert not psutil.pid_exists(int(pid_file.read_text()))
    now = {one.pid for one in psutil.Process().children(recursive=True) if one.is_running()}
    assert now <= before
    loader = came.measurements.loader
    assert (loader.workers, loader.batch_size, loader.start_method) == (1, 16, "spawn")
    assert loader.persistent_workers
    assert loader.alone_seconds is not None  # the spawned worker was seen
    assert len(loader.worker_cpu_shares) == 1
    assert loader.where.startswith(str(path))


def test_a_script_that_hangs_is_ended_and_the_place_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("stoker.doctor.attach._start", forked_scripts.start)
    path = script(
        tmp_path,
        "hanging",
        """
        for x, y in DataLoader(data, batch_size=8):
            update(x, y)
        while True:
            time.sleep(1000)
        """,
        LIGHT,
    )
    line = path.read_text().splitlines().index("    time.sleep(1000)") + 1
    for seconds in (3, 15, 90):  # a crowded machine may need the longer time
        began = time.monotonic()
        came = attached(path, seconds=seconds)
        assert time.monotonic() - began < seconds + 60
        assert came.stopped == "seconds"
        if any(f"{path}:{line}" in note for note in came.measurements.notes):
            break
    else:
        pytest.fail(f"the place is not named: {came.measurements.notes}")
    assert came.measurements.steps > 10


def test_a_doctor_that_is_terminated_ends_the_script_too(tmp_path):
    path = script(
        tmp_path,
        "endless",
        """
        import os, sys, time
        open(sys.argv[1], "w").write(str(os.getpid()))
        while True:
            time.sleep(0.01)
        """,
        head="",
    )
    told = tmp_path / "pid"
    command = [sys.executable, "-m", "stoker", "doctor", "--", sys.executable, path, told]
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    doctor = subprocess.Popen(
        [*map(str, command)], stderr=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(scratch)}
    )  # fmt: skip
    deadline = time.monotonic() + 200
    while not (told.exists() and told.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.3)
    doctor.send_signal(signal.SIGTERM)
    _, err = doctor.communicate(timeout=200)
    assert doctor.returncode == 128 + signal.SIGTERM
    assert "the script was ended with the doctor, by SIGTERM" in err
    assert not psutil.pid_exists(int(told.read_text()))
    assert not list(scratch.glob("stoker-doctor-*"))


def test_what_was_seen_survives_a_kill(seen):
    assert seen.killed.steps > 40
    assert seen.killed.samples_per_step == 8


def test_ending_a_family_reaches_grandchildren(tmp_path):
    path = script(
        tmp_path,
        "parent",
        """
        import subprocess, sys, time
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
        print(child.pid, file=open(sys.argv[1], "w"), flush=True)
        time.sleep(100)
        """,
        head="",
    )
    process = subprocess.Popen([sys.executable, str(path), str(tmp_path / "pid")])
    deadline = time.monotonic() + 30
    while not ((tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    grandchild = int((tmp_path / "pid").read_text())
    end(process)
    assert process.returncode is not None
    assert not psutil.pid_exists(grandchild) or psutil.Process(grandchild).status() == "zombie"


# -- what it sees, from one warm process -----------------------------------------------------------


def test_nothing_of_the_probe_failed_in_any_of_them(seen):
    for name in seen.paths:
        assert not [note for note in getattr(seen, name).notes if "failed" in note], name


def test_accumulated_batches_are_one_step(seen):
    assert seen.accumulation.loader.batches_per_step == 4
    assert seen.accumulation.samples_per_step == 32


def test_two_optimizers_make_one_step(seen):
    assert 20 <= seen.two_optimizers.steps <= 40
    assert seen.two_optimizers.samples_per_step == 8


def test_without_a_loader_waiting_is_unknown(seen):
    assert seen.no_loader.loader is None
    assert seen.no_loader.wait_seconds is None
    assert seen.no_loader.step_seconds is not None
    assert seen.no_loader.samples_per_step is None
    assert any("no DataLoader" in note for note in seen.no_loader.notes)


def test_without_updates_a_step_is_a_backward_pass_or_a_batch(seen):
    assert any("backward pass" in note for note in seen.no_optimizer.notes)
    assert any("one batch" in note for note in seen.inference.notes)
    assert seen.inference.step_seconds.median >= 0.002
    assert seen.inference.samples_per_step == 32


def test_validation_is_not_part_of_the_steps(seen):
    assert seen.validation.samples_per_step == 8
    assert seen.validation.loader.batch_size == 8
    # Between the steps of four epochs were three times four batches of 0.3 s each.
    assert seen.validation.seconds < 2.4


def test_a_loader_made_anew_every_epoch_is_one_loader(seen):
    assert seen.new_loader_every_epoch.steps > 40
    assert seen.new_loader_every_epoch.loader.epoch_starts >= 3
    assert seen.new_loader_every_epoch.loader.made_again
    assert not seen.validation.loader.made_again


def test_the_scripts_own_profiler_has_precedence(seen):
    assert seen.own_profiler.operators is None
    assert any("profiler" in note for note in seen.own_profiler.notes)


def test_forks_and_children_do_not_count_twice(seen):
    assert seen.forks_and_children.steps <= 41
    assert not seen.forks_and_children.ranks


def test_values_that_are_not_finite_are_seen_where_they_are_read(seen):
    (bad,) = seen.losses_that_are_not.bad_values
    line = seen.paths["losses_that_are_not"].read_text().splitlines()
    assert bad.where.endswith(f":{next(i for i, text in enumerate(line, 1) if '.item()' in text)}")


def test_a_stream_of_samples_is_timed_in_its_worker(seen):
    loader = seen.iterable.loader
    assert loader.alone_seconds.median >= 0.004
    assert loader.blocked_share > 0.5
    assert loader.steps_per_epoch is None


def test_a_compiled_model_stays_one_graph(seen):
    assert seen.compiled.steps > 10


@pytest.mark.parametrize("how", ["forked", pytest.param("started", marks=pytest.mark.slow)])
def test_a_script_of_nine_steps_ends_well(how, tmp_path, capfd):
    body = """
    for number in range(9):  # ends while the probe's profiler runs
        update(*data[number : number + 16])
        if number == 7 and os.fork() == 0:
            sys.exit()
    os.wait()
    """
    path = script(tmp_path, "short", body, LIGHT)
    begin = forked_scripts.start if how == "forked" else attach._start
    process = begin([sys.executable, str(path)], probe_variables(os.environ, tmp_path))
    assert process.wait(120) == 0
    out, err = capfd.readouterr()
    # A fork of a process in which another test has used torch's profiler says so when its own begins and ends.
    assert (out, [line for line in err.splitlines() if not line.startswith("USDT:")]) == ("", [])
    assert [one.state["num_steps"] for one in read_folder(tmp_path)] == [8]


def test_a_crash_loses_nothing(seen):
    assert seen.crash.steps >= 30


def test_accelerate(seen):
    if "accelerate" in OPTIONAL:
        pytest.skip("accelerate is not installed")
    assert seen.accelerate.steps > 40
    # It asks for a batch ahead, so that some steps have two and the last one none.
    assert seen.accelerate.samples_per_step == pytest.approx(8, rel=0.1)
    assert seen.accelerate.backward_seconds is not None


def test_lightning(seen):
    if "lightning" in OPTIONAL:
        pytest.skip("lightning is not installed")
    assert seen.lightning.steps > 40
    assert seen.lightning.samples_per_step == pytest.approx(8, rel=0.1)
    # Forward and backward run inside the optimizer's call; they are not the update.
    assert seen.lightning.optimizer_seconds.median < 0.75 * seen.lightning.step_seconds.median


def test_the_steps_are_drawn(seen):
    spans = seen.accumulation.timeline
    assert {"step", "wait", "backward"} <= {span.kind for span in spans}
    assert all(span.seconds >= 0 and span.start_seconds >= 0 for span in spans)


# -- the parts, one by one -------------------------------------------------------------------------


@st.composite
def selections(draw):
    shape = draw(st.lists(st.integers(1, 12), min_size=1, max_size=3))
    chunks = [draw(st.integers(1, size)) for size in shape]
    picked = []
    for size in shape[: draw(st.integers(1, len(shape)))]:
        start = draw(st.integers(0, size - 1))
        kind = draw(st.sampled_from(["one", "slice", "list"]))
        if kind == "one":
            picked.append(start)
        elif kind == "slice":
            step = draw(st.integers(1, 3))
            picked.append(slice(start, draw(st.integers(start + 1, size)), step))
        else:
            picked.append(sorted(draw(st.sets(st.integers(0, size - 1), min_size=1))))
    return shape, chunks, tuple(picked)


@given(selections())
def test_chunks_a_selection_touches_are_counted_as_a_mask_would(drawn):
    shape, chunks, picked = drawn
    facts = {"shape": shape, "chunks": chunks, "itemsize": 4}
    counted = hdf5.touched_bytes(facts, picked, 0, {})
    meant = [
        {place // size for place in _places(word, length)}
        for word, length, size in zip(
            (*picked, *[slice(None)] * (len(shape) - len(picked))), shape, chunks, strict=True
        )
    ]
    num_chunks = math.prod(len(one) for one in meant)
    assert counted == num_chunks * 4 * math.prod(chunks)


def _places(word, length):
    if isinstance(word, slice):
        return range(*word.indices(length))
    return [word] if isinstance(word, int) else word


def test_chunks_that_the_cache_holds_are_not_read_again():
    facts = {"shape": [1000, 10], "chunks": [100, 10], "itemsize": 4}
    cache = {}
    read = [hdf5.touched_bytes(facts, row, 40, cache) for row in range(200)]
    assert sum(read) == 2 * 4000
    small = {"shape": [8, 1 << 20], "chunks": [1, 1 << 20], "itemsize": 16}
    cache = {}
    # 16 MiB chunks do not fit into it at all.
    assert [hdf5.touched_bytes(small, 0, 1, cache) for _ in range(3)] == [16 << 20] * 3


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("def augment(x):\n    return here()", "transform"),
        ("def f(x):\n    return decode_image(here())", "picture"),
        ("def f(x):\n    return decode_line(here())", "decode"),
        ("def f(x):\n    return np.load(here())", "read"),
        ("def __getitem__(x):\n    return here()", ""),
        ("def random_crop_and_flip(x):\n    return here()", "transform"),
        ("def readable(x):\n    return here()", "read"),
        ("def spread(x):\n    return here()", ""),
    ],
)
def test_what_code_does_is_told_by_its_words(tmp_path, source, kind):
    path = tmp_path / "dataset.py"
    path.write_text(source)
    namespace = {}
    exec(compile(source, str(path), "exec"), namespace)
    function = next(value for name, value in namespace.items() if name != "__builtins__")
    assert sampling.kind_of(function.__code__, 2) == kind


def event(name, start, seconds, shapes=(), kinds=(), device="DeviceType.CPU", thread=1):
    return SimpleNamespace(
        name=lambda: name,
        start_ns=lambda: start * 1000,
        duration_ns=lambda: seconds * 1000,
        device_type=lambda: device,
        start_thread_id=lambda: thread,
        sequence_nr=lambda: -1,
        correlation_id=lambda: 0,
        linked_correlation_id=lambda: 0,
        shapes=lambda: list(shapes),
        dtypes=lambda: list(kinds),
    )


def test_operators_are_counted_once_and_timed_by_type():
    matrices = ([[64, 64], [64, 64]], ["double", "double"])
    events = [
        event("enumerate(DataLoader)#_SingleProcess", 0, 90),
        event("aten::stack", 10, 50, [[64, 64]], ["float"]),
        event("aten::linear", 100, 100, *matrices),
        event("aten::mm", 110, 80, *matrices),
        event("Optimizer.step#SGD.step", 300, 100),
        event("aten::add_", 310, 20, [[64, 64], []], ["float", "double"]),
    ]
    seen = operators.summarise(events, [0, 1_000_000], [])
    assert seen["operators"] == 2  # linear and add_: not what loading calls, nor what linear calls
    assert seen["double_seconds"] == pytest.approx(100e-6)
    assert seen["matmul_seconds"] == {"float64": pytest.approx(100e-6)}
    assert 0 < seen["update_seconds"] < 20e-6
    assert "kernels" not in seen


def test_kernels_are_a_union_and_the_quietest_step_stands_for_the_host():
    gpu = "DeviceType.CUDA"
    events = [
        event("aten::mm", 10, 500, [[8, 8], [8, 8]], ["float", "float"]),
        event("aten::mm", 1010, 5, [[8, 8], [8, 8]], ["float", "float"]),
        event("kernel_a", 20, 30, device=gpu),
        event("kernel_b<double>", 40, 30, device=gpu),
        event("kernel_a", 1020, 30, device=gpu),
        event("cutlass_80_tensorop_d884gemm_64x64_16x4_nn_align1", 1060, 10, device=gpu),
        event("Memcpy HtoD", 2000, 900, device=gpu),
        event("mine", 0, 1),
        event("mine", 0, 1500, device=gpu),
    ]
    seen = operators.summarise(events, [0, 1_000_000, 2_000_000], [])
    assert seen["kernels"] == 4
    assert seen["busy_seconds"] == pytest.approx(90e-6)
    assert seen["double_kernel_seconds"] == pytest.approx(40e-6)
    assert seen["double_product_seconds"] == pytest.approx(10e-6)
    assert seen["matmul_seconds"] == {"float32": pytest.approx(5e-6)}


def row(**values):
    plain = dict.fromkeys(Row._fields, 0)
    return Row(
        **{
            **plain,
            "seconds": 0.01,
            "loader": -1,
            "host_bytes": None,
            "device_bytes": None,
            **values,
        }
    )


def test_lines_torn_by_a_kill_are_left_out(tmp_path):
    lines = ['{"event": "state", "pid": 1, "role": "main", "kind": ""}', "[1, 2]", '{"event": "ste']
    (tmp_path / "1.jsonl").write_text("\n".join(lines))
    (tmp_path / "2.jsonl").write_text('{"event": "sta')
    (process,) = read_folder(tmp_path)
    assert process.state["pid"] == 1


def state(**values):
    plain = {
        **{
            "role": "main",
            "kind": "optimizer",
            "num_steps": 40,
            "sites": [],
            "loaders": [],
            "hdf5": [],
        },
        **{
            "bad": {},
            "profile": {},
            "spans": [],
            "torch": {},
            "first_torch": {},
            "cpu": [1.0, 2.0, 2.0],
        },
        **{
            "notes": [],
            "stands": None,
            "doing": {},
            "lines": {},
            "num_fetches": 0,
            "worker_id": -1,
        },
    }
    return {**plain, **values}


def test_ranks_that_wait_are_told_from_the_one_that_works():
    def rank(number, backward, step=0.020):
        rows = [row(seconds=step, backward=backward, cpu=0.01) for _ in range(40)]
        return Process(rows, [], state(torch={"rank": number, "world_size": 2}))

    seen = measure([rank(0, 0.014), rank(1, 0.002)], "two", MachineFacts())
    assert [one.own_seconds for one in seen.ranks] == pytest.approx([0.008, 0.020])
    assert seen.samples_per_step is None


def test_seconds_queued_for_a_core_are_nobodys_work():
    loader = {
        **{
            "number": 0,
            "workers": 1,
            "batch_size": 4,
            "pin_memory": False,
            "persistent_workers": True,
        },
        **{"prefetch_factor": 2, "start_method": "fork", "where": "a:1", "dataset_where": "a:2"},
        **{"collate_where": None, "epochs": [], "ends": [], "batch_bytes": 8, "length": 10},
    }
    rows = [
        row(
            seconds=0.030,
            cpu=0.01,
            delay=0.010,
            wait=0.012,
            wait_delay=0.004,
            loader=0,
            samples=4,
            batches=1,
        )
        for _ in range(40)
    ]
    fetches = [Fetch(0.0, 0.040, 0.005, 0.020, 0.010, 0) for _ in range(40)]
    looks = {"picture": 5, "decode": 3, "other": 2}
    told = state(role="worker", loader_id=0, worker_id=0, num_fetches=40, doing=looks)
    worker = Process([], fetches, told)
    seen = measure([Process(rows, [], state(loaders=[loader])), worker], "busy", MachineFacts())
    assert seen.loader.work.decode == pytest.approx(0.8 * 0.015)
    assert seen.loader.decodes_pictures
    assert seen.step_seconds.median == pytest.approx(0.020)
    assert seen.wait_seconds.median == pytest.approx(0.008)
    assert seen.loader.alone_seconds.median == pytest.approx(0.020)
    assert seen.loader.queued_share == pytest.approx(0.5)
    assert seen.loader.blocked_share == pytest.approx(0.75)
    assert seen.loader.work.collate == pytest.approx(0.005)
    assert any("other work" in note for note in seen.notes)


@pytest.mark.parametrize(("threads", "device"), [(2, None), (1, None), (2, "NVIDIA H200")])
def test_threads_that_wait_for_one_without_a_core_are_told(threads, device):
    """stoker's demo beside one busy process on two cores: 264 samples/s with two threads, 2,048 with one."""
    rows = [row(seconds=0.012, cpu=0.008, delay=0.004) for _ in range(40)]
    told = state(torch={"version": "2.13.0", "threads": threads, "cuda": device})
    notes = measure([Process(rows, [], told)], "busy", MachineFacts()).notes
    assert any("OMP_NUM_THREADS=1" in note for note in notes) == (threads > 1 and device is None)


def test_uneven_steps_beside_other_work_are_not_called_healthy():
    """A public loop over single names, where the machine was busy: steps of 6 to 44 ms, "nothing to fix"."""

    def told(longest, delay):
        rows = [
            row(seconds=seconds, cpu=0.9 * seconds, delay=delay * seconds)
            for seconds in (0.006, 0.010, longest, longest) * 10
        ]
        return measure([Process(rows, [], state())], "busy", MachineFacts()).unjudged

    profile = {"operators": 40, "work_seconds": 1e-4, "update_seconds": 0.0, "double_seconds": 0.0}
    rows = [row(seconds=0.012, cpu=0.009, delay=0.003) for _ in range(40)]
    for count, is_judged in ((40, False), (200, True)):
        made = state(profile={**profile, "operators": count, "matmul_seconds": {}, "steps": 3})
        why = measure([Process(rows, [], made)], "busy", MachineFacts()).unjudged
        assert any("its operators explain" in one for one in why) != is_judged
    assert any("steps took" in why for why in told(0.060, 0.4))
    assert not any("steps took" in why for why in told(0.060, 0.1) + told(0.012, 0.4))


def test_the_environment_carries_the_probe_and_nothing_of_an_outer_doctor(tmp_path):
    outer = {"PYTHONPATH": "/mine", "STOKER_DOCTOR_STEPS": "5", "HOME": "/h"}
    variables = probe_variables(outer, tmp_path)
    assert variables["PYTHONPATH"].split(os.pathsep) == [str(attach._ENTRY), "/mine"]
    assert "STOKER_DOCTOR_STEPS" not in variables
    assert variables["HOME"] == "/h"
    assert (attach._ENTRY / "sitecustomize.py").is_file()
