"""A rank's part of a model, as a DistributedOptimizer uses it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NoReturn

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.base.flat_space.buckets import Bucket
from clcomm.base.flat_space.layout import ShardPlan
from clcomm.base.flat_space.parameters import is_missing
from clcomm.comm.communicator import Communicator
from clcomm.sync.agreement import CHECKS
from clcomm.sync.clipping import CLIPPING, clip_coefficient, global_norm, named_parts, norm_of_shards, scale
from clcomm.sync.divergence import raise_non_finite
from clcomm.sync.model_ranks import apply_weight
from clcomm.sync.shared_space import SharedSpace
from clcomm.sync.synchronizer import PARAMETERS, Synchronizer
from clcomm.sync.zero.parameter_shards import updated_parameters
from clcomm.sync.zero.reductions import GradientShards, move_to_common_memory, prepared_mean


class Update(ABC):
    """This rank's part of a model, with what reduces its gradients and gathers its parameters.

    Attributes:
        gradients: the device's buffer of the averaged gradients.
        params: that of the parameters; None: the flat space's.
    """

    gradients: Any
    params: Any = None

    def __init__(self, comm: Communicator, space: SharedSpace):
        self.comm, self.space = comm, space

    @abstractmethod
    def memory(self) -> tuple[int, int, int]:
        """Return the bytes of parameters, of gradients, and in flight: see MemoryUse."""

    @abstractmethod
    def reduce(self, weight: float) -> None:
        """Average the gradients of this rank's part into `gradients`; its own count `weight` times."""

    @abstractmethod
    def named_parts(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield what this rank has of each parameter's averaged gradient, by name."""

    def missing(self) -> frozenset[str]:
        """Return the parameters of which this rank has a part, and no rank a gradient."""
        return frozenset(name for name, mean in self.named_parts() if is_missing(mean))

    @abstractmethod
    def upload(self) -> None:
        """Copy the averaged gradients to the device, where its memory is separate."""

    @abstractmethod
    def is_finite(self) -> bool:
        """Return whether this rank's part of the mean holds neither NaN nor Inf."""

    @abstractmethod
    def raise_non_finite(self) -> NoReturn:
        """Raise NonFiniteError on every rank, as some rank's part of the mean holds NaN or Inf; collective."""

    @abstractmethod
    def begin_update(self, is_clipped: bool) -> None:
        """Wait until this rank may change its parameters."""

    @abstractmethod
    def gather(self) -> None:
        """Let all ranks have all updated parameters."""

    @abstractmethod
    def follow(self, completed: Sequence[str]) -> None:
        """Note in which order backward completes gradients."""

    def require_finite(self) -> None:
        """Raise NonFiniteError on every rank, if any rank's part of the mean holds NaN or Inf; collective."""
        if not self.comm.all_gather(np.array([self.is_finite()]), label=CHECKS).all():
            self.raise_non_finite()

    def scale(self, coefficient: float) -> None:
        """Multiply this rank's part by the coefficient."""
        for _, values in self.named_parts():  # not the padding, in which 0 times NaN would stay
            scale(values, coefficient)
        self.upload()

    def norm(self) -> float:
        """Return the norm of the whole mean; collective."""
        return global_norm(self.comm, self.space, self.named_parts())

    def clip(self, max_norm: float) -> float:
        """Scale this rank's part so that the norm of the whole mean is at most `max_norm`; return the norm before."""
        norm = self.norm()
        coefficient = clip_coefficient(norm, max_norm)
        if coefficient != 1.0:
            self.scale(coefficient)
        return norm


# --- Stage 1: a rank has a range of the flat space. ---

#: Bytes of a float32.
_ITEM = 4


class RangeUpdate(Update):
    """This rank's range of a flat space, with its reduce-scatter and all-gather: stage 1."""

    def __init__(self, sync: Synchronizer, space: SharedSpace, plan: ShardPlan):
        super().__init__(sync.comm, space)
        self._flat = space.adapter.flat_space  # type: ignore[attr-defined]
        parts = plan.parts(sync.comm.rank)
        self._start, self._stop = parts[0][:2] if parts else (0, 0)
        sync.check_replicas(space.model)  # settings too: ranks may share memory only if both are alike
        own, rank, nbytes = space.shard_nbytes, self.comm.rank, space.layout.nbytes
        self._mean = space.padded.reduced[rank * own : (rank + 1) * own].view(np.float32)
        self._sync, self._steps = sync, sync.models.of(space.model).sharded_steps
        self._shard_mean = None if self._steps is None else self._steps.mean
        rows = move_to_common_memory(sync.comm, space, with_gradients=self._shard_mean is None)
        self._is_common = rows is not None
        if self._shard_mean is None:
            gradients = space.padded.grads.view(np.float32) if rows is None else rows
            self._reduce = prepared_mean(self.comm, gradients, self._mean, nbytes)
        whole = space.padded.reduced.view(np.float32)
        self._gather_mean = self.comm.all_gather_in_place_init(whole, label=CLIPPING, nbytes=nbytes)
        params = space.padded.params.view(space.precision.dtype)
        self._all_gather = self.comm.all_gather_in_place_init(params, label=PARAMETERS, nbytes=space.params_nbytes)
        self.gradients = self._gradient_buffer()
        self._whole_gradients = self._flat.reduced
        self._flat.moves.divide([own * rank for rank in range(1, self.comm.size)])
        self._pull = partial(space.adapter.pull_gradients, Bucket(0, space.layout.ranges, 0, space.layout.span))

    def _gradient_buffer(self) -> Any:
        """Return the device buffer from which the optimizer reads the mean; None for an empty range."""
        flat, nbytes = self._flat, self._stop - self._start
        if not nbytes:
            return None
        if flat.is_staged:
            return flat.device.allocate(nbytes)
        return flat.reduced.get_sub_region(self._start, nbytes)

    def memory(self) -> tuple[int, int, int]:
        padded, comm = self.space.padded, self.comm
        own = [each.nbytes // (comm.size if comm.is_common(each) else 1) for each in (padded.params, padded.reduced)]
        rows = 0 if self._shard_mean is None else self._shard_mean.nbytes
        return own[0], padded.grads.nbytes + (0 if padded.reduced is padded.grads else own[1]) + rows, 0

    def follow(self, completed: Sequence[str]) -> None:
        pass  # all gradients are reduced at once

    def begin_update(self, is_clipped: bool) -> None:
        if is_clipped and self._is_common:  # else all ranks have just met in `reduce`
            self._flat.device.finish()
            self.comm.barrier()

    def reduce(self, weight: float) -> None:
        if self._flat.reduced is not self._whole_gradients:
            raise ArgumentError("optimizer: another Synchronizer moved its model's memory; use one Synchronizer")
        if self._steps is not None and self._shard_mean is not None:
            self._steps.average_part()
        else:
            self._pull()
            apply_weight(self.space.arrays.grads.view(np.float32), weight)
            self._reduce()
        self.upload()

    def upload(self) -> None:
        if self._flat.is_staged and self.gradients is not None:
            self._flat.device.write(self.gradients, self._mean[: (self._stop - self._start) // _ITEM])

    def named_parts(self) -> Iterator[tuple[str, np.ndarray]]:
        return named_parts(self.space.layout, self._mean.view(np.uint8)[: self._stop - self._start], self._start)

    def norm(self) -> float:
        if self._sync.shards is None:
            return super().norm()
        self._gather_mean()  # parts of the norm's sum are the shards', not the ranks'
        return norm_of_shards(self.comm, self.space, self._sync.shards, self.space.arrays.reduced)

    def is_finite(self) -> bool:
        return bool(np.isfinite(self._mean).all())

    def raise_non_finite(self) -> NoReturn:
        layout, arrays = self.space.layout, self.space.arrays
        mean = np.zeros(layout.span, np.uint8)
        mean[self._start : self._stop] = self._mean.view(np.uint8)[: self._stop - self._start]
        own = arrays.grads if self._shard_mean is None else self._shard_mean.own_sum()
        raise_non_finite(self.comm, layout, layout.ranges, own, mean)

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


# --- Stages 2 and 3: a rank has a part of every unit. ---


class UnitUpdate(Update):
    """This rank's part of every unit of a flat space: stages 2 and 3."""

    def __init__(self, sync: Synchronizer, space: SharedSpace, plan: ShardPlan):
        super().__init__(sync.comm, space)
        self.plan = plan
        self._parameters = updated_parameters(sync.comm, space, plan, sync.models.settings.zero)
        self._shards = GradientShards(sync.comm, space, plan, sync.models.settings.check_finite)
        self.gradients, self.params = self._shards.buffer, self._parameters.buffer
        sync.comm.barrier()

    def memory(self) -> tuple[int, int, int]:
        in_flight = self._shards.in_flight_nbytes + self._parameters.in_use_nbytes
        return self._parameters.nbytes, self._shards.values.nbytes, in_flight

    def reduce(self, weight: float) -> None:
        self._shards.complete()
        self.upload()

    def named_parts(self) -> Iterator[tuple[str, np.ndarray]]:
        return self._shards.named_parts()

    def upload(self) -> None:
        self._shards.upload()

    def is_finite(self) -> bool:
        return bool(np.isfinite(self._shards.values).all())

    def raise_non_finite(self) -> NoReturn:
        self._shards.raise_non_finite()

    def follow(self, completed: Sequence[str]) -> None:
        self._shards.follow(completed)

    def begin_update(self, is_clipped: bool) -> None:
        self._parameters.begin_update()

    def gather(self) -> None:
        self._parameters.end_update()
        self._shards.finish_step()
