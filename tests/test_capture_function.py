"""`stoker.capture`: anybody's step as one graph, equal to the step itself, and honest where it cannot be.

On a CPU the graphs are made of paper (`paper_graphs.py`).
"""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

import stoker
from paper_graphs import Jitter
from stoker.errors import InputError
from stoker.loader.loader import Loader
from stoker.store.fields import Dense
from stoker.train.graphs.function import MOST_GRAPHS
from stoker.train.graphs.graphed_step import CHECKED_REPLAYS, WARM_UP_STEPS
from stoker.train.ranks import Ranks
from store_makers import write_store
from training_makers import make_model

FIRST = WARM_UP_STEPS + CHECKED_REPLAYS


class Loop:
    """A model, an optimizer, and the step that somebody wrote."""

    def __init__(self, device, make_optimizer, model=None):
        torch.manual_seed(0)
        self.model = (model or make_model()).to(device)
        self.optimizer = make_optimizer(self.model.parameters())

    def step(self, batch):
        x, y = batch
        self.optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.mse_loss(self.model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.detach()

    @property
    def weights(self):
        return nn.utils.parameters_to_vector(self.model.parameters()).detach().cpu()


def batches(device, count=20, size=8, seed=1):
    generator = torch.Generator().manual_seed(seed)
    pairs = [torch.randn(size, 7, generator=generator) for _ in range(count)]
    return [(pair[:, :6].to(device), pair[:, 6:].to(device)) for pair in pairs]


OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "Adam, amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.001),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_captured_loop_is_the_loop(device, name):
    captured, plain = (Loop(device, OPTIMIZERS[name]) for _ in range(2))
    step = stoker.capture(captured.step, model=captured.model, optimizer=captured.optimizer)
    first, *others = batches(device, 80)
    losses = [float(step(first))]
    assert not step.is_captured  # it warms up
    losses += [float(step(batch)) for batch in others]
    expected = [float(plain.step(batch)) for batch in batches(device, 80)]
    # On a CPU the others count on the host; on a GPU they are told not to.
    if device == "cuda" or name in ("AdamW", "SGD with momentum"):
        assert step.is_captured, step.reason
        assert "agreed with eager steps" in step.reason
        assert step.slowdown > 0
    assert losses == pytest.approx(expected, rel=1e-3, abs=1e-5)
    torch.testing.assert_close(captured.weights, plain.weights, rtol=1e-3, atol=1e-4)


pytestmark = pytest.mark.filterwarnings("default:stoker.capture")


@pytest.mark.parametrize("form", ["arguments", "tuple", "dict"])
def test_a_step_of_several_arguments_is_captured(device, form):
    captured, plain = (Loop(device, OPTIMIZERS["AdamW"]) for _ in range(2))

    def train_step(rows, targets):
        return captured.step((rows, targets))

    step = stoker.capture(train_step, model=captured.model, optimizer=captured.optimizer)
    for rows, targets in batches(device):
        if form == "arguments":
            loss = step(rows, targets)
        else:
            loss = step((rows, targets) if form == "tuple" else {"rows": rows, "targets": targets})
        assert float(loss) == pytest.approx(float(plain.step((rows, targets))), rel=1e-3, abs=1e-5)
    assert step.is_captured, step.reason


def test_a_scheduler_is_followed(device):
    runs = []
    for is_captured in (True, False):
        loop = Loop(device, OPTIMIZERS["AdamW"])
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(loop.optimizer, 20)
        step = loop.step
        if is_captured:
            step = stoker.capture(step, model=loop.model, optimizer=loop.optimizer)
        for batch in batches(device):
            step(batch)
            scheduler.step()
        runs.append(loop.weights)
        assert not is_captured or step.is_captured, step.reason
    torch.testing.assert_close(*runs, rtol=1e-3, atol=1e-4)


def test_shapes_that_change_have_graphs_of_their_own(device):
    captured, plain = (Loop(device, OPTIMIZERS["AdamW"]) for _ in range(2))
    step = stoker.capture(captured.step, model=captured.model, optimizer=captured.optimizer)
    long, short = batches(device, 30, 8), batches(device, 10, 5, seed=2)
    mixed = [
        batch
        for number in range(10)
        for batch in (*long[3 * number : 3 * number + 3], short[number])
    ]
    losses = [float(step(batch)) for batch in mixed]
    assert step.is_captured
    assert len(step._graphs) == 2
    assert all(graph.active for graph in step._graphs)
    assert losses == pytest.approx(
        [float(plain.step(batch)) for batch in mixed], rel=1e-3, abs=1e-5
    )


def test_too_many_shapes_run_eagerly_and_say_so(device):
    captured, plain = (Loop(device, OPTIMIZERS["AdamW"]) for _ in range(2))
    said = []
    step = stoker.capture(
        captured.step, model=captured.model, optimizer=captured.optimizer, say=said.append
    )
    mixed = [batches(device, 1, size, seed=size)[0] for size in range(1, 3 * MOST_GRAPHS)]
    losses = [float(step(batch)) for batch in mixed]
    assert any(f"more than {MOST_GRAPHS} shapes" in line for line in said)
    assert losses == pytest.approx(
        [float(plain.step(batch)) for batch in mixed], rel=1e-3, abs=1e-5
    )


def test_batches_on_the_host_are_copied(device):
    captured, plain = (Loop(device, OPTIMIZERS["AdamW"]) for _ in range(2))

    def move_and_train(loop):
        return lambda batch: loop.step(tuple(part.to(device) for part in batch))

    step = stoker.capture(
        move_and_train(captured), model=captured.model, optimizer=captured.optimizer
    )
    losses = [float(step(batch)) for batch in batches("cpu")]
    assert step.is_captured, step.reason
    assert losses == pytest.approx(
        list(map(float, map(move_and_train(plain), batches("cpu")))), rel=1e-3
    )


def test_two_optimizers_and_a_moving_average(device):
    """A step as of a GAN: two models, two optimizers, and an average of the weights of one."""

    def build():
        torch.manual_seed(0)
        makes, judges = nn.Linear(4, 6).to(device), nn.Linear(6, 1).to(device)
        average = copy.deepcopy(makes)
        optimizers = [torch.optim.Adam(m.parameters(), lr=0.01) for m in (makes, judges)]

        def step(batch):
            noise, real = batch
            fake = makes(noise)
            judged = judges(fake.detach()).mean() - judges(real).mean()
            optimizers[1].zero_grad()
            judged.backward()
            optimizers[1].step()
            made = -judges(fake).mean()
            optimizers[0].zero_grad()
            made.backward()
            optimizers[0].step()
            with torch.no_grad():
                for mean, now in zip(average.parameters(), makes.parameters(), strict=True):
                    mean.lerp_(now, 0.1)
            return {"judged": judged.detach(), "made": made.detach()}

        return (makes, judges, average), optimizers, step

    generator = torch.Generator().manual_seed(1)
    data = [
        (
            torch.randn(8, 4, generator=generator).to(device),
            torch.randn(8, 6, generator=generator).to(device),
        )
        for _ in range(20)
    ]
    models, optimizers, plain = build()
    expected = [{k: float(v) for k, v in plain(batch).items()} for batch in data]
    others, optimizers, written = build()
    step = stoker.capture(written, data[0], model=others, optimizer=optimizers)
    found = [{k: float(v) for k, v in step(batch).items()} for batch in data]
    assert step.is_captured, step.reason
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-3, abs=1e-5)
    for one, other in zip(others, models, strict=True):
        torch.testing.assert_close(
            list(one.parameters()), list(other.parameters()), rtol=1e-3, atol=1e-4
        )


