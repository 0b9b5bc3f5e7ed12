"""`bucket_size="auto"` at work: the ranks' first costs, the tuner's turns, and what all of them agree on."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import numpy as np

from clcomm import costfile
from clcomm.bucket_plan import GRADIENTS, BucketPlan
from clcomm.bucket_tuning import BucketTuner, candidates, elapsed
from clcomm.communicator import Communicator
from clcomm.costmodel import Measured, cluster_of, fit
from clcomm.errors import DataError
from clcomm.overlap import Overlap
from clcomm.shared_space import SharedSpace
from clcomm.sums import SUMS

#: The label under which the Communicator's stats count what tuning itself sends.
TUNING = "tuning"
_SHARES = (512, 64, 8, 1)  # parts of the flat space that are reduced to fit latency and bandwidth
_LEAST = 16  # elements
_FEWEST_CALLS, _MOST_CALLS = 3, 20
_BUDGET_S = 0.02  # of each part's calls
_log = logging.getLogger("clcomm")


class AutoBuckets:
    """Averages a model's gradients with the bucket sizes that a tuner asks for, until it has decided; collective.

    plan_of: the prepared plan of a bucket size, None: per tensor. may_try: False keeps what the cost model says, as
    where a compression's result depends on the buckets. concluded: called once the decision is known. overlap: what
    begins the buckets in backward; then it is whole steps that are compared, as what is hidden shows nowhere else.
    """

    def __init__(
        self,
        comm: Communicator,
        space: SharedSpace,
        plan_of: Callable[[int | None], BucketPlan],
        may_try: bool,
        concluded: Callable[[], None],
        overlap: Overlap | None = None,
    ):
        self._comm, self._plan_of, self._concluded, self._overlap = comm, plan_of, concluded, overlap
        all_reduce_s = (lambda nbytes: 0.0) if comm.size == 1 else starting_cost(comm, space)
        tried = candidates(space.layout, all_reduce_s)
        measures = "time in synchronisation" if overlap is None else "time of a step with overlap"
        self.tuner = BucketTuner(tried if may_try and comm.size > 1 else tried[:1], measures, predicts=overlap is None)
        self._hosts = comm.all_gather(np.array([comm.host]), label=TUNING).reshape(-1)
        self._ended = 0.0
        self._told = False

    @property
    def bucket_size(self) -> int | None:
        """The size that the next synchronisation takes; None: per tensor."""
        return self.tuner.size

    @property
    def done(self) -> bool:
        """Whether the decision was told: then `run` has no more to do."""
        return self._told

    def run(self, check_finite: bool, weight: float) -> None:
        """Average the gradients once, and note how long it took."""
        plan = self._plan_of(self.tuner.size)  # a new one is prepared before the clock runs
        begin = time.perf_counter()
        if self._overlap is None:
            plan.run(check_finite, weight)
        else:
            begin = self._ended
            self._overlap.run(plan, check_finite, weight)
        self._note(begin, time.perf_counter())
        if self._overlap is not None:
            self._overlap.follow(self._plan_of(self.tuner.size))
        self._ended = time.perf_counter()

    def _note(self, begin: float, end: float) -> None:
        tuner = self.tuner
        if tuner.decision is None and tuner.add(begin, end):
            own = tuner.times()
            everyone = self._comm.all_gather(own, label=TUNING).reshape(self._comm.size, *own.shape)
            tuner.decide(elapsed(everyone, self._hosts))
        if tuner.decision is not None:
            self._told = True
            self._concluded()
        else:
            self._comm.stats.start_buckets_anew(GRADIENTS)  # these are buckets of no plan that stays


def starting_cost(comm: Communicator, space: SharedSpace) -> Callable[[float], float]:
    """Return an all-reduce's seconds by its bytes: as `clcomm tune` stored them, else measured now. Collective."""
    shared = comm.is_common_on_host(space.arrays.reduced)
    stored = comm.broadcast_object(_stored(comm.sums if shared else "") if comm.rank == 0 else None, label=TUNING)
    in_memory = "shared" if comm.hosts == 1 else "hierarchical"
    for each in stored:
        if (each.transport, each.ranks, each.hosts) == (in_memory if shared else "mpi", comm.size, comm.hosts):
            return each.fit.cost.seconds
    if comm.hosts > 1 and shared and any(each.transport == "mpi" and each.hosts == each.ranks for each in stored):
        cluster, _ = cluster_of(stored)
        return lambda nbytes: cluster.all_reduce_s(nbytes, comm.size, comm.hosts)
    return _measured(comm, space)


def _stored(sums: str) -> list[Measured]:
    """Return this host's stored fits, none where the file is damaged: then they are measured.

    sums: what adds up in shared memory here; fits of other sums are left out. Empty: there is no shared memory.
    """
    try:
        stored = costfile.load() or []
    except DataError as error:
        _log.warning("%s", error)
        return []
    usable = [each for each in stored if each.transport == "mpi" or each.sums == sums]
    if sums and len(usable) < len(stored):
        others = " and ".join({SUMS[each.sums] for each in stored if each not in usable})
        _log.warning(
            "bucket_size: clcomm tune measured sums by %s, here they are by %s: measured anew; clcomm tune --sums %s "
            "stores these",
            others, SUMS[sums], sums,
        )  # fmt: skip
    return usable


def _measured(comm: Communicator, space: SharedSpace) -> Callable[[float], float]:
    """Time all-reduces of parts of the gradients, where they lie, and fit a line; what they hold stays."""
    slot = space.layout.slots[0]
    own, mean = (array.view(slot.dtype) for array in (space.arrays.grads, space.arrays.reduced))
    points: list[tuple[int, float]] = []
    for share in _SHARES:
        count = max(_LEAST, own.size // share // _LEAST * _LEAST)
        nbytes = count * own.itemsize
        if points and nbytes <= points[-1][0]:
            continue
        is_slow = len(points) > 1 and points[-1][1] * nbytes / points[-1][0] > _BUDGET_S
        if is_slow and share > 1:
            continue
        reduce = comm.all_reduce_init(own[:count], "mean", out=mean[:count], label=TUNING)
        seconds = _shortest(comm, reduce, 1)  # the whole once at least: no longer than a synchronisation takes
        if not is_slow:
            calls = int(min(max(_BUDGET_S / seconds[0], _FEWEST_CALLS), _MOST_CALLS))
            seconds = _shortest(comm, reduce, calls)
        points.append((nbytes, float(np.median(seconds))))
    return fit(points).cost.seconds if len(points) > 1 else lambda nbytes: points[0][1]


def _shortest(comm: Communicator, reduce: Callable[[], None], calls: int) -> np.ndarray:
    """Return the seconds of each call, those of the rank that waited least."""
    seconds = np.empty(calls)
    for call in range(calls):
        begin = time.perf_counter()
        reduce()
        seconds[call] = time.perf_counter() - begin
    return np.maximum(comm.all_reduce(seconds, "min", label=TUNING), 1e-9)
