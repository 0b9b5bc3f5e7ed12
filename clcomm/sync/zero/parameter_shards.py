"""Where a sharded update finds the parameters, and how all ranks get what it has changed."""

from __future__ import annotations

from typing import Any

import numpy as np

from clcomm.base.flat_space.layout import ShardPart, ShardPlan, Unit
from clcomm.base.flat_space.parameters import Precision
from clcomm.comm.collectives.in_flight import Handle
from clcomm.comm.communicator import Communicator
from clcomm.engine.parameter import GatheredUnits
from clcomm.sync.adapters.adapter import FlatArrays
from clcomm.sync.agreement import CHECKS, require_agreement
from clcomm.sync.replicas import PARAMETERS
from clcomm.sync.shared_space import SharedSpace


class UpdatedParameters:
    """The parameters of a model, of which each rank updates its parts.

    nbytes: of this rank, those of memory common to a host divided between its ranks. buffer: this rank's shard; None:
    its parts lie in the flat space.
    """

    nbytes: int
    buffer: Any = None

    @property
    def in_use_nbytes(self) -> int:
        """The most bytes of parameters gathered from other ranks that this rank had at once."""
        return 0

    def begin_update(self) -> None:
        """Wait until this rank may change its parts; collective where ranks read them in place."""

    def end_update(self) -> None:
        """Let all ranks see what each has changed; collective."""


def updated_parameters(comm: Communicator, space: SharedSpace, plan: ShardPlan, stage: int) -> UpdatedParameters:
    """Return the parameters as this stage of ZeRO keeps them; collective.

    One memory common to all ranks, where there is such memory: of it each rank has its share, and gathers nothing.
    """
    if comm.size == 1 or move_to_common_memory(comm, space, with_gradients=False) is not None:
        return _InCommon(comm, space)
    return _Copies(comm, space, plan) if stage < 3 else _Shard(comm, space, plan)


class _InCommon(UpdatedParameters):
    """Parameters that all ranks read in one memory, where each writes its parts."""

    def __init__(self, comm: Communicator, space: SharedSpace):
        self._comm, self._device = comm, space.adapter.flat_space.device  # type: ignore[attr-defined]
        self.nbytes = space.padded.params.nbytes // comm.size
        params = space.padded.params.view(space.precision.dtype)
        self._gather = comm.all_gather_in_place_init(params, label=PARAMETERS, nbytes=space.params_nbytes)

    def begin_update(self) -> None:
        self._device.finish()
        self._comm.barrier()

    def end_update(self) -> None:
        self._device.finish()
        self._gather()


class _Copies(UpdatedParameters):
    """Parameters that every rank has, and gathers after an update."""

    def __init__(self, comm: Communicator, space: SharedSpace, plan: ShardPlan):
        self._comm, self._space, self._plan = comm, space, plan
        self._flat = space.adapter.flat_space  # type: ignore[attr-defined]
        self.nbytes = space.padded.params.nbytes
        self._gathering = _Gathering(comm, plan, space.precision)

    def end_update(self) -> None:
        flat, params, rank = self._flat, self._space.arrays.params, self._comm.rank
        flat.device.finish()
        for unit in self._plan.units:
            first = min(unit.start + rank * unit.part_nbytes, unit.stop)
            last = min(first + unit.part_nbytes, unit.stop)
            start, stop = map(flat.precision.nbytes, (first, last))
            if flat.is_staged and start < stop:
                flat.device.read(flat.params, params[start:stop], start)
            whole = slice(*map(flat.precision.nbytes, (unit.start, unit.stop)))
            params[whole] = self._gathering.gather(unit, params[start:stop])
        if flat.is_staged:
            flat.push_params()


