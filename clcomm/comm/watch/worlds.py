"""The exchange between `clcomm run --min-ranks` and the ranks of its worlds: each start of the job is a world.

CLCOMM_MEMORY names a directory of `clcomm run` in the host's memory, CLCOMM_RESTART the world's number. There lie the
newest copy of the training's state, a gate for each world, and a pipe by which ranks tell `clcomm run` where they are.
A gate is a pipe too: a rank waits at it for one byte. So the next world can be started while another one still trains,
and goes on within milliseconds when that ends.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import json
import os
import re
from pathlib import Path
from typing import NamedTuple

from clcomm.base.errors import LaunchError, ShortageError
from clcomm.base.host import variables
from clcomm.base.storage.scratch import SHARED_MEMORY
from clcomm.comm.watch.job import this_job
from clcomm.comm.watch.restarts import restart_number

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
