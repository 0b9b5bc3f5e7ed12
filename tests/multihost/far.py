"""A job of one rank on each of two hosts; rank 0 prints as JSON the least seconds of a message there and back.

By the message's bytes.
"""

from __future__ import annotations

import json
import time

import numpy as np

from clcomm import Communicator
from clcomm.comm.watch.endings import run

SIZES, TURNS = (8, 1 << 20), 3


def main() -> None:
    with Communicator(transport="mpi") as comm:
        least = {}
        for nbytes in SIZES:
            message, times = np.zeros(nbytes, np.uint8), []
            for _ in range(TURNS):
                comm.barrier()
                begin = time.perf_counter()
                comm.broadcast(message, 0)
                comm.broadcast(message, 1)
                times.append(time.perf_counter() - begin)
            least[nbytes] = min(times)
        if comm.rank == 0:
            print(json.dumps(least))


if __name__ == "__main__":
    run(main)
