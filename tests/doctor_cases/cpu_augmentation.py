"""Every image is augmented alone, with numpy. Remedy: the whole batch at once, where it is trained."""

import numpy as np
import torch
from loop import arguments, small_model, train
from torch.utils.data import DataLoader, Dataset

IMAGES = np.random.default_rng(0).random((64, 3, 96, 96), dtype=np.float32)


def augment(image):
    image = np.rot90(image, axes=(1, 2))
    for _ in range(4):
        image = np.clip((image - image.mean()) * 1.1 + image.mean(), 0, 1)
        image = np.power(image, 0.95)
    return np.ascontiguousarray(image)


def augment_batch(images):
    return images.rot90(1, (2, 3)) * 1.1


class Images(Dataset):
    def __init__(self, transform):
        self.transform = transform

    def __len__(self):
        return 4096

    def __getitem__(self, index):
        image = IMAGES[index % len(IMAGES)]
        if self.transform is not None:
            image = self.transform(image)
        return torch.from_numpy(image), float(index % 2)


if __name__ == "__main__":
    chosen = arguments()
    data = Images(None if chosen.remedied else augment)
    loader = DataLoader(data, batch_size=16, num_workers=1, persistent_workers=True)
    prepare = augment_batch if chosen.remedied else None
    train(loader, small_model(3 * 96 * 96), chosen.steps, prepare)
