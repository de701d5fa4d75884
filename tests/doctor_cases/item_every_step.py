"""Accuracy is counted sample by sample with .item(). Remedy: on tensors, read once in a while."""

import torch
from loop import DEVICE, arguments, small_model, train
from torch.utils.data import BatchSampler, DataLoader, TensorDataset

if __name__ == "__main__":
    chosen = arguments()
    data = TensorDataset(torch.randn(4096, 64), torch.randn(4096))
    total = torch.zeros((), device=DEVICE)
    right = []

    def count(loss, output):
        if chosen.remedied:
            total.add_((output.detach() > 0).sum())
            return
        for row in range(len(output)):
            right.append(output[row, 0].item() > 0)

    # Whole batches: fetching 512 samples one by one would be a cause of its own.
    whole = BatchSampler(range(len(data)), 512, drop_last=False)
    loader = DataLoader(data, batch_size=None, sampler=whole)
    train(loader, small_model(64, 0.010), chosen.steps, after_step=count)
