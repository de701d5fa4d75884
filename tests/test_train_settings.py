"""One vocabulary: a Trainer takes the names of config files, and what a config file comes to."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from stoker.config import Config, TrainOptions, load_config, parse_config, resolve
from stoker.config.options import SYNONYMS
from stoker.config.resolve import PLACES
from stoker.config.tree import key_schemas
from stoker.errors import ConfigError, InputError
from stoker.train.settings import CLIPPED, TrainSettings, read_config
from stoker.train.trainer import Trainer
from test_config import LEAVES, another_value, nested, problems_of

SHARED = [f"training.{entry.name}" for entry in fields(TrainOptions)]


def make_trainer(config, rate=0.1):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    batches = [(torch.ones(4, 3), torch.ones(4, 1))]
    optimizer = torch.optim.SGD(model.parameters(), rate)
    return Trainer(model, batches, None, torch.nn.MSELoss(), optimizer, None, config, "cpu")


@pytest.mark.parametrize("home", SHARED)
def test_every_name_of_a_config_file_means_the_same_in_a_mapping(home):
    """The value that a file gives the trainer is the one that a mapping with the file's name gives."""
    question = home.rpartition(".")[2]
    for key in PLACES[home]:
        value = another_value(LEAVES[key])
        from_file, _ = read_config(resolve(parse_config(nested({key: value}))))
        from_mapping, notes = read_config({key.rpartition(".")[2]: value})
        assert getattr(from_file, question) == getattr(from_mapping, question)
        assert getattr(from_mapping, question) != getattr(TrainSettings(), question)
        assert notes == []


def test_a_yaml_file_reaches_a_trainer_with_ones_own_model(tmp_path):
    file = tmp_path / "my.yaml"
    file.write_text(
        "training: {use_amp: false, gradient_accumulation_steps: 4, epochs: 3, lr: 8e-4, clip_norm: 2}\n"
    )
    settings = resolve(load_config(file))
    trainer = make_trainer(settings, settings.training.lr)
    assert trainer.settings == TrainSettings(
        epochs=3, precision="fp32", gradient_accumulation_steps=4, clip_norm=2, seed=0,
        log_gpu_stats_every_n_batches=100,
    )  # fmt: skip
    assert len(trainer.fit().epochs) == 3
    assert not any("training.lr" in note for note in trainer.history.notes)
    said = (
        f"training.lr ({file}:1:71) is 0.0008, but the optimizer was made with 0.1, which is used"
    )
    assert said in make_trainer(settings).history.notes


def test_a_mapping_with_the_names_of_a_section():
    section = {
        "use_amp": True,
        "gradient_accumulation_steps": 4,
        "batch_size": 128,
        "capture": False,
    }
    trainer = make_trainer(section)
    assert trainer.settings.gradient_accumulation_steps == 4
    assert (trainer.settings.precision, trainer.settings.capture) == ("auto", "off")
    assert any(
        note.startswith("batch_size: no effect on a Trainer") for note in trainer.history.notes
    )
    assert TrainSettings.of({"accumulation_steps": 4}) == TrainSettings(accumulation_steps=4)


@pytest.mark.parametrize(
    ("use_amp", "precision", "comes_to"),
    [
        (True, None, "auto"), (False, None, "fp32"), (False, "auto", "fp32"), (True, "bf16", "bf16"),
        (False, "tf32", "tf32"), (True, "fp32", None), (False, "fp16", None),
    ],
)  # fmt: skip
def test_use_amp_and_precision_are_settled_as_in_a_file(use_amp, precision, comes_to):
    given = {"use_amp": use_amp} | ({} if precision is None else {"precision": precision})
    if comes_to is None:
        with pytest.raises(InputError, match="leave use_amp out"):
            TrainSettings.of(given)
        with pytest.raises(ConfigError, match="disagrees"):
            resolve(Config.model_validate({"training": given}))
        return
    assert TrainSettings.of(given).precision == comes_to
    assert resolve(Config.model_validate({"training": given})).training.precision == comes_to


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"epoch": 3}, ["no training setting 'epoch'", "Try: epochs"]),
        ({"max_grad_norm": 1.0}, ["'max_grad_norm'", "Try: clip_norm"]),
        ({"training": {"epochs": 3}}, ["the section 'training'", "resolve(load_config("]),
        ({"use_amp": 1}, ["use_amp is 1", "True or False"]),
        ({"accumulation_steps": 2, "gradient_accumulation_steps": 3}, ["one of the two names"]),
        ({"store": "x"}, ["no training setting 'store'"]),
        ({3: 4}, ["no training setting 3"]),
        (["epochs"], ["of the type list"]),
        ("my.yaml", ["of the type str", "Trainer.from_config('my.yaml'"]),
    ],
)
def test_what_a_trainer_cannot_take_is_named(config, words):
    with pytest.raises(InputError) as caught:
        read_config(config)
    for word in words:
        assert word in str(caught.value)


def test_old_names_lead_to_keys_that_exist_in_a_file_on_set_and_in_python():
    assert set(SYNONYMS.values()) <= set(key_schemas())
    for word in ("max_grad_norm", "num_epochs", "random_seed"):
        key = SYNONYMS[word]
        section, _, name = key.rpartition(".")
        assert any(key in line for line in problems_of(f"{section}: {{{word}: 1}}"))
        assert any(key in line for line in problems_of("", [f"{section}.{word}=1"]))
        with pytest.raises(InputError, match=f"Try: {name}"):
            read_config({word: 1})


@pytest.mark.parametrize("config", [None, {"epochs": 1}, TrainSettings()])
def test_a_trainer_of_ones_own_clips_nothing_unless_asked(config, capsys):
    trainer = make_trainer(config)
    assert trainer.settings.clip_norm is None
    model = torch.nn.Linear(3, 1)
    model.load_state_dict(trainer.model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.nn.MSELoss()(model(torch.ones(4, 3)), torch.ones(4, 1)).backward()
    with torch.no_grad():
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    assert norm > 1
    optimizer.step()
    trainer.fit()
    assert torch.equal(model.weight, trainer.model.weight)
    assert "clipped" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "is_told"), [("{lr: 0.1}", True), ("{lr: 0.1, clip_norm: null}", False)]
)
def test_gradients_that_are_clipped_by_a_files_default_alone_are_told(text, is_told, capsys):
    trainer = make_trainer(resolve(parse_config(f"training: {text}")))
    assert (trainer.settings.clip_norm is not None) == is_told
    assert any(CLIPPED in note for note in trainer.history.notes) == is_told
    assert capsys.readouterr().out == ""
    trainer.fit()
    assert (CLIPPED in capsys.readouterr().out) == is_told
    trainer.fit(quiet=True)
    assert capsys.readouterr().out == ""


def test_a_run_that_was_clipped_by_an_older_default_is_not_resumed_without(tmp_path):
    def run(clip_norm, resume):
        model = torch.nn.Linear(3, 1)
        batches = [(torch.ones(4, 3), torch.ones(4, 1))] * 2
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        config = {"epochs": 1 + resume} | ({} if clip_norm is None else {"clip_norm": clip_norm})
        loss = torch.nn.MSELoss()
        trainer = Trainer(
            model, batches, None, loss, optimizer, None, config, "cpu", run_dir=tmp_path / "run"
        )
        return trainer.fit(resume=resume, quiet=True)

    run(1.0, resume=False)
    with pytest.raises(InputError, match=r"settings.clip_norm: 1.0 in the checkpoint, null now"):
        run(None, resume=True)
    assert len(run(1.0, resume=True).losses) == 2
