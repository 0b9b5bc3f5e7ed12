"""Training images changed at random, from batch to batch in place, as by a seed."""

from __future__ import annotations

import numpy as np

_LOW = (1 << 32) - 1


class ShiftAndMirror:
    """Shifts each image by up to `padding` pixels in both directions, and mirrors half of them, anew in each epoch.

    That is a crop of the padded image, as it is usual for CIFAR-10. What happens to a sample follows from the seed, the
    epoch and the sample's index alone, not from ranks and batches. Source: He, Zhang, Ren and Sun, "Deep Residual
    Learning for Image Recognition", 2016, section 4.2.

    Args:
        seed: from 0 up.
        samples: of the training set.
        filler: the value outside an image, one number or (C, 1, 1).
        padding: the largest shift, in pixels.
    """

    def __init__(self, seed: int, samples: int, filler: np.ndarray | float = 0.0, padding: int = 4):
        self.seed, self.samples, self.filler, self.padding = seed, samples, filler, padding
        self._epoch = -1
        self._changes = np.empty((0, 3), np.intp)

    def __call__(self, images: np.ndarray, indices: np.ndarray, epoch: int) -> None:
        """Change a batch of images (B, C, H, W), which are those of the samples at `indices`."""
        if epoch != self._epoch:
            self._changes, self._epoch = self._drawn(epoch), epoch
        _, channels, height, width = images.shape
        padded = np.empty((channels, height + 2 * self.padding, width + 2 * self.padding), images.dtype)
        padded[...] = self.filler
        inside = padded[:, self.padding : self.padding + height, self.padding : self.padding + width]
        for image, (top, left, is_mirrored) in zip(images, self._changes[indices].tolist(), strict=True):
            inside[...] = image[:, :, ::-1] if is_mirrored else image
            image[...] = padded[:, top : top + height, left : left + width]

    def _drawn(self, epoch: int) -> np.ndarray:
        """Return (top, left, whether mirrored) of every sample."""
        # NumPy never changes RandomState's streams.
        random = np.random.RandomState([self.seed & _LOW, self.seed >> 32, epoch & _LOW, epoch >> 32, self.padding])
        places = random.randint(0, 2 * self.padding + 1, (self.samples, 2))
        return np.column_stack([places, random.randint(0, 2, self.samples)])
