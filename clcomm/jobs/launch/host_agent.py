"""Answers `clcomm run --min-ranks` on a host of its job, and does there what it cannot do from its own.

`python -m clcomm.jobs.launch.host_agent DIRECTORY` keeps the directory of the job's copies in this host's memory. It
passes on what ranks tell, and obeys what comes through its standard input, a line each: a word and a number.
"""

from __future__ import annotations

import fcntl
import os
import select
import shutil
import stat
import sys
from pathlib import Path

from clcomm.base.errors import LaunchError
from clcomm.base.host.host_processes import Made
from clcomm.comm.watch import restarts, worlds
from clcomm.jobs.launch.keeper_process import end_processes

#: What it is told: answer; end a world's ranks; let them end after a copy; the job has ended. It repeats the first two.
ANSWER, KILL, STOP, END = "answer", "kill", "stop", "end"
#: In place of a world's number: all.
ALL = -1
#: What a full pipe holds: whole lines.
_MOST_BYTES = 1 << 16
#: How long nothing may be asked: then the network is cut, and ranks have ended by their time-outs.
SILENT_S = 300.0


class HostAgent:
    """What `clcomm run` needs on another host; on its own, known by the job's description, it only answers.

    Raises LaunchError where the directory is another user's.
    """

    def __init__(self, folder: Path):
        self._folder, self._words, self._made = folder, -1, Made()
        self._is_guest = not worlds.is_described(folder)
        if self._is_guest:
            folder.mkdir(0o700, exist_ok=True)
            info = folder.lstat()
            if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid():
                raise LaunchError(f"{folder}: expected a directory of this user, got another's")
            self._lock = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)  # until this process ends
            fcntl.flock(self._lock, fcntl.LOCK_SH)
            worlds.pipe(folder).unlink(missing_ok=True)  # another agent may read it still
            os.mkfifo(worlds.pipe(folder), 0o600)
            self._words = os.open(worlds.pipe(folder), os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)

    def serve(self) -> None:
        """Obey until the input ends, the job does, or nothing has come for SILENT_S."""
        sources = [0, self._words] if self._is_guest else [0]
        rest = b""
        while True:
            found, _, _ = select.select(sources, [], [], SILENT_S)
            if self._words in found:
                os.write(1, os.read(self._words, _MOST_BYTES))
            read = os.read(0, _MOST_BYTES) if 0 in found else b""
            if not found or (0 in found and not read):
                return
            *lines, rest = (rest + read).split(b"\n")
            for word, number in (line.decode().split() for line in lines):
                if word == END:
                    self._end()
                    return
                self._obey(word, int(number))

    def _obey(self, word: str, number: int) -> None:
        if word == STOP:
            worlds.stop_sign(self._folder, number).touch()
            return
        if word == KILL and self._is_guest:
            ours = f"{worlds.MEMORY}={self._folder}"
            end_processes([ours] if number == ALL else [ours, f"{restarts.RESTART}={number}"], self._made)
            worlds.stop_sign(self._folder, number).unlink(missing_ok=True)
        os.write(1, f"{word} {number}\n".encode())

    def _end(self) -> None:
        if self._is_guest:
            shutil.rmtree(self._folder, ignore_errors=True)


def main() -> None:
    """Serve as the command line says; a closed output ends it as a closed input does."""
    try:
        HostAgent(Path(sys.argv[1])).serve()
    except BrokenPipeError:
        pass
    except (LaunchError, OSError) as error:
        sys.exit(f"clcomm: {error}")


if __name__ == "__main__":
    main()
