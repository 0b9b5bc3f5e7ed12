"""The sharded update: each rank reduces, updates and keeps optimizer state for its own part of the flat space.

ZeRO (Rajbhandari, Rasley, Ruwase and He, 2020). Reduce-scatter and all-gather together move as many bytes as an
all-reduce, each rank holds 1/N of the state, and the ranks of a host do not repeat the same update. In stage 2 each
rank also holds 1/N of the gradients, in stage 3 of the parameters too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.base.flat_space.buckets import Bucket
from clcomm.base.flat_space.layout import FlatLayout, ShardPart, ShardPlan
from clcomm.base.flat_space.memory import MemoryUse
from clcomm.optim import Optimizer
from clcomm.optim.groups import MISSED, ParamGroup
from clcomm.sync import replicas
from clcomm.sync.agreement import require_agreement
from clcomm.sync.shared_space import SharedSpace
from clcomm.sync.synchronizer import Synchronizer
from clcomm.sync.zero.reductions import Update
from clcomm.sync.zero.update import RangeUpdate, UnitUpdate

_ITEM = 4  # bytes of a float32


class DistributedOptimizer:
    """An optimizer of `clcomm.optim` that updates a part of the parameters on each rank; the same bits as without it.

    The loop stays forward, backward, sync_gradients, step. `step` and `state_dict` are collective. A gradient is this
    rank's own, not the mean, after the step as well; to change it between the two is refused, but for
    `clcomm.clip_grad_norm` and `scale_gradients`.

    On one host, where the device shares its memory, the parameters move into memory common to all ranks: each rank
    writes its part, and all read it there. A change of parameters by hand then holds for all ranks.

    What is divided follows from the Synchronizer's `zero`. From stage 2 on a gradient is gone once its unit is
    complete, backwards communicate, and those of a step are added up after the mean; see docs/zero.md.

    Args:
        optimizer: one of `clcomm.optim` that has not taken a step.
        sync: the Synchronizer of the same model; from now on `step()` averages the gradients, not `sync_gradients`.

    Raises:
        ArgumentError: for another library's optimizer, and for a Synchronizer with compression or overlap=True.
        MismatchError: where the ranks' settings or replicas differ.
    """

    #: Each rank holds a different part of the state.
    is_sharded = True

    def __init__(self, optimizer: Optimizer, sync: Synchronizer):
        if not isinstance(optimizer, Optimizer):
            kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
            raise ArgumentError(
                f"optimizer: expected one of clcomm.optim, whose state can be divided between ranks, got {kind}"
            )
        if not optimizer.is_alone:
            raise ArgumentError("optimizer: expected one with all of a model's trainable parameters, got one with some")
        if sync.compression != "none":
            raise ArgumentError(f"sync: expected one without compression for a sharded update, got {sync.compression}")
        self.optimizer, self.sync = optimizer, sync
        layout, comm = optimizer.space.layout, sync.comm
        known = sync.models.with_space(optimizer.space)
        if known is not None and known.space.shards is not None:  # an earlier optimizer's
            self._plan: ShardPlan = known.space.shards.plan
        else:
            self._plan = self._plan_of(layout)
        parts = self._plan.parts(comm.rank)
        optimizer.restrict_to([ShardPart(*(value // _ITEM for value in part)) for part in parts])
        self._shard: Update | None = None
        self._weight = 1.0  # of this rank's gradients in the next mean
        self._is_reduced = False  # whether the gradients are averaged already, before the step
        self._missing: frozenset[str] = frozenset()  # parameters of which no rank has a gradient
        sync.models.delegate(optimizer.space, self)

    def _plan_of(self, layout: FlatLayout) -> ShardPlan:
        settings = self.sync.models.settings
        sizes = (layout.span, None) if settings.zero == 1 else settings.unit_sizes
        return ShardPlan(layout, self.sync.comm.size, *sizes)

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """What is reduced at a time."""
        return tuple(unit.bucket for unit in self._plan.units)

    def __reduce__(self) -> NoReturn:
        raise ArgumentError(
            "DistributedOptimizer: expected to stay in its process, got one to be copied or pickled; use state_dict()"
        )

    @property
    def lr(self) -> float:
        """The learning rate: that of the first group. Setting it sets those of all groups."""
        return self.optimizer.lr

    @lr.setter
    def lr(self, value: float) -> None:
        self.optimizer.lr = value

    @property
    def param_groups(self) -> list[ParamGroup]:
        """The optimizer's groups; their hyper-parameters can be set at any time, the same on every rank."""
        return self.optimizer.param_groups

    def add_param_group(self, group: Mapping[str, object]) -> None:
        """Raise ArgumentError: groups are added to the optimizer, before its state is divided."""
        raise ArgumentError(
            "param_groups: expected all before the DistributedOptimizer is made, got another; add it to the optimizer"
        )

    @property
    def steps(self) -> int:
        """Steps taken so far."""
        return self.optimizer.steps

    @property
    def state_nbytes(self) -> int:
        """Bytes of optimizer state on this rank."""
        return self.optimizer.state_nbytes

    @property
    def is_divided(self) -> bool:
        """Whether the memory is divided between the ranks yet."""
        return self._shard is not None

    def memory(self) -> MemoryUse:
        """Return the bytes that this rank has, once a step or `broadcast_parameters` has divided them."""
        shard = self._shard
        if shard is None:
            raise ArgumentError("memory: expected a step before, which divides it between the ranks")
        return MemoryUse(*shard.memory()[:2], self.state_nbytes, shard.memory()[2])

    def zero_grad(self) -> None:
        """Drop all gradients."""
        self._is_reduced = False
        self.optimizer.zero_grad()

    def shard(self, space: SharedSpace) -> None:
        """Divide a model's memory between the ranks, from stage 2 on; the Synchronizer calls it. Collective."""
        if self.sync.models.settings.zero > 1 and self._shard is None:
            self.require_same_settings()
            self.sync.guard.require_alike(space)
            if space.shards is None:
                self._plan = self._plan_of(self.optimizer.space.layout)  # with the names that the model has given it
                space.shards = UnitUpdate(self.sync, space, self._plan)
            self._shard = space.shards

    def expect_step(self, weight: float) -> None:
        """Note that the gradients are complete, and count `weight` times in the mean; the Synchronizer calls it."""
        self._weight, self._is_reduced = weight, False
        self._await_step()

    def step(self) -> None:
        """Average the gradients, update this rank's part of the parameters, and gather all parts on every rank.

        A rank without a gradient counts as zero. Raises NonFiniteError where the Synchronizer is asked to check.
        """
        self.optimizer.space.device.on_host(self._step)

    def clip_grad_norm(self, max_norm: float) -> float:
        """Average the gradients, clip them as `clcomm.clip_grad_norm` does, and return their norm before."""
        return self._reduced().clip(max_norm)

    def has_finite_gradients(self) -> bool:
        """Average the gradients, and return whether this rank's part holds neither NaN nor Inf."""
        return self._reduced().is_finite()

    def scale_gradients(self, coefficient: float) -> None:
        """Average the gradients, and multiply this rank's part by the coefficient, as every rank does."""
        self._reduced().scale(coefficient)

    def _step(self) -> None:
        is_clipped, shard = self._is_reduced, self._reduced()
        shard.begin_update(is_clipped)
        flat = self.optimizer.space
        named = zip(flat.layout.ranges, flat.parameters, strict=True) if self._missing else ()
        missing = [parameter for place, parameter in named if place.name in self._missing]
        self.optimizer.update_range(shard.gradients, shard.params, missing)
        shard.gather()
        self._is_reduced = self.optimizer.space.step_averages = False
        ours = self.sync.models.of(shard.space.model)
        replicas.count_synchronisation(ours)
        replicas.compare_settings(ours)  # not before: a rank's backward may be reducing gradients
        shard.follow(ours.completion_order)

    def _reduced(self) -> Update:
        """Return this rank's part with its averaged gradients; they are averaged once a step."""
        shard, known = self._shard, self.sync.models
        if shard is None:
            space = known.space_of(self.optimizer.space)
            if known.settings.zero > 1:
                raise ArgumentError(
                    f"optimizer: expected broadcast_parameters(model) before the first backward with "
                    f"zero={known.settings.zero}, got none"
                )
            shard = self._shard = RangeUpdate(self.sync, space, self._plan)
        if not self._is_reduced:
            shard.reduce(self._weight)
            self._weight, self._missing = 1.0, shard.missing()
            if known.settings.check_finite:
                shard.require_finite()
            self._is_reduced = True
            self._await_step()
        return shard

    def _await_step(self) -> None:
        """Refuse the program's changes of gradients: of this rank's own, where those of the mean would be meant."""
        self.optimizer.space.step_averages = self.sync.models.settings.zero == 1

    def require_same_settings(self) -> None:
        """Raise MismatchError on every rank where the ranks' learning rates, steps or the like differ; collective."""
        settings = [f"{name} {value}" for name, value in self.optimizer.settings().items()]
        require_agreement(self.sync.comm, "sharded update", settings, "make the same optimizer on every rank")

    # --- checkpoints ---

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return the whole state, gathered from all ranks: the plain optimizer's `state_dict()`. Collective.

        Any number of ranks can continue from it, and so can the plain optimizer.
        """
        state, comm = self.optimizer.state_dict(), self.sync.comm
        for name in self.optimizer.state_names:
            block = np.zeros(self._plan.shard_nbytes // _ITEM, np.float32)
            block[: state[name].size] = state[name]
            state[name] = self._plan.merged(list(comm.all_gather(block, label="checkpoint")))
        # A rank knows of the parameters of which it has a part which steps they were left out of.
        missed = np.asarray(state.pop(MISSED, np.zeros(len(self.optimizer.space.parameters), np.int64)))
        missed = comm.all_reduce(missed, "max", label="checkpoint")
        return {**state, **({MISSED: missed} if missed.any() else {})}

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Continue from a whole state, written by any number of ranks or by the plain optimizer."""
        self.optimizer.load_state_dict(state)
