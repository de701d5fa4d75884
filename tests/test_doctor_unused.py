"""Calls of a model whose results no update needs: in the profile, in the samples, and in what the doctor says."""

from __future__ import annotations

import gc
import json
import linecache
import sys
import time
from dataclasses import replace

import pytest
import torch
from torch import nn

from stoker.doctor.findings import Consultation
from stoker.doctor.measurements import HostCall, KernelFacts, MachineFacts, Measurements
from stoker.doctor.probe import calls, operators, places, unused
from stoker.doctor.rules import consult, diagnose, why_unjudged
from stoker.doctor.transcript import Process
from stoker.doctor.transcript_measures import measure
from test_doctor_attach import row, state
from test_doctor_rules import job

# -- in the profile --------------------------------------------------------------------------------


def profiled(step):
    """Profile a step, and return the names of the operators in the periods of each kind."""
    step()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
    ) as profiler:
        begin = time.time_ns()
        step()
        end = time.time_ns()
    events = list(profiler.profiler.kineto_results.events())
    found = unused.find_unused(events, begin, end, [], operators._PRODUCTS)
    seen = operators.summarise(events, [begin, end], [])
    for kind, periods in found.items():
        share = sum(last - first for first, last in periods) / (end - begin)
        assert seen[f"{kind}_share"] == pytest.approx(share)
    return {
        kind: {
            one.name()
            for one in events
            if any(first <= one.start_ns() < last for first, last in periods)
            and one.name().startswith("aten::")
        }
        for kind, periods in found.items()
    }


class Job:
    def __init__(self):
        self.model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.x = torch.randn(4, 8)

    def update(self, extra=0.0):
        loss = self.model(self.x).square().mean() + extra
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


def test_a_training_step_has_no_work_that_is_not_derived():
    job = Job()
    assert profiled(job.update) == {"ungraded": set(), "underived": set()}


def test_work_without_gradients_is_found():
    job = Job()

    def step():
        job.update()
        with torch.no_grad():
            job.model(job.x).sigmoid()

    found = profiled(step)
    assert {"aten::addmm", "aten::sigmoid"} <= found["ungraded"]
    assert "aten::add_" not in found["ungraded"], "an update is no evaluation"
    assert not found["underived"]


def test_work_in_the_closure_of_an_optimizer_is_found():
    job = Job()

    def closure():
        loss = job.model(job.x).square().mean()
        with torch.no_grad():
            job.model(job.x).sigmoid()
        job.optimizer.zero_grad()
        loss.backward()
        return loss

    found = profiled(lambda: job.optimizer.step(closure))
    assert {"aten::addmm", "aten::sigmoid"} <= found["ungraded"]
    assert not found["ungraded"] & {"aten::square", "aten::add_", "aten::addcdiv_"}
    assert not found["underived"]


def test_work_that_no_backward_pass_goes_through_is_found():
    job = Job()

    def step():
        job.update()
        job.model(job.x).sigmoid().sum()

    found = profiled(step)
    assert not found["ungraded"]
    assert {"aten::addmm", "aten::sigmoid"} <= found["underived"]
    assert "aten::square" not in found["underived"]


def test_operators_on_the_input_belong_to_the_work_that_follows():
    """A model that flattens its input: no autograd node, but no work of the update before it either."""
    job = Job()

    def step():
        job.update()
        job.model(job.x.mul(2).flatten(1))

    found = profiled(step)
    assert {"aten::mul", "aten::addmm"} <= found["underived"]
    assert "aten::add_" not in found["underived"]


def test_checkpointed_layers_frozen_layers_and_averages_are_not_found():
    job = Job()
    frozen = nn.Linear(8, 8).requires_grad_(False)
    average = [weight.detach().clone() for weight in job.model.parameters()]

    def step():
        x = frozen(job.x).requires_grad_()
        loss = torch.utils.checkpoint.checkpoint(job.model, x, use_reentrant=True)
        job.optimizer.zero_grad()
        loss.mean().backward()
        job.optimizer.step()
        with torch.no_grad():
            for mean, weight in zip(average, job.model.parameters(), strict=True):
                mean.lerp_(weight, 0.1)

    assert profiled(step) == {"ungraded": set(), "underived": set()}


