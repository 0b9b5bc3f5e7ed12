"""Overlap: a bucket's all-reduce begins when backward has completed its last gradient, and proceeds during the rest.

Where kernels run in the calling thread, and in PyTorch, a bucket begins at once, in the middle of backward. Where a
device computes by itself, backward is queued whole; then each bucket begins when the device has reached its last
kernel, and moves while the device works on the next ones.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.comm.communicator import Communicator
from clcomm.comm.costs.estimates import sign_test
from clcomm.sync.adapters.adapter import Mark, ModelAdapter
from clcomm.sync.agreement import CHECKS
from clcomm.sync.bucket_plan import BucketPlan, BucketRun
from clcomm.sync.decision import Decision, Trial
from clcomm.sync.shared_space import SharedSpace


class Overlap:
    """Follows one model's backward, and begins the buckets of a plan as they become complete, in their order."""

    def __init__(self, space: SharedSpace):
        self._adapter = space.adapter
        self._run: BucketRun | None = None  # of the next backward; None: it begins nothing
        self._is_paused = False  # whether gradients accumulate, so that nothing may begin
        self._is_first = True  # whether the gradient that is complete next is the first in its backward
        self._marks: dict[int, Mark | None] = {}  # of complete buckets
        self._stop: Callable[[], None] | None = None

    @property
    def plan(self) -> BucketPlan | None:
        """The plan whose buckets the next backward begins, set by `follow`; None: it begins none."""
        return None if self._run is None else self._run.plan

    @property
    def begins(self) -> bool:
        """Whether the next backward begins buckets."""
        return self._run is not None and not self._is_paused

    def run(self, plan: BucketPlan, weight: float = 1.0) -> None:
        """Average all gradients: complete what has begun and begin the rest; with `plan` where nothing was followed.

        weight: see `BucketPlan.run`; 1 where anything can have begun.
        """
        if self._run is not None:
            self._finish(self._run)
        else:
            plan.run(weight)

    def follow(self, plan: BucketPlan | None) -> None:
        """Begin the buckets of `plan` in the backwards to come; None: none. After a `run`, alike on all ranks."""
        if plan is not self.plan:
            self._run = None if plan is None else BucketRun(plan)
        self._start_over()
        if self._stop is None:
            self._stop = self._adapter.watch_gradients(self._action, self.expect_all)

    def stop(self) -> None:
        """Stop following backward; buckets that have begun are not waited for."""
        if self._stop is not None:
            self._stop()
        self._stop = self._run = None

    def expect_all(self) -> None:
        """Note that another backward begins: it has to complete all gradients of a bucket itself."""
        self._is_first = True

    def pause(self, is_paused: bool) -> None:
        """Let gradients accumulate, or no longer; another backward begins in either case."""
        self._is_paused = is_paused
        self.expect_all()

    def begin_rest(self) -> None:
        """Begin what has not begun, after backward: ranks may differ in it, so other collectives have to come later."""
        if self._run is not None:
            self._begin_all(self._run, None)

    def _start_over(self) -> None:
        self._marks.clear()
        if self._run is not None:
            self._run.start_over()
        self.expect_all()

    # --- in backward ---

    def _action(self, name: str) -> Callable[[], None]:
        """Return the action for when this gradient is complete, whichever plan is followed by then."""
        is_first, self._is_first = self._is_first, False
        return partial(self._complete, name, is_first)

    def _complete(self, name: str, is_first: bool) -> None:
        """Note a complete gradient, and begin the buckets that it completes."""
        run = self._run
        if run is None:
            return
        if run.readiness.has_begun(name):
            raise ArgumentError(
                f"gradient of {name!r}: expected sync_gradients() between two backwards, as its all-reduce is in flight"
                "; with overlap, put all micro-batches but the last into no_sync()"
            )
        if is_first:
            run.readiness.expect_all()
            self._marks.clear()  # this backward adds to what an earlier one completed
        completed = run.readiness.complete(name)
        if completed and not self._is_paused:
            self._begin(run, completed)

    def _begin(self, run: BucketRun, completed: list[int]) -> None:
        mark = self._adapter.mark()
        self._marks.update(dict.fromkeys(completed, mark))
        if mark is not None:
            return  # the device has not reached it yet
        while run.readiness.next in self._marks and run.may_begin_early:
            run.begin()
        run.advance()  # fold the buckets that all ranks have begun

    # --- after backward ---

    def _finish(self, run: BucketRun) -> None:
        end = self._adapter.mark() if self._marks else None
        try:
            self._begin_all(run, None if end is None else lambda: not end.is_reached)
            run.wait()
            try:
                run.plan.require_finite()
            finally:  # not before: this rank's own gradients, which it may replace, tell where NaN came from
                run.plan.push_all()
        finally:
            self._start_over()  # so that a caller who catches the error can run backward again

    def _begin_all(self, run: BucketRun, computes: Callable[[], bool] | None) -> None:
        """Begin the buckets that have not begun, each when the device has reached its mark."""
        while not run.is_whole:
            mark = self._marks.get(run.readiness.next)
            if mark is not None:
                _progress_until(mark, run)
            run.begin(mark, computes)


