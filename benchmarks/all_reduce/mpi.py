"""On MPI ranks: the Communicator's all-reduce, MPI's in-place Allreduce, and a copy of as many bytes."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from benchmarks.all_reduce.exchange import Exchange
from benchmarks.all_reduce.worker import Measured, expected_sum, rank_values, timed
from benchmarks.workers import serve
from clcomm import Communicator
from clcomm.engine import Device
from clcomm.engine.fold import DeviceFold


class Buffers:
    """The memory of a size, allocated once for each size, as windows of shared memory are never freed."""

    def __init__(self, comm: Communicator, nbytes: int, fold: DeviceFold | None):
        self.comm, self.nbytes = comm, nbytes
        self.grads = comm.allocate(nbytes).view(np.float32)
        self.reduced = comm.allocate_common(nbytes).view(np.float32)
        comm.fold_with(None)
        self.by_numpy = comm.all_reduce_init(self.grads, "mean", out=self.reduced)
        comm.fold_with(fold)
        self.prepared = comm.all_reduce_init(self.grads, "mean", out=self.reduced)
        self.own, self.plain = np.zeros(nbytes // 4, np.float32), np.zeros(nbytes // 4, np.float32)
        self.of_own = comm.all_reduce_init(self.own)
        self.other = np.ones_like(self.plain)

    def check(self) -> None:
        """Reduce known values both ways and compare."""
        expected = expected_sum(self.grads.size, self.comm.size)
        self.grads[...] = self.plain[...] = rank_values(self.grads.size, self.comm.rank)
        np.testing.assert_array_equal(self.comm.all_reduce(self.grads, out=self.reduced), expected)
        self.comm.barrier()
        for prepared in (self.prepared, self.by_numpy):
            prepared()
            np.testing.assert_array_equal(self.reduced, expected / np.float32(self.comm.size))
            self.comm.barrier()
        self.own[...] = rank_values(self.own.size, self.comm.rank)
        self.of_own()
        np.testing.assert_array_equal(self.own, expected)
        self.allreduce()
        np.testing.assert_array_equal(self.plain, expected)
        self.comm.barrier()

    def allreduce(self) -> None:
        from mpi4py import MPI

        self.comm.comm.Allreduce(MPI.IN_PLACE, self.plain)

    def measured(self, system: str) -> Measured:
        """Return a system at this size: "clcomm", "by NumPy", "unprepared", "own", "own unprepared", "mpi", "copy"."""
        ours, own = (self.grads, self.reduced, 1.0), (self.own, self.own, self.comm.size)
        systems = {
            "clcomm": Measured(self.prepared, *ours),
            "by NumPy": Measured(self.by_numpy, *ours),
            "unprepared": Measured(lambda: self.comm.all_reduce(self.grads, "mean", out=self.reduced), *ours),
            "own": Measured(self.of_own, *own),
            "own unprepared": Measured(lambda: self.comm.all_reduce(self.own), *own),
            "mpi": Measured(self.allreduce, self.plain, self.plain, self.comm.size),
            "copy": Measured(lambda: np.copyto(self.other, self.plain), self.plain, self.other, 1.0),
        }
        return systems[system]


def main() -> None:
    comm = Communicator()
    device = Device.select("cpu", local_rank=comm.local_rank, local_size=comm.local_size, cores=comm.cores)
    fold = DeviceFold.on(device)
    exchange = Exchange(comm, device) if comm.size == 2 and device.runs_in_caller else None
    buffers: dict[int, Buffers] = {}

    def handle(request: dict[str, Any]) -> dict[str, Any]:
        nbytes = request["nbytes"]
        if request["system"] == "exchange":
            return {} if exchange is None else exchange.timed(request["repeats"])
        if nbytes not in buffers:
            buffers[nbytes] = Buffers(comm, nbytes, fold)
            buffers[nbytes].check()
        return timed(buffers[nbytes].measured(request["system"]), request["repeats"])

    serve(sys.argv[1], comm.rank, handle)


if __name__ == "__main__":
    main()
