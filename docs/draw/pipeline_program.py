"""A pipeline of stages that wait in place of computing, on four ranks: `... docs.draw.pipeline_program 1f1b FILE`."""

from __future__ import annotations

import sys

import numpy as np

from benchmarks.pipeline import WaitingLayer
from clcomm import Communicator, run
from clcomm.engine import Device, Sequential
from clcomm.insight.trace import Trace
from clcomm.parallel.pipeline import Pipeline

MICRO_BATCHES, STAGE_S, STEPS, WIDTH = 6, 0.008, 50, 64


def main() -> int:
    schedule, path = sys.argv[1:]
    with Communicator() as comm:
        device = Device.select(local_rank=comm.local_rank, local_size=comm.local_size, cores=comm.cores)
        model = Sequential(*(WaitingLayer(STAGE_S, device) for _ in range(comm.size)))
        pipeline = Pipeline(model, comm, loss=lambda y, _: y.sum(), micro_batches=MICRO_BATCHES, schedule=schedule)
        batch = np.zeros((MICRO_BATCHES, WIDTH), np.float32)
        with Trace(comm, path):
            for step in range(STEPS):
                with comm.phase("step", step=step):
                    pipeline.step(batch, batch)
                    pipeline.zero_grad()
    return 0


if __name__ == "__main__":
    run(main)
