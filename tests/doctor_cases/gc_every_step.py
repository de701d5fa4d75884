"""Garbage is collected by hand after every step, with many objects alive. Remedy: it is not."""

import gc

import torch
from loop import arguments, small_model, train
from torch.utils.data import DataLoader, TensorDataset

gc.freeze()  # torch's own objects would make it ten times worse
ALIVE = [[number] for number in range(200_000)]


def tidy(loss, output):
    gc.collect()


if __name__ == "__main__":
    chosen = arguments()
    data = TensorDataset(torch.randn(4096, 64), torch.randn(4096))
    tidied = None if chosen.remedied else tidy
    train(DataLoader(data, batch_size=64), small_model(64), chosen.steps, after_step=tidied)
