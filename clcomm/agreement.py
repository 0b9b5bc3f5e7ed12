"""What ranks have to have in common: compared by hashes, and named where it differs, on every rank alike."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from clcomm.communicator import Communicator
from clcomm.errors import MismatchError

#: The label under which the Communicator's stats count comparisons.
CHECKS = "checks"


def require_agreement(comm: Communicator, what: str, lines: Sequence[str], remedy: str) -> None:
    """Raise the same MismatchError on every rank unless all ranks bring the same lines; collective."""
    own = np.frombuffer(digest("\n".join(lines).encode()), np.uint8)
    if all_alike(comm.all_gather(own, label=CHECKS)):
        return
    everyone = comm.all_gather_object(list(lines), label=CHECKS)
    raise MismatchError(f"{what}: {_first_difference(everyone)}; {remedy}")


def _first_difference(everyone: list[list[str]]) -> str:
    longest = max(len(lines) for lines in everyone)
    for index in range(longest):
        values = [lines[index] if index < len(lines) else "nothing" for lines in everyone]
        if len(set(values)) > 1:
            sides = [f"{value!r} on {_ranks(values, value)}" for value in dict.fromkeys(values)]
            return f"expected the same on every rank, but entry {index} is {', '.join(sides)}"
    return "expected the same on every rank"


def _ranks(values: list[str], value: str) -> str:
    return named_ranks([rank for rank, theirs in enumerate(values) if theirs == value])


def named_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 1" or "ranks 0, 2"."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def digest(data: Any) -> bytes:
    """Return 16 bytes that stand for the bits of an array or a byte string."""
    if isinstance(data, np.ndarray):
        data = data.reshape(-1).view(np.uint8).data
    return hashlib.blake2b(data, digest_size=16).digest()


def all_alike(rows: np.ndarray) -> bool:
    """Say whether all ranks' rows are the same."""
    return bool((rows == rows[0]).all())
