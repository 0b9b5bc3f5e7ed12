"""Where layers are cut: every cut has all stages, none empty, and the cheapest possible most expensive one."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clcomm.base.errors import ArgumentError
from clcomm.parallel.pipeline import plan
from tests.helpers import one_line


def stages_of(starts: list[int], layers: int) -> list[range]:
    return [range(a, b) for a, b in itertools.pairwise([*starts, layers])]


@given(st.lists(st.booleans(), max_size=30), st.integers(1, 8))
def test_stages_have_equally_many_layers_with_parameters(has_parameters, stages):
    if sum(has_parameters) < stages:
        with pytest.raises(ArgumentError, match=f"got {stages} stages"):
            plan.cut_by_number(has_parameters, stages)
        return
    found = stages_of(plan.cut_by_number(has_parameters, stages), len(has_parameters))
    counts = [sum(has_parameters[layer] for layer in stage) for stage in found]
    assert len(found) == stages and sum(counts) == sum(has_parameters)
    assert max(counts) - min(counts) <= 1
    assert all(has_parameters[stage[0]] for stage in found[1:])


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.integers(1, 5))
def test_the_most_expensive_stage_is_as_cheap_as_possible(costs, stages):
    if len(costs) < stages:
        with pytest.raises(ArgumentError, match=f"{len(costs)} layers, got {stages} stages"):
            plan.cut_by_cost(costs, stages)
        return

    def most(starts):
        return max(sum(costs[layer] for layer in stage) for stage in stages_of(starts, len(costs)))

    found = plan.cut_by_cost(costs, stages)
    assert found == plan.checked_cut(found, len(costs), stages)
    every = itertools.combinations(range(1, len(costs)), stages - 1)
    assert most(found) == min(most([0, *starts]) for starts in every)


@pytest.mark.parametrize("costs", [[1.0, -1.0], [float("nan"), 1.0], [float("inf"), 1.0], ["1", 2], [True, 1]])
def test_costs_are_numbers(costs):
    with pytest.raises(ArgumentError, match="costs: expected numbers from 0 up"):
        plan.cut_by_cost(costs, 2)


@pytest.mark.parametrize("starts", [[], [0], [1, 2, 3], [0, 2, 2], [0, 3, 2], [0, 2, 5], [0, 1, 2, 3], [0, 1.0, 2]])
def test_what_is_no_cut_is_refused_with_the_numbers(starts):
    with pytest.raises(ArgumentError) as caught:
        plan.checked_cut(starts, 5, 3)
    assert one_line(caught) == (
        f"cut: expected the first layer of each of 3 stages, from 0 and growing, below 5, got {starts}"
    )
