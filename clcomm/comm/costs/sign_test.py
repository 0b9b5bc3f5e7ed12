"""A sign test on alternating times: is one of two alternatives faster, or within the noise?

Turns of both alternate, so that other load on the machine slows both; the sign test assumes no distribution of the
noise (W. J. Conover, "Practical Nonparametric Statistics", 3rd edition, 3.4).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

#: The chance of choosing the other alternative where both take the same time.
_CHANCE = 0.005


#: A smaller gain is not worth a change.
_WORTH = 0.98


class SignTest(NamedTuple):
    """Whether the other alternative is faster, and its share of won turns."""

    is_faster: bool
    wins: int
    turns: int

    def __str__(self) -> str:
        return f"faster in {self.wins} of {self.turns} turns"


def sign_test(default_s: np.ndarray, other_s: np.ndarray) -> SignTest:
    """Test whether the other alternative is faster than the default, given the seconds of the same turns."""
    turns, wins = len(default_s), int((other_s < default_s).sum())
    is_worth_it = float(np.median(other_s)) < _WORTH * float(np.median(default_s))
    return SignTest(is_worth_it and _chance_of(wins, turns) <= _CHANCE, wins, turns)


def _chance_of(wins: int, turns: int) -> float:
    """Return the probability of so many wins or more where each turn is a coin toss."""
    return sum(math.comb(turns, count) for count in range(wins, turns + 1)) / (1 << turns)
