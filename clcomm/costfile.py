"""The fits that `clcomm tune` keeps for a host: written whole, and read back strictly."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clcomm.cache import cache_directory
from clcomm.costmodel import Cost, Fit, Measured
from clcomm.errors import DataError
from clcomm.files import read_regular, write_whole

FORMAT = 2  # of the file; another number voids the files of old
_MOST_BYTES = 1 << 20
_FIELDS = {"transport", "ranks", "hosts", "sums", "alpha_s", "beta_s_per_byte", "median_error", "max_error", "points"}
_TRANSPORTS, _SUMS = ("shared", "mpi", "hierarchical"), ("device", "numpy")


def path_of_host(host: str | None = None) -> Path:
    """Return where a host's fits are kept; None: this host."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", host or os.uname().nodename).strip(".") or "host"
    return cache_directory() / "communication" / f"{name}.json"


def store(fits: Sequence[Measured], path: Path | None = None) -> Path:
    """Write a host's fits in place of those of old and return where; raises ArgumentError where that can't be done."""
    target = path or path_of_host()
    entries = [
        {
            "transport": each.transport,
            "ranks": each.ranks,
            "hosts": each.hosts,
            "sums": each.sums,
            "alpha_s": each.fit.cost.alpha_s,
            "beta_s_per_byte": each.fit.cost.beta_s_per_byte,
            "median_error": each.fit.median_error,
            "max_error": each.fit.max_error,
            "points": [list(point) for point in each.fit.points],
        }
        for each in fits
    ]
    text = json.dumps({"format": FORMAT, "operation": "all_reduce", "fits": entries}, indent=1, allow_nan=False)
    write_whole(target, text + "\n", "CLCOMM_CACHE_DIR")
    return target


def load(path: Path | None = None) -> list[Measured] | None:
    """Return a host's fits, None where none were stored; raises DataError for a file that is not what `store` wrote."""
    source = path or path_of_host()
    try:
        return parse(read_regular(source, _MOST_BYTES).decode("utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        problem = " ".join(str(getattr(error, "strerror", None) or error).split())[:200]
        raise DataError(f"{source}: {problem}; `clcomm tune` writes it anew") from None


def parse(text: str) -> list[Measured]:
    """Return the fits in a file's text; raises ValueError unless every field is there, known and of its kind."""
    table = json.loads(text, parse_constant=_refuse_constant)
    if not isinstance(table, dict) or table.keys() != {"format", "operation", "fits"}:
        raise ValueError("expected format, operation and fits")
    if type(table["format"]) is not int or table["format"] != FORMAT:
        raise ValueError(f"expected format {FORMAT}")
    if table["operation"] != "all_reduce" or not isinstance(table["fits"], list):
        raise ValueError("expected a list of fits of all_reduce")
    return [_measured(entry) for entry in table["fits"]]


def _measured(entry: Any) -> Measured:
    if not isinstance(entry, dict) or entry.keys() != _FIELDS:
        raise ValueError(f"expected fits with {', '.join(sorted(_FIELDS))}")
    if entry["transport"] not in _TRANSPORTS:
        raise ValueError(f"expected a transport of {', '.join(_TRANSPORTS)}")
    if entry["sums"] not in _SUMS:
        raise ValueError(f"expected sums {' or '.join(_SUMS)}")
    ranks, hosts = _whole(entry, "ranks", 2), _whole(entry, "hosts", 1)
    if hosts > ranks:
        raise ValueError(f"expected at most {ranks} hosts, got {hosts}")
    numbers = [_number(entry[name], name) for name in ("alpha_s", "beta_s_per_byte", "median_error", "max_error")]
    fit = Fit(Cost(numbers[0], numbers[1]), numbers[2], numbers[3], _points(entry["points"]))
    return Measured(entry["transport"], ranks, hosts, fit, entry["sums"])


def _points(value: Any) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, list) or not all(isinstance(point, list) and len(point) == 2 for point in value):
        raise ValueError("expected points of bytes and seconds")
    if not all(type(nbytes) is int and nbytes >= 0 for nbytes, _ in value):
        raise ValueError("expected points of whole bytes")
    return tuple((nbytes, _number(seconds, "points")) for nbytes, seconds in value)


def _whole(entry: dict[str, Any], name: str, least: int) -> int:
    if type(entry[name]) is not int or entry[name] < least:
        raise ValueError(f"{name}: expected a whole number from {least} up")
    return entry[name]


def _number(value: Any, name: str) -> float:
    if type(value) not in (int, float) or not 0 <= value <= sys.float_info.max:
        raise ValueError(f"{name}: expected finite numbers from 0 up")
    return float(value)


def _refuse_constant(text: str) -> float:
    raise ValueError(f"expected finite numbers, got {text}")
