"""A model's buckets, agreed between the ranks and prepared, and their reduction, which every synchronisation runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.base.flat_space.buckets import Bucket
from clcomm.base.flat_space.layout import FlatLayout
from clcomm.comm.collectives.in_flight import Handle
from clcomm.comm.communicator import Communicator
from clcomm.comm.stats.comm_stats import Phase
from clcomm.sync import between_hosts
from clcomm.sync.adapters.adapter import FlatArrays, GradientMoves, Mark
from clcomm.sync.agreement import require_agreement
from clcomm.sync.compression import CommHook
from clcomm.sync.compression.ranks import PreparedHook, Task
from clcomm.sync.divergence import raise_non_finite
from clcomm.sync.model_ranks import apply_weight

#: The label under which the Communicator's stats count gradients.
GRADIENTS = "gradients"


class PlanSettings(NamedTuple):
    """How gradients are cut into buckets: the arguments of `FlatLayout.buckets`; by default per tensor."""

    bucket_size: int | None = None
    first_bucket_size: int | None = None
    split_tensors: bool = False
    order: tuple[str, ...] = ()

    def following(self, order: tuple[str, ...], layout: FlatLayout) -> PlanSettings:
        """Return settings that cut in the order of completion; these settings where the buckets are the same."""
        ordered = self._replace(order=order)
        return self if layout.buckets(**ordered._asdict()) == layout.buckets(**self._asdict()) else ordered


class GradientSpace(Protocol):
    """Flat arrays of gradients, and what copies them there: a SharedSpace, or Horovod's of an optimizer."""

    @property
    def layout(self) -> FlatLayout:
        """The place of each gradient."""

    @property
    def arrays(self) -> FlatArrays:
        """The arrays, of which a plan uses `grads` and `reduced`."""

    @property
    def adapter(self) -> GradientMoves:
        """Copies gradients to `arrays.grads`, and their means from `arrays.reduced`."""


@dataclass(frozen=True)
class PreparedBucket:
    """A bucket and its reduction, from `own` to `mean`, which is a sum where `op` is one.

    hook: what reduces it; None: a plain all-reduce.
    """

    bucket: Bucket
    own: np.ndarray
    mean: np.ndarray
    op: str
    reduce: Callable[[], None]
    hook: CommHook | None

    @classmethod
    def of(
        cls, comm: Communicator, space: GradientSpace, bucket: Bucket, hook: CommHook | None, op: str
    ) -> PreparedBucket:
        """Prepare a bucket; collective."""
        own = space.arrays.grads[bucket.start : bucket.stop].view(bucket.dtype)
        mean = space.arrays.reduced[bucket.start : bucket.stop].view(bucket.dtype)
        label, nbytes, index = GRADIENTS, bucket.nbytes, bucket.index
        reduce: Callable[[], None]
        if hook is None or own.dtype.kind != "f" or own.itemsize < 4 or not own.size:
            reduce = comm.all_reduce_init(own, op, out=mean, label=label, nbytes=nbytes, bucket=index)
            return cls(bucket, own, mean, op, reduce, None)
        call: Callable[[], int | None]
        out = mean
        if between_hosts.is_for(comm, hook, own, mean):
            call = between_hosts.prepared(comm, hook, space.arrays, space.adapter.codec, bucket, own, mean, label)
        elif isinstance(hook, PreparedHook):
            call = hook.prepare(Task(own, comm, mean, bucket, space.arrays.grads, space.adapter.codec))
        else:
            if comm.is_common_on_host(mean):  # a hook may write intermediate results, which other ranks must not see
                out = comm.allocate(mean.nbytes).view(mean.dtype)
            call = partial(_call_hook, hook, own, comm, out, bucket)
        reduce = partial(comm.run_as_all_reduce, call, label=label, nbytes=nbytes, bucket=index)
        if out is not mean:
            reduce = partial(_reduce_and_copy, reduce, out, mean)
        return cls(bucket, own, mean, op, reduce, hook)

    def prepare_start(self, comm: Communicator) -> Callable[..., Handle] | None:
        """Return the call that begins the bucket's all-reduce, None where a hook reduces it; collective."""
        if self.hook is not None:
            return None
        label, nbytes, index = GRADIENTS, self.bucket.nbytes, self.bucket.index
        return comm.all_reduce_async_init(self.own, self.op, out=self.mean, label=label, nbytes=nbytes, bucket=index)


