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
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress

TYPE_CHECKING = False
if TYPE_CHECKING or __name__ != "__main__":
    from clcomm.base.host.host_processes import FULL, Made, files_of, has, processes, read, remove, stat_fields
else:
    sys.path.append(os.path.join(os.path.dirname(__file__), "../../base/host"))
    from host_processes import FULL, Made, files_of, has, processes, read, remove, stat_fields

#: No process is to be ended, as the job has ended well.
LEAVE = "leave"
#: Seconds that killed processes may take to end, multiprocessing's trackers to remove what those left behind, and
#: processes whose launcher has ended to end by themselves, with their last lines.
KILLED_S, TRACKERS_S, PATIENCE_S = 4.0, 1.0, 1.0
_LOOK_S = 0.02
#: How long a stopped process may finish a system call.
_STOPS_S = 0.5
#: How many descriptors are left where processes' are opened.
_SPARE = 3
_TRACKER = b"multiprocessing.resource_tracker"


def end_processes(settings: Iterable[str], made: Made, patience_s: float = 0.0) -> int:
    """End the processes whose environment has all these settings, and remove what they made in shared memory.

    They are stopped first, as one that runs could start another or make a file meanwhile. Then the youngest is killed
    first: the system lets stopped processes go on that lose their parent, and sends them SIGHUP.

    Args:
        settings: as NAME=VALUE.
        made: what some of them have made before.
        patience_s: how long they may take to end by themselves.

    Returns how many were killed.
    """
    is_own, killed = has(*settings), set()
    patient_until = time.monotonic() + patience_s
    until = patient_until + KILLED_S

    while time.monotonic() < until:
        with ExitStack() as stack:
            found = opened(is_own, stack)
            made.note(process for process, _ in found)
            if not found:
                break
            now_s = time.monotonic()
            helpers_end = now_s >= patient_until + TRACKERS_S  # they remove what the others have left
            found = [each for each in found if helpers_end or _TRACKER not in read(each[0], "cmdline")]
            if now_s < patient_until or not found:
                time.sleep(_LOOK_S)
                continue
            for _, handle in found:
                _send(handle, signal.SIGSTOP)
            for process, _ in found:
                while stat_fields(process)[:1] in (["R"], ["S"], ["D"]) and time.monotonic() < now_s + _STOPS_S:
                    time.sleep(0.001)
                made.names |= files_of(process)
            for _, handle in reversed(found):
                _send(handle, signal.SIGKILL)
            killed |= {process for process, _ in found}
            for _, handle in found:
                select.select([handle], [], [], max(0.0, until - time.monotonic()))
    remove(made.names)
    return len(killed)


def _send(handle: int, number: int) -> None:
    with suppress(OSError):  # it has ended
        signal.pidfd_send_signal(handle, number)


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
            for process in processes():
                if process != os.getpid() and is_wanted(process):
                    with suppress(ProcessLookupError):  # it has ended
                        handle = os.pidfd_open(process)
                        stack.callback(os.close, handle)
                        if is_wanted(process):
                            found.append((process, handle))
        except OSError as error:
            if error.errno not in FULL or not found:
                raise
    return found


def kill_children(parent: int) -> None:
    """Kill the processes that a process, which the caller has started and not waited for, has started in its turn."""
    with ExitStack() as stack, suppress(OSError):
        for _, handle in opened(lambda process: stat_fields(process)[1:2] == [str(parent)], stack):
            _send(handle, signal.SIGKILL)


def main(setting: str, *folders: str) -> None:
    """Serve as the module's text says."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    made, rest = Made(), b""
    sources = [each for each in (0, made.descriptor) if each >= 0]
    while True:
        found = select.select(sources, [], [])[0]
        if made.descriptor in found:
            made.note(filter(has(setting), processes()))
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
            end_processes([setting, *more], made, float(patience_s))
            with suppress(OSError):
                os.write(1, b"\n")
    killed = end_processes([setting], made)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    if killed:
        with suppress(OSError):  # the reader is gone, too
            os.write(2, b"clcomm: the process that started this job is gone; the job's processes are ended\n")


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main(*sys.argv[1:])
