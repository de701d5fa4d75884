"""Models and losses of kinds that nobody here wrote: each trains as in a plain loop, captured or not.

On a CPU the graphs are made of paper (`paper_graphs.py`).
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from stoker.errors import InputError
from stoker.train.graphs.replay_check import difference, same_counts
from stoker.train.trainer import Trainer

EPOCHS, BATCH = 3, 8


def rows(*widths, dtype=torch.float32):
    torch.manual_seed(3)
    return [torch.randn(40, width, dtype=dtype) for width in widths]


def loader_of(*tensors):
    generator = torch.Generator().manual_seed(5)
    return DataLoader(TensorDataset(*tensors), BATCH, shuffle=True, generator=generator)


def split(batch):
    return batch[0], batch[1]


def train_plainly(model, criterion, make_loader, device, unpack=split, kind=torch.optim.Adam):
    model, criterion = model.to(device), criterion.to(device)
    optimizer = kind([*model.parameters(), *criterion.parameters()], lr=0.01)
    losses, loader = [], make_loader()
    for _ in range(EPOCHS):
        for batch in loader:
            inputs, targets = unpack([tensor.to(device) for tensor in batch])
            loss = criterion(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses, model


def make_trainer(
    model, criterion, make_loader, device, unpack=split, kind=torch.optim.Adam, **options
):
    config = {"epochs": EPOCHS, "precision": "fp32", "capture": "auto"} | options.pop("config", {})
    optimizer = kind([*model.parameters(), *criterion.parameters()], lr=0.01)
    return Trainer(
        model,
        make_loader(),
        None,
        criterion,
        optimizer,
        None,
        config,
        device,
        unpack=unpack,
        **options,
    )


class Margin(nn.Module):
    """A loss with weights of its own, as in metric learning."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.centres = nn.Parameter(torch.randn(5, 4))

    def forward(self, outputs, targets):
        return functional.cross_entropy(
            functional.linear(functional.normalize(outputs), functional.normalize(self.centres)),
            targets,
        )


def linear(inputs, outputs, **options):
    torch.manual_seed(2)
    return nn.Linear(inputs, outputs, **options)