def _progress_until(mark: Mark, run: BucketRun) -> None:
    """Wait for the device; meanwhile move buckets that have begun, unless that takes a core from its kernels."""
    if run.has_begun:
        run.advance()
        while mark.leaves_cores and not mark.is_reached:
            run.advance()
            os.sched_yield()
    mark.wait()


# --- Whether a model's synchronisation overlaps with its backward: as set, or as the first steps show. ---

#: Steps before the first that counts: kernels are built, steps recorded.
_WARM_UP = 4
#: Steps with overlap, and as many without, in turns.
_STEPS_EACH = 12
_ACCUMULATES = "several backwards came before a synchronisation, outside no_sync()"


class OverlapChoice:
    """Overlap of one model, or the choice between overlap and none; making one is collective.

    With "auto" steps with and without overlap take turns, and overlap is kept where its steps took less time, beyond
    the noise; the results are the same. Where overlap cannot gain anything, or is not possible, "auto" decides at once.

    overlap: None where it was decided against. decision: that of "auto", once it is made.

    Args:
        comm: the ranks.
        space: the model's flat arrays.
        order: what is known of the model's backward.
        setting: True or "auto".
        step: number of the synchronisation that is about to run.
    """

    def __init__(self, comm: Communicator, space: SharedSpace, order: CompletionOrder, setting: bool | str, step: int):
        self.overlap: Overlap | None = Overlap(space)
        self.is_settled = setting is True
        self.decision: Decision | None = None
        self._comm = comm
        self._seconds: tuple[list[float], list[float]] = [], []
        self._tried, self._ended_s = 0, 0.0
        refusal = "" if self.is_settled else _agreed_refusal(comm, space, order)
        if refusal:
            self._decide(False, step, f"without measuring: {refusal}")

    @property
    def ways(self) -> tuple[bool, ...]:
        """The ways in which buckets may be reduced in the end: without overlap (False), with it (True), or both."""
        if not self.is_settled:
            return False, True
        return (self.overlap is not None,)

    def run(self, plan: BucketPlan, weight: float) -> None:
        """Average all gradients with overlap, and follow the next backward."""
        assert self.overlap is not None
        self.overlap.run(plan, weight)
        self.overlap.follow(plan)

    def try_step(self, off: BucketPlan, on: BucketPlan, step: int, weight: float) -> None:
        """Run a step of the comparison; `decision` is set after the last one. Collective.

        Args:
            off, on: the plans without and with overlap.
            step: number of this synchronisation.
            weight: see `BucketPlan.run`.
        """
        assert self.overlap is not None
        overlap, is_on = self.overlap, self.overlap.plan is not None
        overlap.run(off, weight)
        now = time.perf_counter()
        if self._tried >= _WARM_UP:
            self._seconds[is_on].append(now - self._ended_s)
        self._tried += 1
        overlap.follow(None if is_on else on)
        if self._tried == _WARM_UP + 2 * _STEPS_EACH:
            self._compare(step)
        self._ended_s = time.perf_counter()

    def _compare(self, step: int) -> None:
        """Compare the mean times of all ranks: overlap, which is not the default, has to be faster beyond the noise."""
        off_s, on_s = self._comm.all_reduce(np.array(self._seconds), "mean", label=CHECKS)
        trials = (
            Trial("off", float(np.median(off_s)), None, _STEPS_EACH),
            Trial("on", float(np.median(on_s)), None, _STEPS_EACH),
        )
        found = sign_test(off_s, on_s)
        noise = "" if found.is_faster else ", which is within the noise"
        self._decide(found.is_faster, step, "time of a step", *trials, reason=f"overlap was {found}{noise}")

    def _decide(self, is_on: bool, step: int, measures: str, *trials: Trial, reason: str = "") -> None:
        self.is_settled = True
        if self.overlap is not None and not is_on:
            self.overlap.stop()
            self.overlap = None
        self.decision = Decision("overlap", "on" if is_on else "off", measures, trials, step, reason)


