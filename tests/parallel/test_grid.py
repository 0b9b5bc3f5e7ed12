"""The grid of a mesh: sizes, the layout over hosts, and the picture."""

from __future__ import annotations

import itertools
import math
import re

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from clcomm.base.errors import ArgumentError
from clcomm.parallel.mesh import checked_sizes, innermost, layout, picture, spread_groups

NAMES = ("dp", "tp", "pp", "ep")
axes_drawn = st.permutations(NAMES).flatmap(
    lambda names: st.lists(st.integers(1, 4), min_size=1, max_size=4).map(
        lambda sizes: dict(zip(names, sizes, strict=False))
    )
)


def hosts_drawn(ranks: int, data) -> list[list[int]]:
    """Return ranks dealt to some hosts in any order, hosts by their lowest ranks."""
    dealt = data.draw(st.lists(st.integers(0, 2), min_size=ranks, max_size=ranks))
    found = [[rank for rank in range(ranks) if dealt[rank] == host] for host in set(dealt)]
    return sorted(found)


@given(axes_drawn, st.data())
def test_each_rank_has_one_place_and_the_innermost_groups_are_whole_as_far_as_hosts_allow(axes, data):
    ranks = math.prod(axes.values())
    hosts = hosts_drawn(ranks, data)
    grid = layout(axes, hosts)
    assert grid.shape == tuple(axes.values()) and sorted(grid.reshape(-1).tolist()) == list(range(ranks))
    inner = innermost(list(axes))
    assert inner == ("tp" if "tp" in axes else list(axes)[-1])
    host_of = {rank: number for number, host in enumerate(hosts) for rank in host}
    whole = sum(len(host) // axes[inner] for host in hosts)
    assert spread_groups(grid, list(axes).index(inner), host_of) == ranks // axes[inner] - whole


@given(axes_drawn)
def test_on_one_host_ranks_follow_each_other_innermost_first(axes):
    inner = innermost(list(axes))
    grid = layout(axes, [list(range(math.prod(axes.values())))])
    names = list(axes)
    order = [*(name for name in names if name != inner), inner]
    places = itertools.product(*(range(axes[name]) for name in order))
    for rank, place in enumerate(places):
        at = dict(zip(order, place, strict=True))
        assert grid[tuple(at[name] for name in names)] == rank


@given(axes_drawn, st.data())
def test_one_size_may_be_what_remains(axes, data):
    name = data.draw(st.sampled_from(list(axes)))
    assert checked_sizes({**axes, name: -1}, math.prod(axes.values())) == axes


@given(axes_drawn, st.integers(1, 300))
def test_sizes_that_do_not_multiply_to_the_ranks_are_refused_with_the_numbers(axes, ranks):
    product = math.prod(axes.values())
    assume(product != ranks)
    with pytest.raises(ArgumentError, match=f"which is {product}, for {ranks} ranks") as caught:
        checked_sizes(axes, ranks)
    assert all(f"{name}={size}" in str(caught.value) for name, size in axes.items())


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({}, "expected an axis such as dp=8, got none"),
        ({"dp": 0}, "expected sizes from 1 up, or -1 for what remains, got dp=0"),
        ({"dp": -2, "tp": 4}, "expected sizes from 1 up, or -1 for what remains, got dp=-2, tp=4"),
        ({"dp": 2.0, "tp": 4}, "expected sizes from 1 up, or -1 for what remains, got dp=2.0, tp=4"),
        ({"dp": True}, "expected sizes from 1 up, or -1 for what remains, got dp=True"),
        ({"dp": "8"}, "expected sizes from 1 up, or -1 for what remains, got dp='8'"),
        ({"dp": -1, "tp": -1}, "expected one size of -1 at most, got dp=-1, tp=-1"),
        ({"dp": -1, "tp": 3}, "expected sizes that divide the number of ranks, got dp=-1, tp=3 for 8 ranks"),
        ({"d p": 8}, "expected names of letters, digits and _, got 'd p'"),
    ],
)
def test_bad_sizes_are_refused(axes, message):
    with pytest.raises(ArgumentError, match=f"^mesh: {re.escape(message)}$"):
        checked_sizes(axes, 8)


@given(axes_drawn, st.data())
def test_the_picture_shows_every_rank_at_its_coordinates(axes, data):
    hosts = hosts_drawn(math.prod(axes.values()), data)
    host_of = {rank: number for number, host in enumerate(hosts) for rank in host}
    grid = layout(axes, hosts)
    title, head, *rows = picture(axes, grid, host_of).splitlines()
    assert all(f"{name}={size}" in title for name, size in axes.items())
    columns = re.findall(r"(\w+) (\d+)", head)
    found = {}
    for row in rows:
        labels, cells = re.match(r"((?:[a-z]+ \d+ ?)*) *(.*)$", row).groups()
        for (name, at), cell in zip(columns, cells.split(), strict=True):
            place = (
                dict.fromkeys(axes, 0) | {n: int(i) for n, i in re.findall(r"(\w+) (\d+)", labels)} | {name: int(at)}
            )
            found[tuple(place.values())] = cell
    assert len(found) == grid.size
    for place, cell in found.items():
        rank = int(grid[place])
        assert cell == (f"{rank}@{host_of[rank]}" if len(hosts) > 1 else str(rank))


def test_the_picture_of_two_axes():
    assert picture({"dp": 2, "tp": 2, "pp": 1}, np.array([[[0], [1]], [[2], [3]]]), dict.fromkeys(range(4), 0)) == (
        "mesh dp=2 x tp=2 x pp=1: rank\n"
        "      tp 0  tp 1\n"
        "dp 0     0     1\n"
        "dp 1     2     3"
    )  # fmt: skip
