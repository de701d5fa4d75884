"""What a graph cannot follow is noticed: the optimizer's numbers, draws on the host, state that comes late."""

from __future__ import annotations

import functools
import itertools
import math
import random
import threading

import numpy as np
import pytest
import torch
from torch import nn

from stoker.errors import InputError
from stoker.loader.loader import Loader
from stoker.train.batches import Work, alike, is_equal
from stoker.train.graphs import graphed_step as capturing
from stoker.train.graphs.frozen import HostNumbers
from stoker.train.graphs.frozen_groups import FrozenGroups
from stoker.train.graphs.graphed_step import CHECKED_REPLAYS, WARM_UP_STEPS
from stoker.train.graphs.host_draws import has_drawn, quiet_host_rng
from stoker.train.graphs.replay_check import difference
from stoker.train.graphs.step_code import find_iterator, with_helpers
from stoker.train.graphs.structure import Structure
from stoker.train.step import make_guarded
from stoker.train.trainer import Trainer
from training_makers import make_model, write_dirty, write_rows

CPU = torch.device("cpu")


@pytest.fixture
def path(tmp_path):
    return write_rows(tmp_path)


# -- what the step's code names --------------------------------------------------------------------


def test_hooks_of_a_module_that_is_named_are_code_of_the_step():
    teacher = nn.Linear(2, 2)

    def hook(*_):
        pass

    def step(batch):
        return teacher(batch)

    teacher.register_forward_hook(hook)
    assert hook in with_helpers([], [step])


class Terms:
    """Settings that a class holds for all its objects."""

    weights, criterion = {"first": 1.0}, nn.HuberLoss()

    @classmethod
    def weigh(cls):
        return cls.weights["first"]


def read_of_class(_):
    return Terms.weigh()


def read_of_object(_, terms=Terms()):  # noqa: B008
    return terms.weigh()


@pytest.mark.parametrize("read", [read_of_class, read_of_object])
def test_what_a_class_holds_is_watched(read, monkeypatch):
    numbers = HostNumbers([], with_helpers([], [read]))
    monkeypatch.setitem(Terms.weights, "first", 2.0)
    assert "first" in str(numbers.find_change())


def test_a_module_that_a_class_holds_is_named():
    terms = Terms()
    owners = [getattr(f, "__self__", None) for f in with_helpers([], [lambda _: terms.criterion])]
    assert Terms.criterion in owners


@pytest.mark.parametrize("kind", [list, tuple, lambda several: dict(enumerate(several))])
def test_an_iterator_in_a_container_is_found(kind):
    several = kind([1, itertools.cycle([1])])
    assert find_iterator([], [lambda batch: next(several[1])]) == "several.1"


# -- the optimizer's numbers -----------------------------------------------------------------------


def make_frozen(kind=torch.optim.AdamW, **options):
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    groups = [{"params": first.parameters()}, {"params": second.parameters(), "weight_decay": 0.5}]
    optimizer = kind(groups, lr=0.1, **options)
    return optimizer, FrozenGroups(optimizer, CPU)


@pytest.mark.parametrize(
    "rate", [0.25, 1, np.float32(0.25), torch.tensor(0.25), torch.tensor([0.25])]
)
def test_a_rate_put_in_the_tensors_place_is_filled_into_it(rate):
    optimizer, frozen = make_frozen()
    tensors = [group["lr"] for group in optimizer.param_groups]
    assert all(isinstance(tensor, torch.Tensor) for tensor in tensors)
    optimizer.param_groups[1]["lr"] = rate
    assert frozen.find_change() is None
    assert [group["lr"] for group in optimizer.param_groups] == tensors
    assert optimizer.param_groups[1]["lr"] is tensors[1]
    assert [float(tensor) for tensor in tensors] == pytest.approx([0.1, float(rate)])


def test_a_rate_that_changes_in_its_tensor_is_followed():
    optimizer, frozen = make_frozen()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    tensor = optimizer.param_groups[0]["lr"]
    optimizer.step()
    scheduler.step()
    assert frozen.find_change() is None
    assert optimizer.param_groups[0]["lr"] is tensor
    assert float(tensor) == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda o: o.param_groups[0].update(betas=(0.5, 0.999)), "changes betas,"),
        (lambda o: o.param_groups[1].update(weight_decay=0.4), "changes weight_decay,"),
        (lambda o: o.param_groups[1].update(eps=1.0, weight_decay=0.4), "eps"),
        (lambda o: o.param_groups[0].update(eps=np.ones(2)), "changes eps,"),
    ],
)
def test_any_other_change_of_a_group_is_named(change, words):
    optimizer, frozen = make_frozen()
    assert frozen.find_change() is None
    change(optimizer)
    assert words in frozen.find_change()


