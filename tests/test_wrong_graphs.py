"""Wrong graphs that are planted are caught, and right ones are not: replay and eager step are judged alike.

On a CPU the graphs are made of paper (`paper_graphs.py`), which freezes the host's numbers as a real one does.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from paper_graphs import Jitter
from stoker.augment import Compose, MixUp, Normalize, RandomCrop, RandomHorizontalFlip
from stoker.errors import InputError
from stoker.loader.loader import Loader
from stoker.store.fields import Dense
from stoker.train.graphs.frozen import HostNumbers
from stoker.train.graphs.graphed_step import CHECKED_REPLAYS, WARM_UP_STEPS
from stoker.train.graphs.replay_check import same_counts
from stoker.train.trainer import Trainer
from store_makers import write_store
from training_makers import make_model, write_rows

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def rows(tmp_path):
    return write_rows(tmp_path)


@pytest.fixture
def images(tmp_path):
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (96, 3, 8, 8), dtype=np.uint8)
    fields = {"images": Dense(pixels), "labels": Dense(rng.integers(0, 4, 96))}
    return write_store(tmp_path / "images", [fields])


def fit(
    path,
    device,
    capture="auto",
    model=None,
    after_step=None,
    epochs=5,
    kind=torch.optim.AdamW,
    **config,
):
    torch.manual_seed(0)
    model = (model or make_model()).to(device)
    optimizer = kind(model.parameters(), lr=0.01)
    loader = Loader(path, 20, device, order="shuffled", seed=1)
    config = {"epochs": epochs, "capture": capture, "precision": "fp32", **config}
    scheduler = None if after_step is None else AfterStep(optimizer, after_step)
    trainer = Trainer(
        model, loader, None, nn.functional.mse_loss, optimizer, scheduler, config, device
    )
    return trainer, trainer.fit()


class AfterStep:
    """A scheduler that lets a test change something after every step."""

    def __init__(self, optimizer, change):
        self.optimizer, self.change, self.num_steps = optimizer, change, 0

    def step(self):
        self.num_steps += 1
        self.change(self.num_steps, self.optimizer)

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


GAIN = 1.0


class ReadsGlobal(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = make_model()

    def forward(self, x):
        return self.net(x) * GAIN


class ReadsAttribute(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.gain = make_model(), 1.0

    def forward(self, x):
        return self.net(x) * self.gain


class ReadsConfig(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.config = make_model(), {"gain": 1.0}

    def forward(self, x):
        return self.net(x) * self.config["gain"]


def set_gain(model, gain):
    global GAIN  # noqa: PLW0603 (what is tested)
    if isinstance(model, ReadsGlobal):
        GAIN = gain
    elif isinstance(model, ReadsAttribute):
        model.gain = gain
    else:
        model.config["gain"] = gain


@pytest.mark.parametrize("kind", [ReadsGlobal, ReadsAttribute, ReadsConfig])
@pytest.mark.parametrize("when", ["once, after the checks", "at every step"])
def test_a_host_value_that_changes_is_never_stale(rows, device, kind, when):
    losses = []
    for capture in ("auto", "off"):
        torch.manual_seed(0)
        model = kind()
        set_gain(model, 1.0)

        def change(step, _, model=model):
            if when == "at every step":
                set_gain(model, 1.0 + 0.02 * step)
            elif step == 20:
                set_gain(model, 3.0)

        trainer, history = fit(rows, device, capture, model, change)
        losses.append(history.losses)
        if capture == "auto" and when == "at every step":
            assert not trainer._captured.active
            assert "gain" in trainer._captured.reason.lower()
        elif capture == "auto":
            assert trainer._captured.active, "one change is followed by a new capture"
            assert any("captured anew" in note for note in history.notes)
    set_gain(ReadsGlobal(), 1.0)
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_a_host_value_that_nobody_watches_is_caught_by_the_later_comparisons(rows, device):
    hidden = np.ones(2000)  # data, by its size

    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = make_model()

        def forward(self, x):
            return self.net(x) * float(hidden[1000])

    def change(step, _):
        hidden[1000] = 2.0 if step >= 30 else 1.0

    trainer, history = fit(rows, device, "auto", Reads(), change, epochs=8)
    assert any("no longer agreed" in note for note in history.notes)
    assert trainer._captured.active


class Weighted:
    """A criterion with a setting; it cannot be hashed."""

    __hash__ = None

    def __init__(self):
        self.weight = 1.0

    def __call__(self, outputs, targets):
        return self.weight * nn.functional.mse_loss(outputs, targets)


def test_a_setting_of_the_criterion_is_never_stale(rows, device):
    losses = []
    for capture in ("auto", "off"):
        criterion, model = Weighted(), make_model().to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

        def change(step, _, criterion=criterion):
            criterion.weight = 1.0 if step < 20 else 4.0

        loader = Loader(rows, 20, device, order="shuffled", seed=1)
        config = {"epochs": 4, "capture": capture, "precision": "fp32"}
        trainer = Trainer(
            model, loader, None, criterion, optimizer, AfterStep(optimizer, change), config, device
        )
        losses.append(trainer.fit().losses)
        assert capture == "off" or trainer._captured.active, trainer._captured.reason
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


@pytest.mark.parametrize("at", [WARM_UP_STEPS + 1, 40])
def test_a_hyperparameter_that_moved_is_caught(rows, device, at):
    def change(step, optimizer):
        if step == at:
            optimizer.param_groups[0]["weight_decay"] = 0.5

    trainer, history = fit(rows, device, "auto", after_step=change)
    assert "changes weight_decay" in trainer._captured.split_reason
    assert trainer._captured.active
    assert history.losses == pytest.approx(
        fit(rows, device, "off", None, change)[1].losses, rel=1e-3
    )


def test_a_model_that_branches_on_data_is_caught(rows, device):
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = make_model()

        def forward(self, x):
            return self.net(x) * (2.0 if x[0, 0].item() > 0 else 1.0)

    trainer, history = fit(rows, device, "auto", Branches())
    assert not trainer._captured.active
    assert trainer._captured.reason.startswith("eager: ")
    expected = fit(rows, device, "off", Branches())[1]
    assert history.losses == pytest.approx(expected.losses, rel=1e-3)


class Counts(torch.optim.SGD):
    """An optimizer that counts its steps on the host, and steps less and less far."""

    _step_supports_amp_scaling = True

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                parameter -= group["lr"] / (10 + state["count"]) * parameter.grad


def test_a_count_on_the_host_is_caught_however_small_its_effect(rows, device):
    trainer, history = fit(rows, device, "on", kind=Counts)
    assert "the step changes count of Counts on the host" in trainer._captured.split_reason
    assert trainer._captured.active
    assert history.losses == pytest.approx(
        fit(rows, device, "off", kind=Counts)[1].losses, rel=5e-3
    )


def test_a_module_that_counts_on_the_host_is_caught(rows, device):
    class Calls(ReadsAttribute):
        def forward(self, x):
            self.gain += 1e-6
            return self.net(x) * self.gain

    trainer, _ = fit(rows, device, "auto", Calls())
    assert "the step changes Calls.gain on the host" in trainer._captured.reason


def test_whole_numbers_of_a_state_must_be_equal():
    def same(one, other):
        return same_counts([torch.tensor(one)], [torch.tensor(other)])

    assert same(5000.0, 5000.0)
    assert not same(5000.0, 5001.0)  # less than a thousandth
    assert same([1, 2], [1, 2])
    assert not same([1, 2], [1, 3])
    assert same([5000.5, 1.0], [5001.0, 1.0])  # no count: the tolerance decides
    assert not same_counts([torch.ones(1)], [])


class Settings:
    def __init__(self):
        self.limit = np.float32(2.0)


class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain, self.table = torch.tensor(1.0), torch.zeros(3)
        self.names, self.settings = {"a": 1}, Settings()


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda m: m.gain.fill_(2.0), "Reads.gain"),
        (lambda m: m.names.update(a=2), "Reads.names.a"),
        (lambda m: m.names.update(b=2), "the length of Reads.names"),
        (lambda m: setattr(m.settings, "limit", np.float32(3.0)), "Reads.settings.limit"),
        (lambda m: m.eval(), "Reads.training"),
        (lambda m: delattr(m, "training"), "Reads.training"),
        (lambda m: m.table.fill_(1.0), None),  # a graph reads it where it is, or the capture fails
    ],
)
def test_numbers_of_the_host_are_named_and_put_back(change, name):
    model = Reads()
    numbers = HostNumbers([model], (), torch.device("cuda"))
    assert numbers.find_change() is None
    change(model)
    assert numbers.find_change() == name
    numbers.put_back()
    if name is not None and not name.startswith("the length"):
        assert numbers.find_change() is None


# -- draws on the host -------------------------------------------------------------------------------


class LeavesOut(nn.Module):
    """Asks at every step whether a layer is left out, as the layers of transformers do."""

    def __init__(self, chance, draw=lambda chance: torch.rand([]) < chance):
        super().__init__()
        self.net, self.extra = make_model(), nn.Linear(6, 6)
        self.chance, self.draw = chance, draw

    def forward(self, x):
        if not self.draw(self.chance):
            x = x + self.extra(x)
        return self.net(x)


@pytest.mark.parametrize("chance", [0.0, 1.0, 0])
def test_draws_that_decide_nothing_are_repeated_beside_the_graph(rows, device, chance):
    after = []
    for capture in ("on", "off"):
        trainer, history = fit(rows, device, capture, LeavesOut(chance))
        after.append((history.losses, torch.rand(3).tolist()))
        if capture == "on":
            assert trainer._captured.active
    assert after[0][0] == pytest.approx(after[1][0], rel=1e-4)
    assert after[0][1] == after[1][1]  # as many numbers were drawn as by eager steps


@pytest.mark.parametrize(
    ("chance", "draw"),
    [
        (0.3, lambda chance: torch.rand([]) < chance),
        (1e-12, lambda chance: torch.rand([]) < chance),
        (0.0, lambda chance: torch.rand([]).item() < chance),
        (0.0, lambda chance: torch.rand(2).sum() < chance),
        (0.0, lambda chance: torch.stack([torch.rand([])]) < chance),
        (0.0, lambda chance: torch.rand([]) <= chance),
        (0.0, lambda chance: (torch.rand([]) < chance) + 0 * torch.randint(3, ())),
        (0.0, lambda chance: torch.rand([]) < chance or np.random.rand() < chance),
        (0.0, lambda chance: torch.rand([]) < torch.tensor(chance)),
        (0.0, lambda chance: torch.rand([], dtype=torch.float16) < chance),
    ],
    ids=range(10),
)
def test_draws_that_may_decide_something_are_not_captured(rows, device, chance, draw):
    after = []
    for capture in ("auto", "off"):
        np.random.seed(1)
        trainer, history = fit(rows, device, capture, LeavesOut(chance, draw), epochs=2)
        after.append([*history.losses, *torch.rand(3).tolist(), np.random.rand()])
        if capture == "auto":
            assert trainer._captured.reason == "eager: the step draws random numbers on the host"
    assert after[0] == pytest.approx(after[1], rel=1e-4)


def test_a_chance_that_becomes_more_than_nothing_ends_the_graph(rows, device):
    model = LeavesOut(0.0)

    def change(step, optimizer):
        model.chance = 0.5 if step > 20 else 0.0

    trainer, history = fit(rows, device, "auto", model, change)
    assert trainer._captured.reason == "eager: the step draws random numbers on the host"
    model = LeavesOut(0.0)
    _, expected = fit(rows, device, "off", model, change)
    assert history.losses == pytest.approx(expected.losses, rel=1e-4)


# -- draws are the same in both ----------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Flatten(), nn.LazyLinear(8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, x):
        return self.net(x.float())


def augmentation(device, seed=3):
    if device == "cpu":
        return Jitter()
    return Compose(
        [RandomCrop(8, padding=2), RandomHorizontalFlip(), Normalize(0.5, 0.2)], seed=seed
    )


def train_images(store, device, where, capture, unpack=None, **options):
    model = Net().to(device)
    model(torch.zeros(1, 3, 8, 8, device=device))
    aug = augmentation(device)
    loader = Loader(
        store,
        16,
        device,
        order="shuffled",
        seed=2,
        augment=aug if where == "loader" else None,
        **options,
    )
    trainer = Trainer(
        model,
        loader,
        None,
        nn.functional.cross_entropy,
        torch.optim.AdamW(model.parameters(), lr=0.01),
        None,
        {"epochs": 4, "capture": capture, "precision": "fp32"},
        device,
        aug if where == "trainer" else None,
        unpack=unpack,
    )
    return trainer, trainer.fit()


@pytest.mark.parametrize("chunk_bytes", [None, 40 * 200])
@pytest.mark.parametrize("where", ["loader", "trainer"])
def test_augmentation_in_the_loader_is_captured_as_in_the_trainer(
    images, device, where, chunk_bytes
):
    trainer, history = train_images(images, device, where, "on", chunk_bytes=chunk_bytes)
    assert trainer._captured.active, trainer._captured.reason
    assert trainer._captured._num_checked >= CHECKED_REPLAYS
    expected = train_images(images, device, "trainer", "off")[1] if chunk_bytes is None else None
    if expected is not None:
        assert history.losses == pytest.approx(expected.losses, rel=1e-3)


def test_two_augmentations_are_refused(images, device):
    loader = Loader(images, 16, device, augment=augmentation(device))
    model = nn.Linear(1, 1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(InputError, match="the loader augments its images") as error:
        Trainer(
            model,
            loader,
            None,
            nn.functional.mse_loss,
            optimizer,
            None,
            None,
            device,
            augmentation(device, 4),
        )
    assert "without gpu_augmentation" in error.value.fix


def test_mixing_in_unpack_draws_alike(images, device):
    mix = Jitter() if device == "cpu" else MixUp(0.4, 4, seed=5)
    function = mix.mix if device == "cpu" else mix

    def unpack(batch):
        return function(batch["images"], batch["labels"])

    trainer, history = train_images(images, device, "loader", "on", unpack)
    assert trainer._captured.active, trainer._captured.reason
    mix.seek(0, 0)
    expected = train_images(images, device, "loader", "off", unpack)[1]
    assert history.losses == pytest.approx(expected.losses, rel=1e-3)


class DrawsOnHost:
    """An augmentation that counts its batches on the host: a graph would repeat one draw for ever."""

    def __init__(self):
        self.place = [0, 0]

    def __call__(self, images, masks=None, *, rows=None):
        taken = images if rows is None else images.index_select(0, rows)
        self.place[1] += 1
        return taken.float() / 255 + 1e-6 * self.place[1]

    def seek(self, epoch, step=0):
        self.place[:] = [epoch, step]

    def state_dict(self):
        return {"epoch": self.place[0], "step": self.place[1]}

    def load_state_dict(self, state):
        self.place[:] = [state["epoch"], state["step"]]


def test_an_augmentation_that_counts_on_the_host_is_caught(images, device):
    runs = []
    for capture in ("auto", "off"):
        model = Net().to(device)
        model(torch.zeros(1, 3, 8, 8, device=device))
        loader = Loader(images, 16, device, order="shuffled", seed=2, augment=DrawsOnHost())
        trainer = Trainer(
            model, loader, None, nn.functional.cross_entropy,
            torch.optim.AdamW(model.parameters(), lr=0.01), None,
            {"epochs": 4, "capture": capture, "precision": "fp32"}, device,
        )  # fmt: skip
        runs.append(trainer.fit().losses)
        if capture == "auto":
            assert "on the host, which a graph cannot follow" in trainer._captured.reason
    assert runs[0] == pytest.approx(runs[1], rel=1e-3)


@pytest.mark.parametrize("clip_norm", [1.0, None])
def test_a_step_that_does_something_else_each_time_is_not_taken_for_noise(rows, device, clip_norm):
    class Alternates(nn.Module):
        """Computes two things by turns, on top of layers that are not trained."""

        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(*(nn.Linear(6, 6) for _ in range(12)))
            self.body.requires_grad_(False)
            self.head, self.turns = nn.Linear(6, 1), [[iter(range(10_000))]]

        def forward(self, x):
            return self.head(self.body(x)) * (1.0 + next(self.turns[0][0]) % 2)

    torch.manual_seed(0)
    trainer, _ = fit(rows, device, model=Alternates(), epochs=2, clip_norm=clip_norm)
    assert trainer._captured.is_given_up, trainer._captured.reason
