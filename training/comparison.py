"""The same training several times at once, each with its own way to synchronise, taking turns.

Every variant has a Communicator, a model and a loader of its own and trains the whole job from the same start. They
take turns, a few steps each, in an order drawn anew for each round and the same on every rank, so that whatever else
the machine does meets all of them alike. A window's first step does not count: it brings the variant's memory back
into the caches and meets ranks that are not all there yet.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from clcomm.communicator import AUTO, Communicator
from clcomm.intervals import Estimate, estimate
from clcomm.measure import Schedule, time_calls
from training.communication_clock import CommunicationClock, Lap
from training.datasets import Splits
from training.metrics import WARM_UP_STEPS, StepRecord
from training.result import Result
from training.session import Session
from training.trainer import Callback
from training.variants import PER_TENSOR, Variant

if TYPE_CHECKING:
    from rich.console import Console

#: A run is cut into about so many windows, of at least and at most so many steps.
_WINDOWS, _SHORTEST, _LONGEST = 24, 3, 20
#: How often each variant's reductions are timed by themselves, at the end.
_ALONE = Schedule(calls=10, windows=12, warmup=10)


@dataclass(frozen=True)
class Window:
    """What the steps of one turn took on a rank, each on average: in all, and in collectives that made it wait.

    `images` is how many a step had. Its first step is left out where there are others.
    """

    step_s: float
    communication_s: float
    images: float


@dataclass(frozen=True)
class Timing:
    """A variant's figures with their intervals, over windows; `ratio` is its step's time over the reference's.

    Windows of one round are compared with each other, so that what slowed a whole round down cancels out.
    `alone_ratio` compares `alone_s` like that.
    """

    step_s: Estimate
    communication_s: Estimate
    images_per_s: Estimate
    ratio: Estimate
    alone_s: Estimate
    alone_ratio: Estimate

    @property
    def communication_share(self) -> float:
        return self.communication_s.median / self.step_s.median


class Contender(Callback):
    """One variant's run, which goes on for a few steps whenever it is its turn; making one is collective."""

    def __init__(self, variant: Variant, options: Namespace, splits: Splits, console: Console):
        self.variant = variant
        self.clock = CommunicationClock()
        self._settings = settings = variant.applied_to(options)
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
        """What carried the gradients, which is not what was asked for where shared memory had no room."""
        return "+".join(sorted(self.clock.moved_by)) or "-"

    def traced(self) -> AbstractContextManager[Any]:
        """Return a context in which this variant's turns are recorded, where a timeline is asked for; collective."""
        return self.session.traced(self._settings)

    def advance(self, count: int, counts: bool) -> None:
        """Take so many steps, or those that are left, as one window."""
        self._records.clear()
        settled = self._is_settled
        for _ in zip(range(count), self._steps, strict=False):
            pass
        self.steps += len(self._records)
        if counts:
            self.windows.append(self._window() if settled else Window(math.nan, math.nan, math.nan))

    def step_finished(self, record: StepRecord) -> None:
        self._records.append((record, self._lap.seconds()))

    @property
    def _is_settled(self) -> bool:
        """Whether nothing is being tried out any more."""
        decided = [decision.what for decision in self.session.trainer.sync.decisions()]
        return self.variant.bucket_size != AUTO or "bucket_size" in decided

    def _window(self) -> Window:
        records = self._records[1:] or self._records
        seconds = sum(record.seconds for record, _ in records)
        samples = sum(record.samples for record, _ in records)
        communication_s = sum(seconds for _, seconds in records)
        return Window(seconds / len(records), communication_s / len(records), samples / len(records))

    def finish(self) -> Outcome:
        """Let the run come to its end and return all of it, times averaged over the ranks; collective."""
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
            images=self.comm.size * images, alone_s=np.full(1, math.nan),  # until `with_times_alone`
        )  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """A variant's finished run: its plan in bytes, what moved the gradients, and the windows' figures (windows,).

    `images` is how many the whole world takes in a step. Windows in which "auto" was still trying sizes are NaN.
    `alone_s` is what a step's reductions take with nothing between them, in windows of its own: no rank waits for one
    that computes. NaN in a world of one.
    """

    variant: Variant
    buckets: tuple[int, ...]
    moved_by: str
    session: Session
    result: Result
    step_s: np.ndarray
    communication_s: np.ndarray
    images: np.ndarray
    alone_s: np.ndarray

    @property
    def bucket_size(self) -> int | None:
        """Bytes of a bucket at the most, with "auto" those it chose; None: each tensor on its own."""
        return self.result.bucket_size if isinstance(self.variant.bucket_size, str) else self.variant.bucket_size

    def timing(self, reference: Outcome) -> Timing:
        """Return the figures with their intervals, the ratios to another outcome of the same rounds among them."""
        figures = (
            self.step_s, self.communication_s, self.step_s / reference.step_s, self.alone_s,
            self.alone_s / reference.alone_s,
        )  # fmt: skip
        step_s, communication_s, *ratios = (estimate(values[np.isfinite(values)]) for values in figures)
        images = self.images[np.isfinite(self.images)]
        return Timing(
            step_s, communication_s, step_s.rate_of(float(images.mean()) if images.size else math.nan), *ratios
        )