def test_what_runs_in_an_evaluation_is_left_out():
    job = Job()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        first = time.time_ns()
        with torch.no_grad():
            job.model(job.x)
            between = time.time_ns()
            job.model(job.x)
        last = time.time_ns()
    events = list(profiler.profiler.kineto_results.events())

    def periods(leave_out):
        return unused.find_unused(events, first, last, leave_out, operators._PRODUCTS)["ungraded"]

    (whole,) = periods([])
    (half,) = periods([(between, last)])
    assert whole[0] == half[0] < half[1] < between < whole[1]
    assert periods([(first, last)]) == []


# -- the lines ---------------------------------------------------------------------------------------


class Looks(nn.Module):
    """A model in whose forward pass somebody looks at the stack."""

    def __init__(self, paths):
        super().__init__()
        self.paths = paths
        self.numbers = []

    def forward(self, x):
        self.numbers.append(self.paths.number_of_call(sys._getframe()))
        return x


def test_a_path_leads_from_the_call_of_the_outermost_module_to_the_script():
    paths = calls.Paths()
    model = nn.Sequential(Looks(paths))

    @torch.no_grad()
    def evaluate():
        return [model(0) for _ in range(2)]

    def other():
        return model(0)

    evaluate()
    line = sys._getframe().f_lineno - 1
    other()
    evaluate()
    # The third call is from another line.
    assert model[0].numbers == ["0", "0", "1", "2", "2"]
    plain = paths.plain()
    path, is_whole, is_trained = plain["calls"]["0"]
    assert [name for _, _, name in path[:2]] == ["evaluate", sys._getframe().f_code.co_name]
    assert path[1][:2] == (__file__, line)
    assert not is_whole, "pytest calls the test"
    assert is_trained, "no optimizer is known"
    assert plain["sources"] == {}


def test_a_model_is_trained_if_an_optimizer_has_one_of_its_weights():
    paths = calls.Paths()
    student, teacher = (nn.Sequential(Looks(paths), nn.Linear(1, 1)) for _ in range(2))
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    paths.note_optimizer(optimizer)
    x = torch.ones(1)
    student(x)
    teacher(x)
    assert [told[2] for told in paths.plain()["calls"].values()] == [True, False]
    del optimizer
    gc.collect()
    teacher(x)
    assert paths.plain()["calls"]["2"][2], "nothing is known any more"


