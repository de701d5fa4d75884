"""The loops of `test_every_pair.py`: one task, trained by the Trainer, by hand, and by three frameworks.

Each returns the losses of all steps, whether the step is captured at the end, and why.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import warnings
from functools import cache, partial
from types import SimpleNamespace

import torch
from torch import nn

import stoker
from paper_graphs import Jitter
from stoker.loader.loader import Loader
from stoker.train.trainer import Trainer

EPOCHS, RATE, CLIP = 2, 0.05, 1.0
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Scale(nn.Module):
    def forward(self, images):
        return images.float() / 64


def make_network(device):
    torch.manual_seed(0)
    layers = (Scale(), nn.Flatten(), nn.Linear(48, 16), nn.Tanh(), nn.Linear(16, 4))
    return nn.Sequential(*layers).to(device)


def make_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)


def autocast(device, precision):
    if precision == "fp32":
        return contextlib.nullcontext()
    return torch.autocast(device, DTYPES[precision])


class Pairs:
    """Batches of any loader as pairs, or as dicts; an epoch for each iteration."""

    def __init__(self, loader, names=None):
        self.loader, self.names = loader, names

    def __len__(self):
        return len(self.loader)

    def __iter__(self):
        for batch in self.loader:
            pair = (batch["images"], batch["labels"]) if isinstance(batch, dict) else batch
            yield tuple(pair) if self.names is None else dict(zip(self.names, pair, strict=True))


def train_by_trainer(loader, device, augments, capture, precision):
    model = make_network(device)
    trainer = Trainer(
        model,
        loader,
        None,
        nn.functional.cross_entropy,
        make_optimizer(model),
        None,
        {
            "epochs": EPOCHS,
            "precision": precision,
            "capture": "auto" if capture else "off",
            "clip_norm": CLIP,
        },
        device,
        Jitter(device) if augments else None,
    )
    history = trainer.fit(quiet=True)
    captured = trainer._captured
    assert capture or history.fallback is None
    return history.losses, captured is not None and captured.active, captured and captured.reason


def train_by_hand(loader, device, augments, capture, precision):
    model, jitter = make_network(device), Jitter(device)
    optimizer = make_optimizer(model)
    scaler = torch.amp.GradScaler(device, enabled=precision == "fp16")

    def train(batch):
        images, labels = batch
        images = jitter(images) if augments else images
        with autocast(device, precision):
            outputs = model(images)
        loss = nn.functional.cross_entropy(outputs.float(), labels)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.detach()

    step, losses = train, []
    if capture:
        step = stoker.capture(train, model=model, optimizer=optimizer, scaler=scaler)
    for epoch in range(EPOCHS):
        jitter.seek(epoch)
        losses += [step(tuple(part.to(device) for part in pair)) for pair in Pairs(loader)]
    return list(map(float, losses)), capture and step.is_captured, capture and step.reason


@cache
def lightning_parts():
    import lightning.pytorch as pl

    from stoker.frameworks.lightning import CaptureCallback, adapt

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Net(pl.LightningModule):
        def __init__(self, device, augments):
            super().__init__()
            self.body, self.jitter = make_network(device), Jitter(device)
            self.augments, self.seen = augments, []

        def training_step(self, batch):
            images, labels = batch
            images = self.jitter(images) if self.augments else images
            return nn.functional.cross_entropy(self.body(images), labels)

        def on_train_epoch_start(self):
            self.jitter.seek(self.current_epoch)

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.seen.append(outputs["loss"])

        def configure_optimizers(self):
            return make_optimizer(self.body)

    return SimpleNamespace(pl=pl, Net=Net, CaptureCallback=CaptureCallback, adapt=adapt)


def train_by_lightning(loader, device, augments, capture, precision):
    parts = lightning_parts()
    net, callback = parts.Net(device, augments), parts.CaptureCallback()
    loader = Pairs(parts.adapt(loader) if isinstance(loader, Loader) else loader)
    named = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = parts.pl.Trainer(
            max_epochs=EPOCHS, accelerator="gpu" if device == "cuda" else "cpu", devices=1,
            logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, callbacks=[callback] if capture else None,
            gradient_clip_val=CLIP, precision=named[precision],
        )  # fmt: skip
        trainer.fit(net, loader)
    return list(map(float, net.seen)), callback.is_captured, callback.reason


def train_by_accelerate(loader, device, augments, capture, precision):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState

    from stoker.frameworks.accelerate import adapt
    from stoker.frameworks.accelerate import capture as capture_step

    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()
    named = "no" if precision == "fp32" else precision
    accelerator = Accelerator(cpu=device == "cpu", mixed_precision=named)
    jitter, model = Jitter(device), make_network("cpu")
    loader = adapt(loader) if isinstance(loader, Loader) else loader
    model, optimizer, loader = accelerator.prepare(model, make_optimizer(model), loader)

    def train(batch):
        images, labels = batch
        loss = nn.functional.cross_entropy(model(jitter(images) if augments else images), labels)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step, losses = train, []
    if capture:
        step = capture_step(
            accelerator, train, model=model, optimizer=optimizer, say=lambda _: None
        )
    for epoch in range(EPOCHS):
        jitter.seek(epoch)
        losses += [step(tuple(part.to(device) for part in pair)) for pair in Pairs(loader)]
    return list(map(float, losses)), capture and step.is_captured, capture and step.reason


@cache
def huggingface_parts():
    from transformers import Trainer as Base
    from transformers import TrainerCallback, TrainingArguments

    from stoker.frameworks.accelerate import AccelerateLoader
    from stoker.frameworks.huggingface import StokerTrainerMixin

    class Training(StokerTrainerMixin, Base):
        def __init__(self, *args, given, jitter, **kwargs):
            super().__init__(*args, **kwargs)
            self.given, self.jitter, self.seen = given, jitter, []

        def get_train_dataloader(self):
            loader = self.given
            loader = AccelerateLoader(loader) if isinstance(loader, Loader) else loader
            return Pairs(loader, ("images", "labels"))

        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            images = inputs["images"]
            images = images if self.jitter is None else self.jitter(images)
            return nn.functional.cross_entropy(model(images), inputs["labels"])

        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            self.seen.append(loss)
            return loss

    class Seek(TrainerCallback):
        def __init__(self, jitter):
            self.jitter, self.epochs = jitter, itertools.count()

        def on_epoch_begin(self, args, state, control, **kwargs):
            self.jitter.seek(next(self.epochs))

    return SimpleNamespace(Training=Training, Arguments=TrainingArguments, Seek=Seek)


def train_by_huggingface(folder, loader, device, augments, capture, precision):
    parts, model, jitter = huggingface_parts(), make_network(device), Jitter(device)
    arguments = parts.Arguments(
        str(folder), num_train_epochs=EPOCHS, max_grad_norm=CLIP, use_cpu=device == "cpu",
        save_strategy="no", logging_strategy="no", report_to=[], disable_tqdm=True,
        bf16=precision == "bf16", fp16=precision == "fp16",
    )  # fmt: skip
    optimizer = make_optimizer(model)
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = parts.Training(
            model, arguments, given=loader, jitter=jitter if augments else None, capture=capture,
            optimizers=(optimizer, constant), callbacks=[parts.Seek(jitter)],
        )  # fmt: skip
        trainer.train()
    captured = trainer.captured
    losses = list(map(float, trainer.seen))
    return losses, capture and captured.is_captured, capture and captured.reason


def loops(folder):
    """Return every loop by its name."""
    return {
        "Trainer": train_by_trainer,
        "by hand": train_by_hand,
        "Lightning": train_by_lightning,
        "Accelerate": train_by_accelerate,
        "Hugging Face": partial(train_by_huggingface, folder),
    }
