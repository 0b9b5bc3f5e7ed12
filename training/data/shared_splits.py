"""A dataset held in memory once per host: one rank reads it into an unnamed file, and the others map it.

The file (memfd_create(2)) takes no room in /dev/shm, and is freed when the last process that maps it ends, in whatever
way. Other ranks of the same user and host open it through /proc; if they cannot, `adopt` returns None.
"""

from __future__ import annotations

import math
import mmap
import os
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from clcomm.base.host.arrays import aligned_empty
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
    """An unnamed file for splits, which other ranks can map until `close`; raises OSError if the system refuses it."""

    def __init__(self) -> None:
        self._file, self._end = os.memfd_create("clcomm-data"), 0
        self._allocated: dict[int, tuple[int, np.ndarray]] = {}  # kept, so that no other array gets such an address

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Return an array in the file, so that what is read there has no second place; outside, if there is no room."""
        kind, start = np.dtype(dtype), self._end
        nbytes = math.prod(shape) * kind.itemsize
        try:
            os.posix_fallocate(self._file, start, nbytes)
            array = np.frombuffer(mmap.mmap(self._file, nbytes, offset=start), kind).reshape(shape)
        except (OSError, ValueError):  # ValueError: no bytes
            return aligned_empty(shape, kind)
        self._allocated[_address(array)], self._end = (start, array), _page_end(start + nbytes)
        return array

    def publish(self, splits: Splits) -> Notice:
        """Return what others need to map the splits, whose arrays are written if they are not in the file."""
        train, test = self._part(splits.train), None if splits.test is None else self._part(splits.test)
        token = secrets.token_bytes(_TOKEN_BYTES)
        _write_all(self._file, token, self._end)
        path, nbytes = f"/proc/{os.getpid()}/fd/{self._file}", self._end + len(token)
        return Notice(os.uname().nodename, path, token, nbytes, train, test, splits.default_epochs)

    def _part(self, dataset: ArrayDataset) -> _Part:
        images, labels = self._placed(dataset.images), self._placed(dataset.labels)
        return _Part(images, labels, dataset.name, dataset.classes, dataset.mean, dataset.std)

    def _placed(self, array: np.ndarray) -> _Array:
        start, own = self._allocated.get(_address(array), (self._end, None))
        if own is None or own.nbytes != array.nbytes or not array.flags.c_contiguous:
            start = self._end
            _write_all(self._file, memoryview(array.reshape(-1).view(np.uint8)), start)  # type: ignore[arg-type]
            self._end = _page_end(start + array.nbytes)
        return _Array(array.shape, array.dtype.str, start)

    def close(self) -> None:
        """Close the file; mapped memory stays."""
        self._allocated.clear()
        os.close(self._file)


def open_publication() -> Publication | None:
    """Return a file for splits; None if the system refuses."""
    try:
        return Publication()
    except (OSError, AttributeError):  # AttributeError: this Python has no memfd_create
        return None


def _address(array: np.ndarray) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


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
