"""Time between the model's calls: sampled, told with its line, and never called healthy unseen."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import stoker
from doctor_scripts import script
from stoker.doctor.findings import Consultation
from stoker.doctor.measurements import MachineFacts
from stoker.doctor.probe import places, sampling
from stoker.doctor.rules import diagnose, why_unjudged
from stoker.doctor.scripts import replace_call, suggest_patch
from stoker.doctor.transcript import Process
from stoker.doctor.transcript_measures import measure
from stoker.measure.readings import Spread
from test_doctor_attach import row, state

# -- a sample of the training thread -------------------------------------------------------------------


def sampled(filename, body="", name="work"):
    """What the sampler says of a stack: this test, then a function of that name in a file of that name."""
    made = {"look": lambda: sampling.describe_training(sys._getframe(1))}
    source = f"def {name}():\n    {body or 'return look()'}\n"
    exec(compile(source, filename, "exec"), made)
    return made[name]()


def test_a_stack_is_told_by_its_files_and_names():
    assert sampled("/home/me/train.py", name="evaluate") == ("between", "/home/me/train.py:2")
    assert sampled("/home/me/train.py", name="get_batch") == ("data", "/home/me/train.py:2")
    assert sampled("/home/me/train.py", "decode = look; return decode()", "step")[0] == "data"
    assert sampled("/x/site-packages/torch/nn/modules/module.py")[0] == "model"
    assert sampled("/x/site-packages/torch/optim/sgd.py")[0] == "model"
    assert sampled("/x/site-packages/torch/utils/data/dataloader.py")[0] == "timed"
    assert sampled(f"{places.PROBE}/fetching.py")[0] == "timed"
    inside, line = sampled(f"{stoker.__path__[0]}/loader/loader.py")
    assert inside == "data"
    assert line.startswith(__file__), "the loop that iterates, not the loader's own code"


def test_a_real_module_is_the_model():
    told = []

    class Told(torch.nn.Module):
        def forward(self, x):
            told.append(sampling.describe_training(sys._getframe())[0])
            return x

    Told()(1)
    assert told == ["model"]


# -- samples to seconds --------------------------------------------------------------------------------


def measured(training, between=None, loaders=(), **values):
    rows = [row(seconds=0.02, loader=0 if loaders else -1, **values) for _ in range(40)]
    told = state(
        training=training, between=between or {}, loaders=list(loaders), torch={}, kind="optimizer"
    )
    return measure([Process(rows, [], told)], "python train.py", MachineFacts(cores=8))


def judged(found):
    findings = diagnose(found)
    return Consultation(found, tuple(findings), unjudged=why_unjudged(found, findings))


def test_samples_are_shares_of_the_step():
    found = measured({"model": 20, "data": 60, "between": 20}, {"a.py:5": 60, "a.py:9": 20})
    assert found.between_seconds == pytest.approx(0.016)
    assert [(one.where, round(one.seconds_per_step, 4)) for one in found.between] == [
        ("a.py:5", 0.012),
        ("a.py:9", 0.004),
    ]
    (finding,) = judged(found).findings
    assert finding.name == "slow-between-steps"
    assert finding.patch.where == "a.py:5"
    assert any("a.py:5: 12 ms per step (60%)" in line for line in finding.evidence)
    assert finding.gain.likely == pytest.approx(0.02 / 0.004, rel=0.3)


def test_time_that_the_clock_knows_is_not_shared_out_by_samples():
    site = {"family": "host", "where": "a.py:3", "call": "gc.collect", "calls": 40, "bytes": 0}
    rows = [row(seconds=0.200) for _ in range(40)]
    told = state(
        training={"model": 20, "between": 20, "timed": 4},
        between={"a.py:5": 20},
        modules=True,
        sites=[{**site, "seconds": 40 * 0.180}],
    )
    found = measure([Process(rows, [], told)], "python train.py", MachineFacts(cores=8))
    assert found.between_seconds == pytest.approx(0.010), "half of the 20 ms that no clock explains"


def test_a_step_that_is_mostly_the_model_is_healthy():
    assert judged(measured({"model": 95, "between": 5})).verdict == "nothing to fix"
    # A public script of 0.47 ms steps: 30 % at a line that prints, which takes 0.02 ms.
    rows = [row(seconds=4e-4, cpu=4e-4, backward=1e-4) for _ in range(40)]
    profile = {"gap_seconds": 1e-4, "gap_step_seconds": 8e-4}
    for stretched, left in ((profile, 6e-5), ({**profile, "gap_step_seconds": 4e-4}, 1.2e-4)):
        told = state(training={"between": 70, "model": 30}, between={"a:1": 70}, profile=stretched)
        found = measure([Process(rows, [], told)], "python train.py", MachineFacts(cores=2))
        assert found.between_seconds == pytest.approx(left)
    step = Spread(4e-4, 4e-4, 4e-4, 40)
    short = replace(measured({"model": 70, "between": 30}), step_seconds=step, compute_seconds=step)
    assert not diagnose(replace(short, between_seconds=9e-5))
    assert diagnose(replace(short, between_seconds=1.1e-4))


@pytest.mark.parametrize(("share", "is_told"), [(5, False), (9, True), (30, False)])
def test_what_is_too_little_for_a_finding_is_told(share, is_told):
    found = measured({"model": 100 - share, "between": share}, {"a.py:5": share})
    told = [note for note in found.notes if "as fast at most" in note]
    assert bool(told) == is_told
    assert all("9% of a step" in note and "a.py:5" in note and "× 1.10" in note for note in told)


@pytest.mark.parametrize(
    ("training", "told"),
    [
        ({}, "sampled 0 times only"),
        ({"model": 5, "between": 5}, "sampled 10 times only"),
        ({"between": 95, "timed": 5}, "no nn.Module was seen to work"),
    ],
)
def test_what_was_not_seen_is_not_called_healthy(training, told):
    found = judged(measured(training, {"a.py:5": 95}))
    assert not found.findings
    assert found.verdict.startswith("cannot judge: ")
    assert told in found.verdict
    assert found.to_json()["unjudged"] == found.unjudged


def test_a_module_too_small_to_be_sampled_is_known_by_its_parameters():
    told = state(training={"between": 40}, between={"a.py:5": 40}, modules=True)
    rows = [row(seconds=0.02) for _ in range(40)]
    found = measure([Process(rows, [], told)], "python train.py", MachineFacts(cores=8))
    assert found.between_seconds == pytest.approx(0.02)
    assert not found.unjudged
    (finding,) = judged(found).findings
    assert finding.gain.high <= 20, "a step always takes some time"


def test_loading_is_known_by_its_names_without_a_module():
    (finding,) = judged(measured({"data": 80, "between": 15, "timed": 5}, {"a.py:5": 80})).findings
    assert finding.name == "slow-between-steps"


# -- scripts -------------------------------------------------------------------------------------------


def test_a_sleep_in_a_script_is_found_where_it_stands(seen):
    for name in ("get_batch", "generator"):
        found = getattr(seen, name)
        (finding, *_) = judged(found).findings or [None]
        if finding is None and any("other work on this machine" in note for note in found.notes):
            continue  # where other work has the cores, nothing is judged
        assert finding is not None, found
        assert finding.name == "slow-between-steps"
        line = 1 + seen.paths[name].read_text()[
            : seen.paths[name].read_text().index("time.sleep")
        ].count("\n")
        assert finding.patch.where == f"{seen.paths[name]}:{line}"
        assert found.between_seconds > 0.5 * found.step_seconds.median
    assert "slow-between-steps" not in {one.name for one in judged(seen.slow_model).findings}


# -- stoker's Loader in the place of a DataLoader --------------------------------------------------------


def test_the_patch_puts_the_loader_in_the_place_of_the_call(tmp_path):
    path = script(
        tmp_path,
        "train",
        """
        from torch.utils.data import DataLoader
        loader = DataLoader(
            Images("img.h5"), batch_size=8, shuffle=True,
        )
        """,
        head="import torch\n",
    )
    line = path.read_text().splitlines().index("loader = DataLoader(") + 1
    diff = replace_call(f"{path}:{line}", "stoker.Loader('img.h5', 8)")
    (tmp_path / "edit.patch").write_text(diff)
    folder = path.anchor if not str(path).startswith(str(tmp_path.cwd())) else tmp_path.cwd()
    subprocess.run(
        ["patch", "-p1", "-d", str(folder), "-i", str(tmp_path / "edit.patch")], check=True
    )
    edited = path.read_text()
    assert "\nloader = stoker.Loader('img.h5', 8)\n" in edited
    assert edited.count("import stoker\n") == 1
    assert "DataLoader(\n" not in edited
    compile(edited, "train.py", "exec")
    assert replace_call(f"{path}:999", "x") is None
    assert replace_call(None, "x") is None


def test_a_suggestion_without_a_call_to_edit_names_the_code(tmp_path):
    from stoker.doctor.findings import Finding, Patch

    finding = Finding(
        "no-workers",
        "t",
        (),
        "r.",
        patch=Patch(where="gone.py:3", replacement="stoker.Loader('a')"),
    )
    assert "#   stoker.Loader('a')" in suggest_patch([finding])
