"""What a model leaves that a program has dropped: `mpiexec -n 3 python -m tests.zero.dropped 2`.

Each rank of a fresh job writes one line of JSON for each of three models, one after another: the bytes of the device
and of the host's windows in use, and whether the device still has anything to do at the end of a backward.
"""

from __future__ import annotations

import gc
import json
import sys
import time

from clcomm import Communicator
from tests.sharded_jobs import cpu
from tests.zero.jobs import ZeroJob


def window_bytes(comm: Communicator) -> int:
    """Return the bytes of a host's windows that are in use."""
    if not comm.shares_memory:
        return 0
    comm.allocate(64)  # frees what no rank uses
    return comm.world.shared.memory.held_bytes()


def main() -> None:
    stage, comm, device = int(sys.argv[1]), Communicator(), cpu()
    for _ in range(3):
        job = ZeroJob(comm, "mlp", stage, lambda: device)
        job.run(2)
        del job
        gc.collect()
        time.sleep(0.05)  # a queue notices later that its kernels need an array no more
        left = {"device": device.memory.active_bytes, "windows": window_bytes(comm), "ends": len(device.backward_ends)}
        print(json.dumps(left) + "\n", end="", flush=True)
    comm.finalize()


if __name__ == "__main__":
    main()
