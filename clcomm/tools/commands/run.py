"""`clcomm run`: start a script on some ranks, or any job, and restart it from its newest checkpoint when it fails."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable

from clcomm.base.console.option_types import number, whole_number
from clcomm.base.errors import ArgumentError
from clcomm.comm.transport.mpi_runtime import launched_ranks
from clcomm.jobs.launch import rank_logs, supervisor
from clcomm.jobs.launch.hosts import Hosts
from clcomm.jobs.launch.keeper import require_descriptors
from clcomm.jobs.launch.mpiexec import BINDINGS, HostList, find_mpiexec, require_hostfile
from clcomm.jobs.launch.rank import CHOSEN
from clcomm.jobs.launch.supervisor import LONGEST_PAUSE_S, Supervisor, print_notice, resize
from clcomm.jobs.launch.world_supervisor import Sizes, WorldSupervisor
from clcomm.tools.commands import horovodrun
from clcomm.tools.commands.command import Command

#: The most restarts of a command by default; a script on some ranks is not restarted, as with torchrun.
RESTARTS = 3

#: Options of torchrun without a meaning here, and their replacements.
_REFUSED = {
    ("--node-rank", "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf", "--local-addr"):
        "MPI connects the ranks; for several hosts use --hosts or --hostfile",
    ("--no-python", "--run-path"): "for other programs use clcomm run -- mpiexec ...",
    ("--monitor-interval", "--start-method", "--role", "--redirects", "-r", "--tee", "-t",
     "--local-ranks-filter", "--logs-specs", "--event-log-handler", "--numa-binding", "--signals-to-handle",
     "--duplicate-stdout-filters", "--duplicate-stderr-filters"):
        "clcomm run has no such option",
}  # fmt: skip


class _Refuse(argparse.Action):
    """An option that is an error; `const` names its replacement."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: object, values: object, option: str | None = None
    ) -> None:
        parser.error(f"{option}: {self.const}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    own = parser.add_argument_group("a script on some ranks")
    own.add_argument(
        *("-n", "-np", "--num-proc", *_spellings("--nproc-per-node")), dest="ranks", type=whole_number(1), metavar="N",
        help="number of ranks; the job is then a Python script and its arguments",
    )  # fmt: skip
    own.add_argument("-m", "--module", action="store_true", help="what follows is a module's name, as with python -m")
    own.add_argument("-H", "--hosts", default="", metavar="A,B:2", help="where ranks run, as this MPI writes it")
    own.add_argument(
        "-hostfile", "--hostfile", default="", metavar="FILE", help="a file of hosts, as this MPI writes it"
    )
    own.add_argument(
        "-x", "--env", action="append", type=_variable, metavar="NAME[=VALUE]",
        help="set a variable, or pass on the shell's, on all hosts; may be repeated",
    )  # fmt: skip
    own.add_argument("--bind-to", choices=BINDINGS, help="bind each rank to this; default: what the MPI does, none")
    own.add_argument(
        *_spellings("--log-dir"),
        "--output-filename",
        default="",
        metavar="DIR",
        help="each rank's output goes to DIR/rank-N.log instead",
    )
    own.add_argument(
        *_spellings("--master-addr"), default=CHOSEN, metavar="HOST", help="MASTER_ADDR; default: rank 0's"
    )
    own.add_argument(
        *_spellings("--master-port"), type=whole_number(1, 65535), metavar="PORT",
        help="MASTER_PORT; default: a free one",
    )  # fmt: skip
    own.add_argument("--standalone", action="store_true", help="as it is in any case; accepted for torchrun's users")
    own.add_argument("--nnodes", type=_one_node, metavar="1", help=argparse.SUPPRESS)
    again = parser.add_argument_group("failures")
    again.add_argument(
        "--restarts", *_spellings("--max-restarts"), type=whole_number(), metavar="N",
        help=f"the most restarts; default: 0 with -n, any number with --min-ranks, else {RESTARTS}",
    )  # fmt: skip
    again.add_argument(
        "--pause",
        type=number(most=LONGEST_PAUSE_S),
        default=1.0,
        metavar="S",
        help=f"before the first, doubled each time, at most {LONGEST_PAUSE_S:g}; default: %(default)s",
    )
    again.add_argument(
        "--chaos", type=supervisor.schedule, metavar="seed=N,every=20s",
        help="plant faults: seed=N, every=20s or every=50 (steps), what=kill+stop+slow+flip; see docs/robustness.md",
    )  # fmt: skip
    again.add_argument(
        "--min-ranks", type=whole_number(1), metavar="N",
        help="replace ranks that die, from a copy of the state in memory, by as many, or by fewer down to N",
    )  # fmt: skip
    again.add_argument(
        "--max-ranks", type=whole_number(1), metavar="N", help="the most ranks that --resize may ask for; default: -n"
    )
    again.add_argument(
        "--no-spare", action="store_true", help="start the next ranks when they are needed, not beforehand"
    )
    again.add_argument(
        "--resize", type=whole_number(1), metavar="N",
        help="let a job with --min-ranks go on with N ranks; what follows is its process, if there are several",
    )  # fmt: skip
    for options, remedy in _REFUSED.items():
        for option in options:
            spelt = _spellings(option) if option.startswith("--") else (option,)
            own.add_argument(*spelt, action=_Refuse, const=remedy, nargs="?", help=argparse.SUPPRESS)
    horovodrun.add_arguments(own)
    parser.add_argument(
        "job", nargs=argparse.REMAINDER, metavar="script ... | -- command",
        help="such as train.py --epochs 3 or, without -n, -- mpiexec -n 4 python train.py",
    )  # fmt: skip


def _spellings(option: str) -> tuple[str, ...]:
    """Return an option in our spelling and in torchrun's older one, with underscores."""
    older = "--" + option[2:].replace("-", "_")
    return (option,) if older == option else (option, older)


def _one_node(text: str) -> int:
    if text not in ("1", "1:1"):
        raise argparse.ArgumentTypeError(f"expected 1, got {text!r}; for several hosts use --hosts or --hostfile")
    return 1


def _variable(text: str) -> tuple[str, str]:
    """Return name and value of NAME=VALUE, or of NAME in our own environment."""
    name, sign, value = text.partition("=")
    if not name.isidentifier() or not name.isascii():
        raise argparse.ArgumentTypeError(f"expected NAME or NAME=VALUE, got {text!r}")
    if "\0" in value:
        raise argparse.ArgumentTypeError(f"expected a value without null characters, got {text!r}")
    if not sign and name not in os.environ:
        raise argparse.ArgumentTypeError(f"expected a variable that is set, or {name}=VALUE, got {text!r}")
    return name, value if sign else os.environ[name]


def run(options: argparse.Namespace) -> int:
    """Run the job until it succeeds or a restart would not help; return its last exit code."""
    if launched_ranks() > 1:
        raise ArgumentError("run: expected to be outside mpiexec, as in clcomm run -- mpiexec ..., got a rank")
    if options.check_build:
        return subprocess.run([sys.executable, "-m", "clcomm", "doctor"], check=False).returncode
    job = options.job[1:] if options.job[:1] == ["--"] else options.job
    if options.ignored:
        print_notice(f"ignored: {', '.join(dict.fromkeys(options.ignored))}; docs/horovod.md has horovodrun's options")
    if options.resize is not None:
        print_notice(resize(options.resize, job))
        return 0
    if options.ranks is None:
        restarts = RESTARTS if options.restarts is None else options.restarts
        return supervisor.run(Supervisor(_command(options, job), restarts, options.pause), options.chaos)
    if not options.module:
        job, options.module = horovodrun.without_python(job)
    require_script("run", job, options.module)
    if options.hostfile:
        require_hostfile(options.hostfile)
    if options.hosts and options.hostfile:
        raise ArgumentError("--hosts: expected this or --hostfile, got both")
    require_descriptors()
    logs = rank_logs.prepare(options.log_dir) if options.log_dir else ""
    mpiexec = find_mpiexec()
    variables = dict(options.env or ())
    os.environ.update({**mpiexec.environment(), **variables})
    port = CHOSEN if options.master_port is None else str(options.master_port)
    rank = [sys.executable, "-m", "clcomm.jobs.launch.rank", options.master_addr, port, logs or CHOSEN]

    job = [*rank, *["-m"] * options.module, *job]

    def launch(ranks: int, hosts: str, hostfile: str) -> list[str]:
        return mpiexec.command(ranks, hosts, hostfile, variables=variables, binding=options.bind_to or "")

    code = supervisor.run(_supervisor(options, launch, job), options.chaos)
    if logs:
        rank_logs.tell(logs, code)
    return code


def _supervisor(
    options: argparse.Namespace, launch: Callable[[int, str, str], list[str]], job: list[str]
) -> Supervisor:
    """Return the supervisor of a script's ranks: one that replaces them with --min-ranks or --max-ranks.

    Args:
        launch: returns the launcher's command line for a number of ranks and the options --hosts and --hostfile.
        job: what it starts on each rank.
    """
    if options.min_ranks is None and options.max_ranks is None:
        if options.no_spare:
            raise ArgumentError("--no-spare: expected --min-ranks with it, got none")
        command = [*launch(options.ranks, options.hosts, options.hostfile), *job]
        return Supervisor(command, options.restarts or 0, options.pause)
    sizes = Sizes(options.min_ranks or options.ranks, options.max_ranks or options.ranks)
    sizes.check("-n", options.ranks)
    restarts = sys.maxsize if options.restarts is None else options.restarts
    hosts = Hosts(HostList(options.hosts, options.hostfile), launch)
    return WorldSupervisor(hosts, job, options.ranks, sizes, restarts, options.pause, not options.no_spare)


def _command(options: argparse.Namespace, job: list[str]) -> list[str]:
    """Return the command of a job without -n; ArgumentError where it is missing, or a script on its own."""
    if options.module or (job and job[0].endswith(".py") and options.job[0] != "--"):
        raise ArgumentError("-n: expected the number of ranks, as in clcomm run -n 4 train.py, got none")
    if options.hosts or options.hostfile:
        raise ArgumentError("-n: expected the number of ranks with --hosts and --hostfile, got none")
    if options.env or options.bind_to or options.log_dir:
        raise ArgumentError("-n: expected the number of ranks with --env, --bind-to and --log-dir, got none")
    if options.min_ranks or options.max_ranks or options.no_spare:
        raise ArgumentError("-n: expected the number of ranks with --min-ranks, --max-ranks and --no-spare, got none")
    if not job:
        raise ArgumentError("run: expected a command, as in clcomm run -- mpiexec -n 4 python train.py, got none")
    return job


def require_script(command: str, job: list[str], is_module: bool) -> None:
    """Raise ArgumentError unless a script or a module's name is given; the ranks check that it exists."""
    if not job or job[0].startswith("-"):
        what, example = ("module", "-m package.train") if is_module else ("script", "train.py")
        got = repr(job[0]) if job else "none"
        raise ArgumentError(f"{command}: expected a {what}, as in clcomm {command} -n 4 {example}, got {got}")
    if not is_module and not os.path.exists(job[0]):
        raise ArgumentError(f"{command}: expected a Python script that exists, got {job[0]!r}")


COMMAND = Command(
    "run",
    "start a script on some ranks, or a job again from its newest checkpoint when it fails",
    "Start a Python script on some ranks: clcomm run -n 4 train.py --epochs 3, with the mpiexec of the MPI that mpi4py "
    "loads and with torchrun's variables RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT. "
    "Or start a job such as clcomm run --restarts 3 -- mpiexec -n 4 python -m examples.mnist --checkpoint run.npz. "
    "Start it again when it fails, with CLCOMM_RESTART in its environment, which lets it go on from its newest "
    "checkpoint. It gives up after exit code 2 and after two failures at the same step. The exit code is the job's.",
    add_arguments,
    run,
    (
        ("clcomm run -n 4 train.py --epochs 3", "four ranks of a script on this host"),
        ("clcomm run -n 8 --hosts alpha,beta -m package.train", "a module's ranks on two hosts"),
        (
            "clcomm run --restarts 3 -n 4 -m examples.mnist --checkpoint run.npz",
            "start it again from its newest checkpoint when it fails",
        ),
        (
            "clcomm run --restarts 9 --chaos seed=7,every=20s -n 4 -m examples.mnist --checkpoint run.npz",
            "kill a drawn rank at drawn moments, to see that the job survives",
        ),
    ),
)
