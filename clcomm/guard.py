"""A guard for programs of mpi4py alone: a rank that raises, exits or dies ends the others, and one line names it.

`mpiexec -n 4 python -m clcomm.guard script.py` guards a script as it is; so do `watch()` at its start and `run(main)`.
Neither NumPy nor OpenCL is imported.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["run", "watch"]


def watch() -> None:
    """Guard this process from now on; collective over COMM_WORLD, a no-op where no launcher has started several ranks.

    A rank that raises, is killed, crashes or calls os._exit ends the others. Python tells nobody of sys.exit(code):
    `run` and `python -m clcomm.guard` notice that too.

    Raises:
        LaunchError: mpiexec belongs to another MPI than the one that mpi4py loads.
    """
    from clcomm.comm.transport import mpi_failures, mpi_runtime
    from clcomm.comm.watch import exit_monitor
    from clcomm.comm.watch.exits import hook_job
    from clcomm.comm.watch.job import this_job

    hook_job()
    mpi = mpi_runtime.process_mpi()
    if mpi_runtime.launched_ranks() > 1 and mpi.survivors is None:
        mpi.survivors = world = mpi_runtime.world().Dup()  # on which ranks agree on their end, apart from the program's
        mpi_failures.unlink_shared_files()
        host = mpi_runtime.host_of(world)
        exit_monitor.watch_host(this_job().record, host, world.Get_rank())
        host.Free()


def run(main: Callable[[], int | None]) -> NoReturn:
    """Call `main` under the guard, and end the process with its return value, or its exception's code, as exit code."""
    from clcomm.base.host.scripts import without_frames_of
    from clcomm.comm.watch import endings

    def guarded() -> int | None:
        watch()
        return main()

    endings.run(guarded, tidy=partial(without_frames_of, __file__))


if __name__ == "__main__":
    from clcomm.base.host.scripts import run_script

    run(partial(run_script, sys.argv[1:]))
