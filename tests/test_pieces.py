"""Updates over pieces of the parameters: the same as over whole ones."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from stoker.train.pieces import UpdateInPieces, piece_size

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
        with Watch(), UpdateInPieces():
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
    tensors = [torch.randn(n, m, device=device) for n, m in [(300, 500), (1, 1), (0, 4), (700, 9)]]
    tensors.append(torch.randn(80, 90, device=device).t())
    whole = torch.nn.utils.get_total_norm(tensors)
    with UpdateInPieces():
        in_pieces = torch.nn.utils.get_total_norm(tensors)
    torch.testing.assert_close(in_pieces, whole)
    tensors[0][7, 7] = float("nan")
    with UpdateInPieces():
        assert torch.nn.utils.get_total_norm(tensors).isnan()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 30_000_000), max_size=40), st.sampled_from([36, 110]))
def test_pieces_are_never_more_launches_than_they_save(sizes, most):
    size = piece_size(sizes, most)
    assert 2048 <= size <= 65_536
    if sum(sizes) > most * 65_536:
        whole = -(-len(sizes) // most)
        cut = -(-sum(-(-n // size) for n in sizes) // most) if size < 65_536 else whole
        assert cut * size <= 2 * whole * 65_536


def test_a_small_model_fills_one_launch():
    mlp = [256 * 512, 512, 512 * 512, 512, 512 * 3, 3]
    size = piece_size(mlp, 36)
    assert sum(-(-n // size) for n in mlp) <= 36
    assert size < 20_000
