"""Whether one way is faster than another, or within the noise: a sign test on times taken in turns.

Turns of both lie side by side, so what else the machine does meets both; a sign test asks nothing of the noise (W. J.
Conover, "Practical Nonparametric Statistics", 3rd edition, 3.4).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

#: The chance of choosing another way than the default where both take the same time.
_CHANCE = 0.005
#: What is faster by less is not worth a change.
_WORTH = 0.98


class Separation(NamedTuple):
    """Whether the other way is faster, and in how many of all turns it was."""

    is_faster: bool
    wins: int
    turns: int

    def __str__(self) -> str:
        return f"faster in {self.wins} of {self.turns} turns"


def separation(default_s: np.ndarray, other_s: np.ndarray) -> Separation:
    """Return whether another way takes less time than the default; both: seconds of the same turns."""
    turns, wins = len(default_s), int((other_s < default_s).sum())
    is_worth_it = float(np.median(other_s)) < _WORTH * float(np.median(default_s))
    return Separation(is_worth_it and _chance_of(wins, turns) <= _CHANCE, wins, turns)


def _chance_of(wins: int, turns: int) -> float:
    """Return how likely so many wins, or more, are where each turn is a coin toss."""
    return sum(math.comb(turns, count) for count in range(wins, turns + 1)) / 2**turns
