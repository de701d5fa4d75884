"""Modules and callbacks for the tests of Lightning, which is imported here."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from framework_makers import RATE, step_loss
from stoker.frameworks import lightning as frameworks
from training_makers import make_model, out_of_memory

__all__ = ["Breaking", "Dice", "Judged", "MisconfigurationException", "Net", "frameworks", "pl"]


class Net(pl.LightningModule):
    def __init__(self, dropout=0.0, most=None, where="forward"):
        super().__init__()
        self.body = make_model(dropout)
        self.register_buffer("calls", torch.zeros(()))
        self.losses, self.batches, self.rates = [], [], []
        self.most, self.where = most, where

    def training_step(self, batch, batch_idx):
        self.calls += 1
        features, targets = (
            (batch["features"], batch["targets"]) if isinstance(batch, dict) else batch
        )
        loss = step_loss(self.body, features, targets)
        if self.most is not None and len(features) > self.most:
            if self.where == "forward":
                raise out_of_memory()
            loss.register_hook(lambda gradient: (_ for _ in ()).throw(out_of_memory()))
        self.log("train_loss", loss.detach(), batch_size=len(features))
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(outputs["loss"].item() * self.trainer.accumulate_grad_batches)
        self.batches.append(batch)
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=RATE, momentum=0.9)


class Judged(Net):
    def __init__(self):
        super().__init__()
        self.steps = []

    def validation_step(self, batch, batch_idx):
        loss = step_loss(self.body, batch["features"], batch["targets"])
        self.log("val_loss", loss, batch_size=len(batch["features"]))
        self.steps.append(batch.step)


class Dice(pl.Callback):
    """Saves at a step, with the state of torch's generator, which Lightning does not keep."""

    def __init__(self, path, at=None):
        self.path, self.at, self.rng = path, at, None

    def state_dict(self):
        return {"rng": torch.get_rng_state()}

    def load_state_dict(self, state):
        self.rng = state["rng"]

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if self.rng is not None:
            torch.set_rng_state(self.rng)
            self.rng = None

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == self.at:
            trainer.save_checkpoint(self.path)


class Breaking(pl.Callback):
    """A power cut at a step."""

    def __init__(self, at):
        self.at = at

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_step == self.at:
            raise ZeroDivisionError
