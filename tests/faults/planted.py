"""The fault that a rank of victim.py causes: CLCOMM_TEST_FAULT=FAULT:PLACE:RANK.

Places: "start-up" before the rank has a Communicator, "forward" in step 5, "collective" while it reduces step 5's
gradients, "one kernel" before that, in an all-reduce that is one kernel of each rank, "checkpoint" while step 6 is
saved, "exit" after the last step, "end" after the last collective.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from clcomm import Communicator
from clcomm.comm.watch.chaos import hold
from clcomm.jobs.checkpoint import file as checkpoint_file

FAULT, PLACE, RANK = os.environ["CLCOMM_TEST_FAULT"].split(":")
#: Time from the begin of a wait to the signal, and the delay of the rank that is waited for.
INTO_S, WAIT_S = 0.2, 0.8
_own_rank = os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0"))


def is_victim() -> bool:
    """Return whether the fault happens on this rank."""
    return _own_rank == RANK


def stamp() -> None:
    """Print the time of the fault for the harness."""
    sys.stderr.write(f"failing at {time.monotonic():.3f}\n")
    sys.stderr.flush()


def fail() -> None:
    raise RuntimeError("planted")


def crash() -> None:
    ctypes.string_at(0)


def jump() -> None:
    """Make this process's wall clock jump at each call: an hour ahead, then a day back, in turn."""
    real, asked = time.time, []

    def jumped() -> float:
        asked.append(None)
        return real() + (3600 if len(asked) % 2 else -86400)

    time.time = jumped


def in_thread() -> None:
    threading.Thread(target=fail).start()
    time.sleep(30)  # the main thread waits for the other one's work


def send(number: int) -> Callable[[], None]:
    def to_this_process() -> None:
        os.kill(os.getpid(), number)
        time.sleep(30)

    return to_this_process


def processes_of_the_job() -> list[int]:
    """Return the job's processes: launcher, proxies, ranks and their children."""
    mark, found = f"CLCOMM_TEST_ID={os.environ['CLCOMM_TEST_ID']}".encode(), []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            command = (entry / "comm").read_text()
            if entry.name.isdigit() and command.startswith(("mpiexec", "hydra", "python")):
                found += [int(entry.name)] * (mark in (entry / "environ").read_bytes().split(b"\0"))
    return found


def launcher() -> int:
    """Return the process of mpiexec."""
    return next(pid for pid in processes_of_the_job() if Path(f"/proc/{pid}/comm").read_text().startswith("mpiexec"))


