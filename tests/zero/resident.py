"""What a rank's process grows by when its model is divided: `mpiexec -n 3 python -m tests.zero.resident 3 48 auto`.

A fourth argument is the number of stages of a pipeline. Each rank of a fresh job writes one line of JSON. Pages that
several ranks have mapped count in equal parts for each (PSS, proc_pid_smaps(5)).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import sys

import numpy as np

from clcomm import Communicator, Synchronizer
from clcomm.base.flat_space.memory import MemoryUse
from clcomm.engine import Device, Linear, Module, Sequential, Tensor
from clcomm.optim import Adam
from clcomm.parallel import Mesh
from clcomm.parallel.pipeline import Pipeline
from clcomm.sync.distributed_optimizer import DistributedOptimizer
from training.expected_memory import expected_memory

WIDTH = 512
LAYER_BYTES = 4 * WIDTH * WIDTH


def resident() -> int:
    """Return the bytes of this process's memory, without what malloc keeps for later."""
    gc.collect()
    with contextlib.suppress(AttributeError):  # of glibc
        ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/smaps_rollup") as file:
        return 1024 * next(int(line.split()[1]) for line in file if line.startswith("Pss:"))


def trained(comm: Communicator, device: Device, stage: int, layers: int, stages: int) -> tuple[object, MemoryUse]:
    """Return the optimizer of a model of so many layers after two steps, and the bytes that a rank is said to have."""
    model: Module = Sequential(*(Linear(WIDTH, WIDTH, bias=False, device=device) for _ in range(layers)))
    pipeline = None
    if stages:
        mesh = Mesh(comm, dp=-1, pp=stages)
        pipeline, comm = Pipeline(model, mesh["pp"], loss=lambda y, _: y.mean(), micro_batches=2), mesh["dp"]
        model = pipeline.module
    sync = Synchronizer(comm, zero=stage or 1, bucket_size=LAYER_BYTES)
    plain = Adam(model, 1e-4)
    optimizer = DistributedOptimizer(plain, sync) if stage else plain
    sync.broadcast_parameters(model)
    for number in range(2):
        x = np.full((2, WIDTH), 0.01 * number, np.float32)
        if pipeline is not None:
            pipeline.step(x, x)
        else:
            model(Tensor(x, device)).sum().backward()
        sync.sync_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    said = optimizer.memory() if stage else expected_memory(sync, model, len(plain.state_names))
    assert said is not None
    return (sync, model, optimizer), said


def main() -> None:
    stage, layers = map(int, sys.argv[1:3])
    stages = int(sys.argv[4]) if len(sys.argv) > 4 else 0
    comm, device = Communicator(transport=sys.argv[3]), Device.select("cpu")
    trained(comm, device, stage, 2 * (stages or 1), stages)  # what stays of the first use: programs, MPI's buffers
    device.memory.release_unused()
    comm.barrier()
    before = resident()
    comm.barrier()
    kept, said = trained(comm, device, stage, layers, stages)
    device.memory.release_unused()
    comm.barrier()
    print(json.dumps({"taken": resident() - before, **said._asdict()}) + "\n", end="", flush=True)
    comm.barrier()
    del kept
    comm.finalize()


if __name__ == "__main__":
    main()
