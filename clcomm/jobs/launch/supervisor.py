"""Runs a job's command: restarts it on failure, forwards signals, and reports in one line how it ended."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from typing import NamedTuple

from clcomm.base.errors import ArgumentError, escaped
from clcomm.base.host.host_processes import has
from clcomm.base.storage.scratch import remove_stale, scratch_file
from clcomm.comm.watch import restarts, worlds
from clcomm.comm.watch.chaos import CHAOS, LOG, Schedule, read_log
from clcomm.comm.watch.endings import FAILURE, USER_ERROR
from clcomm.jobs.launch.keeper import Keeper, kept_job

#: The longest pause before a restart, and how long a job may take to end after a forwarded signal; in seconds.
LONGEST_PAUSE_S, GRACE_S = 300.0, 10.0
#: How often it is looked whether the job and its keeper live.
LOOK_S = 1.0
#: A shell's exit code for a command that can't be started.
NOT_FOUND = 127
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class End(NamedTuple):
    """The end of one run of the job: exit code, last step, newest saved step, last planted fault; 0: unknown."""

    code: int
    step: int
    saved: int
    faults: int = 0


def reason_to_stop(ends: list[End], allowed: int, same: int = 2) -> str:
    """Return the reason not to restart after these ends; "" if a restart may help.

    same: failures in a row at one step, going on from the same one, after which a restart would not help.
    """
    last = ends[-1]
    if last.code == USER_ERROR:
        return "exit code 2 is a mistake that another start would repeat"
    if last.code == NOT_FOUND:
        return "the command can't be started"
    if len(ends) >= same and last.step and all(end[1:] == last[1:] for end in ends[-same:]):
        times = "twice" if same == 2 else f"{same} times"
        return f"it failed {times} at step {last.step}, going on from step {last.saved}"
    if len(ends) > allowed:
        times = "once" if allowed == 1 else f"{allowed} times"
        return f"it was started again {times}" if allowed else "no restarts are allowed"
    return ""


class Supervisor:
    """Starts a command, restarts it when it fails, and forwards signals to it."""

    def __init__(self, command: list[str], allowed: int, pause_s: float):
        self._command, self._allowed, self._pause_s = command, allowed, pause_s
        self._process: subprocess.Popen[bytes] | None = None
        self._signal, self._signalled_s = 0, 0.0  # the last signal, and when the first one came
        self._unsent = 0  # a signal that came while the job was being started
        self._was_signalled = threading.Event()

    def run(self, keeper: Keeper) -> int:
        """Run the job until it succeeds or a restart would not help; return its last exit code."""
        self._keeper = keeper
        for each in FORWARDED:
            if each != signal.SIGHUP or signal.getsignal(each) != signal.SIG_IGN:  # nohup's
                signal.signal(each, self._forward)
        ends: list[End] = []
        remove_stale()
        while True:
            ends.append(self._start(len(ends)))
            code = ends[-1].code
            if code == 0 or self._signal:
                return code
            reason = self._reason(ends)
            if reason:
                if self._allowed:  # else nobody asked for more than the job's own message
                    print_notice(f"exit code {code}{at(ends[-1])}; giving up: {reason}")
                return code
            self._pause(ends)
            if self._signal:
                return 128 + self._signal

    def _start(self, number: int) -> End:
        file = scratch_file(self._keeper.folder / f"progress-{number}", bytes(restarts.FILE_BYTES))
        environment = {**self._keeper.environment(number), restarts.PROGRESS: file}
        try:
            process = self._process = subprocess.Popen(self._command, env=environment)
        except OSError as error:
            print_notice(f"{self._command[0]}: {error.strerror}")
            return End(NOT_FOUND, 0, 0)
        if self._unsent:
            process.send_signal(self._unsent)
        code = self._ended(process)
        self._process = None
        end = end_of(code, restarts.read_progress(file), self._signal)
        if end.code:
            self._keeper.end(number)
        return end

    def _reason(self, ends: list[End]) -> str:
        """Return the reason to give up; "": none."""
        return reason_to_stop(ends, self._allowed)

    def _ended(self, process: subprocess.Popen[bytes]) -> int:
        """Wait for the job and return its exit code; kill it GRACE_S after the first signal if it still runs."""
        while not self._signal or time.monotonic() < self._signalled_s + GRACE_S:
            left_s = self._signalled_s + GRACE_S - time.monotonic() if self._signal else LOOK_S
            with contextlib.suppress(subprocess.TimeoutExpired):
                return _exit_code(process.wait(max(0.0, min(LOOK_S, left_s))))
            self._keeper.look()
        process.kill()
        return _exit_code(process.wait())

    def _forward(self, number: int, frame: object) -> None:
        """Send the first signal on: a launcher that gets a second one ends ranks at once, without their code."""
        if self._signal:
            return
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


def end_of(code: int, progress: list[int], signalled: int = 0) -> End:
    """Return the end of a job by its exit code and its progress file.

    A launcher's code for a signal, which `clcomm run` (signalled) or a rank got, is its own; 2 is MPICH's for SIGINT.
    """
    if code == 0 and progress[restarts.STARTED] and not progress[restarts.COMPLETED]:
        print_notice("exit code 0, but no rank has completed: treated as a failure")
        code = FAILURE
    ended_by = signalled or progress[restarts.SIGNAL]
    if code and ended_by:
        code = 128 + ended_by
    return End(code, *(progress[word] for word in (restarts.STEP, restarts.SAVED, restarts.FAULTS)))


def _exit_code(returned: int) -> int:
    """Return a shell's exit code for Popen's, which is -N for a process that signal N ended."""
    return returned if returned >= 0 else 128 - returned


def at(end: End) -> str:
    """Return " at step N", or "" if the step is not known."""
    return f" at step {end.step}" if end.step else ""


def print_notice(line: str) -> None:
    sys.stderr.write(f"clcomm run: {escaped(line)}\n")
    sys.stderr.flush()


# --- `clcomm run --chaos`: gives a job the faults that its ranks plant (comm/watch/chaos.py), and counts them. ---


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


# --- `clcomm run --resize 4 JOB`: another number of ranks for a job that runs under `clcomm run --min-ranks`. ---


def resize(ranks: int, job: list[str]) -> str:
    """Ask a job for this number of ranks; return what was asked in words.

    Args:
        job: the process of its `clcomm run` or of one of its ranks; none: the only such job of this user.

    Raises ArgumentError where no such job runs, and for a number that is out of its bounds.
    """
    running = worlds.running()
    wanted = job[0] if job else str(running[0].pid) if len(running) == 1 else ""
    of_job = [each for each in running if wanted.isdecimal() and has(f"{worlds.MEMORY}={each.folder}")(wanted)]
    found = next((each for each in running if str(each.pid) == wanted or each in of_job), None)
    if found is None:
        known = ", ".join(str(each.pid) for each in running) or "none"
        raise ArgumentError(
            f"--resize: expected the process of a clcomm run --min-ranks or of one of its ranks, got "
            f"{wanted or 'none'}; such jobs here: {known}"
        )
    if not found.least <= ranks <= found.most:
        raise ArgumentError(f"--resize: expected {found.least} to {found.most} ranks, the job's bounds, got {ranks}")
    if not worlds.tell(found.folder, worlds.RESIZE, 0, ranks):
        raise ArgumentError(f"--resize: expected a job that runs, but {found.pid} has ended")
    return f"job {found.pid} is asked to go on with {ranks} ranks"
