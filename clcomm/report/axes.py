"""Where ticks go on a logarithmic axis, and how they are written."""

from __future__ import annotations

import math

from clcomm.units import format_size


def log_ticks(low: float, high: float, most: int = 7) -> list[float]:
    """Return at most so many round numbers from `low` to `high`, both above 0: 1, 2 and 5 times powers of ten."""
    for steps in ((1, 2, 5), (1,)):
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        ticks = [step * 10.0**decade for decade in decades for step in steps]
        ticks = [tick for tick in ticks if low * (1 - 1e-9) <= tick <= high * (1 + 1e-9)]
        if len(ticks) <= most:
            return ticks
    return ticks[:: -(-len(ticks) // most)]


def size_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Return at most so many powers of two from `low` to `high` bytes."""
    exponents = range(math.ceil(math.log2(low) - 1e-9), math.floor(math.log2(high) + 1e-9) + 1)
    ticks = [float(1 << exponent) for exponent in exponents]
    return ticks[:: max(1, -(-len(ticks) // most))]


def time_text(seconds: float) -> str:
    """Return a tick's time in the unit that suits it."""
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        if seconds * factor >= 0.9995:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def size_text(nbytes: float) -> str:
    """Return a tick's size."""
    return format_size(nbytes)
