"""Tensors between the ranks of an axis: sums, gathered parts, and parts of sums, in memory that the ranks share.

Kernels write where the other ranks read, and read where the sums are written: on a device that shares the host's memory
nothing is copied for the transport. Each collective runs on the host, between the kernels before and after it; a
recorded step (engine/replay.py) is cut there, and each replay runs it in its place.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, TypeVar

import numpy as np

from clcomm.base.flat_space.layout import ALIGNMENT
from clcomm.comm.collectives.in_flight import Handle
from clcomm.comm.communicator import Communicator
from clcomm.engine.device import Device
from clcomm.engine.fold import DeviceFold
from clcomm.engine.host_buffer import HostBuffer, sees_writes
from clcomm.engine.ops.shape import copy_part
from clcomm.engine.ops.types import launch_broadcast
from clcomm.engine.random_stream import RandomStream
from clcomm.engine.tensor import Shape, Tensor, copy_into, empty
from clcomm.engine.view import Block
from clcomm.sync.agreement import CHECKS

#: Labels of the layers' exchanges in the Communicator's stats.
ACTIVATIONS, INPUT_GRADIENTS, PARAMETER_GRADIENTS = "activations", "input gradients", "parameter gradients"
#: Elements at whose multiples blocks begin: OpenCL can make sub-buffers there.
_ALIGNED = ALIGNMENT // 4

T = TypeVar("T")
Prepared = tuple[Tensor, Tensor, Callable[[], None]]  # in regions, and the collective between them
Part = tuple[HostBuffer, int, int]  # of a region: its first element, and their number
Steps = tuple[Callable[[], None], Callable[[], None]]  # of a collective: its start, and the wait for its end


class Exchange:
    """The exchange of tensors between the ranks of an axis, for a model's layers on one device.

    All ranks make the same calls in the same order. The memory has regions: a rank's summand of a sum, all ranks' rows
    of a sum of which each gets a part, the sums, and gathered parts. Before a kernel writes to a region that other
    ranks read, all have met since they read it (`_fence`).

    Args:
        comm: the ranks, such as `mesh["tp"]`.
    """

    def __init__(self, comm: Communicator, device: Device):
        self.comm, self.device = comm, device
        self.rank, self.size = comm.rank, comm.size
        self._sees_writes = sees_writes(device)
        self._regions: dict[str, HostBuffer] = {}
        self._prepared: dict[tuple[object, ...], Any] = {}
        self._starts: bool | None = None  # whether all ranks compute while a sum is started; None: not agreed yet
        self._weight = 1.0  # this rank's in `weighted`
        self._weights: tuple[Tensor, Tensor] | None = None  # it and its reciprocal; None: it has always been 1
        self._met = 0  # collectives so far, at each of which no rank had kernels in its queue
        self._read_after: dict[str, int] = {}  # by region: the collective after which other ranks read it
        comm.fold_with(DeviceFold.on(device))

    def __deepcopy__(self, memo: dict[int, object]) -> Exchange:
        return self

    @cached_property
    def own_stream(self) -> RandomStream:
        """Random numbers of this rank's, where those of the device are the same on all ranks."""
        return RandomStream(self.device)

    # --- sums ---

    def sum(self, shape: Shape, label: str) -> RankSum:
        """Return a sum over the ranks of tensors of a shape, for kernels to write this rank's summand to."""
        if self.size == 1:
            return RankSum(self, empty(self.device, shape))
        own, total, run = self._once(("sum", math.prod(shape), label), self._prepare_sum)
        start = partial(self._once, ("started sum", math.prod(shape), label), self._prepare_start)
        return RankSum(self, own.alias(shape), total.alias(shape), run, start)

    def summed(self, x: Tensor, label: str, out: Callable[[], Tensor] | None = None) -> Tensor:
        """Return the sum of all ranks' x; `out` returns the tensor to write it to, None: a new one."""
        pending = self.sum(x.shape, label)
        copy_into(pending.own, x)
        return pending.copied(out)

    def weigh(self, weight: float) -> None:
        """Let the ranks' parts count by their weights in `weighted` from now on; above 0, 1 if all are equal."""
        if weight == self._weight:
            return
        self._weight, values = weight, np.array([[weight], [1 / weight]], np.float32)
        if self._weights is None:
            own, reciprocal = (Tensor(each, self.device) for each in values)
            self._weights = own, reciprocal
            self.device.revision += 1  # recordings so far do without
        for tensor, value in zip(self._weights, values, strict=True):  # recordings read them
            tensor.copy_from(value)

    def weighted(self, x: Tensor, label: str) -> Tensor:
        """Return the sum of all ranks' x times their weights, divided by this rank's."""
        if self._weights is None:
            return self.summed(x, label)
        pending, result = self.sum(x.shape, label), empty(self.device, x.shape)
        launch_broadcast("mul_broadcast", pending.own, x, self._weights[0])
        launch_broadcast("mul_broadcast", result, pending.total(), self._weights[1])
        return result

    def _prepare_sum(self, _: str, count: int, label: str) -> Prepared:
        summands, sums = self._region("summands", 4 * _padded(count)), self._region("sums", 4 * _padded(count))
        reduce = self.comm.all_reduce_init(summands.values[:count], out=sums.values[:count], label=label)
        return self._between((summands, 0, count), reduce, (sums, 0, count))

    def _prepare_start(self, _: str, count: int, label: str) -> Steps | None:
        """Return functions that start the sum of `_prepare_sum`, and that wait for it; None: no rank starts sums."""
        if self._starts is None:
            in_caller = self.comm.all_gather(np.array([self.device.runs_in_caller], np.uint8), label=CHECKS)
            self._starts = not in_caller.any()
        if not self._starts:
            return None
        summands, sums = self._regions["summands"], self._regions["sums"]
        begin = self.comm.all_reduce_async_init(summands.values[:count], out=sums.values[:count], label=label)
        started: list[Handle] = []

        def start() -> None:
            self._met += 1
            summands.pull(0, count)
            started.append(begin())

        def wait() -> None:
            started.pop().wait()
            sums.push(0, count)

        return start, wait

    # --- parts along an axis ---

    def own_part(self, x: Tensor, axis: int, out: Tensor) -> Tensor:
        """Queue a copy of this rank's part of x along `axis`, which the ranks divide evenly, to `out`; return it."""
        sizes, whole, part = self._strides(x.shape, axis)
        copy_part(sizes[1:], out, Block(0, part[1:]), x, Block(self.rank * whole[0], whole[1:]))
        return out

    def gather(self, part: Tensor, axis: int, label: str, out: Callable[[], Tensor] | None = None) -> Tensor:
        """Return all ranks' parts one after the other along `axis`; `out`: as for `summed`."""
        if self.size == 1:
            return _copied(part, out)
        shape = (*part.shape[:axis], part.shape[axis] * self.size, *part.shape[axis + 1 :])
        block = _padded(part.numel())
        own, blocks, run = self._once(("gather", block, part.numel(), label), self._prepare_gather)
        self.device.on_host(self._fence, "gathered")
        copy_into(own.alias(part.shape), part)
        self.device.on_host(run)
        target = empty(self.device, shape) if out is None else out()
        sizes, whole, apart = self._strides(shape, axis)
        copy_part(sizes, target, Block(0, whole), blocks, Block(0, (block, *apart[1:])))
        return target

    def _prepare_gather(self, _: str, block: int, size: int, label: str) -> Prepared:
        region, first, count = self._region("gathered", 4 * block * self.size), self.rank * block, self.size * block
        nbytes = 4 * size * self.size  # is compared too: parts of other sizes may have blocks of one
        gather = self.comm.all_gather_in_place_init(region.values[:count], label=label, nbytes=nbytes)
        return self._between((region, first, block), gather, (region, 0, count), "gathered")

    def _sum_part(self, x: Tensor, axis: int, label: str) -> Tensor:
        """Return this rank's part along `axis` of the sum of all ranks' x, valid until the next exchange."""
        sizes, whole, part = self._strides(x.shape, axis)
        block = _padded(x.numel() // self.size)
        own, total, run = self._once(("sum_part", block, x.numel(), label), self._prepare_sum_part)
        self.device.on_host(self._fence, "rows")
        copy_part(sizes, own, Block(0, (block, *part[1:])), x, Block(0, whole))
        self.device.on_host(run)
        shape = (*x.shape[:axis], x.shape[axis] // self.size, *x.shape[axis + 1 :])
        return total.alias(shape)

    def summed_part(self, x: Tensor, axis: int, label: str, out: Callable[[], Tensor] | None = None) -> Tensor:
        """Return this rank's part along `axis` of the sum of all ranks' x; `out`: as for `summed`."""
        return _copied(x if self.size == 1 else self._sum_part(x, axis, label), out)

    def _prepare_sum_part(self, _: str, block: int, size: int, label: str) -> Prepared:
        count, comm, nbytes = self.size * block, self.comm, 4 * size
        sums, at = self._region("sums", 4 * count), self.rank * block
        target = sums.values[at : at + block]
        if comm.is_common(sums.array):
            summands, first = self._region("rows", 4 * count * self.size), self.rank * count
            rows = summands.values[: self.size * count].reshape(self.size, count)
            reduce: Callable[[], object] = comm.reduce_scatter_init(rows, out=target, label=label, nbytes=nbytes)
        else:
            summands, first = self._region("summands", 4 * count), 0
            blocks = summands.values[:count].reshape(self.size, block)
            reduce = partial(comm.reduce_scatter, blocks, out=target.reshape(1, block), label=label, nbytes=nbytes)

        return self._between((summands, first, count), reduce, (sums, at, block), "rows")

    def _strides(self, shape: Shape, axis: int) -> tuple[Shape, Shape, Shape]:
        """Return sizes (ranks, outer, inner) of a tensor cut along `axis`, its strides, and those of separate parts."""
        outer = math.prod(shape[:axis])
        inner = math.prod(shape[axis:]) // self.size
        return (self.size, outer, inner), (inner, self.size * inner, 1), (outer * inner, inner, 1)

    # --- memory and rendezvous ---

    def _region(self, name: str, nbytes: int) -> HostBuffer:
        """Return a region of at least so many bytes; collective where it has to grow."""
        found = self._regions.get(name)
        if found is None or found.array.nbytes < nbytes:
            allocate = self.comm.allocate if name == "summands" else self.comm.allocate_common
            array = allocate(nbytes)
            self._read_after.pop(name, None)
            self._prepared.clear()
            self.device.revision += 1  # recordings use the memory so far
            found = self._regions[name] = HostBuffer(self.device, array, self._sees_writes)
        return found

    def _once(self, key: tuple[object, ...], prepare: Callable[..., T]) -> T:
        """Return the result of the first `prepare(*key)`; its launches are not recorded."""
        found = self._prepared.get(key)
        if found is None:
            recorder, self.device.recorder = self.device.recorder, None
            try:
                found = prepare(*key)
            finally:
                self.device.recorder = recorder
            self._prepared[key] = found
        return found

    def _between(self, pulled: Part, move: Callable[[], object], pushed: Part, read: str = "") -> Prepared:
        """Return tensors on two parts of regions, and what brings one to the host, moves it, and brings the other back.

        Other ranks read the region `read` after it.
        """

        def run() -> None:
            self._met += 1
            pulled[0].pull(*pulled[1:])
            move()
            pushed[0].push(*pushed[1:])
            if read:
                self._read_after[read] = self._met

        source, target = (region.tensor(first, (count,)) for region, first, count in (pulled, pushed))
        return source, target, run

    def _fence(self, region: str) -> None:
        """Wait until no rank reads a region: no-op, unless it was read after the latest collective."""
        if self._read_after.get(region) == self._met:
            self.device.finish()
            self.comm.barrier()
            self._met += 1


class RankSum:
    """A sum over ranks; kernels write this rank's summand.

    Attributes:
        own: the summand; all of it has to be written.
    """

    def __init__(
        self,
        ranks: Exchange,
        own: Tensor,
        total: Tensor | None = None,
        run: Callable[[], None] | None = None,
        steps: Callable[[], Steps | None] | None = None,
    ):
        self.own = own
        self._ranks, self._total, self._finish, self._steps = ranks, total, run, steps

    def start(self) -> None:
        """Start moving the complete summand, while the device computes the queued kernels until `total()`.

        Where a rank's kernels run in the calling thread nothing happens before `total()`: a core that adds up does not
        compute.
        """
        steps = None if self._steps is None else self._steps()
        if steps is not None:
            start, self._finish = steps
            self._ranks.device.on_host(start)

    def total(self) -> Tensor:
        """Return the sum, valid until the next exchange."""
        if self._total is None or self._finish is None:
            return self.own
        self._ranks.device.on_host(self._finish)
        return self._total

    def copied(self, out: Callable[[], Tensor] | None = None) -> Tensor:
        """Return the sum in a lasting tensor; `out` returns the tensor to write it to, None: a new one."""
        total = self.total()
        return total if self._total is None and out is None else _copied(total, out)


def _copied(x: Tensor, out: Callable[[], Tensor] | None) -> Tensor:
    target = empty(x.device, x.shape) if out is None else out()
    copy_into(target, x)
    return target


def _padded(count: int) -> int:
    return -(-count // _ALIGNED) * _ALIGNED
