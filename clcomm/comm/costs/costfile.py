"""The file of fits that `clcomm tune` stores for a host, and strict reading of it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from clcomm.base.errors import DataError
from clcomm.base.storage.field_checks import Check, checked_fields, number, refuse_constant, whole
from clcomm.base.storage.files import read_regular, write_whole
from clcomm.base.storage.private import cache_directory
from clcomm.comm.costs.model import Cost, Fit, MeasuredFit

FORMAT = 2  # of the file; files with another number are refused
_MOST_BYTES = 1 << 20
_TRANSPORTS = ("shared", "mpi", "hierarchical")
#: The summing unit in shared memory, in words.
SUMMED_BY = {"device": "each rank's own device", "numpy": "NumPy"}


def path_of_host(host: str | None = None) -> Path:
    """Return the path of a host's fits; None: this host."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", host or os.uname().nodename).strip(".") or "host"
    return cache_directory() / "communication" / f"{name}.json"


def store(fits: Sequence[MeasuredFit], path: Path | None = None) -> Path:
    """Replace a host's fits and return the file's path; raises ArgumentError if it cannot be written."""
    target = path or path_of_host()
    entries = [as_dict(each, _FIELDS) for each in fits]
    text = json.dumps({"format": FORMAT, "operation": "all_reduce", "fits": entries}, indent=1, allow_nan=False)
    write_whole(target, text + "\n", "CLCOMM_CACHE_DIR")
    return target


def as_dict(fit: MeasuredFit, names: Iterable[str]) -> dict[str, object]:
    """Return these fields of a fit and of its parts."""
    known = {**fit._asdict(), **vars(fit.fit), **vars(fit.fit.cost)}
    return {name: known[name] for name in names}


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
    table = json.loads(text, parse_constant=refuse_constant)
    if not isinstance(table, dict) or table.keys() != {"format", "operation", "fits"}:
        raise ValueError("expected format, operation and fits")
    if type(table["format"]) is not int or table["format"] != FORMAT:
        raise ValueError(f"expected format {FORMAT}")
    if table["operation"] != "all_reduce" or not isinstance(table["fits"], list):
        raise ValueError("expected a list of fits of all_reduce")
    return [_measured(entry) for entry in table["fits"]]


def _measured(entry: object) -> MeasuredFit:
    if not isinstance(entry, dict) or entry.keys() != _FIELDS.keys():
        raise ValueError(f"expected fits with {', '.join(sorted(_FIELDS))}")
    each = checked_fields(entry, _FIELDS, "")
    if each["hosts"] > each["ranks"]:
        raise ValueError(f"expected at most {each['ranks']} hosts, got {each['hosts']}")
    cost = Cost(each["alpha_s"], each["beta_s_per_byte"])
    fit = Fit(cost, each["median_error"], each["max_error"], each["points"])
    return MeasuredFit(each["transport"], each["ranks"], each["hosts"], fit, each["sums"])


def _one_of(names: Sequence[str], expected: str) -> Check:
    def check(value: object, name: str) -> str:
        if value not in names:
            raise ValueError(f"expected {expected}")
        return str(value)

    return check


def _points(value: object, name: str) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, list) or not all(isinstance(point, list) and len(point) == 2 for point in value):
        raise ValueError("expected points of bytes and seconds")
    if not all(type(nbytes) is int and nbytes >= 0 for nbytes, _ in value):
        raise ValueError("expected points of whole bytes")
    return tuple((nbytes, number(seconds, name)) for nbytes, seconds in value)


_FIELDS: dict[str, Check] = {
    "transport": _one_of(_TRANSPORTS, f"a transport of {', '.join(_TRANSPORTS)}"), "ranks": whole(2),
    "hosts": whole(1), "sums": _one_of(tuple(SUMMED_BY), f"sums {' or '.join(SUMMED_BY)}"), "alpha_s": number,
    "beta_s_per_byte": number, "median_error": number, "max_error": number, "points": _points,
}  # fmt: skip
