"""A plain training loop for a recipe's job, and a watch for work that would wait for a device."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stoker.loader.loader import Loader

# What gives its result a size that only the values know, or hands a value to Python: on a GPU each of
# these waits for the device, and none can be captured in a CUDA graph.
WAITING = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "bincount",
    "repeat_interleave",
    "index_put_",  # with a bool mask; recipes have no other use for it
}


class NoWaiting(TorchDispatchMode):
    """Fails at the first operation that would wait for the device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.partition("::")[2]
        # repeat_interleave by a number has a known size; by a tensor it has not.
        assert name not in WAITING, f"{name} waits for the device"
        return func(*args, **(kwargs or {}))


def train_job(job, store, *, epochs, batch_size, lr, device="cpu"):
    """Train as anybody would by hand; return the model, the mean loss per epoch and the metrics."""
    train = Loader(
        store, batch_size, device, order="shuffled", fields=job.fields,
        samples=job.samples["train"], augment=job.augmentation,
    )  # fmt: skip
    model = job.model.to(device)
    optimizer = job.make_optimizer(model.parameters(), lr)
    schedule = job.make_schedule(optimizer, epochs * len(train))
    losses = []
    for _ in range(epochs):
        model.train()
        total = 0.0
        for batch in train:
            inputs, targets = job.unpack(batch)
            loss = job.criterion(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            total += loss.item() * len(batch.positions)
        losses.append(total / len(job.samples["train"]))
    return model, losses, judge_job(job, store, model, batch_size, device)


def judge_job(job, store, model, batch_size, device="cpu", split="val"):
    """Return the metrics of a split."""
    augment = None if job.augmentation is None else job.augmentation.validation()
    loader = Loader(
        store, batch_size, device, fields=job.fields, samples=job.samples[split], augment=augment
    )
    metrics = job.metrics()
    model.eval()
    with torch.no_grad():
        for batch in loader:
            inputs, targets = job.unpack(batch)
            metrics.update(model(inputs), targets)
    return metrics.compute()
