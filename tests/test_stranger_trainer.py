"""What strangers give a Trainer and a captured step at first: too little, classes, and types that do not fit."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import stoker
from paper_graphs import use_paper_graphs
from stoker import Loader, Trainer
from stoker.augment import Compose, MixUp, RandomHorizontalFlip
from stoker.errors import InputError

X = np.random.default_rng(0).normal(size=(33, 6)).astype("f4")
Y = X[:, :1].copy()


def make(model: Any, data: Any, **given: Any) -> Trainer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    options = {"criterion": nn.functional.mse_loss, "optimizer": optimizer, "config": {"epochs": 1}}
    return Trainer(model, Loader(data, 8), **{**options, **given})


def test_validation_may_be_left_out() -> None:
    assert make(nn.Linear(6, 1), (X, Y)).fit(quiet=True).epochs[0].num_samples == 33


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"criterion": None}, "no criterion was given"),
        ({"criterion": nn.MSELoss}, r"the class MSELoss[\s\S]*MSELoss\(\)"),
        ({"criterion": "mse"}, "a criterion that is a str"),
        ({"criterion": torch.optim.SGD([torch.zeros(1)])}, "the criterion is an optimizer, SGD"),
        ({"optimizer": None}, "no optimizer was given"),
        ({"optimizer": torch.optim.SGD}, "an optimizer that is a type"),
    ],
)
def test_what_is_missing_or_a_class_is_named(given: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        make(nn.Linear(6, 1), (X, Y), **given)


@pytest.mark.parametrize(("model", "words"), [(nn.Linear, "the class Linear"), (3, "a int")])
def test_a_model_that_is_none_is_named(model: Any, words: str) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    with pytest.raises(InputError, match=words):
        Trainer(model, Loader((X, Y), 8), criterion=nn.MSELoss(), optimizer=optimizer)


@pytest.mark.parametrize(
    ("data", "model", "criterion", "words"),
    [
        ((X.astype("f8"), Y), nn.Linear(6, 1), nn.MSELoss(), r"inputs float64 \(8, 6\)"),
        ((X, np.zeros(33, "i4")), nn.Linear(6, 3), nn.CrossEntropyLoss(), r"targets int32 \(8,\)"),
        (
            (X, Y),
            nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)),
            nn.MSELoss(),
            r"inputs float32 \(1, 6\).*drop_last=True",
        ),
    ],
)
def test_an_error_of_torch_in_the_step_tells_what_the_step_was_given(
    data: Any, model: nn.Module, criterion: Any, words: str
) -> None:
    with pytest.raises((RuntimeError, ValueError)) as raised:
        make(model, data, criterion=criterion).fit(quiet=True)
    (note,) = raised.value.__notes__
    assert re.search(words, note)


def make_batches(kind: str, wanted: np.ndarray) -> Any:
    """Return the same batches in a form."""
    if kind == "pairs":
        return [(torch.from_numpy(X[:8]), torch.from_numpy(wanted[:8]))] * 3
    if kind == "dicts":
        return [{"images": torch.from_numpy(X[:8]), "labels": torch.from_numpy(wanted[:8])}] * 3
    if kind == "names":
        return Loader({"features": X, "targets": wanted}, 8)
    return Loader({"here": X, "there": wanted}, 8, as_tuple=("here", "there"))


FORMS = ("pairs", "dicts", "names", "tuples")


@pytest.mark.parametrize("kind", FORMS)
def test_half_precision_weights_with_float32_inputs_are_answered_with_what_to_type(
    kind: str,
) -> None:
    batches = make_batches(kind, Y)

    def train(precision: str = "fp32", **given: Any) -> list[float]:
        model = nn.Linear(6, 1).bfloat16()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        config = {"epochs": 1, "precision": precision}
        trainer = Trainer(model, batches, None, nn.MSELoss(), optimizer, config=config, **given)
        return trainer.fit(quiet=True).losses

    with pytest.raises(RuntimeError, match="same dtype") as raised:
        train()
    (note,) = raised.value.__notes__
    advised = re.search(r"unpack=(lambda batch: .*\)) does\.", note)
    assert advised is not None
    assert "precision='bf16'" in note
    assert np.isfinite(train(unpack=eval(advised[1]))).all()
    assert np.isfinite(train("bf16")).all()


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("kind", FORMS)
def test_the_advice_for_targets_of_another_shape_fits_the_batch(kind: str) -> None:
    batches = make_batches(kind, Y.reshape(-1))

    def train(**given: Any) -> list[float]:
        model = nn.Linear(6, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        trainer = Trainer(
            model, batches, None, nn.MSELoss(), optimizer, config={"epochs": 1}, **given
        )
        return trainer.fit(quiet=True).losses

    with pytest.raises(InputError) as refused:
        train()
    advised = refused.value.fix.removeprefix("Trainer(..., unpack=").removesuffix(")")
    assert np.isfinite(train(unpack=eval(advised))).all()
    with pytest.raises(InputError, match=r"targets.reshape\(-1, 1\) in unpack="):
        train(unpack=lambda batch: tuple(batch.values() if isinstance(batch, dict) else batch))


class Graphs:
    """A batch that is an object, as of PyG."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y = x, y


