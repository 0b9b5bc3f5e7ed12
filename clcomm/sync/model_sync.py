"""One model's averaging: its buckets and their size, and how they overlap with its backward.

A ModelSync owns all that changes from step to step: the bucket plans, the trials of bucket sizes, overlap, and the
order in which backward completes gradients. The Synchronizer sets what holds for all models and passes it down; a
BucketPlan does the work of a step. Nothing below calls back: ModelSync looks at what a trial has decided.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING
from weakref import finalize, proxy

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.base.flat_space.buckets import Bucket
from clcomm.comm.communicator import AUTO
from clcomm.comm.watch.job import this_job
from clcomm.sync.agreement import SettingsAgreement
from clcomm.sync.bucket_plan import GRADIENTS, BucketPlan, PlanSettings
from clcomm.sync.decision import Decision
from clcomm.sync.divergence import MEAN, OWN, PlannedFlip
from clcomm.sync.logical_shards import ShardMean
from clcomm.sync.model_ranks import ShardedUpdate
from clcomm.sync.overlap import CompletionOrder, Overlap, OverlapChoice
from clcomm.sync.settings import SyncSettings, SyncState
from clcomm.sync.sharded_steps import ShardedSteps
from clcomm.sync.shared_space import SharedSpace

if TYPE_CHECKING:
    from clcomm.sync.auto_buckets import AutoBuckets
    from clcomm.sync.policies.policy import LocalSteps

#: Averages a model's gradients, given the weight of this rank's.
Averaging = Callable[[float], None]


def forget_abandoned() -> None:
    """Stop overlap on Communicators that were abandoned, and drop the gradients whose reduction it has begun."""
    for each in list(this_job().averagings.values()):
        if isinstance(each, ModelSync) and each.comm.lifetime.is_abandoned:
            each.stop_overlap()
            if each.space.flat_space is not None:
                each.space.flat_space.drop_sent()


def averaging_of(model: object) -> ModelSync | None:
    """Return what averages a model's gradients, of the Synchronizer that was used last; None: nothing does."""
    found = this_job().averagings.get(id(model))
    return found if isinstance(found, ModelSync) and found.space.model is model else None


