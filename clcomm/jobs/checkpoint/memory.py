"""Copies of a run's state in the hosts' memory, from which the next ranks of `clcomm run --min-ranks` go on.

A copy is a checkpoint's file in /dev/shm. Every host has a complete one, written by its first rank in the background; a
write that is killed leaves the one before. Sharded states are complete in it too: a checkpoint gathers them.
"""

from __future__ import annotations

import logging
import math
import statistics
import threading
import time
from collections import deque
from pathlib import Path

import numpy as np

from clcomm.base.errors import CheckpointError
from clcomm.base.storage.files import partials_of
from clcomm.comm.communicator import Communicator
from clcomm.comm.watch.endings import note_saved
from clcomm.comm.watch.job import this_job
from clcomm.comm.watch.worlds import COPIED, STOPPED, ThisWorld
from clcomm.jobs.checkpoint import Checkpoint, load, save

#: Label of the collectives for checkpoints.
CHECKPOINT = "checkpoint"
#: The share of the time that copies may take where no number of steps between them is given.
MOST_SHARE = 0.02
#: The share that they may take where that keeps two copies within so many seconds, and the next step within one.
SHARE_TO_BE_NEAR, NEAR_S = 0.05, 0.5
#: The copies whose median cost counts: one that other work held up would put the next one off, by many steps.
_COSTS = 5

_log = logging.getLogger("clcomm")


def seconds_apart(cost_s: float) -> float:
    """Return the seconds from one copy to the next where each takes `cost_s` of the ranks' time."""
    least = cost_s / SHARE_TO_BE_NEAR
    return max(least, min(cost_s / MOST_SHARE, NEAR_S)) if least <= NEAR_S else cost_s / MOST_SHARE


class MemoryCopies:
    """Copies of the job's state; making one is collective, and waits until it is these ranks' turn.

    All that is started before it is made may run beside the ranks that these will replace.

    Args:
        comm: the ranks.
        every: steps from one copy to the next; None: as few as take at most MOST_SHARE of the time, or
            SHARE_TO_BE_NEAR where copies are then at most NEAR_S apart.

    Attributes:
        is_on: whether there are copies: under `clcomm run --min-ranks` alone.
    """

    def __init__(self, comm: Communicator, every: int | None = None):
        self._comm, self._world, self._every = comm, ThisWorld(), every
        number = next(this_job().copies)  # a program may train several models, one after another
        if not number:
            self._world.wait_at_gate()
        folder = comm.broadcast_object(self._world.folder, label=CHECKPOINT)
        self.is_on, self._path = folder is not None, Path(folder or "", f"state-{number}.npz")
        self._writes = self.is_on and comm.local_rank == 0
        self._writer: threading.Thread | None = None
        self._has_failed = False
        self._written_s, self._last, self._next = 0.0, (0, time.monotonic()), 0
        self._costs_s: deque[float] = deque(maxlen=_COSTS)
        self._between = 1  # steps from the last copy to the next
        for partial in partials_of(self._path) if self._writes else ():
            partial.unlink(missing_ok=True)

    def is_due(self, step: int) -> bool:
        """Return whether the state after this step is to be copied; the same on all ranks."""
        return self.is_on and step >= self._next

    def newest(self) -> Checkpoint | None:
        """Return the newest of the hosts' copies on every rank; None: there is none. Collective."""
        if not self.is_on:
            return None
        own, step = Checkpoint(), -1
        if self._path.exists():
            try:
                own = load(self._path)
                step = int(own.facts["copied"])
            except (CheckpointError, KeyError, ValueError, TypeError) as error:
                _log.warning("copy in memory: %s; it is not used", error)
        steps = self._comm.all_gather_object(step, label=CHECKPOINT)
        if max(steps) < 0:
            return None
        return own if min(steps) == max(steps) else send(self._comm, own, steps.index(max(steps)))

    def save(self, checkpoint: Checkpoint | None, step: int, began_s: float) -> bool:
        """Copy rank 0's checkpoint of this step; return whether the ranks are to end now. Collective.

        The arrays must not change any more; other ranks' argument is ignored.

        Args:
            began_s: when the checkpoint's arrays were begun to be collected, of time.monotonic().
        """
        self.wait()
        to_stop, self._next = self._comm.broadcast_object(self._plan(step, began_s), label=CHECKPOINT)
        if self._comm.hosts > 1:
            checkpoint = send(self._comm, checkpoint or Checkpoint(), 0)
        if self._writes and checkpoint is not None:
            checkpoint.facts["copied"] = step
            self._writer = threading.Thread(target=self._write, args=(checkpoint, step), name="clcomm-memory")
            self._writer.start()
            self._written_s += time.monotonic() - began_s
        if to_stop:
            self.wait()
            self._comm.rendezvous()  # all hosts' copies are complete
            if self._comm.rank == 0:
                self._world.tell(STOPPED)
        return bool(to_stop)

    def wait(self) -> None:
        """Block until this rank's copy is complete; not collective."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None

    def _plan(self, step: int, now_s: float) -> tuple[bool, int]:
        """Return whether the ranks are to end after this copy, and the step of the next one, as rank 0 measures."""
        if self._every is not None:
            return self._world.is_to_stop(), step + self._every
        (last, last_s), copied_s = self._last, self._written_s
        step_s = max(now_s - last_s - copied_s, 1e-6) / max(1, step - last)
        self._last, self._written_s = (step, now_s), 0.0
        if copied_s:
            self._costs_s.append(copied_s)
        cost_s = statistics.median(self._costs_s) if self._costs_s else 0.0
        wanted = math.ceil(seconds_apart(cost_s) / step_s)
        self._between = min(max(1, wanted), 2 * self._between)  # the first steps are no measure
        return self._world.is_to_stop(), step + self._between

    def _write(self, checkpoint: Checkpoint, step: int) -> None:
        began_s = time.thread_time()
        try:
            save(self._path, checkpoint)
        except CheckpointError as error:
            if not self._has_failed:
                _log.warning("copy in memory: %s; the training goes on", error)
            self._has_failed = True
            return
        self._written_s += time.thread_time() - began_s
        note_saved(step)
        self._world.tell(COPIED, step)


def send(comm: Communicator, checkpoint: Checkpoint, root: int) -> Checkpoint:
    """Return root's checkpoint on every rank; collective."""
    shapes = {name: (array.shape, array.dtype.str) for name, array in checkpoint.arrays.items()}
    facts, shapes = comm.broadcast_object((checkpoint.facts, shapes), root, label=CHECKPOINT)
    if comm.rank != root:
        arrays = {name: np.empty(shape, dtype) for name, (shape, dtype) in shapes.items()}
        checkpoint = Checkpoint(arrays, facts)
    for array in checkpoint.arrays.values():
        comm.broadcast(np.require(array, requirements="W"), root, label=CHECKPOINT)  # tensors' are read-only
    return checkpoint
