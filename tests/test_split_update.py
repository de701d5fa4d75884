"""Updates over pieces of the parameters: the same as over whole ones."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from stoker.train.split_update import SplitUpdate, _spread, piece_size, split_tensors

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 40, 3), nn.Flatten(), nn.LazyLinear(900), nn.ReLU(), nn.Linear(900, 3)
    )
    model(torch.zeros(1, 3, 8, 8))
    return model.to(memory_format=torch.channels_last)  # some weights are not contiguous


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_an_update_in_pieces_is_the_update(device, kind, amsgrad):
    seen = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func in (torch._fused_adam_, torch._fused_adamw_):
                seen.append(len(args[0]))
            return func(*args, **(kwargs or {}))

    one, other = make_model().to(device), make_model().to(device)
    optimizers = [
        kind(
            [{"params": model[2:].parameters()}, {"params": model[:1].parameters(), "lr": 1e-2}],
            lr=1e-3,
            weight_decay=0.1,
            fused=True,
            amsgrad=amsgrad,
        )
        for model in (one, other)
    ]
    found = torch.zeros((), device=device)
    for step in range(4):
        inputs = torch.randn(5, 3, 8, 8, device=device)
        for model, optimizer in zip((one, other), optimizers, strict=True):
            model(inputs).square().mean().backward()
            optimizer.grad_scale = torch.tensor(2.0, device=device)
            optimizer.found_inf = found + (step == 2)  # the third update is left out
        optimizers[0].step()
        with Watch(), SplitUpdate():
            optimizers[1].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    assert max(seen) > 10, "nothing was cut"
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    for mine, theirs in zip(*(o.state.values() for o in optimizers), strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize("device", DEVICES)
def test_the_norm_of_pieces_is_the_norm(device):
    torch.manual_seed(1)
    shapes = [(300, 500), (1, 1), (0, 4), (700, 9)]
    tensors = [torch.randn(*shape, device=device) for shape in shapes]
    tensors.append(torch.randn(800, 90, device=device).t())
    pieces = split_tensors(tensors)
    assert len(pieces) > 20
    assert any(piece is tensors[-1] for piece in pieces), "not contiguous, so not cut"
    whole = torch.nn.utils.get_total_norm(tensors)
    torch.testing.assert_close(torch.nn.utils.get_total_norm(pieces), whole)
    tensors[0][7, 7] = float("nan")
    assert torch.nn.utils.get_total_norm(split_tensors(tensors)).isnan()


def test_what_hooks_compute_is_not_cut():
    """Clipping each parameter by its own norm, in a hook of the optimizer: one norm for each."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    counts = []

    def clip_each(*_):
        grads = [p.grad for p in model.parameters()]
        counts.append((len(grads), len(torch._foreach_norm(grads))))

    optimizer.register_step_pre_hook(clip_each)
    model(torch.randn(2, 3, 8, 8)).sum().backward()
    with SplitUpdate():
        optimizer.step()
    assert counts
    assert all(given == norms for given, norms in counts)


def spread_meta(sizes):
    """How many tensors an update of these sizes is given."""
    tensors = [torch.empty(size, device="meta") for size in sizes]
    lists = _spread([tensors, tensors, tensors, tensors, [], tensors])
    assert lists[4] == []
    assert sum(tensor.numel() for tensor in lists[0]) == sum(sizes)
    return len(lists[0])


@pytest.mark.parametrize(
    "sizes",
    [[30_000_000], [16_800_000] * 2 + [4096] * 3, [100_000_000] * 2, [2_400_000], [70_000] * 200],
)
def test_large_models_stay_whole(sizes):
    assert spread_meta(sizes) == len(sizes)


def test_a_small_model_fills_one_launch():
    mlp = [256 * 512, 512, 512 * 512, 512, 512 * 3, 3]
    assert 25 < spread_meta(mlp) <= 36
    assert len(split_tensors([torch.empty(size, device="meta") for size in mlp])) <= 110


@given(
    st.lists(st.integers(0, 3_000_000), min_size=1, max_size=40),
    st.sampled_from([(1, 110), (4, 36)]),
)
def test_pieces_take_no_more_launches_than_they_are_shorter(sizes, kind):
    lists, most = kind
    size = piece_size(sizes, lists)
    if size is not None:
        launches = -(-sum(-(-n // size) for n in sizes) // most)
        assert launches * size < -(-len(sizes) // most) * 65_536


def test_tensors_of_other_kinds_stay_whole():
    class Special(torch.Tensor):
        pass

    special = torch.zeros(200_000).as_subclass(Special)
    plain = torch.zeros(200_000)
    pieces = split_tensors([special, plain])
    assert any(piece is special for piece in pieces)
    assert len(pieces) > 10
