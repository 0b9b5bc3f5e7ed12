"""CIFAR-10: its files, how they are read and downloaded, and other sets at its size.

Source: Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009;
https://www.cs.toronto.edu/~kriz/cifar.html describes the binary files.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from clcomm.base.errors import DataError
from training.data.datasets import ArrayDataset, Splits
from training.data.download import CONNECT_LIMIT_S, FetchError, fetch
from training.data.idx import FilePath

TRAIN_FILES = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST_FILE = "test_batch.bin"
#: The folder in the archive.
FOLDER = "cifar-10-batches-bin"
URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
MD5 = "c32a1d4ab5d03f1284b67883e8d87530"
#: Of the training images' channels.
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
_SHAPE = 3, 32, 32
#: Bytes of a sample: its label, then its pixels, channel by channel.
_RECORD = 1 + 3 * 32 * 32
_MOST_ARCHIVE_BYTES, _MOST_FILE_BYTES = 256 << 20, 64 << 20


def find_cifar10(directory: FilePath) -> Path | None:
    """Return the folder with all of CIFAR-10's binary files: `directory` or one in it; None if there is none."""
    for folder in (Path(directory), Path(directory, FOLDER)):
        if all((folder / name).is_file() for name in (*TRAIN_FILES, TEST_FILE)):
            return folder
    return None


def load_cifar10(directory: FilePath, *, with_test: bool = True) -> Splits:
    """Read CIFAR-10's binary files; raises DataError, which names the file, for one that is not whole."""
    train = [_read(Path(directory, name)) for name in TRAIN_FILES]
    test = _dataset(*_read(Path(directory, TEST_FILE))) if with_test else None
    images, labels = (np.concatenate(parts) for parts in zip(*train, strict=True))
    return Splits(_dataset(images, labels), test, default_epochs=1)


def _dataset(images: np.ndarray, labels: np.ndarray) -> ArrayDataset:
    return ArrayDataset(images, labels, name="cifar10", classes=10, mean=MEAN, std=STD)


def _read(path: Path) -> tuple[np.ndarray, np.ndarray]:
    try:
        content = np.fromfile(path, np.uint8)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); check the path and rights") from error
    if not content.size or content.size % _RECORD:
        raise DataError(f"{path}: expected records of {_RECORD:,} bytes, got {content.size:,} bytes; download it again")
    records = content.reshape(-1, _RECORD)
    if records[:, 0].max() > 9:
        raise DataError(f"{path}: expected labels of 0 to 9, got {records[:, 0].max()}; is it a file of CIFAR-10?")
    return records[:, 1:].reshape(-1, *_SHAPE), records[:, 0].astype(np.int32)


def download_cifar10(
    target: Path, *, connect_limit_s: float = CONNECT_LIMIT_S, report: Callable[[str], object] = lambda line: None
) -> None:
    """Put CIFAR-10's binary files into `target`, where they appear after the archive's checksum was compared.

    Args:
        connect_limit_s: seconds for the first answer.
        report: receives a line when the server answers.

    Raises DataError if the download fails or the files cannot be kept.
    """
    import tarfile  # imported here: it takes 3 ms, and is used once a machine

    try:
        target.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target, prefix=".download-", ignore_cleanup_errors=True) as work:
            archive = Path(work, "cifar10.tar.gz")
            line = f"data: downloading cifar10 from {URL.split('/')[2]} to {target}"
            fetch(URL, archive, connect_limit_s, _MOST_ARCHIVE_BYTES, lambda: report(line))
            if hashlib.md5(archive.read_bytes(), usedforsecurity=False).hexdigest() != MD5:
                raise FetchError(f"the archive has another checksum than {MD5}")
            for name in (*TRAIN_FILES, TEST_FILE):
                _extract(archive, name, Path(work, name))
            for name in (*TRAIN_FILES, TEST_FILE):
                os.replace(Path(work, name), target / name)
    except (FetchError, tarfile.TarError, KeyError, EOFError) as error:
        raise DataError(f"cifar10: download failed ({' '.join(str(error).split())})") from None
    except OSError as error:
        raise DataError(
            f"{target}: cannot keep downloaded data there ({error.strerror or error}); set CLCOMM_DATA instead"
        ) from error


def _extract(archive: Path, name: str, target: Path) -> None:
    """Write one file of the archive, by its content alone."""
    import tarfile

    with tarfile.open(archive, "r:gz") as opened:
        member = opened.extractfile(f"{FOLDER}/{name}")
        if member is None:
            raise FetchError(f"{name} is no file in the archive")
        target.write_bytes(member.read(_MOST_FILE_BYTES))


def as_cifar(splits: Splits) -> Splits:
    """Return grey images in the middle of 32 x 32 pixels, three times; raises DataError for larger ones."""
    train, test = (None if part is None else _enlarged(part) for part in (splits.train, splits.test))
    assert train is not None
    return Splits(train, test, splits.default_epochs)


def _enlarged(dataset: ArrayDataset) -> ArrayDataset:
    channels, height, width = dataset.image_shape
    if channels != 1 or max(height, width) > 32:
        raise DataError(f"{dataset.name}: expected grey images of at most 32 x 32 pixels, got {dataset.image_shape}")
    images = np.zeros((len(dataset), *_SHAPE), dataset.images.dtype)
    top, left = (32 - height) // 2, (32 - width) // 2
    images[:, :, top : top + height, left : left + width] = dataset.images
    return ArrayDataset(
        images, dataset.labels, name=dataset.name, classes=dataset.classes, mean=dataset.mean, std=dataset.std
    )
