"""Agreement between ranks: settings are compared by hashes, and where they differ every rank raises the same error."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from clcomm.base.errors import MismatchError
from clcomm.comm.collectives.runner import refused_on_all
from clcomm.comm.communicator import Communicator

#: The label under which the Communicator's stats count comparisons.
CHECKS = "checks"
#: Lets a mistake of one rank be raised on all ranks of the first argument's Communicator.
refused = partial(refused_on_all, runner_of=lambda of, *_, **__: of.comm.runner)
#: So many changes of optimizers' settings are compared one by one, and later ones together.
_FIRST_CHANGES = 16


def require_agreement(
    comm: Communicator, what: str, lines: Sequence[str], remedy: str, beside: str = "", label: str = CHECKS
) -> bool:
    """Raise the same MismatchError on every rank unless all ranks pass the same lines; collective.

    Args:
        what: subject of the message.
        lines: this rank's settings, one a line.
        remedy: end of the message: what to do.
        beside: this rank's further setting, in which ranks may differ.
        label: names the comparison where other ranks are elsewhere.

    Returns whether all ranks pass the same `beside`.
    """
    own = np.frombuffer(digest("\n".join([*lines, beside]).encode()), np.uint8)
    if all_alike(comm.all_gather(own, label=label)):
        return True
    everyone = comm.all_gather_object(list(lines), label=CHECKS)
    if all(theirs == everyone[0] for theirs in everyone):
        return False
    raise MismatchError(f"{what}: {_first_difference(everyone, comm.name_ranks)}; {remedy}")


class SettingsAgreement:
    """Compares what ranks' optimizers step with where that is new: at the first changes, then at every 16th."""

    def __init__(self) -> None:
        self._seen, self._changes = list[str](), 0

    def compare(self, comm: Communicator, new: dict[object, str]) -> None:
        """Take new settings; MismatchError on every rank where they differ; collective.

        A rank alone with a new setting is in another collective than the others, which all ranks raise.
        """
        if not new:
            return
        self._seen += new.values()
        new.clear()
        self._changes += 1
        if self._changes <= _FIRST_CHANGES or not self._changes % _FIRST_CHANGES:
            seen, self._seen = self._seen, []
            remedy = "set learning rates by what all ranks know, such as a loss that was all-reduced"
            require_agreement(comm, "optimizer", seen, remedy, label="new settings of an optimizer")


def _first_difference(everyone: list[list[str]], name_of: Callable[[Sequence[int]], str]) -> str:
    longest = max(len(lines) for lines in everyone)
    for index in range(longest):
        values = [lines[index] if index < len(lines) else "nothing" for lines in everyone]
        if len(set(values)) > 1:
            sides = [f"{value!r} on {name_of(_ranks_with(value, values))}" for value in dict.fromkeys(values)]
            return f"expected the same on every rank, but entry {index} is {', '.join(sides)}"
    return "expected the same on every rank"


def _ranks_with(value: str, values: list[str]) -> list[int]:
    return [rank for rank, theirs in enumerate(values) if theirs == value]


def digest(data: Any) -> bytes:
    """Return a hash of 16 bytes of an array's bits or of a byte string."""
    if isinstance(data, np.ndarray):
        data = data.reshape(-1).view(np.uint8).data
    return hashlib.blake2b(data, digest_size=16).digest()


def all_alike(rows: np.ndarray) -> bool:
    """Return whether all ranks' rows are the same."""
    return bool((rows == rows[0]).all())
