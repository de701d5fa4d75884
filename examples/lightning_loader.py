"""Lightning over a stoker Loader: its rank's share on its device, a schedule, a log, and the doctor."""

import logging
import tempfile
from functools import partial
from pathlib import Path

import h5py
import lightning.pytorch as pl
import numpy as np
import torch

from stoker import Loader
from stoker.frameworks.lightning import (
    DoctorCallback,
    OomLadderCallback,
    ScheduleCallback,
    StokerData,
    TelemetryCallback,
)
from stoker.runs.reading import read_run

logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 1)
        )

    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.body(batch["features"]), batch["targets"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    features = np.random.default_rng(0).normal(size=(4000, 16)).astype("f4")
    with h5py.File(folder / "train.h5", "w") as file:
        file["features"], file["targets"] = features, features[:, :1] - features[:, 1:2]
    data = StokerData(train=partial(Loader, folder / "train.h5", 100, order="shuffled", seed=1))
    watch = TelemetryCallback(folder / "run")  # what `stoker report` and `stoker monitor` read
    doctor = DoctorCallback(folder / "run", say=print)
    trainer = pl.Trainer(
        max_epochs=3, accelerator="auto", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
        callbacks=[ScheduleCallback(warmup_share=0.1), watch, doctor, OomLadderCallback()],
    )  # fmt: skip
    trainer.fit(Net(), datamodule=data)
    run = read_run(folder / "run")
    print(f"{trainer.global_step} updates; {run.told} Last loss {run.losses[-1][1]:.4f}")
