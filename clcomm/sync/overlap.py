"""Overlap: a bucket's all-reduce begins when backward has completed its last gradient, and proceeds during the rest.

Where kernels run in the calling thread, and in PyTorch, a bucket begins at once, in the middle of backward. Where a
device computes by itself, backward is queued whole; then each bucket begins when the device has reached its last
kernel, and moves while the device works on the next ones.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from functools import partial

from clcomm.adapters.adapter import Mark
from clcomm.collectives.handle import Handle
from clcomm.errors import ArgumentError
from clcomm.sync.bucket_plan import BucketPlan
from clcomm.sync.shared_space import SharedSpace

#: Those that exist; what ends is not held here.
_all: weakref.WeakSet[Overlap] = weakref.WeakSet()


def begins_in_backward(model: object) -> bool:
    """Return whether a model's next backward begins buckets, so that no other may follow before their use."""
    return any(each.model is model and each.begins for each in _all)


class Overlap:
    """Follows one model's backward, and begins the buckets of a plan as they become complete, in their order.

    plan: the one whose buckets the next backward begins, set by `follow`; None: it begins none.
    """

    def __init__(self, space: SharedSpace):
        self.plan: BucketPlan | None = None
        self.model = space.model
        self._adapter = space.adapter
        self._is_paused = False  # whether gradients accumulate, so that nothing may begin
        self._is_first = True  # whether the gradient that is complete next is the first in its backward
        self._marks: dict[int, Mark | None] = {}  # of complete buckets
        self._handles: list[Handle] = []
        self._next = 0  # the first bucket that has not begun
        self._stop: Callable[[], None] | None = None
        _all.add(self)

    @property
    def begins(self) -> bool:
        """Whether the next backward begins buckets."""
        return self.plan is not None and not self._is_paused

    def run(self, plan: BucketPlan, weight: float = 1.0) -> None:
        """Average all gradients: complete what has begun and begin the rest; with `plan` where nothing was followed.

        weight: see `BucketPlan.run`; 1 where anything can have begun.
        """
        if self.plan is not None:
            self._finish(self.plan)
        else:
            plan.run(weight)

    def follow(self, plan: BucketPlan | None) -> None:
        """Begin the buckets of `plan` in the backwards to come; None: none. After a `run`, alike on all ranks."""
        if plan is not None and plan is not self.plan:
            self._starts = plan.starts()
            self._buckets_of: dict[str, list[int]] = {}
            for bucket in plan.buckets:
                for place in bucket.ranges:
                    self._buckets_of.setdefault(place.name, []).append(bucket.index)
        self.plan = plan
        self._start_over()
        if self._stop is None:
            self._stop = self._adapter.watch_gradients(self._action, self.expect_all)

    def stop(self) -> None:
        """Stop following backward; buckets that have begun are not waited for."""
        if self._stop is not None:
            self._stop()
        self._stop = self.plan = None

    def expect_all(self) -> None:
        """Note that another backward begins: it has to complete all gradients of a bucket itself."""
        self._is_first = True

    def pause(self, is_paused: bool) -> None:
        """Let gradients accumulate, or no longer; another backward begins in either case."""
        self._is_paused = is_paused
        self.expect_all()

    def begin_rest(self) -> None:
        """Begin what has not begun, after backward: ranks may differ in it, so other collectives have to come later."""
        if self.plan is not None:
            self._begin_all(self.plan, None)

    def _start_over(self) -> None:
        self._marks, self._handles, self._next = {}, [], 0
        self.expect_all()

    # --- in backward ---

    def _action(self, name: str) -> Callable[[], None]:
        """Return the action for when this gradient is complete, whichever plan is followed by then."""
        is_first, self._is_first = self._is_first, False
        return partial(self._complete, name, is_first)

    def _complete(self, name: str, is_first: bool) -> None:
        """Note a complete gradient, and begin the buckets that it completes."""
        plan = self.plan
        if plan is None:
            return
        if self._buckets_of[name][0] < self._next:
            raise ArgumentError(
                f"gradient of {name!r}: expected sync_gradients() between two backwards, as its all-reduce is in flight"
                "; with overlap, put all micro-batches but the last into no_sync()"
            )
        if is_first:
            self._missing = [{place.name for place in bucket.ranges} for bucket in plan.buckets]
            self._marks.clear()  # this backward adds to what an earlier one completed
        complete = []
        for index in self._buckets_of[name]:
            self._missing[index].discard(name)
            if not self._missing[index]:
                complete.append(index)
        if complete and not self._is_paused:
            self._begin(plan, complete)

    def _begin(self, plan: BucketPlan, complete: list[int]) -> None:
        mark = self._adapter.mark()
        self._marks.update(dict.fromkeys(complete, mark))
        if mark is not None:
            return  # the device has not reached it yet
        while self._next in self._marks and self._starts[self._next] is not None:
            self._start(plan)
        if self._handles:
            self._handles[-1].done()  # fold the buckets that all ranks have begun

    def _start(self, plan: BucketPlan, mark: Mark | None = None, computes: Callable[[], bool] | None = None) -> None:
        """Begin the next bucket; one that a hook reduces is reduced here, as a whole.

        computes: whether the device is computing; time that the caller spends on the all-reduce is hidden then.
        """
        prepared, start = plan.prepared[self._next], self._starts[self._next]
        plan.pull(prepared.bucket, mark)
        if start is None:
            prepared.reduce()
        else:
            self._handles.append(start(computes))
        self._next += 1

    # --- after backward ---

    def _finish(self, plan: BucketPlan) -> None:
        end = self._adapter.mark() if self._marks else None
        try:
            self._begin_all(plan, None if end is None else lambda: not end.is_reached)
            for handle in self._handles:
                handle.wait()
            try:
                plan.require_finite()
            finally:  # not before: this rank's own gradients, which it may replace, tell where NaN came from
                plan.push_all()
        finally:
            self._start_over()  # so that a caller who catches the error can run backward again

    def _begin_all(self, plan: BucketPlan, computes: Callable[[], bool] | None) -> None:
        """Begin the buckets that have not begun, each when the device has reached its mark."""
        while self._next < len(plan.buckets):
            mark = self._marks.get(self._next)
            if mark is not None:
                self._progress_until(mark)
            self._start(plan, mark, computes)

    def _progress_until(self, mark: Mark) -> None:
        """Wait for the device; meanwhile move buckets that have begun, unless that takes a core from its kernels."""
        if self._handles:
            self._handles[-1].done()
            while mark.leaves_cores and not mark.is_reached:
                self._handles[-1].done()
                os.sched_yield()
        mark.wait()
