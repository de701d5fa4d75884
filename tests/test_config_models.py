"""One list of settings: the models. Files, Python, old names, old checkpoints and old logs all lead there."""

from __future__ import annotations

import json
from dataclasses import fields, replace

import pytest
import torch

from stoker.config import Settings, TrainOptions, parse_config, resolve
from stoker.config.options import FORMER, LAYOUTS, SECTION_RANKS
from stoker.config.resolve import PLACES, as_key
from stoker.config.tree import ROOMS, key_schemas
from stoker.errors import ConfigError, InputError
from stoker.runs.reading import read_run
from stoker.train.checkpoint import Checkpoints
from stoker.train.settings import TrainSettings
from stoker.train.trainer import Trainer

BATCHES = [(torch.ones(4, 3), torch.ones(4, 1))] * 4


def own(path, **more):
    return Trainer.from_config(
        path, torch.nn.Linear(3, 1), BATCHES, None, torch.nn.MSELoss(), device="cpu", **more
    )


def test_a_key_a_field_of_its_model_and_an_attribute_of_settings_have_one_name():
    settings = resolve(parse_config(""))
    assert {entry.name for entry in fields(Settings)} - {"origins", "notes"} == set(ROOMS)
    for section, model in ROOMS.items():
        for entry in fields(model):
            key = f"{section}.{entry.name}"
            assert settings.get(key) == getattr(getattr(settings, section), entry.name)
            assert key in settings.origins
            assert key in key_schemas()
            assert as_key(key) == key


def test_other_places_lead_to_keys_of_the_models():
    assert set(LAYOUTS.values()) <= set(PLACES)
    assert not set(LAYOUTS) & set(PLACES)
    assert set(FORMER.values()) <= set(PLACES)
    assert {key.rpartition(".")[0] for key in LAYOUTS} <= set(SECTION_RANKS)


def test_a_changed_value_is_checked_as_in_a_file():
    settings = resolve(parse_config("training: {lr: 0.5}"))
    assert settings.changed({"training.lr": 0.25}).training.lr == 0.25
    for changes, word in (
        ({"training.batch_size": 0}, "batch_size is 0"),
        ({"data.chunk_size_gb": "2"}, "chunk_size_gb is '2'"),
        ({"training.epoch": 3}, "no option 'epoch'"),
    ):
        with pytest.raises(InputError, match=word):
            settings.changed(changes)


def test_former_names_still_work():
    settings = resolve(parse_config("training: {lr: 0.5}\nrun: {dir: here}\n"))
    assert settings.learning_rate == 0.5
    assert settings.run_dir == "here"
    assert settings.batch_size == settings.training.batch_size
    assert settings.chunk_bytes is None
    assert settings.is_default("accumulation_steps")
    assert not settings.is_default("learning_rate")
    assert TrainSettings(accumulation_steps=3).gradient_accumulation_steps == 3
    assert TrainSettings(accumulation_steps=3).accumulation_steps == 3
    for thing in (settings, settings.training):
        with pytest.raises(AttributeError, match="no_such"):
            _ = thing.no_such


def test_a_trainer_has_the_keys_of_the_section_and_three_of_its_own():
    names = {entry.name for entry in fields(TrainSettings)}
    assert names - {entry.name for entry in fields(ROOMS["training"])} == {
        "monitor", "maximise", "leak_bytes",
    }  # fmt: skip
    assert {entry.name for entry in fields(TrainOptions)} < names


# -- a config file and a model of one's own ---------------------------------------------------------


def test_a_file_trains_a_model_of_ones_own(tmp_path):
    file = tmp_path / "my.yaml"
    file.write_text(
        f"training: {{lr: 8e-4, epochs: 2, batch_size: 4, clip_norm: 2}}\nrun: {{dir: {tmp_path}/run}}\n"
    )
    trainer = own(file, overrides=["training.epochs=3"])
    assert isinstance(trainer.optimizer, torch.optim.AdamW)
    assert trainer.optimizer.param_groups[0]["lr"] == 8e-4
    assert (trainer.settings.epochs, trainer.settings.clip_norm) == (3, 2)
    assert len(trainer.fit().epochs) == 3
    assert list((tmp_path / "run").glob("step-*.pt"))
    notes = trainer.history.notes
    assert f"AdamW, learning rate 0.0008: training.lr ({file}:1:12)" in notes
    said = f"training.batch_size ({file}:1:33): no effect on a Trainer"
    assert any(note.startswith(said) for note in notes)


def test_what_is_given_in_python_comes_before_the_file(tmp_path, capsys):
    file = tmp_path / "my.yaml"
    file.write_text(f"training: {{lr: 8e-4}}\nrun: {{dir: {tmp_path}/a}}\n")
    model = torch.nn.Linear(3, 1)
    slow = torch.optim.SGD(model.parameters(), 0.1)
    trainer = Trainer.from_config(
        file, model, BATCHES, None, torch.nn.MSELoss(), slow, device="cpu", run_dir=tmp_path / "b"
    )
    capsys.readouterr()
    trainer.fit()
    assert "but the optimizer was made with" in "".join(capsys.readouterr())
    assert trainer.optimizer is slow
    assert (tmp_path / "b" / "run.jsonl").exists()
    assert not (tmp_path / "a").exists()
    assert any("but the optimizer was made with" in note for note in trainer.history.notes)


def test_a_file_with_mistakes_names_their_lines(tmp_path):
    file = tmp_path / "my.yaml"
    file.write_text("training:\n  lr: fast\n")
    with pytest.raises(ConfigError, match=r"my\.yaml:2:3 training\.lr"):
        own(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        own(tmp_path / "absent.yaml")


# -- older files ------------------------------------------------------------------------------------


def test_a_checkpoint_with_former_names_is_resumed(tmp_path):
    file = tmp_path / "my.yaml"
    file.write_text(
        f"training: {{epochs: 1, gradient_accumulation_steps: 2}}\nrun: {{dir: {tmp_path}/run}}\n"
    )
    trainer = own(file)
    trainer.fit()
    older = trainer.identity
    older["settings"]["accumulation_steps"] = older["settings"].pop("gradient_accumulation_steps")
    Checkpoints(tmp_path / "run").save(trainer.state_dict(), 99, 1, {}, older)
    rest = own(file, overrides=["training.epochs=2"])
    assert len(rest.fit(resume=True).epochs) == 1
    other = own(file, overrides=["training.gradient_accumulation_steps=4"])
    with pytest.raises(
        InputError, match=r"gradient_accumulation_steps: 2 in the checkpoint, 4 now"
    ):
        other.fit(resume=True)


def test_a_run_log_with_former_names_is_read(tmp_path):
    values = {"recipe": "forex", "learning_rate": 0.1, "epochs": 3, "run_dir": "x", "batch_size": 8}
    told = {"settings": values, "reasons": {"learning_rate": "training.lr"}}
    line = {"time": 1.0, "event": "config", "step": None, "epoch": None, "values": told}
    (tmp_path / "run.jsonl").write_text(json.dumps(line) + "\n")
    run = read_run(tmp_path)
    assert run.reasons == {"training.lr": "training.lr"}
    assert run.config == {
        "recipe.name": "forex", "training.lr": 0.1, "training.epochs": 3, "run.dir": "x",
        "training.batch_size": 8,
    }  # fmt: skip


def test_a_model_is_frozen_and_replaced_as_a_whole():
    made = TrainSettings(epochs=3)
    with pytest.raises(AttributeError):
        made.epochs = 4
    assert replace(made, epochs=4).epochs == 4
    with pytest.raises(InputError, match="a whole number, 0 or more"):
        replace(made, epochs=-1)
