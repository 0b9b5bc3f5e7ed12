"""The training loop: fetch, forward, backward, sync, step."""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import numpy as np

from clcomm.checkpoint import nonsense, whole_number
from clcomm.clipping import clip_grad_norm
from clcomm.communicator import Communicator
from clcomm.errors import ArgumentError
from clcomm.events import Phase
from clcomm.job import note_step
from clcomm.sampler import DistributedSampler, Sampler
from clcomm.synchronizer import Synchronizer
from training.engines import Parts
from training.evaluate import Evaluation
from training.loader import Batch, Loader
from training.metrics import Metrics, StepRecord
from training.overhead import Overhead
from training.schedules import Schedule, constant

#: The most that a count in a checkpoint may come to: what int64 holds.
_MOST = (1 << 63) - 1


class Callback:
    """Base of what wants to follow a run: it defines what it wants to be told."""

    def step_finished(self, record: StepRecord) -> None:
        """Hear of a step of this rank."""

    def evaluation_finished(self, step: int, evaluation: Evaluation) -> None:
        """Hear what an evaluation after this step came to, before the end of the epoch if it is the epoch's last."""

    def epoch_finished(self, epoch: int, train_loss: float) -> None:
        """Hear the mean loss of an epoch (0, 1, ...), or of what a resumed run had left of it, over all ranks."""


@dataclass
class Progress:
    """How far a run has come: `batch` batches of `epoch` are done, `step` optimizer steps in all."""

    epoch: int = 0
    batch: int = 0
    step: int = 0


