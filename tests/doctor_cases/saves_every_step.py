"""The model is saved after every step. Remedy: every hundredth."""

import io
import itertools

import torch
from loop import arguments, small_model, train
from torch.utils.data import DataLoader, TensorDataset

STATE = {"weights": torch.zeros(4_000_000)}
num_done = itertools.count(1)


def save(loss, output):
    if next(num_done) % every == 0:
        torch.save(STATE, io.BytesIO())


if __name__ == "__main__":
    chosen = arguments()
    every = 100 if chosen.remedied else 1
    data = TensorDataset(torch.randn(4096, 64), torch.randn(4096))
    train(DataLoader(data, batch_size=64), small_model(64), chosen.steps, after_step=save)
