"""The models that a Synchronizer has seen: each one's arrays and averaging, and what holds for all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from clcomm.base.errors import ArgumentError
from clcomm.comm.communicator import Communicator
from clcomm.sync.agreement import refused, require_agreement
from clcomm.sync.bucket_plan import GRADIENTS, hook_name
from clcomm.sync.compression import CommHook
from clcomm.sync.decision import DecisionLog
from clcomm.sync.logical_shards import LogicalShards
from clcomm.sync.model_ranks import ShardedUpdate
from clcomm.sync.model_sync import ModelSync
from clcomm.sync.settings import SyncSettings
from clcomm.sync.shared_space import SharedSpace

if TYPE_CHECKING:
    from clcomm.engine.flat import FlatSpace


class KnownModels:
    """Makes a ModelSync for each model at its first use, and passes down what a Synchronizer sets for all.

    Args:
        comm: the ranks.
        settings: those of the Synchronizer at first; `use` replaces them.
    """

    def __init__(self, comm: Communicator, settings: SyncSettings):
        self.settings = settings
        #: What was chosen by measuring.
        self.decisions = DecisionLog(comm.rank)
        for decision in settings.decisions_without_buckets() if settings.shards and settings.shards.is_divided else ():
            self.decisions.add(decision)
        self._comm = comm
        self._models: dict[int, ModelSync] = {}
        self._sharded: list[tuple[FlatSpace, ShardedUpdate]] = []
        self._pauses = 0  # how many no_sync() blocks are open

    def __iter__(self) -> Iterator[ModelSync]:
        return iter(self._models.values())

    def of(self, model: object) -> ModelSync:
        """Return a model's averaging; collective the first time.

        Raises MismatchError, on every rank, where the ranks' models or settings differ.
        """
        ours = self._models.get(id(model))
        if ours is None:
            space = SharedSpace(self._comm, model, self.settings.precision)
            lines = self.settings.compared()
            require_agreement(self._comm, "Synchronizer", lines, "give every rank the same settings")
            ours = ModelSync(self._comm, space, self.settings, self.decisions, self.is_paused)
            for flat_space, update in self._sharded:
                if flat_space is space.flat_space:
                    ours.delegate(update)
            self._models[id(model)] = ours
        ours.take_over()
        return ours

    def with_space(self, flat_space: FlatSpace) -> ModelSync | None:
        """Return the averaging of an engine's flat space; None for a model not seen yet."""
        return next((ours for ours in self if ours.space.flat_space is flat_space), None)

    def space_of(self, flat_space: FlatSpace) -> SharedSpace:
        """Return the arrays of an engine's flat space; ArgumentError for a model not seen yet."""
        ours = self.with_space(flat_space)
        if ours is None:
            raise ArgumentError(
                "optimizer: expected the parameters of a model that this Synchronizer knows; "
                "call broadcast_parameters(model) first"
            )
        return ours.space

    @property
    def bucket_size(self) -> int:
        """The largest size of a bucket in bytes: that found for the latest model, else that of the settings."""
        chosen = [ours.chosen_bucket_size for ours in self]
        return next((size for size in reversed(chosen) if size is not None), self.settings.bucket_size)

    # --- what holds for all of them ---

    def use(self, settings: SyncSettings) -> None:
        """Let all models follow other settings."""
        self.settings = settings
        for ours in self:
            ours.use(settings)

    @refused
    def deal(self, counts: Sequence[int]) -> LogicalShards:
        """See `Synchronizer.deal_shards`."""
        if self.settings.shards is None:
            raise ArgumentError("deal_shards: expected logical shards: Synchronizer(comm, shards=8)")
        dealt = self.settings.shards.dealt(counts)
        require_agreement(self._comm, "deal_shards", [str(dealt.counts)], "give every rank the same counts")
        self.use(replace(self.settings, shards=dealt))
        return dealt

    def use_bucket_size(self, nbytes: int) -> None:
        """Let all models cut buckets of this size, also where the fastest was to be found."""
        if nbytes != self.bucket_size or self.settings.is_auto:
            self._comm.stats.merge_buckets(GRADIENTS)
        self.use(replace(self.settings, bucket_size=nbytes, is_auto=False))

    @refused
    def use_hook(self, hook: CommHook | None) -> None:
        """Let a hook reduce all models' buckets; ArgumentError for one that cannot, and with sharded updates."""
        if hook is not None and self._sharded:
            raise ArgumentError(
                "hook: expected None with a DistributedOptimizer, which reduces without buckets, "
                f"got {hook_name(hook)}; use one of the two"
            )
        self.use(self.settings.with_hook(hook))
        for ours in self:
            ours.forget_plans()

    @property
    def is_paused(self) -> bool:
        """Whether gradients accumulate."""
        return self._pauses > 0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let gradients accumulate within this block."""
        self._pause(1)
        try:
            yield
        finally:
            self._pause(-1)

    def _pause(self, change: int) -> None:
        self._pauses += change
        for ours in self:
            ours.pause(self.is_paused)

    def delegate(self, flat_space: FlatSpace, update: ShardedUpdate) -> None:
        """Let a sharded update reduce the gradients of a flat space, whose model may be unknown yet."""
        if self.settings.overlap is True:
            raise ArgumentError("sync: expected one without overlap for a sharded update, got overlap=True")
        self.settings.refuse_policy("sync", "no DistributedOptimizer")
        self._sharded = [(theirs, other) for theirs, other in self._sharded if theirs is not flat_space]
        self._sharded.append((flat_space, update))
        for decision in self.settings.decisions_without_buckets():
            if decision not in self.decisions:
                self.decisions.add(decision)
        for ours in self:
            if ours.space.flat_space is flat_space:
                ours.delegate(update)
                if ours.is_alike:
                    update.shard(ours.space)
