"""A job for the soak test: trains, stalls at random, saves, opens and closes Communicators, and watches what it holds.

`python train.py SECONDS FOLDER`, under mpiexec. Each rank writes FOLDER/rank-N.json: a sample of what it held for each
round. All ranks end in the same round, with parameters of the same bits.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
from itertools import islice
from pathlib import Path

from clcomm import Communicator, Synchronizer
from clcomm.comm.watch.endings import run
from clcomm.sync.sampler import DistributedSampler
from training.checkpoint_series import CheckpointSeries
from training.data.datasets import load_synthetic
from training.data.loader import Loader
from training.engines.parts import build_parts
from training.metrics import StepRecord
from training.snapshot import save_snapshot
from training.trainer import Callback, Trainer

STEPS_A_ROUND, SAMPLES, BATCH = 40, 4096, 8
#: One step in so many stalls on a rank, for up to so many seconds.
STALL_EVERY, MOST_STALL_S = 50, 0.03


class Stalls(Callback):
    """A callback that lets this rank be late now and then."""

    def __init__(self, rank: int):
        self._draw = random.Random(rank)

    def step_finished(self, record: StepRecord) -> None:
        if self._draw.randrange(STALL_EVERY) == 0:
            time.sleep(self._draw.uniform(0, MOST_STALL_S))


def make_trainer(comm: Communicator) -> Trainer:
    dataset = load_synthetic(SAMPLES, 16, shape=(1, 8, 8)).train
    parts = build_parts("native", "mlp", dataset.image_shape, dataset.classes, seed=3, device="cpu")
    loader = Loader(dataset, DistributedSampler(SAMPLES, comm.rank, comm.size, seed=5), BATCH, prefetch=1)
    optimizer = parts.make_optimizer("adam", 1e-3)
    sync = Synchronizer(comm, bucket_size="16KiB", check_replicas_every=25)
    return Trainer(comm, sync, parts, optimizer, loader, callbacks=[Stalls(comm.rank)])


def use_another_communicator(world: Communicator) -> None:
    """Open a second Communicator with memory of its own, use it, and close it."""
    with Communicator(bucket_size="64KiB") as comm:
        shared = comm.allocate(1 << 16).view("f4")
        shared[...] = comm.rank
        comm.all_reduce(shared)
        assert (shared == comm.size * (comm.size - 1) / 2).all()
        handle = comm.all_reduce_async(shared)
        handle.wait()
        del shared, handle
    world.barrier()


def held() -> dict[str, int]:
    """Return what this process holds: memory in bytes, descriptors, threads, and mappings in shared memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    mappings = Path("/proc/self/maps").read_text().splitlines()
    return {
        "memory": pages * os.sysconf("SC_PAGE_SIZE"),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "windows": sum("/dev/shm/" in line for line in mappings),
    }


def main() -> None:
    seconds, folder = float(sys.argv[1]), Path(sys.argv[2])
    comm = Communicator()
    trainer = make_trainer(comm)
    series = CheckpointSeries(comm, folder / "run.ckpt", keep=2, background=True)
    steps, samples, end = trainer.train(10**9), [], time.monotonic() + seconds
    while comm.broadcast_object(time.monotonic() < end):
        for _ in islice(steps, STEPS_A_ROUND):
            pass
        save_snapshot(series, trainer, {})
        use_another_communicator(comm)
        samples.append(held())
    series.wait()
    trainer.sync.check_replicas(trainer.model)
    (folder / f"rank-{comm.rank}.json").write_text(json.dumps(samples))
    comm.finalize()


if __name__ == "__main__":
    run(main)
