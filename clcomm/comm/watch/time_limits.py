"""How long a collective may take before the missing ranks are reported, and before the job ends."""

from __future__ import annotations

import math
from dataclasses import dataclass

from clcomm.base.errors import ArgumentError
from clcomm.base.host import variables

#: The longest interval between a watchdog's checks; limits of a few seconds shorten it.
INTERVAL_S = 1.0


@dataclass(frozen=True)
class Limits:
    """Seconds in one collective after which a rank reports the missing ranks, and after which it ends the job."""

    stall_warning_s: float
    timeout_s: float

    @classmethod
    def of(cls, stall_warning_s: float, timeout_s: float) -> Limits:
        """Return the limits; CLCOMM_STALL_WARNING_S and CLCOMM_TIMEOUT_S override the arguments; 0: no limit.

        Raises:
            ArgumentError: a value is negative or not a number; it names the argument or the variable.
        """
        return cls(
            _limit("stall_warning_s", stall_warning_s, "CLCOMM_STALL_WARNING_S"),
            _limit("timeout_s", timeout_s, "CLCOMM_TIMEOUT_S"),
        )

    @property
    def interval_s(self) -> float:
        """Seconds between a watchdog's checks."""
        return min(INTERVAL_S, self.stall_warning_s / 4, self.timeout_s / 4)

    def __bool__(self) -> bool:
        """Return whether there is any limit."""
        return min(self.stall_warning_s, self.timeout_s) < math.inf


def _limit(name: str, value: float, variable: str) -> float:
    given = variables.seconds(variable)
    try:
        seconds = float(value) if given is None else given
    except (TypeError, ValueError):
        seconds = -1.0
    if not seconds >= 0:
        raise ArgumentError(f"{name}: expected seconds, 0 for no limit, got {value}")
    return seconds or math.inf
