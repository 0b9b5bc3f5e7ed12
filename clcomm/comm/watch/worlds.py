"""The exchange between `clcomm run --min-ranks` and the ranks of its worlds: each start of the job is a world.

CLCOMM_MEMORY names a directory of `clcomm run` in the host's memory, CLCOMM_RESTART the world's number. There lie the
newest copy of the training's state, a gate for each world, and a pipe by which ranks tell `clcomm run` where they are.
A gate is a pipe too: a rank waits at it for one byte. So the next world can be started while another one still trains,
and goes on within milliseconds when that ends.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import glob
import json
import math
import mmap
import os
import re
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from clcomm.base.errors import LaunchError, ShortageError
from clcomm.base.host import variables
from clcomm.base.host.launcher import launched_rank_in_words
from clcomm.base.storage.scratch import SHARED_MEMORY
from clcomm.comm.transport import mpi_runtime
from clcomm.comm.watch import endings, exit_monitor
from clcomm.comm.watch.figures import about_program
from clcomm.comm.watch.forced_end import end_by_force_later
from clcomm.comm.watch.job import Limits, restart_number, this_job
from clcomm.comm.watch.other_hosts import OtherHosts, StatusClient
from clcomm.comm.watch.status_page import NAME, RankStatus, StatusPage, read_description

MEMORY = "CLCOMM_MEMORY"
#: The directories' paths, and the file in each that describes its job.
_NAMES, _ABOUT = f"{SHARED_MEMORY}/clcomm-memory-*", "about.json"
#: Words to `clcomm run`: a rank is at its world's gate (value: its process); a copy is complete (value: its step); the
#: world ends as it was asked to; another number of ranks is wanted (from `clcomm run --resize`, without a world).
JOINED, COPIED, STOPPED, RESIZE = "joined", "copied", "stopped", "resize"
_LINE = re.compile(rb"([a-z]{1,9}) (\d{1,18}) (\d{1,18})")


def pipe(folder: Path) -> Path:
    """Return the path of the pipe to `clcomm run`."""
    return folder / "words"


def gate(folder: Path, world: int) -> Path:
    """Return the path of a world's gate."""
    return folder / f"gate-{world}"


def stop_sign(folder: Path, world: int) -> Path:
    """Return the path of the file that asks a world to end at a step's end."""
    return folder / f"stop-{world}"


class RunningWorlds(NamedTuple):
    """A job under `clcomm run --min-ranks` on this host: that process, and the fewest and the most ranks."""

    folder: Path
    pid: int
    least: int
    most: int


def describe(folder: Path, least: int, most: int) -> None:
    """Write what `running` returns of this process's job."""
    (folder / _ABOUT).write_text(json.dumps([os.getpid(), least, most]))


def is_described(folder: Path) -> bool:
    """Return whether the job's `clcomm run` is on this host, where it has made the directory."""
    return (folder / _ABOUT).exists()


def running() -> list[RunningWorlds]:
    """Return this user's jobs whose `clcomm run` runs."""
    found = []
    for folder in map(Path, glob.glob(_NAMES)):
        with contextlib.suppress(OSError, ValueError, TypeError):
            if folder.stat().st_uid == os.geteuid():
                each = RunningWorlds(folder, *map(int, json.loads((folder / _ABOUT).read_text())))
                os.kill(each.pid, 0)
                found.append(each)
    return found


def tell(folder: Path, word: str, world: int, value: int = 0) -> bool:
    """Send a word; return False where nobody listens: `clcomm run` has ended, or the process that it has here.

    Raises ShortageError where no descriptor is free, which says nothing of them; a copy's word may be lost.
    """
    try:
        descriptor = os.open(pipe(folder), os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            return os.write(descriptor, f"{word} {world} {value}\n".encode()) > 0
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE) and word != COPIED:
            raise ShortageError(f"clcomm run could not be told: {error.strerror}; raise `ulimit -n`") from None
    return False


