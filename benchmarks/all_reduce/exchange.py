"""The limit of small all-reduces: two ranks exchange a cache line, in a kernel that runs in the calling thread."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

from clcomm import Communicator
from clcomm.engine import Device

_LINE_BYTES = 256  # apart by more than the two lines that processors fetch at once


class Exchange:
    """A line of each rank in memory that both see."""

    def __init__(self, comm: Communicator, device: Device):
        import pyopencl as cl

        self.comm, self.device, self.rounds = comm, device, 0
        lines = comm.allocate_common(2 * _LINE_BYTES).reshape(2, _LINE_BYTES)
        lines[comm.rank] = 0
        flags = cl.mem_flags.READ_WRITE | cl.mem_flags.USE_HOST_PTR
        self._lines = mine, other = tuple(  # PoCL does not keep them
            cl.Buffer(device.context, flags, hostbuf=lines[rank]) for rank in (comm.rank, 1 - comm.rank)
        )
        source = Path(__file__).with_suffix(".cl").read_text(encoding="utf-8")
        self._kernel = cl.Kernel(cl.Program(device.context, source).build(), "exchange")
        self._kernel.set_args(mine, other, np.int32(0), np.int32(0))
        comm.barrier()

    def timed(self, repeats: int) -> dict[str, Any]:
        """Return the begin and the end of `repeats` exchanges, by the host's monotonic clock."""
        import pyopencl as cl

        self._kernel.set_arg(2, np.int32(self.rounds))
        self._kernel.set_arg(3, np.int32(repeats))
        self.rounds += repeats
        self.comm.barrier()
        start = time.monotonic()
        cl.enqueue_nd_range_kernel(self.device.queue, self._kernel, (1,), (1,))
        self.device.finish()
        return {"start": start, "stop": time.monotonic(), "altering": 0.0}
