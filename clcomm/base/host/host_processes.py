"""What this host's processes have in their environment and in shared memory.

Of the standard library alone: scripts load it without clcomm.
"""

from __future__ import annotations

import errno
import os
import re
import struct
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

SHARED_MEMORY = "/dev/shm"
#: How files are named that a program has for itself: by MPICH, UCX and Open MPI; by multiprocessing and PyTorch too.
OF_MPI = r"(?:mpich|ucx_shm_posix)_\w+|(?:(?:sm|vader)_segment|osc_(?:rdma|sm)|open_mpi)\.\S+"
OF_ANY = rf"{OF_MPI}|torch_\w+|sem\.mp-\w+|psm_\w+"
#: No descriptor is free.
FULL = (errno.EMFILE, errno.ENFILE)
#: inotify(7): a file was made; without waiting, not for child processes; the head of an event.
_CREATED, _FLAGS, _EVENT = 0x100, os.O_NONBLOCK | os.O_CLOEXEC, struct.Struct("iIII")
_LOOK_S = 0.02


def processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def read(process: int | str, file: str) -> bytes:
    """Return a file of /proc/PROCESS; nothing where it has ended, or is another user's.

    Raises OSError where no descriptor is free, which says nothing of the process.
    """
    try:
        with open(f"/proc/{process}/{file}", "rb") as opened_file:
            return opened_file.read()
    except OSError as error:
        if error.errno in FULL:
            raise
    return b""


def stat_fields(process: int) -> list[str]:
    """Return the fields of /proc/PROCESS/stat after the command's name; none for a process that is gone.

    Where no descriptor is free they are those of a process that runs, as no more is known of it then: "?".
    """
    try:
        return read(process, "stat").decode(errors="replace").rpartition(")")[2].split()
    except OSError:
        return ["?"] if os.path.exists(f"/proc/{process}") else []


def has(*settings: str) -> Callable[[int | str], bool]:
    """Return whether a process's environment has all these settings (NAME=VALUE), as a function of the process."""
    wanted = {each.encode() for each in settings}
    return lambda process: wanted <= set(read(process, "environ").split(b"\0"))


def files_of(process: int, named: str = OF_ANY) -> set[str]:
    """Return the names of files in shared memory that a process has open or mapped; none that are removed."""
    names = set()
    with suppress(OSError):
        for descriptor in os.listdir(f"/proc/{process}/fd"):
            with suppress(OSError):
                folder, _, name = os.readlink(f"/proc/{process}/fd/{descriptor}").rpartition("/")
                if folder == SHARED_MEMORY and re.fullmatch(named, name):
                    names.add(name)
    maps = read(process, "maps").decode(errors="replace")  # after the descriptors: a file is mapped, then closed
    return names.union(re.findall(rf" {SHARED_MEMORY}/({named})$", maps, re.MULTILINE))


def remove(names: set[str], within_s: float = 0.0) -> None:
    """Remove files in shared memory that no process uses any more, or will within so many seconds."""
    deadline = time.monotonic() + within_s
    while left := {name for name in names if os.path.exists(f"{SHARED_MEMORY}/{name}")}:
        for name in left.difference(*map(files_of, processes())):
            with suppress(OSError):  # not this user's
                os.unlink(f"{SHARED_MEMORY}/{name}")
        if time.monotonic() >= deadline:
            return
        time.sleep(_LOOK_S)


class Made:
    """The names of files that processes make in shared memory: one that is killed has no maps to look at.

    Args:
        named: which names are meant.

    Attributes:
        descriptor: can be read once somebody has made files; -1: there is none.
    """

    def __init__(self, named: str = OF_ANY):
        self._named, self.names = named, set[str]()
        self.descriptor = -1
        with suppress(OSError, AttributeError, ImportError):  # not Linux, or no descriptor is free
            import ctypes  # here, as few processes need it

            library = ctypes.CDLL(None, use_errno=True)
            self.descriptor = library.inotify_init1(_FLAGS)
            library.inotify_add_watch(self.descriptor, SHARED_MEMORY.encode(), _CREATED)

    def note(self, own: Iterable[int]) -> None:
        """Find out which of the files that were just made are these processes', which are asked if there are any."""
        events, start, new = b"", 0, set()
        with suppress(OSError):
            events = os.read(self.descriptor, 1 << 16)
        while start < len(events):
            size = _EVENT.unpack_from(events, start)[3]
            new.add(os.fsdecode(events[start + _EVENT.size : start + _EVENT.size + size].rstrip(b"\0")))
            start += _EVENT.size + size
        if any(re.fullmatch(self._named, name) and os.path.exists(f"{SHARED_MEMORY}/{name}") for name in new):
            for process in own:
                self.names |= files_of(process, self._named) & new
