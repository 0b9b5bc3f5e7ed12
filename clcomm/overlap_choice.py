"""Whether a model's synchronisation overlaps with its backward: as told, or as the first steps show."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import numpy as np

from clcomm.agreement import CHECKS
from clcomm.bucket_plan import BucketPlan
from clcomm.communicator import AUTO, Communicator
from clcomm.decision import Decision, Trial
from clcomm.errors import ArgumentError
from clcomm.overlap import Overlap
from clcomm.separation import separation
from clcomm.shared_space import SharedSpace

#: Steps before any counts: kernels are built, steps recorded.
_WARM_UP = 4
#: Steps with overlap, and as many without, in turns.
_STEPS_EACH = 12
_ACCUMULATES = "several backwards came before a synchronisation, outside no_sync()"


def check_overlap(setting: bool | str) -> bool | str:
    """Return the setting; ArgumentError unless it is True, False or "auto"."""
    if not isinstance(setting, bool) and not (isinstance(setting, str) and setting == AUTO):
        raise ArgumentError(f"overlap: expected True, False or 'auto', got {setting!r}")
    return setting


class OverlapChoice:
    """Runs one model's synchronisations with overlap or without; making one is collective.

    setting: True, or "auto": steps with and without take turns, and overlap is kept where its steps took less time,
    beyond the noise; the results are the same. Where nothing can be gained "auto" decides at once. is_paused: see
    Overlap. decided: gets the Decision of "auto" when it is known. ways: what can still come of it, False: without,
    True: with overlap.
    """

    def __init__(
        self,
        comm: Communicator,
        space: SharedSpace,
        setting: bool | str,
        is_paused: Callable[[], bool],
        decided: Callable[[Decision], None],
    ):
        self.overlap: Overlap | None = Overlap(space, is_paused)
        self._comm, self._space, self._decided = comm, space, decided
        self._seconds: tuple[list[float], list[float]] = [], []
        self._steps, self._ended = 0, 0.0
        self._is_settled = setting is True
        refusals = "" if self._is_settled else _refusals(comm, space)
        if refusals:
            self._decide(False, f"without measuring: {refusals}")

    @property
    def ways(self) -> tuple[bool, ...]:
        if not self._is_settled:
            return False, True
        return (self.overlap is not None,)

    def runner(self, plan_of: Callable[[bool], BucketPlan]) -> Callable[[bool, float], None]:
        """Return what averages all gradients, as a plan's `run` does; plan_of: the plan without or with overlap."""
        if self.overlap is None:
            return plan_of(False).run
        if self._is_settled:
            return partial(self._run, self.overlap, plan_of(True))
        return partial(self._try, self.overlap, plan_of(False), plan_of(True))

    def expect_all(self) -> None:
        """Note that another backward begins."""
        if self.overlap is not None:
            self.overlap.expect_all()

    def begin_rest(self) -> None:
        """Begin the buckets that backward has not begun; in a synchronisation."""
        if self.overlap is not None:
            self.overlap.begin_rest()

    def close(self) -> None:
        """Follow the model's backward no more."""
        if self.overlap is not None:
            self.overlap.stop()

    @staticmethod
    def _run(overlap: Overlap, plan: BucketPlan, check_finite: bool, weight: float) -> None:
        overlap.run(plan, check_finite, weight)
        overlap.follow(plan)

    def _try(self, overlap: Overlap, off: BucketPlan, on: BucketPlan, check_finite: bool, weight: float) -> None:
        """Run a step of the comparison."""
        is_on = overlap.plan is not None
        overlap.run(off, check_finite, weight)
        now = time.perf_counter()
        if self._steps >= _WARM_UP:
            self._seconds[is_on].append(now - self._ended)
        self._steps += 1
        overlap.follow(None if is_on else on)
        if self._steps == _WARM_UP + 2 * _STEPS_EACH:
            self._compare()
        self._ended = time.perf_counter()

    def _compare(self) -> None:
        """Put the ranks' times together: overlap, which is not the default, has to be faster beyond the noise."""
        off_s, on_s = self._comm.all_reduce(np.array(self._seconds), "mean", label=CHECKS)
        trials = (
            Trial("off", float(np.median(off_s)), None, _STEPS_EACH),
            Trial("on", float(np.median(on_s)), None, _STEPS_EACH),
        )
        found = separation(off_s, on_s)
        noise = "" if found.is_faster else ", which is within the noise"
        self._decide(found.is_faster, "time of a step", *trials, reason=f"overlap was {found}{noise}")

    def _decide(self, chosen: bool, measures: str, *trials: Trial, reason: str = "") -> None:
        self._is_settled = True
        if self.overlap is not None and not chosen:
            self.overlap.stop()
            self.overlap = None
        step = self._space.synchronisations + 1
        self._decided(Decision("overlap", "on" if chosen else "off", measures, trials, step, reason))


def _refusals(comm: Communicator, space: SharedSpace) -> str:
    """Return why overlap can gain nothing, or is not possible, the same on every rank; empty where neither is so."""
    told = comm.all_gather_object(_refusal(comm, space), label=CHECKS)
    if _ACCUMULATES in told:
        return _ACCUMULATES
    return told[0] if all(told) else ""


def _refusal(comm: Communicator, space: SharedSpace) -> str:
    if comm.size == 1:
        return "there is one rank"
    if not space.order.is_told:
        return "the model's library does not tell when a gradient is complete"
    if space.order.accumulates:
        return _ACCUMULATES
    if comm.hosts == 1 and comm.cores == 1 and space.replica.mark() is None:
        return "the ranks are on one host, and each computes and communicates on the same core"
    return ""
