"""A short training in which something slows one rank down, or all: `slowed.py CAUSE RANK REPORT [OPTION ...]`.

loader: the rank's batches come late. core: each rank has a core to itself, and other processes run on that rank's.
crowd: all ranks are on half as many cores. none: nothing does.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager

import numpy as np

LATE_S = 0.02
#: So that the rank's share of its core stays small where the machine is busy anyway.
_RIVALS = 3


class Late:
    """A dataset whose batches come late."""

    def __init__(self, dataset):
        self._dataset = dataset

    def __getattr__(self, name):
        return getattr(self._dataset, name)

    def __len__(self):
        return len(self._dataset)

    def batch(self, indices: np.ndarray, *out):
        time.sleep(LATE_S)
        return self._dataset.batch(indices, *out)


@contextmanager
def rivals(cpu: int):
    """Keep a core busy with other processes."""
    command = f"import os\nos.sched_setaffinity(0, [{cpu}])\nparent = os.getppid()\nwhile os.getppid() == parent: 0"
    running = [subprocess.Popen([sys.executable, "-c", command]) for _ in range(_RIVALS)]
    try:
        yield
    finally:
        for each in running:
            each.kill()
            each.wait()


def main() -> int:
    cause, slow, report, *options = sys.argv[1:]
    from clcomm.comm.transport.mpi_failures import place_in_world

    rank, ranks = place_in_world()
    cpus = sorted(os.sched_getaffinity(0))
    with ExitStack() as stack:
        if cause == "core":
            os.sched_setaffinity(0, {cpus[rank % len(cpus)]})
        elif cause == "crowd":
            os.sched_setaffinity(0, cpus[: max(1, ranks // 2)])
        from training import build_trainer

        if cause == "loader" and rank == int(slow):
            plain = build_trainer.Loader
            build_trainer.Loader = lambda dataset, *others, **settings: plain(Late(dataset), *others, **settings)
        elif cause == "core" and rank == int(slow):
            stack.enter_context(rivals(cpus[rank % len(cpus)]))
        from examples import mnist

        sys.argv[1:] = [
            "--data", "synthetic", "--no-eval", "--quiet", "--batch-size", "32", "--report", report, *options,
        ]  # fmt: skip
        return mnist.main()


if __name__ == "__main__":
    from clcomm.comm.watch.endings import run

    run(main)
