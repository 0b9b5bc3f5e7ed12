"""A rank of `clcomm run -n 4 train.py`: sets torchrun's variables and runs the script as Python would.

`python -m clcomm.jobs.launch.rank ADDRESS PORT LOGS (SCRIPT | -m MODULE) ARGUMENTS`; "-" for an address or a port:
rank 0's, for a directory of logs: none.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import NoReturn

from clcomm.base.host.launcher import JOB_VARIABLE, local_place
from clcomm.base.host.rank_process import ancestors, handle_signals, leave_to_python, say_ended
from clcomm.base.host.scripts import run_script, without_frames_of
from clcomm.comm.watch import restarts
from clcomm.jobs.launch import rank_logs
from clcomm.jobs.launch.variables import share_cores

#: In place of an address, a port or a directory.
CHOSEN = "-"


def main() -> None:
    """Run this process's command line; a failure ends the job."""
    handle_signals(_end_at_once)
    address, port, logs, *job = sys.argv[1:]
    start(job, address, port, logs)


def start(
    job: list[str], address: str = CHOSEN, port: str = CHOSEN, logs: str = CHOSEN,
    around: Callable[[Callable[[], None]], None] | None = None,
) -> NoReturn:  # fmt: skip
    """Run a script as a rank, and end the process.

    around: calls the function that it is given, which runs the script; None: nothing is done around it.
    """
    if logs != CHOSEN:
        rank_logs.redirect(logs)
    share_cores()
    from clcomm.comm.transport import mpi_runtime
    from clcomm.comm.watch import endings, exits

    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)  # of the shell: another program's
    leave_to_python()
    if mpi_runtime.launched_ranks() > 1:
        exits.hook_job()

    def run() -> None:
        _set_variables(address, port)
        with contextlib.suppress(AttributeError, ValueError):  # a stream of another kind, or closed
            sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        script = partial(run_script, job)
        script() if around is None else around(script)

    endings.run(run, tidy=partial(without_frames_of, __file__))


def _end_at_once(number: int, frame: object) -> None:
    """End while modules are loaded: by the signal, as launchers ignore a rank that exits before MPI has started."""
    from clcomm.comm.watch.exit_monitor_process import children_of

    job = os.environ.get(JOB_VARIABLE, "")  # Open MPI's launcher ends the others by SIGTERM where a rank has died
    if not job or len(children_of(ancestors(os.getpid())[1], job)) >= local_place()[1]:
        restarts.ProgressFile().note(restarts.SIGNAL, number)
    say_ended(number)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _set_variables(address: str, port: str) -> None:
    """Set the variables that scripts for torchrun read; collective."""
    from clcomm.comm.transport import mpi_runtime
    from clcomm.comm.watch.job import Limits
    from clcomm.comm.watch.startup_watchdog import StartWatch
    from clcomm.jobs.launch.variables import torch_variables

    with StartWatch(Limits.of(10.0, 300.0)):
        variables = torch_variables(mpi_runtime.world())
    given = {"MASTER_ADDR": address, "MASTER_PORT": port}
    os.environ.update({**variables, **{name: value for name, value in given.items() if value != CHOSEN}})


if __name__ == "__main__":
    main()