class ReadsGraphs(nn.Linear):
    def forward(self, batch: Any) -> torch.Tensor:
        return super().forward(batch.x)


def test_a_batch_that_is_an_object_is_answered_with_its_targets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batches = [Graphs(torch.from_numpy(X[:8]), torch.from_numpy(Y[:8])) for _ in range(8)]

    def train(**given: Any) -> Trainer:
        model = ReadsGraphs(6, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        config = {"epochs": 1, "precision": "fp32"}
        trainer = Trainer(
            model, batches, None, nn.MSELoss(), optimizer, None, config, "cpu", **given
        )
        trainer.fit(quiet=True)
        return trainer

    with pytest.raises(InputError) as refused:
        train()
    advised = refused.value.fix.removeprefix("Trainer(..., unpack=").removesuffix(")")
    assert advised == "lambda batch: (batch, batch.y)"
    use_paper_graphs(monkeypatch)
    trainer = train(unpack=eval(advised))
    assert "eager: a batch has a Graphs, not tensors" in str(trainer._captured.reason)


def test_a_captured_step_gets_batches_in_the_form_of_its_loader() -> None:
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = Loader((X, Y), 8)

    def step(batch: Any) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    captured = stoker.capture(step, loader=loader, model=model, optimizer=optimizer)
    assert len([captured(index) for index in loader.index_batches()]) == 5


def test_mix_of_a_list_says_which_dict_to_type(tmp_path: Any) -> None:
    for name in "ab":
        stoker.pack_from({"x": np.arange(3)}, tmp_path / name)
    paths = [str(tmp_path / name) for name in "ab"]
    with pytest.raises(InputError) as refused:
        stoker.mix(paths)  # type: ignore[arg-type]
    mixture = eval(refused.value.fix, {"mix": stoker.mix})
    assert mixture.store.num_samples == 6
    assert "store_of" not in repr(mixture)


def test_a_group_that_is_added_between_epochs_is_clipped_with_the_others(device: str) -> None:
    """Layers are often thawed one after the other, each with a group of its own."""

    def make() -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).to(device)
        model[0].requires_grad_(False)
        x = torch.randn(10, 8, 6, device=device)
        return model, torch.optim.Adam(model[2].parameters(), lr=0.01), [(b, b[:, :1]) for b in x]

    def thaw(model: Any, optimizer: torch.optim.Optimizer) -> None:
        model[0].requires_grad_(True)
        optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.1})

    plain, optimizer, batches = make()
    for epoch in range(2):
        for x, y in batches:
            nn.functional.mse_loss(plain(x), y).backward()
            nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()
        if not epoch:
            thaw(plain, optimizer)
    model, optimizer, batches = make()
    config = {"precision": "fp32", "clip_norm": 0.01}
    trainer = Trainer(
        model, batches, None, nn.functional.mse_loss, optimizer, config=config, device=device
    )
    trainer.train_epoch()
    thaw(model, optimizer)
    trainer.train_epoch()
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-3, atol=1e-5)
    assert trainer._captured is not None
    assert trainer._captured.active, trainer._captured.reason


