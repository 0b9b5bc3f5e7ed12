"""The doctor's course: probes on this host and on all ranks, and the checks of their facts."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from clcomm.base.console.finding import Finding, note, problem
from clcomm.tools.doctor import (
    caches,
    cores,
    environment,
    leftovers,
    limits,
    modules,
    mpi,
    network,
    opencl,
    place,
    start,
)
from clcomm.tools.doctor.guard import StageGuard
from clcomm.tools.doctor.job import FAILED, Facts, JobFacts

Probe = Callable[[], Facts]
#: How long a probe may take; those that wait for other programs have limits of their own below this.
LIMIT_S = 75.0
#: How long the ranks may take to start, after the probes of the slowest, and then for each stage together.
START_S, STAGE_S = 150.0, 60.0
#: The checks, in the order in which they are shown.
CHECKS: tuple[Callable[[JobFacts], Iterator[Finding]], ...] = (
    place.check, modules.check, environment.check, limits.check, mpi.check, start.check, modules.check_versions,
    cores.check, opencl.check, limits.check_shared_memory, caches.check, leftovers.check_locks, leftovers.check,
    place.check_other_jobs, network.check_clocks, network.check,
)  # fmt: skip
_FIRST = "mend the {} first, as said above"
_REPORT = "report it with the output of clcomm doctor --json"


def probes(directory: str, local_rank: int = 0) -> dict[str, Probe]:
    """Return the probes of a rank, by name; the first one of a host looks at the host too.

    Args:
        directory: where locks are looked for, and modules that hide others.
        local_rank: among the ranks of this host.
    """
    own: dict[str, Probe] = {
        "place": place.probe, "modules": partial(modules.probe, directory), "limits": limits.probe,
        "variables": environment.probe, "versions": modules.probe_versions, "cores": cores.probe,
        "opencl": opencl.probe, "shared memory": limits.probe_shared_memory,
    }  # fmt: skip
    if local_rank:
        return own
    return own | {
        "mpi": mpi.probe, "caches": caches.probe, "locks": partial(leftovers.probe_locks, directory),
        "leftovers": leftovers.probe, "other jobs": place.probe_other_jobs,
    }  # fmt: skip


def look(given: Mapping[str, Probe], limit_s: float = LIMIT_S) -> dict[str, Any]:
    """Return the facts of each probe; for one that raises or takes too long, why there are none."""
    return {name: _facts(probe, limit_s) for name, probe in given.items()}


def _facts(probe: Probe, limit_s: float) -> dict[str, object]:
    found: dict[str, object] = {FAILED: f"no answer within {limit_s:g} s"}

    def run() -> None:
        try:
            facts = probe()
        except BaseException as error:  # whatever breaks is what the doctor is for
            facts = {FAILED: str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__}
        found.clear()
        found.update(facts)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(limit_s)
    return dict(found)


def lacks_numpy(facts: Facts) -> bool:
    """Return whether this rank cannot use NumPy, which ranks need to exchange facts."""
    return bool(facts["modules"].get("numpy"))


def judge(job: JobFacts, checks: Sequence[Callable[[JobFacts], Iterator[Finding]]] = CHECKS) -> list[Finding]:
    """Return the findings of all checks; a check that fails is one itself."""
    found: list[Finding] = []
    for check in checks:
        found += _judged(check, job)
    silent = {name for facts in job.ranks for name in facts} - {"caches", "start", "world"}
    for name in sorted(silent):
        for rank, reason in list(job.failures(name).items())[:1]:
            remedy = _FIRST.format("modules") if "numpy" in modules.broken(job) else _REPORT
            found.append(note(name, f"{job.who([rank])}could not be examined: {reason}", remedy))
    first = dict.fromkeys(limits.blamed(job), "limits") | dict.fromkeys(modules.blamed(job), "modules")
    return [replace(each, remedy=_FIRST.format(first[each.check])) if each.remedy and each.check in first else each
            for each in found]  # fmt: skip


def _judged(check: Callable[[JobFacts], Iterator[Finding]], job: JobFacts) -> list[Finding]:
    try:
        return list(check(job))
    except Exception as error:
        topic = check.__name__.partition("_")[2] or check.__module__.rpartition(".")[2]
        name = topic.replace("_", " ")
        return [note(name, f"this check failed: {type(error).__name__}: {error}", _REPORT)]


def together(facts: dict[str, Any], launched: int, render: Callable[[list[Finding]], str] | None) -> JobFacts | None:
    """Return all ranks' facts on rank 0, None on the others; collective.

    Where MPI sees a single rank of several, or would end the ranks, the first rank by its launcher's variables has its
    own facts.

    Args:
        facts: this rank's, which get those of the ranks together.
        launched: how many ranks the launcher has started.
        render: returns what to print for findings; None on ranks that print nothing.
    """
    if limits.lacks_shared_memory(facts["shared memory"]):
        return JobFacts([facts], True) if facts["place"]["rank"] == 0 else None  # MPI would end by SIGBUS
    guard = StageGuard()

    def stage(what: str, within_s: float) -> None:
        if render is None:
            guard.expect(within_s, "", "")
            return
        so_far = judge(JobFacts([facts], True))
        late = problem(what, f"did not end within {within_s:g} s: a rank or a host does not answer", _STUCK)
        dead = problem(what, "MPI ended this process", _ENDED)
        guard.expect(within_s, render([*so_far, late]), render([*so_far, dead]))

    try:
        stage("MPI's start", START_S)
        return _gathered(facts, launched, stage)
    finally:
        guard.done()


_ENDED = "read MPI's own message; make room in /dev/shm (docs/sharp-bits.md)"
_STUCK = "see that all hosts run and that no firewall separates them: clcomm doctor --hosts A,B"


def _gathered(facts: dict[str, Any], launched: int, stage: Callable[[str, float], None]) -> JobFacts | None:
    from clcomm.comm.transport import mpi_communicators, mpi_runtime

    try:
        world = mpi_runtime.load_mpi().COMM_WORLD
    except Exception as error:
        facts["world"] = {FAILED: str(error).splitlines()[0]}
        return JobFacts([facts], True) if facts["place"]["rank"] == 0 else None
    size = world.Get_size()
    facts["world"] = {"size": size, "launched": launched, "library": mpi_runtime.library()}
    if size == 1 and launched > 1:
        return JobFacts([facts], True) if facts["place"]["rank"] == 0 else None
    stage("window", STAGE_S)
    host = mpi_communicators.host_of(world)
    if host.Get_size() > 1:
        facts["world"]["window"] = mpi_communicators.shares_memory(host)
    host.Free()
    stage("clocks", STAGE_S)
    facts["clocks"] = network.measure_clocks(world)
    stage("network", STAGE_S)
    facts["network"] = network.measure(world, world.allgather(facts["place"]["host"]))
    everyone = world.gather(json.dumps(facts), 0)
    return None if everyone is None else JobFacts([json.loads(each) for each in everyone], True)


def agreed(code: int) -> int:
    """Return rank 0's exit code on every rank; collective."""
    from clcomm.comm.transport import mpi_runtime

    given: int = mpi_runtime.load_mpi().COMM_WORLD.bcast(code, 0)
    return given
