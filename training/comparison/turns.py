"""Train the same job once for each variant of synchronisation, in turns.

Each variant has its own Communicator, model and loader, and trains the whole job from the same start. They take turns
of a few steps, in an order that is drawn for each round and the same on every rank, so that other load on the machine
affects all of them alike. A window's first step does not count: it loads the variant's memory into the caches, and the
ranks do not begin it at the same time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from clcomm.comm.communicator import AUTO, Communicator
from clcomm.comm.stats.steps import WARM_UP_STEPS
from clcomm.insight.measure.timing import TimingSchedule, time_calls
from training.communication_clock import CommunicationClock, Lap
from training.comparison.options import ComparisonOptions
from training.comparison.outcome import Outcome
from training.comparison.variants import Variant
from training.data.datasets import Splits
from training.metrics import StepRecord
from training.session import Session
from training.trainer import Callback

if TYPE_CHECKING:
    from rich.console import Console

#: The approximate number of windows of a run, and the fewest and the most steps of one.
_WINDOWS, _SHORTEST, _LONGEST = 24, 3, 20
#: How each variant's reductions are timed alone, at the end.
_ALONE = TimingSchedule(calls=10, windows=12, warmup=10)


@dataclass(frozen=True)
class Window:
    """A rank's mean step time, communication time and number of images over the steps of one turn but the first."""

    step_s: float
    communication_s: float
    images: float


class VariantRun(Callback):
    """One variant's run, which takes a few steps at each turn; creating one is collective."""

    def __init__(self, variant: Variant, options: ComparisonOptions, splits: Splits, console: Console):
        self.variant = variant
        self.clock = CommunicationClock()
        settings = variant.applied_to(options)
        self.comm = Communicator(
            bucket_size=settings.bucket_size, use_bucketing=not settings.no_bucketing, transport=settings.transport,
            observers=[self.clock],
        )  # fmt: skip
        self.session = Session(settings, self.comm, splits, console)
        self.session.trainer.callbacks.append(self)
        self.windows: list[Window] = []
        self.steps = 0
        self._steps = self.session.steps()
        self._records: list[tuple[StepRecord, float]] = []  # of this turn, each with its seconds in collectives
        self._lap = Lap(self.clock)

    @property
    def moved_by(self) -> str:
        """The transports that carried the gradients; not the requested one if shared memory had no room."""
        return "+".join(sorted(self.clock.moved_by)) or "-"

    def traced(self) -> AbstractContextManager[Any]:
        """Return a context that records this variant's turns if --trace is given; collective."""
        return self.session.traced()

    def advance(self, steps: int, is_measured: bool) -> None:
        """Take `steps` steps, or those that are left; keep them as a window if `is_measured`."""
        self._records.clear()
        settled = self._is_settled
        for _ in zip(range(steps), self._steps, strict=False):
            pass
        self.steps += len(self._records)
        if is_measured:
            self.windows.append(self._window() if settled else Window(math.nan, math.nan, math.nan))

    def step_finished(self, record: StepRecord) -> None:
        self._records.append((record, self._lap.seconds()))

    @property
    def _is_settled(self) -> bool:
        """Whether the bucket size is final."""
        decided = [decision.what for decision in self.session.trainer.sync.decisions()]
        return self.variant.bucket_size != AUTO or "bucket_size" in decided

    def _window(self) -> Window:
        records = self._records[1:] or self._records
        seconds = sum(record.seconds for record, _ in records)
        samples = sum(record.samples for record, _ in records)
        communication_s = sum(seconds for _, seconds in records)
        return Window(seconds / len(records), communication_s / len(records), samples / len(records))

    def finish(self) -> Outcome:
        """Take the remaining steps and return the outcome, with times averaged over the ranks; collective."""
        for _ in self._steps:
            pass
        own = np.array([(w.step_s, w.communication_s, w.images) for w in self.windows], np.float64)
        result = self.session.finish()
        columns = self.comm.all_gather(own.reshape(-1, 3)).mean(0).T
        plan = self.session.trainer.sync.bucket_plan(self.session.parts.model)
        buckets = tuple(bucket.nbytes for bucket in plan)
        step_s, communication_s, images = columns
        return Outcome(
            self.variant, buckets, self.moved_by, self.session, result, step_s, communication_s,
            images=self.comm.size * images, alone_s=np.full(1, math.nan),  # set by `with_times_alone`
        )  # fmt: skip


def compare(variants: Sequence[Variant], options: ComparisonOptions, splits: Splits, console: Console) -> list[Outcome]:
    """Train all variants in turns and return their outcomes in the same order; collective."""
    runs = [VariantRun(variant, options, splits, console) for variant in variants]
    first = runs[0].session
    console.print(first.headline(), highlight=False)
    console.print(f"in turns: {'; '.join(variant.name for variant in variants)}", highlight=False)
    with ExitStack() as traces:
        for run in runs:
            traces.enter_context(run.traced())
        with _shown(first.comm, console, len(variants) * first.total_steps, options.quiet) as display:
            for run in runs:
                run.session.trainer.callbacks.append(display)
            take_turns([run.advance for run in runs], first.total_steps, options.seed)
        outcomes = [run.finish() for run in runs]
    return outcomes if first.comm.size == 1 else with_times_alone(outcomes)


class _ReductionsCase:
    """A step's reductions of a variant, as a case for `time_calls`."""

    def __init__(self, session: Session):
        self.once = session.trainer.sync.models.of(session.parts.model).reductions()


def with_times_alone(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return the outcomes with `alone_s` measured, in turns; collective."""
    cases, control = [_ReductionsCase(outcome.session) for outcome in outcomes], outcomes[0].session.comm
    seconds = time_calls(cases, control, _ALONE).reshape(len(outcomes), _ALONE.windows, _ALONE.calls)
    return [replace(outcome, alone_s=own) for outcome, own in zip(outcomes, np.median(seconds, axis=2), strict=True)]


class _StepsOnly(Callback):
    """Passes steps on to a display, but not the ends of epochs, which come once for each variant."""

    def __init__(self, display: Callback):
        self._display = display

    def step_finished(self, record: StepRecord) -> None:
        self._display.step_finished(record)


@contextmanager
def _shown(comm: Communicator, console: Console, total_steps: int, quiet: bool) -> Iterator[Callback]:
    """Show on rank 0 the progress of all runs together."""
    if quiet or comm.rank != 0:
        yield Callback()
        return
    from training.progress_display import ProgressDisplay  # here, because only rank 0 needs Rich

    with closing(ProgressDisplay(console, comm.size, total_steps)) as display:
        yield _StepsOnly(display)


def take_turns(advances: Sequence[Callable[[int, bool], None]], total_steps: int, seed: int) -> None:
    """Call `advance(steps, is_measured)` for each of several runs, in rounds, until all their steps are done.

    Each round's order is drawn from `seed`. The first round warms up and is not measured.
    """
    warm_up = min(WARM_UP_STEPS, total_steps // 4)
    window = min(max((total_steps - warm_up) // _WINDOWS, _SHORTEST), _LONGEST)
    bounds = [*([0] if warm_up else []), *range(warm_up, total_steps, window), total_steps]
    for number, (start, stop) in enumerate(pairwise(bounds)):
        for index in np.random.default_rng([seed, number]).permutation(len(advances)):
            advances[index](stop - start, start >= warm_up)
