"""A rank's last operations, in two files: one to read, and one for PyTorch's flight recorder analyser."""

from __future__ import annotations

import os
from collections.abc import Sequence

from clcomm.comm.stats.call import Call
from clcomm.comm.stats.flight_recorder import FlightRecorder, write_private
from clcomm.comm.stats.fr_trace import Group, trace_of
from clcomm.comm.transport.mpi_resources import MpiResources
from clcomm.comm.watch.source_location import frames_of_thread, stack_of_thread

Unfinished = Sequence[tuple[Call, int]]


class Dump:
    """Writes what one rank of a Communicator did last.

    Args:
        rank, size: this rank's number, and how many there are.
        recorder: has the collectives that have finished.
        resources: the Communicator's, for its name and the ranks' numbers in the world; None: it has none.
    """

    def __init__(self, rank: int, size: int, recorder: FlightRecorder, resources: MpiResources | None):
        self._rank, self._recorder = rank, recorder
        self._group: Group | None = None
        if resources is not None:
            number, members = resources.key
            self._group = Group(str(number), resources.names.name or "undefined", members or range(size))

    def write(self, folder: str, unfinished: Unfinished, thread: int, text: str = "", place: str = "") -> None:
        """Write rank-N.json and, where there are others, trace_N: N is this rank's number here and in the world.

        Raises OSError where one of the files exists or cannot be written.

        Args:
            folder: an existing one.
            unfinished: the collectives that this rank has begun, with their numbers.
            thread: the program's, whose stack the files have.
            text, place: the collective in which it is, and its source location.
        """
        self._recorder.dump(
            folder, self._rank, host=os.uname().nodename, pid=os.getpid(), collective=text, place=place,
            stack=stack_of_thread(thread),
        )  # fmt: skip
        if self._group is None:
            return
        trace = trace_of(self._recorder.last(), unfinished, self._group, frames_of_thread(thread))
        write_private(os.path.join(folder, f"trace_{self._group.ranks[self._rank]}"), trace)
