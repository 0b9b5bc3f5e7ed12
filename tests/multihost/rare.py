"""A rank of the test: trains under a policy, and rank 0 prints as JSON a digest of the parameters that all have.

Arguments: the policy, and a file in which the last rank writes its process's number after a few steps.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path

import numpy as np

from clcomm import Communicator, Synchronizer
from clcomm.comm.watch.endings import run
from tests.multihost.train import gradients, initial

STEPS, STEP_S, TOLD_AT, RATE = 40, 0.05, 5, np.float32(1e-3)


def main() -> None:
    policy, place = sys.argv[1:]
    with Communicator(stall_warning_s=1.0) as comm:
        model, sync = initial(seed=0), Synchronizer(comm, policy=policy)
        sync.broadcast_parameters(model)
        for step in range(STEPS):
            time.sleep(STEP_S)
            for name, gradient in gradients(model, comm.rank, step).items():
                model[name].grad = gradient
            sync.sync_gradients(model)
            for parameter in model.parameters.values():
                parameter.data -= RATE * parameter.grad
            sync.finish_step(model)
            if step == TOLD_AT and comm.rank == comm.size - 1:
                Path(f"{place}.partial").write_text(str(os.getpid()))
                os.rename(f"{place}.partial", place)
        sync.align_parameters(model)
        found = comm.all_gather_object(hashlib.sha256(b"".join(model.bits())).hexdigest())
        if comm.rank == 0:
            print(json.dumps(found))


if __name__ == "__main__":
    run(main)