@pytest.mark.parametrize(
    "change",
    [
        lambda o: o.add_param_group({"params": [nn.Parameter(torch.ones(1))]}),
        lambda o: o.load_state_dict(o.state_dict()),
        lambda o: [state.update(exp_avg=torch.zeros(2)) for state in o.state.values()],
    ],
)
def test_other_groups_and_states_are_seen(change):
    optimizer = make_frozen()[0]
    make_guarded(optimizer, CPU)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    frozen = FrozenGroups(optimizer, CPU)
    assert not frozen.has_other_groups()
    assert not frozen.has_other_groups()
    change(optimizer)
    assert frozen.has_other_groups()


@pytest.mark.parametrize("has_update", [True, False])
def test_what_is_frozen_later_is_seen(has_update):
    optimizer = make_frozen()[0]
    frozen = FrozenGroups(optimizer, torch.device("cpu"), has_update=has_update)
    optimizer.param_groups[0]["betas"] = (0.5, 0.999)
    assert (frozen.find_change() is None) is not has_update
    assert not frozen.trains_others()
    optimizer.param_groups[1]["params"][0].requires_grad_(False)
    assert frozen.trains_others()


def give_other_memory(tensor):
    tensor.data = tensor.data.clone()


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda model: model.to(memory_format=torch.channels_last), "Sequential.0.weight"),
        (lambda model: give_other_memory(model[2].bias), "Sequential.2.bias"),
        (lambda model: give_other_memory(model[1].running_var), "Sequential.1.running_var"),
    ],
)
def test_tensors_with_other_memory_are_seen(change, name):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(2, 1))
    model.register_buffer("sparse", torch.eye(2).to_sparse())
    structure = Structure([model], [torch.optim.SGD(model.parameters())])
    model.train()
    assert structure.find_moved() is None
    change(model)
    assert structure.find_moved() == name


def test_a_list_that_changes_where_it_is_counts_too():
    optimizer, _ = make_frozen()
    optimizer.param_groups[0]["betas"] = [0.9, 0.999]
    frozen = FrozenGroups(optimizer, CPU)
    optimizer.param_groups[0]["betas"][0] = 0.5
    assert "changes betas," in frozen.find_change()


def test_notes_of_a_scheduler_are_no_change_to_torchs_own_optimizers():
    optimizer, frozen = make_frozen()
    optimizer.param_groups[0].update(initial_lr=3.0, num_updates=1)
    assert frozen.find_change() is None


def test_an_optimizer_of_others_keeps_its_number_which_must_not_change():
    class Own(torch.optim.AdamW):
        pass

    optimizer, frozen = make_frozen(Own)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert frozen.find_change() is None
    optimizer.param_groups[0]["lr"] = 0.2
    assert "the scheduler changes lr, which a graph cannot follow; " in frozen.find_change()


# -- draws on the host -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "draw", [random.random, np.random.rand, lambda: np.random.randn(1), lambda: torch.rand(1)]
)
def test_a_draw_on_the_host_is_seen(draw):
    before = quiet_host_rng(may_wait=False)
    assert not has_drawn(before)
    draw()
    assert has_drawn(before)


@pytest.mark.parametrize("num_draws", [0, 40, None])
def test_threads_that_load_data_are_waited_for(monkeypatch, num_draws):
    """They draw from the same generators, and rest when they are ahead, or never."""
    monkeypatch.setattr("stoker.train.graphs.host_draws._MOST_LOOKS", 5)
    ended = threading.Event()

    def load():
        drawn = 0
        while drawn != num_draws and not ended.wait(0.001):
            random.random()
            drawn += 1

    thread = threading.Thread(target=load)
    thread.start()
    try:
        before = quiet_host_rng(may_wait=True)
        assert (before is None) is (num_draws is None)
        assert before is None or not has_drawn(before)
    finally:
        ended.set()
        thread.join()


# -- values that do not compare, lists of unequal length -------------------------------------------


