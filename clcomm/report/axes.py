"""The ticks of charts' axes and their labels."""

from __future__ import annotations

import math

from clcomm.units import format_size

TIME, SIZE, CALLS = "time of an all-reduce", "size of an all-reduce", "calls"
#: A curve whose values span more than this has a logarithmic axis.
WIDE_SPAN = 20.0
#: The fewest ticks from which an axis can be read.
_FEWEST_TICKS = 3


def log_ticks(low: float, high: float, most: int = 7) -> list[float]:
    """Return at most `most` round numbers from `low` to `high`, both above 0: 1, 2 and 5 times powers of ten.

    If these are too many, 1 and 3 times powers of ten, then powers of ten alone, then every n-th of them; if they are
    fewer than three, multiples of a round number.
    """
    for steps in ((1, 2, 5), (1, 3), (1,)):
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        ticks = [step * 10.0**decade for decade in decades for step in steps]
        ticks = [tick for tick in ticks if low * (1 - 1e-9) <= tick <= high * (1 + 1e-9)]
        if len(ticks) <= most:
            return ticks if len(ticks) >= _FEWEST_TICKS else even_ticks(low, high, most)
    return ticks[:: -(-len(ticks) // most)]


def size_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Return at most `most` powers of two from `low` to `high` bytes; if fewer than three, multiples of one."""
    exponents = range(math.ceil(math.log2(low) - 1e-9), math.floor(math.log2(high) + 1e-9) + 1)
    ticks = [float(1 << exponent) for exponent in exponents if exponent >= 0]
    if len(ticks) < _FEWEST_TICKS and high > low:
        step = 2.0 ** max(0, math.ceil(math.log2((high - low) / (most - 1))))
        return _multiples(step, low, high)
    return ticks[:: max(1, -(-len(ticks) // most))]


def _multiples(step: float, low: float, high: float) -> list[float]:
    return [step * count for count in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def even_ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Return two to `most` multiples of 1, 2, 2.5 or 5 times a power of ten; [low] for an empty range."""
    least_step = (high - low) / (most - 1)
    if least_step <= 1e-9 * abs(low):
        return [low]
    power = 10.0 ** math.floor(math.log10(least_step))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= least_step * (1 - 1e-9))
    return _multiples(step, low, high)


def count_text(number: int) -> str:
    """Return a count in at most six characters."""
    for factor, unit in ((10**9, "G"), (10**6, "M"), (10**4, "k")):
        if number >= factor:
            return f"{number / (1000 if unit == 'k' else factor):.3g}{unit}"
    return f"{number:,}"


def time_text(seconds: float) -> str:
    """Return a time in a suitable unit."""
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        if seconds * factor >= 0.9995:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def size_text(nbytes: float) -> str:
    """Return a size as a tick's label."""
    return format_size(nbytes)
