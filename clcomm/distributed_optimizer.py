"""The sharded update: each rank reduces, updates and keeps optimizer state for its own part of the flat space.

ZeRO (Rajbhandari, Rasley, Ruwase and He, 2020). Reduce-scatter and all-gather together move as many bytes as an
all-reduce, each rank holds 1/N of the state, and the ranks of a host do not repeat the same update. In stage 2 each
rank also holds 1/N of the gradients, in stage 3 of the parameters too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, Protocol

import numpy as np

from clcomm.adapters.adapter import FlatArrays
from clcomm.clipping import clip_coefficient, global_norm, named_parts, scale
from clcomm.errors import ArgumentError
from clcomm.flat_space.buckets import Bucket
from clcomm.flat_space.memory import MemoryUse
from clcomm.flat_space.shards import Part, ShardPlan
from clcomm.optim import Optimizer
from clcomm.sync.agreement import CHECKS, require_agreement
from clcomm.sync.finiteness import raise_non_finite
from clcomm.sync.gradient_shards import GradientShards
from clcomm.sync.parameter_shards import updated_parameters
from clcomm.sync.shared_space import SharedSpace
from clcomm.sync.uneven_inputs import apply_weight
from clcomm.synchronizer import GRADIENTS, PARAMETERS, Synchronizer

_ITEM = 4  # bytes of a float32


class DistributedOptimizer:
    """An optimizer of `clcomm.optim` that updates a part of the parameters on each rank; the same bits as without it.

    The loop stays forward, backward, sync_gradients, step. `step` and `state_dict` are collective. After a step a
    gradient is still this rank's own, not the mean.

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
        if sync.compression != "none":
            raise ArgumentError(f"sync: expected one without compression for a sharded update, got {sync.compression}")
        self.optimizer, self.sync = optimizer, sync
        layout, comm = optimizer.space.layout, sync.comm
        known = sync.known_space(optimizer.space)
        if known is not None and known.shards is not None:  # an earlier optimizer's
            self._plan: ShardPlan = known.shards.plan
        else:
            self._plan = ShardPlan(layout, comm.size, *((layout.span, None) if sync.zero == 1 else sync.unit_sizes))
        parts = self._plan.parts(comm.rank)
        optimizer.restrict_to([Part(*(value // _ITEM for value in part)) for part in parts])
        self._shard: _Update | None = None
        self._weight = 1.0  # of this rank's gradients in the next mean
        self._is_reduced = False  # whether the gradients are averaged already, before the step
        sync.delegate_reduction(optimizer.space, self)

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
        """The learning rate."""
        return self.optimizer.lr

    @lr.setter
    def lr(self, value: float) -> None:
        self.optimizer.lr = value

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
        if self.sync.zero > 1 and self._shard is None:
            self.require_same_settings()
            self.sync.guard.require_alike(space)
            if space.shards is None:
                space.shards = _Units(self.sync, space, self._plan)
            self._shard = space.shards

    def expect_step(self, weight: float) -> None:
        """Note that the gradients are complete, and count `weight` times in the mean; the Synchronizer calls it."""
        self._weight, self._is_reduced = weight, False

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
        self.optimizer.update_range(shard.gradients, shard.params)
        shard.gather()
        self._is_reduced = False
        self.sync.count_synchronisation(shard.space.model)
        shard.follow(self.sync.completion_order(shard.space.model))

    def _reduced(self) -> _Update:
        """Return this rank's part with its averaged gradients; they are averaged once a step."""
        shard = self._shard
        if shard is None:
            space = self.sync.space_of(self.optimizer.space)
            if self.sync.zero > 1:
                raise ArgumentError(
                    f"optimizer: expected broadcast_parameters(model) before the first backward with "
                    f"zero={self.sync.zero}, got none"
                )
            shard = self._shard = _Range(self.sync, space, self._plan)
        if not self._is_reduced:
            shard.reduce(self._weight)
            self._weight = 1.0
            if self.sync.check_finite:
                shard.require_finite()
            self._is_reduced = True
        return shard

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
        return state

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Continue from a whole state, written by any number of ranks or by the plain optimizer."""
        self.optimizer.load_state_dict(state)


class _Update(Protocol):
    """This rank's part of a model, with what reduces its gradients and gathers its parameters.

    gradients: the device's buffer of the averaged gradients. params: that of the parameters; None: the flat space's.
    """

    space: SharedSpace
    gradients: Any
    params: Any

    def memory(self) -> tuple[int, int, int]:
        """Return the bytes of parameters, of gradients, and in flight: see MemoryUse."""

    def reduce(self, weight: float) -> None:
        """Average the gradients of this rank's part into `gradients`; its own count `weight` times."""

    def scale(self, coefficient: float) -> None:
        """Multiply this rank's part by the coefficient."""

    def clip(self, max_norm: float) -> float:
        """Scale this rank's part so that the norm of the whole mean is at most `max_norm`; return the norm before."""

    def is_finite(self) -> bool:
        """Return whether this rank's part of the mean holds neither NaN nor Inf."""

    def require_finite(self) -> None:
        """Raise NonFiniteError on every rank, if any rank's part of the mean holds NaN or Inf."""

    def begin_update(self, is_clipped: bool) -> None:
        """Wait until this rank may change its parameters."""

    def gather(self) -> None:
        """Let all ranks have all updated parameters."""

    def follow(self, completed: Sequence[str]) -> None:
        """Note in which order backward completes gradients."""


class _Units:
    """This rank's part of every unit of a flat space: stages 2 and 3."""

    def __init__(self, sync: Synchronizer, space: SharedSpace, plan: ShardPlan):
        self.space, self.plan, self._comm = space, plan, sync.comm
        self._parameters = updated_parameters(sync.comm, space, plan, sync.zero)
        self._shards = GradientShards(sync.comm, space, plan, sync.check_finite)
        self.gradients, self.params = self._shards.buffer, self._parameters.buffer
        self.require_finite, self.follow = self._shards.require_finite, self._shards.follow
        sync.comm.barrier()

    def memory(self) -> tuple[int, int, int]:
        in_flight = self._shards.in_flight_nbytes + self._parameters.in_use_nbytes
        return self._parameters.nbytes, self._shards.values.nbytes, in_flight

    def reduce(self, weight: float) -> None:
        self._shards.complete()
        self._shards.upload()

    def scale(self, coefficient: float) -> None:
        for _, values in self._shards.named_parts():  # not the padding, in which 0 times NaN would stay
            scale(values, coefficient)
        self._shards.upload()

    def clip(self, max_norm: float) -> float:
        norm = global_norm(self._comm, self.space, self._shards.named_parts())
        coefficient = clip_coefficient(norm, max_norm)
        if coefficient != 1.0:
            self.scale(coefficient)
        return norm

    def is_finite(self) -> bool:
        return bool(np.isfinite(self._shards.values).all())

    def begin_update(self, is_clipped: bool) -> None:
        self._parameters.begin_update()

    def gather(self) -> None:
        self._parameters.end_update()
        self._shards.finish_step()


class _Range:
    """This rank's range of a flat space, with its reduce-scatter and all-gather: stage 1."""

    params = None

    def __init__(self, sync: Synchronizer, space: SharedSpace, plan: ShardPlan):
        self.space, self._comm = space, sync.comm
        self._flat = space.adapter.flat_space  # type: ignore[attr-defined]
        parts = plan.parts(sync.comm.rank)
        self._start, self._stop = parts[0][:2] if parts else (0, 0)
        sync.check_replicas(space.model)  # settings too: ranks may share memory only if both are alike
        own, rank, nbytes = space.shard_nbytes, self._comm.rank, space.layout.nbytes
        self._mean = space.padded.reduced[rank * own : (rank + 1) * own].view(np.float32)
        rows = self._move_to_common_memory()
        self._is_common = rows is not None
        self._reduce: Callable[[], Any]
        if rows is not None:
            self._reduce = self._comm.reduce_scatter_init(rows, "mean", out=self._mean, label=GRADIENTS, nbytes=nbytes)
        else:
            grads = space.padded.grads.view(np.float32)
            self._reduce = partial(
                self._comm.reduce_scatter, grads, "mean", out=self._mean, label=GRADIENTS, nbytes=nbytes
            )
        params = space.padded.params.view(space.precision.dtype)
        self._all_gather = self._comm.all_gather_in_place_init(params, label=PARAMETERS, nbytes=space.params_nbytes)
        self.gradients = self._gradient_buffer()
        self._whole_gradients = self._flat.reduced
        self._pull = partial(space.adapter.pull_gradients, Bucket(0, space.layout.ranges, 0, space.layout.span))

    def _move_to_common_memory(self) -> np.ndarray | None:
        """Move parameters and gradients into memory common to all ranks, if there is any.

        Returns all ranks' gradients, a row for each; None where nothing was moved.
        """
        comm, padded = self._comm, self.space.padded
        if comm.size == 1 or not all(comm.all_gather_object(not self._flat.is_staged, label=CHECKS)):
            return None
        params, rows = comm.allocate_common(padded.params.nbytes), comm.allocate_common(comm.size * padded.grads.nbytes)
        if not (comm.is_common(params) and comm.is_common(rows)):
            return None
        rows = rows.reshape(comm.size, -1)
        self.space.move(FlatArrays(params, rows[comm.rank], padded.reduced))  # all ranks write the same params
        comm.barrier()
        return rows.view(np.float32)

    def _gradient_buffer(self) -> Any:
        """Return the device buffer from which the optimizer reads the mean; None for an empty range."""
        flat, nbytes = self._flat, self._stop - self._start
        if not nbytes:
            return None
        if flat.is_staged:
            return flat.device.allocate(nbytes)
        return flat.reduced.get_sub_region(self._start, nbytes)

    def memory(self) -> tuple[int, int, int]:
        padded, comm = self.space.padded, self._comm
        own = [each.nbytes // (comm.size if comm.is_common(each) else 1) for each in (padded.params, padded.reduced)]
        return own[0], padded.grads.nbytes + (0 if padded.reduced is padded.grads else own[1]), 0

    def follow(self, completed: Sequence[str]) -> None:
        pass

    def begin_update(self, is_clipped: bool) -> None:
        if is_clipped and self._is_common:  # else all ranks have just met in `reduce`
            self._flat.device.finish()
            self._comm.barrier()

    def reduce(self, weight: float) -> None:
        if self._flat.reduced is not self._whole_gradients:
            raise ArgumentError("optimizer: another Synchronizer moved its model's memory; use one Synchronizer")
        self._pull()
        if weight != 1.0:
            apply_weight(self.space.arrays.grads.view(np.float32), weight)
        self._reduce()
        self._upload()

    def _upload(self) -> None:
        """Copy the mean to the device, where its memory is separate."""
        if self._flat.is_staged and self.gradients is not None:
            self._flat.device.write(self.gradients, self._mean[: (self._stop - self._start) // _ITEM])

    def scale(self, coefficient: float) -> None:
        for _, values in self._named_parts():  # not the padding, in which 0 times NaN would stay
            scale(values, coefficient)
        self._upload()

    def _named_parts(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield what this rank has of each parameter's gradient, by name."""
        return named_parts(self.space.layout, self._mean.view(np.uint8)[: self._stop - self._start], self._start)

    def clip(self, max_norm: float) -> float:
        norm = global_norm(self._comm, self.space, self._named_parts())
        coefficient = clip_coefficient(norm, max_norm)
        if coefficient != 1.0:
            self.scale(coefficient)
        return norm

    def is_finite(self) -> bool:
        return bool(np.isfinite(self._mean).all())

    def require_finite(self) -> None:
        if self._comm.all_gather(np.array([self.is_finite()]), label=CHECKS).all():
            return
        layout, arrays = self.space.layout, self.space.arrays
        mean = np.zeros(layout.span, np.uint8)
        mean[self._start : self._stop] = self._mean.view(np.uint8)[: self._stop - self._start]
        raise_non_finite(self._comm, layout, layout.ranges, arrays.grads, mean)

    def gather(self) -> None:
        flat = self._flat
        if flat.is_staged:
            start, stop = map(flat.precision.nbytes, (self._start, self._stop))
            flat.device.read(flat.params, self.space.arrays.params[start:stop], start)
        else:
            flat.device.finish()
        self._all_gather()
        if flat.is_staged:
            flat.push_params()
