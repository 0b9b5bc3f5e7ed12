"""`clcomm run`: start a script on some ranks, or any job, and restart it from its newest checkpoint when it fails."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any, NamedTuple

from clcomm.commands.command import Command
from clcomm.errors import ArgumentError
from clcomm.job import restarts
from clcomm.job.endings import FAILURE, USER_ERROR
from clcomm.launch.mpiexec import find_mpiexec, require_hostfile
from clcomm.launch.rank import CHOSEN
from clcomm.option_types import number, whole_number
from clcomm.storage.scratch import remove_stale, scratch_file
from clcomm.transport.mpi_runtime import launched_ranks

#: The longest pause before a restart, and how long a job may take to end after a forwarded signal; in seconds.
LONGEST_PAUSE_S, GRACE_S = 300.0, 10.0
#: The most restarts of a command by default; a script on some ranks is not restarted, as with torchrun.
RESTARTS = 3
#: A shell's exit code for a command that can't be started.
NOT_FOUND = 127
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


#: Options of torchrun that have no meaning here, and what has.
_REFUSED = {
    ("--node-rank", "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf", "--local-addr"):
        "MPI connects the ranks; for several hosts use --hosts or --hostfile",
    ("--no-python", "--run-path"): "for other programs use clcomm run -- mpiexec ...",
    ("--monitor-interval", "--start-method", "--role", "--log-dir", "--redirects", "-r", "--tee", "-t",
     "--local-ranks-filter", "--logs-specs", "--event-log-handler", "--numa-binding", "--signals-to-handle",
     "--duplicate-stdout-filters", "--duplicate-stderr-filters"):
        "clcomm run has no such option",
}  # fmt: skip


class _Refuse(argparse.Action):
    """An option that is an error; `const` says what to use instead."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: str | None = None) -> None:
        parser.error(f"{option}: {self.const}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    own = parser.add_argument_group("a script on some ranks")
    own.add_argument(
        *("-n", "-np", *_spellings("--nproc-per-node")), dest="ranks", type=whole_number(1), metavar="N",
        help="number of ranks; the job is then a Python script and its arguments",
    )  # fmt: skip
    own.add_argument("-m", "--module", action="store_true", help="what follows is a module's name, as with python -m")
    own.add_argument("--hosts", default="", metavar="A,B:2", help="where ranks run, as this MPI writes it")
    own.add_argument("--hostfile", default="", metavar="FILE", help="a file of hosts, as this MPI writes it")
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
        help=f"the most restarts; default: 0 with -n, else {RESTARTS}",
    )  # fmt: skip
    again.add_argument(
        "--pause",
        type=number(most=LONGEST_PAUSE_S),
        default=1.0,
        metavar="S",
        help=f"before the first, doubled each time, at most {LONGEST_PAUSE_S:g}; default: %(default)s",
    )
    for options, remedy in _REFUSED.items():
        for option in options:
            spelt = _spellings(option) if option.startswith("--") else (option,)
            own.add_argument(*spelt, action=_Refuse, const=remedy, nargs="?", help=argparse.SUPPRESS)
    parser.add_argument(
        "job", nargs=argparse.REMAINDER, metavar="script ... | -- command",
        help="such as train.py --epochs 3 or, without -n, -- mpiexec -n 4 python train.py",
    )  # fmt: skip


def _spellings(option: str) -> tuple[str, ...]:
    """Return an option as we write it and as torchrun's older form does, with underscores."""
    older = "--" + option[2:].replace("-", "_")
    return (option,) if older == option else (option, older)


def _one_node(text: str) -> int:
    if text not in ("1", "1:1"):
        raise argparse.ArgumentTypeError(f"expected 1, got {text!r}; for several hosts use --hosts or --hostfile")
    return 1


def run(options: argparse.Namespace) -> int:
    """Run the job until it succeeds or a restart would not help; return its last exit code."""
    if launched_ranks() > 1:
        raise ArgumentError("run: expected to be outside mpiexec, as in clcomm run -- mpiexec ..., got a rank")
    job = options.job[1:] if options.job[:1] == ["--"] else options.job
    if options.ranks is None:
        restarts = RESTARTS if options.restarts is None else options.restarts
        return _Launcher(_command(options, job), restarts, options.pause).run()
    _require_script(job, options.module)
    if options.hostfile:
        require_hostfile(options.hostfile)
    if options.hosts and options.hostfile:
        raise ArgumentError("--hosts: expected this or --hostfile, got both")
    mpiexec = find_mpiexec()
    os.environ.update(mpiexec.environment())
    port = CHOSEN if options.master_port is None else str(options.master_port)
    launch = mpiexec.command(options.ranks, options.hosts, options.hostfile)
    rank = [sys.executable, "-m", "clcomm.launch.rank", options.master_addr, port, *["-m"] * options.module, *job]
    return _Launcher([*launch, *rank], options.restarts or 0, options.pause).run()


def _command(options: argparse.Namespace, job: list[str]) -> list[str]:
    """Return the command of a job without -n; ArgumentError where it is missing, or a script on its own."""
    if options.module or (job and job[0].endswith(".py") and options.job[0] != "--"):
        raise ArgumentError("-n: expected the number of ranks, as in clcomm run -n 4 train.py, got none")
    if options.hosts or options.hostfile:
        raise ArgumentError("-n: expected the number of ranks with --hosts and --hostfile, got none")
    if not job:
        raise ArgumentError("run: expected a command, as in clcomm run -- mpiexec -n 4 python train.py, got none")
    return job


