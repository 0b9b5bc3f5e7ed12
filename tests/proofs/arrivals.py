"""Synchronisations to which the ranks come at random times: no wrong value, no hang, no growth.

`python -m tests.proofs.arrivals COUNT SEED device|numpy`, under mpiexec, half of them each through shared memory and
through MPI, and of these half with overlap. The ranks' devices sum, or NumPy.
Rank 0 prints what each rank's memory, and the files in /dev/shm, grew by after the first quarter.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from functools import partial

import numpy as np

from clcomm import Communicator, Synchronizer
from clcomm.comm.watch.endings import run
from clcomm.engine.device import Device
from clcomm.engine.fold import DeviceFold
from tests.numpy_models import TellingModel

#: How late a rank may be: now and then by much, most often by about as long as a synchronisation takes.
OFTEN_S, SELDOM_S, SELDOM = 3e-4, 0.02, 0.01
SHAPES = {"w1": (64, 128), "b1": (128,), "w2": (128, 300), "b2": (300,)}
#: Bytes: some buckets go through slots, some by shards.
BUCKET_SIZE = 40_000


def resident_bytes() -> int:
    """Return this process's own memory; what it shares with others is counted in /dev/shm."""
    with open("/proc/self/status") as status:
        fields = dict(line.split(":", 1) for line in status)
    return int(fields["RssAnon"].split()[0]) * 1024


def held() -> tuple[int, int, int]:
    """Return bytes of memory, files in /dev/shm that are mapped here, and open descriptors."""
    with open("/proc/self/maps") as maps:
        mapped = sum("/dev/shm/" in line for line in maps)
    return resident_bytes(), mapped, len(os.listdir("/proc/self/fd"))


def gradient_of(rank: int, step: int, name: str) -> np.ndarray:
    """Return whole numbers, whose sum is exact and told by a formula."""
    count = np.prod(SHAPES[name])
    return ((np.arange(count) + step) % 1000 * (rank + 1)).astype(np.float32).reshape(SHAPES[name])


def main() -> None:
    count, seed = int(sys.argv[1]), int(sys.argv[2])
    comms = [Communicator(), Communicator(transport="mpi")]
    rank, size = comms[0].rank, comms[0].size
    if sys.argv[3] == "device":
        device = Device.select("cpu", local_rank=comms[0].local_rank, local_size=comms[0].local_size, cores=1)
        comms[0].fold_with(DeviceFold.on(device))
    late = random.Random(1000 * seed + rank)
    syncs = [Synchronizer(comm, bucket_size=BUCKET_SIZE, overlap=on) for on in (False, True) for comm in comms]
    models = [TellingModel((name, np.zeros(shape, np.float32)) for name, shape in SHAPES.items()) for _ in syncs]
    before = None
    for step in range(count):
        model, sync = models[step % len(syncs)], syncs[step % len(syncs)]
        for what in (
            partial(model.backward, {name: gradient_of(rank, step, name) for name in reversed(SHAPES)}),
            partial(sync.sync_gradients, model),
        ):
            time.sleep(late.random() * (SELDOM_S if late.random() < SELDOM else OFTEN_S))
            what()
        for name, parameter in model.parameters.items():
            mean = gradient_of(0, step, name) * np.float32(size * (size + 1) // 2) / np.float32(size)
            assert np.array_equal(parameter.grad, mean), f"step {step}, {name}"
        if step == count // 4:
            before = held()
    assert before is not None
    grown = [after - earlier for after, earlier in zip(held(), before, strict=True)]
    everyone = comms[0].all_gather_object(grown)
    if rank == 0:
        print(json.dumps(everyone))
    for comm in comms:
        comm.finalize()


if __name__ == "__main__":
    run(main)
