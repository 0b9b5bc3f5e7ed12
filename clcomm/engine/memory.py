"""A device's memory: pooled buffers for temporary values, buffers of exact size for lasting ones, all counted."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from clcomm.base.errors import ArgumentError, DeviceError
from clcomm.base.units import format_size

if TYPE_CHECKING:
    import numpy as np
    import pyopencl as cl


class _Regions(dict[tuple[int, int, int], "cl.Buffer"]):
    """The sub-buffers of a buffer by origin, size and flags, released in the reverse order of their making.

    NVIDIA's driver (580) ends in a segmentation fault where overlapping sub-buffers are released in another order.
    """

    def __del__(self) -> None:
        while self:
            self.popitem()


@cache
def _exact_buffer_class() -> Any:
    import pyopencl as cl

    class ExactBuffer(cl.Buffer):
        """A buffer that reports its release; its sub-buffers keep it alive."""

        memory: Memory | None = None
        counted = 0
        array: np.ndarray | None = None
        regions: _Regions | None = None
        argument: Any = None  # what kernels get for it, see host_addresses.py

        def get_sub_region(self, origin: int, size: int, flags: int = 0) -> cl.Buffer:
            make = super().get_sub_region
            part: Any = make(origin, size, flags) if self.array is not None else self._region(make, origin, size, flags)
            part.whole = self  # OpenCL keeps a part's device memory, but not a host array under it
            return part  # type: ignore[no-any-return]

        def _region(self, make: Callable[..., cl.Buffer], origin: int, size: int, flags: int) -> Any:
            """Return another reference to the sub-buffer of a region, which is made at its first use."""
            if self.regions is None:
                self.regions = _Regions()
            region = self.regions.get((origin, size, flags))
            if region is None:
                region = self.regions[origin, size, flags] = make(origin, size, flags)
            return cl.Buffer.from_int_ptr(region.int_ptr, retain=True)

        def __del__(self) -> None:
            if self.memory is not None:
                self.memory._exact_bytes -= self.counted
                if self.regions is not None:
                    self.memory._retired.append(self.regions)
                if self.array is not None and self.memory.on_release is not None:
                    self.memory.on_release(self.array)

    return ExactBuffer


class Memory:
    """All memory of one context.

    `active_bytes` are in use, `held_bytes` are allocated on the device (the pool keeps some of them for later), and
    `peak_bytes` is the most that was ever held. A buffer on top of a host array counts like any other.

    Attributes:
        on_release: called, in any thread, with the host array under a buffer when that buffer is released.
    """

    on_release: Callable[[np.ndarray], None] | None = None

    def __init__(self, context: cl.Context, queue: cl.CommandQueue, name: str):
        import pyopencl as cl
        from pyopencl.tools import ImmediateAllocator, MemoryPool

        self.peak_bytes = 0
        self._context, self._name, self._flags, self._error = context, name, cl.mem_flags, cl.Error
        self._pool = MemoryPool(ImmediateAllocator(queue, cl.mem_flags.READ_WRITE))
        self._exact_bytes = 0
        #: Of released buffers. A part that is released last drops its buffer first, so its region is released later.
        self._retired: list[_Regions] = []
        self._exact_buffer = _exact_buffer_class()

    @property
    def active_bytes(self) -> int:
        return self._exact_bytes + self._pool.active_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes allocated on the device, in use or not."""
        return self._exact_bytes + self._pool.managed_bytes

    def allocate(self, nbytes: int) -> cl.Buffer:
        """Return a pooled buffer of at least `nbytes`, which returns to the pool with its last reference.

        Raises DeviceError if the device has no memory for it.
        """
        self._retired.clear()
        try:
            buffer: cl.Buffer = self._pool.allocate(nbytes)  # type: ignore[assignment]  # used as one
        except (self._error, MemoryError) as error:
            raise self._out_of_memory(nbytes, error) from None
        self._note_peak()
        return buffer

    def exact(self, nbytes: int = 0, *, copy_of: np.ndarray | None = None, on_top_of: np.ndarray | None = None) -> Any:
        """Return a buffer that is not pooled, by one of the three arguments.

        Args:
            nbytes: the size of an uninitialised buffer.
            copy_of: a C-contiguous array whose values a new buffer holds.
            on_top_of: a C-contiguous array whose memory the buffer uses.

        Raises:
            DeviceError: the device has no memory for it.
        """
        self._retired.clear()
        flags, array = int(self._flags.READ_WRITE), None
        if copy_of is not None:
            flags, array = flags | self._flags.COPY_HOST_PTR, copy_of
        elif on_top_of is not None:
            flags, array = flags | self._flags.USE_HOST_PTR, on_top_of
        nbytes = nbytes if array is None else array.nbytes
        try:
            buffer = self._exact_buffer(self._context, flags, 0 if array is not None else nbytes, array)
        except (self._error, MemoryError) as error:
            raise self._out_of_memory(nbytes, error) from None
        buffer.memory, buffer.counted, buffer.array = self, nbytes, on_top_of
        self._exact_bytes += nbytes
        self._note_peak()
        return buffer

    def release_unused(self) -> None:
        self._retired.clear()
        self._pool.free_held()

    def _note_peak(self) -> None:
        held = self._exact_bytes + self._pool.managed_bytes
        if held > self.peak_bytes:
            self.peak_bytes = held

    def _out_of_memory(self, nbytes: int, error: BaseException) -> DeviceError:
        asked, used = format_size(nbytes), format_size(self.active_bytes)
        text = " | ".join(line.strip() for line in str(error).splitlines() if line.strip())
        return DeviceError(f"{self._name}: no memory for {asked} beside {used} in use: {text}")


