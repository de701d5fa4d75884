"""Training loops of known kinds, as strangers write them: each is the plain loop, captured or eager with the reason.

On a CPU the graphs are made of paper (`paper_graphs.py`).
"""

from __future__ import annotations

import collections
import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, kl_div, log_softmax, mse_loss, normalize, softmax

import stoker
from stoker.train.trainer import Trainer

NUM_BATCHES = 16


def make_net(inputs=6, outputs=4):
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs))


class Run:
    """A device, batches, and how a step is wrapped."""

    def __init__(self, device, is_captured):
        torch.manual_seed(0)
        self.device, self.is_captured, self.step = device, is_captured, None
        self.features = torch.randn(NUM_BATCHES, 8, 6).to(device)
        self.noise = torch.randn(NUM_BATCHES, 8, 6).to(device)

    def capture(self, step, model, optimizer):
        self.step = step
        if self.is_captured:
            self.step = stoker.capture(step, model=model, optimizer=optimizer)
        return self.step


def update(optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def diffusion(run):
    model = make_net(7, 6).to(run.device)
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    kept = torch.linspace(0.9, 0.1, 10, device=run.device)

    def step(batch):
        x, noise, time = batch
        share = kept[time].unsqueeze(1)
        noisy = share.sqrt() * x + (1 - share).sqrt() * noise
        told = torch.cat([noisy, time.unsqueeze(1) / 10], 1)
        loss = update(optimizer, mse_loss(model(told), noise))
        with torch.no_grad():
            for mean, now in zip(average.parameters(), model.parameters(), strict=True):
                mean.mul_(0.9).add_(now, alpha=0.1)
        return loss

    step = run.capture(step, [model, average], optimizer)
    times = torch.arange(8, device=run.device)
    losses = [
        step((x, noise, (times + number) % 10))
        for number, (x, noise) in enumerate(zip(run.features, run.noise, strict=True))
    ]
    return [*losses, *(p.sum() for p in average.parameters())]


class Momentum(nn.Module):
    """MoCo: a second encoder that follows, and a queue of its keys with a place on the device or on the host."""

    def __init__(self, on_host):
        super().__init__()
        self.query, self.on_host = make_net(), on_host
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.register_buffer("queue", normalize(torch.randn(32, 4), dim=1))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))
        self.host_place = 0

    @torch.no_grad()
    def follow(self, x):
        for key, query in zip(self.key.parameters(), self.query.parameters(), strict=True):
            key.mul_(0.9).add_(query, alpha=0.1)
        return normalize(self.key(x), dim=1)

    @torch.no_grad()
    def enqueue(self, keys):
        if self.on_host:
            self.queue[self.host_place : self.host_place + len(keys)] = keys
            self.host_place = (self.host_place + len(keys)) % len(self.queue)
        else:
            rows = self.place + torch.arange(len(keys), device=keys.device)
            self.queue.index_copy_(0, rows, keys)
            self.place.add_(len(keys)).remainder_(len(self.queue))

    def forward(self, x, other):
        queries, keys = normalize(self.query(x), dim=1), self.follow(other)
        near = (queries * keys).sum(1, keepdim=True)
        logits = torch.cat([near, queries @ self.queue.clone().T], 1) / 0.2
        self.enqueue(keys)
        return logits


def contrast(run, on_host=False):
    model = Momentum(on_host).to(run.device)
    optimizer = torch.optim.SGD(model.query.parameters(), lr=0.1, momentum=0.9)

    def step(batch):
        logits = model(*batch)
        wanted = torch.zeros(len(logits), dtype=torch.long, device=logits.device)
        return update(optimizer, cross_entropy(logits, wanted))

    step = run.capture(step, model, optimizer)
    pairs = zip(run.features, run.noise, strict=True)
    return [*(step((x, x + 0.1 * noise)) for x, noise in pairs), model.queue.sum(), model.place]


def contrast_by_host(run):
    return contrast(run, on_host=True)


class Replays:
    """What an agent has seen, in a ring of tensors on the device."""

    def __init__(self, device):
        self.states, self.rewards = torch.zeros(64, 6).to(device), torch.zeros(64).to(device)
        self.end = 0

    def add(self, states, rewards):
        self.states[self.end : self.end + len(states)] = states
        self.rewards[self.end : self.end + len(states)] = rewards
        self.end = (self.end + len(states)) % 64


