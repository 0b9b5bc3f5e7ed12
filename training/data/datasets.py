"""Datasets in memory, and how each is read from its files.

Legend: N samples, C channels, H x W pixels, B samples of a batch.
"""

from __future__ import annotations

import gzip
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from clcomm.base.errors import DataError
from clcomm.base.host.arrays import aligned_empty
from training.data.idx import Allocate, FilePath, read_idx

MNIST_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
_MOST_GATHERS = 64  # each keeps a batch's memory
_MEAN_STD = {"mnist": (0.1307, 0.3081), "fashion-mnist": (0.2860, 0.3530)}


class ArrayDataset:
    """Images (N, C, H, W), uint8 or float32, with labels (N,) of 0 to classes - 1, normalised batch by batch.

    A uint8 image x becomes (x / 255 - mean) / std, a float32 image (x - mean) / std; `mean` and `std` are one
    number or one for each channel. Raises DataError if shapes, dtypes or labels do not match.

    Attributes:
        prepare_gather: prepares a device's kernel for the images of batches in memory that is used again, such as
            training.engines.gather.DeviceGather; None: NumPy gathers them.
    """

    prepare_gather: Callable[..., Callable[[np.ndarray], None] | None] | None = None

    def __init__(
        self,
        images: np.ndarray,
        labels: np.ndarray,
        *,
        name: str,
        classes: int = 10,
        mean: float | Sequence[float] = 0.0,
        std: float | Sequence[float] = 1.0,
    ) -> None:
        _check(images, labels, name, classes)
        self.images = np.ascontiguousarray(images)
        self.labels = np.ascontiguousarray(labels, dtype=np.int32)
        self.name, self.classes, self.mean, self.std = name, classes, mean, std
        scale, shift = _affine(images, mean, std, name)
        self._scale, self._shift = scale, shift
        self._gathers: dict[int, tuple[np.ndarray, Callable[[np.ndarray], None]]] = {}  # by the id of their images

    def __len__(self) -> int:
        return len(self.images)

    @property
    def black(self) -> np.ndarray:
        """The normalised value of a pixel that is 0: (), or (C, 1, 1)."""
        return self._shift

    @property
    def image_shape(self) -> tuple[int, ...]:
        """The shape of one image: (C, H, W)."""
        return self.images.shape[1:]

    def new_batch(self, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Return memory for a batch, uninitialised: images (size, C, H, W) and labels (size,)."""
        return aligned_empty((size, *self.images.shape[1:]), np.float32), aligned_empty((size,), np.int32)

    def batch(
        self, indices: np.ndarray, out: tuple[np.ndarray, np.ndarray] | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return normalised float32 images (B, C, H, W) and int32 labels (B,), in fresh arrays or in those of `out`."""
        images, labels = self.new_batch(len(indices)) if out is None else out
        self.labels.take(indices, out=labels)
        gather = self._gathers.get(id(images))
        if gather is None:
            self._gather(indices, images, is_kept=out is not None)
        else:
            gather[1](indices)
        return images, labels

    def _gather(self, indices: np.ndarray, images: np.ndarray, is_kept: bool) -> None:
        """Gather images with NumPy; with `is_kept`, prepare the device to gather them there from now on."""
        # Three passes over a batch, which fits the cache, are 3 to 4 times as fast as a look-up table of 256 entries.
        images[...] = self.images[indices]
        images *= self._scale
        images += self._shift
        if is_kept and self.prepare_gather is not None and len(self._gathers) < _MOST_GATHERS:
            gather = self.prepare_gather(self.images, self._scale, self._shift, images)
            if gather is None:
                self.prepare_gather = None  # it takes no others either
            else:
                self._gathers[id(images)] = images, gather


@dataclass(frozen=True)
class Splits:
    """A training set, a test set (None where it was left out), and the number of epochs that a run needs by default."""

    train: ArrayDataset
    test: ArrayDataset | None
    default_epochs: int

    @property
    def name(self) -> str:
        return self.train.name


def find_mnist_files(directory: FilePath) -> dict[str, Path]:
    """Return the MNIST-named files of a directory, plain or .gz, by their plain names; some may be absent."""
    root = Path(directory)
    found = {}
    for name in MNIST_FILES:
        for spelling in (
            name,
            name + ".gz",
            name.replace("-idx", ".idx"),
            name.replace("-idx", ".idx") + ".gz",
        ):
            if (root / spelling).is_file():
                found[name] = root / spelling
                break
    return found


def load_mnist(
    directory: FilePath, name: str = "mnist", *, with_test: bool = True, allocate: Allocate = aligned_empty
) -> Splits:
    """Read the four IDX files of MNIST, of Fashion-MNIST (`name`) or of another set with the same file names.

    Images have any size, labels up to 256 classes. Without `with_test` the test images are not read. Raises DataError,
    which names the file, if one is missing or does not match the others.
    """
    files = find_mnist_files(directory)
    missing = [file for file in MNIST_FILES if file not in files]
    if missing:
        raise DataError(f"{directory}: expected the file {missing[0]} or {missing[0]}.gz, found none; add it")
    train_images = read_idx(files[MNIST_FILES[0]], shape=(None, None, None), dtype="uint8", allocate=allocate)
    train_labels = read_idx(files[MNIST_FILES[1]], shape=(len(train_images),), dtype="uint8")
    test_images = None
    if with_test:
        shape = (None, *train_images.shape[1:])
        test_images = read_idx(files[MNIST_FILES[2]], shape=shape, dtype="uint8", allocate=allocate)
    count = None if test_images is None else len(test_images)
    test_labels = read_idx(files[MNIST_FILES[3]], shape=(count,), dtype="uint8")
    if train_images.size == 0 or test_labels.size == 0:
        raise DataError(f"{directory}: expected at least one training and one test image, got none")
    mean, std = _MEAN_STD.get(name) or mean_and_std(train_images)
    classes = 10 if name in _MEAN_STD else 1 + int(max(train_labels.max(), test_labels.max()))

    def dataset(images: np.ndarray, labels: np.ndarray) -> ArrayDataset:
        return ArrayDataset(images[:, None], labels, name=name, classes=classes, mean=mean, std=std)

    test = None if test_images is None else dataset(test_images, test_labels)
    return Splits(dataset(train_images, train_labels), test, default_epochs=1)


def mean_and_std(images: np.ndarray) -> tuple[float, float]:
    """Return mean and standard deviation of uint8 pixels on the 0 to 1 scale, from exact counts."""
    counts = np.zeros(256, dtype=np.int64)
    for start in range(0, len(images), 1024):
        counts += np.bincount(images[start : start + 1024].ravel(), minlength=256)
    values = np.arange(256) / 255
    mean = float(counts @ values / counts.sum())
    variance = float(counts @ (values - mean) ** 2 / counts.sum())
    return mean, variance**0.5 or 1.0


def digits_available() -> bool:
    """Return whether scikit-learn, which holds the digits, is installed."""
    return importlib.util.find_spec("sklearn") is not None


def load_digits(test_size: int = 360) -> Splits:
    """Return the 1,797 real handwritten digits that scikit-learn's wheel holds, 8x8 pixels enlarged to 28x28.

    The split is fixed: the last `test_size` samples of a seeded shuffle are the test set. Raises DataError if
    scikit-learn is not installed.
    Source: Alpaydin & Kaynak, "Optical Recognition of Handwritten Digits", UCI repository, 1998.
    """
    pixels, labels = _bundled_digits()
    images = np.pad(_enlarge(pixels * (255 / 16), 3), ((0, 0), (2, 2), (2, 2)))
    images = np.rint(images).astype(np.uint8)[:, None]
    order = np.random.RandomState(0).permutation(len(labels))  # NumPy never changes RandomState's streams
    train, test = order[:-test_size], order[-test_size:]
    mean, std = mean_and_std(images[train])
    sets = [ArrayDataset(images[part], labels[part], name="digits", mean=mean, std=std) for part in (train, test)]
    return Splits(sets[0], sets[1], default_epochs=40)


def load_synthetic(
    train_size: int = 8192,
    test_size: int = 1024,
    *,
    shape: tuple[int, int, int] = (1, 28, 28),
    classes: int = 10,
    seed: int = 0,
) -> Splits:
    """Return a seeded, artificial set that a model can learn: a smooth pattern for each class, plus noise.

    Args:
        train_size: training samples.
        test_size: test samples.
        shape: (C, H, W) of an image.
        classes: the number of classes, which have equally many samples, as far as they divide.
        seed: of the patterns, the labels and the noise.
    """
    random = np.random.RandomState(seed)
    channels, height, width = shape
    coarse = random.uniform(0, 1, (classes * channels, -(-height // 4), -(-width // 4)))
    patterns = _enlarge(coarse, 4)[:, :height, :width].reshape(classes, *shape)
    count = train_size + test_size
    labels = random.permutation(np.arange(count) % classes).astype(np.int32)
    noise = random.randint(0, 96, (count, *shape)).astype(np.uint8)
    levels = np.rint(159 * patterns).astype(np.uint8)
    images = np.empty((count, *shape), dtype=np.uint8)
    for start in range(0, count, 1024):  # bounded working memory
        part = slice(start, start + 1024)
        images[part] = levels[labels[part]] + noise[part]
    mean, std = mean_and_std(images[:train_size])
    sets = [
        ArrayDataset(images[part], labels[part], name="synthetic", classes=classes, mean=mean, std=std)
        for part in (slice(0, train_size), slice(train_size, count))
    ]
    return Splits(sets[0], sets[1], default_epochs=1)


def _enlarge(images: np.ndarray, factor: int) -> np.ndarray:
    """Return (N, factor*H, factor*W) by bilinear interpolation with pixel centres aligned, edges repeated."""
    for axis in (1, 2):
        size = images.shape[axis]
        centres = np.clip((np.arange(size * factor) + 0.5) / factor - 0.5, 0, size - 1)
        low = np.floor(centres).astype(int)
        high = np.minimum(low + 1, size - 1)
        weight = (centres - low).reshape((-1, 1) if axis == 1 else (-1,))
        images = np.take(images, low, axis) * (1 - weight) + np.take(images, high, axis) * weight
    return images


def _bundled_digits() -> tuple[np.ndarray, np.ndarray]:
    """Return images (N, 8, 8) and labels from scikit-learn's file, as importing scikit-learn takes a second a rank."""
    spec = importlib.util.find_spec("sklearn")
    if spec is None or not spec.submodule_search_locations:
        raise DataError("digits: scikit-learn, which holds them, is not installed; pip install scikit-learn")
    path = Path(spec.submodule_search_locations[0], "datasets", "data", "digits.csv.gz")
    if path.is_file():
        with gzip.open(path, "rt") as stream:
            table = np.loadtxt(stream, delimiter=",")
    else:
        from sklearn.datasets import load_digits as from_package

        bundled = from_package()
        table = np.column_stack([bundled.data, bundled.target])
    return table[:, :-1].reshape(-1, 8, 8), table[:, -1].astype(np.int32)


def _check(images: np.ndarray, labels: np.ndarray, name: str, classes: int) -> None:
    if images.ndim != 4 or images.dtype not in (np.uint8, np.float32):
        raise DataError(
            f"{name}: expected images (N, C, H, W) of uint8 or float32, got {images.shape} of {images.dtype}"
        )
    if labels.shape != (len(images),) or labels.dtype.kind not in "iu":
        raise DataError(f"{name}: expected {len(images)} whole numbers as labels, got {labels.shape} of {labels.dtype}")
    if len(labels) and not 0 <= labels.min() <= labels.max() < classes:
        raise DataError(
            f"{name}: expected labels of 0 to {classes - 1}, got {labels.min()} to {labels.max()}; "
            f"are labels and images of one set?"
        )


def _affine(
    images: np.ndarray, mean: float | Sequence[float], std: float | Sequence[float], name: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return float32 (scale, shift), each () or (C, 1, 1), so that x * scale + shift is normalised."""
    means, stds = np.asarray(mean, dtype=np.float64), np.asarray(std, dtype=np.float64)
    for what, given in (("mean", means), ("std", stds)):
        if given.shape not in ((), (images.shape[1],)) or not np.isfinite(given).all():
            raise DataError(f"{name}: expected {what} as one number or {images.shape[1]}, got {given.tolist()}")
    if (stds <= 0).any():
        raise DataError(f"{name}: expected a std above 0, got {stds.tolist()}")
    unit = 255 if images.dtype == np.uint8 else 1
    scale, shift = 1 / (unit * stds), -means / stds
    return tuple(part.astype(np.float32).reshape((-1, 1, 1) if part.ndim else ()) for part in (scale, shift))  # type: ignore[return-value]
