"""A rank's part of a model, as a DistributedOptimizer uses it; the reduce-scatter of gradients; those of stage 2."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NoReturn

import numpy as np

from clcomm.base.flat_space.layout import ShardPlan, Unit
from clcomm.base.flat_space.parameters import MISSING, Beginnings, ParameterRange, is_missing
from clcomm.base.host.arrays import aligned_zeros
from clcomm.comm.communicator import Communicator
from clcomm.engine.device import Device
from clcomm.engine.grad_slot import NONE, GradUnit
from clcomm.engine.modes import current_backward
from clcomm.sync.agreement import CHECKS
from clcomm.sync.bucket_plan import GRADIENTS, Readiness
from clcomm.sync.clipping import clip_coefficient, global_norm, scale
from clcomm.sync.divergence import NonFinite, first_non_finite, raise_found
from clcomm.sync.shared_space import SharedSpace


class Update(ABC):
    """This rank's part of a model, with what reduces its gradients and gathers its parameters.

    Attributes:
        gradients: the device's buffer of the averaged gradients.
        params: that of the parameters; None: the flat space's.
        values: what this rank has of the averaged gradients, in the host's memory.
    """

    gradients: Any
    params: Any = None
    values: np.ndarray

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

    def is_finite(self) -> bool:
        """Return whether this rank's part of the mean holds neither NaN nor Inf."""
        return bool(np.isfinite(self.values).all())

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
        """Note in which order backward completes gradients, the same names on all ranks."""

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


def prepared_mean(
    comm: Communicator, gradients: np.ndarray, mean: np.ndarray, nbytes: int, bucket: int = -1
) -> Callable[[], object]:
    """Return a function that averages the ranks' gradients and writes this rank's part to `mean`; collective.

    Args:
        comm: the ranks.
        gradients: float32: in memory common to all ranks, a row for each; elsewhere this rank's own, flat.
        mean: receives part `rank` of the mean; the ranks' parts are equally long.
        nbytes: the size to count.
        bucket: its index, for observers.
    """
    if gradients.ndim == 2:
        return comm.reduce_scatter_init(gradients, "mean", out=mean, label=GRADIENTS, nbytes=nbytes, bucket=bucket)
    return partial(comm.reduce_scatter, gradients, "mean", out=mean, label=GRADIENTS, nbytes=nbytes, bucket=bucket)


# --- Gradients of which each rank keeps a shard of the mean: stage 2 of ZeRO. ---
# Each unit of the flat space is reduced as soon as backward has completed it, and its own gradients are dropped: the
# memory in which they were written is the next unit's. Every backward reduces every unit once, in one order on all
# ranks, so that ranks whose backwards reach different parameters stay together. Further backwards of a step add to the
# shard.

#: The number of no backward.
_NONE = -1
Side = tuple[np.ndarray, Callable[[], object]]  # an array, and what reduces it


