"""`clcomm run --chaos`: gives a job the faults that its ranks plant (comm/watch/chaos.py), and counts them."""

from __future__ import annotations

import argparse
import os

from clcomm.base.errors import ArgumentError
from clcomm.base.storage.scratch import scratch_file
from clcomm.comm.watch.chaos import CHAOS, LOG, Schedule, read_log
from clcomm.jobs.launch.keeper import kept_job
from clcomm.jobs.launch.supervisor import Supervisor, print_notice


def schedule(text: str) -> Schedule:
    """Return the schedule that an option's text means."""
    try:
        return Schedule.read(text)
    except ArgumentError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def run(supervisor: Supervisor, faults: Schedule | None) -> int:
    """Run a supervisor's job, with faults if there are any, and return its exit code."""
    with kept_job() as keeper:
        if faults is None:
            return supervisor.run(keeper)
        log = scratch_file(keeper.folder / "chaos", b"")
        os.environ.update({CHAOS: faults.text(), LOG: log})
        code = supervisor.run(keeper)
        planted = read_log(log)
    said = f"{len(planted)} fault{'s' * (len(planted) != 1)}" if planted else "no fault came to pass on this host"
    steps = tuple(each.step for each in planted)
    if not faults.in_steps and steps and all(steps) and not faults.at:
        said += f"; in the same steps again: --chaos {faults.text(steps)}"
    print_notice(f"chaos: {said}")
    return code
