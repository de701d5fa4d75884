"""Accelerate with a stoker Loader: through `prepare` unharmed, and everything its own wrapper would tell."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from framework_makers import (
    BATCH,
    RATE,
    docs_code,
    flat,
    makes,
    plain_losses,
    run_ranks,
    step_loss,
    taken,
)
from stoker.errors import InputError
from stoker.loader.loader import Loader
from training_makers import make_model, write_rows

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")

from stoker.frameworks.accelerate import adapt, load_for  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("rows"))


def make_accelerator(**options):
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
    return accelerate.Accelerator(cpu=True, **options)


@pytest.fixture
def accelerator():
    return make_accelerator()


def epochs(loader, count=2):
    seen = []
    for epoch in range(count):
        loader.set_epoch(epoch)
        seen.append([taken(batch) for batch in loader])
    return seen


def test_prepare_hands_the_loader_on(accelerator, rows):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    loader = load_for(accelerator, makes(rows))
    _, _, prepared = accelerator.prepare(model, optimizer, loader)
    assert prepared is loader
    assert accelerator.prepare(loader) is loader
    with makes(rows)(device="cpu") as plain:
        assert epochs(prepared) == epochs(plain)
    batch = next(iter(prepared))
    assert accelerate.utils.send_to_device(batch, accelerator.device) is batch
    loader.close()


@pytest.mark.gpu
def test_on_a_gpu_batches_are_there_already(rows):
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator()
    with load_for(accelerator, makes(rows)) as loader:
        assert accelerator.prepare(loader) is loader
        batch = next(iter(loader))
        assert batch["features"].device.type == accelerator.device.type == "cuda"
        assert accelerate.utils.send_to_device(batch, accelerator.device) is batch


@pytest.mark.parametrize("accumulate", [1, 3])
def test_losses_are_those_of_a_plain_loop(rows, accumulate):
    """11 batches, windows of 3: the last one is short, and ends in an update because the loader says so."""
    accelerator = make_accelerator(gradient_accumulation_steps=accumulate)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    loader = load_for(accelerator, makes(rows))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for _ in range(2):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = step_loss(model, batch["features"], batch["targets"])
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
    wanted, weights = plain_losses(rows, accumulate=accumulate)
    assert losses == pytest.approx(wanted, rel=1e-5)
    torch.testing.assert_close(flat(model), weights)
    loader.close()


def test_a_plain_loader_passes_too_but_cannot_say_when_its_epoch_ends(accelerator, rows):
    with makes(rows)(device="cpu") as plain:
        assert accelerator.prepare(plain) is plain
        for _ in plain:
            assert not accelerator.gradient_state.end_of_dataloader
        with adapt(makes(rows)(device="cpu")) as loader:
            ends = [accelerator.gradient_state.end_of_dataloader for _ in loader]
            assert ends == [False] * 10 + [True]
            assert not accelerator.gradient_state.in_dataloader


def test_gathered_metrics_count_every_sample_once(accelerator, rows):
    seen = []
    with load_for(accelerator, makes(rows)) as loader:
        for batch in loader:
            seen.append(accelerator.gather_for_metrics(torch.ones(BATCH)))  # a full batch's worth
            assert len(batch["features"]) == len(seen[-1])
    assert sum(map(len, seen)) == 203


@pytest.mark.parametrize("skip", [0, 1, 4, 10])
def test_first_batches_are_left_out_without_being_loaded(accelerator, rows, skip, monkeypatch):
    with makes(rows)(device="cpu") as plain:
        plain.set_epoch(1)
        wanted = [taken(batch) for batch in plain]
    loader = adapt(makes(rows)(device="cpu"))
    made, assemble = [], Loader._assemble

    def counting(self, *args, **named):
        made.append(1)
        return assemble(self, *args, **named)

    rest = accelerator.skip_first_batches(loader, skip)
    rest.batch_sampler.batch_sampler.set_epoch(1)  # as the Hugging Face Trainer does
    monkeypatch.setattr(Loader, "_assemble", counting)
    batches = list(rest)
    assert [taken(batch) for batch in batches] == wanted[skip:]
    assert len(batches) == len(rest) == 11 - skip
    assert len(made) < 2 * len(batches) + 2
    assert all(hasattr(batch, "sample_ids") for batch in batches), "not copied, not collated"
    following = [taken(batch) for batch in loader]
    with makes(rows)(device="cpu") as plain:
        plain.set_epoch(2)
        assert following == [taken(batch) for batch in plain]
    loader.close()


def test_a_checkpoint_in_mid_epoch_goes_on(accelerator, rows, tmp_path):
    whole, rest = [], []
    with load_for(accelerator, makes(rows)) as loader:
        accelerator.register_for_checkpointing(loader)
        for number, batch in enumerate(loader):
            whole.append(taken(batch))
            if number == 4:
                accelerator.save_state(tmp_path, safe_serialization=False)
    accelerator = make_accelerator()
    with load_for(accelerator, makes(rows)) as loader:
        accelerator.register_for_checkpointing(loader)
        accelerator.load_state(tmp_path)
        rest = [taken(batch) for batch in loader]
    assert rest == whole[5:]


def test_another_ranks_share_is_refused(accelerator, rows):
    with (
        makes(rows, rank=1, world_size=2)(device="cpu") as loader,
        pytest.raises(InputError, match="rank=0, world_size=1"),
    ):
        adapt(loader)
    with pytest.raises(TypeError, match="device"):
        load_for(accelerator, partial(lambda rank, world_size: None))


def test_two_processes_share_the_epoch_and_resume_from_what_the_first_has_saved(rows, tmp_path):
    ranks = run_ranks("accelerate", rows, tmp_path)
    whole = [rank["whole"] for rank in ranks]
    for step in zip(*whole, strict=True):
        assert not set(step[0]) & set(step[1])
    for epoch in (slice(0, 6), slice(6, 12)):
        assert sorted(n for rank in whole for batch in rank[epoch] for n in batch) == list(
            range(203)
        )
    for rank in ranks:
        assert rank["first"] + rank["rest"] == rank["whole"][:6]
    assert ranks[0]["weights"] == pytest.approx(ranks[1]["weights"])
    # Two processes of 20 are one of 40: the contract of a shuffled order that is resident.
    wanted, weights = plain_losses(rows, batch=2 * BATCH, drop_last=True, epochs=2, momentum=0.0)
    assert ranks[0]["weights"] == pytest.approx(weights.tolist(), rel=1e-4, abs=1e-6)
    together = [sum(pair) / 2 for pair in zip(*(rank["losses"] for rank in ranks), strict=True)]
    assert together == pytest.approx(wanted, rel=1e-4)


def test_the_code_of_the_docs_runs(rows, tmp_path, monkeypatch):
    code, names = docs_code("Accelerate", rows, tmp_path, monkeypatch), {"__name__": "docs"}
    exec(compile(code, "docs/frameworks.md", "exec"), names)
    assert names["loss"].item() < 5
    assert names["loader"].epoch == 2
