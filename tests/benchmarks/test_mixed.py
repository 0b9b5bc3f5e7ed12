"""Mixed jobs: how the sides' batches are chosen, and that replicas are compared."""

from __future__ import annotations

from argparse import Namespace
from types import SimpleNamespace

import pytest

from benchmarks.mixed import Side, shares
from clcomm.base.errors import ArgumentError


class Steady:
    """A side of a constant speed."""

    def __init__(self, speed: float):
        self.speed = speed

    def settle(self, window_s: float) -> None:
        pass

    def rate(self) -> float:
        return self.speed


@pytest.mark.parametrize("speeds, batches", [((300, 100), [96, 32]), ((1, 1), [64, 64]), ((1, 10000), [1, 128])])
def test_batches_are_in_proportion_to_speeds_and_never_empty(speeds, batches):
    assert shares([Steady(each) for each in speeds], Namespace(window_s=0.1, batch=64)) == batches


@pytest.mark.parametrize("hashes", [["a", "a"], ["a", "b"]])
def test_replicas_that_differ_are_an_error(hashes):
    side = object.__new__(Side)
    side.job = SimpleNamespace(ask=lambda **request: [{"hash": each} for each in hashes])
    if len(set(hashes)) == 1:
        side.require_alike()
        return
    with pytest.raises(ArgumentError, match="replicas: expected the same hash on every rank"):
        side.require_alike()
