"""Cores: those of each rank, those of the host, and their binding."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from clcomm.base.console.finding import Finding, note, ok, problem
from clcomm.base.host import usable_cores
from clcomm.tools.doctor.job import Facts, JobFacts

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
