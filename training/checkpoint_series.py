"""The checkpoints of a run: the newest at one path, earlier ones beside it, optionally written in the background.

Rank 0 writes and reads; errors are raised on every rank.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

from clcomm.base.errors import ArgumentError, CheckpointError, CheckpointWriteError
from clcomm.base.storage import files
from clcomm.comm.communicator import Communicator
from clcomm.comm.watch.job import this_job
from clcomm.jobs.checkpoint import Checkpoint, earlier, load, save
from clcomm.jobs.checkpoint.file import check_place
from clcomm.jobs.checkpoint.manifest import signing_key
from clcomm.jobs.checkpoint.memory import CHECKPOINT, send

#: The largest number of earlier files.
_OLDEST = 99

_log = logging.getLogger("clcomm")


class CheckpointSeries:
    """Saves the checkpoints of a job at `path` (the newest), path.1, path.2, …: the last `keep` of them. Collective.

    The path is locked for this job until `close`, or until the series is garbage-collected.

    Args:
        comm: the ranks.
        path: that of the newest checkpoint.
        keep: number of files to keep, from 1 to 99.
        background: rank 0 writes in a thread; the next `save` or `wait` then raises its error on every rank.

    Raises:
        ArgumentError: `keep` is out of range; on every rank where rank 0 cannot write to `path` or another job does.
    """

    def __init__(self, comm: Communicator, path: files.FilePath, *, keep: int = 1, background: bool = False):
        if not isinstance(keep, int) or not 1 <= keep <= _OLDEST:
            raise ArgumentError(f"keep: expected a number of checkpoints from 1 to {_OLDEST}, got {keep!r}")
        self.comm, self.path, self.keep, self.background = comm, Path(path), keep, background
        self._writer: threading.Thread | None = None
        self._problem = ""
        self._release: Callable[[], object] = lambda: None
        problem = comm.broadcast_object(self._open() if comm.rank == 0 else "", label=CHECKPOINT)
        if problem:
            raise ArgumentError(problem)

    def _open(self) -> str:
        """Lock the path and remove incomplete files of killed jobs; return the error, "" if none."""
        try:
            signing_key()
            target = files.check_writable(self.path)
            for age in range(1, self.keep):
                files.destination(earlier(target, age))
            locks = this_job().locks
            self._release = weakref.finalize(self, locks.release, locks.acquire(target))
        except OSError as error:
            return f"checkpoint: expected a file to write, got {str(self.path)!r}: {error.strerror}"
        except CheckpointError as error:
            return str(error)
        for left in files.partials_of(target):
            left.unlink(missing_ok=True)
        return ""

    def save(self, checkpoint: Checkpoint | None) -> None:
        """Write rank 0's checkpoint, whose arrays must not change any more; other ranks' argument is ignored.

        Collective. Raises CheckpointWriteError on every rank where this write, or the last in the background, failed.
        """
        self.wait()
        if checkpoint is not None and self.comm.rank == 0:
            # Not a daemon thread, so that a program that ends meanwhile still completes the file.
            self._writer = threading.Thread(target=self._write, args=(checkpoint,), name="clcomm-checkpoint")
            self._writer.start()
        if not self.background:
            self.wait()

    def wait(self) -> None:
        """Block until the last checkpoint is on disk; raise its CheckpointWriteError on every rank. Collective."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        problem, self._problem = self.comm.broadcast_object(self._problem, label=CHECKPOINT), ""
        if problem:
            raise CheckpointWriteError(problem)

    def close(self) -> None:
        """Wait for this rank's writer and unlock the path; not collective."""
        if self._writer is not None:
            self._writer.join()
        self._release()

    def _write(self, checkpoint: Checkpoint) -> None:
        try:
            save(self.path, checkpoint, keep=self.keep)
        except CheckpointError as error:
            self._problem = str(error)
        except BaseException as error:
            self._problem = f"checkpoint {self.path}: could not be written ({type(error).__name__}: {error})"


def load_newest(comm: Communicator, path: files.FilePath) -> tuple[Path, Checkpoint]:
    """Return the newest undamaged checkpoint of the series at `path` and its own path, on every rank; collective.

    Damaged and altered ones are skipped with a warning, and those that are not in their place of the series. Where none
    is left, every rank raises the CheckpointError of the file at `path`.
    """
    source, checkpoint, problem = Path(path), Checkpoint(), ""
    if comm.rank == 0:
        try:
            source, checkpoint = next(undamaged(Path(path)))
        except CheckpointError as error:
            problem = str(error)
    problem, source = comm.broadcast_object((problem, source), label=CHECKPOINT)
    if problem:
        raise CheckpointError(problem)
    return source, send(comm, checkpoint, 0)


def is_there(path: files.FilePath) -> bool:
    """Return whether any of a series' files exists, damaged or not."""
    return any(os.path.exists(source) for source in _series(path))


def _series(path: files.FilePath) -> list[Path]:
    """Return the possible paths of a series, the newest first; a link's series is beside the link's target."""
    newest = Path(os.path.realpath(path)) if os.path.islink(path) else Path(path)
    return [earlier(newest, age) for age in range(_OLDEST + 1)]


def undamaged(path: Path) -> Iterator[tuple[Path, Checkpoint]]:
    """Yield the undamaged checkpoints of the series at `path` with their own paths, the newest first.

    Raises the CheckpointError of the file at `path` where there are none.
    """
    series, is_found = _series(path), False
    first: CheckpointError | None = None
    for age, source in enumerate(series):
        if age and not os.path.exists(source):
            continue
        try:
            checkpoint = load(source)
            check_place(series, age)
        except CheckpointError as error:
            first = first or error
            continue
        if first is not None and not is_found:
            _log.warning("%s; going on from %s", first, source)
        is_found = True
        yield source, checkpoint
    if first is not None and not is_found:
        raise first
