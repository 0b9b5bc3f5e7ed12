"""Colours of slices in chrome://tracing: reserved ones, which readers with any colour vision tell apart."""

from __future__ import annotations

from itertools import combinations

import pytest

from clcomm.insight.trace import events as colours
from tests.colour_vision import APART, distance

#: What chrome://tracing draws for the reserved names that are used here.
RESERVED = {
    colours.COMPUTING: (13, 168, 97), colours.WAITING: (180, 0, 0), colours.MOVING: (0, 0, 255),
    colours.PACKING: (133, 160, 210), colours.DATA: (255, 140, 0), colours.OPTIMIZER: (180, 0, 180),
    colours.AROUND: (221, 221, 221), colours.BACKWARD: (230, 230, 0),
}  # fmt: skip


@pytest.mark.parametrize(("first", "second"), list(combinations(RESERVED, 2)))
def test_kinds_of_slices_differ_for_every_reader(first: str, second: str) -> None:
    assert distance(RESERVED[first], RESERVED[second]) > APART


@pytest.mark.parametrize(
    ("name", "category", "colour"),
    [("wait", "communication", colours.WAITING), ("transfer", "communication", colours.MOVING),
     ("all_reduce bucket 0", "communication", colours.MOVING), ("matmul", "kernel", colours.COMPUTING),
     ("forward_backward", "phase", colours.COMPUTING), ("forward", "phase", colours.COMPUTING),
     ("backward", "phase", colours.BACKWARD), ("pack", "phase", colours.PACKING),
     ("data", "phase", colours.DATA), ("optimizer", "phase", colours.OPTIMIZER), ("step", "phase", colours.AROUND)],
)  # fmt: skip
def test_a_slice_has_the_colour_of_what_it_shows(name: str, category: str, colour: str) -> None:
    assert colours.colour_of(name, category) == colour