def reinforce(run, inside=False):
    model, seen = make_net(6, 1).to(run.device), Replays(run.device)
    target = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def learn(batch):
        _, rows = batch
        with torch.no_grad():
            wanted = seen.rewards[rows] + 0.9 * target(seen.states[rows]).squeeze(1)
        return update(optimizer, mse_loss(model(seen.states[rows]).squeeze(1), wanted))

    def see_and_learn(batch):
        seen.add(batch[0], batch[0][:, 0])
        return learn(batch)

    step, losses = run.capture(see_and_learn if inside else learn, model, optimizer), []
    rows = torch.arange(8, device=run.device)
    for number, states in enumerate(run.features):
        if not inside:
            seen.add(states, states[:, 0])
        losses.append(step((states, rows * (number + 1) % 64)))
        if number % 5 == 4:
            target.load_state_dict(model.state_dict())
    return [*losses, seen.states.sum(), seen.rewards.sum()]


def reinforce_within(run):
    return reinforce(run, inside=True)


def distil(run):
    teacher, student = make_net().to(run.device).eval(), make_net().to(run.device)
    optimizer = torch.optim.AdamW(student.parameters(), lr=0.01)

    def step(x):
        with torch.no_grad():
            wanted = softmax(teacher(x) / 2, 1)
        loss = kl_div(log_softmax(student(x) / 2, 1), wanted, reduction="batchmean") * 4
        return update(optimizer, loss)

    step = run.capture(step, student, optimizer)
    return [*(step(x) for x in run.features), *(p.detach().sum() for p in teacher.parameters())]


