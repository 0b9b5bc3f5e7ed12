"""A job whose last rank does not come to an all-reduce: it stops; or it leaves, or exits, as the argument says."""

from __future__ import annotations

import os
import signal
import sys

import numpy as np

from clcomm import Communicator
from clcomm.comm.watch.endings import run


def main() -> None:
    comm = Communicator(stall_warning_s=0.5, timeout_s=2.5)
    comm.barrier()
    comm.lifetime.watchdog.look(None)  # so that everyone's place is known
    if comm.rank == comm.size - 1:
        if sys.argv[1:] == ["leaves"]:
            return
        if sys.argv[1:2] == ["exits"]:
            os._exit(int(sys.argv[2]))
        os.kill(os.getpid(), signal.SIGSTOP)
    comm.all_reduce(np.zeros(4), label="late")


if __name__ == "__main__":
    run(main)
