"""The Hugging Face Trainer over a stoker Loader: fields become the model's arguments, resumed at the right batch."""

import tempfile
from functools import partial
from pathlib import Path

import h5py
import numpy as np
import torch
from transformers import Trainer, TrainingArguments

from stoker import Loader
from stoker.frameworks.huggingface import StokerTrainerMixin


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(16, 1)

    def forward(self, input_values: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.body(input_values)
        return {"loss": torch.nn.functional.mse_loss(logits, labels), "logits": logits}


class StokerTrainer(StokerTrainerMixin, Trainer):
    pass


def make_trainer(folder: Path) -> StokerTrainer:
    torch.manual_seed(0)
    arguments = TrainingArguments(
        str(folder / "out"), per_device_train_batch_size=100, num_train_epochs=2, learning_rate=0.1,
        save_steps=25, logging_steps=10, report_to=[], disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    return StokerTrainer(
        Net(),
        arguments,
        train_loader=partial(Loader, folder / "train.h5", order="shuffled", seed=1),
        fields={"features": "input_values", "targets": "labels"},
    )


with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    features = np.random.default_rng(0).normal(size=(2000, 16)).astype("f4")
    with h5py.File(folder / "train.h5", "w") as file:
        file["features"], file["targets"] = features, features[:, :1] - features[:, 1:2]
    whole, resumed = make_trainer(folder), make_trainer(folder)
    whole.train()
    resumed.train(resume_from_checkpoint=str(folder / "out/checkpoint-25"))  # batch 5 of epoch 1
    same = torch.equal(whole.model.body.weight, resumed.model.body.weight)
    print(f"{whole.state.global_step} updates; resumed, the weights are the same: {same}")
    whole.close_loaders()
    resumed.close_loaders()