@pytest.mark.parametrize("chunk_bytes", [None, 40 * 200])
def test_gather_and_augmentation_are_in_the_graph(device, tmp_path, chunk_bytes):
    rng = np.random.default_rng(0)
    fields = {
        "images": Dense(rng.integers(0, 256, (96, 3, 8, 8), dtype=np.uint8)),
        "labels": Dense(rng.integers(0, 4, 96)),
    }
    store = write_store(tmp_path / "s", [fields])
    runs = []
    for is_captured in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(192, 4)).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

        def written(batch, model=model, optimizer=optimizer):
            loss = nn.functional.cross_entropy(model(batch["images"]), batch["labels"])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        loader = Loader(
            store,
            16,
            device,
            order="shuffled",
            seed=3,
            augment=Jitter(device),
            chunk_bytes=chunk_bytes,
        )
        losses = []
        with loader:
            if is_captured:
                step = stoker.capture(written, model=model, optimizer=optimizer, loader=loader)
            for _ in range(4):
                if is_captured:
                    losses += [step(index) for index in loader.index_batches()]
                else:
                    losses += [written(batch).detach() for batch in loader]
        runs.append([float(loss) for loss in losses])
        assert not is_captured or step.is_captured, step.reason
    assert runs[0] == pytest.approx(runs[1], rel=1e-3)


