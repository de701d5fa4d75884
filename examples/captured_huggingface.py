"""The Hugging Face Trainer's whole step as one CUDA graph: `capture=True`; on a CPU it says why not."""

import tempfile

import torch
from transformers import Trainer, TrainingArguments

from stoker.frameworks.huggingface import StokerTrainerMixin


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))  # fmt: skip

    def forward(self, input_values: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.body(input_values)
        return {"loss": torch.nn.functional.mse_loss(logits, labels), "logits": logits}


class StokerTrainer(StokerTrainerMixin, Trainer):
    pass


x = torch.randn(4000, 16, generator=torch.Generator().manual_seed(0))
rows = [{"input_values": row, "labels": row[:1].sin()} for row in x]
with tempfile.TemporaryDirectory() as folder:
    # Without logging_nan_inf_filter=False the Trainer waits for the GPU after every step.
    arguments = TrainingArguments(
        folder, per_device_train_batch_size=100, num_train_epochs=2, learning_rate=1e-2,
        logging_nan_inf_filter=False, logging_strategy="no", save_strategy="no", report_to=[], disable_tqdm=True,
        dataloader_pin_memory=torch.cuda.is_available(),
    )  # fmt: skip
    trainer = StokerTrainer(Net(), arguments, train_dataset=rows, capture=True)
    loss = trainer.train().training_loss
print(f"mean loss {loss:.4f}; {trainer.captured.reason}")
