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
from typing import Any

from clcomm.base.errors import RankNames, name_ranks
from clcomm.comm.transport import mpi_communicators, mpi_failures, mpi_runtime
from clcomm.comm.transport.base import Transport
from clcomm.comm.transport.mpi_runtime import Intracomm
from clcomm.comm.transport.pending import Pending, advance_started

#: Number of new Communicators between garbage collections: MPICH has enough MPI communicators for some 400 of them.
_COLLECT_AFTER = 64


class MpiResources:
    """The private MPI communicator and the transports of one Communicator, the owner.

    Args:
        owner: is not kept alive by this object.
        comm: the private mpi4py communicator.
        transports: are closed before `comm` is freed.
        pending: the owner's started operations; nothing is freed before they are complete.
        number: the same on all ranks, and larger than the numbers of a rank's earlier Communicators.
        everyone: the resources of this process's Communicators, these included from now on.
        name: the owner's, for messages.

    Attributes:
        names: the owner's ranks in messages.
    """

    def __init__(
        self, owner: Any, comm: Intracomm, transports: Sequence[Transport], pending: deque[Pending], number: int,
        everyone: AllResources, name: str = "",
    ):  # fmt: skip
        self.comm, self._transports, self.pending = comm, transports, pending
        self.members = mpi_communicators.world_ranks(comm)
        self.key = number, self.members
        self.names = RankNames(name, self.members)
        self._owner = weakref.ref(owner)
        self._everyone = everyone
        self._dropped = weakref.finalize(owner, everyone.drop, self)
        self._dropped.atexit = False
        everyone.add(self)

    def free(self) -> None:
        """Free the resources; collective."""
        self.forget()
        for transport in self._transports:
            transport.close()
        self.comm.Free()

    def forget(self) -> None:
        """Leave the resources to MPI_Finalize."""
        self._dropped.detach()
        self._everyone.open.discard(self)
        with contextlib.suppress(ValueError):
            self._everyone.dropped.remove(self)

    @property
    def owner(self) -> Any:
        """The Communicator; None once it is dropped."""
        return self._owner()

    # --- names, for messages ---

    @property
    def name(self) -> str:
        """The Communicator's name: " of dp (world ranks 0 and 2)".

        Without one, where this process has several: " of Communicator 3 (ranks 0 and 2)", else "".
        """
        if self.names.name:
            return f" of {self.names.name}" + (f" (world {name_ranks([*self.members])})" if self.members else "")
        if sum(len(each.members) > 1 for each in list(self._everyone.open)) < 2:
            return ""
        number, members = self.key
        return f" of Communicator {number}" + (f" ({name_ranks([*members])})" if members else "")

    def others_wait(self) -> str:
        """Return the collective in which another Communicator of this process waits, with its name, or ""."""
        for other in list(self._everyone.open):
            owner = other.owner
            current = owner.current if owner is not None and other is not self else None
            if current is not None:
                call, sequence, _ = current
                return str(call.describe(sequence)) + other.name
        return ""


class AllResources:
    """The resources of all Communicators of this process.

    Attributes:
        open: of Communicators in use.
        dropped: of those that the program has dropped.
    """

    def __init__(self) -> None:
        self.open: set[MpiResources] = set()
        self.dropped: list[MpiResources] = []
        self._last_number = 0
        self._after_garbage = 0  # number of open ones after the last garbage collection
        self._is_watching_mpi = False

    def add(self, resources: MpiResources) -> None:
        """Add those of a new Communicator."""
        self.open.add(resources)
        if not self._is_watching_mpi:
            self._is_watching_mpi = True
            mpi_failures.call_before_finalize(self._mpi_ends)

    def drop(self, resources: MpiResources) -> None:
        """Note that an owner is gone; called in any thread by the garbage collector, so it must not block."""
        self.open.discard(resources)
        self.dropped.append(resources)

    def next_number(self, comm: Intracomm) -> int:
        """Return the number of a new Communicator of these ranks; collective."""
        self._last_number = 1 + max(comm.allgather(self._last_number))
        return self._last_number

    def free_dropped(self, comm: Intracomm, is_short: bool = False) -> None:
        """Free the Communicators that all of their ranks have dropped, if all these ranks are in `comm`; collective.

        Args:
            comm: an mpi4py communicator of the ranks that meet.
            is_short: whether memory is short; garbage is then collected first, else only after many new Communicators.
        """
        if is_short or len(self.open) > self._after_garbage + _COLLECT_AFTER:
            gc.collect()
            self._after_garbage = len(self.open)
        advance_started()
        ranks = mpi_communicators.world_ranks(comm)
        mine = {each.key: each for each in list(self.dropped) if not each.pending and set(each.members) <= set(ranks)}
        everyone = dict(zip(ranks, comm.allgather([*mine]), strict=bool(ranks)))
        for key in sorted(mine):  # in one order on all ranks
            if mine[key].members and all(key in everyone[rank] for rank in mine[key].members):
                mine[key].free()

    def owners_among(self, ranks: Sequence[int]) -> list[Any]:
        """Return this process's open Communicators of which some of these ranks of COMM_WORLD are members."""
        owners = [each.owner for each in list(self.open) if not set(each.members).isdisjoint(ranks)]
        return [each for each in owners if each is not None]

    def _mpi_ends(self) -> None:
        """Close all Communicators when the program calls MPI.Finalize()."""
        for resources in [*self.open, *self.dropped]:
            while resources.pending:
                resources.pending[0].fail(mpi_runtime.closed(mpi_runtime.FINALIZE))
            owner = resources.owner
            resources.forget()
            if owner is not None:
                owner.lifetime.leave_mpi()
