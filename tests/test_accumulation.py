"""Accumulation equals one large batch: full windows, tail windows, short last batches."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import mse_loss

from stoker.errors import InputError
from stoker.train.accumulation import Accumulation, GradientAccumulator, scale_gradients

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def model_and_data(num_samples, device="cpu", dtype=torch.float64):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    x, y = torch.randn(num_samples, 3), torch.randn(num_samples, 2)
    return model.to(device, dtype), x.to(device, dtype), y.to(device, dtype)


def gradients(model):
    return torch.cat([parameter.grad.flatten().clone() for parameter in model.parameters()])


def accumulated(model, x, y, batch_size, steps):
    """The gradient of every update of one epoch, with the samples it was made of."""
    accumulation = Accumulation(batch_size, steps)
    updates, first = [], 0
    batches = list(zip(x.split(batch_size), y.split(batch_size), strict=True))
    for number, (inputs, targets) in enumerate(batches, 1):
        (mse_loss(model(inputs), targets) * accumulation.add(len(inputs))).backward()
        if accumulation.is_complete or number == len(batches):
            last = first + accumulation.num_samples
            scale_gradients(model.parameters(), accumulation.close())
            updates.append((slice(first, last), gradients(model)))
            model.zero_grad()
            first = last
    return updates


@pytest.mark.parametrize("device", DEVICES)
@given(num_samples=st.integers(1, 40), batch_size=st.integers(1, 12), steps=st.integers(1, 5))
def test_every_update_is_that_of_one_large_batch(device, num_samples, batch_size, steps):
    model, x, y = model_and_data(num_samples, device)
    updates = accumulated(model, x, y, batch_size, steps)
    num_batches = -(-num_samples // batch_size)
    assert len(updates) == -(-num_batches // steps)
    assert updates[-1][0].stop == num_samples
    for samples, gradient in updates:
        mse_loss(model(x[samples]), y[samples]).backward()
        torch.testing.assert_close(gradient, gradients(model), rtol=1e-12, atol=1e-13)
        model.zero_grad()


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    nominal=st.integers(1, 9),
    spare=st.integers(0, 3),
)
def test_any_sizes_in_any_window_weigh_as_their_samples(sizes, nominal, spare):
    accumulation = Accumulation(nominal, len(sizes) + spare)
    weights = [accumulation.add(size) for size in sizes]
    factor = accumulation.close()
    assert [weight * factor for weight in weights] == pytest.approx(
        [size / sum(sizes) for size in sizes], rel=1e-12
    )


def test_a_full_window_of_full_batches_needs_no_correction_at_all():
    accumulation = Accumulation(128, 4)
    for _ in range(4):
        assert accumulation.add(128) == 0.25
    assert accumulation.is_complete
    assert accumulation.correction == 1.0  # exactly: the captured step relies on it
    assert accumulation.close() == 1.0
    assert accumulation.num_batches == 0
    assert not accumulation.is_complete


def test_a_batch_too_many_is_an_error_and_not_a_wrong_gradient():
    accumulation = Accumulation(2, 1)
    accumulation.add(2)
    with pytest.raises(InputError, match="batch 2 was added to an update of 1"):
        accumulation.add(2)


def test_a_window_goes_on_after_a_checkpoint():
    one, two = Accumulation(4, 3), Accumulation(4, 3)
    one.add(4)
    one.add(3)
    two.load_state_dict(one.state_dict())
    assert one.add(4) == two.add(4)
    assert one.close() == two.close() == pytest.approx(12 / 11)


def test_an_empty_window_corrects_nothing():
    assert Accumulation(4, 3).close() == 1.0


@pytest.mark.parametrize("device", DEVICES)
def test_scaling_takes_dense_sparse_and_missing_gradients(device):
    dense = torch.nn.Parameter(torch.ones(3, device=device))
    sparse = torch.nn.Parameter(torch.ones(4, 2, device=device))
    without = torch.nn.Parameter(torch.ones(2, device=device))
    dense.grad = torch.full((3,), 2.0, device=device)
    sparse.grad = torch.eye(4, 2, device=device).to_sparse()
    scale_gradients([dense, sparse, without], 1.5)
    assert dense.grad.tolist() == [3.0] * 3
    assert torch.equal(sparse.grad.to_dense(), 1.5 * torch.eye(4, 2, device=device))
    assert without.grad is None
    kept = dense.grad
    scale_gradients([dense], 1.0)
    assert dense.grad is kept


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Accumulation(0), "nominal is 0"),
        (lambda: Accumulation(4, 0), "steps is 0"),
        (lambda: Accumulation(4, 2.5), r"steps is 2\.5"),
        (lambda: Accumulation(4).add(0), "num_samples is 0"),
        (lambda: GradientAccumulator(0), "steps is 0"),
        (lambda: GradientAccumulator(True), "steps is True"),
        (lambda: GradientAccumulator(2, 0), "num_batches is 0"),
    ],
)
def test_bad_numbers_are_refused(make, words):
    with pytest.raises(InputError, match=words) as caught:
        make()
    assert caught.value.allowed
    assert caught.value.fix


# -- S2-12 ---------------------------------------------------------------------------------------


@given(steps=st.integers(1, 6), num_batches=st.integers(1, 20))
def test_updates_come_every_steps_and_at_the_end_of_the_epoch(steps, num_batches):
    accumulator = GradientAccumulator(steps, num_batches)
    for _ in range(2):
        updates = [k for k in range(1, num_batches + 1) if accumulator.should_update()]
        assert updates == sorted({*range(steps, num_batches + 1, steps), num_batches})


def test_without_the_number_of_batches_full_windows_update_and_the_counter_resets():
    accumulator = GradientAccumulator(4)
    assert [accumulator.should_update() for _ in range(9)] == [False, False, False, True] * 2 + [
        False
    ]


@given(steps=st.integers(1, 5), num_batches=st.integers(1, 12))
def test_scaled_losses_add_up_to_the_mean_of_their_window(steps, num_batches):
    accumulator = GradientAccumulator(steps, num_batches)
    losses = [float(number * number) for number in range(num_batches)]
    total, first = 0.0, 0
    for number, loss in enumerate(losses, 1):
        total += accumulator.scale_loss(loss)
        if accumulator.should_update():
            assert total == pytest.approx(sum(losses[first:number]) / (number - first))
            total, first = 0.0, number
    assert first == num_batches
