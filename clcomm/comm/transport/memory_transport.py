"""What the transports have in common that allocate the arrays they reduce."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from clcomm.comm.transport.base import Transport
from clcomm.comm.transport.host_memory import HostMemory
from clcomm.comm.transport.mapped_files import MappedFile
from clcomm.comm.transport.reduction import Fold
from clcomm.comm.transport.rendezvous import Rendezvous
from clcomm.comm.transport.start_order import StartOrder


class MemoryTransport(Transport):
    """A transport that reduces arrays in memory that it allocated itself.

    Every operation begins with a rendezvous at `rendezvous`, before data moves.
    """

    memory: HostMemory
    rendezvous: Rendezvous
    #: What the ranks of the host have started; None: the transport compares that itself.
    start_order: StartOrder | None = None
    #: Computes the sums that it supports; see `fold_with`.
    fold: Fold | None = None

    def fold_with(self, fold: Fold | None) -> None:
        """Compute the sums of later all-reduces with `fold`; None: with NumPy."""
        self.fold = fold
        self.memory.forget()

    def fits(self, nbytes: int, common: bool) -> bool:
        """Return whether `nbytes` fit in /dev/shm, for each rank or in common; collective, the same on every rank."""
        return self.memory.fits(nbytes, common)

    def allocate(self, nbytes: int) -> np.ndarray:
        """Return `nbytes` zeroed bytes of this rank, readable on its host; collective, same size everywhere."""
        return self.memory.allocate(nbytes, common=False)

    def allocate_common(self, nbytes: int) -> np.ndarray:
        """Return `nbytes` zeroed bytes common to all ranks of a host; collective, same size everywhere."""
        return self.memory.allocate(nbytes, common=True)

    def adopt(self, files: Sequence[MappedFile]) -> bool:
        """Have the other ranks of the host read and write memory that this rank has mapped; see HostMemory.adopt."""
        return self.memory.adopt(files)

    def all_agree(self, answer: bool) -> bool:
        """Return whether all ranks answer True; collective, the same on every rank."""
        return bool(self.memory.rendezvous.exchange([answer])[:, 0].all())

    def make_room(self, nbytes: int, common: bool) -> bool:
        """Free memory that no rank of the host uses, and return whether `nbytes` then fit; collective."""
        self.memory.free_unused()
        if self.memory.may_hold_garbage():
            self.memory.collect()
        if self.fits(nbytes, common):
            return True
        self.memory.collect()
        return self.fits(nbytes, common)

    def holds(self, *arrays: np.ndarray) -> bool:
        """Return whether all of these arrays are in memory of this transport."""
        return self.memory.holds(*arrays)

    def is_common(self, array: np.ndarray) -> bool:
        """Return whether the array is in memory common to all ranks of the host."""
        return self.memory.is_common(array)
