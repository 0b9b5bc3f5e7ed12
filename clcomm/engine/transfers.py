"""Copies between host arrays and a device's own memory, concurrent with its kernels.

To the device an array passes through pieces of pinned host memory, which the device reads by itself. A second queue
moves a piece to a landing place on the device as soon as it is filled, whatever the kernels' queue is doing; the
kernels' queue then moves it from there to its buffer, in order. That is within the device's memory, and takes next to
no time. So kernels that were queued before still see the old values, and memory that they use can be given out again.
To the host a third queue fills pinned pieces, from which the host copies one while the next is on its way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from clcomm.base.errors import ArgumentError

if TYPE_CHECKING:
    import pyopencl as cl

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