class Trainer:
    """Trains one model on every rank of a Communicator.

    parts: model, loss, optimizer and conversions of one engine. accumulation: micro-batches a step; the gradients are
    those of one batch of all their samples. schedule: factor on the optimizer's initial learning rate by step.
    clip_norm: the largest norm of the averaged gradients together; None: as large as they are.
    Where the ranks' shards are uneven gradients are weighed by samples, and a rank that has none left steps on with the
    others' gradients.
    Raises ArgumentError for an accumulation below 1 or above sys.maxsize.
    """

    def __init__(
        self,
        comm: Communicator,
        sync: Synchronizer,
        parts: Parts,
        optimizer: Any,
        loader: Loader,
        *,
        accumulation: int = 1,
        schedule: Schedule | None = None,
        clip_norm: float | None = None,
        callbacks: Sequence[Callback] = (),
    ):
        if not 1 <= accumulation <= sys.maxsize:
            raise ArgumentError(
                f"grad_accumulation: expected a number of micro-batches from 1 to {sys.maxsize}, got {accumulation}"
            )
        self.comm, self.sync, self.loader = comm, sync, loader
        self.parts, self.model, self.optimizer = parts, parts.model, optimizer
        self.accumulation, self.clip_norm = accumulation, clip_norm
        self.schedule = schedule or constant()
        self.base_lr = optimizer.lr
        self.callbacks = list(callbacks)
        self.progress = Progress()
        self.metrics = Metrics()
        self.overhead = Overhead(parts.profile, comm.communicated)
        self.train_loss = float("nan")
        self.steps_per_epoch = -(-loader.most_batches // accumulation)  # of a whole epoch
        sync.broadcast_parameters(self.model)
        sync.attach_optimizer(self.model, optimizer)

    def total_steps(self, epochs: int) -> int:
        """Return how many optimizer steps there will have been after so many epochs, from where the training is."""
        progress = self.progress
        left = -(-(self.loader.most_batches - progress.batch) // self.accumulation)
        return progress.step + (left + (epochs - 1 - progress.epoch) * self.steps_per_epoch) * (progress.epoch < epochs)

    def train(self, epochs: int, max_steps: int | None = None) -> Iterator[Progress]:
        """Train until `epochs` are complete or `max_steps` steps are done, counted from the job's very start.

        Yields the progress after each step, when everything is consistent: the place to save or to stop.
        """
        while self.progress.epoch < epochs:
            self.metrics.start_epoch()
            batches = self.loader.epoch(self.progress.epoch, min(self.progress.batch, len(self.loader)))
            with self.comm.phase("epoch", epoch=self.progress.epoch + 1):
                for group in self._timed_groups(batches):
                    if max_steps is not None and self.progress.step >= max_steps:
                        self._reduce_train_loss()
                        return
                    self._step(*group)
                    yield self.progress
                self._finish_epoch()

    def _step(self, group: list[Batch], begin: float, data_wait_s: float, cpu_began_s: float) -> None:
        communicated_s = self.comm.communicated()
        note_step(self.progress.step + 1)
        self.optimizer.lr = self.base_lr * self.schedule(self.progress.step)
        samples = sum(len(labels) for _, labels in group)
        loss = 0.0
        with self.overhead.sampled():
            for number, (images, labels) in enumerate(group, 1):
                with nullcontext() if number == len(group) else self.sync.no_sync():
                    share = len(labels) / samples
                    part = self._forward_backward(images, labels, share)
                    self._synchronise(samples)
                    with self.comm.phase("loss"):
                        loss += share * part.item()  # waits for the device, so after what goes on beside it
            if not group:
                self._synchronise(0)
            if self.clip_norm is not None:
                with self.comm.phase("clipping"):
                    clip_grad_norm(self.sync, self.model, self.clip_norm)
            with self.comm.phase("optimizer"):
                self.optimizer.step()
                self.optimizer.zero_grad()
        seconds = time.perf_counter() - begin
        within_s = min(seconds, self.comm.communicated() - communicated_s)
        figures = self._figures(samples, loss, seconds)
        self.comm.tell_phase(Phase("step", begin, seconds, communication_s=within_s, figures=figures))
        self.metrics.cpu_s += time.process_time() - cpu_began_s
        self._record(samples, loss, seconds, data_wait_s)

    def _figures(self, samples: int, loss: float, seconds: float) -> tuple[tuple[str, float], ...]:
        """Return what a timeline shows of the step that ends, numbered from 1 as in all that is printed."""
        numbers = ("step", self.progress.step + 1), ("epoch", self.progress.epoch + 1)
        return (*numbers, ("loss", loss), ("images/s", samples / seconds))

    def _forward_backward(self, images: np.ndarray, labels: np.ndarray, weight: float) -> Any:
        """Add `weight` times this micro-batch's gradients, and return its loss."""
        with self.comm.phase("forward_backward"):
            inputs, targets = self.parts.prepare(images, labels)
            return self.parts.forward_backward(inputs, targets, weight)

    def _synchronise(self, samples: int) -> None:
        with self.comm.phase("sync"):
            self.sync.sync_gradients(self.model, samples=None if self.loader.sampler.equal_shards else samples)

    def _timed_groups(self, batches: Iterable[Batch]) -> Iterator[tuple[list[Batch], float, float, float]]:
        """Yield the micro-batches of each step, with the moment the step began and the wait for data in it.

        Last comes the processor time that the rank had used when it began.

        They are none where other ranks have more.
        """
        batches = iter(batches)
        while True:
            begin, cpu_began_s = time.perf_counter(), time.process_time()
            group = list(islice(batches, self.accumulation))
            if not group and self.progress.batch >= self.loader.most_batches:
                return
            wait_s = time.perf_counter() - begin
            self.comm.tell_phase(Phase("data", begin, wait_s))
            yield group, begin, wait_s, cpu_began_s

    def _record(self, samples: int, loss: float, seconds: float, data_wait_s: float) -> None:
        self.progress.step += 1
        self.progress.batch = min(self.progress.batch + self.accumulation, self.loader.most_batches)
        record = StepRecord(
            self.progress.step, self.progress.epoch, self.progress.batch, samples, loss, self.optimizer.lr, seconds,
            data_wait_s,
        )  # fmt: skip
        self.metrics.add(record)
        for callback in self.callbacks:
            callback.step_finished(record)

    def _finish_epoch(self) -> None:
        if self._reduce_train_loss():
            for callback in self.callbacks:
                callback.epoch_finished(self.progress.epoch, self.train_loss)
        self.progress.epoch, self.progress.batch = self.progress.epoch + 1, 0

    def _reduce_train_loss(self) -> bool:
        """Take the mean over this run's part of the epoch; False, and the one before stays, where it took no step."""
        totals = np.array([self.metrics.epoch_loss, self.metrics.epoch_samples], np.float64)
        loss, samples = self.comm.all_reduce(totals, label="metrics")
        if samples:
            self.train_loss = loss / samples
        return bool(samples)

    # --- what a checkpoint keeps ---

    def state(self) -> dict[str, Any]:
        """Return progress and sampler as plain numbers."""
        return {"progress": asdict(self.progress), "sampler": self.loader.sampler.state_dict(), "base_lr": self.base_lr}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken; CheckpointError, before anything is changed, as `check_state` says."""
        progress = self.check_state(state)
        self.loader.sampler.load_state_dict(state["sampler"])
        self.progress, self.base_lr = progress, float(state["base_lr"])
        if state["sampler"]["world_size"] != self.comm.size:
            self._share_out(state["sampler"]["world_size"])

    def check_state(self, state: Any) -> Progress:
        """Return a state's progress; CheckpointError when it belongs to another run or an entry makes no sense."""
        state = _entries("training", state)
        found, theirs = _entries("progress", state.get("progress")), _entries("sampler", state.get("sampler"))
        base_lr = state.get("base_lr")
        if not isinstance(base_lr, (int, float)) or isinstance(base_lr, bool) or not 0 <= base_lr <= sys.float_info.max:
            raise nonsense("base_lr", "a finite number from 0 up", base_lr)
        sampler = copy.copy(self.loader.sampler)
        sampler.load_state_dict(theirs)
        ranks = whole_number("sampler.world_size", theirs.get("world_size"), 1, _MOST)
        most = {"epoch": _MOST, "batch": self._batches_left(sampler, ranks), "step": _MOST}
        return Progress(**{name: whole_number(f"progress.{name}", found.get(name), 0, most[name]) for name in most})

    def _batches_left(self, sampler: Sampler, ranks: int) -> int:
        """Return how many batches so many ranks make at most of what `sampler` has left of its epoch."""
        share = sampler.longest_shard
        if ranks != self.comm.size:
            assert isinstance(sampler, DistributedSampler)  # others have refused to change their number of ranks
            share = -(-(sampler.length - sampler.done) // ranks)
        return -(-share // self.loader.batch_size)

    def _share_out(self, ranks: int) -> None:
        """Share out anew what so many ranks have left of the epoch."""
        progress, sampler = self.progress, self.loader.sampler
        assert isinstance(sampler, DistributedSampler)
        done = sampler.done + progress.batch * self.loader.batch_size * ranks
        if done >= sampler.length:
            progress.epoch, done = progress.epoch + 1, 0
            sampler.set_epoch(progress.epoch)
        sampler.leave_out(done)
        progress.batch = 0


def _entries(entry: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise nonsense(entry, "its entries by name", value)
    return value
