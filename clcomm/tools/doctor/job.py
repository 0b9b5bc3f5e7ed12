"""The facts found by a job's ranks, for the checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from clcomm.base.errors import name_ranks

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
