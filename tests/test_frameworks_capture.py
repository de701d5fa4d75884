"""The whole step of Lightning, Accelerate and the Hugging Face Trainer as one graph: the numbers of the loop without.

On a CPU the graphs are made of paper (`paper_graphs.py`).
"""

from __future__ import annotations

import copy
import logging
import warnings
from functools import cache
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from training_makers import make_model

pytestmark = pytest.mark.usefixtures("one_thread")
needs_lightning = pytest.mark.skipif(find_spec("lightning") is None, reason="needs lightning")
needs_accelerate = pytest.mark.skipif(find_spec("accelerate") is None, reason="needs accelerate")
needs_huggingface = pytest.mark.skipif(
    find_spec("transformers") is None, reason="needs transformers"
)
BATCH, STEPS = 8, 12


@cache
def rows():
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(BATCH * STEPS, 6, generator=generator)
    return TensorDataset(features, features[:, :1].sin())


def same(one, other):
    torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def weights(model):
    return torch.cat([p.detach().flatten().cpu() for p in model.parameters()])


# -- Lightning ---------------------------------------------------------------------------------------


@cache
def modules():
    """Lightning's part, whose import takes seconds."""
    import lightning.pytorch as pl

    from stoker.frameworks.lightning import CaptureCallback

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Net(pl.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.body = make_model()
            self.losses, self.rates = [], []

        def training_step(self, batch, batch_idx):
            x, y = batch
            loss = nn.functional.mse_loss(self.body(x), y)
            self.log("loss", loss, on_step=True, on_epoch=True)
            self.log_dict({"size": float(len(x)), "mean": self.body(x).mean()}, on_epoch=True)
            return {"loss": loss, "twice": 2 * loss.detach()}

        def on_train_batch_end(self, outputs, batch, batch_idx):
            if not outputs:
                return
            if self.trainer.accumulate_grad_batches == 1:
                assert float(outputs["twice"]) == pytest.approx(2 * float(outputs["loss"]))
            self.losses.append(float(outputs["loss"]))
            self.rates.append(float(self.trainer.optimizers[0].param_groups[0]["lr"]))

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    return SimpleNamespace(pl=pl, Net=Net, CaptureCallback=CaptureCallback)


def fit(device, net, *callbacks, epochs=2, **options):
    pl = modules().pl
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(
            max_epochs=epochs, accelerator="gpu" if device == "cuda" else "cpu", devices=1,
            logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, callbacks=list(callbacks), **options,
        )  # fmt: skip
        trainer.fit(net, DataLoader(rows(), BATCH, num_workers=0))
    return trainer


@needs_lightning
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_lightning_captured_is_lightning(device, precision):
    options = {"gradient_clip_val": 0.5, "precision": precision}
    plain, net, callback = modules().Net(), modules().Net(), modules().CaptureCallback()
    expected = fit(device, plain, **options)
    trainer = fit(device, net, callback, **options)
    assert callback.is_captured, callback.reason
    loose = {"rtol": 2e-2, "atol": 1e-3} if precision != "32-true" else {"rtol": 1e-3, "atol": 1e-5}
    for one, other in ((net.losses, plain.losses), (net.rates, plain.rates)):
        torch.testing.assert_close(torch.tensor(one), torch.tensor(other), **loose)
    torch.testing.assert_close(weights(net), weights(plain), **loose)
    assert trainer.global_step == expected.global_step == 2 * STEPS
    assert trainer.callback_metrics.keys() == expected.callback_metrics.keys()
    for name, value in expected.callback_metrics.items():
        torch.testing.assert_close(trainer.callback_metrics[name], value, **loose)
    counts, others = (
        t.fit_loop.epoch_loop.automatic_optimization.optim_progress.state_dict()
        for t in (trainer, expected)
    )
    assert counts == others


@needs_lightning
def test_lightning_says_why_it_is_not_captured(device):
    from torchmetrics import MeanSquaredError

    from stoker.frameworks.lightning import OomLadderCallback

    Net, pl = modules().Net, modules().pl

    class Looks(Net):
        def on_after_backward(self):
            pass

    class Watches(pl.Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            pass

    class Counts(Net):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, 0)["loss"] * (1 + self.global_step)
            return {"loss": loss, "twice": 2 * loss.detach()}

    class Numbers(Net):
        def training_step(self, batch, batch_idx):
            self.log("half", batch_idx / 2)
            return super().training_step(batch, 0)

    class ByHand(Net):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            made = super().training_step(batch, batch_idx)
            self.manual_backward(made["loss"])
            optimizer.step()
            return made

    class Measures(Net):
        def __init__(self):
            super().__init__()
            self.error = MeanSquaredError()

        def training_step(self, batch, batch_idx):
            self.error(self.body(batch[0]), batch[1])
            self.log("error", self.error)
            return super().training_step(batch, 0)

    class Skips(Net):
        def training_step(self, batch, batch_idx):
            made = super().training_step(batch, 0)
            return None if float(batch[0].sum()) > 0 else made

    cases = [
        (Measures, [], {}, "log a tensor"),
        (Skips, [], {}, "training_step returned None"),
        (Net, [OomLadderCallback()], {}, "CaptureCallback without it"),
        (Looks, [], {}, "Looks.on_after_backward"),
        (Net, [Watches()], {}, "Watches.on_before_optimizer_step"),
        (Counts, [], {}, "reads global_step"),
        (Numbers, [], {}, "reads batch_idx"),
        (ByHand, [], {}, "optimizes by hand"),
        (Net, [], {"accumulate_grad_batches": 3}, "accumulate_grad_batches=1"),
    ]
    for kind, callbacks, options, words in cases:
        plain, net, callback = kind(), kind(), modules().CaptureCallback()
        fit(device, plain, *copy.copy(callbacks), epochs=1, **options)
        trainer = fit(device, net, callback, *callbacks, epochs=1, **options)
        assert words in callback.reason, callback.reason
        assert not callback.is_captured
        assert len(callback.notes) == 1
        assert net.losses == pytest.approx(plain.losses, rel=1e-5)
        assert "run" not in vars(trainer.fit_loop.epoch_loop.automatic_optimization)


@needs_lightning
def test_lightning_epochs_are_followed(device):
    class Anneals(modules().Net):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, 0)["loss"] * (1 + self.current_epoch)
            return {"loss": loss, "twice": 2 * loss.detach()}

    plain, net, callback = Anneals(), Anneals(), modules().CaptureCallback()
    fit(device, plain, epochs=3)
    fit(device, net, callback, epochs=3)
    assert callback.is_captured, callback.reason
    assert net.losses == pytest.approx(plain.losses, rel=1e-3)


