"""This user's running jobs on this host, by the status pages that their ranks keep open.

The kernel shows the descriptors in /proc/PID/fd to processes of the same user alone (proc_pid_fd(5)).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from clcomm.comm.watch.figures import about_program
from clcomm.comm.watch.other_hosts import OtherHosts, StatusClient
from clcomm.comm.watch.status_page import NAME, RankStatus, StatusPage, read_description

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