# -- what cannot be -----------------------------------------------------------------------------------


def test_a_step_that_branches_on_data_is_run_eagerly(device):
    def build():
        loop = Loop(device, OPTIMIZERS["AdamW"])

        def step(batch):
            x, y = batch
            return loop.step((x if x[0, 0].item() > 0 else -x, y))

        return loop, step

    (captured, written), (_, expected) = build(), build()
    step = stoker.capture(written, model=captured.model, optimizer=captured.optimizer)
    losses: list[float] = []
    # A graph takes the way of the batch it was made with; two of these go the other way.
    data = batches(device)
    for number, (x, _) in enumerate(data):
        x[0, 0] = (-1) ** number
    with pytest.warns(RuntimeWarning, match=r"stoker\.capture: step eager"):
        losses.extend(float(step(batch)) for batch in data)
    assert step.reason.startswith("eager: ")
    assert losses == pytest.approx([float(expected(batch)) for batch in data], rel=1e-3)


def test_a_step_that_draws_on_the_host_is_run_eagerly(device):
    loop = Loop(device, OPTIMIZERS["AdamW"])
    said = []

    def written(batch):
        x, y = batch
        return loop.step((x * np.random.rand(), y))

    step = stoker.capture(written, model=loop.model, optimizer=loop.optimizer, say=said.append)
    for batch in batches(device):
        step(batch)
    assert step.reason == "eager: the step draws random numbers on the host"
    assert said == ["step eager: the step draws random numbers on the host"]


def test_a_variable_of_the_loop_is_never_stale(device):
    losses = []
    for is_captured in (True, False):
        loop = Loop(device, OPTIMIZERS["AdamW"])
        weight = 1.0

        def written(batch, loop=loop):
            x, y = batch
            return loop.step((x * weight, y))  # noqa: B023 (what is tested)

        step = written
        if is_captured:
            step = stoker.capture(written, model=loop.model, optimizer=loop.optimizer)
        found = []
        for number, batch in enumerate(batches(device, 40)):
            weight = 1.0 if number < 15 else 2.0
            found.append(float(step(batch)))
        losses.append(found)
        assert not is_captured or step.is_captured, step.reason
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


class Keeper:
    """A trainer of somebody's own: the step is a method, with a setting and an augmentation of its own."""

    def __init__(self, device):
        self.loop = Loop(device, OPTIMIZERS["AdamW"])
        self.gain, self.noise = 1.0, Jitter(device)

    def step(self, batch):
        x, y = batch
        drawn = self.noise(torch.ones(len(x), 1, 1, 1, device=x.device) * 255).view(-1, 1)
        return self.loop.step((x * self.gain * drawn, y))


