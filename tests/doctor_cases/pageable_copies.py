"""Large batches go to the GPU from memory that is not pinned. Remedy: pinned memory."""

import torch
from loop import arguments, train
from torch import nn
from torch.utils.data import DataLoader, Dataset

IMAGES = torch.zeros(256, 3, 224, 224)


class Images(Dataset):
    def __len__(self):
        return 1 << 20

    def __getitems__(self, indices):
        return indices


def whole(indices):
    return IMAGES, torch.zeros(len(IMAGES))


if __name__ == "__main__":
    chosen = arguments()
    images = IMAGES.pin_memory() if chosen.remedied else IMAGES
    IMAGES = images
    model = nn.Sequential(nn.AvgPool2d(32), nn.Flatten(), nn.Linear(3 * 49, 1))
    train(DataLoader(Images(), batch_size=256, collate_fn=whole), model, chosen.steps)