def _require_script(job: list[str], is_module: bool) -> None:
    """Raise ArgumentError unless there is a script, or a module's name, to run; whether there is one, the ranks see."""
    if not job or job[0].startswith("-"):
        what, example = ("module", "-m package.train") if is_module else ("script", "train.py")
        got = repr(job[0]) if job else "none"
        raise ArgumentError(f"run: expected a {what}, as in clcomm run -n 4 {example}, got {got}")
    if not is_module and not os.path.exists(job[0]):
        raise ArgumentError(f"run: expected a Python script that exists, got {job[0]!r}")


class End(NamedTuple):
    """The end of one run of the job: exit code, last step, and newest step in a checkpoint; a step of 0: not known."""

    code: int
    step: int
    saved: int


def reason_to_stop(ends: list[End], allowed: int) -> str:
    """Return the reason not to restart after these ends; "" if a restart may help.

    Args:
        ends: the ends of all runs so far, the last one failed.
        allowed: the most restarts.
    """
    last = ends[-1]
    if last.code == USER_ERROR:
        return "exit code 2 is a mistake that another start would repeat"
    if last.code == NOT_FOUND:
        return "the command can't be started"
    if len(ends) > 1 and last.step and last[1:] == ends[-2][1:]:
        return f"it failed twice at step {last.step}, going on from step {last.saved}"
    if len(ends) > allowed:
        times = "once" if allowed == 1 else f"{allowed} times"
        return f"it was started again {times}" if allowed else "no restarts are allowed"
    return ""


class _Launcher:
    """Starts a command, restarts it when it fails, and forwards signals to it."""

    def __init__(self, command: list[str], allowed: int, pause_s: float):
        self._command, self._allowed, self._pause_s = command, allowed, pause_s
        self._process: subprocess.Popen | None = None
        self._signal, self._signalled_s = 0, 0.0  # the last signal, and when the first one came
        self._unsent = 0  # a signal that came while the job was being started
        self._was_signalled = threading.Event()

    def run(self) -> int:
        for each in FORWARDED:
            signal.signal(each, self._forward)
        ends: list[End] = []
        remove_stale()
        while True:
            ends.append(self._start(len(ends)))
            code = ends[-1].code
            if code == 0 or self._signal:
                return code
            reason = reason_to_stop(ends, self._allowed)
            if reason:
                if self._allowed:  # else nobody asked for more than the job's own message
                    print_notice(f"exit code {code}{at(ends[-1])}; giving up: {reason}")
                return code
            self._pause(ends)
            if self._signal:
                return 128 + self._signal

    def _start(self, number: int) -> End:
        with scratch_file("run", bytes(restarts.FILE_BYTES)) as file:
            environment = {**os.environ, restarts.RESTART: str(number), restarts.PROGRESS: file.name}
            try:
                process = self._process = subprocess.Popen(self._command, env=environment)
            except OSError as error:
                print_notice(f"{self._command[0]}: {error.strerror}")
                return End(NOT_FOUND, 0, 0)
            if self._unsent:
                process.send_signal(self._unsent)
            code = self._ended(process)
            self._process = None
            progress = restarts.read_progress(file.name)
            if code == 0 and progress[restarts.STARTED] and not progress[restarts.COMPLETED]:
                print_notice("exit code 0, but no rank has completed: treated as a failure")
                code = FAILURE
            return End(code, progress[restarts.STEP], progress[restarts.SAVED])

    def _ended(self, process: subprocess.Popen) -> int:
        """Wait for the job and return its exit code; kill it GRACE_S after the first signal if it still runs."""
        while not self._signal or time.monotonic() < self._signalled_s + GRACE_S:
            left_s = self._signalled_s + GRACE_S - time.monotonic() if self._signal else GRACE_S
            with contextlib.suppress(subprocess.TimeoutExpired):
                return _exit_code(process.wait(max(0.0, left_s)))
        process.kill()
        return _exit_code(process.wait())

    def _forward(self, number: int, frame: Any) -> None:
        if not self._signal:
            self._signalled_s = time.monotonic()
        self._signal = number
        self._was_signalled.set()
        if self._process is None:
            self._unsent = number
        elif not (number == signal.SIGINT and os.isatty(0)):  # on Ctrl-C the terminal sends SIGINT to the job as well
            self._process.send_signal(number)

    def _pause(self, ends: list[End]) -> None:
        """Wait before the next restart, twice as long as before the last one; a signal ends the wait."""
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, LONGEST_PAUSE_S)
        last = ends[-1]
        resumed_from = f"step {last.saved}" if last.saved else "its newest checkpoint, if there is one,"
        count = f"{len(ends)} of {self._allowed}"
        print_notice(
            f"exit code {last.code}{at(last)}; going on from {resumed_from} in {pause_s:g} s (restart {count})"
        )
        self._was_signalled.wait(pause_s)


def _exit_code(returned: int) -> int:
    """Return a shell's exit code for Popen's, which is -N for a process that signal N ended."""
    return returned if returned >= 0 else 128 - returned


def at(end: End) -> str:
    """Return " at step N", or "" if the step is not known."""
    return f" at step {end.step}" if end.step else ""


def print_notice(line: str) -> None:
    """Print a line of the launcher to stderr."""
    sys.stderr.write(f"clcomm run: {line}\n")
    sys.stderr.flush()


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
    ),
)
