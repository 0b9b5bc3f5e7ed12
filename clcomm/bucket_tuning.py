"""Which bucket size is fastest: candidates from the cost model, tried in turns during the first steps.

The tuner is fed times and answers which size the next step takes; it knows neither MPI nor models. Candidates take
turns of a few steps each, so that whatever else the machine does meets all alike, and that what a step leaves behind,
such as ranks that go on one after the other, meets the same candidate. After each round the slower half goes, and what
is far behind; the rest is tried twice as long: successive halving (K. Jamieson, A. Talwalkar, "Non-stochastic best arm
identification and hyperparameter optimization", AISTATS 2016). The cost model's choice stays to the end, and then gives
way only to what is faster beyond the noise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from clcomm.decision import Decision, Trial
from clcomm.forecast import Candidate, recommend
from clcomm.layout import FlatLayout
from clcomm.separation import Separation, separation
from clcomm.units import format_size

#: Steps before anything counts: kernels are built, caches filled.
WARM_UP_STEPS = 3
#: Steps in a row with the same size.
TURN_STEPS = 3
_FIRST_ROUND_TURNS = 3
#: Of the last two: times of their own, since the challenger was chosen by the earlier ones.
_LAST_ROUND_TURNS = 12
_MOST_CANDIDATES = 6
_WORTH_TRYING = 3.0  # times the best prediction: the model's error and caches, which it does not know
_FAR_BEHIND = 1.3  # times the best measured: more than noise


def candidates(layout: FlatLayout, all_reduce_s: Callable[[float], float]) -> tuple[Candidate, ...]:
    """Return the bucket sizes to try for a layout, the best predicted first; each makes other buckets than the rest.

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
    """Return at most so many of the values, evenly spread, both ends among them."""
    if len(values) <= most:
        return values
    return [values[round(index * (len(values) - 1) / (most - 1))] for index in range(most)]


def elapsed(times: np.ndarray, hosts: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return how long each step took all ranks, float64 (...), from when each began and ended it: (ranks, ..., 2).

    On a host that is from when its last rank begins, which waits for nobody, to when its last one ends: one rank's own
    time would leave out what the others did before it came, or do after it has gone. Hosts have a clock each; of
    several the mean counts. hosts: that of each rank.
    """
    own = np.asarray(hosts)
    lasts = [times[own == host].max(axis=0) for host in np.unique(own)]
    return np.mean([last[..., 1] - last[..., 0] for last in lasts], axis=0)


class BucketTuner:
    """Says which bucket size the next step takes, until it knows the fastest.

    `size` is that of the next step (None: per tensor); `add` takes its begin and end. Where `add` returns True a round
    is over: the ranks put their `times()` together, and `decide` drops the slower ones or ends.

    tried: the cost model's choice first. predicts: whether the candidates' predictions are of what is measured.
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
        """Take when a step of `size` began and ended; return whether the ranks are to put `times()` together."""
        self._steps += 1
        if self._steps > WARM_UP_STEPS:
            self._times.append((begin, end))
        return len(self._times) == self._round_turns * len(self._left) * TURN_STEPS

    def times(self) -> np.ndarray:
        """Return when this round's steps began and ended, float64 (turns, candidates left, steps of a turn, 2)."""
        return np.array(self._times, np.float64).reshape(self._round_turns, len(self._left), TURN_STEPS, 2)

    def decide(self, seconds: np.ndarray) -> None:
        """Keep the faster half; `seconds`: what each of this round's steps took all ranks, as `times()` are ordered."""
        turns = np.median(seconds, axis=2)  # what delays a single step says nothing of its size
        for turn in turns:
            for each, mean in zip(self._left, turn, strict=True):
                self._turns[each].append(float(mean))
        self._times = []
        if len(self._left) == 2:
            self._conclude(separation(*turns.T))
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

    def _conclude(self, last: Separation | None = None) -> None:
        """Decide for the cost model's choice, unless the last two were compared and the other one is faster."""
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