# --- Copies between host arrays and a device's own memory, concurrent with its kernels. ---
# To the device an array passes through pieces of pinned host memory, which the device reads by itself. A second queue
# moves a piece to a landing place on the device as soon as it is filled, whatever the kernels' queue is doing; the
# kernels' queue then moves it from there to its buffer, in order. That is within the device's memory, and takes next to
# no time. So kernels that were queued before still see the old values, and memory that they use can be given out again.
# To the host a third queue fills pinned pieces, from which the host copies one while the next is on its way.

PIECE_NBYTES = 1 << 20  # a few tens of microseconds on a PCIe bus, far more than a command costs
MOST_PIECES = 64  # on their way to the device; then the host waits
_MOST_READ = 4  # on their way to the host


class Transfers:
    """The copies of one device. Threads may share it. Its memory is at most 64 MiB on either side, uncounted.

    Args:
        kernels_queue: returns the kernels' current queue.
        in_turn: a lock around each use of the device, where needed.

    Attributes:
        queue: the queue in which arrays are brought to the device.
    """

    def __init__(
        self, context: cl.Context, kernels_queue: Callable[[], cl.CommandQueue], in_turn: AbstractContextManager[object]
    ):
        import pyopencl as cl

        self._cl, self._context, self._kernels_queue, self._in_turn = cl, context, kernels_queue, in_turn
        self.queue, self._read_queue = cl.CommandQueue(context), cl.CommandQueue(context)
        self._pieces: deque[_PinnedPiece] = deque()  # in the order of their use
        self._read_pieces: list[np.ndarray] = []
        self._writing, self._reading = Lock(), Lock()

    def write(self, buffer: cl.Buffer, array: np.ndarray, offset: int = 0) -> None:
        """Queue a copy of a C-contiguous array into a buffer from byte `offset` on; the array may change afterwards."""
        values = _bytes_of(array)
        with self._writing, self._in_turn:
            for first in range(0, values.size, PIECE_NBYTES):
                self._send(buffer, values[first : first + PIECE_NBYTES], offset + first)

    def _send(self, buffer: cl.Buffer, values: np.ndarray, offset: int) -> None:
        piece, enqueue = self._free_piece(), self._cl.enqueue_copy
        pinned = piece.pinned[: values.size]
        pinned[...] = values
        piece.sent = enqueue(self.queue, piece.landing, pinned, is_blocking=False, wait_for=piece.placed)
        self.queue.flush()  # nothing else starts a queue whose commands another one waits for
        kernels = self._kernels_queue()
        placed = enqueue(
            kernels, buffer, piece.landing, byte_count=values.size, dst_offset=offset, wait_for=[piece.sent]
        )
        kernels.flush()
        piece.placed = [placed]
        self._pieces.append(piece)

    def _free_piece(self) -> _PinnedPiece:
        complete = self._cl.command_execution_status.COMPLETE
        is_free = self._pieces and self._pieces[0].placed[0].command_execution_status == complete
        if not is_free and len(self._pieces) < MOST_PIECES:
            return _PinnedPiece(self._context, self.queue)
        piece = self._pieces.popleft()
        piece.sent.wait()
        return piece

    def read(self, buffer: cl.Buffer, array: np.ndarray, offset: int, after: list[cl.Event]) -> None:
        """Fill a C-contiguous array from a buffer, from byte `offset` on, once the events `after` are complete; waits.

        Kernels continue, and must not write to that range.
        """
        values = _bytes_of(array)
        coming: deque[tuple[cl.Event, np.ndarray, np.ndarray]] = deque()
        with self._reading:
            for number, first in enumerate(range(0, values.size, PIECE_NBYTES)):
                if len(coming) == _MOST_READ:
                    _take(*coming.popleft())
                target = values[first : first + PIECE_NBYTES]
                pinned = self._read_piece(number % _MOST_READ)[: target.size]
                event = self._cl.enqueue_copy(
                    self._read_queue, pinned, buffer, src_offset=offset + first, is_blocking=False, wait_for=after
                )
                self._read_queue.flush()
                coming.append((event, pinned, target))
            for each in coming:
                _take(*each)

    def _read_piece(self, index: int) -> np.ndarray:
        while len(self._read_pieces) <= index:
            self._read_pieces.append(_pinned(self._context, self._read_queue))
        return self._read_pieces[index]


