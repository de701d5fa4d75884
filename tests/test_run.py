"""From a config to a finished run: every recipe, resumed, cut, refused; the log and the choice of keys."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from run_makers import OPTIONS, dirty_table, make_store, settings_for
from stoker.config import parse_config, resolve
from stoker.errors import ConfigError, InputError
from stoker.recipes.catalogue import choose_recipe
from stoker.recipes.registry import find_recipe
from stoker.recipes.run import (
    as_json,
    fingerprint,
    open_run,
    run_folder,
    run_recipe,
    train_settings,
)
from stoker.report import Silent, read_run_log
from stoker.runs.reading import read_run
from stoker.store.fields import Dense
from stoker.train.checkpoint import load_checkpoint
from stoker.train.losses import NonFiniteError
from stoker.train.settings import TrainSettings
from stoker.train.trainer import AUGMENTED, History
from store_makers import write_store

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Told(Silent):
    """Keeps what it is told."""

    def __init__(self):
        self.lines, self.shown, self.totals, self.advanced = [], [], [], 0

    def start(self, label, total, unit):
        self.totals.append((label, total, unit))

    def advance(self, count=1):
        self.advanced += count

    def say(self, line):
        self.lines.append(line)

    def show(self, text):
        self.shown.append(text)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """Stores by kind, made once."""
    folder, made = tmp_path_factory.mktemp("stores"), {}

    def get(kind):
        if kind not in made:
            made[kind] = make_store(kind, folder / kind)
        return made[kind]

    return get


# -- whole runs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", OPTIONS)
def test_every_recipe_goes_from_a_config_to_judged_weights(kind, device, stores, tmp_path):
    store, told = stores(kind), Told()
    settings = settings_for(kind, store.path, tmp_path / "run")
    run = run_recipe(settings, device=device, progress=told)
    assert isinstance(run, History)
    assert (run.ended, run.recipe) == ("done", OPTIONS[kind][0])
    assert len(run.epochs) == 2
    assert run.best is not None
    assert run.best.parent == tmp_path / "run"
    assert np.isfinite(run.test["loss"])
    assert set(run.test) == set(run.val)
    assert run.monitor[0] in run.val
    assert set(run.baseline) & set(run.test)
    sign = 1 if run.monitor[1] else -1
    best = max(sign * report.metrics[run.monitor[0]] for report in run.epochs)
    assert run.val[run.monitor[0]] == pytest.approx(sign * best)
    json.dumps(as_json(run))
    (result,) = [
        line for line in read_run_log(tmp_path / "run" / "run.jsonl") if line.event == "result"
    ]
    assert result.values["test"] == run.test
    assert result.values["best"] == run.best.name
    notes = "\n".join(told.lines)
    for words in ("precision fp32", "step ", "data ", f"store: {store.path.resolve()}"):
        assert words in notes
        assert any(words in note for note in run.notes)
    assert (AUGMENTED in notes) == (kind == "segmentation")
    assert [line for line in told.lines if line.startswith("epoch 2/2  loss ")]
    count = run.epochs[0].num_samples
    if kind == "stateful":
        count = -(-count // 16) * 16  # rows of ended lanes are counted by the bar, not trained on
    assert told.totals[:2] == [("epoch 1/2", count, "samples"), ("epoch 2/2", count, "samples")]
    assert told.advanced == 2 * count


def test_the_test_samples_are_judged_by_the_best_weights(stores, tmp_path):
    # By hand, from the checkpoint alone: the metrics of the run are those of its best weights.
    from recipe_loops import judge_job

    store = stores("tabular")
    run = run_recipe(settings_for("tabular", store.path, tmp_path / "run"), device="cpu")
    job = choose_recipe(settings_for("tabular", store.path, tmp_path)).make_job(store, 0)
    job.model.load_state_dict(load_checkpoint(run.best).state["model"])
    by_hand = judge_job(job, store, job.model, 50, split="test")
    assert by_hand["accuracy"] == run.test["accuracy"]


def test_a_resumed_run_is_the_unbroken_run(stores, tmp_path):
    store = stores("forex")
    whole = run_recipe(settings_for("forex", store.path, tmp_path / "a"), device="cpu")
    # The schedule is over the epochs of the run, so a run that is to be resumed knows them too.
    cut = settings_for("forex", store.path, tmp_path / "b", "training.checkpoint_every_steps=7")
    stopped = StopAt(9)
    with pytest.raises(StopAt.CutError):
        run_recipe(cut, device="cpu", progress=stopped)
    rest = run_recipe(cut, resume=True, device="cpu")
    assert rest.losses == whole.losses[-len(rest.losses) :]
    assert 0 < len(rest.losses) < len(whole.losses)
    assert rest.test == whole.test
    again = run_recipe(cut, resume=True, device="cpu")
    assert (again.losses, again.epochs) == ([], [])
    assert again.test == whole.test


def test_a_run_that_is_interrupted_in_its_evaluation_is_not_done(stores, tmp_path):
    settings = settings_for("tabular", stores("tabular").path, tmp_path / "run")

    class Interrupted(Told):
        def say(self, line):
            if line.startswith("evaluating"):
                self.lines.append(read_run(tmp_path / "run").told)
                raise KeyboardInterrupt

    told = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        run_recipe(settings, device="cpu", progress=told)
    assert told.lines[-1].startswith("Still running")
    found = read_run(tmp_path / "run")
    assert found.state == "stopped"
    assert "2 epochs finished, its evaluation is not. `--resume` goes on." in found.told
    assert run_recipe(settings, resume=True, device="cpu").test
    assert read_run(tmp_path / "run").state == "done"


class StopAt(Silent):
    """Ends a run the hard way, in the middle of an epoch."""

    class CutError(Exception):
        pass

    def __init__(self, batches):
        self.left = batches

    def advance(self, count=1):
        self.left -= 1
        if not self.left:
            raise self.CutError


def test_a_folder_of_another_run_is_refused(stores, tmp_path):
    store = stores("tabular")
    settings = settings_for("tabular", store.path, tmp_path / "run")
    run_recipe(settings, device="cpu")
    with pytest.raises(InputError, match="checkpoints of an earlier run") as caught:
        run_recipe(settings, device="cpu")
    assert "--resume" in caught.value.fix
    other = settings_for("tabular", store.path, tmp_path / "run", "training.lr=0.5")
    with pytest.raises(InputError, match=r"learning_rate: 0\.003 in the checkpoint, 0\.5 now"):
        run_recipe(other, resume=True, device="cpu")
    longer = settings_for("tabular", store.path, tmp_path / "run", "training.epochs=3")
    assert len(run_recipe(longer, resume=True, device="cpu").epochs) == 1


def test_the_last_epoch_is_kept_however_rarely_is_saved(stores, tmp_path):
    every = ("training.epochs=3", "training.checkpoint_every_epochs=2", "training.keep_last=9")
    settings = settings_for("tabular", stores("tabular").path, tmp_path / "run", *every)
    run = run_recipe(settings, device="cpu")
    steps = sorted(path.name for path in (tmp_path / "run").glob("step-*.pt"))
    per_epoch = len(run.losses) // 3
    assert steps == [f"step-{per_epoch * epochs:09d}.pt" for epochs in (2, 3)]


def test_a_dirty_batch_is_named(tmp_path):
    store = dirty_table(tmp_path / "s")
    settings = settings_for("tabular", store.path, tmp_path / "run", "training.read_every=1",
                            "recipe.options.scale_inputs=false", "recipe.options.split=random")  # fmt: skip
    with pytest.raises(NonFiniteError, match="features column 2 is inf in sample 5") as caught:
        run_recipe(settings, device="cpu")
    assert caught.value.exit_code == 3


def test_a_student_learns_from_a_teachers_checkpoint(stores, tmp_path):
    store = stores("massspec")
    taught = run_recipe(
        settings_for("massspec-teacher", store.path, tmp_path / "teacher"), device="cpu"
    )
    option = f"recipe.options.teacher={json.dumps(str(taught.best))}"
    told = Told()
    run = run_recipe(
        settings_for("massspec", store.path, tmp_path / "run", option), device="cpu", progress=told
    )
    assert any(line.startswith("distilled: 0.3 hard") for line in told.lines)
    alone = run_recipe(settings_for("massspec", store.path, tmp_path / "alone"), device="cpu")
    assert run.losses != alone.losses
    wrong = f"recipe.options.teacher={json.dumps(str(alone.best))}"
    with pytest.raises(InputError, match="is a checkpoint of massspec"):
        run_recipe(settings_for("massspec", store.path, tmp_path / "no", wrong), device="cpu")


def test_max_training_samples_and_drop_last(stores, tmp_path):
    most = "data.memory_efficient_mode.ram_32gb_mode.max_training_samples=50"
    settings = settings_for(
        "tabular", stores("tabular").path, tmp_path / "run", most, "data.drop_last=true"
    )
    run = run_recipe(settings, device="cpu")
    assert [report.num_samples for report in run.epochs] == [48, 48]
    assert any("50 of 160 training samples, drawn by the seed" in note for note in run.notes)


def test_a_part_of_the_samples_keeps_every_class(tmp_path):
    # In the file one class comes after the other: the first samples would be of one class alone.
    labels = np.repeat([0, 1, 2], [160, 120, 20])
    features = np.random.default_rng(0).normal(size=(300, 4)).astype("f4")
    store = write_store(tmp_path / "s", [{"features": Dense(features), "targets": Dense(labels)}])
    most = "data.memory_efficient_mode.ram_32gb_mode.max_training_samples=60"
    drawn = []
    for seed in (0, 0, 1):
        settings = settings_for("tabular", store.path, tmp_path / "r", most, f"training.seed={seed}",
                                "recipe.options.split=random")  # fmt: skip
        with open_run(settings, device="cpu") as run:
            drawn.append(run.job.samples["train"])
            assert any("each class with its share" in note for note in run.job.notes)
    counts = np.bincount(labels[drawn[0]])
    assert counts.sum() == 60
    assert np.abs(counts - [32, 24, 4]).max() <= 3
    assert (np.diff(drawn[0]) > 0).all()
    assert np.array_equal(drawn[0], drawn[1])
    assert not np.array_equal(drawn[0], drawn[2])


def test_chunks_are_used_when_asked_for(stores, tmp_path):
    store = stores("tabular")
    gib = 3 * 40 * 40 / 2**30  # three slots of about forty rows
    settings = settings_for(
        "tabular", store.path, tmp_path / "run", f"gpu_optimization.chunk_size_gb={gib:.12f}"
    )
    told = Told()
    run = run_recipe(settings, device="cpu", progress=told)
    assert any(
        re.match(r"data chunked: .* for data was asked for, 3 slots of up to \d+ samples", line)
        for line in told.lines
    )
    assert run.epochs[0].num_samples == len(run_samples(store))


def run_samples(store):
    return find_recipe("tabular").make_job(store, {}, 0).samples["train"]


def test_augmentation_follows_the_config(stores, tmp_path):
    store = stores("segmentation")
    off = settings_for("segmentation", store.path, tmp_path / "off", "training.use_gpu_augmentation=false",
                       "training.epochs=1")  # fmt: skip
    told = Told()
    run_recipe(off, device="cpu", progress=told)
    assert AUGMENTED not in "\n".join(told.lines)
    on = settings_for("segmentation", store.path, tmp_path / "on", "training.use_gpu_augmentation=true",
                      "gpu_augmentation.brightness=0.4")  # fmt: skip
    chosen = choose_recipe(on).options
    assert (chosen.augmentation, chosen.brightness, chosen.rotation_degrees) == (
        "standard",
        0.4,
        15.0,
    )


def test_loss_and_wait_are_shown_while_training(stores, tmp_path, monkeypatch):
    from stoker.recipes import run as running

    monkeypatch.setattr(running, "_SHOW_SECONDS", 0.0)
    told = Told()
    settings = settings_for(
        "tabular", stores("tabular").path, tmp_path / "run", "training.read_every=2"
    )
    run = run_recipe(settings, device="cpu", progress=told)
    assert len(told.shown) == len(run.losses)
    assert re.fullmatch(r"loss [\d.e-]+  waited \d+%", told.shown[-1])


def test_the_seed_decides_everything(stores, tmp_path):
    store = stores("forex")
    runs = [
        run_recipe(
            settings_for(
                "forex",
                store.path,
                tmp_path / str(number),
                f"training.seed={seed}",
                "training.max_steps=4",
            ),
            device="cpu",
        )
        for number, seed in enumerate((4, 4, 5))
    ]
    assert runs[0].losses == runs[1].losses
    assert runs[0].losses != runs[2].losses


# -- from a config -------------------------------------------------------------------------------


def test_every_training_setting_reaches_the_trainer():
    text = """