def read(line: bytes) -> tuple[str, int, int] | None:
    """Return word, world and value of what was told; None for a line that `tell` has not written."""
    found = _LINE.fullmatch(line)
    return found and (found[1].decode(), int(found[2]), int(found[3]))


class ThisWorld:
    """This process's place in `clcomm run --min-ranks`."""

    def __init__(self) -> None:
        self.folder = Path(variables.text(MEMORY)) if variables.text(MEMORY) else None
        self.number = restart_number()

    @property
    def waits(self) -> bool:
        """Whether there is a gate before this world: another one trains."""
        return self.folder is not None and gate(self.folder, self.number).exists()

    def wait_at_gate(self) -> None:
        """Block, without using the processor, until it is this world's turn; not collective.

        Returns at once where there is no gate: without `clcomm run --min-ranks`, and on other hosts. Raises LaunchError
        where `clcomm run` has ended.
        """
        if self.folder is None or not self.tell(JOINED, os.getpid()):
            return
        with contextlib.suppress(FileNotFoundError), open(gate(self.folder, self.number), "rb", buffering=0) as file:
            if not file.read(1):
                raise LaunchError("clcomm run: expected it to start these ranks' steps, but it has ended")
        if variables.text("CLCOMM_CHAOS"):
            from clcomm.comm.watch.chaos import arm  # here, as few jobs want faults

            arm(this_job())

    def tell(self, word: str, value: int = 0) -> bool:
        return self.folder is not None and tell(self.folder, word, self.number, value)

    def is_to_stop(self) -> bool:
        """Return whether `clcomm run` asks this world to end after a copy of its state."""
        return self.folder is not None and stop_sign(self.folder, self.number).exists()


# --- This user's running jobs on this host, by the status pages that their ranks keep open. ---
# The kernel shows the descriptors in /proc/PID/fd to processes of the same user alone (proc_pid_fd(5)).

#: Of a process that has ended meanwhile, or hides its descriptors; another error says nothing of it.
GONE = (FileNotFoundError, ProcessLookupError, PermissionError)
#: How /proc names an anonymous file.
_LINK = f"/memfd:{NAME} (deleted)"


def job_description(ranks: Sequence[int], size: int, hosts: int, elsewhere: OtherHosts | None) -> dict[str, object]:
    """Return the description of this job for its status page.

    Args:
        ranks: those of this host.
        size: the number of all ranks.
        hosts: the number of hosts.
        elsewhere: the ranks of other hosts; None where there are none.
    """
    return {
        "pid": os.getpid(), "program": about_program(), "ranks": list(ranks), "size": size, "hosts": hosts,
        "host": os.uname().nodename, "started_s": time.time(),
        "elsewhere": None if elsewhere is None else elsewhere.as_json(),
    }  # fmt: skip


class RunningJob:
    """A job whose status page this process has mapped, for reading.

    Attributes:
        about: what `job_description` wrote.
        pid: the process of its first rank on this host.
        secret: that of a job on several hosts, the same on all of them.
    """

    def __init__(self, memory: memoryview, about: Mapping[str, Any], count: int):
        self.about = about
        self.pid, self.program = int(about["pid"]), str(about["program"])
        self.size, self.started_s = int(self.about["size"]), float(self.about["started_s"])
        self._page = StatusPage(memory, [int(rank) for rank in self.about["ranks"]][:count], None)
        given: Mapping[str, Any] | None = self.about.get("elsewhere")
        self._elsewhere = None if given is None else StatusClient.of_json(given)
        self.secret = "" if given is None else str(given["token"])

    def lines(self) -> list[RankStatus]:
        """Return the lines of all ranks, in rank order; other hosts are asked, which takes 2 s where one is silent."""
        elsewhere = [] if self._elsewhere is None else self._elsewhere.ask()
        return sorted([*self._page.read(), *elsewhere])

    def has_ended(self) -> bool:
        """Return whether all of its ranks on this host have ended."""
        return all(line.state == "dead" for line in self._page.read())

    @property
    def ranks(self) -> list[int]:
        """The ranks of this host."""
        return self._page.ranks


