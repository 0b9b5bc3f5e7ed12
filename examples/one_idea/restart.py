"""Idea: a job that fails is started again, and continues from its newest checkpoint.

    clcomm run --restarts 1 -n 2 -m examples.one_idea.restart state.npz

Look at: the last rank fails at step 7 of the first start; the second one begins at step 5, the newest that was saved,
and not at step 0. Run without a second start, the job ends at step 7.
"""

import os
import sys

import numpy as np

from clcomm import Communicator, note_saved, note_step, run
from clcomm.jobs import checkpoint

STEPS, EVERY = 12, 5


def main() -> None:
    path, restarts = (sys.argv[1:] or ["restart-state.npz"])[0], int(os.environ.get("CLCOMM_RESTART", "0"))
    with Communicator() as comm:
        values, step = np.zeros(4), 0
        if restarts and os.path.exists(path):
            saved = checkpoint.load(path)
            values, step = saved.arrays["values"], saved.facts["step"]
        print(f"rank {comm.rank}: start {restarts + 1} begins at step {step}", flush=True)
        began = step
        while step < STEPS:
            if comm.rank == comm.size - 1 and step == 7 and not restarts:
                raise RuntimeError("a fault, for the example")
            values += comm.all_reduce(np.ones(4), "mean")
            step += 1
            note_step(step)  # for messages, and so that `clcomm run` sees progress
            if step % EVERY == 0 and comm.rank == 0:
                checkpoint.save(path, checkpoint.Checkpoint({"values": values}, {"step": step}))
                note_saved(step)
        print(f"rank {comm.rank}: {step} steps, values {values.tolist()}", flush=True)
        if comm.rank == 0:
            print(f"without the checkpoint {STEPS} steps after the failure; with {path} {STEPS - began}", flush=True)


run(main)
