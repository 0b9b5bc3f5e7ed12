"""`bucket_size="auto"`: the cost model's start, the steps that the tuner times, and the ranks' agreement on them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import numpy as np

from clcomm.base.errors import DataError
from clcomm.comm.communicator import Communicator
from clcomm.comm.costs import costfile
from clcomm.comm.costs.costfile import SUMMED_BY
from clcomm.comm.costs.model import MeasuredFit, cluster_of, fit
from clcomm.sync.bucket_plan import GRADIENTS, BucketPlan
from clcomm.sync.bucket_tuning import BucketTuner, candidates, elapsed
from clcomm.sync.decision import Decision
from clcomm.sync.overlap import Overlap
from clcomm.sync.shared_space import SharedSpace

#: The label under which the Communicator's stats count the tuning's own collectives.
TUNING = "tuning"
_SHARES = (512, 64, 8, 1)  # 1/512, 1/64, … of the flat space is reduced to fit latency and bandwidth
_LEAST = 16  # elements
_FEWEST_CALLS, _MOST_CALLS = 3, 20
_BUDGET_S = 0.02  # for all calls with one share
_log = logging.getLogger("clcomm")


class AutoBuckets:
    """Averages gradients with the bucket sizes that a tuner asks for, until the tuner has decided; collective.

    Args:
        comm: the ranks.
        space: the model's flat arrays.
        may_try: False keeps the cost model's choice, as where a compression's result depends on the buckets.
        overlap: begins the buckets in backward; then whole steps are compared, as hidden time shows nowhere else.
    """

    def __init__(self, comm: Communicator, space: SharedSpace, may_try: bool, overlap: Overlap | None = None):
        self.overlap = overlap
        #: Whether the decision is made, so that `run` is not needed any more.
        self.is_done = False
        self._comm = comm
        all_reduce_s = (lambda nbytes: 0.0) if comm.size == 1 else starting_cost(comm, space)
        tried = candidates(space.layout, all_reduce_s)
        measures = "time in synchronisation" if overlap is None else "time of a step with overlap"
        self._tuner = BucketTuner(tried if may_try and comm.size > 1 else tried[:1], measures, predicts=overlap is None)
        self._hosts = comm.all_gather(np.array([comm.host]), label=TUNING).reshape(-1)
        self._ended_s = 0.0

    @property
    def bucket_size(self) -> int | None:
        """The size that the next synchronisation takes; None: per tensor."""
        return self._tuner.size

    @property
    def decision(self) -> Decision | None:
        """The tuner's decision; it holds from the next `run` on, see `is_done`."""
        return self._tuner.decision

    def run(self, plan: BucketPlan, weight: float) -> None:
        """Average the gradients once, with the plan for `bucket_size`, and note how long it took."""
        begin = time.perf_counter()
        if self.overlap is None:
            plan.run(weight)
        else:
            begin = self._ended_s
            self.overlap.run(plan, weight)
        self._note(begin, time.perf_counter())

    def follow(self, plan: BucketPlan) -> None:
        """Let the next backward begin the buckets of the plan for the next `bucket_size`; with overlap only."""
        if self.overlap is not None:
            self.overlap.follow(plan)
        self._ended_s = time.perf_counter()

    def _note(self, begin: float, end: float) -> None:
        tuner = self._tuner
        if tuner.decision is None and tuner.add(begin, end):
            own = tuner.times()
            everyone = self._comm.all_gather(own, label=TUNING).reshape(self._comm.size, *own.shape)
            tuner.decide(elapsed(everyone, self._hosts))
        self.is_done = tuner.decision is not None
        if not self.is_done:
            self._comm.stats.merge_buckets(GRADIENTS)  # these are buckets of a trial, whose plan is not kept


def starting_cost(comm: Communicator, space: SharedSpace) -> Callable[[float], float]:
    """Return an all-reduce's seconds as a function of its bytes: stored by `clcomm tune`, or measured. Collective."""
    shared = comm.is_common_on_host(space.arrays.reduced)
    stored: list[MeasuredFit] = comm.broadcast_object(
        _stored(comm.sums if shared else "") if comm.rank == 0 else None, label=TUNING
    )
    in_memory = "shared" if comm.hosts == 1 else "hierarchical"
    for each in stored:
        if (each.transport, each.ranks, each.hosts) == (in_memory if shared else "mpi", comm.size, comm.hosts):
            return each.fit.cost.seconds
    if comm.hosts > 1 and shared and any(each.transport == "mpi" and each.hosts == each.ranks for each in stored):
        cluster, _ = cluster_of(stored)
        return lambda nbytes: cluster.all_reduce_s(nbytes, comm.size, comm.hosts)
    return _measured(comm, space)


def _stored(sums: str) -> list[MeasuredFit]:
    """Return this host's stored fits; none where the file is damaged.

    sums: how sums in shared memory are computed here; fits of others are left out. Empty: there is no shared memory.
    """
    try:
        stored = costfile.load() or []
    except DataError as error:
        _log.warning("%s", error)
        return []
    usable = [each for each in stored if each.transport == "mpi" or each.sums == sums]
    if sums and len(usable) < len(stored):
        others = " and ".join({SUMMED_BY[each.sums] for each in stored if each not in usable})
        _log.warning(
            "bucket_size: clcomm tune measured sums by %s, here they are by %s: measured anew; clcomm tune --sums %s "
            "stores these",
            others, SUMMED_BY[sums], sums,
        )  # fmt: skip
    return usable


def _measured(comm: Communicator, space: SharedSpace) -> Callable[[float], float]:
    """Time all-reduces of parts of the gradients in place, and fit a line; the averages are then what they were."""
    mark = space.adapter.mark()
    if mark is not None:
        mark.wait()  # the last update may still read the averages
    place = space.layout.ranges[0]
    own, mean = (array.view(place.dtype) for array in (space.arrays.grads, space.arrays.reduced))
    kept = mean.copy()
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
        seconds = _shortest(comm, reduce, 1)  # at least once of all gradients: no longer than a synchronisation
        if not is_slow:
            calls = int(min(max(_BUDGET_S / seconds[0], _FEWEST_CALLS), _MOST_CALLS))
            seconds = _shortest(comm, reduce, calls)
        points.append((nbytes, float(np.median(seconds))))
    mean[...] = kept  # in common memory all ranks write the same bits
    return fit(points).cost.seconds if len(points) > 1 else lambda nbytes: points[0][1]


def _shortest(comm: Communicator, reduce: Callable[[], None], calls: int) -> np.ndarray:
    """Return the seconds of each call on the rank that waited least."""
    seconds = np.empty(calls)
    for call in range(calls):
        begin = time.perf_counter()
        reduce()
        seconds[call] = time.perf_counter() - begin
    return np.asarray(comm.all_reduce(seconds, "min", label=TUNING)).clip(1e-9)
