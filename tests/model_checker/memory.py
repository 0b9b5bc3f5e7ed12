"""Shared memory whose every word is read and written in a step of its own, for code that knows it as NumPy's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from clcomm.comm.transport import futex, pending, rendezvous, started
from tests.model_checker.course import ask

_BYTES = 1 << 16
#: The memory that all ranks share: its addresses are the same in all runs, its bytes are never read.
_shared = np.zeros(_BYTES + 4096, np.uint8)
_BASE = -(-_shared.ctypes.data // 4096) * 4096


class LostRank(Exception):
    """MPI's error for a rank that has died."""


class Words(np.ndarray):
    """An array whose elements are words of the shared memory."""

    def offsets(self) -> list[int]:
        """Return the place of each element, in order."""
        start = self.__array_interface__["data"][0] - _BASE
        steps = np.indices(self.shape).reshape(self.ndim, -1).T @ np.array(self.strides, np.int64)
        return [start + int(step) for step in np.atleast_1d(steps)][: self.size]

    @property
    def data(self) -> Words:  # type: ignore[override]
        return self

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        return found if isinstance(found, Words) else load(super().__getitem__(_slice(key)))[0]

    def __setitem__(self, key: Any, values: Any) -> None:
        target = super().__getitem__(_slice(key))
        store(target, np.broadcast_to(read(values), target.shape))

    def __iter__(self) -> Iterator[Any]:
        for index in range(len(self)):
            yield self[index]

    def __contains__(self, value: object) -> bool:
        for index in range(len(self)):  # noqa: SIM110 - see Course
            if self[index] == value:
                return True
        return False

    def tolist(self) -> Any:
        return read(self).tolist()

    def copy(self, order: Any = "C") -> np.ndarray:
        return read(self)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, out: Any = None, **options: Any) -> Any:
        values: list[np.ndarray] = []
        for each in inputs:
            values.append(read(each))  # noqa: PERF401
        result = getattr(ufunc, method)(*values, **options)
        if out is None:
            return result
        out[0][...] = result
        return out[0]

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if function is np.copyto:
            args[0][...] = args[1]
            return None
        return super().__array_function__(function, types, args, kwargs)


def _slice(key: Any) -> Any:
    """Return the key of an array in place of one of an element."""
    return slice(key, key + 1) if isinstance(key, (int, np.integer)) else key


def load(words: Words) -> list[Any]:
    values: list[Any] = []  # a variable, which Course sees
    for offset in words.offsets():
        values.append(ask("read", offset))  # noqa: PERF401
    return values


def store(words: Words, values: np.ndarray) -> None:
    for offset, value in zip(words.offsets(), values.ravel().tolist(), strict=True):
        ask("write", offset, value)


def read(values: Any) -> np.ndarray:
    """Return an array's elements, read if they are shared."""
    if isinstance(values, Words):
        return np.array(load(values), values.dtype).reshape(values.shape)
    return np.asarray(values)


def shared_memory(start: int, nbytes: int) -> Words:
    """Return bytes of the shared memory."""
    first = _BASE - _shared.ctypes.data + start
    return _shared[first : first + nbytes].view(Words)


def at_address(address: int) -> int | None:
    """Return the offset of an address in the shared memory; None: it is elsewhere."""
    return address - _BASE if _BASE <= address < _BASE + _BYTES else None


def progress() -> bool:
    """Advance MPI: the news of a rank's death comes with it, or later."""
    if ask("progress") == "lost":
        raise LostRank
    return False


@contextlib.contextmanager
def stepwise() -> Iterator[None]:
    """Let waits be steps, clocks stand still, and ranks turn to MPI after each poll, or sleep at once."""

    def clock() -> int:
        return 0

    with (
        mock.patch.multiple(futex, POLLS=0, POLLS_BETWEEN_PROGRESS=1, perf_counter_ns=clock),
        mock.patch.object(rendezvous, "perf_counter_ns", clock),
        mock.patch.multiple(started, perf_counter_ns=clock, perf_counter=clock, _PROGRESS_NS=-1),
        mock.patch.multiple(pending, time=SimpleNamespace(perf_counter=clock), POLLS_BETWEEN_PROGRESS=1),
        mock.patch("os.sched_yield", lambda: ask("yield")),
    ):
        yield


def meeting(rank: int, ranks: int, sleeps: bool = False, naps: bool = False) -> rendezvous.HostRendezvous:
    """Return the real rendezvous of a rank, at the beginning of the shared memory."""
    nbytes = rendezvous.HostRendezvous.nbytes(ranks)
    made = rendezvous.HostRendezvous(shared_memory(0, nbytes), rank, ranks, lambda: ask("fence"), progress, sleeps)
    word = shared_memory(nbytes - futex.Futex.nbytes(ranks), 4).view(np.int32)

    def call(operation: int, value: int) -> int:
        if operation == futex._WAKE:
            ask("wake")
        else:
            ask("sleep", word.offsets()[0], value, naps)
        return 0

    made._futex._futex = call
    return made


def data(ranks: int, count: int, at: int = 0, rows: int | None = None) -> list[Words]:
    """Return rows of numbers behind the rendezvous: (ranks, count), int64."""
    start = 4096 + at
    rows = ranks if rows is None else rows
    return list(shared_memory(start, 8 * rows * count).view(np.int64).reshape(rows, count))


def name_of(ranks: int) -> Any:
    """Return a function that names the words of `meeting` and `data`."""

    def name(offset: int) -> str:
        cell, futex_at = 8 * rendezvous._CELL_WORDS, rendezvous.HostRendezvous.nbytes(ranks) - futex.Futex.nbytes(ranks)
        if offset < ranks * cell:
            words = {0: "counter", 1: "tag of even", 2: "time of even", 3: "tag of odd", 4: "time of odd"}
            rank, word = divmod(offset // 8, rendezvous._CELL_WORDS)
            return f"{words.get(word, f'board word {word}')}[{rank}]"
        if offset < futex_at:
            return f"claims[{(offset - ranks * cell) // 8}]"
        if offset < rendezvous.HostRendezvous.nbytes(ranks):
            return "futex" if offset == futex_at else f"asleep[{(offset - futex_at - futex._WORD_BYTES) // 8}]"
        return f"data at {offset - 4096}"

    return name
