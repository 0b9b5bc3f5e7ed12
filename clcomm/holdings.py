"""What Communicators hold of MPI, and how MPI gets it back: by finalize(), or when all ranks have dropped theirs.

MPI has some thousand communicators, and frees one only where all of its ranks take part; Python collects garbage on
each rank when it likes. So what a dropped Communicator held is kept here until ranks meet that are all of its ranks,
to create the next Communicator or because memory is short. They compare what they have dropped, and free together what
every rank has.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, ClassVar

from clcomm.call import name_ranks
from clcomm.errors import ArgumentError
from clcomm.transport import Pending, Transport, mpi
from clcomm.transport.pending import advance_started

#: After how many new Communicators Python is asked to look for garbage: MPICH has room for some 400.
_COLLECT_AFTER = 64


class _Process:
    """All that this process's Communicators hold."""

    open: ClassVar[set[Holdings]] = set()
    dropped: ClassVar[list[Holdings]] = []
    last_number = 0
    after_garbage = 0  # how many were open when garbage was looked for
    is_watching_mpi = False


class Holdings:
    """The private communicator and the transports of one Communicator, its owner, which this does not keep alive.

    pending: the operations that it has started; nothing is freed before they are done. number: the same on all its
    ranks, and on each of them larger than those of its earlier Communicators.
    """

    def __init__(self, owner: Any, comm: Any, transports: Sequence[Transport], pending: deque[Pending], number: int):
        self.comm, self._transports, self.pending = comm, transports, pending
        self.members = mpi.world_ranks(comm)
        self.key = number, self.members
        self._owner = weakref.ref(owner)
        self._dropped = weakref.finalize(owner, _drop, self)
        self._dropped.atexit = False
        _Process.open.add(self)
        if not _Process.is_watching_mpi:
            _Process.is_watching_mpi = True
            mpi.call_before_finalize(_mpi_ends)

    def free(self) -> None:
        """Free all of it; collective."""
        self.forget()
        for transport in self._transports:
            transport.close()
        self.comm.Free()

    def forget(self) -> None:
        """Leave all of it to the end of MPI."""
        self._dropped.detach()
        _Process.open.discard(self)
        with contextlib.suppress(ValueError):
            _Process.dropped.remove(self)

    # --- names, for messages ---

    @property
    def name(self) -> str:
        """The Communicator in words, where this process has several: " of Communicator 3 (ranks 0 and 2)", else ""."""
        if sum(len(each.members) > 1 for each in list(_Process.open)) < 2:
            return ""
        number, members = self.key
        return f" of Communicator {number}" + (f" ({name_ranks([*members])})" if members else "")

    def others_wait(self) -> str:
        """Return what another Communicator of this process waits in, with its name; "" if none does."""
        for other in list(_Process.open):
            owner = other._owner()
            current = owner.current if owner is not None and other is not self else None
            if current is not None:
                call, sequence, _ = current
                return call.describe(sequence) + other.name
        return ""


def _drop(holdings: Holdings) -> None:
    """Note that an owner is gone; from whatever thread collects garbage, so nothing here may wait."""
    _Process.open.discard(holdings)
    _Process.dropped.append(holdings)


def next_number(comm: Any) -> int:
    """Return the number of a new Communicator of these ranks; collective."""
    _Process.last_number = 1 + max(comm.allgather(_Process.last_number))
    return _Process.last_number


def free_dropped(comm: Any, is_short: bool = False) -> None:
    """Free what all ranks of a dropped Communicator have dropped, of those whose ranks are all in `comm`; collective.

    is_short: look for garbage first, as memory is short; else only after many new Communicators.
    """
    if is_short or len(_Process.open) > _Process.after_garbage + _COLLECT_AFTER:
        gc.collect()
        _Process.after_garbage = len(_Process.open)
    advance_started()
    ranks = mpi.world_ranks(comm)
    mine = {each.key: each for each in list(_Process.dropped) if not each.pending and set(each.members) <= set(ranks)}
    everyone = dict(zip(ranks, comm.allgather([*mine]), strict=bool(ranks)))
    for key in sorted(mine):  # in one order on all ranks
        if mine[key].members and all(key in everyone[rank] for rank in mine[key].members):
            mine[key].free()


def closed(by: str) -> ArgumentError:
    """Return the error for a call of what was closed by this call."""
    advice = "call that last" if by == mpi.FINALIZE else "make a new one"
    return ArgumentError(f"Communicator: expected an open one, but {by} was called; {advice}")


def _mpi_ends() -> None:
    """Close everything, as the program has called MPI.Finalize()."""
    for holdings in [*_Process.open, *_Process.dropped]:
        while holdings.pending:
            holdings.pending[0].fail(closed(mpi.FINALIZE))
        owner = holdings._owner()
        holdings.forget()
        if owner is not None:
            owner.leave_mpi()
