"""A Communicator's memory: arrays that the ranks of a host share, with the same outcome on every rank."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from clcomm.base.errors import MismatchError
from clcomm.base.host.arrays import aligned_zeros
from clcomm.base.units import format_size
from clcomm.comm.collectives.arguments import agreed_size, size_or_error
from clcomm.comm.collectives.runner import CollectiveRunner
from clcomm.comm.collectives.world import NO_ROOM, World
from clcomm.comm.transport import mpi_communicators

if TYPE_CHECKING:
    from clcomm.comm.transport.host_memory import HostMemory, MemoryTransport
    from clcomm.comm.transport.mapped_files import MappedFile

_log = logging.getLogger("clcomm")


class CommunicatorMemory:
    """Allocates memory for the arrays of a Communicator, which collectives need not copy.

    Args:
        world: the ranks.
        runner: runs the collectives in which they agree.
        changed: called before memory is allocated, as what was found out about arrays is then no longer valid.
    """

    def __init__(self, world: World, runner: CollectiveRunner, changed: Callable[[], None]):
        self._world, self._runner, self._changed = world, runner, changed
        self._warned_fallback = False

    @property
    def of_host(self) -> HostMemory | None:
        """The memory that the ranks of this host share, with their rendezvous; None where they share none."""
        return None if self._world.shared is None else self._world.shared.memory

    def holds(self, array: np.ndarray) -> bool:
        """Return whether an array is in such memory."""
        return self._world.shared is not None and self._world.shared.holds(array)

    def all_agree(self, answer: bool, purpose: str) -> bool:
        """Return whether all ranks answer True; collective, the same on every rank, and not counted.

        purpose: what messages call it where ranks differ in their collectives.
        """
        shared, runner = self._world.shared, self._runner
        if shared is None:
            return all(runner.run_uncounted(purpose, self._world.allgather, answer))
        return runner.run_uncounted(purpose, shared.all_agree, answer, transport=shared)

    def allocate(self, nbytes: int, common: bool, purpose: str) -> np.ndarray:
        """Return a zeroed uint8 array, in shared memory where there is some; collective.

        Args:
            nbytes: its size.
            common: whether it is common to all ranks of a host, or this rank's own.
            purpose: what messages call it where ranks differ in their collectives.
        """
        self._changed()
        asked = self._runner.run_uncounted(purpose, self._world.allgather, size_or_error(nbytes, "nbytes"))
        nbytes, shared = agreed_size(asked), self._world.shared
        if shared is not None:
            if self._has_room(shared, nbytes, common):
                with mpi_communicators.taking_communicators():
                    return shared.allocate_common(nbytes) if common else shared.allocate(nbytes)
            self._warn_fallback(nbytes)
        return aligned_zeros(nbytes)

    def adopt(
        self,
        sizes: Sequence[int],
        move: Callable[[], Sequence[MappedFile]],
        *,
        purpose: str = "adopt",
        require_equal: bool = False,
    ) -> bool:
        """Let the other ranks of the host use blocks of this rank in place, like memory of `allocate`. Collective.

        Args:
            sizes: of the blocks, in bytes.
            move: moves the blocks into mapped files. It is called where all ranks gave the same sizes and have room.
            purpose: what messages call it where ranks differ in their collectives.
            require_equal: raise MismatchError, on every rank, where sizes differ.

        Returns:
            Whether the blocks are now such memory, the same on every rank of a host.
        """
        everyone = self._runner.run_uncounted(purpose, self._world.allgather, tuple(sizes))
        other = next((rank for rank, each in enumerate(everyone) if each != everyone[0]), 0)
        if other and require_equal:
            raise MismatchError(
                f"{purpose}: expected the same sizes on every rank, got {list(everyone[0])} bytes on rank 0, "
                f"{list(everyone[other])} on rank {other}"
            )
        shared = self._world.shared
        if shared is None or not sizes or other:
            return False
        self._changed()
        return self._has_room(shared, sum(sizes), common=False) and shared.adopt(move())

    def free_unused(self) -> None:
        """Free shared memory in which no rank has an array left, as `allocate` does first; collective."""
        shared = self._world.shared
        free = (lambda: None) if shared is None else shared.memory.free_unused
        self._runner.run_uncounted("free_unused", free)

    def _has_room(self, shared: MemoryTransport, nbytes: int, common: bool) -> bool:
        """Return whether there is room for an allocation, after freeing dropped Communicators if needed."""
        if shared.make_room(nbytes, common):
            return True
        from clcomm.comm.watch.job import this_job

        this_job().communicators.free_dropped(self._world.comm, is_short=True)
        return shared.make_room(nbytes, common)

    def _warn_fallback(self, nbytes: int) -> None:
        if self._world.base.rank == 0 and not self._warned_fallback:
            _log.warning(NO_ROOM, f"{format_size(nbytes)} a rank", self._world.base.world_size)
        self._warned_fallback = True
