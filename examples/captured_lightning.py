"""Lightning's whole training step as one CUDA graph: one callback.

    python examples/captured_lightning.py

On a CPU Lightning runs as it is, and the callback says why.
"""

import logging

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from stoker.frameworks.lightning import CaptureCallback

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))  # fmt: skip

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        loss = torch.nn.functional.mse_loss(self.body(batch[0]), batch[1])
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


x = torch.randn(4000, 16, generator=torch.Generator().manual_seed(0))
loader = DataLoader(TensorDataset(x, x[:, :1].sin()), 100, num_workers=0)
capture = CaptureCallback()
quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_checkpointing"), False)
trainer = pl.Trainer(max_epochs=2, gradient_clip_val=1.0, callbacks=[capture], **quiet)
trainer.fit(Net(), loader)
print(f"loss {trainer.callback_metrics['loss']:.4f}; {capture.reason}")