class ModelSync:
    """Averages the gradients of one model by the settings and, where these leave a choice, by what is measured.

    Args:
        known: what the Synchronizer sets for all of its models.
        space: the model's flat arrays.
    """

    def __init__(self, known: SyncState, space: SharedSpace):
        self.models: SyncState = proxy(known)  # which has this one: what a Synchronizer had is free once it is
        self.comm, self.space = known.comm, space
        #: How many times the gradients were averaged.
        self.synchronisations = 0
        #: What compares what ranks' optimizers step with.
        self.stepped_with = SettingsAgreement()
        #: Whether all ranks have been given the same parameters.
        self.is_alike = False
        #: Whether the gradients were to be averaged, or the replicas compared for that.
        self.has_started = False
        #: The bucket size in bytes that was found to be the fastest; None: none was looked for, or none is found yet.
        self.chosen_bucket_size: int | None = None
        #: The factor for this rank's gradients that was set before backward; None: none was.
        self.expected_weight: float | None = None
        self._flip: PlannedFlip | None = None
        #: What reduces the gradients in place of `average`; None: `average` does.
        self.sharded_update: ShardedUpdate | None = None
        #: This rank's part in the policy, from the first step on; None before it, and without one.
        self.local_steps: LocalSteps | None = None
        #: Whether gradients are complete for a step that is not finished, with a policy.
        self.is_in_step = False
        #: The model's steps over logical shards; None: each rank's batch is its own.
        self.sharded_steps: ShardedSteps | None = None
        if self.settings.shards is not None:
            self.sharded_steps = ShardedSteps(self.comm, space, self.settings.shards, self.settings.check_finite)
        self._plans: dict[PlanSettings, BucketPlan] = {}
        self._averagings: dict[bool | None, Averaging] = {}  # by use_bucketing, until something changes
        self._tunings: dict[bool, AutoBuckets] = {}  # where the bucket size is to be found: False without overlap
        self._overlap: OverlapChoice | None = None
        self._latest = this_job().averagings
        self._claim()
        self._order = CompletionOrder(self.comm, space.adapter, known.is_paused)

    @property
    def settings(self) -> SyncSettings:
        """Those of the Synchronizer."""
        return self.models.settings

    # --- a step ---

    def take_over(self) -> None:
        """Attach the model to this space again where another Synchronizer has used it; that one stops overlap."""
        if self._latest.get(id(self.space.model)) is not self:
            self._claim()
            self.space.attach()

    def require_unchanged(self) -> None:
        """Raise ArgumentError, on every rank, where any rank's model has other parameters than at first.

        With overlap, the error is raised on this rank alone: the others wait for buckets that have begun, and take part
        in nothing else.
        """
        try:
            self.space.adapter.require_unchanged()
        except ArgumentError as error:
            if self._overlap is not None:
                raise
            self.comm.runner.refuse(str(error))
        if self._overlap is None:
            self._require_classes()

    def _require_classes(self) -> None:
        """Raise ArgumentError, on every rank, where a loss of any rank's had a target that is no class."""
        if self.space.flat_space is not None:
            try:
                self.space.flat_space.require_classes()
            except ArgumentError as error:
                self.comm.runner.refuse(str(error))

    def average(self, use_bucketing: bool | None, weight: float) -> None:
        """Replace each gradient by its mean over the ranks; collective.

        Args:
            use_bucketing: False: each tensor on its own; None: as in the settings.
            weight: factor for this rank's gradients.
        """
        if self._flip is not None:
            self._flip_in(OWN, self.space.arrays.grads if self.shard_mean is None else self.shard_mean.rows[-1])
        if self.shard_mean is not None and self.sharded_steps is not None:
            self.sharded_steps.average()
            return
        average = self._averagings.get(use_bucketing)
        if average is None:
            average = self._prepare(use_bucketing)
        average(weight)
        self._require_classes()  # after all buckets where some began in backward

    @property
    def shard_mean(self) -> ShardMean | None:
        """What averages the gradients of logical shards; None: a plan's buckets are averaged."""
        return None if self.sharded_steps is None else self.sharded_steps.mean

    def count_synchronisation(self) -> None:
        """Note that the gradients were averaged, here or by a sharded update; collective in the first steps."""
        self.synchronisations += 1
        if self._flip is not None:
            self._flip_in(MEAN, self.space.arrays.reduced)
        if self.shard_mean is None and self._order.is_open and self._order.close():
            self._averagings.clear()  # the buckets may be others from now on

    def plan(self, use_bucketing: bool | None) -> BucketPlan:
        """Return the plan of the next synchronisation; collective where it is a new one."""
        return self._plan(use_bucketing, self._ways()[-1])

    def buckets(self, use_bucketing: bool | None = None) -> tuple[Bucket, ...]:
        """Return the buckets that the next synchronisation reduces, in order; collective the first time."""
        for whole in (self.sharded_update, self.shard_mean):
            if whole is not None:
                return whole.buckets
        return self.plan(use_bucketing).buckets

    def steps_of(self, call: str) -> ShardedSteps:
        """Return the steps over logical shards for a call; ArgumentError where there are none."""
        if self.sharded_steps is None:
            raise ArgumentError(f"{call}: expected a Synchronizer with logical shards: Synchronizer(comm, shards=8)")
        return self.sharded_steps

    def reductions(self, use_bucketing: bool | None = None) -> Callable[[], None]:
        """Return what reduces the buckets of `plan` and does nothing else: to measure communication alone.

        Each call reduces what backward left last, and changes no gradient between a `sync_gradients` and the next
        backward. Collective; so is each call. Calls are counted, and change a lossy compression's state. Raises
        ArgumentError where a DistributedOptimizer reduces the gradients.
        """
        if self.sharded_update is not None:
            raise ArgumentError("model: expected one whose gradients are reduced in buckets, got a sharded update's")
        return self.plan(use_bucketing).reduce if self.shard_mean is None else self.shard_mean.reduce

    @property
    def overlaps(self) -> bool:
        """Whether buckets begin in backward, or are to in a trial."""
        return self._followed is not None

    @property
    def begins_in_backward(self) -> bool:
        """Whether the model's next backward begins buckets, so that no other may follow before their use."""
        return self._followed is not None and self._followed.begins

    @property
    def _followed(self) -> Overlap | None:
        """What follows the model's backward; None: nothing does."""
        return None if self._overlap is None else self._overlap.overlap

    @property
    def completion_order(self) -> tuple[str, ...]:
        """The parameters in the order in which backward completes their gradients; empty until it is known."""
        return self._order.names

    # --- what the Synchronizer passes down ---

    def follow_settings(self) -> None:
        """Follow the Synchronizer's settings, which have changed; collective where shards are dealt otherwise."""
        if not self.settings.is_auto:
            self.chosen_bucket_size = None
        if self.sharded_steps is not None and self.settings.shards is not None:
            self.sharded_steps.deal(self.settings.shards)
        self._averagings.clear()

    def delegate(self, update: ShardedUpdate) -> None:
        """Let a sharded update reduce the gradients from now on."""
        self.sharded_update = update
        self.forget_plans()

    def forget_plans(self) -> None:
        """Make plans anew, and start overlap again, at the next synchronisation."""
        self._plans.clear()
        self._averagings.clear()
        self.stop_overlap()

    def pause(self, is_paused: bool) -> None:
        """Let gradients accumulate, or no longer; another backward begins in either case."""
        self._order.is_paused = is_paused
        if self._followed is not None:
            self._followed.pause(is_paused)

    def stop_overlap(self) -> None:
        """Stop following the model's backward."""
        if self._followed is not None:
            self._followed.stop()

    def flip_bit(self, where: int) -> str:
        """Flip a bit of the parameters now, or of the gradients in the next averaging; return where, in words."""
        self._flip = PlannedFlip(self.space, where)
        return self._flip.said

    def _flip_in(self, place: str, flat: np.ndarray) -> None:
        if self._flip is not None and self._flip.place == place:
            self._flip.flip(flat)
            self._flip = None

    def _claim(self) -> None:
        other = self._latest.get(id(self.space.model))
        if other is not None:
            other.stop_overlap()
        self._latest[id(self.space.model)] = self

    # --- how the gradients are averaged ---

    def _prepare(self, use_bucketing: bool | None) -> Averaging:
        """Return what averages the gradients until something changes; collective where a plan is a new one."""
        if self._followed is not None:
            self._followed.begin_rest()
        elif self._overlap is None and self.settings.overlap and not self._order.is_open:
            self._start_overlap(self.settings.overlap)
        average = self._size_trial(use_bucketing)
        if average is None:
            average = self._overlapping(use_bucketing)
        self._averagings[use_bucketing] = average
        return average

    def _overlapping(self, use_bucketing: bool | None) -> Averaging:
        """Return what averages the gradients with overlap, without it, or as a trial of both."""
        choice = self._overlap
        if choice is None or self._followed is None:
            return self._plan(use_bucketing, False).run
        if choice.is_settled:
            return partial(choice.run, self._plan(use_bucketing, True))
        return partial(self._try_overlap, choice, self._plan(use_bucketing, False), self._plan(use_bucketing, True))

    def _start_overlap(self, setting: bool | str) -> None:
        choice = OverlapChoice(self.comm, self.space, self._order, setting, self.synchronisations + 1)
        self._overlap = choice
        if choice.overlap is not None:
            choice.overlap.pause(self.models.is_paused)
            finalize(self, choice.overlap.stop).atexit = False  # the parameters' hooks would begin buckets for nobody
        if choice.decision is not None:
            self._overlap_decided(choice.decision)

    def _try_overlap(self, choice: OverlapChoice, off: BucketPlan, on: BucketPlan, weight: float) -> None:
        choice.try_step(off, on, self.synchronisations + 1, weight)
        if choice.decision is not None:
            self._overlap_decided(choice.decision)

    def _overlap_decided(self, decision: Decision) -> None:
        self._note(decision)
        self._keep_size(decision.chosen == "on")

    def _ways(self) -> tuple[bool, ...]:
        """Return the ways in which buckets may be reduced: without overlap (False), with it (True), or both."""
        if self._overlap is not None:
            return self._overlap.ways
        return (False, True) if self.settings.overlap == AUTO else (bool(self.settings.overlap),)

    # --- bucket sizes ---

    def _size_trial(self, use_bucketing: bool | None) -> Averaging | None:
        """Return what tries bucket sizes; None where none are to be tried now. Collective the first time."""
        if not (self.settings.is_auto and self._is_bucketed(use_bucketing)):
            return None
        for overlaps in self._ways():
            if overlaps and self._overlap is None:
                break  # it has not started yet
            tuning = self._tuning(overlaps)
            if not tuning.is_done:
                return partial(self._try_size, tuning)
        return None

    def _tuning(self, overlaps: bool) -> AutoBuckets:
        """Return what looks for the fastest bucket size without or with overlap; collective the first time."""
        tuning = self._tunings.get(overlaps)
        if tuning is None:
            from clcomm.sync.auto_buckets import AutoBuckets  # here, as most programs name a size

            hook = self.models.hook
            may_try = hook is None or getattr(hook, "elementwise", False)
            followed = self._followed if overlaps else None
            tuning = self._tunings[overlaps] = AutoBuckets(self.comm, self.space, may_try, followed)
        return tuning

    def _try_size(self, tuning: AutoBuckets, weight: float) -> None:
        tuning.run(self._plan_of(tuning.bucket_size), weight)  # a new plan is made before timing begins
        if tuning.is_done:
            self._averagings.clear()
            ways = self._ways()
            if len(ways) == 1:
                self._keep_size(ways[0])
        if tuning.overlap is not None:
            tuning.follow(self._plan_of(tuning.bucket_size))

    def _keep_size(self, overlaps: bool) -> None:
        """Stay with the bucket size that was found without or with overlap, if one was."""
        tuning = self._tunings.get(overlaps) if self.settings.is_auto else None
        if tuning is not None and tuning.is_done and tuning.decision is not None:
            self.chosen_bucket_size = tuning.bucket_size or self.chosen_bucket_size
            self._plans.clear()
            self._note(tuning.decision)

    def _note(self, decision: Decision) -> None:
        self.models.decisions.add(decision)
        self._averagings.clear()
        if any(trial.steps for trial in decision.evidence):
            self.comm.stats.merge_buckets(GRADIENTS)  # the trials used buckets other than the chosen ones

    # --- plans ---

    def _is_bucketed(self, use_bucketing: bool | None) -> bool:
        return self.settings.use_bucketing if use_bucketing is None else use_bucketing

    def _plan(self, use_bucketing: bool | None, overlaps: bool) -> BucketPlan:
        if not self._is_bucketed(use_bucketing):
            return self._plan_of(None)
        tuning = self._tunings.get(overlaps) if self.settings.is_auto else None
        return self._plan_of(self.settings.bucket_nbytes if tuning is None else tuning.bucket_size)

    def _plan_of(self, bucket_size: int | None) -> BucketPlan:
        """Return the plan of a bucket size, None: per tensor; collective where it is a new one."""
        cut = PlanSettings()
        if bucket_size is not None:
            cut = PlanSettings(bucket_size, self.settings.first_bucket_size, self.settings.split_tensors)
        cut = cut.following(self._order.names, self.space.layout)
        plan = self._plans.get(cut)
        if plan is None:
            if self._plans:
                self.comm.stats.merge_buckets(GRADIENTS)
            hook, checks = self.models.hook, self.settings.check_finite
            plan = self._plans[cut] = BucketPlan.agreed(self.comm, self.space, cut, hook, checks)
        return plan
