"""What a rank's process grows by when its model is divided: `mpiexec -n 3 python -m tests.zero.resident 3`.

Each rank of a fresh job writes one line of JSON. Memory is not shared here, so that all of it counts for its rank.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import sys

import numpy as np

from clcomm import Communicator, Synchronizer
from clcomm.distributed_optimizer import DistributedOptimizer
from clcomm.engine import Device, Linear, Sequential, Tensor
from clcomm.optim import SGD

WIDTH = 512
LAYER_BYTES = 4 * WIDTH * WIDTH


def resident() -> int:
    """Return the bytes of this process that are in memory and its own, without what malloc keeps for later."""
    gc.collect()
    with contextlib.suppress(AttributeError):  # of glibc
        ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as file:
        _, all_pages, shared, *_ = map(int, file.read().split())
    return (all_pages - shared) * os.sysconf("SC_PAGE_SIZE")


def trained(comm: Communicator, device: Device, stage: int, layers: int) -> DistributedOptimizer:
    """Return the optimizer of a model of so many layers after two steps."""
    model = Sequential(*(Linear(WIDTH, WIDTH, bias=False, device=device) for _ in range(layers)))
    sync = Synchronizer(comm, zero=stage, bucket_size=LAYER_BYTES)
    optimizer = DistributedOptimizer(SGD(model, 0.01), sync)
    sync.broadcast_parameters(model)
    for number in range(2):
        model(Tensor(np.full((2, WIDTH), 0.01 * number, np.float32), device)).sum().backward()
        sync.sync_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def main() -> None:
    stage, layers = map(int, sys.argv[1:])
    comm, device = Communicator(transport="mpi"), Device.select("cpu")
    trained(comm, device, stage, 2)  # what stays of the first use: programs, MPI's buffers
    device.memory.release_unused()
    before = resident()
    optimizer = trained(comm, device, stage, layers)
    device.memory.release_unused()
    print(json.dumps({"taken": resident() - before, **optimizer.memory()._asdict()}) + "\n", end="", flush=True)
    comm.finalize()


if __name__ == "__main__":
    main()
