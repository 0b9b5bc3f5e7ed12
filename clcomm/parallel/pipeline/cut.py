"""Cuts of a list of layers into stages: arithmetic, without models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from numbers import Integral, Real

from clcomm.errors import ArgumentError


def require_enough(layers: int, stages: int, chunks: int = 1, kind: str = "layers") -> None:
    """Raise ArgumentError, with the numbers, where there are more stages than layers."""
    if layers < stages:
        product = f" ({stages // chunks} ranks x {chunks} chunks)" if chunks > 1 else ""
        raise ArgumentError(f"stages: expected at most one for each of {layers} {kind}, got {stages} stages{product}")


def by_number(has_parameters: Sequence[bool], stages: int, chunks: int = 1) -> list[int]:
    """Return each stage's first layer, with layers with parameters divided evenly; others follow theirs."""
    counted = [number for number, has in enumerate(has_parameters) if has]
    require_enough(len(counted), stages, chunks, "layers with parameters")
    return [0, *(counted[-(-len(counted) * stage // stages)] for stage in range(1, stages))]


def by_cost(costs: Sequence[float], stages: int) -> list[int]:
    """Return each stage's first layer, minimising the largest cost; ArgumentError for costs below 0."""
    if any(isinstance(cost, bool) or not isinstance(cost, Real) or not 0 <= cost < math.inf for cost in costs):
        raise ArgumentError(f"costs: expected numbers from 0 up, got {list(costs)}")
    layers = len(costs)
    require_enough(layers, stages)
    sums = [0.0, *accumulate(float(cost) for cost in costs)]
    # most[n]: the highest cost of a stage where the first n layers are cut into the stages so far
    most, cuts = [sums[n] if n else math.inf for n in range(layers + 1)], []
    for stage in range(1, stages):
        begins = [0] * (layers + 1)
        following = [math.inf] * (layers + 1)
        for end in range(stage + 1, layers + 1):
            for begin in range(stage, end):
                cost = max(most[begin], sums[end] - sums[begin])
                if cost < following[end]:
                    following[end], begins[end] = cost, begin
        most = following
        cuts.append(begins)
    starts, end = [], layers
    for begins in reversed(cuts):
        end = begins[end]
        starts.append(end)
    return [0, *reversed(starts)]


def checked(starts: Sequence[int], layers: int, stages: int) -> list[int]:
    """Return the first layer of each stage as given by the user; ArgumentError for an invalid cut."""
    found = list(starts)
    is_cut = len(found) == stages and all(isinstance(at, Integral) and not isinstance(at, bool) for at in found)
    if not is_cut or found[0] != 0 or any(a >= b for a, b in pairwise([*found, layers])):
        raise ArgumentError(
            f"cut: expected the first layer of each of {stages} stages, from 0 and growing, below {layers}, got {found}"
        )
    return [int(at) for at in found]
