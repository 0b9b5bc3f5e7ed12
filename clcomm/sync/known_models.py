"""What holds for all models of a Synchronizer, and each one's averaging, made at the model's first use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from clcomm.base.errors import ArgumentError
from clcomm.sync.agreement import refused, require_agreement
from clcomm.sync.bucket_plan import GRADIENTS, hook_name
from clcomm.sync.compression import CommHook
from clcomm.sync.hooks import hook_of
from clcomm.sync.logical_shards import LogicalShards
from clcomm.sync.model_ranks import ShardedUpdate
from clcomm.sync.model_sync import ModelSync
from clcomm.sync.settings import SyncSettings, SyncState
from clcomm.sync.shared_space import SharedSpace

if TYPE_CHECKING:
    from clcomm.engine.flat import FlatSpace


class KnownModels(SyncState):
    """The models of a Synchronizer, beside what it sets for all of them."""

    def __init__(self, settings: SyncSettings):
        super().__init__(settings)
        self._sharded: list[tuple[FlatSpace, ShardedUpdate]] = []
        self._pauses = 0  # how many no_sync() blocks are open
        self._set_hook(hook_of(settings.compression, settings.algorithm, settings.combination))

    def __iter__(self) -> Iterator[ModelSync]:
        return iter(self._models.values())

    def of(self, model: object) -> ModelSync:
        """Return a model's averaging; collective the first time.

        Raises MismatchError, on every rank, where the ranks' models or settings differ.
        """
        ours = self._models.get(id(model))
        if ours is None:
            space = SharedSpace(self.comm, model, self.settings.precision)
            require_agreement(self.comm, "Synchronizer", self.settings.compared(), "give every rank the same settings")
            ours = self._models[id(model)] = ModelSync(self, space)
            for flat_space, update in self._sharded:
                if flat_space is space.flat_space:
                    ours.delegate(update)
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
        return next((size for size in reversed(chosen) if size is not None), self.settings.bucket_nbytes)

    # --- what holds for all of them ---

    @refused
    def deal(self, counts: Sequence[int]) -> LogicalShards:
        """See `Synchronizer.deal_shards`."""
        if self.settings.shards is None:
            raise ArgumentError("deal_shards: expected logical shards: Synchronizer(comm, shards=8)")
        dealt = self.settings.shards.dealt(counts)
        require_agreement(self.comm, "deal_shards", [str(dealt.counts)], "give every rank the same counts")
        self.use(self.settings.changed(shards=dealt))
        return dealt

    def use_bucket_size(self, nbytes: int) -> None:
        """Let all models cut buckets of this size, also where the fastest was to be found."""
        if nbytes != self.bucket_size or self.settings.is_auto:
            self.comm.stats.merge_buckets(GRADIENTS)
        self.use(self.settings.changed(bucket_size=nbytes))

    @refused
    def use_hook(self, hook: CommHook | None) -> None:
        """See `Synchronizer.register_comm_hook`."""
        if hook is not None and self._sharded:
            raise ArgumentError(
                "hook: expected None with a DistributedOptimizer, which reduces without buckets, "
                f"got {hook_name(hook)}; use one of the two"
            )
        self._set_hook(hook)
        for ours in self:
            ours.forget_plans()

    def _set_hook(self, hook: CommHook | None) -> None:
        if hook is not None and not callable(hook):
            raise ArgumentError(
                f"hook: expected something to call with (gradient, comm, out, bucket), got {type(hook).__name__}"
            )
        if hook is not None:
            self.refuse("hook: expected none, no compression, algorithm or combination")
            if self.settings.split_tensors:
                self.refuse("split_tensors: expected False", hook=hook)
        self.hook = hook

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
        self.is_paused = self._pauses > 0
        for ours in self:
            ours.pause(self.is_paused)

    def delegate(self, flat_space: FlatSpace, update: ShardedUpdate) -> None:
        """Let a sharded update reduce the gradients of a flat space, whose model may be unknown yet."""
        if self.settings.overlap is True:
            raise ArgumentError("sync: expected one without overlap for a sharded update, got overlap=True")
        self.refuse("sync: expected no DistributedOptimizer")
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
