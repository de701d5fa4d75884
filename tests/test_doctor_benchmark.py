"""The benchmark of doctors: every script has its cause and its twin, and the figures are computed as they say."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks" / "doctor"
sys.path[:0] = [str(FOLDER.parent), str(FOLDER)]

import cases  # noqa: E402
import overhead  # noqa: E402
import peers  # noqa: E402
import publish  # noqa: E402
import run  # noqa: E402

import forked_scripts  # noqa: E402
from stoker.doctor.attach import run_script  # noqa: E402
from stoker.doctor.rules import FINDING_NAMES, diagnose, why_unjudged  # noqa: E402
from warm_stoker import shared  # noqa: E402


def test_there_are_enough_scripts_of_every_kind():
    by_causes = [len(case.causes) for case in cases.CASES]
    assert len(cases.CASES) == len(cases.BY_NAME) >= 60
    assert by_causes.count(1) >= 40
    assert by_causes.count(2) >= 8
    assert by_causes.count(0) >= 12
    assert {case.style for case in cases.CASES} == set(cases.STYLES)
    assert {case.data for case in cases.CASES} == set(cases.DATA)


def test_every_script_names_its_cause_and_has_a_twin():
    for case in cases.CASES:
        source = case.source()
        ast.parse(source)
        assert set(case.causes) | set(case.also) <= set(FINDING_NAMES), case.name
        # Beside the flag itself: somewhere the twin is different.
        assert not case.causes or source.count("FIXED") >= 2, case.name


def test_scripts_are_written_as_files(tmp_path):
    cases.write_scripts(tmp_path)
    assert len(list(tmp_path.glob("*.py"))) == len(cases.CASES)


def result(causes, findings=(), alone=100.0, fixed=200.0, slow=0.0103, unjudged=""):
    return {
        "causes": causes,
        "also": [],
        "style": "plain",
        "has_gain": True,
        "alone": [{"rate": alone, "median_step_seconds": 0.01}],
        "doctored": {"rate": alone, "median_step_seconds": slow},
        "fixed": [{"rate": fixed}],
        "unjudged": unjudged,
        "findings": [{"name": name, "gain": {"likely": gain}} for name, gain in findings],
    }


def test_figures_are_computed_from_the_rows():
    rows = [
        run.judge("right", result(["no-workers"], [("no-workers", 2.2)])),
        run.judge("far", result(["no-workers"], [("no-workers", 4.0)])),
        run.judge("wrong", result(["gc-each-step"], [("no-workers", 2.0)])),
        run.judge("two", result(["gc-each-step", "no-workers"], [("no-workers", 2.0)])),
        run.judge("quiet", result([])),
        run.judge("alarm", result([], [("no-workers", 1.2)])),
        run.judge("unsure", result([], unjudged="too few samples")),
    ]
    found = run.summarise(rows)
    assert found["top_right"] == {"right": 3, "of": 4}
    assert found["both_named"] == {"right": 0, "of": 1}
    assert found["false_alarms"] == {"alarms": 1, "of": 3}
    assert found["healthy_unjudged"] == 1
    failed = {**result([]), "doctored": {"failure": "no module"}}
    assert not run.judge("failed", failed)["is_right"], "a script that did not run is not healthy"
    assert found["predictions"]["count"] == 2
    assert found["predictions"]["median_error"] == pytest.approx((0.1 + 1.0) / 2)
    assert found["predictions"]["within_30_percent"] == 0.5
    assert found["overhead"]["p50"] == pytest.approx(0.03)
    assert found["confusion"]["healthy"] == {"healthy": 1, "no-workers": 1, "unjudged": 1}
    machine = {"probe": {"gpus": [], "cpu": "x", "torch": "2"}, "host": "x", "commit": "abc"}
    document = {"machine": machine, "result": {"summary": found, "rows": rows}}
    told = "\n".join(publish.result_section("doctor-x", document))
    assert "3 of 4" in told
    assert "`wrong`: the cause is gc-each-step, the doctor said no-workers" in told
    assert "`far`: predicted × 4.00, measured × 2.00" in told
    assert ">1</text>" in publish.confusion_svg(found["confusion"])
    assert "predicted 4.00, measured 2.00" in publish.scatter_svg([("far", 2.0, 4.0)])


def test_a_script_whose_fix_brings_nothing_is_told_apart():
    """float64 on an H200: the rule is the same for all scripts, and both counts are published."""
    idle = result(["double-precision"], [("batch-too-small", 6.0)], fixed=101.0)
    tried = {**idle, "tried": {"name": "batch-too-small", "batch": 512, "rate": 550.0}}
    rows = [run.judge("kept", tried), run.judge("not", idle)]
    rows.append(run.judge("right", result(["no-workers"], [("no-workers", 2.0)])))
    rows.append(run.judge("leak_plain", result(["memory-creep"], fixed=100.0)))
    assert run.summarise(rows)["top_right"] == {"right": 2, "of": 4}, "the promise was kept"
    told, others, unkept = publish.by_gain(rows)
    assert told == "1 of 2"
    assert [row["case"] for row in others] == ["kept", "not"]
    assert [row["case"] for row in unkept] == ["not"]
    assert "with that it was × 5.50" in publish.told_without_gain(rows[0])
    assert "which was not tried" in publish.told_without_gain(rows[1])


def test_numbers_that_the_first_advice_gives_a_loader_are_tried():
    def advised(**arguments):
        return run.advised_source(
            "DataLoader(x, batch_size=4, num_workers=2)",
            [{"patch": {"loader_arguments": arguments}}],
        )

    assert advised(batch_size=512) == "DataLoader(x, batch_size=512, num_workers=2)"
    alone = {"num_workers": 0, "persistent_workers": False, "prefetch_factor": None}
    assert advised(**alone) == "DataLoader(x, batch_size=4, num_workers=0)"
    assert advised(persistent_workers=True) is None
    assert advised(prefetch_factor=4) is None
    assert advised() is None
    assert run.advised_source("", []) is None


@pytest.mark.parametrize(("rate", "right"), [(250.0, True), (150.0, False)])
def test_other_advice_than_the_planted_cause_is_right_if_it_brings_as_much(rate, right):
    small = result(["starved-by-loader"], [("batch-too-small", 2.6), ("starved-by-loader", 2.0)])
    tried = {"name": "batch-too-small", "batch": 512, "rate": rate}
    row = run.judge("many", {**small, "tried": tried})
    assert row["is_right"] == right
    assert publish.better_advice([row]) == [row] * right
    assert not run.said_causes(small)


def test_a_second_cause_may_be_hidden_behind_the_first():
    both = result(["gc-each-step", "no-workers"], [("no-workers", 2.0)])
    assert run.judge("two", {**both, "later": ["gc-each-step"]})["all_named"]


def test_the_page_is_that_of_the_result_files():
    made = publish.make_page()
    for name, text in made.items():
        assert (publish.DOCS / name).read_text(encoding="utf-8") == text, f"run publish.py: {name}"


def test_merged_results_keep_the_figures_of_each_run(tmp_path):
    machine = {"probe": {"gpus": [], "cpu": "x", "torch": "2"}, "host": "x"}
    runs = {
        "new": [run.judge("one", result(["no-workers"], [("no-workers", 2.0)]))],
        "old": [
            run.judge("one", result(["no-workers"])),
            run.judge("two", result(["no-workers"], [("no-workers", 4.0)])),
        ],
    }
    for name, rows in runs.items():
        raw = {row["case"]: name for row in rows}
        told = {"summary": {**run.summarise(rows), "not_run": []}, "rows": rows, "raw": raw}
        document = {"machine": {**machine, "commit": name}, "result": told}
        (tmp_path / name).write_text(json.dumps(document))
    merged = publish.merge([tmp_path / "new", tmp_path / "old"], "Not run again.")
    assert merged["result"]["summary"]["top_right"] == {"right": 2, "of": 2}
    page = "\n".join(publish.result_section("doctor-x", merged))
    assert "| 1, `old` | 2 | 1 of 2 | 0 of 0 | 0.0% of 1 | 0 of 0 |" in page
    assert "| 2, `new` | 1 | 1 of 1 | 0 of 0 | 100% of 1 | 0 of 0 |" in page
    assert "Not run again." in page
    assert merged["result"]["raw"] == {"one": "new", "two": "old"}
    (tmp_path / "both").write_text(json.dumps(merged))
    again = publish.merge([tmp_path / "old", tmp_path / "both"])["result"]
    assert [row["run"] for row in again["rows"]] == [3, 3]
    assert len(again["runs"]) == 3
    assert [row["run"] for row in merged["result"]["rows"]] == [2, 1]


def rounds_of(values, cpu_ms=2.0, per_session=4):
    return [
        {"session": at // per_session, "ms": ms, "cpu_ms": cpu_ms} for at, ms in enumerate(values)
    ]


def test_the_cost_of_the_probe_is_the_median_of_rounds():
    script = overhead.SCRIPTS["2 ms"]
    alone = rounds_of([2.0 * drift for drift in (1, 1.1, 1, 3, 1, 0.9)] * 4)
    doctored = rounds_of([1.05 * one["ms"] for one in alone], 2.2)
    found = overhead.summarise(alone, doctored, [2.0, 2.02, 9.0], [], script)
    assert found["overhead"] == pytest.approx(0.05), "the drift of the machine is that of both"
    assert found["interval"] == pytest.approx([0.05, 0.05])
    assert found["sound"]
    assert (found["sessions"], found["rounds"]) == (6, 24)
    assert found["cpu_overhead"] == pytest.approx(0.10)
    assert found["reported_error"] == pytest.approx(0.01)
    machine = {"probe": {"cpu": "x"}, "host": "y", "date": "today", "commit": "abc"}
    told = "\n".join(publish.overhead_section([{"machine": machine, "result": {"2 ms": found}}]))
    assert "| 2 ms | 2.00 ms | 2.10 ms | 5.0% (5.0% to 5.0%) | 8.0% |" in told
    assert "24 rounds of 6 pairs of processes" in told
    varied = zip(alone, (1, 1.2, 1, 1.3, 0.7, 1) * 4, strict=True)
    noisy = [{**one, "ms": one["ms"] * more} for one, more in varied]
    unsound = overhead.summarise(alone, noisy, [], [], script)
    assert not unsound["sound"]
    told = publish.overhead_section([{"machine": machine, "result": {"2 ms": unsound}}])
    assert "NOT SOUND" in "\n".join(told)


@pytest.mark.parametrize(
    ("factor", "num_rounds"), [(1.2, 24), (0.8, 24), (1.0, 20)], ids=("long", "short", "few")
)
def test_a_cost_is_not_sound_for_steps_of_another_length_or_few_processes(factor, num_rounds):
    script = overhead.SCRIPTS["10 ms"]
    alone = rounds_of([10.0 * factor] * num_rounds)
    doctored = rounds_of([10.2 * factor] * num_rounds)
    assert not overhead.summarise(alone, doctored, [], [], script)["sound"]


def test_the_interval_of_the_cost_is_as_wide_as_processes_differ():
    """Many turns of two processes that differ tell no more than two processes."""
    apart = [[0.01] * 100, [0.05] * 100]
    assert overhead.interval_of_median(apart) == (0.01, 0.05)
    same = [[0.01, 0.02, 0.03] * 30] * 10
    low, high = overhead.interval_of_median(same)
    assert 0.01 < low <= 0.02 <= high < 0.03


def test_a_step_of_a_round_is_the_mean_of_all():
    turn = {"steps": [0.001] * 19 + [0.021], "cpu": 0.04}
    told = overhead.mean_step([turn, {"steps": [0.004] * 20, "cpu": 0.04}])
    assert told == {"ms": 3.0, "cpu_ms": 2.0}


@pytest.mark.parametrize(
    ("per_layer", "per_position", "depth"), [(0.5, 0.5, 6), (1.0, 0.1, 4), (4.0, 0.03, 1)]
)
def test_the_size_of_the_work_is_sought(per_layer, per_position, depth):
    def step_ms(size):
        return size.depth * (per_layer + per_position * (size.length - 1))

    size, found = overhead.seek_size(10.0, step_ms)
    assert size.depth == depth
    assert found == step_ms(size)
    # A position more or less may be too much.
    assert abs(found - 10.0) <= max(0.3, depth * per_position / 2)
    size, found = overhead.seek_size(10.0, lambda size: 11.0)
    assert (size, found) == (overhead.Size(1, 1), 11.0), "it cannot be shorter here"


def test_a_result_is_named_after_its_machine(monkeypatch, tmp_path):
    """On a machine without a GPU the name has the cores once; healthy scripts can come last."""
    ran = []
    words = (
        "run.py --only gc_plain,healthy_plain --healthy-last --first none --state STATE --out OUT"
    )
    words = words.replace("STATE", str(tmp_path / "state")).replace("OUT", str(tmp_path))
    monkeypatch.setattr(sys, "argv", words.split())
    monkeypatch.setattr(run, "machine_name", lambda: "cpu-2-cores-x86_64")
    monkeypatch.setattr(run, "machine_facts", lambda: {"probe": {}})
    monkeypatch.setattr(run.FORKS, "set_forkserver_preload", lambda names: None)
    for name in ("CUDA_VISIBLE_DEVICES", "PYTHONPATH", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "")

    def examine(case, *_):
        ran.append(case.name)
        return result(list(case.causes))

    monkeypatch.setattr(run, "examine", examine)
    run.main()
    assert ran == ["gc_plain", "healthy_plain"]
    told = json.loads((tmp_path / "doctor-cpu-2-cores-x86_64.json").read_text())["result"]
    assert told["summary"]["num_scripts"] == 2
    assert told["raw"]["gc_plain"]["seconds"] >= 0
    run.main()
    assert len(ran) == 2, "what was kept is not run again"


def test_other_tools_name_a_cause_by_rules():
    spot = {"function": "__getitem__", "line": 3}
    assert peers.named_by_line(spot, ["no-workers"])
    assert not peers.named_by_line(spot, ["gc-each-step"])
    assert peers.named_by_line(None, ["no-workers"]) is None
    assert peers.named_by_operators(["aten::item"], ["sync-every-step"])
    assert not peers.named_by_operators(["aten::mm"], ["sync-every-step"])
    assert peers.named_by_verdict("INPUT-BOUND (CRITICAL)", ["decode-bound"])
    assert not peers.named_by_verdict("INPUT-BOUND (CRITICAL)", ["gc-each-step"])
    chosen = peers.chosen()
    assert len({case.causes for case in chosen}) == len(chosen)
    assert peers.function_at("def a():\n    x = 1\n\ny = 2\n", 2) == "a"
    assert peers.function_at("def a():\n    x = 1\n\ny = 2\n", 4) == ""


@pytest.mark.parametrize(
    "name",
    [
        "between_get_batch",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("gc_plain", "healthy_get_batch")),
    ],
)
def test_three_of_them_under_the_doctor(name, tmp_path, monkeypatch):
    monkeypatch.setenv("STEPS", "40")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    if name != "gc_plain":  # in a fork of a frozen heap, collecting garbage takes no time
        monkeypatch.setattr("stoker.doctor.attach._start", forked_scripts.start)
    case = cases.BY_NAME[name]
    script = tmp_path / f"{name}.py"
    script.write_text(case.source())
    attached = run_script([sys.executable, str(script)])
    assert attached.exit_code == 0
    found = diagnose(attached.measurements)
    names = [finding.name for finding in found]
    # A machine that is busy with the other tests may hide a cause; it must then say so, and never name another.
    told = why_unjudged(attached.measurements, found)
    assert set(case.causes) <= set(names) or told, (names, attached.measurements.notes)
    assert not set(names) - {*case.causes, *case.also}, names


def test_the_stopwatch_writes_the_time_of_every_update(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\nweight = torch.nn.Parameter(torch.zeros(1))\n"
        "optimizer = torch.optim.SGD([weight], lr=0.1)\n"
        "for _ in range(4):\n    weight.square().sum().backward()\n    optimizer.step()\n"
    )
    stopwatch, words = FOLDER / "stopwatch.py", [tmp_path / "out", script]
    done = shared().run(words, environment={"STEPS": "3", "PATH": ""}, script=stopwatch)
    assert done.returncode == 0, done.stderr
    times = json.loads((tmp_path / "out").read_text())["times"]
    assert len(times) == 3
    assert times == sorted(times)
