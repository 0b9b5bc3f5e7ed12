"""MPI resources of Communicators, freed by finalize() or after all ranks have dropped the Communicator.

The number of MPI communicators is limited (about 2,000 in MPICH) and freeing one is collective, but Python collects
garbage on each rank at another time. So a dropped Communicator's resources are kept here until all of its ranks meet,
to create the next Communicator or because memory is short. The ranks then compare their dropped Communicators, and free
those that every rank has dropped.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, ClassVar

from clcomm.errors import RankNames, name_ranks
from clcomm.transport import Pending, Transport, mpi_communicators, mpi_failures, mpi_runtime
from clcomm.transport.mpi_runtime import Intracomm
from clcomm.transport.pending import advance_started

#: Number of new Communicators between garbage collections: MPICH has enough MPI communicators for some 400 of them.
_COLLECT_AFTER = 64


class _Process:
    """The resources of all Communicators of this process."""

    open: ClassVar[set[MpiResources]] = set()
    dropped: ClassVar[list[MpiResources]] = []
    last_number = 0
    after_garbage = 0  # number of open ones after the last garbage collection
    is_watching_mpi = False


class MpiResources:
    """The private MPI communicator and the transports of one Communicator, the owner.

    Args:
        owner: is not kept alive by this object.
        comm: the private mpi4py communicator.
        transports: are closed before `comm` is freed.
        pending: the owner's started operations; nothing is freed before they are complete.
        number: the same on all ranks, and larger than the numbers of a rank's earlier Communicators.
        name: the owner's, for messages.

    Attributes:
        names: the owner's ranks in messages.
    """

    def __init__(
        self, owner: Any, comm: Intracomm, transports: Sequence[Transport], pending: deque[Pending], number: int,
        name: str = "",
    ):  # fmt: skip
        self.comm, self._transports, self.pending = comm, transports, pending
        self.members = mpi_communicators.world_ranks(comm)
        self.key = number, self.members
        self.names = RankNames(name, self.members)
        self._owner = weakref.ref(owner)
        self._dropped = weakref.finalize(owner, _drop, self)
        self._dropped.atexit = False
        _Process.open.add(self)
        if not _Process.is_watching_mpi:
            _Process.is_watching_mpi = True
            mpi_failures.call_before_finalize(_mpi_ends)

    def free(self) -> None:
        """Free the resources; collective."""
        self.forget()
        for transport in self._transports:
            transport.close()
        self.comm.Free()

    def forget(self) -> None:
        """Leave the resources to MPI_Finalize."""
        self._dropped.detach()
        _Process.open.discard(self)
        with contextlib.suppress(ValueError):
            _Process.dropped.remove(self)

    # --- names, for messages ---

    @property
    def name(self) -> str:
        """The Communicator's name: " of dp (world ranks 0 and 2)".

        Without one, where this process has several: " of Communicator 3 (ranks 0 and 2)", else "".
        """
        if self.names.name:
            return f" of {self.names.name}" + (f" (world {name_ranks([*self.members])})" if self.members else "")
        if sum(len(each.members) > 1 for each in list(_Process.open)) < 2:
            return ""
        number, members = self.key
        return f" of Communicator {number}" + (f" ({name_ranks([*members])})" if members else "")

    def others_wait(self) -> str:
        """Return the collective in which another Communicator of this process waits, with its name, or ""."""
        for other in list(_Process.open):
            owner = other._owner()
            current = owner.current if owner is not None and other is not self else None
            if current is not None:
                call, sequence, _ = current
                return str(call.describe(sequence)) + other.name
        return ""


def _drop(resources: MpiResources) -> None:
    """Note that an owner is gone; called in any thread by the garbage collector, so it must not block."""
    _Process.open.discard(resources)
    _Process.dropped.append(resources)


def next_number(comm: Intracomm) -> int:
    """Return the number of a new Communicator of these ranks; collective."""
    _Process.last_number = 1 + max(comm.allgather(_Process.last_number))
    return _Process.last_number


def free_dropped(comm: Intracomm, is_short: bool = False) -> None:
    """Free the Communicators that all of their ranks have dropped, if all these ranks are in `comm`; collective.

    Args:
        comm: an mpi4py communicator of the ranks that meet.
        is_short: whether memory is short; garbage is then collected first, else only after many new Communicators.
    """
    if is_short or len(_Process.open) > _Process.after_garbage + _COLLECT_AFTER:
        gc.collect()
        _Process.after_garbage = len(_Process.open)
    advance_started()
    ranks = mpi_communicators.world_ranks(comm)
    mine = {each.key: each for each in list(_Process.dropped) if not each.pending and set(each.members) <= set(ranks)}
    everyone = dict(zip(ranks, comm.allgather([*mine]), strict=bool(ranks)))
    for key in sorted(mine):  # in one order on all ranks
        if mine[key].members and all(key in everyone[rank] for rank in mine[key].members):
            mine[key].free()


def owners_among(ranks: Sequence[int]) -> list[Any]:
    """Return this process's open Communicators of which some of these ranks of COMM_WORLD are members."""
    owners = [each._owner() for each in list(_Process.open) if not set(each.members).isdisjoint(ranks)]
    return [each for each in owners if each is not None]


def _mpi_ends() -> None:
    """Close all Communicators when the program calls MPI.Finalize()."""
    for resources in [*_Process.open, *_Process.dropped]:
        while resources.pending:
            resources.pending[0].fail(mpi_runtime.closed(mpi_runtime.FINALIZE))
        owner = resources._owner()
        resources.forget()
        if owner is not None:
            owner.leave_mpi()
