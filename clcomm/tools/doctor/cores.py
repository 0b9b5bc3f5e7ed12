"""Cores: those of each rank, those of the host, and their binding."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from clcomm.base.console.option_types import Finding, note, ok, problem
from clcomm.base.errors import name_ranks
from clcomm.base.host import usable_cores

_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def probe() -> dict[str, object]:
    """Return the cores that this process may use, those of the host, its container's quota and its threads."""
    return {
        "usable": sorted(usable_cores()),
        "present": os.cpu_count() or 1,
        "quota": _quota(),
        "threads": os.environ.get("OMP_NUM_THREADS", ""),
    }


def _quota() -> float | None:
    """Return how many cores' time a container may use (cgroup v2's cpu.max); None: no limit."""
    try:
        most, period = _QUOTA.read_text().split()
        return None if most == "max" else int(most) / int(period)
    except (OSError, ValueError):
        return None


def check(job: JobFacts) -> Iterator[Finding]:
    """Compare ranks with cores on each host."""
    found = job.of("cores")
    for host, ranks in job.hosts.items():
        own = {rank: found[rank] for rank in ranks if rank in found}
        if own:
            yield from _on_host(job.on(host), own, job.launched)


def _on_host(where: str, own: dict[int, Facts], launched: bool) -> Iterator[Finding]:
    first = next(iter(own.values()))
    usable = sorted({core for facts in own.values() for core in facts["usable"]})
    quota, present = first["quota"], first["present"]
    cores, ranks = len(usable), len(own)
    evidence = {"ranks": ranks, "cores": usable, "present": present, "quota": quota}
    if quota is not None and quota < cores:
        yield note(
            "cores", f"{cores} cores{where}, but this container gets the time of {quota:g}",
            f"give the container more (docker run --cpus={cores}), or start {max(1, int(quota))} ranks", **evidence,
        )  # fmt: skip
    if not launched:
        bound = f" of {present} that the host has" if cores < present else ""
        yield ok("cores", f"{_named(usable)}{bound}{where}", **evidence)
        return
    if ranks > cores and present > cores:
        yield problem(
            "binding", f"{ranks} ranks share {_named(usable)}{where}, and {present - cores} other cores are idle",
            "let ranks use all cores: mpiexec --bind-to none (Open MPI), or no taskset around mpiexec", **evidence,
        )  # fmt: skip
    elif ranks > cores:
        yield note(
            "cores", f"oversubscribed: {ranks} ranks share {_named(usable)}{where}, so each waits for a core "
            f"{1 - cores / ranks:.0%} of the time",
            f"start as many ranks as cores: mpiexec -n {cores}", **evidence,
        )  # fmt: skip
    else:
        share = cores // ranks
        yield ok("cores", f"{_named(usable)} for {ranks} ranks{where}, {share} each", **evidence)
    yield from _threads(where, own, cores)


def _threads(where: str, own: dict[int, Facts], cores: int) -> Iterator[Finding]:
    """Yield a note where NumPy's threads outnumber the cores; without OMP_NUM_THREADS each rank has one for each."""
    counts = [_thread_count(facts) for facts in own.values()]
    if len(own) > 1 and sum(counts) > max(cores, len(own)):
        share = max(1, cores // len(own))
        yield note(
            "threads", f"{len(own)} ranks may start {sum(counts)} threads of NumPy{where}, for {cores} cores",
            f"OMP_NUM_THREADS={share} mpiexec ..., or clcomm run, which sets it", threads=counts,
        )  # fmt: skip


def _thread_count(facts: Facts) -> int:
    given = facts["threads"].split(",")[0]
    return min(int(given), 4096) if given.isdigit() and int(given) else len(facts["usable"])


def _named(cores: Sequence[int]) -> str:
    """Return cores in words: "2 cores (0-1)"."""
    starts = [core for core in cores if core - 1 not in cores]
    ends = [core for core in cores if core + 1 not in cores]
    runs = ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))
    return f"{len(cores)} core{'s' if len(cores) != 1 else ''} ({runs})"


# --- The facts found by a job's ranks, for the checks. ---

#: In place of a probe's facts: why there are none.
FAILED = "failed"

Facts = Mapping[str, Any]
T = TypeVar("T")


class JobFacts:
    """All ranks' facts.

    Args:
        ranks: by rank; each has the facts of every probe by name, and those of "place".
        launched: whether a launcher started these ranks; else the only one stands for the host.
    """

    def __init__(self, ranks: Sequence[Facts], launched: bool):
        self.ranks, self.launched = ranks, launched
        self.hosts: dict[str, list[int]] = {}
        for rank, facts in enumerate(ranks):
            self.hosts.setdefault(facts["place"]["host"], []).append(rank)

    def of(self, probe: str) -> dict[int, Facts]:
        """Return a probe's facts by rank, without the ranks on which it failed."""
        return {rank: facts[probe] for rank, facts in enumerate(self.ranks) if FAILED not in facts.get(probe, {FAILED})}

    def failures(self, probe: str) -> dict[int, str]:
        found = {rank: facts.get(probe) for rank, facts in enumerate(self.ranks)}
        return {rank: facts[FAILED] for rank, facts in found.items() if facts and FAILED in facts}

    def by_host(self, probe: str) -> Iterator[tuple[str, Facts]]:
        """Yield each host and a probe's facts of its first rank with any, for facts that its ranks share."""
        found = self.of(probe)
        for host, ranks in self.hosts.items():
            first = next((rank for rank in ranks if rank in found), None)
            if first is not None:
                yield self.on(host), found[first]

    def on(self, host: str) -> str:
        """Return " on HOST" where there are several hosts, else ""."""
        return f" on {host}" if len(self.hosts) > 1 else ""

    def who(self, ranks: Sequence[int]) -> str:
        """Return "rank 2: " for a statement about some ranks; "" where it is about all of them."""
        return "" if len(ranks) == len(self.ranks) else f"{name_ranks(list(ranks))}: "

    def alike(self, probe: str, value: Callable[[Facts], T]) -> dict[T, list[int]]:
        """Return the ranks by the `value` of their facts."""
        found: dict[T, list[int]] = {}
        for rank, facts in self.of(probe).items():
            found.setdefault(value(facts), []).append(rank)
        return found