def test_what_a_method_reads_and_draws_is_followed(device):
    losses = []
    for is_captured in (True, False):
        keeper = Keeper(device)
        step = keeper.step
        if is_captured:
            step = stoker.capture(step, model=keeper.loop.model, optimizer=keeper.loop.optimizer)
        found = []
        for number, batch in enumerate(batches(device, 40)):
            keeper.gain = 1.0 if number < 15 else 2.0
            found.append(float(step(batch)))
        losses.append(found)
        assert not is_captured or step.is_captured, step.reason
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_a_step_that_appends_to_a_list_is_run_eagerly(device):
    loop, kept = Loop(device, OPTIMIZERS["AdamW"]), []

    def written(batch):
        loss = loop.step(batch)
        kept.append(loss)
        return loss

    step = stoker.capture(written, model=loop.model, optimizer=loop.optimizer, say=lambda _: None)
    for batch in batches(device):
        step(batch)
    assert "the length of kept" in step.reason
    assert len(kept) == 20


@pytest.mark.parametrize("at", [1, WARM_UP_STEPS + 1, FIRST, FIRST + 5])
def test_a_step_that_raises_in_the_middle_raises_its_own_error(device, at):
    """While replays are compared nothing of that step remains; a replay runs no Python, so it raises nothing."""
    loop = Loop(device, OPTIMIZERS["AdamW"])
    calls = []

    def written(batch):
        calls.append(1)
        if len(calls) == at:
            raise KeyError("a bug of mine")
        return loop.step(batch)

    step = stoker.capture(written, model=loop.model, optimizer=loop.optimizer, say=lambda _: None)
    raised = 0
    for batch in batches(device):
        before = loop.weights
        try:
            step(batch)
        except KeyError:
            raised += 1
            if at > 1:
                assert torch.equal(before, loop.weights)
            step(batch)
    assert raised <= 1
    assert at != 1 or raised == 1


def test_a_step_that_returns_no_loss_is_refused(device):
    loop = Loop(device, OPTIMIZERS["AdamW"])
    for result, named in ((None, "None"), (1.5, "a float")):
        step = stoker.capture(lambda _, r=result: r, model=loop.model, optimizer=loop.optimizer)
        with pytest.raises(InputError, match=f"the step returned {named}"):
            step(batches(device)[0])


def test_bad_arguments_are_named(device):
    loop = Loop(device, OPTIMIZERS["AdamW"])
    known = {"model": loop.model, "optimizer": loop.optimizer}
    with pytest.raises(InputError, match="without tensors"):
        stoker.capture(loop.step, ["a", 1], **known)
    with pytest.raises(InputError, match="0 parameters"):
        stoker.capture(loop.step, model=nn.Identity(), optimizer=loop.optimizer)
    with pytest.raises(InputError, match="0 optimizers"):
        stoker.capture(loop.step, model=loop.model, optimizer=[])
    with pytest.raises(InputError, match="a step that is a int"):
        stoker.capture(3, **known)


def test_what_the_step_trains_must_be_given(device):
    """A model or an optimizer that was forgotten would be trained twice while both ways are compared."""
    maker, judge = nn.Linear(4, 6).to(device), nn.Linear(6, 1).to(device)
    first, second = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (maker, judge))

    def step(batch):
        loss = judge(maker(batch)).mean()
        loss.backward()
        first.step()
        second.step()
        return loss

    class Owner:
        def __init__(self):
            self.first, self.second = first, second

        def step(self, batch):
            return step(batch)

    for written in (step, Owner().step):
        with pytest.raises(InputError, match="trains an optimizer that was not given"):
            stoker.capture(written, model=[maker, judge], optimizer=first)
        with pytest.raises(
            InputError, match="trains a model that was not given: 2 parameters of SGD"
        ):
            stoker.capture(written, model=maker, optimizer=[first, second])
        given = {"model": {"m": maker, "j": judge}, "optimizer": {"m": first, "j": second}}
        assert stoker.capture(written, **given).reason == "captured after the first steps"


