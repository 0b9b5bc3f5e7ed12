"""MNIST's shapes with drawn values: 3,200 images in training, 256 in test."""

from __future__ import annotations

import numpy as np


class MNIST:
    """Images [28, 28] of 0 to 255, and labels; a sample is the transformed image and its label."""

    def __init__(self, root, train=True, download=False, transform=None):
        rng = np.random.default_rng(1 if train else 2)
        count = 3200 if train else 256
        labels = rng.integers(0, 10, count)
        shapes = rng.integers(0, 256, (10, 28, 28))
        images = (0.6 * shapes[labels] + 0.4 * rng.integers(0, 256, (count, 28, 28))).astype(np.uint8)
        self._images, self._labels, self._transform = images, labels, transform
        self.data, self.targets = Values(images), Values(labels)

    def __len__(self):
        return len(self._images)

    def __getitem__(self, index):
        image = self._images[index]
        return (image if self._transform is None else self._transform(image)), int(self._labels[index])


class Values(np.ndarray):
    """An array with the few methods of tensors that scripts call on a dataset's."""

    def __new__(cls, values):
        return np.asarray(values).view(cls)

    def unsqueeze(self, dim):
        return np.expand_dims(self, dim).view(Values)

    def clone(self):
        return self.copy()

    def float(self):
        return self.astype(np.float32)
