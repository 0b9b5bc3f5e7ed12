"""What benchmarks share that run on MPI ranks themselves: how they come to be there, and how long all ranks took."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np

from benchmarks.workers import mpi_launch
from clcomm import Communicator
from clcomm.transport.mpi import launched_ranks


def relaunch(module: str, ranks: int) -> int | None:
    """Run this command again on so many MPI ranks, and return its exit code; None where it is on several already."""
    if launched_ranks() > 1:
        return None
    command = [*mpi_launch(ranks), sys.executable, "-m", module, *sys.argv[1:]]
    return subprocess.run(command, check=False).returncode


def slowest_s(comm: Communicator, once: Callable[[], object], repeats: int) -> float:
    """Return the seconds of a call out of `repeats` in a row, those of the slowest rank; collective."""
    comm.barrier()
    begin = time.perf_counter()
    for _ in range(repeats):
        once()
    seconds = (time.perf_counter() - begin) / repeats
    return float(comm.all_reduce(np.array([seconds]), "max")[0])
