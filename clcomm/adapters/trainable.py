"""What is trained stays what it was at the first synchronisation: only that has a place in the flat space."""

from __future__ import annotations

from collections.abc import Iterable

from clcomm.errors import ArgumentError

_REMEDY = "make a new Synchronizer after freezing or unfreezing"


def require_same_trainable(now: Iterable[str], before: Iterable[str], remedy: str = _REMEDY) -> None:
    """Raise ArgumentError where other parameters need gradients now than did before, by their names."""
    changed = sorted(set(now) ^ set(before))
    if changed:
        raise ArgumentError(
            f"parameter {changed[0]!r}: expected requires_grad to stay as it was at the first synchronisation, "
            f"got it changed; {remedy}"
        )
