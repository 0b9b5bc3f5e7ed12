"""Whether a model's synchronisation overlaps with its backward: as set, or as the first steps show."""

from __future__ import annotations

import time

import numpy as np

from clcomm.comm.communicator import Communicator
from clcomm.comm.costs.sign_test import sign_test
from clcomm.sync.agreement import CHECKS
from clcomm.sync.bucket_plan import BucketPlan
from clcomm.sync.completion_order import CompletionOrder
from clcomm.sync.decision import Decision, Trial
from clcomm.sync.overlap import Overlap
from clcomm.sync.shared_space import SharedSpace

#: Steps before the first that counts: kernels are built, steps recorded.
_WARM_UP = 4
#: Steps with overlap, and as many without, in turns.
_STEPS_EACH = 12
_ACCUMULATES = "several backwards came before a synchronisation, outside no_sync()"


class OverlapChoice:
    """Overlap of one model, or the choice between overlap and none; making one is collective.

    With "auto" steps with and without overlap take turns, and overlap is kept where its steps took less time, beyond
    the noise; the results are the same. Where overlap cannot gain anything, or is not possible, "auto" decides at once.

    overlap: None where it was decided against. decision: that of "auto", once it is made.

    Args:
        comm: the ranks.
        space: the model's flat arrays.
        order: what is known of the model's backward.
        setting: True or "auto".
        step: number of the synchronisation that is about to run.
    """

    def __init__(self, comm: Communicator, space: SharedSpace, order: CompletionOrder, setting: bool | str, step: int):
        self.overlap: Overlap | None = Overlap(space)
        self.is_settled = setting is True
        self.decision: Decision | None = None
        self._comm = comm
        self._seconds: tuple[list[float], list[float]] = [], []
        self._tried, self._ended_s = 0, 0.0
        refusal = "" if self.is_settled else _agreed_refusal(comm, space, order)
        if refusal:
            self._decide(False, step, f"without measuring: {refusal}")

    @property
    def ways(self) -> tuple[bool, ...]:
        """The ways in which buckets may be reduced in the end: without overlap (False), with it (True), or both."""
        if not self.is_settled:
            return False, True
        return (self.overlap is not None,)

    def run(self, plan: BucketPlan, weight: float) -> None:
        """Average all gradients with overlap, and follow the next backward."""
        assert self.overlap is not None
        self.overlap.run(plan, weight)
        self.overlap.follow(plan)

    def try_step(self, off: BucketPlan, on: BucketPlan, step: int, weight: float) -> None:
        """Run a step of the comparison; `decision` is set after the last one. Collective.

        Args:
            off, on: the plans without and with overlap.
            step: number of this synchronisation.
            weight: see `BucketPlan.run`.
        """
        assert self.overlap is not None
        overlap, is_on = self.overlap, self.overlap.plan is not None
        overlap.run(off, weight)
        now = time.perf_counter()
        if self._tried >= _WARM_UP:
            self._seconds[is_on].append(now - self._ended_s)
        self._tried += 1
        overlap.follow(None if is_on else on)
        if self._tried == _WARM_UP + 2 * _STEPS_EACH:
            self._compare(step)
        self._ended_s = time.perf_counter()

    def begin_rest(self) -> None:
        """Begin the buckets that backward has not begun; in a synchronisation."""
        if self.overlap is not None:
            self.overlap.begin_rest()

    def pause(self, is_paused: bool) -> None:
        """Let gradients accumulate, or no longer."""
        if self.overlap is not None:
            self.overlap.pause(is_paused)

    def stop(self) -> None:
        """Stop following the model's backward."""
        if self.overlap is not None:
            self.overlap.stop()

    def _compare(self, step: int) -> None:
        """Compare the mean times of all ranks: overlap, which is not the default, has to be faster beyond the noise."""
        off_s, on_s = self._comm.all_reduce(np.array(self._seconds), "mean", label=CHECKS)
        trials = (
            Trial("off", float(np.median(off_s)), None, _STEPS_EACH),
            Trial("on", float(np.median(on_s)), None, _STEPS_EACH),
        )
        found = sign_test(off_s, on_s)
        noise = "" if found.is_faster else ", which is within the noise"
        self._decide(found.is_faster, step, "time of a step", *trials, reason=f"overlap was {found}{noise}")

    def _decide(self, is_on: bool, step: int, measures: str, *trials: Trial, reason: str = "") -> None:
        self.is_settled = True
        if self.overlap is not None and not is_on:
            self.overlap.stop()
            self.overlap = None
        self.decision = Decision("overlap", "on" if is_on else "off", measures, trials, step, reason)


def _agreed_refusal(comm: Communicator, space: SharedSpace, order: CompletionOrder) -> str:
    """Return why overlap can gain nothing or is not possible, the same on every rank; empty otherwise. Collective."""
    refusals = comm.all_gather_object(_refusal(comm, space, order), label=CHECKS)
    if _ACCUMULATES in refusals:
        return _ACCUMULATES
    return refusals[0] if all(refusals) else ""


def _refusal(comm: Communicator, space: SharedSpace, order: CompletionOrder) -> str:
    if comm.size == 1:
        return "there is one rank"
    if not order.is_reported:
        return "the model's library does not report completed gradients"
    if order.accumulates:
        return _ACCUMULATES
    if comm.hosts == 1 and comm.cores == 1 and space.adapter.mark() is None:
        return "the ranks are on one host, and each computes and communicates on the same core"
    return ""