def test_values_without_one_answer_are_a_misfit():
    assert is_equal(1, 1.0)
    assert not is_equal(np.arange(3), np.arange(3))
    batch = (torch.ones(2), {"names": np.array(["a", "b"])})
    assert not alike(batch, (torch.ones(2), {"names": np.array(["a", "b"])}))
    assert alike((torch.ones(2), "a"), (torch.zeros(2), "a"))


def test_a_list_that_is_longer_is_a_difference():
    one = torch.ones(2)
    assert difference([one, one], [one]) == math.inf
    assert difference([one], [one, one]) == math.inf
    assert difference([one], [one]) == 0.0


# -- whole runs: graphs on a GPU, and stand-ins that freeze the same things without one -------------


def make_run(
    path,
    device,
    capture,
    model=None,
    scheduler=None,
    kind=torch.optim.AdamW,
    order="shuffled",
    **options,
):
    model = (make_model() if model is None else model).to(device)
    momentum = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    optimizer = kind(model.parameters(), lr=0.01, **momentum)
    loader = Loader(path, 20, device, order=order, seed=1)
    config = {"epochs": 3, "capture": capture, "precision": "fp32", **options}
    made = None if scheduler is None else scheduler(optimizer)
    return Trainer(model, loader, None, nn.functional.mse_loss, optimizer, made, config, device)


def test_a_run_without_any_of_it_is_captured(path, device):
    trainer = make_run(path, device, "on")
    history = trainer.fit()
    assert trainer._captured.active
    assert history.losses == pytest.approx(make_run(path, device, "off").fit().losses, rel=1e-3)


def one_cycle(optimizer):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=40)


@pytest.mark.parametrize(
    ("kind", "name"), [(torch.optim.AdamW, "betas"), (torch.optim.SGD, "momentum")]
)
def test_a_scheduler_that_changes_more_than_the_rate_takes_the_update_out_of_the_graph(
    path, device, kind, name
):
    reason = f"the scheduler changes {name}, which a graph cannot follow; cycle_momentum=False leaves it as it is"
    trainer = make_run(path, device, "on", scheduler=one_cycle, kind=kind)
    history = trainer.fit()
    assert trainer._captured.active
    assert trainer._captured.reason.startswith("captured without its update after 3 steps")
    assert history.fallback is None
    assert f"step captured without its update: {reason}" in [note.text for note in history.told]
    eager = make_run(path, device, "off", scheduler=one_cycle, kind=kind)
    assert history.losses == pytest.approx(eager.fit().losses, rel=1e-3)
    torch.testing.assert_close(
        nn.utils.parameters_to_vector(trainer.model.parameters()),
        nn.utils.parameters_to_vector(eager.model.parameters()),
        rtol=1e-3,
        atol=1e-5,
    )


class Assigns:
    """A scheduler of a user's, which puts numbers where the rates are."""

    def __init__(self, optimizer):
        self.optimizer, self.num_steps = optimizer, 0

    def step(self):
        self.num_steps += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 0.01 * 0.8**self.num_steps

    def state_dict(self):
        return {"num_steps": self.num_steps}

    def load_state_dict(self, state):
        self.num_steps = state["num_steps"]


def test_a_scheduler_that_assigns_numbers_is_followed(path, device):
    trainer = make_run(path, device, "on", scheduler=Assigns)
    history = trainer.fit()
    assert trainer._captured.active, trainer._captured.reason
    eager = make_run(path, device, "off", scheduler=Assigns)
    assert history.losses == pytest.approx(eager.fit().losses, rel=1e-3)
    torch.testing.assert_close(
        nn.utils.parameters_to_vector(trainer.model.parameters()),
        nn.utils.parameters_to_vector(eager.model.parameters()),
        rtol=1e-3,
        atol=1e-5,
    )


def test_a_parameter_that_is_frozen_later_is_captured_anew(path, device):
    class Freezes(Assigns):
        def step(self):
            self.num_steps += 1
            if self.num_steps == 9:
                self.optimizer.param_groups[0]["params"][0].requires_grad_(False)

    trainer = make_run(path, device, "on", scheduler=Freezes)
    history = trainer.fit()
    assert trainer._captured.active
    said = [note.text for note in history.told]
    assert "step captured anew: parameters were frozen or thawed" in said
    expected = make_run(path, device, "off", scheduler=Freezes).fit()
    assert history.losses == pytest.approx(expected.losses, rel=1e-3)


