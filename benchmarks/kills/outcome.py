"""A run's figures from its ranks' events and from the kills."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from benchmarks.kills import task
from benchmarks.kills.task import Event


class Outcome(NamedTuple):
    """What a run was like.

    Attributes:
        next_step_s: for each kill the seconds until a step was done that had not been done before.
        lost_s: for each kill the seconds until the next one, or until the end, less those that the steps done meanwhile
            take when nothing is killed.
        lost_samples: those that no rank contributed to their step, of all `samples`.
        digests: the hashes of the ranks that took the last step.
    """

    steps: int
    next_step_s: list[float]
    lost_s: list[float]
    lost_samples: int
    samples: int
    digests: set[str]

    @classmethod
    def of(cls, events: Sequence[Event], kills_s: Sequence[float]) -> Outcome:
        """Return the outcome of ranks' events, and of kills at these times, all of them after a first step."""
        new = list(_new_steps(events))
        bounds = [*kills_s, new[-1].at_s]
        before = [each for each in new if each.at_s <= bounds[0]]
        step_s = (before[-1].at_s - before[0].at_s) / max(1, before[-1].step - before[0].step)
        next_step_s, lost_s = [], []
        for killed_s, until_s in pairwise(bounds):
            done = [_done_by(new, at_s) for at_s in (killed_s, until_s)]
            after = [each.at_s - killed_s for each in new if each.at_s > killed_s]
            next_step_s += after[:1]
            lost_s.append(max(0.0, until_s - killed_s - (done[1] - done[0]) * step_s))
        samples: dict[int, int] = {}
        for each in events:
            if each.what == task.STEP:
                samples[each.step] = max(each.samples, samples.get(each.step, 0))
        lost_samples = sum(task.STEP_SAMPLES - count for count in samples.values())
        digests = {each.digest for each in events if each.what == task.ENDS}
        return cls(new[-1].step, next_step_s, lost_s, lost_samples, task.STEP_SAMPLES * len(samples), digests)


def _new_steps(events: Sequence[Event]) -> Iterator[Event]:
    """Yield each step's first event, unless a later step was done before it."""
    done = 0
    for each in sorted(events):
        if each.what == task.STEP and each.step > done:
            done = each.step
            yield each


def _done_by(new: Sequence[Event], at_s: float) -> int:
    return max((each.step for each in new if each.at_s <= at_s), default=0)


def percentile(values: Sequence[float], share: int) -> float:
    """Return a percentile of values; of one value that, of none 0."""
    if len(values) < 2:
        return values[0] if values else 0.0
    return statistics.quantiles(values, n=100, method="inclusive")[share - 1]
