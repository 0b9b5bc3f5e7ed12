"""Which bucket size is fastest: candidates from the cost model, tried in turns during the first steps.

The tuner takes times and returns the size for the next step; it knows neither MPI nor models. Candidates take turns of
a few steps each, so that other load on the machine affects all of them equally, and the after-effects of a step, such
as ranks that leave it one after the other, affect the same candidate. After each round the slower half is dropped, and
candidates that are far behind; the others are tried twice as long: successive halving (K. Jamieson, A. Talwalkar,
"Non-stochastic best arm identification and hyperparameter optimization", AISTATS 2016). The cost model's choice stays
to the end, and is then replaced only by a candidate that is faster beyond the noise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from clcomm.base.flat_space.layout import FlatLayout
from clcomm.base.units import format_size
from clcomm.comm.costs.forecast import Candidate, recommend
from clcomm.comm.costs.sign_test import SignTest, sign_test
from clcomm.sync.decision import Decision, Trial

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
