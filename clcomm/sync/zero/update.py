"""What a DistributedOptimizer has of a model on this rank, by the stage of ZeRO."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NoReturn

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.base.flat_space.buckets import Bucket
from clcomm.base.flat_space.layout import ShardPlan
from clcomm.sync.clipping import CLIPPING, named_parts, norm_of_shards
from clcomm.sync.divergence import raise_non_finite
from clcomm.sync.model_ranks import apply_weight
from clcomm.sync.shared_space import SharedSpace
from clcomm.sync.synchronizer import PARAMETERS, Synchronizer
from clcomm.sync.zero.parameter_shards import move_to_common_memory, updated_parameters
from clcomm.sync.zero.reductions import GradientShards, Update, prepared_mean

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
        self.values = space.padded.reduced[rank * own : (rank + 1) * own].view(np.float32)
        self._sync, self._steps = sync, sync.models.of(space.model).sharded_steps
        self._shard_mean = None if self._steps is None else self._steps.mean
        rows = move_to_common_memory(sync.comm, space, with_gradients=self._shard_mean is None)
        self._is_common = rows is not None
        if self._shard_mean is None:
            gradients = space.padded.grads.view(np.float32) if rows is None else rows
            self._reduce = prepared_mean(self.comm, gradients, self.values, nbytes)
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
            self._flat.device.write(self.gradients, self.values[: (self._stop - self._start) // _ITEM])

    def named_parts(self) -> Iterator[tuple[str, np.ndarray]]:
        return named_parts(self.space.layout, self.values.view(np.uint8)[: self._stop - self._start], self._start)

    def norm(self) -> float:
        if self._sync.shards is None:
            return super().norm()
        self._gather_mean()  # parts of the norm's sum are the shards', not the ranks'
        return norm_of_shards(self.comm, self.space, self._sync.shards, self.space.arrays.reduced)

    def raise_non_finite(self) -> NoReturn:
        layout, arrays = self.space.layout, self.space.arrays
        mean = np.zeros(layout.span, np.uint8)
        mean[self._start : self._stop] = self.values.view(np.uint8)[: self._stop - self._start]
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


class UnitUpdate(GradientShards):
    """This rank's part of every unit of a flat space: stages 2 and 3."""

    def __init__(self, sync: Synchronizer, space: SharedSpace, plan: ShardPlan):
        self._parameters = updated_parameters(sync.comm, space, plan, sync.models.settings.zero)
        super().__init__(sync.comm, space, plan, sync.models.settings.check_finite)
        self.params = self._parameters.buffer
        sync.comm.barrier()

    def memory(self) -> tuple[int, int, int]:
        in_flight = self.in_flight_nbytes + self._parameters.in_use_nbytes
        return self._parameters.nbytes, self.values.nbytes, in_flight

    def begin_update(self, is_clipped: bool) -> None:
        self._parameters.begin_update()

    def gather(self) -> None:
        self._parameters.end_update()
        self.finish_step()
