"""`clcomm doctor`: diagnosis of this installation, host or job, with remedies, with clcomm/tools/doctor/."""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from typing import TYPE_CHECKING

from clcomm.tools.commands.command import Command

if TYPE_CHECKING:
    from clcomm.base.console.finding import Finding

NAME = "clcomm doctor"
#: The exit code where a problem was found; notes alone are 0.
FOUND = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hosts", default="", metavar="A,B:2", help="look whether these hosts can be reached too")
    parser.add_argument("--hostfile", default="", metavar="FILE", help="the same for the hosts in a file")
    parser.add_argument("--directory", default=".", metavar="DIR", help="where to look for locks of checkpoints")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON, with their evidence")


def run(options: argparse.Namespace) -> int:
    """Examine, print, and return FOUND if there is a problem; under mpiexec rank 0 prints, and all return the same."""
    from clcomm.base.console import finding
    from clcomm.base.host.launcher import launched_rank, local_place
    from clcomm.base.host.rank_process import launched_ranks
    from clcomm.jobs.launch.mpiexec import require_hostfile
    from clcomm.tools.doctor import examine, network, start
    from clcomm.tools.doctor.job import JobFacts

    if options.hostfile:
        require_hostfile(options.hostfile)
    probes = examine.probes(options.directory, local_place()[0])
    names = network.named_hosts(options.hosts, options.hostfile)
    if names:
        probes["hosts"] = lambda: network.probe(names)
    launched = launched_ranks()
    if launched == 1:
        probes["start"] = start.probe
        return _shown(examine.judge(JobFacts([examine.look(probes)], False)), options.json)
    prints, facts = not launched_rank(), examine.look(probes)
    if examine.lacks_numpy(facts):  # without it no messages can be exchanged: the first rank speaks
        return _shown(examine.judge(JobFacts([facts], True)), options.json) if prints else FOUND
    from clcomm.comm.transport import mpi_runtime

    render = finding.as_json if options.json else partial(finding.as_text, command=NAME)
    job = examine.together(facts, launched, render if prints else None)
    code = 0 if job is None else _shown(examine.judge(job), options.json)
    if not mpi_runtime.is_running():
        os._exit(code)  # another end would start MPI, to agree with ranks that it cannot reach
    return examine.agreed(code)


def _shown(findings: list[Finding], as_json: bool) -> int:
    """Print findings and return the exit code; where the output cannot be written, they go to standard error."""
    from clcomm.base.console import finding
    from clcomm.base.console.finding import PROBLEM, problem

    try:
        finding.show(findings, NAME, as_json)
        sys.stdout.flush()
    except BrokenPipeError:  # its reader has seen enough
        raise
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what is in the buffer still
        findings = [*findings, problem("output", f"could not be written: {error.strerror}", "name a file elsewhere")]
        sys.stderr.write(finding.as_text(findings, NAME))
    return FOUND if any(each.level == PROBLEM for each in findings) else 0


COMMAND = Command(
    "doctor",
    "find out what is wrong with an installation, a host or a job's ranks",
    "Look at modules, variables, limits, MPI, its mpiexec, OpenCL, cores, /dev/shm, caches, locks and what other jobs "
    "left, and say what to do about what is wrong. Under mpiexec it looks at all ranks too: mpiexec -n 4 clcomm doctor "
    "compares their versions, devices and clocks, and times messages between hosts. Exit code 1: a problem was found.",
    add_arguments,
    run,
    (
        ("clcomm doctor", "this host: MPI, OpenCL, /dev/shm, caches, leftovers"),
        ("mpiexec -n 4 clcomm doctor", "four ranks too: versions, devices, clocks, network"),
        ("clcomm doctor --hosts alpha,beta", "whether these hosts can be reached"),
        ("clcomm doctor --json", "the findings with their evidence, for programs"),
    ),
)
