"""Parsing and formatting of sizes such as "4MiB", and of numbers in messages."""

from __future__ import annotations

import re
from fractions import Fraction
from numbers import Integral

from clcomm.base.errors import ArgumentError

_FACTORS = {
    "": 1, "b": 1,
    "k": 1 << 10, "kib": 1 << 10, "kb": 10**3,
    "m": 1 << 20, "mib": 1 << 20, "mb": 10**6,
    "g": 1 << 30, "gib": 1 << 30, "gb": 10**9,
}  # fmt: skip
_SIZE = re.compile(r"\s*([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([a-zA-Z]*)\s*")


def parse_size(value: int | str, name: str = "bucket_size") -> int:
    """Return a size in bytes from an integer or from text such as "4MiB", "64 kB" or "1048576".

    KiB, MiB, GiB (and the bare letters K, M, G) are powers of 1024; kB, MB, GB are powers of 1000.
    Raises ArgumentError, with `name`, for a size that is not a whole, positive number of bytes.
    """
    if isinstance(value, Integral) and not isinstance(value, bool):
        nbytes = Fraction(int(value))
    else:
        nbytes = _parse_text(value, name)
    if nbytes < 1 or nbytes != int(nbytes):
        raise _size_error(name, value)
    return int(nbytes)


def _parse_text(value: object, name: str) -> Fraction:
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None or match[2].lower() not in _FACTORS:
        raise _size_error(name, value)
    return Fraction(match[1]) * _FACTORS[match[2].lower()]


def _size_error(name: str, value: object) -> ArgumentError:
    return ArgumentError(
        f"{name}: expected a positive number of bytes such as 1048576, '1MiB' or '256KiB', got {value!r}"
    )


def format_size(nbytes: float) -> str:
    """Return a size as text, with about three digits, in powers of 1024."""
    for unit in ("B", "KiB", "MiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" or nbytes == int(nbytes) else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} GiB"


def format_number(value: float, places: int = 0) -> str:
    """Return a number as text, with `places` decimal places, or more for 3 significant digits."""
    if value == 0 or abs(value) >= 10 ** (2 - places):
        return f"{value:,.{places}f}" if value else "0"
    return f"{value:.3g}"
