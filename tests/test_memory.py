"""Memory: documented lines, leaks told from legitimate growth, and recomputation that changes nothing."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from stoker.errors import InputError
from stoker.train import memory
from stoker.train.activations import choose_blocks
from stoker.train.memory import (
    LeakWatch,
    checkpoint_activations,
    count_live_tensors,
    log_gpu_stats,
    memory_usage_lines,
    print_memory_usage,
)
from stoker.train.step import compact_recurrent

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
MIB = 1 << 20
GIB = 1 << 30


def wrapped_modules(model):
    """Yield the names of the blocks that recompute their activations."""
    for name, module in model.named_modules():
        if "forward" in module.__dict__:
            yield name


class Lines:
    def __init__(self):
        self.lines = []

    def info(self, line):
        self.lines.append(line)


@pytest.fixture
def fake_cuda(monkeypatch):
    """Two GPUs, as far as the figures go."""
    used = {0: 3 * GIB, 1: GIB // 2}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: used[device.index])
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2 * used[device.index])
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _device: SimpleNamespace(total_memory=16 * GIB)
    )
    return used


# -- S0-21, S1-14 --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "lines"),
    [
        (None, ["GPU memory:", "allocated: 3.00GB / 16.00GB (18.8%)", "reserved: 6.00GB"]),
        ("cuda", ["GPU memory:", "allocated: 3.00GB / 16.00GB (18.8%)", "reserved: 6.00GB"]),
        (1, ["GPU memory:", "allocated: 0.50GB / 16.00GB (3.1%)", "reserved: 1.00GB"]),
        ("cuda:1", ["GPU memory:", "allocated: 0.50GB / 16.00GB (3.1%)", "reserved: 1.00GB"]),
        ("cpu", []),
    ],
)
def test_gpu_stats_are_logged_word_for_word_for_any_device(fake_cuda, device, lines):
    logger = Lines()
    log_gpu_stats(logger, device)
    assert logger.lines == lines


def test_without_cuda_nothing_is_logged(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    logger = Lines()
    log_gpu_stats(logger)
    log_gpu_stats(logger, "cuda:3")
    assert logger.lines == []
    assert len(memory_usage_lines()) == 1


def test_memory_usage_has_the_documented_form(fake_cuda, capsys):
    lines = memory_usage_lines()
    assert re.fullmatch(r"CPU Memory: \d+\.\d\d GB", lines[0])
    assert 0.01 < float(lines[0].split()[2]) < 64
    assert lines[1:] == ["GPU Memory: 3.00 GB"]
    assert memory_usage_lines(1)[1] == "GPU Memory: 0.50 GB"
    print_memory_usage()
    assert capsys.readouterr().out.splitlines()[1] == "GPU Memory: 3.00 GB"
    said = []
    print_memory_usage(said.append)
    assert said[1] == "GPU Memory: 3.00 GB"


@pytest.mark.gpu
def test_gpu_stats_of_a_real_gpu():
    held = torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda")
    logger = Lines()
    log_gpu_stats(logger, held.device)
    assert re.fullmatch(r"allocated: \d+\.\d\dGB / \d+\.\d\dGB \(\d+\.\d%\)", logger.lines[1])
    assert float(logger.lines[1].split("GB")[0].split()[-1]) >= 0.06


# -- S0-24 ---------------------------------------------------------------------------------------


def watched(levels_mb, threshold_mb=100, logger=None):
    """Reports of a watch that sees these levels, one per epoch."""
    reports: list = []
    watch = LeakWatch(
        lambda: levels_mb[len(reports)] * MIB,
        threshold_mb * MIB,
        dict,
        logger,
        collect=lambda: None,
    )
    for _ in levels_mb:
        reports.append(watch.after_epoch())
    return reports


def test_quiet_epochs_are_not_held_up_by_the_collector():
    """Collecting takes 0.2 s: more than an epoch of a small job."""
    level, collected = [500 * MIB], []
    watch = LeakWatch(lambda: level[0], 100 * MIB, dict, collect=lambda: collected.append(1))
    for _ in range(5):
        assert watch.after_epoch() is None
    assert len(collected) == 1  # for the baseline
    level[0] += 150 * MIB  # cycles that the collector frees are no growth
    watch._collect = lambda: level.__setitem__(0, 500 * MIB)
    assert watch.after_epoch() is None
    assert level == [500 * MIB]


def times(levels_mb, **options):
    return [growth.times if growth else 0 for growth in watched(levels_mb, **options)]


@pytest.mark.parametrize(
    ("levels", "expected"),
    [
        # The optimizer's state appears in the first epoch: it is the baseline, not growth.
        ([900, 900, 900], [0, 0, 0]),
        ([500, 600, 600], [0, 0, 0]),
        # Growth once, then level: one warning, no leak.
        ([500, 700, 700, 700, 700], [0, 1, 0, 0, 0]),
        # Every epoch more: a leak from the second time on.
        ([500, 650, 800, 950], [0, 1, 2, 3]),
        # A slow leak crosses the threshold again and again.
        ([500, 540, 580, 620, 660, 700, 740, 780], [0, 0, 0, 1, 0, 0, 2, 0]),
        # Two steps with quiet between them: two warnings, no leak.
        ([500, 700, 700, 900, 900], [0, 1, 0, 1, 0]),
        # Epochs of two kinds in turn: one warning, then the higher is the baseline.
        ([500, 700, 500, 700, 500, 700], [0, 1, 0, 0, 0, 0]),
        # Memory that fell for three epochs lowers the baseline: a later leak is not hidden.
        ([900, 300, 300, 300, 450, 600], [0, 0, 0, 0, 1, 2]),
        ([900, 300, 300, 900, 900], [0, 0, 0, 0, 0]),
    ],
)
def test_growth_is_told_from_leaks(levels, expected):
    assert times(levels) == expected


def test_the_warning_has_the_documented_figure_and_goes_to_the_logger(logged):
    watched([500, 620.04, 740.08], logger=logging.getLogger("stoker.test.leak"))
    first, second = (record.getMessage() for record in logged)
    assert "+120.0MB in one epoch, to 620.0MB" in first
    assert "leak" not in first
    assert "that no Python tensor holds" in first
    assert "+120.0MB" in second
    assert "time 2 in a row: a leak" in second


def test_a_slow_leak_says_over_how_many_epochs():
    growth = next(report for report in watched([0, 40, 80, 120]) if report)
    assert growth.num_epochs == 3
    assert "in 3 epochs" in str(growth)


@pytest.mark.parametrize("device", DEVICES)
def test_the_growing_tensors_are_named(device):
    """A list that keeps every output: the classic leak."""
    kept = []
    device = torch.empty(0, device=device).device

    def allocated():  # only what is kept here: threads of other tests still let go of theirs
        return sum(tensor.nbytes for tensor in kept)

    watch = LeakWatch(allocated, 1000, lambda: count_live_tensors(device))
    reports = []
    gc.collect()  # what other tests have left behind must not go in the middle
    for _ in range(3):
        kept.extend(torch.zeros(17, 31, device=device) for _ in range(5))
        reports.append(watch.after_epoch())
    assert reports[0] is None
    first, second = reports[1:]
    tensors = first.tensors[0]
    assert (tensors.shape, tensors.dtype, tensors.device) == ((17, 31), "float32", str(device))
    assert (tensors.num_before, tensors.num_now) == (5, 10)
    assert tensors.grown_bytes == 5 * 17 * 31 * 4
    assert first.unnamed_bytes == 0
    assert "(17, 31) float32 on" in str(first)
    assert "5 to 10 tensors" in str(first)
    assert second.is_leak


def test_garbage_in_cycles_is_no_growth():
    watch = LeakWatch(
        lambda: sum(num_bytes for _, num_bytes in count_live_tensors().values()), 1000
    )
    gc.disable()
    try:
        for _ in range(3):
            cycle = [torch.zeros(1000)]
            cycle.append(cycle)
            del cycle
            assert watch.after_epoch() is None
    finally:
        gc.enable()


def test_memory_that_moves_by_a_little_costs_one_collection_and_one_census():
    levels = iter([500, 503, 507, 505, 502.5, 502.4, 502.6, 502.5])
    calls = []
    watch = LeakWatch(
        lambda: int(next(levels) * 1000),
        100_000,
        lambda: calls.append("census") or {},
        collect=lambda: calls.append("collect"),
    )
    for _ in range(7):  # the first epoch measures twice
        assert watch.after_epoch() is None
    assert calls == ["collect", "census"]


def test_a_run_of_seconds_pays_for_no_baseline():
    now, calls = [100.0], []
    watch = LeakWatch(
        lambda: 1000,
        100,
        lambda: calls.append("census") or {},
        collect=lambda: calls.append("collect"),
        after_seconds=20.0,
        clock=lambda: now[0],
    )
    for now[0] in (105.0, 119.9):
        assert watch.after_epoch() is None
    assert calls == []
    now[0] = 120.0
    assert watch.after_epoch() is None
    assert calls == ["collect", "census"]
    assert watch.baseline_bytes == 1000


def test_the_fake_tensors_of_the_compiler_are_not_counted_and_nothing_is_warned_of():
    with FakeTensorMode():
        held = torch.zeros(3, 5, 7, 11)
    assert tuple(held.shape) not in {kind[0] for kind in count_live_tensors()}


def test_views_count_once():
    base = torch.zeros(41, 43)
    views = [base[:, :5], base.t()]
    counted = count_live_tensors()
    held = [counted[tuple(tensor.shape), "float32", "cpu"] for tensor in (base, *views)]
    assert [count for count, _ in held] == [1, 1, 1]
    assert sum(num_bytes for _, num_bytes in held) == base.nbytes


def test_only_the_watched_device_counts():
    held = torch.zeros(37, 39)
    assert (tuple(held.shape), "float32", "cpu") not in count_live_tensors(torch.device("meta"))


def test_a_cpu_has_no_watch_and_a_gpu_has_one(fake_cuda):
    assert LeakWatch.for_device("cpu", 100) is None
    watch = LeakWatch.for_device("cuda:1", 100)
    assert watch.after_epoch() is None
    assert watch.baseline_bytes == fake_cuda[1]
    fake_cuda[1] += 101
    assert watch.after_epoch().grown_bytes == 101


@pytest.mark.gpu
def test_a_training_loop_of_adam_raises_no_alarm_and_a_kept_graph_does():
    model = nn.Linear(1024, 1024).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    watch = LeakWatch.for_device("cuda", 1 * MIB)
    total, reports = 0.0, []
    for epoch in range(5):
        for _ in range(4):
            loss = model(torch.randn(256, 1024, device="cuda")).square().mean()
            optimizer.zero_grad()
            loss.backward(retain_graph=epoch > 2)
            optimizer.step()
            if epoch > 2:
                total = total + loss
        del loss
        reports.append(watch.after_epoch())
    assert reports[:3] == [None] * 3
    assert reports[3] is not None
    assert reports[4].is_leak
    # What a kept graph holds is seen by some versions of torch as tensors, by others not at all.
    named = sum(tensors.grown_bytes for tensors in reports[4].tensors)
    assert named + reports[4].unnamed_bytes >= reports[4].grown_bytes >= 4 * 256 * 1024 * 4


# -- activation checkpointing --------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.second = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.3)
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x, *, scale=1.0):
        return x + scale * self.norm(self.second(self.drop(torch.relu(self.first(x)))))


class Stack(nn.Module):
    def __init__(self, width=8, depth=3):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x, scale=0.5)
        return self.head(x)


class Recurrent(nn.Module):
    """As in the documents: LSTM(s) whose outputs are tuples, with dropout between layers."""

    def __init__(self, num=2, dropout=0.4):
        super().__init__()
        self.lstms = nn.ModuleList(
            nn.LSTM(8, 8, num_layers=2, dropout=dropout, batch_first=True) for _ in range(num)
        )
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        sequence = x.unsqueeze(1).expand(-1, 5, -1)
        for lstm in self.lstms:
            sequence, (hidden, cell) = lstm(sequence)
        return self.head(sequence[:, -1] + hidden[-1] + cell[-1])


class Spectral(nn.Module):
    """A forward pass that changes the buffers it computes with."""

    def __init__(self):
        super().__init__()
        make = lambda: nn.Sequential(  # noqa: E731
            nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), nn.Tanh()
        )
        self.blocks = nn.Sequential(make(), make())

    def forward(self, x):
        return self.blocks(x)


def losses_and_gradients(model, device, num_steps=3):
    torch.manual_seed(11)
    results = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(num_steps):
        x = torch.randn(6, 8, device=device)
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        results.append(loss.detach().clone())
        results.extend(p.grad.clone() for p in model.parameters())
        optimizer.step()
    results.extend(buffer.clone() for buffer in model.buffers())
    return results


def pair(make, device, modules=None):
    torch.manual_seed(5)
    plain = make().to(device)
    wrapped = copy.deepcopy(plain)
    compact_recurrent(wrapped)  # a copy's weights lie apart, which cuDNN warns of at every call
    return plain, wrapped, checkpoint_activations(wrapped, modules)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("make", "modules"),
    [
        (Stack, None),
        (Stack, ["blocks.1"]),
        (Recurrent, None),
        (lambda: Recurrent(num=1), None),
        (Spectral, None),
    ],
)
def test_losses_gradients_and_buffers_are_those_of_the_plain_model(device, make, modules):
    plain, wrapped, chosen = pair(make, device, modules)
    if device == "cuda":  # the dropout inside cuDNN goes on from call to call, whoever calls
        for module in (*plain.modules(), *wrapped.modules()):
            if isinstance(module, nn.LSTM):
                module.dropout = 0.0
    assert chosen.names
    assert list(wrapped_modules(wrapped)) == list(chosen.names)
    expected = losses_and_gradients(plain, device)
    for one, two in zip(expected, losses_and_gradients(wrapped, device), strict=True):
        if device == "cpu":
            assert torch.equal(one, two)
        else:
            torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
def test_cudnn_dropout_draws_the_same_mask_in_both_passes():
    """Numerical: the gradient must be that of the loss that was returned, mask included."""
    _, model, _ = pair(lambda: Recurrent(num=1, dropout=0.5), "cuda")
    x = torch.randn(16, 8, device="cuda", requires_grad=True)
    model(x).sum().backward()  # cuDNN's state has moved on
    state = torch.cuda.get_rng_state()
    x.grad = None
    loss = model(x).sum()
    loss.backward()
    torch.cuda.set_rng_state(state)
    again = model(x).sum()
    (gradient,) = torch.autograd.grad(again, x)
    assert torch.equal(loss, again)
    torch.testing.assert_close(x.grad, gradient, rtol=1e-5, atol=1e-6)
    direction = torch.randn_like(x)
    with torch.no_grad():
        sides = []
        for sign in (1, -1):
            torch.cuda.set_rng_state(state)
            sides.append(model(x + sign * 1e-2 * direction).sum())
    slope = (sides[0] - sides[1]) / 2e-2
    torch.testing.assert_close((gradient * direction).sum(), slope, rtol=2e-2, atol=2e-2)


def kept_bytes(model, x):
    """Bytes that the forward pass keeps for the backward pass, parameters aside."""
    parameters = {parameter.data_ptr() for parameter in model.parameters()}
    sizes = {}

    def pack(tensor):
        if tensor.data_ptr() not in parameters:
            sizes[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(x).sum()
    loss.backward()
    return sum(sizes.values())


@pytest.mark.parametrize("make", [Stack, Recurrent])
def test_less_than_half_is_kept(make):
    plain, wrapped, _ = pair(make, "cpu")
    x = torch.randn(64, 8)
    assert kept_bytes(wrapped, x) < 0.5 * kept_bytes(plain, x)


def test_names_states_copies_and_pickles_are_those_of_the_model():
    plain, wrapped, _ = pair(Stack, "cpu")
    assert list(wrapped.state_dict()) == list(plain.state_dict())
    for again in (copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped))):
        assert list(wrapped_modules(again)) == ["blocks.0", "blocks.1", "blocks.2"]
        assert again.blocks[0].forward.args[0] is again.blocks[0]
        expected = losses_and_gradients(copy.deepcopy(plain), "cpu")
        assert all(map(torch.equal, expected, losses_and_gradients(again, "cpu")))


def test_wrapping_twice_is_wrapping_once():
    _, wrapped, first = pair(Stack, "cpu")
    forward = wrapped.blocks[0].forward
    assert checkpoint_activations(wrapped) == first
    assert wrapped.blocks[0].forward is forward


def test_without_gradients_nothing_is_kept_or_copied(monkeypatch):
    _, wrapped, _ = pair(Stack, "cpu")
    monkeypatch.setattr(
        "stoker.train.activations.checkpoint", lambda *a, **k: pytest.fail("recomputed")
    )
    with torch.no_grad():
        wrapped.eval()(torch.randn(2, 8))


def test_a_graph_that_is_kept_can_be_gone_through_again():
    plain, wrapped, _ = pair(Spectral, "cpu")
    x = torch.randn(4, 8)
    for model in (plain, wrapped):
        loss = model(x).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    for one, two in zip(plain.parameters(), wrapped.parameters(), strict=True):
        assert torch.equal(one.grad, two.grad)


def test_the_largest_repeated_blocks_are_chosen_with_the_reason():
    layer = nn.TransformerEncoderLayer(16, 2, 64, batch_first=True)
    model = nn.Sequential(nn.Linear(4, 16), nn.TransformerEncoder(layer, 3), nn.Linear(16, 2))
    chosen = choose_blocks(model)
    assert chosen.names == ("1.layers.0", "1.layers.1", "1.layers.2")
    assert re.fullmatch(r"3 × TransformerEncoderLayer, with 9\d % of the parameters", chosen.reason)


def test_finer_blocks_win_over_a_few_coarse_ones():
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Block(8) for _ in range(3))

    model = nn.Module()
    model.left, model.right = Half(), Half()
    assert len(choose_blocks(model).names) == 6


def test_a_plain_perceptron_has_nothing_to_recompute():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    chosen = checkpoint_activations(model)
    assert chosen.names == ()
    assert "no repeated block" in chosen.reason
    assert list(wrapped_modules(model)) == []


@pytest.mark.parametrize("module", ["blocks.9", nn.Linear(1, 1), ""])
def test_a_module_of_another_model_is_refused(module):
    with pytest.raises(InputError, match="is not a module of this Stack") as caught:
        checkpoint_activations(Stack(), [module])
    assert "blocks.0" in caught.value.allowed


def test_a_module_may_be_given_itself():
    model = Stack()
    assert checkpoint_activations(model, [model.blocks[1]]).names == ("blocks.1",)


def test_memory_offers_the_door_too():
    assert memory.checkpoint_activations is checkpoint_activations
