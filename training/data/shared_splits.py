"""A dataset held in memory once per host: one rank writes its arrays into an unnamed file, and the others map it.

The file (memfd_create(2)) takes no room in /dev/shm, and is freed when the last process that maps it ends, in whatever
way. Other ranks of the same user and host open it through /proc; if they cannot, `adopt` returns None.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from training.data.datasets import ArrayDataset, Splits

_PAGE = 4096
_TOKEN_BYTES = 16


@dataclass(frozen=True)
class _Array:
    """An array's place in the file."""

    shape: tuple[int, ...]
    dtype: str
    offset: int


@dataclass(frozen=True)
class _Part:
    """A dataset without the values of its arrays."""

    images: _Array
    labels: _Array
    name: str
    classes: int
    mean: float | Sequence[float]
    std: float | Sequence[float]


@dataclass(frozen=True)
class Notice:
    """What other ranks need to map published splits; small enough to be sent to all of them."""

    host: str
    path: str
    token: bytes
    nbytes: int
    train: _Part
    test: _Part | None
    default_epochs: int


class Publication:
    """Splits in an unnamed file, which other ranks can map until `close`; raises OSError if the system refuses it."""

    def __init__(self, splits: Splits):
        self._file = os.memfd_create("clcomm-data")
        try:
            parts, end = [], 0
            for dataset in (splits.train, splits.test):
                part, end = (None, end) if dataset is None else self._write(dataset, end)
                parts.append(part)
            token = secrets.token_bytes(_TOKEN_BYTES)
            _write_all(self._file, token, end)
        except BaseException:
            self.close()
            raise
        train, test = parts
        assert train is not None
        path, nbytes = f"/proc/{os.getpid()}/fd/{self._file}", end + len(token)
        self.notice = Notice(os.uname().nodename, path, token, nbytes, train, test, splits.default_epochs)

    def _write(self, dataset: ArrayDataset, offset: int) -> tuple[_Part, int]:
        images = _Array(dataset.images.shape, dataset.images.dtype.str, offset)
        labels = _Array(dataset.labels.shape, dataset.labels.dtype.str, _page_end(offset + dataset.images.nbytes))
        for array, place in ((dataset.images, images), (dataset.labels, labels)):
            _write_all(self._file, memoryview(array.reshape(-1).view(np.uint8)), place.offset)  # type: ignore[arg-type]
        part = _Part(images, labels, dataset.name, dataset.classes, dataset.mean, dataset.std)
        return part, _page_end(labels.offset + dataset.labels.nbytes)

    def close(self) -> None:
        """Close the file; mapped memory stays."""
        os.close(self._file)


def publish(splits: Splits) -> Publication | None:
    """Make splits available to other ranks of this host; return None if the system refuses."""
    try:
        return Publication(splits)
    except (OSError, AttributeError):  # AttributeError: this Python has no memfd_create
        return None


def adopt(notices: Iterable[Notice]) -> Splits | None:
    """Return the splits of the first notice from this host, read-only on the publisher's memory; None without one."""
    for notice in notices:
        if notice.host == os.uname().nodename:
            memory = _map(notice)
            if memory is not None:
                test = None if notice.test is None else _dataset(notice.test, memory)
                return Splits(_dataset(notice.train, memory), test, notice.default_epochs)
    return None


def _map(notice: Notice) -> np.ndarray | None:
    try:
        file = os.open(notice.path, os.O_RDONLY)
    except OSError:  # another host of the same name, or another PID namespace
        return None
    try:
        if os.fstat(file).st_size != notice.nbytes:
            return None
        memory = mmap.mmap(file, notice.nbytes, access=mmap.ACCESS_READ)
    except OSError:
        return None
    finally:
        os.close(file)
    return np.frombuffer(memory, np.uint8) if memory[-_TOKEN_BYTES:] == notice.token else None


def _dataset(part: _Part, memory: np.ndarray) -> ArrayDataset:
    images, labels = (
        np.frombuffer(memory, place.dtype, int(np.prod(place.shape)), place.offset).reshape(place.shape)
        for place in (part.images, part.labels)
    )
    return ArrayDataset(images, labels, name=part.name, classes=part.classes, mean=part.mean, std=part.std)


def _page_end(offset: int) -> int:
    return -(-offset // _PAGE) * _PAGE


def _write_all(file: int, content: bytes | memoryview, offset: int) -> None:
    view = memoryview(content)
    while view:
        written = os.pwrite(file, view, offset)
        view, offset = view[written:], offset + written
