"""A batch is put together value by value. Remedy: one stack."""

import torch
from loop import arguments, small_model, train
from torch.utils.data import DataLoader, Dataset

WIDTH = 2048


class Rows(Dataset):
    def __init__(self):
        self.values = torch.randn(256, WIDTH)

    def __len__(self):
        return 4096

    def __getitem__(self, index):
        return self.values[index % 256], float(index % 2)


def put_together(samples):
    rows = [[float(value) for value in row.numpy()] for row, _ in samples]
    return torch.tensor(rows), torch.tensor([label for _, label in samples])


def stack(samples):
    return torch.stack([row for row, _ in samples]), torch.tensor([label for _, label in samples])


if __name__ == "__main__":
    chosen = arguments()
    collate = stack if chosen.remedied else put_together
    loader = DataLoader(
        Rows(), batch_size=24, num_workers=1, persistent_workers=True, collate_fn=collate
    )
    train(loader, small_model(WIDTH), chosen.steps)
