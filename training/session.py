"""From a command line to a finished run: puts data, model, Synchronizer and Trainer together on every rank."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np

from clcomm import elastic
from clcomm.checkpoint_series import CheckpointSeries, is_there
from clcomm.communicator import Communicator
from clcomm.cores import CoreWaits
from clcomm.distributed_optimizer import DistributedOptimizer
from clcomm.errors import ArgumentError
from clcomm.host_memory import require_memory
from clcomm.job import note_saved
from clcomm.report.last_steps import LastSteps
from clcomm.report.record import gather_records, layout_of
from clcomm.restarts import restart_number
from clcomm.sampler import ContiguousSampler, DistributedSampler, EvaluationSampler
from clcomm.stats import CommStats
from clcomm.summary import Summary, summarize
from clcomm.synchronizer import Synchronizer
from clcomm.trace import Trace
from clcomm.units import format_size
from training import engines
from training.build_together import build_together
from training.console import make_console
from training.data_source import open_data
from training.datasets import Splits
from training.evaluate import Evaluation, evaluate
from training.history import StepHistory
from training.loader import Loader, default_prefetch
from training.result import Result
from training.schedules import parse_schedule
from training.snapshot import restore_snapshot, save_snapshot
from training.trainer import Progress, Trainer
from training.variants import PER_TENSOR
from training.watching import watched
from training.windows import StepWindows

if TYPE_CHECKING:
    from rich.console import Console

#: Samples a rank evaluates at a time.
EVALUATION_BATCH = 128
#: What the Synchronizer calls the choices of --overlap.
OVERLAP: dict[str, bool | str] = {"auto": "auto", "on": True, "off": False}
#: Settings that a resumed run has to share with the one it goes on from.
COURSE = (
    "model", "batch_size", "optimizer", "lr", "momentum", "nesterov", "weight_decay", "schedule", "clip_norm",
    "grad_accumulation", "sharding", "uneven_inputs", "seed", "compression",
)  # fmt: skip


class Session:
    """One training run on the ranks of `comm`, as the command line's options ask."""

    def __init__(self, options: argparse.Namespace, comm: Communicator, splits: Splits, console: Console):
        self.options, self.comm, self.splits, self.console = options, comm, splits, console
        self.parts = engines.build(
            options.engine, options.model, splits.train.image_shape, splits.train.classes, options.seed,
            device=engines.select_device(options.device, comm.local_rank, comm.local_size, comm.cores),
        )  # fmt: skip
        self.epochs = options.epochs or splits.default_epochs
        loader = self._make_loader()
        self._build_kernels(min(options.batch_size, loader.sampler.longest_shard))
        self._core_waits = CoreWaits()
        self.trainer = self._make_trainer(loader)
        self._series = self._checkpoint_series()
        self._evaluation: Evaluation | None = None
        self._evaluated_at = -1
        self._windows, self._history, self._last_steps = StepWindows(), StepHistory(), LastSteps()

    def _make_loader(self) -> Loader:
        """Return this rank's loader; ArgumentError for a batch beyond its shard or memory, before that is taken."""
        options, comm, train = self.options, self.comm, self.splits.train
        sampler_class = ContiguousSampler if options.sharding == "contiguous" else DistributedSampler
        sampler = sampler_class(len(train), comm.rank, comm.size, seed=options.seed, pad=options.uneven_inputs == "pad")
        prefetch = default_prefetch(comm.cores)
        images_bytes = np.dtype(np.float32).itemsize * math.prod(train.image_shape)
        try:
            loader = Loader(train, sampler, options.batch_size, prefetch=prefetch)
        except ArgumentError as error:
            size = format_size(options.batch_size * images_bytes)
            raise ArgumentError(f"{error}; its images alone would take {size} a rank") from None
        taken = min(options.batch_size, sampler.longest_shard) * images_bytes * (1 + prefetch)
        require_memory("batch_size", options.batch_size, taken, comm.local_size)
        return loader

    def _build_kernels(self, batch_size: int) -> None:
        options, parts, train = self.options, self.parts, self.splits.train
        if parts.opencl is None or parts.rehearse is None:
            return
        rehearse, run = parts.rehearse, ((batch_size, EVALUATION_BATCH), options.optimizer, options.lr)
        settings = {name: getattr(options, name) for name in ("momentum", "nesterov", "weight_decay")}
        rows = self.comm.local_size
        sums = rows, rows if rows == self.comm.size else 1  # with other hosts' ranks, the mean is made of hosts' sums
        what = repr((options.model, train.image_shape, train.classes, run, settings, sums, options.compression))
        build_together(self.comm, parts.opencl, lambda: rehearse(*run, settings, *sums, options.compression), what)

    def _make_trainer(self, loader: Loader) -> Trainer:
        options, comm = self.options, self.comm
        comm.add_observer(self._core_waits)
        sync = Synchronizer(
            comm,
            use_bucketing=not options.no_bucketing,
            first_bucket_size=options.first_bucket_size,
            split_tensors=options.split_tensors,
            overlap=OVERLAP[options.overlap],
            check_replicas_every=options.check_replicas,
            on_divergence=options.on_divergence,
            check_finite=options.check_finite,
            compression=options.compression,
        )
        optimizer = self.parts.make_optimizer(
            options.optimizer, options.lr, momentum=options.momentum, nesterov=options.nesterov,
            weight_decay=options.weight_decay,
        )  # fmt: skip
        if options.sharded_optimizer:
            optimizer = DistributedOptimizer(optimizer, sync)
        trainer = Trainer(
            comm,
            sync,
            self.parts,
            optimizer,
            loader,
            accumulation=options.grad_accumulation,
            clip_norm=options.clip_norm,
        )
        trainer.schedule = parse_schedule(options.schedule, trainer.total_steps(self.epochs))
        return trainer

    def _checkpoint_series(self) -> CheckpointSeries | None:
        if not getattr(self.options, "checkpoint", None):
            return None
        return CheckpointSeries(self.comm, self.options.checkpoint, keep=self.options.checkpoint_keep, background=True)

    def headline(self) -> str:
        """Return what is about to run, as one line; a second one says where a timeline will have no kernels."""
        options, comm, sync = self.options, self.comm, self.trainer.sync
        size = "per tensor" if options.no_bucketing else f"of {format_size(sync.bucket_size)}"
        if comm.auto_bucket_size and not options.no_bucketing:
            size += " to begin with"
        buckets = f"{_count(len(sync.bucket_plan(self.parts.model)), 'bucket')} {size}"
        line = (
            f"{options.model} on {_count(comm.size, 'rank')}, batch {options.batch_size} a rank, "
            f"{self.parts.device}; {'sharded update' if options.sharded_optimizer else buckets}"
        )
        if getattr(options, "trace", None) and self.parts.opencl is None:
            line += f"\ntrace: without kernels, which --engine {options.engine} does not tell"
        return line

    def describe(self) -> Summary:
        """Return what the model consists of, with the bucket plan as it is now; collective."""
        model, sync = self.parts.model, self.trainer.sync
        shape = (self.options.batch_size, *self.splits.train.image_shape)
        return summarize(model, shape, sync.bucket_plan(model), sync.space_for(model).order.names)

    def run(self) -> Result:
        """Train, save and evaluate as asked; collective. With --elastic it goes on where ranks die."""
        self._resume()
        while True:
            try:
                with self.traced(self.options):
                    self._train()
                    if self._series is not None:
                        self._series.close()
                    return self.finish()
            except Exception as error:
                if not getattr(self.options, "elastic", False) or not elastic.is_lost_peer(error):
                    raise
            self._go_on_with_survivors()

    def traced(self, options: argparse.Namespace) -> AbstractContextManager[Any]:
        """Return a context in which a timeline is recorded, where the options name a file for it; collective."""
        if not getattr(options, "trace", None):
            return nullcontext()
        return Trace(
            self.comm, options.trace, device=self.parts.opencl, every=options.trace_every, limit=options.trace_limit
        )

    def _go_on_with_survivors(self) -> None:
        """Put everything on the ranks that are left, from the newest step that one of them completed."""
        began, ranks, old = time.perf_counter(), self.comm.size, self.trainer
        while True:
            self.comm = elastic.survivors_of(self.comm)
            try:
                self._take_over(old)
                break
            except Exception as error:
                if not elastic.is_lost_peer(error):
                    raise
        self.console = make_console(self.comm)
        self.console.print(
            f"{_count(ranks - self.comm.size, 'rank')} of {ranks} lost; going on with {self.comm.size} from step "
            f"{self.trainer.progress.step}, after {time.perf_counter() - began:.2f} s", highlight=False,
        )  # fmt: skip

    def _take_over(self, old: Trainer) -> None:
        """Make a trainer for the ranks there are now, where the newest of theirs stood; collective."""
        root = elastic.newest(self.comm, old.progress.step)
        old.model.load_state_dict(elastic.send_arrays(self.comm, old.model.state_dict(), root))
        optimizer_state = elastic.send_arrays(self.comm, old.optimizer.state_dict(), root)
        state = self.comm.broadcast_object(old.state(), root, label=elastic.RECOVERY)
        self.trainer = trainer = self._make_trainer(self._make_loader())
        trainer.optimizer.load_state_dict(optimizer_state)
        trainer.load_state(state)
        trainer.metrics = old.metrics
        trainer.schedule = parse_schedule(self.options.schedule, trainer.total_steps(self.epochs))
        if self._series is not None:
            self._series.close()
        self._series = self._checkpoint_series()

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole job, those before a resume included."""
        total = self.trainer.total_steps(self.epochs)
        return min(total, self.options.max_steps or total)

    def steps(self) -> Iterator[Progress]:
        """Train, yielding the progress after each step, for whoever has to do something in between."""
        return self.trainer.train(self.epochs, self.options.max_steps)

    def finish(self) -> Result:
        """Evaluate as asked and return what the steps came to; collective."""
        self._evaluate_last_step()
        metrics, comm, sync = self.trainer.metrics, self.comm, self.trainer.sync
        records = self._gather_records()
        return Result(
            steps=metrics.steps,
            images_per_s=metrics.samples_per_s(comm.size),
            train_loss=self.trainer.train_loss,
            evaluation=self._evaluation,
            step_p50_s=metrics.step_s(0.50),
            step_p95_s=metrics.step_s(0.95),
            data_wait_s=metrics.data_wait_s,
            seconds=metrics.seconds,
            overhead_share=self.trainer.overhead.share(metrics.step_s(0.50)),
            bucket_size=self._bucket_size(),
            optimizer_state_nbytes=getattr(self.trainer.optimizer, "state_nbytes", None),
            layout=layout_of(sync.bucket_plan(self.parts.model)),
            decisions=[decision.as_dict() for decision in sync.decisions()],
            summary=self.describe() if self.options.report else None,
            intervals=self._windows.estimates(),
            history=self._history.as_dict(),
            records=records,
            stats=CommStats.merged((record["stats"] for record in records), comm.size),
        )

    def _bucket_size(self) -> int | None:
        """Return the bytes of a bucket at the most, as given or as chosen; None: each tensor on its own."""
        sync = self.trainer.sync
        chosen = {decision.what: decision.chosen for decision in sync.decisions()}
        return sync.bucket_size if sync.use_bucketing and chosen.get("bucket_size") != PER_TENSOR else None

    def _gather_records(self) -> list[dict[str, Any]]:
        metrics, guard, opencl = self.trainer.metrics, self.trainer.sync.guard, self.parts.opencl
        return gather_records(
            self.comm,
            last_steps=self._last_steps,
            device=f"{opencl.kind} {opencl.name}" if opencl else self.parts.device,
            driver=opencl.driver if opencl else None,
            steps=metrics.steps,
            training_s=metrics.seconds,
            data_wait_s=metrics.data_wait_s,
            step_p50_s=metrics.step_s(0.50),
            cpu_s=metrics.cpu_s,
            core_waits_s=self._core_waits.seconds,
            kernel_step_s=self.trainer.overhead.kernel_s,
            launch_step_s=self.trainer.overhead.launch_s,
            device_peak_bytes=opencl.memory.peak_bytes if opencl else None,
            device_in_caller=opencl.runs_in_caller if opencl else None,
            replica_checks=guard.checks,
            replica_mismatches=guard.divergences,
        )

    def _train(self) -> None:
        trainer, options = self.trainer, self.options
        every = getattr(options, "checkpoint_every", None)
        saved_at = trainer.progress.step
        watching = watched(options, self.comm, self.console, self.total_steps, saved_at, self.epochs)
        with watching as callbacks, ExitStack() as stack:
            for each in (self._windows, self._history):
                stack.enter_context(each.listening(self.comm))
                trainer.callbacks.append(each)
            self.comm.add_observer(self._last_steps)
            stack.callback(self.comm.remove_observer, self._last_steps)
            trainer.callbacks.extend(callbacks)
            for progress in self.steps():
                epoch_done = progress.batch == trainer.loader.most_batches
                if epoch_done and options.eval:
                    self._evaluate()
                if epoch_done or (every and progress.step % every == 0):
                    saved_at = self._save(saved_at)
            self._save(saved_at)
            if self._series is not None:
                self._series.wait()
            self._evaluate_last_step()  # in here, where the loggers are still open

    def _save(self, saved_at: int) -> int:
        step = self.trainer.progress.step
        if self._series is not None and step != saved_at:
            with self.comm.phase("checkpoint"):
                save_snapshot(self._series, self.trainer, self._course())
            note_saved(saved_at)  # the last one is whole by now; this one is being written
        return step

    def _resume(self) -> None:
        source = getattr(self.options, "resume", None)
        own = getattr(self.options, "checkpoint", None)
        # Rank 0 says: launchers don't hand CLCOMM_RESTART to other hosts.
        if own and self.comm.broadcast_object(restart_number() > 0 and is_there(own), label="checkpoint"):
            source = own
        if source:
            found = restore_snapshot(source, self.trainer, self._course())
            done = self.trainer.progress
            note_saved(done.step)
            self.console.print(f"resumed {found}: epoch {done.epoch + 1}, step {done.step}", highlight=False)

    def _course(self) -> dict[str, Any]:
        return {name: getattr(self.options, name) for name in COURSE} | {"data": self.splits.name}

    def _evaluate_last_step(self) -> None:
        if self.options.eval and self._evaluated_at != self.trainer.progress.step:
            self._evaluate()

    def _evaluate(self) -> None:
        test = self.splits.test
        assert test is not None  # left out without --eval only
        sampler = EvaluationSampler(len(test), self.comm.rank, self.comm.size)
        loader = Loader(test, sampler, EVALUATION_BATCH, prefetch=0)
        with self.comm.phase("evaluate"):
            evaluation = evaluate(self.comm, self.parts.predict, loader)
        self._evaluation, self._evaluated_at = evaluation, self.trainer.progress.step
        for callback in self.trainer.callbacks:
            callback.evaluation_finished(self._evaluated_at, evaluation)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def open_session_data(options: argparse.Namespace, comm: Communicator, console: Console) -> Splits:
    """Return the data that --data names, telling on rank 0 which it is; collective."""
    return open_data(options.data, comm, lambda line: console.print(line, highlight=False), with_test=options.eval)