def test_a_loss_with_weights_of_its_own_is_trained_and_resumed(device, tmp_path):
    (features,) = rows(6)
    labels = torch.arange(40) % 5

    def make_loader():
        return loader_of(features, labels)

    expected, _ = train_plainly(linear(6, 4), criterion := Margin(), make_loader, device)
    trainer = make_trainer(linear(6, 4), Margin(), make_loader, device)
    torch.testing.assert_close(trainer.fit(quiet=True).losses, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(trainer.criterion.centres, criterion.centres, rtol=1e-4, atol=1e-5)
    assert trainer._captured.active, trainer._captured.reason
    for epochs in (1, EPOCHS):
        parts = linear(6, 4), Margin(), make_loader, device
        last = make_trainer(*parts, config={"epochs": epochs}, run_dir=tmp_path / "run")
        last.fit(resume=epochs > 1, quiet=True)
    torch.testing.assert_close(last.criterion.centres, criterion.centres, rtol=1e-4, atol=1e-5)


def test_parameters_of_nobody_are_still_refused():
    (features,) = rows(6)
    model, strange = linear(6, 1), nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([*model.parameters(), strange], lr=0.1)
    with pytest.raises(InputError, match=r"(?s)1 tensors .* a criterion that is a Module"):
        Trainer(model, [(features, features[:, :1])], None, nn.MSELoss(), optimizer, device="cpu")


class Physics(nn.Module):
    """Derives its output by its input, which it makes require a gradient, as PINNs do."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x):
        with torch.enable_grad():
            x.requires_grad_()
            u = self.net(x)
            (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        return torch.cat([u, slope], 1)


@pytest.mark.parametrize("kind", ["loader", "list", "list that requires gradients"])
def test_a_model_that_differentiates_by_its_inputs_is_captured(device, kind):
    x = torch.linspace(0, 1, 40)[:, None]

    def make_loader():
        if kind == "loader":
            return loader_of(x, torch.cat([x.sin(), x.cos()], 1))
        pairs = zip(x.split(BATCH), torch.cat([x.sin(), x.cos()], 1).split(BATCH), strict=True)
        leaf = kind == "list that requires gradients"
        return [(a.clone().to(device).requires_grad_(leaf), b.clone().to(device)) for a, b in pairs]

    expected, _ = train_plainly(Physics(), nn.MSELoss(), make_loader, device)
    trainer = make_trainer(Physics(), nn.MSELoss(), make_loader, device)
    torch.testing.assert_close(trainer.fit(quiet=True).losses, expected, rtol=1e-4, atol=1e-5)
    assert trainer._captured.active, trainer._captured.reason


def test_float64_stays_float64_in_training_and_validation():
    (features,) = rows(6, dtype=torch.float64)
    seen = []

    class Noted(nn.MSELoss):
        def forward(self, outputs, targets):
            seen.append(outputs.dtype)
            return super().forward(outputs, targets)

    model = linear(6, 1, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [(features, features[:, :1])]
    Trainer(model, batches, batches, Noted(), optimizer, device="cpu").fit(quiet=True)
    assert seen == [torch.float64] * 2


def test_complex_tensors_are_compared():
    one = [torch.tensor([1 + 1j, 2.0])]
    assert difference(one, [torch.tensor([1 + 1j, 2.0])]) == 0
    assert difference(one, [torch.tensor([1 + 2j, 2.0])]) > 1
    assert same_counts([torch.tensor([3 + 1j])], [torch.tensor([3 + 2j])])


def two_views(batch):
    return torch.cat([batch[0], batch[0] + 0.1]), None


def first_half(batch):
    return batch[0][: BATCH // 2], None


class Agreement(nn.Module):
    def forward(self, outputs, _):
        return outputs.pow(2).mean()


@pytest.mark.parametrize("unpack", [two_views, first_half])
@pytest.mark.parametrize("steps", [1, 2])
def test_rows_that_unpack_makes_of_a_batch_are_captured(device, tmp_path, unpack, steps):
    (features,) = rows(6)

    def make_loader():
        return loader_of(features, features)

    def run(capture, epochs=EPOCHS, resume=False):
        config = {"capture": capture, "gradient_accumulation_steps": steps, "epochs": epochs}
        parts = linear(6, 3), Agreement(), make_loader, device
        trainer = make_trainer(*parts, unpack=unpack, config=config, run_dir=tmp_path / capture)
        return trainer.fit(quiet=True, resume=resume).losses, trainer

    expected, _ = run("off", 6)
    losses, trainer = run("auto")
    assert trainer._captured.active, trainer._captured.reason
    more, trainer = run("auto", 6, resume=True)
    assert trainer._captured.active, trainer._captured.reason
    torch.testing.assert_close([*losses, *more][-len(more) :], expected[-len(more) :])


def make_normed():
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))


def test_modules_in_evaluation_mode_stay_there_through_validation(device, capsys):
    (features,) = rows(6)

    def make_loader():
        return loader_of(features, features[:, :1])

    plain = make_normed()
    plain[1].eval()
    expected, _ = train_plainly(plain, nn.MSELoss(), make_loader, device)
    model = make_normed()
    model[1].eval()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    batches, val = make_loader(), [(features, features[:, :1])]
    config = {"epochs": EPOCHS, "precision": "fp32"}
    trainer = Trainer(model, batches, val, nn.MSELoss(), optimizer, None, config, device)
    torch.testing.assert_close(trainer.fit().losses, expected, rtol=1e-4, atol=1e-5)
    assert "modules that were in evaluation mode stay there: 1;" in capsys.readouterr().out
    assert not model[1].training
    assert model.training


def test_a_model_that_was_in_evaluation_mode_is_trained_whole(capsys):
    (features,) = rows(6)
    model = make_normed().eval()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    batches = [(features, features[:, :1])]
    Trainer(model, batches, batches, nn.MSELoss(), optimizer, device="cpu").fit()
    assert model[1].num_batches_tracked == 1
    assert "evaluation mode" not in capsys.readouterr().out


class Carries(nn.Module):
    """Keeps its hidden state from batch to batch in an attribute."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.cell, self.out, self.hidden = nn.Linear(12, 6), nn.Linear(6, 1), None

    def forward(self, x):
        hidden = x.new_zeros(x.shape) if self.hidden is None else self.hidden[0]
        hidden = torch.tanh(self.cell(torch.cat([x, hidden], 1)))
        self.hidden = (hidden.detach(), hidden.detach())
        return self.out(hidden)


class Caches(nn.Module):
    """Keeps what it computed in an attribute, for others to look at."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.net, self.seen = nn.Linear(6, 1), None

    def forward(self, x):
        self.seen = self.net(x)
        return self.seen


# What Caches keeps holds on to autograd's nodes of the stream before; torch 2.11 says so.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
@pytest.mark.parametrize(("kind", "is_captured"), [(Carries, False), (Caches, True)])
def test_a_state_in_an_attribute_is_not_frozen(device, kind, is_captured):
    (features,) = rows(6)

    def make_loader():
        return loader_of(features, features[:, :1])

    expected, _ = train_plainly(kind(), nn.MSELoss(), make_loader, device)
    trainer = make_trainer(kind(), nn.MSELoss(), make_loader, device)
    torch.testing.assert_close(trainer.fit(quiet=True).losses, expected, rtol=1e-4, atol=1e-5)
    assert trainer._captured.active == is_captured, trainer._captured.reason
    if not is_captured:
        assert "reads Carries.hidden of the step before" in trainer._captured.reason
    elif device == "cpu":
        last = trainer.model.seen
        assert last.shape == (BATCH, 1)
