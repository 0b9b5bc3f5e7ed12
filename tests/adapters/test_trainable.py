"""Checks of a model's parameters: every addition, removal and replacement is an error that names the parameter."""

from __future__ import annotations

import numpy as np
import pytest

from clcomm.base.errors import ArgumentError
from clcomm.base.flat_space.layout import require_same_parameters, require_same_trainable
from tests.helpers import one_line

NAMES = [f"layer{number}.weight" for number in range(6)]


@pytest.mark.parametrize("seed", range(60))
def test_parameters_that_change_are_named(seed: int) -> None:
    rng = np.random.default_rng(seed)
    before = {name: object() for name in NAMES if rng.random() < 0.7}
    now, changes = {}, {}
    for name in NAMES:
        fate = (
            rng.choice(["kept", "kept", "replaced", "removed"]) if name in before else rng.choice(["absent", "added"])
        )
        if fate in ("kept", "replaced", "added"):
            now[name] = before[name] if fate == "kept" else object()
        if fate in ("replaced", "removed", "added"):
            changes[name] = fate
    if not changes:
        require_same_parameters(now, before)
        return
    with pytest.raises(ArgumentError) as caught:
        require_same_parameters(now, before, expected="the old one", remedy="do this")
    first = next(name for name in [*before, *now] if name in changes)
    wanted, got = {"replaced": ("the old one", "another"), "removed": ("the old one", "none"),
                   "added": ("none", "a new one")}[changes[first]]  # fmt: skip
    assert one_line(caught) == f"parameter {first!r}: expected {wanted}, got {got} in its place; do this"


@pytest.mark.parametrize("seed", range(40))
def test_parameters_that_are_frozen_or_unfrozen_are_named(seed: int) -> None:
    rng = np.random.default_rng(seed)
    before, now = ([name for name in rng.permutation(NAMES).tolist() if rng.random() < 0.8] for _ in range(2))
    if seed % 4 == 0:
        now = before[::-1]  # the order does not count
    changed = sorted(set(before) ^ set(now))
    if not changed:
        require_same_trainable(now, before)
        return
    with pytest.raises(ArgumentError) as caught:
        require_same_trainable(iter(now), iter(before), "do that")
    assert one_line(caught).startswith(f"parameter {changed[0]!r}: expected requires_grad to stay")
    assert one_line(caught).endswith("; do that")