class _PinnedPiece:
    """Pinned host memory and a landing place on the device; both wait for the events `sent` and `placed`."""

    def __init__(self, context: cl.Context, queue: cl.CommandQueue):
        import pyopencl as cl

        self.pinned = _pinned(context, queue)
        self.landing = cl.Buffer(context, cl.mem_flags.READ_WRITE, PIECE_NBYTES)
        self.sent: Any = None
        self.placed: list[cl.Event] = []


def _bytes_of(array: np.ndarray) -> np.ndarray:
    """Return a contiguous array's memory; raises ArgumentError for others, whose copy would be filled instead."""
    if not array.flags.c_contiguous:
        raise ArgumentError(f"array: expected a C-contiguous one, got strides {array.strides} of shape {array.shape}")
    return array.reshape(-1).view(np.uint8)


def _pinned(context: cl.Context, queue: cl.CommandQueue) -> np.ndarray:
    """Return bytes of host memory that the device reads and writes directly; they stay mapped as long as the array."""
    import pyopencl as cl

    buffer = cl.Buffer(context, cl.mem_flags.READ_WRITE | cl.mem_flags.ALLOC_HOST_PTR, PIECE_NBYTES)
    flags: Any = cl.map_flags.READ | cl.map_flags.WRITE
    array: np.ndarray = cl.enqueue_map_buffer(queue, buffer, flags, 0, (PIECE_NBYTES,), np.dtype(np.uint8))[0]
    return array


def _take(event: cl.Event, pinned: np.ndarray, target: np.ndarray) -> None:
    event.wait()
    target[...] = pinned


# --- PyOpenCL's Python code for launches, generated once for each kernel in place of once for each kernel object. ---
# PyOpenCL writes and compiles a function that sets a kernel's arguments and queues it, which takes 2 ms and stays in
# memory. A recording has an object for each launch, and none of them is called; its cache, a database that all ranks
# would lock, is off.

#: Those that queue a kernel with arguments, and that set them alone.
Functions = tuple[Callable[..., Any], Callable[..., Any]]


@cache
def share() -> None:
    """Let PyOpenCL's kernel objects of this process share their code; without effect where it makes it otherwise."""
    from pyopencl import invoker

    generate = getattr(invoker, "generate_enqueue_and_set_args", None)
    if generate is None:
        return
    known: dict[object, Functions] = {}

    def shared(*args: Any, **named: Any) -> Functions:
        try:
            key = tuple([_hashable(arg) for arg in (*args, *sorted(named.items()))])
            found = known.get(key)
        except TypeError:
            return generate(*args, **named)  # type: ignore[no-any-return]
        if found is None:
            has_types = (args[3] if len(args) > 3 else named.get("arg_types")) is not None
            found = known[key] = generate(*args, **named) if has_types else _when_called(generate, args, named)
        return found

    invoker.generate_enqueue_and_set_args = shared


def _hashable(value: Any) -> object:
    return tuple(map(_hashable, value)) if isinstance(value, (list, tuple)) else value


def _when_called(generate: Callable[..., Functions], args: Any, named: Any) -> Functions:
    """Return functions that are generated when one of them is called: objects without types rarely are."""

    @cache
    def made() -> Functions:
        return generate(*args, **named)

    return lambda *own, **options: made()[0](*own, **options), lambda *own, **options: made()[1](*own, **options)
