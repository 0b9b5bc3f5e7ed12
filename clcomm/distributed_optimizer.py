"""The sharded update: each rank reduces, updates and keeps optimizer state for its own part of the flat space.

Stage 1 of ZeRO (Rajbhandari, Rasley, Ruwase and He, 2020). Reduce-scatter and all-gather together move as many bytes as
an all-reduce, each rank holds 1/N of the state, and the ranks of a host do not repeat the same update.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn

import numpy as np

from clcomm.adapters.adapter import FlatArrays
from clcomm.clipping import clip_coefficient, global_norm, scale
from clcomm.errors import ArgumentError
from clcomm.flat_space.buckets import Bucket
from clcomm.optim import Optimizer
from clcomm.sync.agreement import CHECKS, require_agreement
from clcomm.sync.finiteness import raise_non_finite
from clcomm.sync.shared_space import SharedSpace
from clcomm.sync.uneven_inputs import apply_weight
from clcomm.synchronizer import GRADIENTS, PARAMETERS, Synchronizer

_ITEM = 4  # bytes of a float32


class DistributedOptimizer:
    """An optimizer of `clcomm.optim` that updates a part of the parameters on each rank; the same bits as without it.

    The loop stays forward, backward, sync_gradients, step. `step` and `state_dict` are collective. After a step a
    gradient is still this rank's own, not the mean.

    On one host, where the device shares its memory, the parameters move into memory common to all ranks at the first
    step: each rank writes its part, and all read it there. A change of parameters by hand then holds for all ranks.

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
        own = layout.shard_nbytes(comm.size)
        start = min(comm.rank * own, layout.span)
        stop = min(start + own, layout.span)
        optimizer.restrict(start // _ITEM, stop // _ITEM)
        sync.delegate_reduction(optimizer.space, self)
        self._range = start, stop
        self._shard: _Shard | None = None
        self._weight = 1.0  # of this rank's gradients in the next mean
        self._is_reduced = False  # whether the gradients are averaged already, before the step

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

    def zero_grad(self) -> None:
        """Drop all gradients."""
        self._is_reduced = False
        self.optimizer.zero_grad()

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

    def _step(self) -> None:
        is_clipped, shard = self._is_reduced, self._reduced()
        if is_clipped:
            shard.wait_for_readers()
        self.optimizer.update_range(shard.gradients)
        shard.gather()
        self._is_reduced = False
        self.sync.count_synchronisation(shard.space.model)

    def _reduced(self) -> _Shard:
        """Return this rank's part with its averaged gradients; they are averaged once a step."""
        shard = self._shard
        if shard is None:
            shard = self._shard = _Shard(self.sync, self.sync.space_of(self.optimizer.space), *self._range)
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
        span = self.optimizer.space.layout.span // _ITEM
        own = self.optimizer.space.layout.shard_nbytes(comm.size) // _ITEM
        for name in self.optimizer.state_names:
            block = np.zeros(own, np.float32)
            block[: state[name].size] = state[name]
            state[name] = comm.all_gather(block, label="checkpoint").reshape(-1)[:span].copy()
        return state

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Continue from a whole state, written by any number of ranks or by the plain optimizer."""
        self.optimizer.load_state_dict(state)


class _Shard:
    """This rank's bytes [start, stop) of a model's flat space, with its reduce-scatter and all-gather."""

    def __init__(self, sync: Synchronizer, space: SharedSpace, start: int, stop: int):
        self.space, self._comm = space, sync.comm
        self._flat = space.adapter.flat_space  # type: ignore[attr-defined]
        self._start, self._stop = start, stop
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
        params = space.padded.params.view(np.float32)
        self._all_gather = self._comm.all_gather_in_place_init(params, label=PARAMETERS, nbytes=nbytes)
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

    def wait_for_readers(self) -> None:
        """Wait until no rank reads the parameters, where all ranks share their memory."""
        if self._is_common:
            self._flat.device.finish()
            self._comm.barrier()

    def reduce(self, weight: float) -> None:
        """Average the gradients of this rank's range into `gradients`; its own count `weight` times."""
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

    def clip(self, max_norm: float) -> float:
        """Scale this rank's part so that the norm of the whole mean is at most `max_norm`; return the norm before."""
        part = self._mean.view(np.uint8)[: self._stop - self._start]
        norm = global_norm(self._comm, self.space, part, self._start)
        coefficient = clip_coefficient(norm, max_norm)
        if coefficient != 1.0:
            scale(self._mean, coefficient)
            self._upload()
        return norm

    def require_finite(self) -> None:
        """Raise NonFiniteError on every rank, if any rank's part of the mean holds NaN or Inf."""
        if self._comm.all_gather(np.array([np.isfinite(self._mean).all()]), label=CHECKS).all():
            return
        layout, arrays = self.space.layout, self.space.arrays
        mean = np.zeros(layout.span, np.uint8)
        mean[self._start : self._stop] = self._mean.view(np.uint8)[: self._stop - self._start]
        raise_non_finite(self._comm, layout, layout.ranges, arrays.grads, mean)

    def gather(self) -> None:
        """Gather all parts of the updated parameters on every rank."""
        flat = self._flat
        if flat.is_staged:
            flat.device.read(flat.params, self.space.arrays.params[self._start : self._stop], self._start)
        else:
            flat.device.finish()
        self._all_gather()
        if flat.is_staged:
            flat.push_params()
