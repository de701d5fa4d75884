"""The demo: the same model trained both ways, the same losses, figures that hang together."""

from __future__ import annotations

import json

import h5py
import pytest
import torch
from typer.testing import CliRunner

import forked_scripts
from stoker.cli.main import app
from stoker.demo.story import _free_folder, examine, run_demo
from stoker.demo.training import OPTIONS, TRAINED, WINDOWS, train_both_ways
from stoker.errors import InputError
from stoker.report import Silent
from stoker.store.reader import open_store

pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("demo")
    with pytest.MonkeyPatch.context() as patch:
        # One short timeframe, a small model and a quarter of the samples: the story is the same, in a
        # fifth of the time.
        patch.setitem(OPTIONS, "timeframes", ["H4"])
        patch.setitem(OPTIONS, "d_model", 8)
        for module in ("story", "training"):
            patch.setattr(f"stoker.demo.{module}.TRAINED", ("H4",))
        patch.setattr("stoker.demo.training._TRAINED_SAMPLES", 256)
        patch.setattr("stoker.demo.story._SECONDS_PER_TRY", 0.1)
        patch.setattr(examine, "__defaults__", (10,))  # steps of the two scripts under the doctor
        patch.setattr("stoker.doctor.attach._start", forked_scripts.start)
        yield folder, run_demo(folder, weeks=3)
    torch.set_num_threads(before)


def test_both_ways_train_the_same_model_on_the_same_batches(demo):
    _, result = demo
    assert result.naive.num_samples == result.trained.num_samples == 256
    # Equal losses in every epoch: same first weights, same samples, same order, same updates.
    assert result.naive.losses == pytest.approx(result.trained.losses, rel=1e-4)
    assert result.trained.losses[-1] < result.trained.losses[0]
    for way in (result.naive, result.trained):
        assert len(way.seconds) == len(way.losses) == 3
        assert way.samples_per_second == pytest.approx(way.num_samples / min(way.seconds))
        assert 0 <= way.wait_share < 1


def test_reading_both_ways_gives_the_same_bytes(demo):
    folder, result = demo
    assert result.series.window_bytes == result.materialised.window_bytes
    assert result.materialised.stored_bytes > 20 * result.series.stored_bytes
    assert result.plan.tier == "resident"
    assert not (folder / "windows.h5").exists()


def test_the_command_tells_the_story_and_keeps_its_promise(demo, monkeypatch):
    folder, result = demo
    monkeypatch.setattr("stoker.demo.story.run_demo", lambda *given, **options: result)
    command = ["demo", "--folder", str(folder), "--weeks", "4"]
    facts = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)
    assert facts["findings"] == []
    assert facts["materialised"]["stored_bytes"] > 20 * facts["series"]["stored_bytes"]
    assert facts["series"]["window_bytes"] == facts["materialised"]["window_bytes"]
    told = CliRunner().invoke(app, command)
    assert told.exit_code == 0
    for words in ("x smaller", "x faster", str(result.page), "Next:"):
        assert words in told.stdout
    # On a machine that is busy with other tests the doctor may not be able to tell.
    assert "nothing to fix" in told.stdout or "cannot judge: " in told.stdout
    assert CliRunner().invoke(app, ["verify", str(folder / "store")]).exit_code == 0


def test_a_folder_that_is_a_file_is_the_users_mistake(tmp_path):
    file = tmp_path / "file"
    file.write_text("mine")
    for given, words in (
        (file, f"{file} is a file"),
        (file / "sub", f"cannot make {file / 'sub'}"),
    ):
        done = CliRunner().invoke(app, ["demo", "--folder", str(given)])
        assert isinstance(done.exception, InputError)
        assert words in str(done.exception)
        assert "stoker demo --folder stoker-demo" in str(done.exception)
    assert file.read_text() == "mine"


def test_other_windows_give_other_losses(demo, tmp_path):
    # The plain way really reads its file: windows of zeros train another model.
    folder, result = demo
    with open_store(folder / "store") as store:
        count = store.num_samples
        with h5py.File(tmp_path / "w.h5", "w") as file:
            for name, window in WINDOWS:
                if name in TRAINED:
                    file.create_dataset(name, (count, window, store.fields[name].shape[0]), "f4")
            file["targets"] = store.read_rows("targets", 0, count)
        naive, trained = train_both_ways(store, tmp_path / "w.h5", seed=0)
    assert trained.losses == pytest.approx(result.trained.losses, rel=1e-4)
    assert abs(naive.losses[0] - trained.losses[0]) > 1e-5


def test_the_windows_file_goes_even_when_the_demo_is_cut(tmp_path):
    class CutError(Exception):
        pass

    class Cut(Silent):
        def say(self, line):
            if line.startswith("training"):
                raise CutError

    with pytest.raises(CutError):
        run_demo(tmp_path, weeks=3, progress=Cut())
    assert not (tmp_path / "windows.h5").exists()
    assert (tmp_path / "store" / "store.json").exists()


def test_the_doctor_names_the_usual_way_and_has_nothing_to_say_of_ours(demo):
    folder, result = demo
    usual, ours = result.examined.usual, result.examined.ours
    top = usual.findings[0].name if usual.findings else None
    # Where other work has the cores, more workers gain nothing, and the doctor says that instead.
    is_crowded = any("other work on this machine" in note for note in usual.measurements.notes)
    assert is_crowded or top in ("no-workers", "starved-by-loader", "decode-bound")
    assert not [finding for finding in ours.findings if finding.gain.likely > 1.3]
    assert result.examined.predicted > result.examined.rate(usual)
    assert "usual_way.py" in (folder / "doctor.html").read_text()


def test_the_config_is_trained_tuned_and_reported(demo):
    folder, result = demo
    assert [report.epoch for report in result.run.epochs] == [0, 1]
    assert result.tuned.before.rate > 0
    page = result.page.read_text()
    assert page.startswith("<!doctype html>")
    assert "forex" in page
    assert result.run.run_dir == folder / "run"


def test_a_second_demo_in_the_same_folder_keeps_the_first_run(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run-2").mkdir()
    assert _free_folder(tmp_path / "run") == tmp_path / "run-3"
    assert _free_folder(tmp_path / "other") == tmp_path / "other"