@pytest.mark.parametrize(
    ("unpack", "given"),
    [
        (lambda batch: (*batch.values(), None), "a tuple of 3"),
        (dict, "a dict of 2"),
        (id, "a int"),
    ],
)
def test_an_unpack_that_returns_no_pair_is_answered(unpack: Any, given: str) -> None:
    with pytest.raises(InputError, match=f"unpack returned {given}\\."):
        make(nn.Linear(6, 1), (X, Y), unpack=unpack).fit(quiet=True)


class TellsEpochs:
    """A sampler, batch sampler or dataset that is told its epoch."""

    def __init__(self) -> None:
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Any:
        return iter(range(8))

    def __getitem__(self, number: int) -> Any:
        return torch.full((6,), float(number)), torch.zeros(1)


class TellsBatches(TellsEpochs):
    def __iter__(self) -> Any:
        return iter([[0, 1, 2, 3], [4, 5, 6, 7]])


def test_samplers_and_dataset_are_told_the_epoch() -> None:
    sampler, grouping, dataset = TellsEpochs(), TellsBatches(), TellsEpochs()
    inner = torch.utils.data.BatchSampler(sampler, 4, False)
    for loader in (
        torch.utils.data.DataLoader(dataset, batch_sampler=inner),
        torch.utils.data.DataLoader(dataset, batch_sampler=grouping),
    ):
        model = nn.Linear(6, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        trainer = Trainer(model, loader, None, nn.functional.mse_loss, optimizer, device="cpu")
        trainer.train_epoch()
        trainer.train_epoch()
    assert sampler.epochs == grouping.epochs == [0, 1]
    assert dataset.epochs == [0, 1, 0, 1]


def mixing(tmp_path: Any, epochs: int, resume: bool = False, unpack: Any = None) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(48, 3))
    images, labels = torch.rand(24, 3, 4, 4), torch.arange(24) % 3
    mix = MixUp(0.4, 3, seed=5)

    def mix_in_training(batch: Any) -> Any:
        return mix(*batch) if model.training else batch

    data = torch.utils.data.TensorDataset(images, labels)
    loader = torch.utils.data.DataLoader(data, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(
        model,
        loader,
        loader,
        nn.functional.cross_entropy,
        optimizer,
        config={"epochs": epochs, "precision": "fp32"},
        device="cpu",
        unpack=(lambda batch: mix(*batch)) if unpack is None else mix_in_training,
        run_dir=tmp_path,
    )
    return trainer.fit(quiet=True, resume=resume)


def test_labels_are_mixed_in_training_alone_and_a_resumed_run_draws_on(tmp_path: Any) -> None:
    with pytest.raises(InputError, match="MixUp has drawn in validation"):
        mixing(tmp_path / "mixed", 1)
    whole = mixing(tmp_path / "whole", 2, unpack=True)
    mixing(tmp_path / "broken", 1, unpack=True)
    rest = mixing(tmp_path / "broken", 2, resume=True, unpack=True)
    assert rest.losses == whole.losses[3:]


@pytest.mark.parametrize(
    ("augmentation", "words"),
    [
        (lambda images: images / 255, "gpu_augmentation is <lambda>"),
        (MixUp(0.4, 3), "MixUp, which mixes labels too"),
        (RandomHorizontalFlip(), r"gpu_augmentation is RandomHorizontalFlip\(p=0.5\)"),
    ],
)
def test_what_is_no_augmentation_is_named(augmentation: Any, words: str) -> None:
    images = [(torch.zeros(4, 3, 4, 4), torch.zeros(4, dtype=torch.long))]
    model = nn.Sequential(nn.Flatten(), nn.Linear(48, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = model, images, None, nn.CrossEntropyLoss(), optimizer, None, None, "cpu"
    with pytest.raises(InputError, match=words):
        Trainer(*given, augmentation)
    trainer = Trainer(*given)
    with pytest.raises(InputError, match=words):
        trainer.gpu_augmentation = augmentation


def test_images_of_a_tuple_are_augmented_and_masks_beside_them_refused() -> None:
    images = np.random.default_rng(0).integers(0, 255, (8, 3, 4, 4), np.uint8)
    augment = Compose([RandomHorizontalFlip(p=1.0)])
    made, labels = next(iter(Loader((images, np.arange(8)), 8, "cpu", augment=augment)))
    np.testing.assert_allclose(made, images[..., ::-1] / np.float32(255), rtol=1e-6)
    assert labels.tolist() == list(range(8))
    with pytest.raises(InputError, match="the loader has no images; it has features, targets"):
        Loader((images, images[:, 0]), 8, "cpu", augment=augment)


def test_an_op_that_is_called_says_what_is() -> None:
    images = torch.zeros(2, 3, 4, 4)
    with pytest.raises(InputError) as refused:
        RandomHorizontalFlip(p=1.0)(images)
    typed = {"Compose": Compose, "RandomHorizontalFlip": RandomHorizontalFlip, "images": images}
    assert eval(refused.value.fix, typed).shape == images.shape


class Counts(nn.Module):
    """A criterion of outputs (B, 1) and targets (B,), which counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.int64))

    def forward(self, outputs: Any, targets: Any) -> Any:
        self.num_calls += 1
        return (outputs[:, 0] - targets).square().mean()


def test_a_criterion_that_takes_its_column_itself_is_right() -> None:
    criterion = Counts()
    trainer = make(nn.Linear(6, 1), (X, Y[:, 0]), criterion=criterion)
    trainer.fit(quiet=True)
    assert int(criterion.num_calls) == 5
    with pytest.raises(InputError, match="compares every output with every target"):
        make(nn.Linear(6, 1), (X, Y[:, 0]), criterion=lambda o, t: (o - t).square().mean()).fit(
            quiet=True
        )


class Share:
    """What somebody computes of a validation."""

    def __init__(self) -> None:
        self.num, self.of = 0, 0

    def update(self, outputs: Any, targets: Any) -> None:
        self.num += int((outputs > targets).sum())
        self.of += len(targets)

    def compute(self) -> Any:
        return torch.tensor(self.num / self.of)


class Odd(Share):
    def compute(self) -> Any:
        return {"share": torch.tensor(0.5), "table": torch.zeros(4, 4)}


@pytest.mark.parametrize("metrics", [Share, Share()])
def test_metrics_may_be_one_number_of_an_object(metrics: Any) -> None:
    trainer = make(nn.Linear(6, 1), (X, Y), val_loader=Loader((X, Y), 8), metrics=metrics)
    trainer.fit(quiet=True)
    found = trainer.validate()["Share"]
    with torch.no_grad():
        expected = (trainer.model(torch.from_numpy(X)) > torch.from_numpy(Y)).float().mean()
    assert found == pytest.approx(float(expected))


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        (lambda outputs, targets: 0.5, "metrics is <lambda>, which needs arguments"),
        ({"share": Share}, "metrics is dict"),
        (Odd, r"metrics computed 'table' as a Tensor of shape \(4, 4\)"),
    ],
)
def test_metrics_of_another_form_are_answered(metrics: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        make(nn.Linear(6, 1), (X, Y), val_loader=Loader((X, Y), 8), metrics=metrics).validate()


class ByEpoch:
    """A scheduler whose step needs the number of the epoch, as timm's do."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.seen = optimizer, list[int]()

    def step(self, epoch: int, metric: Any = None) -> None:
        self.seen.append(epoch)


def test_a_scheduler_that_needs_the_epoch_is_not_given_the_loss() -> None:
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scheduler = ByEpoch(optimizer)
    val = Loader((X, Y), 8)
    trainer = make(model, (X, Y), val_loader=val, optimizer=optimizer, scheduler=scheduler)
    trainer.fit(quiet=True)
    trainer.train_epoch()
    assert scheduler.seen == [1, 2]


def test_a_plateau_in_the_other_direction_is_refused() -> None:
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max")
    with pytest.raises(InputError, match="has mode 'max', and maximise is False") as refused:
        make(model, (X, Y), optimizer=optimizer, scheduler=plateau)
    assert refused.value.fix == "config={'monitor': 'loss', 'maximise': True}"


def test_a_dataset_is_no_loader_and_a_finished_run_says_so(capsys: Any) -> None:
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    dataset = torch.utils.data.TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
    with pytest.raises(InputError, match="a TensorDataset, which has samples, not batches"):
        Trainer(model, dataset, None, nn.functional.mse_loss, optimizer)
    trainer = make(model, (X, Y), optimizer=optimizer)
    trainer.fit()
    trainer.fit()
    assert capsys.readouterr().out.splitlines()[-1].endswith("train_epoch() adds one")
