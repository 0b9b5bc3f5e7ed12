"""Collectives in which ranks read each other's arrays: no copies beside those that a rank reads.

Ranks tell each other where their arrays are at a first rendezvous, and at the last one all have read.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from clcomm.base.errors import ResourceError
from clcomm.base.host.arrays import PAGE, aligned_empty
from clcomm.comm.transport.reduction import RowsFold
from clcomm.comm.transport.rendezvous import HostRendezvous
from clcomm.comm.transport.shards import shards

#: From which size on reductions are faster than through slots, and so are broadcasts and gathers, which only read.
LEAST_BYTES, LEAST_READ_BYTES = 512 << 10, 128 << 10
#: The most bytes that are folded of a rank's array at once, and of all: they are to stay in a core's cache.
_PIECE_BYTES, _PIECES_BYTES = 256 << 10, 1 << 20


class DirectExchange:
    """Blocking collectives on large arrays anywhere, between ranks that can read each other's memory.

    All raise ResourceError where a rank's array can no longer be read. kind: see Rendezvous.
    """

    def __init__(self, rendezvous: HostRendezvous, others: OtherMemory):
        self._rendezvous, self._others, self._ranks = rendezvous, others, len(rendezvous.cells)
        self._piece_bytes = min(_PIECE_BYTES, _PIECES_BYTES // self._ranks // PAGE * PAGE)
        self._pieces: np.ndarray | None = None

    def reduce(self, source: np.ndarray, out: np.ndarray, fold: RowsFold, kind: int) -> None:
        """Reduce `source` over the ranks into `out`, which may be the same array.

        Rank r folds shard r of all ranks' arrays, in rank order. At a second rendezvous all shards are folded, and each
        rank reads those of the others.
        """
        rendezvous = self._rendezvous
        places = rendezvous.exchange([_address(source), _address(out)], kind).tolist()
        parts = shards(out, self._ranks)
        own = parts[rendezvous.rank]
        self._fold_part(source, own, out[own], fold, [place for place, _ in places])
        rendezvous.leave()
        for other in self._from_next():
            part = parts[other]
            self._read(other, places[other][1] + part.start * out.itemsize, out[part])
        rendezvous.leave()

    def broadcast(self, array: np.ndarray, root: int, kind: int) -> None:
        """Copy the root's array into that of every other rank."""
        places = self._rendezvous.exchange([_address(array)], kind)
        if self._rendezvous.rank != root:
            self._read(root, int(places[root, 0]), array)
        self._rendezvous.leave()

    def all_gather(self, source: np.ndarray, out: np.ndarray, kind: int) -> None:
        """Put rank r's `source` at block r of `out`, on every rank; `source` may be that block."""
        rank, size = self._rendezvous.rank, source.size
        own = out[rank * size : (rank + 1) * size]
        if _address(own) != _address(source):
            own[...] = source  # NumPy copies what overlaps as if it did not
        places = self._rendezvous.exchange([_address(own)], kind)
        for other in self._from_next():
            self._read(other, int(places[other, 0]), out[other * size : (other + 1) * size])
        self._rendezvous.leave()

    def reduce_scatter(self, source: np.ndarray, out: np.ndarray, fold: RowsFold, kind: int) -> None:
        """Reduce block r of `source` over the ranks into `out` of rank r, which may be a part of `source`."""
        places = self._rendezvous.exchange([_address(source)], kind)[:, 0].tolist()
        target = np.empty_like(out) if np.may_share_memory(source, out) else out
        start = self._rendezvous.rank * out.size
        self._fold_part(source, slice(start, start + out.size), target, fold, places)
        self._rendezvous.leave()
        if target is not out:
            out[...] = target  # which other ranks have read until now

    def _fold_part(self, source: np.ndarray, part: slice, out: np.ndarray, fold: RowsFold, places: list[int]) -> None:
        """Fold a part of all ranks' arrays, which begin at `places`, into `out`."""
        if self._pieces is None:
            self._pieces = aligned_empty((self._ranks, self._piece_bytes), np.uint8)
        rank, itemsize, step = self._rendezvous.rank, source.itemsize, self._piece_bytes // source.itemsize
        pieces = self._pieces.view(source.dtype)
        for start in range(part.start, part.stop, step):
            stop = min(start + step, part.stop)
            rows = [piece[: stop - start] for piece in pieces]
            for other, row in enumerate(rows):
                if other != rank:
                    self._read(other, places[other] + start * itemsize, row)
            if rank < 2:
                rows[rank] = source[start:stop]  # read before the fold writes, also where that is the result's place
            else:
                rows[rank][...] = source[start:stop]
            fold(rows, out[start - part.start : stop - part.start])

    def _from_next(self) -> Iterator[int]:
        """Yield the other ranks, each rank from another one on."""
        rank = self._rendezvous.rank
        yield from range(rank + 1, self._ranks)
        yield from range(rank)

    def _read(self, rank: int, address: int, out: np.ndarray) -> None:
        try:
            self._others.read(rank, address, out)
        except OSError as error:
            if error.errno == errno.ESRCH:
                self._rendezvous.leave()  # a rank that has died is named where the others wait for it
            raise unreadable(rank, error) from None