def anneal(run, every=1):
    encoder, decoder = make_net(6, 4).to(run.device), make_net(2, 6).to(run.device)
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=0.01)
    beta = 0.0

    def step(batch):
        x, noise = batch
        mean, log_variance = encoder(x).chunk(2, 1)
        hidden = mean + torch.exp(0.5 * log_variance) * noise[:, :2]
        far = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1).mean()
        return update(optimizer, mse_loss(decoder(hidden), x) + beta * far)

    step, losses = run.capture(step, [encoder, decoder], optimizer), []
    for number, batch in enumerate([*zip(run.features, run.noise, strict=True)] * 3):
        beta = min(1.0, number // every / 40)
        losses.append(step(batch))
    return losses


def anneal_by_epoch(run):
    return anneal(run, every=12)


def penalise(run):
    model = make_net(6, 1).to(run.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def step(batch):
        real, fake = batch
        between = (0.3 * real + 0.7 * fake).requires_grad_()
        (slopes,) = torch.autograd.grad(model(between).sum(), between, create_graph=True)
        penalty = (slopes.norm(2, 1) - 1).square().mean()
        return update(optimizer, model(fake).mean() - model(real).mean() + 10 * penalty)

    step = run.capture(step, model, optimizer)
    return [step(batch) for batch in zip(run.features, run.noise, strict=True)]


def thaw(run):
    """A fine-tuning that begins with the last layer."""
    model = make_net().to(run.device)
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    step = run.capture(lambda x: update(optimizer, model(x).square().mean()), model, optimizer)
    losses = []
    for number, x in enumerate(run.features):
        if number == NUM_BATCHES // 2:
            model[0].requires_grad_(True)
        losses.append(step(x))
    return [*losses, model[0].weight.detach().sum()]


def decay_by_epoch(run):
    model = make_net().to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = run.capture(lambda x: update(optimizer, model(x).square().mean()), model, optimizer)
    losses = []
    for epoch in range(6):
        if epoch == 5:  # after 77 replays
            optimizer.param_groups[0]["weight_decay"] = 5.0
        losses += [step(x) for x in run.features]
    return losses


def supervised(run):
    return [(x, noise[:, 0].gt(0).long()) for x, noise in zip(run.features, run.noise, strict=True)]


def remember(run):
    """Elastic weight consolidation: at the moment when the weights are saved, the distance from them is 0."""
    model, importance, saved = make_net().to(run.device), {}, {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        x, wanted = batch
        loss = cross_entropy(model(x), wanted)
        for name, parameter in model.named_parameters():
            if name in importance:
                loss = loss + (importance[name] * (parameter - saved[name]).square()).sum()
        return update(optimizer, loss)

    step, losses = run.capture(step, model, optimizer), []
    for task in range(1, 4):
        losses += [step(batch) for batch in supervised(run)]
        for name, parameter in model.named_parameters():
            importance[name] = torch.full_like(parameter, 4.0 * task)
            saved[name] = parameter.detach().clone()
    return losses


def call_back(run):
    """A trainer with lists of callbacks by event."""

    class Loop:
        def __init__(self):
            self.model = make_net().to(run.device)
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
            self.callbacks = {"on_batch_end": []}

        def train_step(self, batch):
            self.loss = update(self.optimizer, cross_entropy(self.model(batch[0]), batch[1]))
            for call in self.callbacks["on_batch_end"]:
                call(self)
            return self.loss

    loop, seen = Loop(), []
    loop.callbacks["on_batch_end"].append(lambda done: seen.append(done.loss))
    step = run.capture(loop.train_step, loop.model, loop.optimizer)
    losses = [step(batch) for batch in supervised(run)]
    return [*losses, *seen, torch.tensor(len(seen))]


def weigh_by_a_bare_tensor(run):
    """As the temperature of soft actor-critic: no `nn.Parameter`, so in no module."""
    model = make_net().to(run.device)
    weight = torch.zeros(1, device=run.device, requires_grad=True)
    first = torch.optim.Adam(model.parameters(), lr=0.01)
    second = torch.optim.Adam([weight], lr=0.1)

    def step(batch):
        loss = cross_entropy(model(batch[0]), batch[1]) * weight.exp().sum() - weight.sum()
        second.zero_grad()
        loss = update(first, loss)
        second.step()
        return loss

    step = run.capture(step, model, [first, second])
    return [*(step(batch) for batch in supervised(run)), weight.detach()]


def perturb(run):
    """Free adversarial training: a perturbation that is kept, and given other memory by each step."""
    model = make_net().to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    change = torch.zeros(8, 6, device=run.device, requires_grad=True)

    def step(batch):
        loss = update(optimizer, cross_entropy(model(batch[0] + change), batch[1]))
        change.data = (change + 0.5 * change.grad).detach()
        change.grad.zero_()
        return loss

    step = run.capture(step, model, optimizer)
    return [*(step(batch) for batch in supervised(run)), change.detach().sum()]


class Scales:
    """A scaler in an object of one's own, as timm has it."""

    def __init__(self, device):
        self.inner = torch.amp.GradScaler(device, init_scale=4.0, growth_interval=3)

    def __call__(self, loss, optimizer):
        self.inner.scale(loss).backward()
        self.inner.step(optimizer)
        self.inner.update()


def scale(run):
    model, scales = make_net().to(run.device), Scales(run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        optimizer.zero_grad()
        loss = cross_entropy(model(batch[0]), batch[1])
        scales(loss, optimizer)
        return loss.detach()

    step = run.capture(step, model, optimizer)
    losses = [step(batch) for batch in supervised(run)]
    return [*losses, torch.tensor(scales.inner.get_scale())]


def go_back(run):
    """Search for a rate and go back to the first weights, as a learning-rate finder does; then thaw by a new group."""
    model = make_net().to(run.device)
    model[0].requires_grad_(False)
    optimizer = torch.optim.Adam(model[2].parameters(), lr=1e-3)
    kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))

    def step(batch):
        return update(optimizer, cross_entropy(model(batch[0]), batch[1]))

    step, losses = run.capture(step, model, optimizer), []
    for number, batch in enumerate(supervised(run)):
        optimizer.param_groups[0]["lr"] = 1e-3 * 1.3**number
        losses.append(step(batch))
    model.load_state_dict(kept[0])
    optimizer.load_state_dict(kept[1])
    losses += [step(batch) for batch in supervised(run)]
    model[0].requires_grad_(True)
    optimizer.add_param_group({"params": model[0].parameters(), "lr": 1e-2})
    losses += [step(batch) for batch in supervised(run)]
    return [*losses, model[0].weight.detach().sum()]


def take_two(run):
    """Half of each step's samples come from an iterator of the loop's own, as unlabelled ones do."""
    model = make_net().to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    others = iter(run.noise)

    def step(batch):
        return update(optimizer, cross_entropy(model(batch[0] + next(others)), batch[1]))

    step = run.capture(step, model, optimizer)
    return [*(step(batch) for batch in supervised(run)), torch.tensor(len([*others]))]


def empty_state(run):
    """The moments begin anew for each task."""
    model = make_net().to(run.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    step = run.capture(
        lambda batch: update(optimizer, cross_entropy(model(batch[0]), batch[1])), model, optimizer
    )
    losses = []
    for task in range(3):
        if task == 1:
            optimizer.state.clear()
        elif task == 2:
            optimizer.state = collections.defaultdict(dict)
        losses += [step(batch) for batch in supervised(run)]
    return losses


def scale_in_place(run):
    """A step that changes its batch, takes an entry out, and counts on the host: it is run again in a comparison."""
    model = make_net().to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counts = [0]

    def step(batch):
        x, wanted = batch["x"].mul_(2), batch.pop("wanted")
        counts[0] += 1
        return update(optimizer, cross_entropy(model(x) * (1 + counts[0]), wanted))

    step = run.capture(step, model, optimizer)
    return [step({"x": x.clone(), "wanted": wanted}) for x, wanted in supervised(run)]


@pytest.mark.filterwarnings("ignore:stoker.capture")
@pytest.mark.parametrize(
    ("write", "reason"),
    [
        (take_two, "eager: the step takes from others, an iterator on the host"),
        (empty_state, "replays agreed"),
        (scale_in_place, "eager: the step changes counts"),
        (remember, "replays agreed"),
        (call_back, "eager: the step changes the length of seen"),
        (weigh_by_a_bare_tensor, "replays agreed"),
        (perturb, "eager: the step gives tensors other memory"),
        (scale, "replays agreed"),
        (go_back, "replays agreed"),
        (diffusion, "replays agreed"),
        (contrast, "replays agreed"),
        (contrast_by_host, "eager: the step changes Momentum.host_place"),
        (reinforce, "replays agreed"),
        (reinforce_within, "eager: the step changes seen"),
        (distil, "replays agreed"),
        (anneal, "eager: beta of step has changed"),
        (anneal_by_epoch, "replays agreed"),
        (penalise, "replays agreed"),
        (thaw, "replays agreed"),
        (decay_by_epoch, "replays agreed"),
    ],
)
def test_it_is_the_plain_loop(device, write, reason):
    expected = [float(value) for value in write(Run(device, is_captured=False))]
    run = Run(device, is_captured=True)
    found = [float(value) for value in write(run)]
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
    assert reason in run.step.reason


class Contrasts(Momentum):
    """The same with one input, for a `Trainer`."""

    def forward(self, x):
        return super().forward(x, 0.9 * x)


@pytest.mark.parametrize("on_host", [False, True])
def test_a_queue_of_a_module_in_a_trainer_is_the_plain_loop(device, on_host):
    def make():
        torch.manual_seed(0)
        model = Contrasts(on_host).to(device)
        features = torch.randn(NUM_BATCHES, 8, 6)
        wanted = torch.zeros(8, dtype=torch.long)
        batches = [(x.to(device), wanted.to(device)) for x in features]
        return model, torch.optim.SGD(model.query.parameters(), lr=0.1), batches

    plain, optimizer, batches = make()
    losses = [float(update(optimizer, cross_entropy(plain(x), wanted))) for x, wanted in batches]
    model, optimizer, batches = make()
    config = {"epochs": 1, "precision": "fp32"}
    trainer = Trainer(model, batches, None, nn.CrossEntropyLoss(), optimizer, None, config, device)
    found = trainer.fit(quiet=True).losses
    torch.testing.assert_close(found, losses, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(model.queue, plain.queue, rtol=1e-3, atol=1e-5)
    assert model.host_place == plain.host_place
    assert trainer._captured.active != on_host, trainer._captured.reason
