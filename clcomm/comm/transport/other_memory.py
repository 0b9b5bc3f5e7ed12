"""Reads of the memory of other ranks on this host, in one copy: Linux's process_vm_readv(2).

The kernel allows them between processes of one user. Where Yama restricts them to descendants (ptrace_scope 1), each
rank lets the descendants of its parent read, as all ranks that one launcher started are.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from clcomm.base.errors import ResourceError
from clcomm.comm.transport.rendezvous import HostRendezvous

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
