"""`bucket_size="auto"`: the cost model's start, the steps that the tuner times, and the ranks' agreement on them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import numpy as np

from clcomm.base.errors import DataError
from clcomm.base.flat_space.layout import FlatLayout
from clcomm.base.units import format_size
from clcomm.comm.communicator import Communicator
from clcomm.comm.costs import costfile
from clcomm.comm.costs.costfile import SUMMED_BY
from clcomm.comm.costs.estimates import SignTest, sign_test
from clcomm.comm.costs.forecast import Candidate, recommend
from clcomm.comm.costs.model import MeasuredFit, cluster_of, fit
from clcomm.sync.bucket_plan import GRADIENTS, BucketPlan
from clcomm.sync.decision import TUNING, Decision, Trial
from clcomm.sync.overlap import Overlap
from clcomm.sync.shared_space import SharedSpace

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


# --- Which bucket size is fastest: candidates from the cost model, tried in turns during the first steps. ---
# The tuner takes times and returns the size for the next step; it knows neither MPI nor models. Candidates take turns
# of a few steps each, so that other load on the machine affects all of them equally, and the after-effects of a step,
# such as ranks that leave it one after the other, affect the same candidate. After each round the slower half is
# dropped, and candidates that are far behind; the others are tried twice as long: successive halving (K. Jamieson, A.
# Talwalkar, "Non-stochastic best arm identification and hyperparameter optimization", AISTATS 2016). The cost model's
# choice stays to the end, and is then replaced only by a candidate that is faster beyond the noise.

#: Steps before anything counts: kernels are built, caches filled.
WARM_UP_STEPS = 3
#: Steps in a row with the same size.
TURN_STEPS = 3
_FIRST_ROUND_TURNS = 3
#: Turns of the last two candidates. Earlier turns do not count: the challenger was chosen by them.
_LAST_ROUND_TURNS = 12
_MOST_CANDIDATES = 6
_WORTH_TRYING = 3.0  # times the best prediction: the model has an error, and leaves out caches
_FAR_BEHIND = 1.3  # times the best measured: more than noise


def candidates(layout: FlatLayout, all_reduce_s: Callable[[float], float]) -> tuple[Candidate, ...]:
    """Return the bucket sizes to try for a layout, the best predicted first; no two make the same buckets.

    all_reduce_s: seconds of an all-reduce by its bytes.
    """
    tensors = [spec.nbytes for spec in layout.specs if spec.nbytes]
    if not tensors:
        return (Candidate(None, (), 0.0),)
    found = recommend(tensors, all_reduce_s)
    ceiling = _WORTH_TRYING * found.best.seconds
    rest = [each for each in found.candidates if each is not found.best and each.seconds <= ceiling]
    return (found.best, *_thinned(rest, _MOST_CANDIDATES - 1))


def _thinned(values: list[Candidate], most: int) -> list[Candidate]:
    """Return at most `most` of the values, evenly spread, with both ends."""
    if len(values) <= most:
        return values
    return [values[round(index * (len(values) - 1) / (most - 1))] for index in range(most)]


def elapsed(times: np.ndarray, hosts: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return the duration of each step over all ranks in seconds, float64 (...).

    On a host a step lasts from the start of its last rank, which waits for no other, to the end of its last rank: one
    rank's own time would leave out the work of others before its start or after its end. Each host has a clock of its
    own, so the mean over hosts is taken.

    Args:
        times: start and end of each step on each rank, in seconds, (ranks, ..., 2).
        hosts: the host of each rank.
    """
    own = np.asarray(hosts)
    lasts = [times[own == host].max(axis=0) for host in np.unique(own)]
    return np.asarray(np.mean([last[..., 1] - last[..., 0] for last in lasts], axis=0))


class BucketTuner:
    """Chooses the bucket size of each step until it has found the fastest.

    `size` is the size for the next step (None: per tensor); `add` takes the step's start and end. When `add` returns
    True a round is over: the ranks gather their `times()`, and `decide` drops the slower candidates or ends.

    Args:
        tried: the candidates, the cost model's choice first.
        measures: what the times are of, for the decision.
        predicts: whether the candidates' predictions are of the same quantity.
    """

    def __init__(self, tried: Sequence[Candidate], measures: str = "time in synchronisation", *, predicts: bool = True):
        self._all, self._left = tuple(tried), list(tried)
        self._measures, self._predicts = measures, predicts
        self._turns: dict[Candidate, list[float]] = {each: [] for each in tried}  # agreed seconds of a step in each
        self._round_turns = _FIRST_ROUND_TURNS if len(self._left) > 2 else _LAST_ROUND_TURNS
        self._times: list[tuple[float, float]] = []  # of this round's steps
        self._steps = 0
        self.decision: Decision | None = None
        if len(self._left) == 1:
            self._conclude()

    @property
    def size(self) -> int | None:
        """The bucket size of the next step; None: each tensor on its own."""
        return self._left[len(self._times) // TURN_STEPS % len(self._left)].bucket_size

    def add(self, begin: float, end: float) -> bool:
        """Take the start and end of a step of `size`; return whether the ranks have to gather their `times()` now."""
        self._steps += 1
        if self._steps > WARM_UP_STEPS:
            self._times.append((begin, end))
        return len(self._times) == self._round_turns * len(self._left) * TURN_STEPS

    def times(self) -> np.ndarray:
        """Return start and end of this round's steps, float64 (turns, candidates left, steps of a turn, 2)."""
        return np.array(self._times, np.float64).reshape(self._round_turns, len(self._left), TURN_STEPS, 2)

    def decide(self, seconds: np.ndarray) -> None:
        """Keep the faster half; `seconds`: duration of this round's steps over all ranks, ordered as `times()`."""
        turns = np.median(seconds, axis=2)  # a delay of a single step does not count
        for turn in turns:
            for candidate, median_s in zip(self._left, turn, strict=True):
                self._turns[candidate].append(float(median_s))
        self._times = []
        if len(self._left) == 2:
            self._conclude(sign_test(*turns.T))
            return
        default, *others = self._left
        others.sort(key=self._median)
        worst = _FAR_BEHIND * min(map(self._median, self._left))
        places = -(-len(self._left) // 2) - 1
        self._left = [default, *(each for each in others[:places] if self._median(each) <= worst)]
        self._round_turns = 2 * self._round_turns if len(self._left) > 2 else _LAST_ROUND_TURNS
        if len(self._left) == 1:
            self._conclude()

    def _median(self, candidate: Candidate) -> float:
        return float(np.median(self._turns[candidate]))

    def _conclude(self, last: SignTest | None = None) -> None:
        """Decide for the cost model's choice, unless the other one of the last two is faster beyond the noise."""
        trials = []
        for each in self._all:
            turns = len(self._turns[each])
            predicted_s = each.seconds if self._predicts else None
            trials.append(Trial(_name(each), self._median(each) if turns else None, predicted_s, turns * TURN_STEPS))
        default, reason = _name(self._all[0]), ""
        if last is not None:
            other = _name(self._left[1])
            reason = f"{last} than the cost model's choice, {default}"
            if not last.is_faster:
                reason = f"the cost model's choice: {other} was {last}, which is within the noise"
        elif len(self._all) > 1:
            reason = "the cost model's choice: all others were far behind"
        self._left = self._left[1:] if last is not None and last.is_faster else self._left[:1]
        chosen = _name(self._left[0])
        self.decision = Decision("bucket_size", chosen, self._measures, tuple(trials), self._steps, reason)


def _name(candidate: Candidate) -> str:
    return "per tensor" if candidate.bucket_size is None else format_size(candidate.bucket_size)