def _agreed_refusal(comm: Communicator, space: SharedSpace, order: CompletionOrder) -> str:
    """Return why overlap can gain nothing or is not possible, the same on every rank; empty otherwise. Collective."""
    refusals = comm.all_gather_object(_refusal(comm, space, order), label=CHECKS)
    if _ACCUMULATES in refusals:
        return _ACCUMULATES
    return refusals[0] if all(refusals) else ""


def _refusal(comm: Communicator, space: SharedSpace, order: CompletionOrder) -> str:
    if comm.size == 1:
        return "there is one rank"
    if not order.is_reported:
        return "the model's library does not report completed gradients"
    if order.accumulates:
        return _ACCUMULATES
    if comm.hosts == 1 and comm.cores == 1 and space.adapter.mark() is None:
        return "the ranks are on one host, and each computes and communicates on the same core"
    return ""


# --- The order in which backward completes a model's gradients, observed in the first steps. ---

#: Synchronisations without a backward that can be observed, after which the search ends.
_MOST_SYNCHRONISATIONS = 2


class CompletionOrder:
    """Notes the order in which gradients become complete, until rank 0 has seen a backward; all ranks take rank 0's.

    Models of several libraries may be in one job, of which only some report it: all ranks look equally long.

    names: the parameters in that order; empty until it is known, and where the library does not report completion
    (`is_reported`). is_open: whether the order is still being looked for. accumulates: whether several backwards ran
    before a synchronisation, outside `no_sync()`. is_paused: whether gradients are to accumulate; settable.
    """

    def __init__(self, comm: Communicator, adapter: ModelAdapter, is_paused: bool = False):
        self.names: tuple[str, ...] = ()
        self.accumulates, self.is_paused = False, is_paused
        self._comm = comm
        self._seen: dict[str, None] = {}
        self._sent: set[str] = set()
        self._synchronisations = 0
        self._stop: Callable[[], None] | None = adapter.watch_gradients(self._note)
        self.is_reported, self.is_open = self._stop is not None, True

    def _note(self, name: str) -> None:
        self._seen.setdefault(name)
        if not self.is_paused:
            self.accumulates |= name in self._sent
            self._sent.add(name)

    def close(self) -> bool:
        """Take the order that rank 0 saw, after a synchronisation; return whether the search is over. Collective."""
        self._synchronisations += 1
        self._sent.clear()
        self.names = tuple(self._comm.broadcast_object(list(self._seen), label=CHECKS))
        if self.names or self._synchronisations == _MOST_SYNCHRONISATIONS:
            self.is_open = False
            if self._stop is not None:
                self._stop()
        return not self.is_open