@needs_lightning
def test_lightning_on_a_cpu_is_left_alone():
    net, callback = modules().Net(), modules().CaptureCallback()
    assert callback.reason == "nothing was trained yet"
    fit("cpu", net, callback, epochs=1)
    assert callback.reason == "eager: there are no CUDA graphs on the CPU"
    assert callback.notes == []


# -- Accelerate --------------------------------------------------------------------------------------


def run_accelerate(device, is_captured, **options):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, PartialState

    from stoker.frameworks.accelerate import capture

    AcceleratorState._reset_state()
    PartialState._reset_state()
    accelerator = Accelerator(cpu=device == "cpu", **options)
    torch.manual_seed(0)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
    model, optimizer, loader, scheduler = accelerator.prepare(
        model, optimizer, DataLoader(rows(), BATCH), scheduler
    )

    def train(batch):
        x, y = batch
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    step, said = train, []
    if is_captured:
        step = capture(accelerator, train, model=model, optimizer=optimizer, say=said.append)
    losses = []
    for _ in range(2):
        for batch in loader:
            losses.append(float(step(batch)))
            scheduler.step()
    return losses, weights(model), step, said


@needs_accelerate
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerate_captured_is_accelerate(device, precision):
    expected, end, _, _ = run_accelerate(device, False, mixed_precision=precision)
    losses, weights_, step, said = run_accelerate(device, True, mixed_precision=precision)
    assert step.is_captured, step.reason
    assert not said
    tolerance = 1e-3 if precision == "no" else 2e-2
    assert losses == pytest.approx(expected, rel=tolerance, abs=1e-4)
    torch.testing.assert_close(weights_, end, rtol=tolerance, atol=tolerance)


