"""When and where a run saves its checkpoints and copies in memory, and from which it resumes."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from clcomm._version import __version__
from clcomm.comm.communicator import Communicator
from clcomm.comm.watch.endings import note_saved
from clcomm.comm.watch.restarts import restart_number
from clcomm.jobs.checkpoint.memory import CHECKPOINT, MemoryCopies
from training.checkpoint_series import CheckpointSeries, is_there
from training.options import TrainingOptions
from training.snapshot import restore, restore_snapshot, save_snapshot, snapshot_of
from training.trainer import Trainer

#: Settings that a resumed run has to share with the one it goes on from.
SHARED_SETTINGS = (
    "model", "batch_size", "optimizer", "lr", "momentum", "nesterov", "weight_decay", "schedule", "clip_norm",
    "grad_accumulation", "augment", "sharding", "uneven_inputs", "seed", "compression", "policy", "precision",
    "loss_scaling", "logical_shards",
)  # fmt: skip


def job_of(options: TrainingOptions, dataset: str) -> dict[str, Any]:
    """Return what a run has in common with those that go on from its checkpoints."""
    settings = options.settings()
    return {name: settings[name] for name in (*SHARED_SETTINGS, *options.ALSO_SHARED)} | {"data": dataset}


def _name_of(kind: type | None) -> str | None:
    """Return "module:class" by which another process finds a class; None: it does not."""
    if kind is None or "." in kind.__qualname__:
        return None
    module = kind.__module__
    if module == "__main__":
        spec = getattr(sys.modules["__main__"], "__spec__", None)
        module = spec.name if spec is not None else ""
    return f"{module}:{kind.__qualname__}" if module else None


class Checkpoints:
    """The checkpoints that a run's options request; none without --checkpoint. All calls but `close` are collective.

    Making one waits until it is these ranks' turn, where `clcomm run --min-ranks` has started them before it is.

    Args:
        options: the run's.
        comm: its ranks.
        dataset: the name of its data.
        session: the class that opened the data, by which the run can be replayed; None: it cannot.
        began: the steps that were done when these ranks began.
    """

    def __init__(
        self, options: TrainingOptions, comm: Communicator, dataset: str, session: type | None = None, began: int = 0
    ):
        self._options, self._comm = options, comm
        self._job = job_of(options, dataset)
        self._session, self._began = session, began
        self._saved_at = 0  # not known after ranks were lost, so that the next call saves
        self._copies = MemoryCopies(comm, options.memory_checkpoint_every)
        self._series: CheckpointSeries | None = None
        if options.checkpoint:
            self._series = CheckpointSeries(comm, options.checkpoint, keep=options.checkpoint_keep, background=True)

    def resume(self, trainer: Trainer) -> Path | str | None:
        """Restore the copy in memory, else --resume's checkpoint, or in a restarted job its own newest.

        Returns the checkpoint's file, or in words where it was; None: there is none.

        Raises CheckpointError if it is damaged or belongs to another job.
        """
        found = self._from_memory(trainer)
        if not found:
            found = self._from_file(trainer)
            self._saved_at = trainer.progress.step
        self._began = trainer.progress.step
        if found:
            note_saved(self._began)
        return found

    def _from_memory(self, trainer: Trainer) -> Path | str | None:
        copy = self._copies.newest()
        if copy is None:
            return ""
        restore(copy, trainer, self._job)
        return "from memory"

    def _from_file(self, trainer: Trainer) -> Path | None:
        source, own = self._options.resume_from, self._options.checkpoint
        # Rank 0 decides: launchers don't pass CLCOMM_RESTART to other hosts.
        if own and self._comm.broadcast_object(restart_number() > 0 and is_there(own), label=CHECKPOINT):
            source = own
        return restore_snapshot(source, trainer, self._job) if source else None

    def copy_after_step(self, trainer: Trainer) -> bool:
        """Copy the state to memory where a copy is due; return whether these ranks are to end for others."""
        step, began_s = trainer.progress.step, time.monotonic()
        if not self._copies.is_due(step):
            return False
        with self._comm.phase("copy"):
            return self._copies.save(snapshot_of(trainer, self._job), step, began_s)

    def save_after_step(self, trainer: Trainer, epoch_done: bool) -> None:
        """Save if an epoch has ended or a step of --checkpoint-every is reached."""
        every = self._options.checkpoint_every
        if epoch_done or (every and trainer.progress.step % every == 0):
            self.save(trainer)

    def save(self, trainer: Trainer) -> None:
        """Save unless this step is saved already; the file is written in the background."""
        step = trainer.progress.step
        if self._series is not None and step != self._saved_at:
            with self._comm.phase("checkpoint"):
                save_snapshot(self._series, trainer, self._job, self._program(trainer))
            if self._saved_at and not self._copies.is_on:
                note_saved(self._saved_at)  # the previous one is complete; this one is still being written
        self._saved_at = step

    def _program(self, trainer: Trainer) -> dict[str, Any] | None:
        """Return what a replay needs to compute the steps again; None where the run's classes have no name."""
        names = [_name_of(kind) for kind in (self._session, type(self._options))]
        if None in names:
            return None
        return {
            "session": names[0], "options": names[1],
            "settings": self._options.settings(), "version": __version__, "began": self._began,
            "device": trainer.parts.device, "hosts": self._comm.hosts,
        }  # fmt: skip

    def wait(self) -> None:
        """Block until the last checkpoint is written; raises CheckpointWriteError if that failed."""
        if self._series is not None:
            self._series.wait()

    def close(self) -> None:
        """Release the file for other jobs, after the last checkpoint is written; not collective."""
        self._copies.wait()
        if self._series is not None:
            self._series.close()