class _Shard(UpdatedParameters):
    """Parameters of which each rank keeps its shard; units are gathered when they are used: stage 3 of ZeRO."""

    def __init__(self, comm: Communicator, space: SharedSpace, plan: ShardPlan):
        flat = space.adapter.flat_space  # type: ignore[attr-defined]
        remedy = "the kernels of other kinds use parameters in another order; use zero=2"
        require_agreement(comm, "zero=3", [f"device: {flat.device.family}"], remedy)
        self._plan, self._device = plan, flat.device
        self._storage, self._nbytes = flat.storage, flat.precision.nbytes
        self._parts = [ShardPart(*map(self._nbytes, part)) for part in plan.parts(comm.rank)]
        space.adapter.pull_parameters()
        own, whole = np.zeros(self._nbytes(plan.shard_nbytes), np.uint8), space.arrays.params
        for start, stop, offset in self._parts:
            own[offset : offset + stop - start] = whole[start:stop]
        self.buffer, self.nbytes = flat.device.memory.exact(copy_of=own), own.nbytes
        self._gathering, self._order = _Gathering(comm, plan, flat.precision), _Order()
        self._units = GatheredUnits(
            flat.device, plan.units, flat.parameters, self._gather, self._gathering.advance, self._write
        )
        flat.shard_parameters(self._units)
        space.drop_parameters()

    @property
    def in_use_nbytes(self) -> int:
        return self._units.peak_nbytes + self._gathering.nbytes

    def end_update(self) -> None:
        self._units.release()
        self._forget()

    def _gather(self, index: int, block: object) -> None:
        """Fill a block with a unit, and begin the one that came next when the two before it were the same."""
        whole = self._gathering.finish(index)
        if whole is None:
            whole = self._gathering.gather(self._plan.units[index], self._read(index))
        self._fill(block, whole)
        following = self._order.following(index)
        if following is not None:
            self._gathering.start(self._plan.units[following], self._read(following))

    def _fill(self, block: object, whole: np.ndarray) -> None:
        """Copy a gathered unit to a block of float32."""
        if self._storage is None:
            self._device.write(block, whole)
            return
        stored = self._device.allocate(whole.nbytes)
        self._device.write(stored, whole)
        self._storage.expand(stored, block, 0, whole.nbytes // 2)

    def _read(self, index: int) -> np.ndarray:
        """Return this rank's part of a unit, in the memory from which it is gathered."""
        unit = self._plan.units[index]
        part = self._gathering.part(unit)
        self._device.read(self.buffer, part, self._nbytes(unit.offset))
        return part

    def _forget(self) -> None:
        """Forget what is gathered ahead, as parameters have changed."""
        self._gathering.finish(None)
        self._order.end()

    def _write(self, name: str, values: np.ndarray) -> None:
        self._forget()
        flat = values if self._storage is None else self._storage.narrowed(values)
        flat = flat.reshape(-1).view(np.uint8)
        place = next(place for place in self._plan.layout.ranges if place.name == name)
        begin, end = map(self._nbytes, (place.start, place.stop))
        for start, stop, offset in self._parts:
            first, last = max(start, begin), min(stop, end)
            if first < last:
                changed = flat[first - begin : last - begin]
                self._device.write(self.buffer, changed, offset + first - start)


class _Gathering:
    """Gathers units from all ranks' parts, one at a time, at once or ahead; nbytes: of the memory for that."""

    def __init__(self, comm: Communicator, plan: ShardPlan, precision: Precision):
        self._comm, self._nbytes = comm, precision.nbytes  # of what takes so many bytes as float32
        self._part = np.zeros(self._nbytes(plan.largest_part), np.uint8)
        self._whole = np.empty(comm.size * self._part.nbytes, np.uint8)
        self.nbytes = self._part.nbytes + self._whole.nbytes
        self._begun: tuple[Unit, Handle] | None = None

    def part(self, unit: Unit) -> np.ndarray:
        """Return where this rank's part of a unit is to be, once nothing is gathered ahead."""
        self.finish(None)
        return self._part[: self._nbytes(unit.part_nbytes)]

    def gather(self, unit: Unit, own: np.ndarray) -> np.ndarray:
        """Return a unit's bytes from this rank's own and the others'; valid until the next one. Collective."""
        part, whole = self.part(unit), self._whole[: self._comm.size * self._nbytes(unit.part_nbytes)]
        part[: own.size] = own
        self._comm.all_gather(part, out=whole, label=PARAMETERS, bucket=unit.index)
        return whole[: self._nbytes(unit.nbytes)]

    def start(self, unit: Unit, own: np.ndarray) -> None:
        """Begin to gather a unit ahead; collective."""
        part, whole = self.part(unit), self._whole[: self._comm.size * self._nbytes(unit.part_nbytes)]
        part[: own.size] = own
        self._begun = unit, self._comm.all_gather_async(part, out=whole, label=PARAMETERS, bucket=unit.index)

    def advance(self) -> None:
        """Move what is gathered ahead."""
        if self._begun is not None:
            self._begun[1].done()

    def finish(self, index: int | None) -> np.ndarray | None:
        """Complete what is gathered ahead, and return it if it is the unit of this index."""
        if self._begun is None:
            return None
        (unit, handle), self._begun = self._begun, None
        handle.wait()
        return self._whole[: self._nbytes(unit.nbytes)] if unit.index == index else None


class _Order:
    """The order in which units were gathered: which followed any two; the same on every rank."""

    _END = -1

    def __init__(self) -> None:
        self._after: dict[tuple[int, int], int] = {}
        self._last = self._END, self._END

    def following(self, index: int) -> int | None:
        """Note the next unit, and return the one that followed it before; None: none did."""
        self._note(index)
        following = self._after.get(self._last, self._END)
        return None if following in (self._END, index) else following

    def end(self) -> None:
        """Note that whatever comes next is not to be gathered ahead."""
        self._note(self._END)

    def _note(self, index: int) -> None:
        self._after[self._last] = index
        self._last = self._last[1], index


# --- Memory in which all ranks have one copy of a model. ---


def move_to_common_memory(comm: Communicator, space: SharedSpace, *, with_gradients: bool) -> np.ndarray | None:
    """Move parameters, and gradients if asked, into memory common to all ranks, if there is any; collective.

    Returns the parameters, or all ranks' gradients, float32 with a row for each; None where nothing was moved.
    """
    flat, padded = space.adapter.flat_space, space.padded  # type: ignore[attr-defined]
    if comm.size == 1 or not all(comm.all_gather_object(not flat.is_staged, label=CHECKS)):
        return None
    params, grads, moved = comm.allocate_common(padded.params.nbytes), padded.grads, None
    if with_gradients:
        moved = comm.allocate_common(comm.size * padded.grads.nbytes)
    if not all(comm.is_common(each) for each in (params, moved) if each is not None):
        return None
    if moved is not None:
        moved = moved.view(np.float32).reshape(comm.size, -1)
        grads = moved[comm.rank].view(np.uint8)
    space.move(FlatArrays(params, grads, padded.reduced))  # all ranks write the same params
    del padded
    comm.memory.free_unused()  # each rank's own: without it they stayed until the next allocation
    return params if moved is None else moved
