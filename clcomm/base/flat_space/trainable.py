"""Checks that a model's trained parameters remain those laid out in the flat space."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from clcomm.base.errors import ArgumentError

_REMEDY = "make a new Synchronizer after freezing or unfreezing"
_REPLACED_REMEDY = "make a new Synchronizer (and optimizer) after load_state_dict(assign=True) or replacing a layer"


def require_same_trainable(now: Iterable[str], before: Iterable[str], remedy: str = _REMEDY) -> None:
    """Raise ArgumentError where the set of names that need gradients has changed."""
    changed = sorted(set(now) ^ set(before))
    if changed:
        raise ArgumentError(
            f"parameter {changed[0]!r}: expected requires_grad to stay as it was at the first synchronisation, "
            f"got it changed; {remedy}"
        )


def require_same_parameters(
    now: Mapping[str, object],
    before: Mapping[str, object],
    expected: str = "the tensor of the first synchronisation",
    remedy: str = _REPLACED_REMEDY,
) -> None:
    """Raise ArgumentError where parameters were added, removed or replaced; expected: describes one of `before`."""
    for name in [*before, *now]:
        if now.get(name) is not before.get(name):
            got = "none" if name not in now else "another" if name in before else "a new one"
            wanted = expected if name in before else "none"
            raise ArgumentError(f"parameter {name!r}: expected {wanted}, got {got} in its place; {remedy}")
