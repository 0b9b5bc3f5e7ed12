"""The file of fits that `clcomm tune` stores for a host, and strict reading of it."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clcomm.costs.model import Cost, Fit, MeasuredFit
from clcomm.errors import DataError
from clcomm.storage.cache import cache_directory
from clcomm.storage.files import read_regular, write_whole

FORMAT = 2  # of the file; files with another number are refused
_MOST_BYTES = 1 << 20
_FIELDS = {"transport", "ranks", "hosts", "sums", "alpha_s", "beta_s_per_byte", "median_error", "max_error", "points"}
_TRANSPORTS, _SUMS = ("shared", "mpi", "hierarchical"), ("device", "numpy")


def path_of_host(host: str | None = None) -> Path:
    """Return the path of a host's fits; None: this host."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", host or os.uname().nodename).strip(".") or "host"
    return cache_directory() / "communication" / f"{name}.json"


def store(fits: Sequence[MeasuredFit], path: Path | None = None) -> Path:
    """Replace a host's fits and return the file's path; raises ArgumentError if it cannot be written."""
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


def load(path: Path | None = None) -> list[MeasuredFit] | None:
    """Return a host's fits, None if none are stored; raises DataError for a file that `store` did not write."""
    source = path or path_of_host()
    try:
        return parse(read_regular(source, _MOST_BYTES).decode("utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        problem = " ".join(str(getattr(error, "strerror", None) or error).split())[:200]
        raise DataError(f"{source}: {problem}; `clcomm tune` writes it again") from None


def parse(text: str) -> list[MeasuredFit]:
    """Return the fits in a file's text; raises ValueError for missing, unknown or invalid fields."""
    table = json.loads(text, parse_constant=_refuse_constant)
    if not isinstance(table, dict) or table.keys() != {"format", "operation", "fits"}:
        raise ValueError("expected format, operation and fits")
    if type(table["format"]) is not int or table["format"] != FORMAT:
        raise ValueError(f"expected format {FORMAT}")
    if table["operation"] != "all_reduce" or not isinstance(table["fits"], list):
        raise ValueError("expected a list of fits of all_reduce")
    return [_measured(entry) for entry in table["fits"]]


def _measured(entry: Any) -> MeasuredFit:
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
    return MeasuredFit(entry["transport"], ranks, hosts, fit, entry["sums"])


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
