"""A rank with two Communicators: one that compares the ranks' calls, and one that does not."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.workers import serve
from clcomm import Communicator


def operations(comm: Communicator, nbytes: int) -> dict[str, Callable[[], Any]]:
    """Return the operations by name, on arrays of `nbytes`."""
    own, common = (allocate(nbytes).view(np.float32) for allocate in (comm.allocate, comm.allocate_common))
    return {
        "barrier": comm.barrier,
        "all_reduce, prepared": comm.all_reduce_init(own, "mean", out=common, label="gradients", bucket=0),
        "all_reduce": lambda: comm.all_reduce(own, "mean", out=common, label="gradients", bucket=0),
    }


def communicator(checks: str) -> Communicator:
    os.environ["CLCOMM_CHECKS"] = checks
    return Communicator()


def main() -> None:
    directory, nbytes = sys.argv[1], int(sys.argv[2])
    comms = {checks: communicator(checks) for checks in ("on", "off")}
    functions = {checks: operations(comm, nbytes) for checks, comm in comms.items()}

    def handle(request: dict[str, Any]) -> dict[str, Any]:
        """Return an operation's seconds by the clock and of processor time."""
        call, count = functions[request["checks"]][request["operation"]], request["count"]
        call()
        begin, cpu = time.perf_counter(), time.process_time()
        for _ in range(count):
            call()
        return {"wall": (time.perf_counter() - begin) / count, "cpu": (time.process_time() - cpu) / count}

    serve(directory, comms["on"].rank, handle)


if __name__ == "__main__":
    main()
