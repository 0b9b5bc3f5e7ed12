"""One training run from its options to its result, on every rank."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.base.units import format_size
from clcomm.comm.communicator import Communicator
from clcomm.comm.stats.comm_stats import CommStats
from clcomm.comm.stats.cores import CoreWaits
from clcomm.engine.random_stream import RandomStream
from clcomm.engine.selection import load_platforms
from clcomm.insight.report.last_steps import LastSteps
from clcomm.insight.report.record import gather_records, layout_of
from clcomm.parallel.mesh import in_words
from clcomm.sync import elastic
from clcomm.sync.distributed_optimizer import DistributedOptimizer
from training.build_trainer import build_kernels, build_model, make_loader, make_trainer
from training.checkpoints import Checkpoints
from training.console import make_console
from training.data.datasets import Splits
from training.data.loader import Loader
from training.data.open_data import open_data
from training.engines.parts import Parts
from training.evaluate import EVALUATION_BATCH, Evaluation, evaluate
from training.expected_memory import expected_memory
from training.first_steps import FirstSteps, StartTimes
from training.history import StepHistory
from training.options import JobOptions, TrainingOptions
from training.result import PER_TENSOR, Result
from training.run_callbacks import run_callbacks
from training.schedules import parse_schedule
from training.start import start
from training.trainer import Progress, Trainer
from training.trainer_state import MovingState, load_state
from training.waiting import console_of

if TYPE_CHECKING:
    from rich.console import Console

    from clcomm.insight.summary import Summary


class Session:
    """One training run; creating one is collective.

    Attributes:
        EVALUATION_BATCH: samples that a rank evaluates at a time.

    Args:
        comm: the ranks; None: the session joins those of the job.
        splits: the data; None: the session opens what --data names.
        console: where rank 0 prints; None: a new one.
    """

    EVALUATION_BATCH: ClassVar[int] = EVALUATION_BATCH

    def __init__(
        self,
        options: TrainingOptions,
        comm: Communicator | None = None,
        splits: Splits | None = None,
        console: Console | None = None,
    ):
        self.options, self._start = options, StartTimes()
        self._start.end("program")
        self.comm = comm = comm or start(options)
        self._start.end("ranks")
        self.console = console or console_of(comm)
        self.splits = splits or self._open_splits()
        self._replayed_as = None if splits else type(self)  # given data cannot be opened again
        self._start.end("data")
        train = self.splits.train
        self.parts = self._build_parts()
        self.epochs = options.epochs or self.splits.default_epochs
        loader = make_loader(options, self.replicas, train)
        self._start.end("model")
        build_kernels(options, comm, train, self.parts, loader, self.EVALUATION_BATCH)
        self._start.end("kernels")
        self._core_waits = CoreWaits()
        self.trainer = self._make_trainer(loader)
        self._numbers: np.ndarray | None = None  # the state of the device's random numbers after the last step
        self._checkpoints = Checkpoints(options, comm, self.splits.name, self._replayed_as)
        self.console = console or make_console(comm)
        self._evaluation: Evaluation | None = None
        self._evaluated_at = -1
        self._history, self._last_steps = StepHistory(), LastSteps()
        self._first_steps: FirstSteps | None = None

    @property
    def replicas(self) -> Communicator:
        """The ranks that have replicas of this rank's parameters, and samples of their own: all of them."""
        return self.comm

    @property
    def axis(self) -> str:
        """This rank's place in the job's mesh, in words."""
        return in_words({"dp": self.comm.rank})

    def _open_splits(self) -> Splits:
        return open_splits(self.options, self.comm, self.console)

    def _build_parts(self) -> Parts:
        return build_model(self.options, self.comm, self.splits.train)

    def _make_trainer(self, loader: Loader) -> Trainer:
        self.comm.add_observer(self._core_waits)
        if self.options.elastic and self.options.logical_shards and dict(self.parts.model.named_buffers()):
            raise ArgumentError(
                "--elastic: expected a model without running statistics with --logical-shards, as no other rank has a "
                "lost one's; use clcomm run --restarts with --checkpoint"
            )
        return make_trainer(self.options, self.replicas, self.parts, loader, self.epochs)

    def headline(self) -> str:
        """Return what will run as one line, and a second line if --trace will show no kernels."""
        options, comm, sync = self.options, self.comm, self.trainer.sync
        size = "per tensor" if options.no_bucketing else f"of {format_size(sync.bucket_size)}"
        if comm.auto_bucket_size and not options.no_bucketing:
            size += " to begin with"
        buckets = f"{_count(len(sync.bucket_plan(self.parts.model)), 'bucket')} {size}"
        line = (
            f"{options.model} on {_count(comm.size, 'rank')}, batch {options.batch_size} a {self._share()}, "
            f"{self.parts.device}; {_update(options.zero_stage, buckets)}"
        )
        if options.precision != "float32":
            line += f"; {options.precision} parameters"
        if options.trace and self.parts.opencl is None:
            line += f"\ntrace: without kernels, which --engine {options.engine} does not report"
        return line

    def say(self, line: str) -> None:
        """Print a line on rank 0; on a terminal it is broken between words."""
        self.console.print(line, highlight=False, markup=False, soft_wrap=not self.console.is_terminal)

    def result_line(self, result: Result) -> str:
        """Return a run's figures as one line of text."""
        return result.headline()

    def _share(self) -> str:
        """Return in words what has a batch of its own."""
        shards = self.trainer.sync.shards
        return "rank" if shards is None else f"shard, {_count(shards.count, 'shard')} a step"

    def describe(self) -> Summary:
        """Return the model's layers and the current bucket plan; collective."""
        from clcomm.insight.summary import summarize

        model, sync = self.parts.model, self.trainer.sync
        shape = (self._described_samples(), *self.splits.train.image_shape)
        names = getattr(self.trainer.optimizer, "optimizer", self.trainer.optimizer)
        buffers = len(getattr(names, "state_names", ()))
        found = summarize(model, shape, sync.bucket_plan(model), sync.models.of(model).completion_order)
        return replace(found, memory=expected_memory(sync, model, buffers))

    def _described_samples(self) -> int:
        """Return how many samples the forward pass of a description has; kernels may depend on it."""
        return self.options.batch_size

    def run(self) -> Result:
        """Resume, train, save and evaluate as the options say; collective. With --elastic it survives lost ranks."""
        found = self._checkpoints.resume(self.trainer)
        if found:
            done = self.trainer.progress
            self.say(f"resumed {found}: epoch {done.epoch + 1}, step {done.step}")
        while True:
            try:
                with self.traced():
                    self._train()
                    self._checkpoints.close()
                    return self.finish()
            except Exception as error:
                if not self.options.elastic or not elastic.is_lost_peer(error):
                    raise
            self._go_on_with_survivors()

    def traced(self) -> AbstractContextManager[Any]:
        """Return a context that records a timeline if --trace is given; collective."""
        options = self.options
        if not options.trace:
            return nullcontext()
        from clcomm.insight.trace import Trace

        return Trace(
            self.comm, options.trace, device=self.parts.opencl, every=options.trace_every, limit=options.trace_limit
        )

    def _go_on_with_survivors(self) -> None:
        """Move the run to the remaining ranks, at the newest step that one of them completed."""
        began, ranks, old = time.perf_counter(), self.comm.size, self.trainer
        state = MovingState.of(old, self._numbers)
        while True:
            self.comm = elastic.survivors_of(self.comm)
            try:
                state = state.newest(self.comm)
                self._take_over(old, state)
                break
            except Exception as error:
                if not elastic.is_lost_peer(error):
                    raise
        self.console = make_console(self.comm)
        self.say(
            f"{_count(ranks - self.comm.size, 'rank')} of {ranks} lost; going on with {self.comm.size} from step "
            f"{self.trainer.progress.step}, after {time.perf_counter() - began:.2f} s"
        )

    def _take_over(self, old: Trainer, state: MovingState) -> None:
        """Make a trainer for the current ranks, which all have this state; collective."""
        old.model.load_state_dict(state.model)
        self.trainer = trainer = self._make_trainer(make_loader(self.options, self.replicas, self.splits.train))
        trainer.optimizer.load_state_dict(state.optimizer)
        trainer.optimizer.zero_grad()  # those of the interrupted step
        load_state(trainer, state.training)
        if state.policy:
            trainer.sync.load_state_dict(trainer.model, state.policy)
        self._numbers = state.random
        if state.random is not None and self.parts.opencl is not None:
            RandomStream.of(self.parts.opencl).load(state.random)
        trainer.metrics = old.metrics
        trainer.schedule = parse_schedule(self.options.schedule, trainer.total_steps(self.epochs))
        self._checkpoints.close()
        done = trainer.progress.step
        self._checkpoints = Checkpoints(self.options, self.comm, self.splits.name, self._replayed_as, done)
        self._evaluated_at = -1  # a death within an evaluation may have let some ranks complete it

    @property
    def total_steps(self) -> int:
        """The optimizer steps of the whole job, including those before a resume."""
        total = self.trainer.total_steps(self.epochs)
        return min(total, self.options.max_steps or total)

    def steps(self) -> Iterator[Progress]:
        """Train, and yield the progress after each step, so that the caller can act between steps."""
        return self.trainer.train(self.epochs, self.options.max_steps)

    def finish(self) -> Result:
        """Evaluate unless --no-eval, and return the result of the steps; collective."""
        self._evaluate_last_step()
        balancer = self.trainer.balancer
        if balancer is not None and not self.options.quiet:
            shares = ", ".join(map(str, balancer.shares))
            self.say(f"balance: {shares} samples a step after {_count(balancer.changes, 'change')}")
        metrics, comm, sync = self.trainer.metrics, self.comm, self.trainer.sync
        records = self._gather_records()
        return Result(
            steps=metrics.steps,
            epoch_steps=self.trainer.steps_per_epoch,
            images_per_s=float(self.replicas.all_reduce(np.array([metrics.samples_per_s()]), label="metrics")[0]),
            train_loss=self.trainer.train_loss,
            evaluation=self._evaluation,
            step_p50_s=metrics.step_s(0.50),
            step_p95_s=metrics.step_s(0.95),
            data_wait_s=metrics.data_wait_s,
            seconds=metrics.seconds,
            overhead_share=self.trainer.overhead.share(metrics.step_s(0.50)),
            bucket_size=self._bucket_size(),
            optimizer_state_nbytes=getattr(self.trainer.optimizer, "state_nbytes", None),
            memory=self._memory(),
            pipeline=self.parts.pipeline.figures() if self.parts.pipeline else None,
            layout=layout_of(sync.bucket_plan(self.parts.model)),
            decisions=[decision.as_dict() for decision in sync.decisions()],
            summary=self.describe() if self.options.report and not self.parts.pipeline else None,
            history=self._history.as_dict(),
            records=records,
            stats=CommStats.merged((record["stats"] for record in records), comm.size),
        )

    def _bucket_size(self) -> int | None:
        """Return the bucket size in bytes, given or chosen; None: each tensor on its own."""
        sync = self.trainer.sync
        chosen = {decision.what: decision.chosen for decision in sync.decisions()}
        return sync.bucket_size if sync.use_bucketing and chosen.get("bucket_size") != PER_TENSOR else None

    def _memory(self) -> dict[str, int] | None:
        """Return the bytes of the model that this rank has; None where nothing is divided, and before a first step."""
        optimizer = self.trainer.optimizer
        is_divided = isinstance(optimizer, DistributedOptimizer) and optimizer.is_divided
        return optimizer.memory()._asdict() if is_divided else None

    def _gather_records(self) -> list[dict[str, Any]]:
        metrics, guard, opencl = self.trainer.metrics, self.trainer.sync.guard, self.parts.opencl
        return gather_records(
            self.comm,
            last_steps=self._last_steps,
            **({"cold": self._first_steps.figures} if self._first_steps else {}),
            start_s=self._start.parts,
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
        callbacks = run_callbacks(
            options, self.comm, self.console, self.total_steps, trainer.progress.step, self.epochs, self.axis
        )
        with callbacks as shown, ExitStack() as stack:
            trainer.callbacks.append(self._history)
            self.comm.add_observer(self._last_steps)
            stack.callback(self.comm.remove_observer, self._last_steps)
            self._first_steps = FirstSteps(self.comm, self._core_waits, self._start)
            stack.callback(self.comm.remove_observer, self._first_steps)
            trainer.callbacks.extend(shown)
            self._keep_numbers()
            for _ in self.steps():
                self._keep_numbers()
                epoch_done = trainer.epoch_done
                if epoch_done and options.eval:
                    self._evaluate()
                self._checkpoints.save_after_step(trainer, epoch_done)
                if self._checkpoints.copy_after_step(trainer):
                    self._checkpoints.close()
                    raise SystemExit(0)  # other ranks go on
            self._checkpoints.save(trainer)
            self._checkpoints.wait()
            self._evaluate_last_step()  # now, while the loggers are open

    def _keep_numbers(self) -> None:
        """Keep what a step that loses ranks draws again, so that shards have the numbers of an undisturbed run."""
        if self.options.elastic and self.trainer.sync.shards is not None and self.parts.opencl is not None:
            self._numbers = RandomStream.of(self.parts.opencl).state()

    def _evaluate_last_step(self) -> None:
        if self.options.eval and self._evaluated_at != self.trainer.progress.step:
            self._evaluate()

    def _evaluate(self) -> None:
        test = self.splits.test
        assert test is not None  # only --no-eval leaves it out
        with self.comm.phase("evaluate"):
            self.trainer.sync.align_parameters(self.trainer.model)
            self.trainer.sync.broadcast_buffers(self.trainer.model)  # all ranks evaluate one model
            with self.trainer.sync.full_parameters(self.trainer.model):
                evaluation = evaluate(
                    self.replicas, self.parts.predict, test, len(test), self.EVALUATION_BATCH, self.trainer.sync.shards
                )
        self._evaluation, self._evaluated_at = evaluation, self.trainer.progress.step
        for callback in self.trainer.callbacks:
            callback.evaluation_finished(self._evaluated_at, evaluation)


def _update(stage: int, buckets: str) -> str:
    """Return in words what the ranks divide, and what is reduced at a time."""
    if stage < 2:
        return "sharded update" if stage else buckets
    return f"ZeRO {stage}, {buckets}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def open_splits(options: JobOptions, comm: Communicator, console: Console) -> Splits:
    """Return the data that --data names; rank 0 prints which it is. Ranks that wait for it load OpenCL. Collective."""

    def load_opencl() -> None:
        if options.engine == "native":
            load_platforms(comm.cores, options.device)

    def report(line: str) -> None:
        console.print(line, highlight=False)

    return open_data(options.data, comm, report, with_test=options.eval, meanwhile=load_opencl)
