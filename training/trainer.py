"""The training loop: fetch, forward, backward, sync, step."""

from __future__ import annotations

import sys
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.comm.communicator import Communicator
from clcomm.comm.stats.events import Phase
from clcomm.comm.stats.steps import WARM_UP_STEPS
from clcomm.comm.watch import note_samples
from clcomm.comm.watch.endings import note_step
from clcomm.engine.nn.utils import clip_grad_norm_
from clcomm.parallel.audit import Audit
from clcomm.parallel.loss_scaling import GradScaler
from clcomm.sync.balance import Balancer
from clcomm.sync.clipping import clip_grad_norm
from clcomm.sync.sampler import BalancedSampler
from clcomm.sync.synchronizer import Synchronizer
from training.data.loader import Batch, Loader
from training.data.shard_sampler import ShardSampler
from training.engines.parts import Parts
from training.evaluate import Evaluation
from training.metrics import PROCESSOR_TIME_EVERY, Metrics, StepRecord
from training.overhead import Overhead
from training.schedules import Schedule, constant
from training.shard_losses import ShardLosses
from training.step_log import StepLog
from training.step_values import StepValues


class Callback:
    """Base of callbacks that follow a run; a subclass overrides what it needs.

    Attributes:
        every_step: whether it receives each step as soon as that is finished. Otherwise steps may come a few at a time,
            but before the evaluation or the end of the epoch that follows them; this takes less time.
    """

    every_step = True

    def step_finished(self, record: StepRecord) -> None:
        """Receive a step of this rank."""

    def shares_changed(self, step: int, shares: Sequence[int]) -> None:
        """Receive the samples that each rank has in a step from now on."""

    def evaluation_finished(self, step: int, evaluation: Evaluation) -> None:
        """Receive an evaluation after this step; after an epoch's last step it comes before `epoch_finished`."""

    def epoch_finished(self, epoch: int, train_loss: float) -> None:
        """Receive the mean loss over all ranks of an epoch (0, 1, ...), of its rest in a run that resumed within it."""


@dataclass
class Progress:
    """The position of a run: `batch` batches of `epoch` are done, and `step` optimizer steps in all."""

    epoch: int = 0
    batch: int = 0
    step: int = 0