training: {epochs: 3, precision: bf16, gradient_accumulation_steps: 2, clip_norm: 0.5, capture: off,
  compile: true, nonfinite: skip, read_every: 7, seed: 9, keep_last: 5, checkpoint_every_epochs: 4,
  checkpoint_every_steps: 11, max_steps: 99, patience: 3, min_delta: 0.1,
  survive_oom: false, activation_checkpointing: true, tensorboard: true}
gpu_optimization: {empty_cache_every_n_epochs: 2, log_gpu_stats_every_n_batches: 6}
data: {memory_efficient_mode: {ram_32gb_mode: {empty_cache_frequency: 8}}}
"""
    made = train_settings(resolve(parse_config(text)), ("miou", True)).to_json()
    plain = TrainSettings().to_json()
    same = {name for name, value in made.items() if value == plain[name]}
    assert same == {"leak_bytes"}, "a setting that no key changes"


def test_folder_of_a_run():
    assert str(run_folder(resolve(parse_config("recipe: {name: forex}")))) == "runs/forex"
    assert str(run_folder(resolve(parse_config("recipe: {name: 'a.b:Mine'}")))) == "runs/Mine"
    assert str(run_folder(resolve(parse_config("run: {dir: x/y}")))) == "x/y"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("training: {}", ["the config names no recipe", "forex, images", "stoker config init"]),
        ("recipe: {name: forx}", ["f.yaml:1:10 recipe.name", "no recipe 'forx'", "Try: forex"]),
        ("recipe: {name: 'no.module:Here'}", ["f.yaml:1:10 recipe.name", "no module 'no'"]),
        (
            "recipe:\n  name: forex\n  options:\n    d_modle: 64\n    layrs: 2",
            ["2 problems", "f.yaml:4:5 recipe.options.d_modle", "has no option 'd_modle'",
             "try: recipe.options.d_model", "f.yaml:5:5 recipe.options.layrs", "try: recipe.options.layers"],
        ),
        (
            "recipe:\n  name: forex\n  options: {d_model: big}",
            ["f.yaml:3:13 recipe.options.d_model", "'big'", "a whole number"],
        ),
        (
            "recipe: {name: forex, options: {heads: 3}}",
            ["f.yaml:1:33 recipe.options.heads", "a divisor of d_model"],
        ),
        (
            "recipe: {name: tabular, options: {output_bound: 5.0}}\ntraining: {output_bound: 10.0}",
            ["f.yaml:1:35 recipe.options.output_bound",
             "5.0 disagrees with 10.0 by training.output_bound (f.yaml:2:12)"],
        ),
        (
            "recipe: {name: segmentation, options: {epochs: 7}}\ntraining: {epochs: 9}",
            ["7 disagrees with 9 by training.epochs (f.yaml:2:12)", "delete recipe.options.epochs"],
        ),
        (
            "recipe: {name: segmentation, options: {augmentation: strong}}\ntraining: {use_gpu_augmentation: false}",
            ["'strong' disagrees with 'none' by training.use_gpu_augmentation (f.yaml:2:12)"],
        ),
        ("recipe: {name: massspec, options: {teacher: 5}}", ["f.yaml:1:36 recipe.options.teacher", "a text or null"]),
        ("recipe: {name: massspec-teacher, options: {teacher: x}}", ["has no option 'teacher'"]),
    ],
)  # fmt: skip
def test_options_are_refused_with_their_line(text, words):
    settings = resolve(parse_config(text, "f.yaml"))
    with pytest.raises(ConfigError) as caught:
        choose_recipe(settings)
    for word in words:
        assert word in str(caught.value)


def test_keys_older_than_the_recipes_reach_them():
    tabular = """