def send_all(number: int, times: int = 1) -> None:
    """Send a signal to every process of the job, as a service manager does."""
    for turn in range(times):
        time.sleep(0.05 * turn)
        for pid in processes_of_the_job():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def lose_host() -> None:
    """Kill every process of this host, this one last, as when a machine loses power."""
    own = os.readlink("/proc/self/ns/net")
    for pid in processes_of_the_job():
        with contextlib.suppress(OSError):
            if pid != os.getpid() and os.readlink(f"/proc/{pid}/ns/net") == own:
                os.kill(pid, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def kill_proxy() -> None:
    """Kill this host's proxy, through which the launcher knows its ranks."""
    own = os.readlink("/proc/self/ns/net")
    for pid in processes_of_the_job():
        with contextlib.suppress(OSError):
            is_proxy = Path(f"/proc/{pid}/comm").read_text().startswith("hydra")
            if is_proxy and os.readlink(f"/proc/{pid}/ns/net") == own:
                os.kill(pid, signal.SIGKILL)


def stay() -> None:
    """Keep this process alive after its program has ended."""
    threading.Thread(target=time.sleep, args=(60,)).start()


#: Signals to more processes than this rank's.
GROUP_SIGNALS: dict[str, Callable[[], Any]] = {
    f"{signal.Signals(number).name} to {whom}": act
    for number in (signal.SIGTERM, signal.SIGINT)
    for whom, act in (
        ("all", partial(send_all, number)),
        ("all twice", partial(send_all, number, 2)),
        ("mpiexec", lambda number=number: os.kill(launcher(), number)),
    )
}


#: Faults of this rank's whole host.
OF_HOST: dict[str, Callable[[], Any]] = {"host lost": lose_host, "proxy killed": kill_proxy}


def then_wait(act: Callable[[], Any]) -> Callable[[], None]:
    def act_and_wait() -> None:
        act()
        time.sleep(30)

    return act_and_wait


#: The action of each fault.
ACTS: dict[str, Callable[[], Any]] = {
    "exception": fail,
    "exception in a thread": in_thread,
    "sys.exit": lambda: sys.exit(5),
    "os._exit": lambda: os._exit(7),
    "os._exit(0)": lambda: os._exit(0),
    "SIGKILL": send(signal.SIGKILL),
    "SIGSEGV": crash,
    "SIGTERM": send(signal.SIGTERM),
    "sys.exit, plain script": lambda: sys.exit(5),
    "SIGTERM, plain script": send(signal.SIGTERM),
    "SIGINT": send(signal.SIGINT),
    "SIGSTOP": send(signal.SIGSTOP),
    "slow rank": lambda: hold(1.5, slowly=True),
    "clock jump": jump,
    "thread that stays": stay,
    "thread that stays, finalized": stay,
    "exit handler that stays": lambda: atexit.register(lambda: time.sleep(60)),
    **{fault: then_wait(act) for fault, act in {**GROUP_SIGNALS, **OF_HOST}.items()},
}
#: Signals that a rank receives while it waits in a library call.
SIGNALS: dict[str, Callable[[], Any]] = {
    **{
        name: partial(os.kill, os.getpid(), signal.Signals[name])
        for name in ("SIGKILL", "SIGTERM", "SIGINT", "SIGSTOP")
    },
    "SIGTERM, plain script": partial(os.kill, os.getpid(), signal.SIGTERM),
    **GROUP_SIGNALS,
    **OF_HOST,
}


def at(place: str) -> None:
    """Trigger the fault of this place."""
    if place != PLACE or FAULT not in ACTS:
        return
    if is_victim() or place == "start-up":  # a rank that has not arrived yet cannot end earlier
        stamp()
    if is_victim():
        ACTS[FAULT]()


def within(place: str, comm: Communicator) -> None:
    """Trigger the fault in the next collective, while this rank waits there for the others."""
    if place != PLACE or FAULT not in ACTS:
        return
    if not is_victim():
        time.sleep(WAIT_S)
    elif FAULT in SIGNALS:
        threading.Thread(target=strike, daemon=True).start()
    else:
        comm.add_observer(Striking(comm))


def strike() -> None:
    time.sleep(INTO_S)
    stamp()
    SIGNALS[FAULT]()


class Striking:
    """An observer that triggers the fault within the collective of which it is notified."""

    def __init__(self, comm: Communicator):
        self.comm = comm

    def collective_finished(self, event: Any) -> None:
        self.comm.remove_observer(self)
        stamp()
        ACTS[FAULT]()


def while_writing() -> None:
    """Trigger the fault in the middle of a checkpoint's file."""
    fsync = os.fsync

    def struck(descriptor: int) -> None:
        if not done:
            done.append(True)
            stamp()
            ACTS[FAULT]()
        fsync(descriptor)

    done: list[bool] = []
    checkpoint_file.os = SimpleNamespace(**{**vars(os), "fsync": struck})  # type: ignore[attr-defined]


def disagree(place: str, comm: Communicator) -> None:
    """Call another operation than the other ranks."""
    if place != PLACE:
        return
    size = 100
    if is_victim() and FAULT in ("mismatched shapes", "mismatched order", "missing call"):
        stamp()
        size += FAULT == "mismatched shapes"
        if FAULT == "mismatched order":
            comm.broadcast(np.zeros(3))
    if not (is_victim() and FAULT == "missing call"):
        comm.all_reduce(np.zeros(size), label="metrics")
    if FAULT == "mismatched order" and not is_victim():
        comm.broadcast(np.zeros(3))


def fill(directory: Path) -> Path:
    """Fill the disk of a directory, which is this job's own; return the file that fills it."""
    filler = directory / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(1 << 20)):
            pass
    return filler


def make_read_only(directory: Path) -> None:
    """Make a disk, which is this job's own, read-only, as after a disk error."""
    bind, remount, read_only = 4096, 32, 1  # MS_BIND, MS_REMOUNT, MS_RDONLY of mount(2)
    libc, path = ctypes.CDLL(None, use_errno=True), bytes(directory)
    # A bind mount on itself: files open for writing would prevent a plain remount.
    for source, flags in ((path, bind), (None, bind | remount | read_only)):
        if libc.mount(source, path, None, flags, None):
            raise OSError(ctypes.get_errno(), "not made read-only")


#: Faults of the disk for checkpoints.
DISKS = {"disk full": fill, "read-only directory": make_read_only}
