"""A step's buckets: each one's reduction begins once backward has completed it, in the same order on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable

from clcomm.comm.collectives.in_flight import Handle
from clcomm.sync.adapters.adapter import Mark
from clcomm.sync.bucket_plan import BucketPlan


class Readiness:
    """Which buckets backward has completed, and which of them is the next to begin.

    Attributes:
        next: the first bucket that has not begun.

    Args:
        buckets: the names of each bucket's parameters, in the order in which the buckets begin.
    """

    def __init__(self, buckets: Iterable[Iterable[str]]):
        self._names = [frozenset(names) for names in buckets]
        self._buckets_of: dict[str, list[int]] = {}
        for index, names in enumerate(self._names):
            for name in names:
                self._buckets_of.setdefault(name, []).append(index)
        self.start_over()

    def start_over(self) -> None:
        """Expect all gradients of all buckets, none of which has begun."""
        self.next = 0
        self.expect_all()

    def expect_all(self) -> None:
        """Expect all gradients again, from a backward that adds to an earlier one's."""
        self._missing = [set(names) for names in self._names]

    def complete(self, name: str) -> list[int]:
        """Note a complete gradient, and return the buckets that it completes."""
        completed = []
        for index in self._buckets_of[name]:
            self._missing[index].discard(name)
            if not self._missing[index]:
                completed.append(index)
        return completed

    def has_begun(self, name: str) -> bool:
        """Return whether a bucket with this gradient has begun."""
        return self._buckets_of[name][0] < self.next

    @property
    def is_next_complete(self) -> bool:
        """Whether there is a next bucket, and all of its gradients are complete."""
        return self.next < len(self._missing) and not self._missing[self.next]


class BucketRun:
    """The reductions of a plan's buckets that have begun in one step; making one is collective the first time.

    Args:
        plan: the buckets.
        besides: names in them that no backward completes.
    """

    def __init__(self, plan: BucketPlan, besides: Container[str] = ()):
        self.plan, self._starts = plan, plan.starts()
        names = [[place.name for place in bucket.ranges if place.name not in besides] for bucket in plan.buckets]
        self.readiness = Readiness(names)
        self._handles: list[Handle] = []

    def start_over(self) -> None:
        """Forget what has begun; it is not waited for."""
        self._handles = []
        self.readiness.start_over()

    @property
    def has_begun(self) -> bool:
        """Whether a bucket has begun that no hook reduces."""
        return bool(self._handles)

    @property
    def is_whole(self) -> bool:
        """Whether all buckets have begun."""
        return self.readiness.next == len(self._starts)

    @property
    def may_begin_early(self) -> bool:
        """Whether the next bucket, if there is one, may begin within backward; a hook reduces it as a whole."""
        return not self.is_whole and self._starts[self.readiness.next] is not None

    def begin(self, mark: Mark | None = None, computes: Callable[[], bool] | None = None) -> None:
        """Pull the next bucket and begin its all-reduce; one that a hook reduces is reduced here, as a whole.

        Args:
            mark: the bucket is pulled when the device reaches it; None: now.
            computes: whether the device is computing; time that the caller spends on the all-reduce is hidden then.
        """
        prepared, start = self.plan.prepared[self.readiness.next], self._starts[self.readiness.next]
        self.plan.pull(prepared.bucket, mark)
        if start is None:
            prepared.reduce()
        else:
            self._handles.append(start(computes))
        self.readiness.next += 1

    def begin_rest(self) -> None:
        """Begin all buckets that have not begun."""
        while not self.is_whole:
            self.begin()

    def advance(self) -> bool:
        """Move what has begun without blocking; return whether the last of it is complete."""
        return not self._handles or self._handles[-1].done()

    def wait(self) -> None:
        """Complete what has begun."""
        for handle in self._handles:
            handle.wait()
