"""The records of all ranks of a job, side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from clcomm.tools.verify.record import RankRecord, Step


class JobRecord:
    """All ranks' records."""

    def __init__(self, ranks: Sequence[RankRecord], is_stuck: bool = False):
        self.ranks = ranks
        #: Whether some rank waited longer than the limit.
        self.is_stuck = is_stuck and not any(rank.joins for rank in ranks)
        self.counts = [len(rank.complete) for rank in ranks]
        self.sizes = dict(pair for rank in ranks for pair in rank.sizes.items())
        self.names = [*self.sizes]

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def is_broken(self) -> bool:
        """Whether the ranks did not come to a common end."""
        is_short = len(set(self.counts)) > 1 and not any(rank.joins for rank in self.ranks)
        return self.is_stuck or is_short or any(rank.error for rank in self.ranks)

    def steps(self) -> Iterator[tuple[int, list[Step]]]:
        """Yield (number from 1 up, the ranks' steps) as far as all ranks completed them."""
        for index in range(min(self.counts)):
            yield index + 1, [rank.complete[index] for rank in self.ranks]

    def ordered(self, names: set[str]) -> list[str]:
        return sorted(names, key=lambda name: self.names.index(name) if name in self.sizes else len(self.names))

    def differing(self, hashes: Sequence[Mapping[str, str]]) -> list[str]:
        """Return the names whose hashes differ between ranks, in the model's order."""
        return self.ordered({name for own in hashes for name in own if len({each.get(name) for each in hashes}) > 1})