def _address(array: np.ndarray) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


# --- Reads of the memory of other ranks on this host, in one copy: Linux's process_vm_readv(2). ---
# The kernel allows them between processes of one user. Where Yama restricts them to descendants (ptrace_scope 1), each
# rank lets the descendants of its parent read, as all ranks that one launcher started are.

_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
_PR_SET_PTRACER = 0x59616D61


class _Span(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


class OtherMemory:
    """The memory of a host's ranks, by rank.

    Args:
        pids: of the ranks, in rank order.
    """

    def __init__(self, pids: Sequence[int]):
        self._pids = pids
        self._here, self._there = _Span(), _Span()
        self._places = ctypes.addressof(self._here), ctypes.addressof(self._there)

    @classmethod
    def open(cls, rendezvous: HostRendezvous) -> OtherMemory | None:
        """Return the memory of these ranks if each can read that of all others, else None; collective."""
        mark = np.array([secrets.randbits(62)], np.int64)  # shows that it is that rank's, not another process's
        _let_siblings_read()
        everyone = rendezvous.exchange([os.getpid(), mark.ctypes.data, int(mark[0])])
        opened = cls(everyone[:, 0].tolist())
        found = opened._finds(everyone[:, 1].tolist(), everyone[:, 2].tolist())
        agreed = rendezvous.exchange([found])[:, 0].all()  # all have read the marks
        return opened if agreed else None

    def _finds(self, places: list[int], marks: list[int]) -> bool:
        got = np.zeros(1, np.int64)
        for rank, (place, mark) in enumerate(zip(places, marks, strict=True)):
            try:
                self.read(rank, place, got)
            except (OSError, AttributeError):  # not allowed; not in this C library
                return False
            if got[0] != mark:
                return False
        return True

    def read(self, rank: int, address: int, out: np.ndarray) -> None:
        """Copy as many bytes as `out` has from an address in a rank's memory; raises OSError where that fails."""
        here, there = self._here, self._there
        here.address, left = out.ctypes.data, out.nbytes
        there.address, pid, read = address, self._pids[rank], _function()
        while left:
            here.nbytes = there.nbytes = left
            got = read(pid, self._places[0], 1, self._places[1], 1, 0)
            if got <= 0:
                number = ctypes.get_errno() or errno.EFAULT
                raise OSError(number, os.strerror(number))
            left -= got  # Linux moves at most 2 GiB in a call
            here.address, there.address = here.address + got, there.address + got


@cache
def _function() -> Any:
    function = ctypes.CDLL(None, use_errno=True).process_vm_readv
    place, count = ctypes.c_void_p, ctypes.c_ulong
    function.restype = ctypes.c_ssize_t
    function.argtypes = [ctypes.c_int, place, count, place, count, count]
    return function


@cache
def _let_siblings_read() -> None:
    """Let the descendants of this process's parent read it, where Yama asks for that; see prctl(2)."""
    with suppress(OSError, ValueError, AttributeError):
        if int(_YAMA.read_text(encoding="ascii")) == 1:
            ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(os.getppid()), 0, 0, 0)


def unreadable(rank: int, error: OSError) -> ResourceError:
    """Return the error for memory that could be read at the start of the job."""
    return ResourceError(
        f"collective: expected to read the array of rank {rank} on this host, got {error.strerror}; "
        f"keep the arrays until every rank has returned"
    )
