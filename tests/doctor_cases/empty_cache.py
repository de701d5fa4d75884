"""The allocator's cache is emptied after every step. Remedy: it is not."""

import torch
from loop import arguments, small_model, train
from torch.utils.data import DataLoader, TensorDataset


def tidy(loss, output):
    torch.cuda.empty_cache()


if __name__ == "__main__":
    chosen = arguments()
    data = TensorDataset(torch.randn(4096, 64), torch.randn(4096))
    tidied = None if chosen.remedied else tidy
    train(DataLoader(data, batch_size=64), small_model(64), chosen.steps, after_step=tidied)
