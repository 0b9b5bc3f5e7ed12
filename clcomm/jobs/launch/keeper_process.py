"""Ends a job's processes on this host, where whoever started the job asks for it, or is gone: by SIGKILL, say.

`keeper_process.py NAME=VALUE FOLDER...`: a setting that the environment of each of the job's processes has, and of no
others, and folders to remove. Standard input is a pipe to which only the starting process writes. A line of it asks to
end processes: seconds of patience, and a setting that they have as well, if not all are meant. `LEAVE` and the pipe's
end are its last. It uses the standard library only, without site-packages, so that it starts in 20 ms.

A process is signalled through a descriptor, and is asked for its environment, or parent, after that was opened: its
number may be another's by then.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import select
import shutil
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress

#: No process is to be ended, as the job has ended well.
LEAVE = "leave"
#: Seconds that killed processes may take to end, multiprocessing's trackers to remove what those left behind, and
#: processes whose launcher has ended to end by themselves, with their last lines.
KILLED_S, TRACKERS_S, PATIENCE_S = 4.0, 1.0, 1.0
_LOOK_S = 0.02
#: No descriptor is free; how many are left where processes' are opened.
_FULL, _SPARE = (errno.EMFILE, errno.ENFILE), 3
_SHARED_MEMORY = "/dev/shm"
#: How files are named that a program has for itself: by MPICH, UCX, Open MPI, multiprocessing and PyTorch.
_NAME = r"(?:mpich|ucx_shm_posix|torch)_\w+|(?:sm|vader)_segment\.\S+|osc_rdma\.\S+|sem\.mp-\w+|psm_\w+"
_NAMED, _MAPPED = re.compile(_NAME), re.compile(rf" {_SHARED_MEMORY}/({_NAME})$", re.MULTILINE)
_TRACKER = b"multiprocessing.resource_tracker"
#: inotify(7): a file was made; without waiting, not for child processes; the head of an event.
_CREATED, _FLAGS, _EVENT = 0x100, os.O_NONBLOCK | os.O_CLOEXEC, struct.Struct("iIII")


def end_processes(settings: Iterable[str], patience_s: float = 0.0, made: Iterable[str] = ()) -> int:
    """End the processes whose environment has all these settings, and remove what they made in shared memory.

    They are stopped first, as one that runs could start another or make a file meanwhile.

    Args:
        settings: as NAME=VALUE.
        patience_s: how long they may take to end by themselves.
        made: names of files in shared memory that some of them had made before.

    Returns how many were killed.
    """
    wanted, names, killed = {each.encode() for each in settings}, set(made), set()
    patient_until = time.monotonic() + patience_s
    until = patient_until + KILLED_S

    def is_own(process: int) -> bool:
        return wanted <= set(_read(process, "environ").split(b"\0"))

    while time.monotonic() < until:
        with ExitStack() as stack:
            found = opened(is_own, stack)
            if not found:
                break
            now_s = time.monotonic()
            helpers_end = now_s >= patient_until + TRACKERS_S  # they remove what the others have left
            found = [each for each in found if helpers_end or _TRACKER not in _read(each[0], "cmdline")]
            if now_s < patient_until or not found:
                time.sleep(_LOOK_S)
                continue
            for number in (signal.SIGSTOP, signal.SIGKILL):
                for process, handle in found:
                    names |= _files_of(process)
                    with suppress(OSError):
                        signal.pidfd_send_signal(handle, number)
            killed |= {process for process, _ in found}
            for _, handle in found:
                select.select([handle], [], [], max(0.0, until - time.monotonic()))
    _remove(names)
    return len(killed)


def opened(is_wanted: Callable[[int], bool], stack: ExitStack) -> list[tuple[int, int]]:
    """Return the processes, but this one, of which this holds, and descriptors that the stack closes.

    Where no more can be opened some are left for another call, and a few descriptors for what the caller reads. Raises
    OSError where not even these can.
    """
    found = []
    with ExitStack() as spare:
        for _ in range(_SPARE):
            spare.callback(os.close, os.open("/proc", os.O_RDONLY))
        try:
            for process in (int(name) for name in os.listdir("/proc") if name.isdigit()):
                if process != os.getpid() and is_wanted(process):
                    with suppress(ProcessLookupError):  # it has ended
                        handle = os.pidfd_open(process)
                        stack.callback(os.close, handle)
                        if is_wanted(process):
                            found.append((process, handle))
        except OSError as error:
            if error.errno not in _FULL or not found:
                raise
    return found


def kill_children(parent: int) -> None:
    """Kill the processes that a process, which the caller has started and not waited for, has started in its turn."""
    with ExitStack() as stack, suppress(OSError):
        for _, handle in opened(lambda process: _parent(process) == parent, stack):
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)


def _parent(process: int) -> int:
    fields = _read(process, "stat").rpartition(b")")[2].split()
    return int(fields[1]) if len(fields) > 1 else 0


def _read(process: int, file: str) -> bytes:
    """Return a file of /proc/PROCESS; nothing where it has ended, or is another user's.

    Raises OSError where no descriptor is free, which says nothing of the process.
    """
    try:
        with open(f"/proc/{process}/{file}", "rb") as opened_file:
            return opened_file.read()
    except OSError as error:
        if error.errno in _FULL:
            raise
    return b""


def _files_of(process: int) -> set[str]:
    """Return the names of files in shared memory that a process has mapped or open; none that are removed."""
    names = set(_MAPPED.findall(_read(process, "maps").decode(errors="replace")))
    with suppress(OSError):
        for descriptor in os.listdir(f"/proc/{process}/fd"):
            with suppress(OSError):
                folder, _, name = os.readlink(f"/proc/{process}/fd/{descriptor}").rpartition("/")
                if folder == _SHARED_MEMORY and _NAMED.fullmatch(name):
                    names.add(name)
    return names


def _remove(names: set[str]) -> None:
    """Remove files in shared memory that no process uses any more."""
    left = {name for name in names if os.path.exists(f"{_SHARED_MEMORY}/{name}")}
    if left:
        left.difference_update(*(_files_of(int(process)) for process in os.listdir("/proc") if process.isdigit()))
    for name in left:
        with suppress(OSError):  # not this user's
            os.unlink(f"{_SHARED_MEMORY}/{name}")


class Made:
    """The names of files that the job's processes make in shared memory: one that is killed has no maps to look at."""

    def __init__(self, setting: str):
        self._wanted, self.names = setting.encode(), set[str]()
        self.descriptor = -1
        with suppress(OSError, AttributeError):  # not Linux
            library = ctypes.CDLL(None, use_errno=True)
            self.descriptor = library.inotify_init1(_FLAGS)
            library.inotify_add_watch(self.descriptor, _SHARED_MEMORY.encode(), _CREATED)

    def note(self) -> None:
        """Find out whose the files are that were just made."""
        read, start, new = b"", 0, set()
        with suppress(BlockingIOError):
            read = os.read(self.descriptor, 1 << 16)
        while start < len(read):
            size = _EVENT.unpack_from(read, start)[3]
            new.add(os.fsdecode(read[start + _EVENT.size : start + _EVENT.size + size].rstrip(b"\0")))
            start += _EVENT.size + size
        if any(_NAMED.fullmatch(name) and os.path.exists(f"{_SHARED_MEMORY}/{name}") for name in new):
            for process in (int(name) for name in os.listdir("/proc") if name.isdigit()):
                if self._wanted in _read(process, "environ").split(b"\0"):
                    self.names |= _files_of(process) & new


def main(setting: str, *folders: str) -> None:
    """Serve as the module's text says."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    made, rest = Made(setting), b""
    sources = [each for each in (0, made.descriptor) if each >= 0]
    while True:
        found = select.select(sources, [], [])[0]
        if made.descriptor in found:
            made.note()
        if 0 not in found:
            continue
        read = os.read(0, 1 << 12)
        if not read:
            break
        *lines, rest = (rest + read).split(b"\n")
        for line in lines:
            if line == LEAVE.encode():
                return
            patience_s, *more = line.decode().split(maxsplit=1)
            end_processes([setting, *more], float(patience_s), made.names)
            with suppress(OSError):
                os.write(1, b"\n")
    killed = end_processes([setting], 0.0, made.names)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    if killed:
        with suppress(OSError):  # the reader is gone, too
            os.write(2, b"clcomm: the process that started this job is gone; the job's processes are ended\n")


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main(*sys.argv[1:])