def test_a_model_in_the_closure_of_an_optimizer_is_found():
    """As Lightning calls the training step, and as LBFGS needs it."""
    paths = calls.Paths()
    model = nn.Sequential(Looks(paths), nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure():
        return model(torch.ones(1)).sum()

    optimizer.step(closure)
    average = torch.optim.swa_utils.AveragedModel(nn.Sequential(Looks(paths)))
    average.module[0].paths = paths
    average(torch.ones(1))
    lines = [path[0][0][1] for path in paths.plain()["calls"].values()]
    here = sys._getframe().f_lineno
    assert lines == [here - 7, here - 2]

    class Own(torch.optim.SGD):
        @torch._disable_dynamo
        def step(self):
            self.seen = places.find_model(sys._getframe())

    own = Own(model.parameters())
    own.step()
    assert own.seen == (None, None), "a compiled function, but no model"


def test_a_call_from_a_library_has_no_path():
    paths = calls.Paths()
    model = Looks(paths)
    list(map(model, [0]))
    json.loads("{}", object_hook=model)
    assert model.numbers == ["0", ""], "map is no library with lines of its own"
    assert places.find_model(sys._getframe()) == (None, None)


def test_the_text_of_a_cell_comes_with_its_path():
    paths = calls.Paths()
    text = "def run(model):\n    return model(0)\n"
    linecache.cache["<cell 7>"] = (len(text), None, text.splitlines(True), "<cell 7>")
    space = {}
    exec(compile(text, "<cell 7>", "exec"), space)
    space["run"](Looks(paths))
    plain = paths.plain()
    assert plain["sources"] == {"<cell 7>": text}
    assert plain["calls"]["0"][0][0] == ("<cell 7>", 2, "run")


def test_the_lines_of_a_backward_pass_are_noted_once():
    paths = calls.Paths()
    for _ in range(2):
        paths.note_update(sys._getframe())
    (stack,) = paths.plain()["updates"]
    assert stack[0][2] == sys._getframe().f_code.co_name


# -- what the doctor makes of it -----------------------------------------------------------------------

SOURCE = """
def held():
    with torch.no_grad():
        return loss_of(model(x_val))        # 4

for x in loader:
    with torch.no_grad():
        soft = teacher(x)                   # 8
    loss = distance(model(x), soft)         # 9
    loss.backward()                         # 10
    told = held()                           # 11
    keeper.last = net(x)                    # 12
"""
PATHS = {
    "calls": {
        "train": [[["a.py", 9, "<module>"]], True, True],
        "teacher": [[["a.py", 8, "<module>"]], True, True],
        "held": [[["a.py", 4, "held"], ["a.py", 11, "<module>"]], True, True],
        "kept": [[["a.py", 12, "<module>"]], True, True],
    },
    "updates": [[["a.py", 10, "<module>"]]],
    "sources": {"a.py": SOURCE},
}


def seen_by(looks, profile=None, paths=PATHS, **values) -> Measurements:
    """Return measurements of steps of 10 ms with a hundred samples, `looks` of them in calls of the model."""
    profile = {"steps": 2, "ungraded_share": 0.5, "underived_share": 0.2} | (profile or {})
    told = state(
        training={"model": 100}, between={}, modules=True, paths=paths, model_calls=looks,
        profile=profile, **{"evaluated_calls": {}, **values},
    )  # fmt: skip
    rows = [row(seconds=0.010, evaluation=values.get("evaluation", 0.0)) for _ in range(40)]
    return measure([Process(rows, [], told)], "python a.py", MachineFacts(cores=2))


def test_a_validation_without_eval_is_a_finding_at_the_line_that_asks_for_it():
    found = seen_by({"train": 40, "teacher": 20, "held": 40}, {"ungraded_share": 0.6})
    (call,) = found.unused_calls
    assert call.where == "a.py:11"
    assert call.seconds_per_step == pytest.approx(0.004)
    assert not found.doubtful_calls
    (finding,) = diagnose(found)
    assert finding.name == "evaluates-each-step"
    assert finding.patch.where == "a.py:11"
    assert finding.gain.likely == pytest.approx(10 / 6.4)
    assert "4 ms (40%) goes to results of the model that no update needs" in finding.evidence[0]


def test_the_profile_adds_the_loss_of_an_evaluation_but_no_other_work():
    for share, seconds in ((0.3, 0.004), (0.5, 0.005), (0.9, 0.006)):
        (call,) = seen_by({"train": 60, "held": 40}, {"ungraded_share": share}).unused_calls
        assert call.seconds_per_step == pytest.approx(seconds)


def test_a_teacher_is_no_evaluation():
    found = seen_by({"train": 50, "teacher": 50})
    assert not found.unused_calls
    assert not found.doubtful_calls
    assert consult(found).verdict == "nothing to fix"


def test_a_profile_that_knows_nothing_of_it_overrules_the_source():
    assert not seen_by({"train": 60, "held": 40}, {"ungraded_share": 0.05}).unused_calls
    kept = seen_by({"train": 60, "kept": 40}, {"ungraded_share": 0.05, "underived_share": 0.05})
    assert not kept.doubtful_calls


def test_a_result_that_an_object_keeps_cannot_be_judged():
    found = seen_by({"train": 60, "kept": 40}, {"underived_share": 0.4})
    assert not found.unused_calls
    told = consult(found)
    assert not told.findings
    assert told.verdict.startswith("cannot judge: 40% of a step the model computes at a.py:12")
    assert "× 1.56" in told.unjudged
    little = consult(seen_by({"train": 95, "kept": 5}, {"underived_share": 0.05}))
    assert little.verdict == "nothing to fix"


def test_a_teacher_whose_output_comes_through_a_hook_is_no_evaluation():
    place, is_whole, _ = PATHS["calls"]["kept"]
    paths = {**PATHS, "calls": {**PATHS["calls"], "kept": [place, is_whole, False]}}
    found = seen_by({"train": 60, "kept": 40}, {"underived_share": 0.4}, paths)
    assert consult(found).verdict == "nothing to fix"


def test_averaged_weights_may_be_evaluated_where_names_say_so():
    """An average of the weights is in no optimizer; `x_val` tells what it is called for."""
    place, is_whole, _ = PATHS["calls"]["held"]
    paths = {**PATHS, "calls": {**PATHS["calls"], "held": [place, is_whole, False]}}
    assert seen_by({"train": 60, "held": 40}, paths=paths).unused_calls


def test_steps_without_a_backward_pass_are_not_examined():
    """Weights that are updated by trial: every call of the model is for the update."""
    paths = {**PATHS, "updates": []}
    found = seen_by({"held": 50, "kept": 50}, {"underived_share": 0.5}, paths)
    assert not found.unused_calls
    assert not found.doubtful_calls


def test_gradients_that_a_statement_turned_off_are_found_by_the_profile():
    """`torch.set_grad_enabled(False)` on a line of its own: the source of the call says nothing of it."""
    profile = {"ungraded_share": 0.3, "underived_share": 0.0}
    found = seen_by({"train": 60, "kept": 40}, profile)
    assert [call.where for call in found.doubtful_calls] == ["a.py:12"]
    needed = seen_by({"train": 40, "kept": 30, "teacher": 30}, profile)
    assert not needed.doubtful_calls, "the work without gradients is the teacher's"


def test_without_a_profile_only_calls_without_gradients_are_doubted():
    alone = {"ungraded_share": None, "underived_share": None}
    found = seen_by({"train": 40, "held": 30, "kept": 30}, alone)
    assert not found.unused_calls
    assert [call.where for call in found.doubtful_calls] == ["a.py:11"]


def test_calls_whose_source_is_gone_are_doubted_by_their_work_without_a_backward_pass():
    paths = {**PATHS, "sources": {}}
    found = seen_by({"train": 40, "held": 60}, {"underived_share": 0.1}, paths)
    (call,) = found.doubtful_calls
    assert call.where == "a.py:9 or a.py:4"
    assert call.seconds_per_step == pytest.approx(0.006)
    healthy = {"ungraded_share": 0.0, "underived_share": 0.0}
    assert consult(seen_by({"train": 100}, healthy, paths)).verdict == "nothing to fix"


def test_labels_made_in_eval_mode_are_no_evaluation():
    site = {
        "family": "evaluation",
        "where": "a.py:7",
        "call": "evaluation",
        "calls": 40,
        "bytes": 0,
        "seconds": 0.16,
    }
    rows = [row(seconds=0.010, evaluation=0.004) for _ in range(40)]

    def found(calls):
        told = state(training={"model": 60, "timed": 40}, between={}, modules=True, paths=PATHS,
                     model_calls={"train": 60}, evaluated_calls=calls, sites=[site])  # fmt: skip
        return diagnose(measure([Process(rows, [], told)], "python a.py", MachineFacts(cores=2)))

    assert [one.name for one in found({"held": 30})] == ["evaluates-each-step"]
    assert found({"teacher": 30, "held": 5}) == []
    # On a GPU the host may be done before it is looked at: then the modes decide, as before.
    assert [one.name for one in found({})] == ["evaluates-each-step"]


def test_the_device_works_for_what_the_host_only_launches():
    busy = {
        "kernels": 20,
        "kernel_seconds": 0.02,
        "busy_seconds": 0.02,
        "ungraded_busy_seconds": 0.016,
    }
    found = seen_by({"train": 80, "teacher": 5, "held": 15}, busy)
    # Three quarters of the samples without gradients are the validation's.
    assert found.unused_device_seconds == pytest.approx(0.006)
    (finding,) = diagnose(found)
    assert finding.gain.likely == pytest.approx(10 / 4.6)
    assert "is the GPU's work for results of the model" in finding.evidence[0]


def test_both_ways_of_evaluating_add_up():
    measured = replace(
        job(0.010),
        evaluation_seconds=0.003,
        evaluation_where="a.py:3",
        unused_calls=(HostCall("a.py:9", "model", 1.0, 0.002),),
    )
    finding = next(one for one in diagnose(measured) if one.name == "evaluates-each-step")
    assert finding.gain.likely == pytest.approx(10 / 5.5)
    assert finding.patch.where == "a.py:3"
    assert any("a.py:9: 2 ms" in line for line in finding.evidence)


def test_doubt_is_told_even_if_the_gpu_never_rests():
    measured = replace(
        job(0.010),
        machine=MachineFacts(cores=8, device="cuda"),
        kernels=KernelFacts(50, 1e-4, 1.0),
        doubtful_calls=(HostCall("a.py:9", "model", 1.0, 0.0005),),
        doubtful_device_seconds=0.005,
    )
    told = Consultation(measured, (), unjudged=why_unjudged(measured, []))
    assert "cannot judge: 50% of a step" in told.verdict
