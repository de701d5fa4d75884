"""A training loop of your own, its whole step as one CUDA graph: forward, backward, clip, update.

    python examples/captured_loop.py

On a CPU the same loop runs eagerly, and says why.
"""

import torch

import stoker

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
inputs = torch.randn(4096, 32, device=device)
targets = inputs[:, :1].sin()
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 1)).to(
    device
)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)


def train_step(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    x, y = batch
    loss = torch.nn.functional.mse_loss(model(x), y)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss


step = stoker.capture(train_step, (inputs[:128], targets[:128]), model=model, optimizer=optimizer)
for _ in range(200):
    rows = torch.randint(0, len(inputs), (128,), device=device)
    loss = step((inputs[rows], targets[rows]))
    scheduler.step()
print(f"loss {loss.item():.4f}; {step.reason}")
