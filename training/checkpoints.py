"""When and where a run saves its checkpoints, and from which it resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from clcomm.checkpoint.series import CHECKPOINT, CheckpointSeries, is_there
from clcomm.communicator import Communicator
from clcomm.job.endings import note_saved
from clcomm.job.restarts import restart_number
from training.options import TrainingOptions
from training.snapshot import restore_snapshot, save_snapshot
from training.trainer import Trainer

#: Settings that a resumed run has to share with the one it goes on from.
SHARED_SETTINGS = (
    "model", "batch_size", "optimizer", "lr", "momentum", "nesterov", "weight_decay", "schedule", "clip_norm",
    "grad_accumulation", "augment", "sharding", "uneven_inputs", "seed", "compression", "precision", "loss_scaling",
    "logical_shards",
)  # fmt: skip


class Checkpoints:
    """The checkpoints that a run's options request; none without --checkpoint. All calls but `close` are collective."""

    def __init__(self, options: TrainingOptions, comm: Communicator, dataset: str):
        self._options, self._comm = options, comm
        settings = options.settings()
        self._job: dict[str, Any] = {name: settings[name] for name in (*SHARED_SETTINGS, *options.ALSO_SHARED)} | {
            "data": dataset
        }
        self._saved_at = 0  # not known after ranks were lost, so that the next call saves
        self._series: CheckpointSeries | None = None
        if options.checkpoint:
            self._series = CheckpointSeries(comm, options.checkpoint, keep=options.checkpoint_keep, background=True)

    def resume(self, trainer: Trainer) -> Path | None:
        """Restore --resume's checkpoint, or in a restarted job its own newest; return its file, None without one.

        Raises CheckpointError if it is damaged or belongs to another job.
        """
        source, own = self._options.resume_from, self._options.checkpoint
        # Rank 0 decides: launchers don't pass CLCOMM_RESTART to other hosts.
        if own and self._comm.broadcast_object(restart_number() > 0 and is_there(own), label=CHECKPOINT):
            source = own
        found = restore_snapshot(source, trainer, self._job) if source else None
        self._saved_at = trainer.progress.step
        if found:
            note_saved(self._saved_at)
        return found

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
                save_snapshot(self._series, trainer, self._job)
            if self._saved_at:
                note_saved(self._saved_at)  # the previous one is complete; this one is still being written
        self._saved_at = step

    def wait(self) -> None:
        """Block until the last checkpoint is written; raises CheckpointWriteError if that failed."""
        if self._series is not None:
            self._series.wait()

    def close(self) -> None:
        """Release the file for other jobs, after the last checkpoint is written; not collective."""
        if self._series is not None:
            self._series.close()