@needs_accelerate
def test_accelerate_says_why_it_is_not_captured(device):
    expected, end, _, _ = run_accelerate(device, False, gradient_accumulation_steps=2)
    losses, weights_, step, said = run_accelerate(device, True, gradient_accumulation_steps=2)
    assert "gradient_accumulation_steps=1" in step.reason
    assert len(said) == 1
    assert losses == expected
    assert torch.equal(weights_, end)


# -- Hugging Face ------------------------------------------------------------------------------------


class Answering(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = make_model()

    def forward(self, input_values, labels):
        logits = self.body(input_values)
        return {"loss": nn.functional.mse_loss(logits, labels), "logits": logits}


@cache
def hugging():
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from stoker.frameworks.huggingface import StokerTrainerMixin

    class Training(StokerTrainerMixin, Trainer):
        gain = 1.0

        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.losses = []
            self.strength = 1.0

        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            made = super().compute_loss(model, inputs, return_outputs, **kwargs)
            return made * self.strength

        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            self.losses.append(float(loss))
            self.strength = 1.0 if len(self.losses) < 14 else 2.0
            return loss

    class Looks(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            pass

    return SimpleNamespace(Training=Training, Arguments=TrainingArguments, Looks=Looks)


def run_huggingface(device, folder, capture, callbacks=(), **options):
    x, y = rows().tensors
    data = [{"input_values": a, "labels": b} for a, b in zip(x, y, strict=True)]
    arguments = hugging().Arguments(
        str(folder), per_device_train_batch_size=BATCH, num_train_epochs=2, learning_rate=0.01,
        save_strategy="no", report_to=[], disable_tqdm=True, logging_steps=1, seed=5,
        use_cpu=device == "cpu", **options,
    )  # fmt: skip
    trainer = hugging().Training(
        Answering(), arguments, train_dataset=data, capture=capture, callbacks=list(callbacks)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train()
    return trainer


@needs_huggingface
@pytest.mark.parametrize(
    "options", [{}, {"max_grad_norm": 0.0}, {"bf16": True}], ids=["fp32", "no clip", "bf16"]
)
def test_huggingface_captured_is_huggingface(device, tmp_path, options):
    plain = run_huggingface(device, tmp_path, False, **options)
    trainer = run_huggingface(device, tmp_path, True, **options)
    assert trainer.captured.is_captured, trainer.captured.reason
    tolerance = 2e-2 if "bf16" in options else 1e-3
    assert trainer.losses == pytest.approx(plain.losses, rel=tolerance, abs=1e-4)
    torch.testing.assert_close(
        weights(trainer.model), weights(plain.model), rtol=tolerance, atol=tolerance
    )
    assert trainer.state.global_step == plain.state.global_step == 2 * STEPS
    for one, other in zip(trainer.state.log_history, plain.state.log_history, strict=True):
        for name in ("loss", "grad_norm", "learning_rate", "step"):
            if name in other:
                assert one[name] == pytest.approx(other[name], rel=5 * tolerance, abs=1e-4)
    assert trainer.optimizer.step.__name__ == "step"


@needs_huggingface
def test_huggingface_says_why_it_is_not_captured(device, tmp_path):
    cases = [
        ({"gradient_accumulation_steps": 2}, [], "gradient_accumulation_steps=1"),
        ({"torch_empty_cache_steps": 4}, [], "torch_empty_cache_steps"),
        ({}, [hugging().Looks], "Looks.on_pre_optimizer_step"),
    ]
    for options, callbacks, words in cases:
        plain = run_huggingface(device, tmp_path, False, callbacks, **options)
        trainer = run_huggingface(device, tmp_path, True, callbacks, **options)
        assert words in trainer.captured.reason
        assert trainer.losses == pytest.approx(plain.losses, rel=1e-5)
        same(weights(trainer.model), weights(plain.model))