class Trainer:
    """Trains one model on every rank of a Communicator.

    If the ranks' shards are uneven, gradients are weighted by samples, and a rank without samples left takes part in
    the others' steps.

    Args:
        comm: the ranks.
        sync: their Synchronizer; it broadcasts rank 0's parameters at once.
        parts: model, loss and conversions of one engine.
        optimizer: with `step()`, `zero_grad()` and a settable `lr`, whose value now is the initial learning rate.
        loader: this rank's batches.
        accumulation: micro-batches a step; the gradients are those of one batch of all their samples.
        schedule: factor of the optimizer's initial learning rate by step.
        clip_norm: the largest norm of all averaged gradients together; None: no limit.
        balancer: divides each step's samples by the ranks' speed; the loader's sampler is a BalancedSampler, or with
            logical shards, which are dealt by the speed, a ShardSampler. None: the sampler divides them.
        callbacks: receive this rank's steps, evaluations and epochs.
        scaler: scales losses, and skips steps in which a gradient overflows; None: neither.
        audit_every: steps from one audit to the next (see `clcomm.parallel.audit`); 0: none.

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
        balancer: Balancer | None = None,
        callbacks: Sequence[Callback] = (),
        scaler: GradScaler | None = None,
        audit_every: int = 0,
    ):
        shares = BalancedSampler if sync.shards is None or balancer is None else ShardSampler
        if (balancer is not None) != isinstance(loader.sampler, shares):
            raise ArgumentError(f"balancer: expected one with a {shares.__name__}, and none with another sampler")
        if not 1 <= accumulation <= sys.maxsize:
            raise ArgumentError(
                f"grad_accumulation: expected a number of micro-batches from 1 to {sys.maxsize}, got {accumulation}"
            )
        self.comm, self.sync, self.loader = comm, sync, loader
        self.parts, self.model, self.optimizer = parts, parts.model, optimizer
        self.accumulation, self.clip_norm, self.balancer = accumulation, clip_norm, balancer
        self.scaler = scaler or GradScaler(sync, enabled=False)
        self.schedule = schedule or constant()
        self.base_lr = optimizer.lr
        self.callbacks = list(callbacks)
        self.progress = Progress()
        self._log = StepLog(self.callbacks, time.perf_counter)
        self._taken = 0  # steps of this run
        #: How many logical shards' batches this rank has in a step.
        self._own_shards = 1 if sync.shards is None else len(sync.shards.own)
        self._shard_losses = ShardLosses()
        self.values: StepValues | None = None  # keeps what the next step computes, in a replay
        self.overhead = Overhead(parts.profile, comm.communicated)
        self.train_loss = float("nan")
        self._epoch_batches = loader.most_batches  # of the current epoch, on the rank that has the most
        self.steps_per_epoch = -(-self._epoch_batches // accumulation)  # of a whole epoch
        names = "forward_backward", "loss", "sync", "optimizer"
        phases: list[AbstractContextManager[None]] = [comm.phase(name) for name in names]
        self._forward_phase, self._loss_phase, self._sync_phase, self._update_phase = phases
        sync.broadcast_parameters(self.model)
        self._turns_phase: AbstractContextManager[None] = nullcontext()
        if sync.shards is not None and sync.models.of(self.model).steps_of("shards").takes_turns:
            # One phase holds the shards' turns, which would be counted in each other's.
            self._turns_phase, self._forward_phase, self._loss_phase = self._forward_phase, nullcontext(), nullcontext()
        sync.attach_optimizer(self.model, optimizer)
        self._audit = Audit(sync, self.model, optimizer, self._gradients, audit_every)

    @property
    def metrics(self) -> Metrics:
        """The totals of all steps of this run; settable, to go on with those of another Trainer."""
        self._log.hand_on()
        return self._log.metrics

    @metrics.setter
    def metrics(self, metrics: Metrics) -> None:
        self._log.metrics = metrics

    @property
    def epoch_done(self) -> bool:
        """Whether the last step was its epoch's last."""
        return self.progress.batch == self._epoch_batches

    def total_steps(self, epochs: int) -> int:
        """Return the number of optimizer steps, those done included, at the end of the last of `epochs` epochs."""
        progress = self.progress
        left = -(-(self.loader.most_batches - progress.batch) // self.accumulation)
        return progress.step + (left + (epochs - 1 - progress.epoch) * self.steps_per_epoch) * (progress.epoch < epochs)

    def train(self, epochs: int, max_steps: int | None = None) -> Iterator[Progress]:
        """Train until `epochs` epochs or `max_steps` steps are done, counted from the start of the job.

        Yields the progress after each step, when the state is consistent: the place to save or to stop.
        """
        while self.progress.epoch < epochs:
            self.metrics.start_epoch()
            self._shard_losses.clear()
            self.loader.sampler.set_epoch(self.progress.epoch)
            self._epoch_batches = self.loader.most_batches  # fewer than before in an epoch that other ranks began
            with self.comm.phase("epoch", epoch=self.progress.epoch + 1):
                for group in self._timed_groups():
                    if max_steps is not None and self.progress.step >= max_steps:
                        self._reduce_train_loss()
                        return
                    self._step(*group)
                    yield self.progress
                self._finish_epoch()

    def _step(self, group: list[Batch], begin: float, data_wait_s: float, cpu_began_s: float | None) -> None:
        communicated_s, in_collectives_s = self.comm.communicated(), self.comm.in_collectives()
        note_step(self.progress.step + 1)
        self.optimizer.lr = self.base_lr * self.schedule(self.progress.step)
        samples = sum(len(labels) for _, labels in group)
        note_samples(samples)
        self._audit.begin(self.progress.step + 1)
        with self.overhead.sampled():
            loss = self._audit.run(group) if self.sync.shards is None else self._gradients_of_shards(group)
            self._audit.check_gradients()
            if self.clip_norm is not None:
                with self.comm.phase("clipping"):
                    self.scaler.unscale_(self.optimizer)
                    self._clip(self.clip_norm)
            if self.values is not None:
                self.values.keep_mean()
            with self._update_phase:
                self.scaler.step(self.optimizer)
                self.scaler.update()
                self.optimizer.zero_grad()
            self.sync.finish_step(self.model)
            self._audit.check_update()
        seconds = time.perf_counter() - begin
        within_s = min(seconds, self.comm.communicated() - communicated_s)
        figures = self._figures(samples, loss, seconds)
        self.comm.notify_phase(Phase("step", begin, seconds, communication_s=within_s, figures=figures))
        in_collectives_s = self.comm.in_collectives() - in_collectives_s
        cpu_s = None if cpu_began_s is None else time.process_time() - cpu_began_s
        self._record(samples, loss, seconds, data_wait_s, in_collectives_s, cpu_s)
        if self.balancer is not None and self.balancer.step_finished(samples, seconds - within_s):
            self._follow(self.balancer)
            for callback in self.callbacks:
                callback.shares_changed(self.progress.step, self.balancer.shares)

    def _clip(self, max_norm: float) -> None:
        """Clip the mean gradients, or this rank's own where ranks take steps of their own."""
        if self.sync.models.settings.policy is None:
            clip_grad_norm(self.sync, self.model, max_norm)
        else:
            clip_grad_norm_(self.model.parameters(), max_norm)

    def _follow(self, balancer: Balancer) -> None:
        """Take other shares from the next step on; collective with logical shards."""
        sampler = self.loader.sampler
        if isinstance(sampler, BalancedSampler):
            sampler.shares = balancer.shares
        elif isinstance(sampler, ShardSampler):
            dealt = self.sync.deal_shards([share // balancer.batch_size for share in balancer.shares])
            self._shard_losses.deal(self.comm, dealt)
            sampler.deal(dealt.own)
            self.loader.held = self.loader.held // self._own_shards * len(dealt.own)
            self._own_shards = len(dealt.own)

    def _gradients(self, group: list[Batch]) -> float:
        """Compute the gradients of micro-batches, and average them over the ranks; return their mean loss."""
        loss, samples = 0.0, sum(len(labels) for _, labels in group)
        for number, (images, labels) in enumerate(group, 1):
            with nullcontext() if number == len(group) else self.sync.no_sync():
                share = len(labels) / samples
                part = self._forward_backward(images, labels, share)
                self._synchronise(samples)
                with self._loss_phase:
                    loss += share * part.item()  # item() blocks: only after synchronisation has started
        if not group:
            self._synchronise(0)
        return loss

    def _gradients_of_shards(self, group: list[Batch]) -> float:
        """Do the same for this rank's logical shards, whose micro-batches take turns in the group."""
        shards, losses = self.sync.shards, list[float]()
        assert shards is not None

        def compute(shard: int) -> None:
            batches = group[shard - shards.own.start :: self._own_shards]
            if self.values is not None:
                self.values.begin(shard)
            loss = self._audit.run(batches)
            self._shard_losses.add(shard, loss, sum(len(labels) for _, labels in batches))
            losses.append(loss / self._own_shards)

        with self._turns_phase, self.sync.no_sync() if shards.is_divided else nullcontext():
            self.sync.run_shards(self.model, compute)
        if shards.is_divided:
            self._synchronise(sum(len(labels) for _, labels in group))
        return sum(losses)

    def _figures(self, samples: int, loss: float, seconds: float) -> tuple[tuple[str, float], ...]:
        """Return the step's figures for a timeline, numbered from 1 as in all output."""
        numbers = ("step", self.progress.step + 1), ("epoch", self.progress.epoch + 1)
        return (*numbers, ("loss", loss), ("images/s", samples / seconds))

    def _forward_backward(self, images: np.ndarray, labels: np.ndarray, weight: float) -> Any:
        """Add `weight` times this micro-batch's gradients, and return its loss."""
        with self._forward_phase:
            inputs, targets = self.parts.prepare(images, labels)
            runs = self.parts if self.values is None else self.values
            return runs.forward_backward(inputs, targets, weight * self.scaler.get_scale())

    def _synchronise(self, samples: int) -> None:
        with self._sync_phase:
            own = None if self.loader.sampler.equal_shards else samples
            self.sync.sync_gradients(self.model, samples=own, of=self._all_samples())

    def _timed_groups(self) -> Iterator[tuple[list[Batch], float, float, float | None]]:
        """Yield for each step of the epoch its micro-batches, its begin, its wait for data, the processor time then.

        There are no micro-batches if only other ranks have samples left. The processor time is None where that of the
        step is not measured.
        """
        batches, shares = self._batches_left(), self._shares()
        while True:
            if self._shares() != shares:
                batches.close()
                batches, shares = self._batches_left(), self._shares()
            begin = time.perf_counter()
            is_measured = self._taken < WARM_UP_STEPS or (self._taken - WARM_UP_STEPS) % PROCESSOR_TIME_EVERY == 0
            cpu_began_s = time.process_time() if is_measured else None
            group = list(islice(batches, self.accumulation * self._own_shards))
            if not group and self.progress.batch >= self._epoch_batches:
                return
            wait_s = time.perf_counter() - begin
            self.comm.notify_phase(Phase("data", begin, wait_s))
            yield group, begin, wait_s, cpu_began_s

    def _batches_left(self) -> Generator[Batch, None, None]:
        done = self.progress.batch * self._own_shards
        return self.loader.epoch(self.progress.epoch, min(done, len(self.loader)))

    def _shares(self) -> tuple[int, ...] | None:
        return None if self.balancer is None else self.balancer.shares

    def _record(
        self, samples: int, loss: float, seconds: float, data_wait_s: float, in_collectives_s: float,
        cpu_s: float | None,
    ) -> None:  # fmt: skip
        all_samples = self._all_samples()
        self._taken += 1
        self.progress.step += 1
        self.progress.batch = min(self.progress.batch + self.accumulation, self._epoch_batches)
        record = StepRecord(
            self.progress.step, self.progress.epoch, self.progress.batch, samples, loss, self.optimizer.lr, seconds,
            data_wait_s, in_collectives_s, cpu_s, all_samples,
        )  # fmt: skip
        self._log.add(record)
        if self.epoch_done:
            self._log.hand_on()  # an evaluation may follow

    def _all_samples(self) -> int | None:
        """Return the samples of all ranks in the next step, as far as every rank knows them; None: it does not."""
        sampler = self.loader.sampler
        if not isinstance(sampler, BalancedSampler):
            return None
        return sampler.samples_of_all(self.progress.batch, self.accumulation)

    def _finish_epoch(self) -> None:
        if self._reduce_train_loss():
            for callback in self.callbacks:
                callback.epoch_finished(self.progress.epoch, self.train_loss)
        self.progress.epoch, self.progress.batch = self.progress.epoch + 1, 0

    def _reduce_train_loss(self) -> bool:
        """Reduce the mean loss of the epoch; return False, and keep the last one, if this run took no step in it."""
        shards = self.sync.shards
        if shards is None:
            metrics = self.metrics
            totals = np.array([metrics.epoch_loss, metrics.epoch_samples], np.float64)
            loss, samples = self.comm.all_reduce(totals, label="metrics")
        else:
            loss, samples = self._shard_losses.total(self.comm, shards)
        if samples:
            self.train_loss = loss / samples
        return bool(samples)
