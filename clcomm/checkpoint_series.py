"""The checkpoints of a run: the newest at one path, earlier ones beside it, written while training goes on.

Rank 0 writes and reads; every rank learns how it went.
"""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

import numpy as np

from clcomm.checkpoint import Checkpoint, earlier, load, save
from clcomm.communicator import Communicator
from clcomm.errors import ArgumentError, CheckpointError, CheckpointWriteError

#: Label of what ranks tell each other about checkpoints.
CHECKPOINT = "checkpoint"
#: How many earlier files are looked for; more than anyone keeps.
_OLDEST = 99

_log = logging.getLogger("clcomm")


class CheckpointSeries:
    """Saves the checkpoints of a job at `path` (the newest), path.1, path.2, …: the last `keep` of them.

    background: rank 0 writes in a thread; a failure is then raised by the next `save` or by `wait`, on every rank.
    Raises ArgumentError for a `keep` below 1.
    """

    def __init__(self, comm: Communicator, path: str | os.PathLike, *, keep: int = 1, background: bool = False):
        if not isinstance(keep, int) or not 1 <= keep <= _OLDEST:
            raise ArgumentError(f"keep: expected a number of checkpoints from 1 to {_OLDEST}, got {keep!r}")
        self.comm, self.path, self.keep, self.background = comm, Path(path), keep, background
        self._writer: threading.Thread | None = None
        self._problem = ""

    def save(self, checkpoint: Checkpoint | None) -> None:
        """Write rank 0's checkpoint, whose arrays nobody may change any more; the others' argument is ignored.

        Collective. Raises CheckpointWriteError on every rank where this write failed, or the last in the background.
        """
        self.wait()
        if checkpoint is not None and self.comm.rank == 0:
            # Not a daemon: a program that ends in the meantime still finishes its file.
            self._writer = threading.Thread(target=self._write, args=(checkpoint,), name="clcomm-checkpoint")
            self._writer.start()
        if not self.background:
            self.wait()

    def wait(self) -> None:
        """Return when the last checkpoint is on the disk; raise on every rank what hindered it. Collective."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        problem, self._problem = self.comm.broadcast_object(self._problem, label=CHECKPOINT), ""
        if problem:
            raise CheckpointWriteError(problem)

    def _write(self, checkpoint: Checkpoint) -> None:
        try:
            save(self.path, checkpoint, keep=self.keep)
        except CheckpointError as error:
            self._problem = str(error)
        except BaseException as error:
            self._problem = f"checkpoint {self.path}: could not be written ({type(error).__name__}: {error})"


def load_newest(comm: Communicator, path: str | os.PathLike) -> tuple[Path, Checkpoint]:
    """Return the newest checkpoint at `path` that is whole, and where it lies, on every rank; collective.

    Damaged ones are passed over with a warning. Raises the CheckpointError of the file at `path`, on every rank, where
    there is no whole one.
    """
    source, checkpoint, problem = Path(path), Checkpoint(), ""
    if comm.rank == 0:
        try:
            source, checkpoint = _newest_whole(Path(path))
        except CheckpointError as error:
            problem = str(error)
    shapes = {name: (array.shape, array.dtype.str) for name, array in checkpoint.arrays.items()}
    problem, source, facts, shapes = comm.broadcast_object(
        (problem, source, checkpoint.facts, shapes), label=CHECKPOINT
    )
    if problem:
        raise CheckpointError(problem)
    if comm.rank != 0:
        arrays = {name: np.empty(shape, dtype) for name, (shape, dtype) in shapes.items()}
        checkpoint = Checkpoint(arrays, facts)
    for array in checkpoint.arrays.values():
        comm.broadcast(array, label=CHECKPOINT)
    return source, checkpoint


def is_there(path: str | os.PathLike) -> bool:
    """Say whether any of a series' files exists, whole or not."""
    return any(earlier(Path(path), age).exists() for age in range(_OLDEST + 1))


def _newest_whole(path: Path) -> tuple[Path, Checkpoint]:
    first: CheckpointError | None = None
    for age in range(_OLDEST + 1):
        source = earlier(path, age)
        if age and not source.exists():
            break
        try:
            checkpoint = load(source)
        except CheckpointError as error:
            first = first or error
            continue
        if first is not None:
            _log.warning("%s; going on from %s", first, source)
        return source, checkpoint
    assert first is not None
    raise first
