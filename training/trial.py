"""A short run of a job under observation: what its processes hold at most, and how it ended."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import IO, NamedTuple

from clcomm.base.host.host_processes import processes, read, stat_fields
from clcomm.jobs.launch.keeper import Keeper
from clcomm.jobs.launch.mpiexec import find_mpiexec

#: How often processes are looked at, and how often their common memory, for which the kernel walks their pages.
_LOOK_S, _COMMON_S = 0.02, 0.1
_KIB = 1024
#: How names of common memory in smaps begin, and that of a training set (training/data/shared_splits.py), which is
#: written as a file and in memory whichever of its pages are mapped.
_NAMES, _DATA = ("/dev/shm/", "/SYSV", "/memfd:", "/dev/zero"), "/memfd:clcomm-data"
_ANONYMOUS, _PAGES = "RssAnon", "VmPTE"
#: What the kernel holds for a rank besides page tables (stacks, sockets, pipes), of which processes are not told: what
#: the memory cgroups of 12 jobs of 2 to 4 ranks counted more than these files say, 2.6 to 2.9 MiB.
_KERNEL_BYTES = 11 << 18


class HostMemory(NamedTuple):
    """Bytes that a job's processes hold on one host.

    own: of each process alone, added up. common: shared by several processes. data: the dataset, which a host holds
    once. another: of one more rank, which is the mean of all ranks but the largest (the first one reads data and
    writes reports for all), with its share of small processes.
    """

    own: int = 0
    common: int = 0
    data: int = 0
    another: int = 0

    @property
    def nbytes(self) -> int:
        return self.own + self.common + self.data


class Trial(NamedTuple):
    """What a job's processes held when it was most, and the last line of its errors; "" where it ended well."""

    peak: HostMemory
    problem: str


def try_job(keeper: Keeper, program: Sequence[str], ranks: int, cores: int, limit_s: float) -> Trial:
    """Run `python` with these arguments on some ranks of this host, all on so many of its cores.

    Counted is what the system cannot take back: memory of each process's own, memory that processes share once, and
    what the kernel has for them; at the moment when all of it is most. Pages of programs and libraries are left out, as
    they can be read again. A job that takes longer than `limit_s` is ended. Raises LaunchError without a launcher.
    Source: proc_pid_status(5), proc_pid_smaps(5).
    """
    with tempfile.TemporaryFile() as errors:
        process = _start(keeper, program, ranks, cores, errors)
        watch, end_s = _Watch(process.pid, ranks), time.monotonic() + limit_s
        try:
            while process.poll() is None and time.monotonic() < end_s:
                watch.look()
                time.sleep(_LOOK_S)
            problem = "" if process.poll() is not None else f"took longer than {limit_s:g} s"
        finally:
            process.kill()
            keeper.end(patience_s=0.0)
            process.wait()
        errors.seek(0)
        lines = [line.strip() for line in errors.read().decode(errors="replace").splitlines() if line.strip()]
    if process.returncode and not problem:
        said = [line for line in lines if line.startswith("clcomm")]
        problem = (said or lines or [f"ended with exit code {process.returncode}"])[-1]
    return Trial(watch.peak, problem)


def _start(
    keeper: Keeper, program: Sequence[str], ranks: int, cores: int, errors: IO[bytes]
) -> subprocess.Popen[bytes]:
    mpiexec, own = find_mpiexec(), os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(own)[:cores])  # the job's processes inherit it
    try:
        return subprocess.Popen(
            [*mpiexec.command(ranks, "", ""), sys.executable, *program],
            env={**keeper.environment(), **mpiexec.environment()},
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True,
        )  # fmt: skip
    finally:
        os.sched_setaffinity(0, own)


class _Watch:
    """The memory of a process and of all that it started; `peak` is that of the moment when it was most."""

    def __init__(self, root: int, ranks: int):
        self.peak = HostMemory()
        self._root, self._ranks = root, ranks
        self._common, self._data, self._walked_s = 0, 0, 0.0

    def look(self) -> None:
        found = ((pid, _fields(pid, "status")) for pid in descendants(self._root))
        own = {pid: now[_ANONYMOUS] + now[_PAGES] for pid, now in found if _ANONYMOUS in now}
        now_s = time.monotonic()
        if now_s - self._walked_s >= _COMMON_S:
            self._walked_s = now_s
            data: dict[str, int] = {}
            self._common = sum(_common_of(pid, data) for pid in own)
            self._data = sum(data.values())
        sizes = sorted(own.values(), reverse=True)
        whole = sum(sizes) + _KERNEL_BYTES * self._ranks
        if whole + self._common + self._data > self.peak.nbytes and len(sizes) >= self._ranks:
            helpers = sum(sizes[self._ranks :]) // self._ranks  # the launcher's processes are small
            alike = sizes[1 : self._ranks] or sizes[:1]
            another = sum(alike) // len(alike) + helpers + _KERNEL_BYTES
            self.peak = HostMemory(whole, self._common, self._data, another)


def _fields(pid: int, file: str) -> dict[str, int]:
    """Return a process's sizes in bytes by name; {} for one that has ended."""
    lines = read(pid, file).decode().splitlines()
    sizes = (line.partition(":") for line in lines if line.endswith(" kB"))
    return {name: _KIB * int(value.split()[0]) for name, _, value in sizes}


def _common_of(pid: int, data: dict[str, int]) -> int:
    """Return a process's share of common memory, and note each training set's size by its inode."""
    share, name, inode, size = 0, "", "", 0
    for line in read(pid, "smaps").decode(errors="replace").splitlines():
        words = line.split(None, 5)
        if words[0] == "Size:":
            size = _KIB * int(words[1])
        elif words[0] == "Pss:" and name.startswith(_DATA):
            data[inode] = max(data.get(inode, 0), size)
        elif words[0] == "Pss:" and name.startswith(_NAMES):
            share += _KIB * int(words[1])
        elif not words[0].endswith(":"):
            inode, name = words[4], words[5] if len(words) > 5 else ""
    return share


def descendants(root: int) -> Iterator[int]:
    """Yield the ids of a process and of those that it started, their own included."""
    children: dict[int, list[int]] = {}
    for pid in processes():
        for parent in stat_fields(pid)[1:2]:  # none where it has ended
            children.setdefault(int(parent), []).append(pid)
    waiting = [root]
    while waiting:
        pid = waiting.pop()
        yield pid
        waiting += children.get(pid, [])
