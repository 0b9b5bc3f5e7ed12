"""A job that ends with whoever starts it: its processes carry a mark, and a small process ends those that have it."""

from __future__ import annotations

import os
import secrets
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from clcomm.base.errors import ShortageError
from clcomm.base.host.launcher import OF_RUN
from clcomm.base.host.rank_process import RANK_PROCESS
from clcomm.base.storage.scratch import JOB, SHARED_MEMORY, path_of, scratch_directory
from clcomm.comm.watch import restarts
from clcomm.jobs.launch import keeper_process
from clcomm.jobs.launch.keeper_process import KILLED_S, LEAVE, PATIENCE_S, TRACKERS_S

#: How long the process may take to end what it is asked to.
_ENDS_S = KILLED_S + PATIENCE_S + TRACKERS_S


#: Where Open MPI's launcher keeps a job's files, in the temporary directory otherwise, also where it is killed; and how
#: the names of the variables end by which a user says so.
_OF_LAUNCHER, _SESSIONS = "PRTE_MCA_prte_local_tmpdir_base", "_tmpdir_base"


#: How often another is started where one was killed meanwhile.
_TRIES = 3


#: How many files a job of a few ranks opens in one of its processes at most.
_DESCRIPTORS = 64


class Keeper:
    """The process that ends a job where this one is killed; and ends a part of it where it is asked to.

    Attributes:
        folder: a directory for the job's scratch files, removed with it; its ranks on this host make theirs there.
        memory: the path of one in the host's memory that is removed, too.
    """

    def __init__(self) -> None:
        job = secrets.token_hex(8)
        self.folder, self.memory = path_of("run", job), path_of("memory", job, SHARED_MEMORY)
        self.start()

    def start(self) -> None:
        """Start the process, before the job."""
        command = [sys.executable, "-I", "-S", keeper_process.__file__]
        self._process = subprocess.Popen(
            [*command, f"{JOB}={self.folder}", str(self.folder), str(self.memory)], bufsize=0,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, cwd="/",
            env=_outside(),  # else it would end with a job that this one is part of
        )  # fmt: skip

    def environment(self, number: int | None = None) -> dict[str, str]:
        """Return the environment of the job's processes, or of those of one of its starts, which it marks."""
        start = {} if number is None else {restarts.RESTART: str(number)}
        sessions = {} if any(name.endswith(_SESSIONS) for name in os.environ) else {_OF_LAUNCHER: str(self.folder)}
        return {**_outside(), **sessions, JOB: str(self.folder), **start}

    def look(self) -> None:
        """Start the process again if it was killed."""
        if self._process.poll() is not None:
            self._close()
            with suppress(OSError):  # tried again at the next look
                self.start()

    def end(self, number: int | None = None, patience_s: float = PATIENCE_S) -> None:
        """End what is left of the job, or of one of its starts, after so many seconds, and wait for that."""
        wanted = f"{patience_s} {'' if number is None else f'{restarts.RESTART}={number}'}"
        for _ in range(_TRIES):
            self.look()
            if self._tell(wanted) and self._has_answered():
                return

    def leave(self) -> None:
        """Let the process end without ending others, as the job has ended well or is ended."""
        self._tell(LEAVE)
        self._close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_ENDS_S)

    def _tell(self, line: str) -> bool:
        assert self._process.stdin is not None
        with suppress(OSError):  # it was killed
            return self._process.stdin.write(f"{line}\n".encode()) is not None
        return False

    def _has_answered(self) -> bool:
        assert self._process.stdout is not None
        return bool(select.select([self._process.stdout], [], [], _ENDS_S)[0] and self._process.stdout.read(1))

    def _close(self) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()


def require_descriptors() -> None:
    """Raise ShortageError where this process cannot open as many files as a launcher and its ranks need."""
    try:
        with ExitStack() as stack:
            for _ in range(_DESCRIPTORS):
                stack.callback(os.close, os.open("/", os.O_RDONLY))
    except OSError as error:
        raise ShortageError(
            f"ulimit -n: expected {_DESCRIPTORS} more files that can be opened, for a job, got fewer "
            f"({error.strerror}); raise it"
        ) from None


def _outside() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in (*OF_RUN, JOB, RANK_PROCESS)}


@contextmanager
def kept_job() -> Iterator[Keeper]:
    """Return the keeper of a job that this process is about to start; an exception ends the job."""
    require_descriptors()
    keeper = Keeper()
    try:
        with scratch_directory("run", keeper.folder):
            try:
                yield keeper
            except BaseException:
                keeper.end()
                raise
    finally:
        keeper.leave()