recipe: {name: tabular}
data: {batch_size: 64}
training: {init_gain: 0.5, output_bound: 10.0, output_bound_mode: clamp, gradient_accumulation_steps: 4}
"""
    options = choose_recipe(resolve(parse_config(tabular))).options
    assert (options.init_gain, options.output_bound, options.output_bound_mode) == (
        0.5,
        10.0,
        "clamp",
    )
    assert options.batch_size == 256
    stateful = "recipe: {name: forex, options: {stateful: true}}\ntraining: {batch_size: 24}"
    assert choose_recipe(resolve(parse_config(stateful))).options.lanes == 24
    preset = """
recipe: {name: segmentation, options: {augmentation: minimal}}
training: {use_gpu_augmentation: true, epochs: 12}
gpu_augmentation: {horizontal_flip_prob: 0.25}
"""
    options = choose_recipe(resolve(parse_config(preset))).options
    assert (options.augmentation, options.horizontal_flip_prob, options.brightness) == (
        "minimal",
        0.25,
        None,
    )
    assert options.epochs == 12


def test_keys_without_effect_are_noted():
    text = "recipe: {name: forex}\ndata: {num_workers: 4}\ntraining: {init_gain: 0.5, use_gpu_augmentation: true}"
    notes = choose_recipe(resolve(parse_config(text, "f.yaml"))).noted_settings.notes
    assert any("data.num_workers: 4 (f.yaml:2:8) has no effect" in note for note in notes)
    both = "training.init_gain (f.yaml:3:12); training.use_gpu_augmentation (f.yaml:3:28)"
    assert f"{both}: no effect, the recipe forex does not use it" in notes
    assert choose_recipe(resolve(parse_config("recipe: {name: forex}"))).notes == ()


@pytest.mark.parametrize(
    ("name", "rate"), [("massspec", 1e-3), ("massspec-teacher", 1e-3), ("segmentation", 8e-4), ("forex", 1e-3)]
)  # fmt: skip
def test_a_config_without_a_rate_has_the_recipes(name, rate):
    settings = choose_recipe(resolve(parse_config(f"recipe: {{name: {name}}}"))).settings
    assert settings.learning_rate == rate
    assert settings.is_default("training.lr")
    assert settings.reasons["training.lr"].startswith("the recipe's default, ")
    again = choose_recipe(settings.changed({"training.batch_size": 7})).settings
    assert again.batch_size == 7, "what a tuner has changed is not filled in again"


def test_a_run_trains_with_the_recipes_rate_and_says_where_it_comes_from(tmp_path):
    store = make_store("tabular", tmp_path / "store")
    text = (
        f"recipe: {{name: tabular, store: {store.path}, options: {{hidden: [4], lr_rule: none}}}}\n"
    )
    text += f"training: {{epochs: 1, batch_size: 64}}\nrun: {{dir: {tmp_path / 'run'}}}\n"
    with open_run(resolve(parse_config(text, "f.yaml")), device="cpu") as run:
        loader = run.make_train_loader()
        trainer = run.make_trainer(loader, None, Told(), run_dir=None)
        assert {group["initial_lr"] for group in trainer.optimizer.param_groups} == {1e-3}
        notes = [note.text for note in run._notes(loader)]
        said = "learning rate 0.001: the recipe's default, AdamW, for reference_batch samples per update"
        assert any(note.startswith(said) for note in notes)
        assert "batch size 64: training.batch_size (f.yaml:2:23)" in notes
        assert "epochs 1: training.epochs (f.yaml:2:12)" in notes
        assert "precision auto: default" in notes
        loader.close()
    other = open_run(resolve(parse_config(text.replace("epochs: 1", "lr: 3e-2"))), device="cpu")
    with other as run, run.make_train_loader() as loader:
        trainer = run.make_trainer(loader, None, Told(), run_dir=None)
        assert {group["initial_lr"] for group in trainer.optimizer.param_groups} == {3e-2}


def test_a_run_needs_a_store(tmp_path):
    with pytest.raises(InputError, match="names no store") as caught:
        run_recipe(resolve(parse_config("recipe: {name: forex}")), device="cpu")
    assert "stoker pack bars" in caught.value.fix


def test_the_fingerprint_is_of_the_data(tmp_path):
    one, same = make_store("tabular", tmp_path / "a"), make_store("tabular", tmp_path / "b")
    other = make_store("windows", tmp_path / "c")
    assert fingerprint(one) == fingerprint(same) != fingerprint(other)
