"""What averages a model's gradients: a bucket plan, with overlap or without, or the sizes that are being tried."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from clcomm.auto_buckets import AutoBuckets
from clcomm.bucket_plan import GRADIENTS, BucketPlan, PlanSettings
from clcomm.communicator import AUTO, Communicator
from clcomm.compression import CommHook
from clcomm.decision import Decision
from clcomm.errors import ArgumentError
from clcomm.overlap_choice import OverlapChoice, check_overlap
from clcomm.shared_space import SharedSpace
from clcomm.units import parse_size

#: Averages a model's gradients: run(check_finite, weight of this rank's).
Run = Callable[[bool, float], None]
_log = logging.getLogger("clcomm")


class Averaging:
    """Chooses what averages a model's gradients, as the settings say and, where they leave it open, as steps show.

    use_bucketing, bucket_size, first_bucket_size, split_tensors, overlap: as the Synchronizer's. is_paused: whether
    gradients are to accumulate, now. `hook` reduces buckets, None: a plain all-reduce. `decisions` are what was chosen.
    """

    def __init__(
        self,
        comm: Communicator,
        use_bucketing: bool | None,
        bucket_size: int | str | None,
        first_bucket_size: int | str | None,
        split_tensors: bool,
        overlap: bool | str,
        is_paused: Callable[[], bool],
    ):
        self._comm, self._is_paused = comm, is_paused
        self.use_bucketing = comm.use_bucketing if use_bucketing is None else use_bucketing
        self._auto = comm.auto_bucket_size if bucket_size is None else bucket_size == AUTO
        self.bucket_size = comm.bucket_size if bucket_size is None or self._auto else parse_size(bucket_size)
        self._first_bucket_size: int | None = None
        if first_bucket_size is not None:
            self._first_bucket_size = parse_size(first_bucket_size, "first_bucket_size")
        self._split_tensors = split_tensors
        self.overlap = check_overlap(overlap)
        self.hook: CommHook | None = None
        self.decisions: list[Decision] = []

    def set_bucket_size(self, bucket_size: int | str) -> None:
        """Take buckets of this size from now on, and look for none."""
        nbytes = parse_size(bucket_size)
        if nbytes != self.bucket_size or self._auto:
            self._comm.stats.start_buckets_anew(GRADIENTS)
        self.bucket_size, self._auto = nbytes, False

    def use_hook(self, hook: CommHook | None) -> None:
        """Let a hook reduce the buckets of plans made from now on; ArgumentError for one that cannot."""
        if hook is not None and not callable(hook):
            raise ArgumentError(
                f"hook: expected something to call with (gradient, comm, out, bucket), got {type(hook).__name__}"
            )
        if hook is not None and self._split_tensors:
            raise ArgumentError("split_tensors: expected False with a compression or a hook, which want whole tensors")
        self.hook = hook

    def run_of(self, space: SharedSpace, use_bucketing: bool | None) -> Run:
        """Return what averages a model's gradients this time; collective where a plan is a new one."""
        run = space.runs.get((use_bucketing, self.bucket_size))
        if run is None:
            if space.overlap is not None:
                space.overlap.begin_rest()
            run = space.runs[use_bucketing, self.bucket_size] = self._chosen(space, use_bucketing)
        return run

    def plan(self, space: SharedSpace, use_bucketing: bool | None) -> BucketPlan:
        """Return the plan for a model's next synchronisation; collective where it is a new one."""
        return self._plan(space, use_bucketing, self._ways(space)[-1])

    def note_no_buckets(self) -> None:
        """Note that a sharded update, which has no buckets, leaves nothing of what "auto" asks for to be tried."""
        asked = {"overlap": ("off", self.overlap == AUTO), "bucket_size": ("none", self._auto and self.use_bucketing)}
        for what, (chosen, is_asked) in asked.items():
            decision = Decision(what, chosen, "without measuring: a sharded update has no buckets", (), 0)
            if is_asked and decision not in self.decisions:
                self._tell(decision)

    def _chosen(self, space: SharedSpace, use_bucketing: bool | None) -> Run:
        if self.overlap and space.overlap is None and not space.order.is_open:
            decided = partial(self._overlap_decided, space)
            space.overlap = OverlapChoice(self._comm, space, self.overlap, self._is_paused, decided)
        choice = space.overlap
        if self._auto and self._buckets(use_bucketing):
            for overlaps in self._ways(space):
                if overlaps and choice is None:
                    break  # its time comes
                tuning = self._tuning(space, overlaps)
                if not tuning.done:
                    return tuning.run
        if choice is None:
            return self._plan(space, use_bucketing, False).run
        return choice.runner(partial(self._plan, space, use_bucketing))

    def _ways(self, space: SharedSpace) -> tuple[bool, ...]:
        """Return how a model's buckets may come to be reduced: False, without overlap, or True, or either."""
        if space.overlap is not None:
            return space.overlap.ways
        return (False, True) if self.overlap == AUTO else (bool(self.overlap),)

    def _tuning(self, space: SharedSpace, overlaps: bool) -> AutoBuckets:
        """Return what looks for a model's fastest bucket size without or with overlap; collective the first time."""
        tuning = space.tunings.get(overlaps)
        if tuning is None:
            may_try = self.hook is None or getattr(self.hook, "elementwise", False)
            plan_of, concluded = partial(self._plan_of, space), partial(self._size_concluded, space)
            overlap = space.overlap.overlap if overlaps else None
            tuning = AutoBuckets(self._comm, space, plan_of, may_try, concluded, overlap)
            space.tunings[overlaps] = tuning
        return tuning

    def _plan(self, space: SharedSpace, use_bucketing: bool | None, overlaps: bool) -> BucketPlan:
        if not self._buckets(use_bucketing):
            return self._plan_of(space, None)
        tuning = space.tunings.get(overlaps) if self._auto else None
        return self._plan_of(space, self.bucket_size if tuning is None else tuning.bucket_size)

    def _buckets(self, use_bucketing: bool | None) -> bool:
        return self.use_bucketing if use_bucketing is None else use_bucketing

    def _plan_of(self, space: SharedSpace, bucket_size: int | None) -> BucketPlan:
        """Return the plan of a bucket size, None: per tensor; collective where it is a new one."""
        settings = PlanSettings()
        if bucket_size is not None:
            settings = PlanSettings(bucket_size, self._first_bucket_size, self._split_tensors)
        settings = settings.following(space.order.names, space.layout)
        plan = space.plans.get(settings)
        if plan is None:
            if space.plans:
                self._comm.stats.start_buckets_anew(GRADIENTS)
            plan = space.plans[settings] = BucketPlan(self._comm, space, settings, self.hook)
        return plan

    def _size_concluded(self, space: SharedSpace) -> None:
        space.runs.clear()
        ways = self._ways(space)
        if len(ways) == 1:
            self._keep_size(space, ways[0])

    def _overlap_decided(self, space: SharedSpace, decision: Decision) -> None:
        self._note(space, decision)
        self._keep_size(space, decision.chosen == "on")

    def _keep_size(self, space: SharedSpace, overlaps: bool) -> None:
        """Stay with the bucket size that was found for a model without or with overlap, if one was."""
        tuning = space.tunings.get(overlaps) if self._auto else None
        if tuning is not None and tuning.done:
            self.bucket_size = tuning.bucket_size or self.bucket_size
            space.plans.clear()
            self._note(space, tuning.tuner.decision)

    def _note(self, space: SharedSpace, decision: Decision) -> None:
        self._tell(decision)
        space.runs.clear()
        if any(trial.steps for trial in decision.evidence):
            self._comm.stats.start_buckets_anew(GRADIENTS)  # what was tried is not what was chosen

    def _tell(self, decision: Decision) -> None:
        self.decisions.append(decision)
        if self._comm.rank == 0:
            _log.log(logging.INFO if decision.evidence else logging.DEBUG, "%s", decision)
