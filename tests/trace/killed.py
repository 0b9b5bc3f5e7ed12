"""A program that traces steps until its last rank kills itself; the file is its argument."""

from __future__ import annotations

import os
import signal
import sys

import numpy as np

from clcomm import Communicator
from clcomm.insight.trace import Trace, recorder

STEPS = 20


def main() -> None:
    recorder._FLUSH_S = 0.0
    comm = Communicator()
    with Trace(comm, sys.argv[1]):
        for number in range(STEPS):
            with comm.phase("step"):
                comm.all_reduce(np.ones(10))
            if number == STEPS - 1 and comm.rank == comm.size - 1:
                os.kill(os.getpid(), signal.SIGKILL)
        comm.barrier()


if __name__ == "__main__":
    main()
