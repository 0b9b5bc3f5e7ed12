"""The cases of the fault matrix that concern hosts, with half of the ranks on another one; and faults of a whole host.

`python -m tests.multihost.host_cases [PATTERN [AT ONCE]]` runs them; `make hosts` writes their tables.
"""

from __future__ import annotations

import re
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from tests.faults.cases import (
    ENDINGS,
    GROUP_SIGNALS,
    HARMLESS,
    IN_KERNEL,
    MISMATCHES,
    MPI_STARTING,
    PLAIN_EXITS,
    TIMEOUT_S,
    Case,
    all_cases,
)
from tests.faults.launch import END_S, ROOT
from tests.faults.matrix import report, row, undisturbed
from tests.faults.page import page
from tests.multihost import two_hosts

#: Faults of one process that say nothing of hosts: signals to all, and what ranks do to themselves at their end.
_LEFT_OUT = (*GROUP_SIGNALS, "NaN", "thread that stays, finalized")
#: How a host's end is told: its own ranks can say nothing, so the others or the launcher do.
LOST = r"(?i)clcomm: rank \d .*(missing|left|lost|died)|connection|signal 9|KILLED|proxy|ended by SIGTERM"
#: The sample that CI runs.
SAMPLE = ("exception:collective:1:two hosts", "SIGKILL:forward:1:two hosts", "host lost:collective:1:two hosts")


def host_cases() -> list[Case]:
    """Return all of them: on two ranks, one on each host."""
    alike = [
        case
        for case in all_cases()
        if not (case.ulfm or case.disk or case.damage or case.fault in _LEFT_OUT)
        and case.place != IN_KERNEL
        and case.ranks == 2
        and (case.rank == 1 or case.fault in ("SIGKILL", "SIGSTOP", *HARMLESS, *MISMATCHES))
    ]
    cases = [_on_two_hosts(case) for case in alike]
    for place in ("forward", "collective", "checkpoint"):
        cases += [
            Case("host lost", place, 1, LOST, None, within_s=4 * END_S, two_hosts=True),
            Case("proxy killed", place, 1, LOST, None, within_s=4 * END_S, two_hosts=True),
        ]
    return cases


def _on_two_hosts(case: Case) -> Case:
    """Return a case with what differs between hosts.

    MPICH's mpiexec ends a job in which a rank is killed before that rank's monitor, on another host, says so. Where a
    rank calls os._exit, the monitor ends the launcher on its host; the exit code is then mpiexec's own.
    """
    if case.place == "start-up" and case.fault in (*ENDINGS, *PLAIN_EXITS):
        # No rank on that host is left to be ended, and MPI, which is starting on the other, ends by the time-out.
        return replace(
            case, two_hosts=True, code=None, pattern=r"clcomm: rank \d|EXIT CODE: |in load_mpi", leaves=MPI_STARTING,
            within_s=TIMEOUT_S + END_S,
        )  # fmt: skip
    if case.fault in ("SIGKILL", "SIGSEGV"):
        return replace(case, two_hosts=True, pattern=rf"{case.pattern}|EXIT CODE: (9|11)")
    if case.fault.startswith("os._exit"):
        return replace(case, two_hosts=True, code=None)
    if case.fault == "SIGSTOP":  # nor is there a rank beside it that could say that it is stopped
        silent = r"clcomm: rank \d has waited .*; missing: rank {rank} \(no rank on its host answers\).* the job ends"
        pattern = case.pattern if case.place == "start-up" else f"{case.pattern}|{silent}"
        return replace(case, two_hosts=True, pattern=pattern, within_s=case.within_s + END_S)
    return replace(case, two_hosts=True)


def main(pattern: str = "", at_once: str = "1") -> int:
    """Run the cases whose names match; for "" run all and write the tables; return 1 if some fail."""
    reason = two_hosts.refusal()
    if reason:
        print(f"two hosts: {reason}")
        return 1
    undisturbed()
    with ThreadPoolExecutor(int(at_once)) as pool:
        outcomes = list(pool.map(report, [case for case in host_cases() if re.search(pattern, case.name)]))
    failed = sum(bool(outcome.problems) for outcome in outcomes)
    print(f"{len(outcomes) - failed} of {len(outcomes)} as they have to be")
    if not pattern:
        tables = page("Faults on two hosts", list(map(row, outcomes)))
        (ROOT / "tests" / "proofs" / "faults-on-hosts.md").write_text(tables)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