class Draws(nn.Module):
    """Scales its output by a number that it draws on the host; too little for the comparison to see."""

    def __init__(self, draw):
        super().__init__()
        self.net, self.draw = make_model(), draw

    def forward(self, x):
        return self.net(x) * (1 + 1e-7 * self.draw())


@pytest.mark.parametrize(
    "draw", [random.random, np.random.rand, lambda: float(torch.rand(()))], ids=range(3)
)
def test_a_model_that_draws_on_the_host_is_not_captured(path, device, draw):
    after = []
    for capture in ("auto", "off"):
        random.seed(3)
        np.random.seed(3)
        model = Draws(draw)
        torch.manual_seed(3)
        trainer = make_run(path, device, capture, model)
        losses = trainer.fit().losses
        after.append((losses, draw()))
        if capture == "auto":
            assert trainer._captured.reason == "eager: the step draws random numbers on the host"
    assert after[0][0] == pytest.approx(after[1][0], rel=1e-3)
    assert after[0][1] == after[1][1]  # as many numbers were drawn as without capture
    with pytest.raises(InputError, match="capture is 'on', but the step draws random numbers"):
        make_run(path, device, "on", Draws(draw)).fit()


class Branches(nn.Module):
    """Uses another layer in the call that follows the recording: the eager step of the first comparison."""

    def __init__(self):
        super().__init__()
        self.net, self.late = make_model(), nn.Linear(6, 1)
        self.calls = functools.partial(next, itertools.count(1))  # an iterator would be seen

    def forward(self, x):
        is_late = self.calls() == WARM_UP_STEPS + 2
        return self.net(x) + self.late(x) if is_late else self.net(x)


def test_a_parameter_with_its_first_state_ends_the_graph_not_the_run(path, device):
    torch.manual_seed(0)
    trainer = make_run(path, device, "auto", Branches())
    history = trainer.fit()
    assert "differed from the eager one by inf times" in trainer._captured.split_reason
    assert trainer._captured.active
    assert len(trainer.optimizer.state) == 4  # that step was undone
    assert {float(state["step"]) for state in trainer.optimizer.state.values()} == {33.0}
    expected = make_run(path, device, "off").fit()
    assert history.losses == pytest.approx(expected.losses, rel=1e-3)


def test_a_snapshot_puts_back_states_weights_and_the_count(path, device):
    trainer = make_run(path, device, "auto")
    captured = trainer._captured
    step, optimizer = trainer._step, trainer.optimizer
    before = [p.detach().clone() for p in trainer.model.parameters()]
    keep = captured._make_snapshot()
    batch = torch.ones(20, 6, device=device), torch.ones(20, 1, device=device)
    captured._run_eagerly(Work(*batch, 20))
    step._skipped += 1
    assert len(optimizer.state) == 4
    keep.restore()
    assert not optimizer.state
    assert step.num_skipped == 0
    torch.testing.assert_close(list(trainer.model.parameters()), before, rtol=0, atol=0)


@pytest.mark.parametrize("bad_step", range(WARM_UP_STEPS + CHECKED_REPLAYS + 1))
def test_an_update_that_is_left_out_counts_once(tmp_path, device, bad_step):
    """Also where it was computed both ways."""
    if device == "cpu" and bad_step == WARM_UP_STEPS + CHECKED_REPLAYS:
        pytest.skip("on a CPU the host decides, and a graph of paper repeats its answer")
    path = write_dirty(tmp_path, bad_step * 20 + 5)
    trainer = make_run(path, device, "on", order="sequential", epochs=1, nonfinite="skip")
    trainer.fit()
    assert trainer._captured.active
    assert trainer._step.num_skipped == 1


def test_what_ended_a_capture_is_the_first_error_and_its_line():
    """torch raises a second error when it ends the capture, which says nothing of the cause."""

    def step_of_a_stranger():
        return int("a host number")

    try:
        raise KeyError("of the caller, handled before")
    except KeyError as handled:
        try:
            try:
                step_of_a_stranger()
            except ValueError:
                raise RuntimeError("operation failed due to a previous error") from None
        except RuntimeError as error:
            said = capturing.describe_failure(error, handled)
    assert "a host number" in said
    assert "previous error" not in said
    assert f"{__name__}.py:" in said
    assert said.endswith('return int("a host number")')
