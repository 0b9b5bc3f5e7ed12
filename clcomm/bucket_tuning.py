"""Which bucket size is fastest: candidates from the cost model, tried in turns during the first steps.

The tuner is fed times and answers which size the next step takes; it knows neither MPI nor models. Candidates take
turns step by step, so that whatever else the machine does meets all alike. After each round the slower half goes and
the rest is tried twice as long: successive halving (K. Jamieson, A. Talwalkar, "Non-stochastic best arm identification
and hyperparameter optimization", AISTATS 2016).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from clcomm.decision import Decision, Trial
from clcomm.forecast import Candidate, recommend
from clcomm.layout import FlatLayout
from clcomm.units import format_size

#: Steps before anything counts: kernels are built, caches filled.
WARM_UP_STEPS = 3
_FIRST_ROUND_STEPS = 5
_MOST_CANDIDATES = 6
_WORTH_TRYING = 3.0  # times the best prediction: the model's error and caches, which it does not know


def candidates(
    layout: FlatLayout, all_reduce_s: Callable[[float], float], *, backward_s: float = 0.0, overlap: bool = False
) -> tuple[Candidate, ...]:
    """Return the bucket sizes to try for a layout, the best predicted first; each makes other buckets than the rest.

    all_reduce_s: seconds of an all-reduce by its bytes. backward_s: what there is to overlap with.
    """
    tensors = [spec.nbytes for spec in layout.specs if spec.nbytes]
    if not tensors:
        return (Candidate(None, (), 0.0),)
    found = recommend(tensors, all_reduce_s, backward_s=backward_s, overlap=overlap)
    ceiling = _WORTH_TRYING * found.best.seconds
    rest = [each for each in found.candidates if each is not found.best and each.seconds <= ceiling]
    return (found.best, *_thinned(rest, _MOST_CANDIDATES - 1))


def _thinned(values: list[Candidate], most: int) -> list[Candidate]:
    """Return at most so many of the values, evenly spread, both ends among them."""
    if len(values) <= most:
        return values
    return [values[round(index * (len(values) - 1) / (most - 1))] for index in range(most)]


class BucketTuner:
    """Says which bucket size the next step takes, until it knows the fastest.

    `size` is that of the next step (None: per tensor); `add` takes its seconds. Where `add` returns True a round is
    over: the ranks agree on its `times()`, rank by rank the same, and `decide` drops the slower half or ends.
    """

    def __init__(self, tried: Sequence[Candidate], measures: str = "time in synchronisation"):
        self._all, self._left = tuple(tried), list(tried)
        self._measures = measures
        self._seconds: dict[Candidate, list[float]] = {each: [] for each in tried}
        self._known: dict[Candidate, tuple[float, int]] = {}  # medians of the last round each was in, steps in all
        self._round_steps = _FIRST_ROUND_STEPS
        self._warm_up = WARM_UP_STEPS
        self._turn = 0
        self._steps = 0
        self.decision: Decision | None = None
        if len(self._left) == 1:
            self._conclude()

    @property
    def done(self) -> bool:
        """Whether the fastest size is known."""
        return self.decision is not None

    @property
    def size(self) -> int | None:
        """The bucket size of the next step; None: each tensor on its own."""
        return self._left[self._turn].bucket_size

    def add(self, seconds: float) -> bool:
        """Take the seconds of the step that `size` was for; return whether the ranks are to agree on `times()`."""
        self._steps += 1
        if self._warm_up:
            self._warm_up -= 1
            return False
        self._seconds[self._left[self._turn]].append(seconds)
        self._turn = (self._turn + 1) % len(self._left)
        return self._turn == 0 and len(self._seconds[self._left[0]]) == self._round_steps

    def times(self) -> np.ndarray:
        """Return this round's seconds, float64 (candidates left, steps of each)."""
        return np.array([self._seconds[each] for each in self._left], np.float64)

    def decide(self, agreed: np.ndarray) -> None:
        """Keep the faster half by the medians of `agreed`, which is `times()` as all ranks see it."""
        medians = np.median(agreed, axis=1)
        for each, median in zip(self._left, medians, strict=True):
            steps = self._known.get(each, (0.0, 0))[1]
            self._known[each] = float(median), steps + agreed.shape[1]
            self._seconds[each] = []
        ranking = sorted(self._left, key=lambda each: self._known[each][0])
        self._left = ranking[: -(-len(ranking) // 2)]
        self._round_steps *= 2
        if len(self._left) == 1:
            self._conclude()

    def _conclude(self) -> None:
        trials = []
        for each in self._all:
            median, steps = self._known.get(each, (None, 0))
            trials.append(Trial(_name(each), median, each.seconds, steps))
        self.decision = Decision("bucket_size", _name(self._left[0]), self._measures, tuple(trials), self._steps)


def _name(candidate: Candidate) -> str:
    return "per tensor" if candidate.bucket_size is None else format_size(candidate.bucket_size)