class GradientShards(Update):
    """This rank's shard of a model's mean gradients; making one is collective.

    Args:
        comm: the ranks.
        space: the model's, which has no gradients yet.
        plan: its units.
        check_finite: whether to look for NaN and Inf in what each rank brings.

    """

    def __init__(self, comm: Communicator, space: SharedSpace, plan: ShardPlan, check_finite: bool):
        flat = space.adapter.flat_space  # type: ignore[attr-defined]
        super().__init__(comm, space)
        self.plan, self._device, self._checks = plan, flat.device, check_finite
        self._is_staged = flat.is_staged
        self._blocks = flat.shard_gradients(plan.units, self._drop)
        space.drop_gradients()
        self._bytes = aligned_zeros(plan.shard_nbytes)
        self.values = self._bytes.view(np.float32)
        memory = flat.device.memory
        self.gradients = memory.exact(plan.shard_nbytes) if self._is_staged else memory.exact(on_top_of=self._bytes)
        self._mean = aligned_zeros(plan.largest_part)  # of the unit that is reduced
        self._areas = _Areas(comm, plan, self._mean)
        self._order = list(plan.units)
        cuts = [(unit, range(unit.start, unit.stop, unit.part_nbytes)) for unit in plan.units]
        self._beginnings = [Beginnings(unit.ranges, parts, unit.start) for unit, parts in cuts]
        self._fresh = {place.name for place in plan.layout.ranges}  # parameters whose next mean replaces the shard's
        self._rounds = 0  # in which all units were reduced, since the last step
        self._non_finite: NonFinite | None = None  # what this rank brought first
        self._is_ordered = False
        self._begin_round()
        space.adapter.watch_gradients(self._complete, self._begin_round)
        _call_at_end(flat.device, self)

    @property
    def in_flight_nbytes(self) -> int:
        """Bytes beside the shard: gradients that are being written, and units that are being reduced."""
        return int(self._blocks.nbytes) + self._areas.nbytes + self._mean.nbytes

    # --- in backward ---

    def _begin_round(self) -> None:
        """Note that a backward begins to complete gradients."""
        self._readiness = Readiness([place.name for place in unit.ranges] for unit in self._order)
        self._backward = _NONE

    def _complete(self, name: str) -> Callable[[], None] | None:
        """Note a complete gradient, and return what reduces the units whose turn it is."""
        self._backward = current_backward()
        self._readiness.complete(name)
        begin = self._readiness.next
        while self._readiness.is_next_complete:
            self._readiness.next += 1
        ready = self._order[begin : self._readiness.next]
        return partial(self._reduce, ready) if ready else None

    def _end_round(self, backward: int) -> Callable[[], None] | None:
        """Return what reduces the units that a backward left, None for one of another model, also after a failed one.

        backward: its number, as `current_backward` gives it.
        """
        if backward != self._backward:
            return None
        self._backward = _NONE
        return partial(self._finish_round, self._order[self._readiness.next :])

    def _finish_round(self, left: Sequence[Unit]) -> None:
        self._reduce(left)
        self._rounds += 1

    # --- between backward and step ---

    def reduce(self, weight: float) -> None:
        """Reduce what no backward has reduced: of a rank that ran none, or gradients that the program has set."""
        self._device.finish()  # the last update may still read the shard
        if not self._rounds or any(unit.is_open for unit in self._blocks.units):
            self._finish_round(self._order)
        if self._fresh:
            for unit in self.plan.units:
                for place, part in self._own_places(unit):
                    if place.name in self._fresh:
                        self.values[part] = MISSING
        self.upload()

    def finish_step(self) -> None:
        """Note that the optimizer has used the gradients."""
        self._rounds, self._non_finite = 0, None

    def _drop(self, names: Sequence[str]) -> None:
        self._fresh.update(names)
        if len(self._fresh) == len(self.plan.layout.ranges):
            self._rounds, self._non_finite = 0, None

    def follow(self, completed: Sequence[str]) -> None:
        if completed and not self._is_ordered:
            self._is_ordered = True
            at = {name: position for position, name in enumerate(completed)}
            order = sorted(
                self.plan.units,
                key=lambda unit: (max(at.get(place.name, len(at)) for place in unit.ranges), unit.index),
            )
            if order != self._order:
                self._order = order
                self._device.revision += 1  # recordings have the old one
                self._begin_round()

    def upload(self) -> None:
        if self._is_staged:
            self._device.write(self.gradients, self._bytes)

    def raise_non_finite(self) -> NoReturn:
        found = [pair for unit in self.plan.units for pair in self._own_places(unit)]
        mean = first_non_finite([place for place, _ in found], [self.values[part] for _, part in found])
        raise_found(self.comm, self._non_finite, mean)

    # --- a unit ---

    def _reduce(self, units: Sequence[Unit]) -> None:
        for unit in units:
            own, reduce = self._areas.take(unit)
            self._fill(self._blocks.units[unit.index], own)
            reduce()
            self._add(unit)

    def _fill(self, own: GradUnit, area: np.ndarray) -> None:
        """Move a unit's gradients to its area, MISSING where there is none, and drop them."""
        unit = own.unit
        area[unit.nbytes :] = 0
        if not own.is_open:
            area[: unit.nbytes].view(np.float32)[...] = MISSING
            return
        missing = [place.name for place, slot in zip(unit.ranges, own.slots, strict=True) if slot.state == NONE]
        for slot in own.slots:
            if slot.state == NONE:
                slot.make_own()
        self._device.read(own.block, area[: unit.nbytes])
        for slot in own.slots:
            slot.drop()
        for start, stop in unit.gaps():
            area[start:stop] = 0
        self._beginnings[unit.index].mark(area, missing)
        if self._checks and self._non_finite is None:
            views = [area[place.start - unit.start :][: place.nbytes].view(np.float32) for place in unit.ranges]
            self._non_finite = first_non_finite(unit.ranges, views)

    def _add(self, unit: Unit) -> None:
        """Add the mean of a unit's part to the shard; the first of a step replaces what is there."""
        mean = self._mean[: unit.part_nbytes].view(np.float32)
        begin = unit.offset // 4
        names = {place.name for place in unit.ranges}
        if names <= self._fresh:
            self.values[begin : begin + mean.size] = mean
        else:
            for place, part in self._own_places(unit):
                added = mean[part.start - begin : part.stop - begin]
                self.values[part] = added if place.name in self._fresh else self.values[part] + added
        self._fresh -= names

    def named_parts(self) -> Iterator[tuple[str, np.ndarray]]:
        for unit in self.plan.units:
            for place, part in self._own_places(unit):
                yield place.name, self.values[part]

    def _own_places(self, unit: Unit) -> Iterator[tuple[ParameterRange, slice]]:
        """Yield the unit's parameters of which this rank has a part, and where that is in `values`."""
        start = unit.start + self.comm.rank * unit.part_nbytes
        for place in unit.ranges:
            first, last = max(place.start, start), min(place.stop, start + unit.part_nbytes)
            if first < last:
                yield place, slice((first - start + unit.offset) // 4, (last - start + unit.offset) // 4)


def _call_at_end(device: Device, shards: GradientShards) -> None:
    """Call `_end_round` at the end of each backward on the device, which outlives the model, until it is dropped."""
    end = weakref.WeakMethod(shards._end_round)

    def call(backward: int) -> Callable[[], None] | None:
        method = end()
        return None if method is None else method(backward)

    device.backward_ends.append(call)
    weakref.finalize(shards, device.backward_ends.remove, call)


class _Areas:
    """Where ranks put a unit's gradients to be reduced.

    In memory common to all ranks there are two, used in turn: a rank that is ahead fills one while others read the
    other. It cannot be two units ahead, as each reduction begins with a rendezvous.
    """

    def __init__(self, comm: Communicator, plan: ShardPlan, mean: np.ndarray):
        row = comm.size * plan.largest_part
        common = [comm.allocate_common(comm.size * row) for _ in range(2)] if comm.size > 1 else []
        self._turn = 0
        self._sides: list[list[Side]] = []
        if common and all(map(comm.is_common, common)):
            self.nbytes = len(common) * row
            for memory in common:
                self._sides.append([_side(comm, memory, unit, mean, common=True) for unit in plan.units])
        else:
            self.nbytes = row
            area = aligned_zeros(row)
            self._sides = [[_side(comm, area, unit, mean, common=False) for unit in plan.units]]

    def take(self, unit: Unit) -> Side:
        """Return this rank's bytes for the next unit, and what reduces all ranks' to its part of the mean."""
        self._turn = (self._turn + 1) % len(self._sides)
        return self._sides[self._turn][unit.index]


def _side(comm: Communicator, memory: np.ndarray, unit: Unit, mean: np.ndarray, *, common: bool) -> Side:
    """Return this rank's bytes for a unit, and what reduces all ranks'; common: whether the memory is all ranks'."""
    nbytes = comm.size * unit.part_nbytes
    rows = memory[: comm.size * nbytes].reshape(comm.size, nbytes) if common else memory[:nbytes]
    part = mean[: unit.part_nbytes].view(np.float32)
    reduce = prepared_mean(comm, rows.view(np.float32), part, unit.bucket.nbytes, unit.index)
    return rows[comm.rank] if common else rows, reduce
