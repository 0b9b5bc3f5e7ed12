"""Settings in which every pair of levels occurs, as few as a greedy choice finds.

One setting after another takes, of several drawn candidates, the one with most of the pairs that are still missing.
The idea: Cohen, Dalal, Fredman and Patton, "The AETG system", IEEE Transactions on Software Engineering 23, 1997.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping

from tests.pairs.factors import FACTORS, Level, Pair

_CANDIDATES = 12
#: Says whether some levels may stand together, whatever the other factors are.
Allowed = Callable[[Mapping[str, str]], bool]


class Covering:
    """Hands out settings until no pair is missing.

    Args:
        pairs: those that are to occur.
        allowed: tells which levels may stand together; may change between two settings.
        seed: of the draws.
    """

    def __init__(self, pairs: Iterable[Pair], allowed: Allowed, seed: int):
        self.missing: dict[Pair, None] = dict.fromkeys(pairs)
        self._allowed, self._rng = allowed, random.Random(seed)

    def next(self) -> dict[str, str] | None:
        """Return a setting with at least one missing pair; None where none is missing that may stand in a setting.

        Pairs that fit no setting are dropped from `missing`.
        """
        while self.missing:
            first = next(iter(self.missing))
            found = [each for _ in range(_CANDIDATES) if (each := self._candidate(first)) is not None]
            if found:
                return max(found, key=self._gain)
            del self.missing[first]
        return None

    def _candidate(self, pair: Pair) -> dict[str, str] | None:
        """Return a setting with a pair, each further level chosen for the pairs that it adds; None: none was found."""
        setting = dict(pair)
        if not self._allowed(setting):
            return None
        order = [factor for factor in FACTORS if factor not in setting]
        self._rng.shuffle(order)
        for factor in order:
            choices = [level for level in FACTORS[factor] if self._allowed({**setting, factor: level})]
            if not choices:
                return None
            gains = [sum(_pair(each, (factor, level)) in self.missing for each in setting.items()) for level in choices]
            best = max(gains)
            setting[factor] = self._rng.choice([c for c, gain in zip(choices, gains, strict=True) if gain == best])
        return {factor: setting[factor] for factor in FACTORS}

    def _gain(self, setting: Mapping[str, str]) -> int:
        items = list(setting.items())
        return sum((a, b) in self.missing for i, a in enumerate(items) for b in items[i + 1 :])


_ORDER = {factor: number for number, factor in enumerate(FACTORS)}


def _pair(one: Level, other: Level) -> Pair:
    return (one, other) if _ORDER[one[0]] < _ORDER[other[0]] else (other, one)
