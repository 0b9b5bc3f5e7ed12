"""Overlap: a bucket's all-reduce begins when backward has completed its last gradient, and proceeds during the rest.

Where kernels run in the calling thread, and in PyTorch, a bucket begins at once, in the middle of backward. Where a
device computes by itself, backward is queued whole; then each bucket begins when the device has reached its last
kernel, and moves while the device works on the next ones.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

from clcomm.base.errors import ArgumentError
from clcomm.sync.adapters.adapter import Mark
from clcomm.sync.bucket_plan import BucketPlan
from clcomm.sync.bucket_run import BucketRun
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
