"""Common parts of benchmarks that run on MPI ranks themselves: their start, and the time of all ranks."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np

from benchmarks.workers import mpi_launch
from clcomm import Communicator
from clcomm.base.errors import ArgumentError
from clcomm.comm.transport.mpi_runtime import launched_ranks
from tests.multihost.cable import Link
from tests.multihost.two_hosts import TwoHosts, environment, refusal

_CABLE = "BENCHMARK_CABLE"


def relaunch(module: str, ranks: int) -> int | None:
    """Run this command again on `ranks` MPI ranks, and return its exit code; None if it runs on several."""
    if launched_ranks() > 1:
        return None
    command = [*mpi_launch(ranks), sys.executable, "-m", module, *sys.argv[1:]]
    return subprocess.run(command, check=False).returncode


def relaunch_on_hosts(module: str, ranks: tuple[int, int], delay_ms: float, rate_mbit: float) -> int | None:
    """Run this command on two hosts made of network namespaces, and return its exit code; None if it runs there.

    Raises ArgumentError where such hosts cannot be made. `cable()` describes the link between them to the ranks.
    """
    if launched_ranks() > 1:
        return None
    reason = refusal()
    if reason is not None:
        raise ArgumentError(f"--hosts: two hosts cannot be made here: {reason}")
    with TwoHosts(Link(delay_ms, rate_mbit)) as hosts:
        command = hosts.command(ranks, ["-m", module, *sys.argv[1:]])
        return subprocess.run(command, check=False, env={**environment(), _CABLE: hosts.cable.how}).returncode


def cable() -> str:
    """Return the link between the hosts of `relaunch_on_hosts`, in words; "" without them."""
    return os.environ.get(_CABLE, "")


def slowest_s(comm: Communicator, once: Callable[[], object], repeats: int) -> float:
    """Return the slowest rank's seconds of a call, out of `repeats` in a row; collective."""
    comm.barrier()
    begin = time.perf_counter()
    for _ in range(repeats):
        once()
    seconds = (time.perf_counter() - begin) / repeats
    return float(comm.all_reduce(np.array([seconds]), "max")[0])