def test_what_cannot_be_captured_at_all_says_so_at_once(device, monkeypatch, tmp_path):
    loop, said = Loop(device, OPTIMIZERS["AdamW"]), []
    known = {"optimizer": loop.optimizer, "say": said.append}
    step = stoker.capture(loop.step, model=[nn.DataParallel(make_model()), loop.model], **known)
    assert "DataParallel starts threads" in step.reason
    monkeypatch.setattr(Ranks, "current", lambda: Ranks(0, 2, 2, joined=True))
    step = stoker.capture(loop.step, model=loop.model, **known)
    assert "several processes" in step.reason
    assert len(said) == 2
    step(batches(device)[0])
    fields = {"features": Dense(np.zeros((8, 2), "f4"))}
    loader = Loader(write_store(tmp_path / "s", [fields]), 4, device)
    loader.tier = "streamed"
    with pytest.raises(InputError, match="a loader that streams its data"):
        stoker.capture(loop.step, model=loop.model, loader=loader, **known)


def test_a_batch_of_a_class_of_ones_own_is_run_eagerly(device):
    class Mine:
        def __init__(self, pair):
            self.pair = pair

    loop = Loop(device, OPTIMIZERS["AdamW"])
    said = []
    step = stoker.capture(
        lambda b: loop.step(b.pair), model=loop.model, optimizer=loop.optimizer, say=said.append
    )
    for batch in batches(device):
        step(Mine(batch))
    assert "a batch is a Mine" in step.reason
    assert len(said) == 1


def test_on_a_cpu_it_runs_eagerly_with_the_reason():
    loop, plain = (Loop("cpu", OPTIMIZERS["AdamW"]) for _ in range(2))
    step = stoker.capture(loop.step, batches("cpu")[0], model=loop.model, optimizer=loop.optimizer)
    assert step.reason == "eager: there are no CUDA graphs on the CPU"
    assert not step.is_captured
    assert step.slowdown is None
    losses = [float(step(batch)) for batch in batches("cpu")]
    assert losses == [float(plain.step(batch)) for batch in batches("cpu")]


def make_update(device):
    torch.manual_seed(0)
    model = nn.Linear(6, 1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def update(x, y=None, *, by=1.0):
        loss = (model(x) - (0.0 if y is None else y)).square().mean() * by
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    class Whole(nn.Module):
        def forward(self, x, y, by):
            return update(x, y, by=by)

    return model, optimizer, update, Whole()


@pytest.mark.parametrize("is_module", [False, True])
def test_a_step_is_called_with_its_arguments_as_they_are_given(device, is_module):
    x, y = torch.randn(8, 6, device=device), torch.randn(8, 1, device=device)

    def run(captured):
        model, optimizer, update, whole = make_update(device)
        step = whole if is_module else update
        if captured:
            step = stoker.capture(step, model=model, optimizer=optimizer)
        return step, [float(step(x, y, by=0.5)) for _ in range(8)]

    step, losses = run(captured=True)
    torch.testing.assert_close(losses, run(captured=False)[1])
    assert step.is_captured


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda step, x, n: step(x, None, by=float(n)), "argument[2][by] in a batch has more"),
        (lambda step, x, n: step({"x": x, "names": [f"{n}.png"]}), "names[0] in a batch has more"),
        (lambda step, x, n: step(x[: n + 1]), "batches have more than 4 shapes"),
    ],
)
def test_what_differs_between_batches_is_named(device, call, named):
    model, optimizer, update, _ = make_update(device)

    def run(x, y=None, by=1.0):
        return update(x["x"] if isinstance(x, dict) else x, y, by=by)

    said = []
    step = stoker.capture(run, model=model, optimizer=optimizer, say=said.append)
    for number in range(6):
        call(step, torch.ones(8, 6, device=device), number)
    assert named in said[-1]
