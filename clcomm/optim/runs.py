"""Runs: neighbouring elements of an optimizer's state that a step updates with one launch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from clcomm.engine.parameter import Parameter
from clcomm.optim.flat_state import ITEM, FlatState


class StateRun(NamedTuple):
    """Elements [first, first + length) of the state, in one part of it, of one group that missed as many steps."""

    first: int
    length: int
    missed: int
    part: int
    group: int


def runs_of(state: FlatState, trained: Mapping[Parameter, int], missed: Mapping[Parameter, int]) -> list[StateRun]:
    """Return the runs of the trained parameters.

    Args:
        state: of all parameters.
        trained: the group of each.
        missed: the steps that each was left out of, 0 for others.
    """
    runs: list[StateRun] = []
    places = state.space.layout.ranges
    ends = [*(place.start // ITEM for place in places[1:]), state.span]
    for part, (start, stop, offset) in enumerate(state.parts):
        for place, end, parameter in zip(places, ends, state.space.parameters, strict=True):
            first, last = max(place.start // ITEM, start), min(end, stop)
            if first < last and parameter in trained:
                kind = missed.get(parameter, 0), part, trained[parameter]
                _add(runs, StateRun(first - start + offset, last - first, *kind))
    return runs


def _add(runs: list[StateRun], run: StateRun) -> None:
    """Add a run, to the one before it where that adjoins and is alike."""
    last = runs[-1] if runs else None
    if last is not None and last.first + last.length == run.first and last[2:] == run[2:]:
        runs[-1] = last._replace(length=last.length + run.length)
    else:
        runs.append(run)