class BucketPlan:
    """The buckets of one model, in the order in which they are reduced; making one is collective.

    `run` averages all gradients; a BucketRun begins the buckets one by one.

    Args:
        comm: the ranks.
        space: the flat arrays.
        buckets: of their layout, the same on all ranks.
        op: "mean" or "sum".
        hook: averages each bucket of floating-point numbers; None: a plain all-reduce.
        check_finite: whether `run` raises NonFiniteError on every rank where a mean holds NaN or Inf.
    """

    def __init__(
        self, comm: Communicator, space: GradientSpace, buckets: tuple[Bucket, ...], *, op: str = "mean",
        hook: CommHook | None = None, check_finite: bool = False,
    ):  # fmt: skip
        self.comm, self.space, self.buckets, self._checks = comm, space, buckets, check_finite
        self.prepared = tuple(PreparedBucket.of(comm, space, bucket, hook, op) for bucket in buckets)
        self._reduces = [prepared.reduce for prepared in self.prepared]
        self._starts: list[Callable[..., Handle] | None] | None = None
        self._in_place = space.adapter.moves_in_place()

    @classmethod
    def agreed(
        cls, comm: Communicator, space: GradientSpace, settings: PlanSettings, hook: CommHook | None,
        check_finite: bool = False,
    ) -> BucketPlan:  # fmt: skip
        """Return the plan of these settings; MismatchError on every rank where the settings or buckets differ."""
        buckets = space.layout.buckets(**settings._asdict())
        lines = [_in_words(settings), f"compression {hook_name(hook)}"]
        for each in buckets:
            names = ", ".join(place.name for place in each.ranges)
            lines.append(f"bucket {each.index}: {names}, bytes {each.start} to {each.stop}")
        require_agreement(comm, "bucket plan", lines, "give every rank the same settings")
        return cls(comm, space, buckets, hook=hook, check_finite=check_finite)

    def run(self, weight: float = 1.0) -> None:
        """Replace each gradient by its mean over the ranks, in which this rank's counts `weight` times."""
        if self._in_place is None:
            self._run_copying(weight)
            return
        pull, push = self._in_place
        pull()
        if weight != 1.0:
            for prepared in self.prepared:
                apply_weight(prepared.own, weight)
        self.reduce()
        self.require_finite()
        push()

    def reduce(self) -> None:
        """Reduce all buckets, one after another: the part of `run` in which ranks communicate."""
        for reduce in self._reduces:
            reduce()

    def _run_copying(self, weight: float) -> None:
        for prepared in self.prepared:
            self._timed("pack", self.space.adapter.pull_gradients, prepared.bucket)
            apply_weight(prepared.own, weight)
            prepared.reduce()
            if not self._checks:
                self._timed("unpack", self.space.adapter.push_gradients, prepared.bucket)
        if self._checks:  # once all are reduced, as on ranks whose gradients are not copied
            self.require_finite()
            self.push_all()

    def starts(self) -> list[Callable[..., Handle] | None]:
        """Return for each bucket what begins its all-reduce; None: a hook reduces it. Collective the first time."""
        if self._starts is None:
            self._starts = [prepared.prepare_start(self.comm) for prepared in self.prepared]
        return self._starts

    def pull(self, bucket: Bucket, mark: Mark | None) -> None:
        """Copy a bucket's gradients to the flat arrays when the device reaches `mark`; None: now."""
        if self._in_place is None:
            self._timed("pack", self.space.adapter.send_gradients, bucket, mark)
        else:
            self.space.adapter.send_gradients(bucket, mark)

    def push_all(self) -> None:
        """Give the model its averaged gradients, after each `pull`."""
        if self._in_place is not None:
            self._in_place[1]()
            return
        for bucket in self.buckets:
            self._timed("unpack", self.space.adapter.push_gradients, bucket)

    def _timed(self, name: str, move: Callable[..., None], bucket: Bucket, *args: object) -> None:
        begin = time.perf_counter()
        move(bucket, *args)
        self.comm.notify_phase(Phase(name, begin, time.perf_counter() - begin, GRADIENTS, bucket.index))

    def require_finite(self) -> None:
        """Raise NonFiniteError on every rank, if a mean holds NaN or Inf and that is to be checked."""
        for prepared in self.prepared:
            self._require_finite(prepared)

    def _require_finite(self, prepared: PreparedBucket) -> None:
        # A mean has the same bits on every rank, so that all ranks raise.
        if self._checks and not np.isfinite(prepared.mean).all():
            space = self.space
            raise_non_finite(self.comm, space.layout, prepared.bucket.ranges, space.arrays.grads, space.arrays.reduced)


def _call_hook(hook: Callable[..., Any], own: np.ndarray, comm: Communicator, mean: np.ndarray, bucket: Bucket) -> None:
    """Reduce a bucket with a hook; ArgumentError if it returns something other than None."""
    returned = hook(own, comm, mean, bucket)
    if returned is not None and returned is not mean and not isinstance(returned, Handle):
        raise ArgumentError(
            f"hook: expected it to put the mean into `out` and to return None, got {type(returned).__name__}"
        )


def _reduce_and_copy(reduce: Callable[[], None], out: np.ndarray, mean: np.ndarray) -> None:
    reduce()
    np.copyto(mean, out)  # all ranks write the same bits


def _in_words(settings: PlanSettings) -> str:
    if settings.bucket_size is None:
        return "per tensor"
    first = f", the first {settings.first_bucket_size}" if settings.first_bucket_size else ""
    return f"bucket_size {settings.bucket_size}{first}{', tensors split' if settings.split_tensors else ''}"


def hook_name(hook: CommHook | None) -> str:
    """Return the name of a hook in messages: a function's own name, or the text of an object; "none" without one."""
    return "none" if hook is None else getattr(hook, "__qualname__", None) or str(hook)


# --- A step's buckets: each one's reduction begins once backward has completed it, in the same order on all ranks. ---


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