def compare(variants: Sequence[Variant], options: Namespace, splits: Splits, console: Console) -> list[Outcome]:
    """Train all variants, taking turns, and return their outcomes in the same order; collective."""
    contenders = [Contender(variant, options, splits, console) for variant in variants]
    first = contenders[0].session
    console.print(first.headline(), highlight=False)
    console.print(f"in turns: {'; '.join(variant.name for variant in variants)}", highlight=False)
    with ExitStack() as traces:
        for contender in contenders:
            traces.enter_context(contender.traced())
        with _shown(first.comm, console, len(variants) * first.total_steps, options.quiet) as display:
            for contender in contenders:
                contender.session.trainer.callbacks.append(display)
            take_turns([contender.advance for contender in contenders], first.total_steps, options.seed)
        outcomes = [contender.finish() for contender in contenders]
    return outcomes if first.comm.size == 1 else with_times_alone(outcomes)


class _Alone:
    """A variant's reductions of a step, for `time_calls`."""

    def __init__(self, session: Session):
        self.once = session.trainer.sync.reductions(session.parts.model)


def with_times_alone(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return the outcomes with what their reductions take alone, measured in turns; collective."""
    cases, control = [_Alone(outcome.session) for outcome in outcomes], outcomes[0].session.comm
    seconds = time_calls(cases, control, _ALONE).reshape(len(outcomes), _ALONE.windows, _ALONE.calls)
    return [replace(outcome, alone_s=own) for outcome, own in zip(outcomes, np.median(seconds, axis=2), strict=True)]


class _StepsOnly(Callback):
    """Passes on steps: the same epoch ends in every run."""

    def __init__(self, display: Callback):
        self._display = display

    def step_finished(self, record: StepRecord) -> None:
        self._display.step_finished(record)


@contextmanager
def _shown(comm: Communicator, console: Console, total_steps: int, quiet: bool) -> Iterator[Callback]:
    """Show on rank 0 how far all runs together have come."""
    if quiet or comm.rank != 0:
        yield Callback()
        return
    from training.progress import ProgressDisplay  # here, because one rank needs Rich

    with closing(ProgressDisplay(console, comm.size, total_steps)) as display:
        yield _StepsOnly(display)


def take_turns(advances: Sequence[Callable[[int, bool], None]], total_steps: int, seed: int) -> None:
    """Call `advance(steps, counts)` for each of several runs, in rounds, until all their steps are done.

    Each round's order is drawn from `seed`. The first round warms up and does not count.
    """
    warm_up = min(WARM_UP_STEPS, total_steps // 4)
    window = min(max((total_steps - warm_up) // _WINDOWS, _SHORTEST), _LONGEST)
    bounds = [*([0] if warm_up else []), *range(warm_up, total_steps, window), total_steps]
    for number, (start, stop) in enumerate(pairwise(bounds)):
        for index in np.random.default_rng([seed, number]).permutation(len(advances)):
            advances[index](stop - start, start >= warm_up)


def reference_of(outcomes: Sequence[Outcome]) -> Outcome:
    """Return what the others are compared with: per tensor."""
    return next(outcome for outcome in outcomes if outcome.variant.name == PER_TENSOR)
