"""Overlap: a bucket's all-reduce begins when backward has completed its last gradient, and goes on behind the rest.

Where kernels run in the calling thread, and in PyTorch, a bucket begins at once, in the middle of backward. Where a
device computes by itself, backward is queued whole; then each bucket begins when the device has come to its last
kernel, and moves while the device works on the next ones.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

from clcomm.bucket_plan import BucketPlan
from clcomm.errors import ArgumentError
from clcomm.handle import Handle
from clcomm.replica import Mark
from clcomm.shared_space import SharedSpace


class Overlap:
    """Follows one model's backward, and begins the buckets of a plan as they become complete, in their order.

    is_paused: whether gradients are to accumulate, so that nothing may begin. plan: that which the next backward is
    followed for; None: nothing begins in it. `follow` sets it.
    """

    def __init__(self, space: SharedSpace, is_paused: Callable[[], bool]):
        self.plan: BucketPlan | None = None
        self._replica = space.replica
        self._is_paused = is_paused
        self._is_first = True  # whether the gradient that is complete next is the first in its backward
        self._marks: dict[int, Mark | None] = {}  # of complete buckets
        self._handles: list[Handle] = []
        self._next = 0  # the first bucket that has not begun
        self._stop: Callable[[], None] | None = None

    def run(self, plan: BucketPlan, check_finite: bool, weight: float = 1.0) -> None:
        """Average all gradients: complete what has begun and begin the rest; with `plan` where nothing was followed.

        weight: see `BucketPlan.run`; 1 where anything can have begun.
        """
        if self.plan is not None:
            self._finish(self.plan, check_finite)
        else:
            plan.run(check_finite, weight)

    def follow(self, plan: BucketPlan | None) -> None:
        """Begin the buckets of `plan` in the backwards to come; None: none. After a `run`, on all ranks alike."""
        if plan is not None and plan is not self.plan:
            self._starts = plan.starts()
            self._buckets_of: dict[str, list[int]] = {}
            for bucket in plan.buckets:
                for slot in bucket.slots:
                    self._buckets_of.setdefault(slot.name, []).append(bucket.index)
        self.plan = plan
        self._start_over()
        if self._stop is None:
            self._stop = self._replica.watch_gradients(self._action, self.expect_all)

    def stop(self) -> None:
        """Follow backward no more; what has begun is not waited for."""
        if self._stop is not None:
            self._stop()
        self._stop = self.plan = None

    def expect_all(self) -> None:
        """Note that another backward begins: it has to complete all gradients of a bucket itself."""
        self._is_first = True

    def begin_rest(self) -> None:
        """Begin what has not begun, after backward: only then may other collectives come, as ranks may differ in it."""
        if self.plan is not None:
            self._begin_all(self.plan, None)

    def _start_over(self) -> None:
        self._marks, self._handles, self._next = {}, [], 0
        self.expect_all()

    # --- in backward ---

    def _action(self, name: str) -> Callable[[], None]:
        """Return what is to be done where this gradient is complete, whatever plan is followed by then."""
        is_first, self._is_first = self._is_first, False
        return partial(self._complete, name, is_first)

    def _complete(self, name: str, is_first: bool) -> None:
        """Note a complete gradient, and begin what can be begun with it."""
        plan = self.plan
        if plan is None:
            return
        if self._buckets_of[name][0] < self._next:
            raise ArgumentError(
                f"gradient of {name!r}: expected sync_gradients() between two backwards, as its average is on the way; "
                "with overlap, all but the last micro-batch belong into no_sync()"
            )
        if is_first:
            self._missing = [{slot.name for slot in bucket.slots} for bucket in plan.buckets]
            self._marks.clear()  # this backward adds to what an earlier one completed
        complete = []
        for index in self._buckets_of[name]:
            self._missing[index].discard(name)
            if not self._missing[index]:
                complete.append(index)
        if complete and not self._is_paused():
            self._begin(plan, complete)

    def _begin(self, plan: BucketPlan, complete: list[int]) -> None:
        mark = self._replica.mark()
        self._marks.update(dict.fromkeys(complete, mark))
        if mark is not None:
            return  # the device is on its way there
        while self._next in self._marks and self._starts[self._next] is not None:
            self._start(plan)
        if self._handles:
            self._handles[-1].done()  # fold what all ranks have begun

    def _start(self, plan: BucketPlan, mark: Mark | None = None, computes: Callable[[], bool] | None = None) -> None:
        """Begin the next bucket; one that a hook reduces is reduced here, as a whole.

        computes: says whether the device is at work meanwhile; what the caller spends on the all-reduce is hidden then.
        """
        prepared, start = plan.prepared[self._next], self._starts[self._next]
        plan.pull(prepared.bucket, mark)
        if start is None:
            prepared.reduce()
        else:
            self._handles.append(start(computes))
        self._next += 1

    # --- after backward ---

    def _finish(self, plan: BucketPlan, check_finite: bool) -> None:
        end = self._replica.mark() if self._marks else None
        try:
            self._begin_all(plan, None if end is None else lambda: not end.is_reached)
            for handle in self._handles:
                handle.wait()
            plan.push_all()
            if check_finite:
                for prepared in plan.prepared:
                    plan.require_finite(prepared)
        finally:
            self._start_over()  # whoever passes an error over goes on with another backward

    def _begin_all(self, plan: BucketPlan, computes: Callable[[], bool] | None) -> None:
        """Begin the buckets that have not begun, each when the device has come to its mark."""
        while self._next < len(plan.buckets):
            mark = self._marks.get(self._next)
            if mark is not None:
                self._progress_until(mark)
            self._start(plan, mark, computes)

    def _progress_until(self, mark: Mark) -> None:
        """Wait for the device; meanwhile move what has begun, unless that would take a core from its kernels."""
        if self._handles:
            self._handles[-1].done()
            while mark.leaves_cores and not mark.is_reached:
                self._handles[-1].done()
                os.sched_yield()
        mark.wait()