def find_jobs() -> tuple[list[RunningJob], list[str]]:
    """Return this user's jobs on this host, the newest first, and a line for each status page that cannot be read."""
    jobs: dict[int, list[RunningJob]] = {}
    problems = []
    for pid, path in sorted(_open_pages()):
        try:
            with open(path, "rb") as file:
                memory = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            described = read_description(memory)
            if described is None:
                continue
            job = RunningJob(memory, *described)
        except GONE:
            continue
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            problems.append(f"the job of process {pid} cannot be read: {error}")
            continue
        if not job.has_ended():
            jobs.setdefault(job.pid, []).append(job)
    first = [min(own, key=lambda each: each.started_s) for own in jobs.values()]  # of several Communicators
    # Of hosts that are namespaces of one machine, one stands for the job.
    alike = {job.secret or str(job.pid): job for job in reversed(first)}
    return sorted(alike.values(), key=lambda each: -each.started_s), problems


def _open_pages() -> Iterator[tuple[int, str]]:
    """Yield a process and a path for each status page that this user's processes keep open, each page once."""
    seen = set()
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        with contextlib.suppress(*GONE):
            if os.stat(f"/proc/{name}").st_uid != os.geteuid():
                continue
            for descriptor in os.listdir(f"/proc/{name}/fd"):
                path = f"/proc/{name}/fd/{descriptor}"
                with contextlib.suppress(*GONE):
                    if os.readlink(path) == _LINK:
                        info = os.stat(path)
                        if info.st_ino not in seen:
                            seen.add(info.st_ino)
                            yield int(name), path


# --- The watchdog of a Communicator's creation, when no status page exists yet from which missing ranks could be
# named.

#: Ranks may start this long after each other without a warning: imports from a network file system are slow.
START_S = 30.0
#: Delay of the alarm after the timer, which comes first because its message is clearer.
ALARM_MARGIN_S = 2.0


class StartWatch:
    """Watches the creation of a Communicator: a context manager.

    While MPI starts, mpi4py holds the GIL and no thread runs; SIGALRM then ends a waiting rank, with its traceback.
    """

    def __init__(self, limits: Limits):
        warning_s, rank = max(limits.stall_warning_s, START_S), launched_rank_in_words()
        self._timers = [
            threading.Timer(limit_s, act, (f"clcomm: rank {rank} has waited {limit_s:g} s for the other ranks to "
                                           "create their Communicator",))
            for limit_s, act in ((warning_s, endings.print_line), (limits.timeout_s, self._end_job))
            if limit_s < math.inf and mpi_runtime.launched_ranks() > 1
        ]  # fmt: skip
        starts = mpi_runtime.launched_ranks() > 1 and limits.timeout_s < math.inf and not mpi_runtime.is_running()
        is_ours = starts and exit_monitor.wants_hooks() and signal.getsignal(signal.SIGALRM) == signal.SIG_DFL
        self._alarm_s = limits.timeout_s + ALARM_MARGIN_S if is_ours else 0.0

    def __enter__(self) -> None:
        if self._alarm_s:
            with contextlib.suppress(ValueError, OSError, AttributeError):  # stderr is not a file
                faulthandler.register(signal.SIGALRM, all_threads=False, chain=True)
            signal.setitimer(signal.ITIMER_REAL, self._alarm_s)
        for timer in self._timers:
            timer.daemon = True
            timer.start()

    def __exit__(self, *error: object) -> None:
        for timer in self._timers:
            timer.cancel()
        if self._alarm_s:
            signal.setitimer(signal.ITIMER_REAL, 0)
            faulthandler.unregister(signal.SIGALRM)

    def _end_job(self, message: str) -> None:
        end_by_force_later(endings.TIMED_OUT)
        endings.print_line(f"{message}; the job ends")
        endings.abort(endings.TIMED_OUT)
