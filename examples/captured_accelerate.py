"""The whole step of an Accelerate loop as one CUDA graph; on a CPU it runs eagerly, and says why."""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

from stoker.frameworks.accelerate import capture

accelerator = Accelerator()  # mixed_precision="bf16" is captured too
x = torch.randn(4000, 16, generator=torch.Generator().manual_seed(0))
loader = DataLoader(TensorDataset(x, x[:, :1].sin()), 100, shuffle=True)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 80)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)


def train_step(batch: list[torch.Tensor]) -> torch.Tensor:
    loss = torch.nn.functional.mse_loss(model(batch[0]), batch[1])
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss


step = capture(accelerator, train_step, model=model, optimizer=optimizer)
for _epoch in range(2):
    for batch in loader:
        loss = step(batch)
        scheduler.step()
print(f"loss {loss.item():.4f}; {step.reason}")
