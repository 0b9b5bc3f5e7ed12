"""Schedules: every rank ends with the same sum, and messages and bytes are those of the formulas, on 1 to 33 ranks."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clcomm.base.errors import ArgumentError
from clcomm.base.schedules import ALGORITHMS, Schedule, schedule_of
from clcomm.comm.costs.forecast import Traffic, traffic
from clcomm.comm.costs.model import terms

RANKS = range(1, 34)


def simulated(schedule: Schedule, arrays: list[np.ndarray]) -> list[np.ndarray]:
    """Return all ranks' arrays after the schedule; a round's messages hold what was there before it."""
    now = [array.copy() for array in arrays]
    bounds = schedule.bounds(arrays[0].size)
    for messages in schedule.rounds:
        before = [array.copy() for array in now]
        for each in messages:
            part = slice(bounds[each.first], bounds[each.last])
            if each.adds:
                now[each.receiver][part] += before[each.sender][part]
            else:
                now[each.receiver][part] = before[each.sender][part]
    return now


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("ranks", RANKS)
def test_every_rank_ends_with_the_sum_of_all(algorithm, ranks):
    schedule = schedule_of(algorithm, ranks)
    for size in (0, 1, ranks - 1, ranks, 3 * ranks + 2, 1000):
        # Each rank's number is a digit of its own, so that a value counted twice or left out shows.
        arrays = [np.full(size, 1 << rank, np.int64) * np.arange(1, size + 1) for rank in range(ranks)]
        expected = sum(arrays[1:], arrays[0])
        assert all(np.array_equal(result, expected) for result in simulated(schedule, arrays))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("ranks", RANKS)
def test_messages_and_bytes_equal_the_formula(algorithm, ranks):
    schedule, expected = schedule_of(algorithm, ranks), traffic(algorithm, ranks)
    assert (len(schedule.rounds), schedule.messages) == (expected.rounds, expected.messages)
    for size in (0, 1, 5, ranks, 1001):
        assert schedule.elements(size) == expected.volume * size


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("ranks", RANKS)
def test_time_follows_from_what_the_busiest_rank_sends_or_receives(algorithm, ranks):
    """A rank sends and receives one message at a time: `terms` of the cost model."""
    schedule = schedule_of(algorithm, ranks)
    size = 1 << 10 if algorithm == "halving" else 2 * ranks  # all blocks equal
    bounds, latencies, elements = schedule.bounds(size), 0, 0
    for messages in schedule.rounds:
        busy = [[each for each in messages if rank in (each.sender, each.receiver)] for rank in range(ranks)]
        counts = [[each for each in its if each.sender == rank] for rank, its in enumerate(busy)]
        counts += [[each for each in its if each.receiver == rank] for rank, its in enumerate(busy)]
        latencies += max(map(len, counts))
        elements += max(sum(bounds[each.last] - bounds[each.first] for each in its) for its in counts)
    expected = terms("all_reduce", algorithm, ranks)
    assert latencies == expected.rounds and elements == pytest.approx(expected.volume * size)


@given(st.sampled_from(list(ALGORITHMS)), st.integers(2, 40))
def test_no_rank_sends_to_itself_and_no_block_arrives_twice_at_once_but_to_be_added(algorithm, ranks):
    schedule = schedule_of(algorithm, ranks)
    for messages in schedule.rounds:
        for each in messages:
            assert each.sender != each.receiver and 0 <= each.first < each.last <= schedule.blocks
            assert min(each[:2]) >= 0 and max(each[:2]) < ranks
        for rank in range(ranks):
            received = [each for each in messages if each.receiver == rank]
            assert len({(each.first, each.last, each.adds) for each in received}) <= 1
            assert len(received) <= 1 or all(each.adds for each in received)


@given(st.sampled_from(list(ALGORITHMS)), st.integers(1, 20))
def test_the_drawing_shows_every_message(algorithm, ranks):
    schedule = schedule_of(algorithm, ranks)
    head, *rows = schedule.drawing().splitlines()
    assert head.split() == ["round", *(word for rank in range(ranks) for word in ("rank", str(rank)))]
    assert len(rows) == len(schedule.rounds)
    for number, (row, messages) in enumerate(zip(rows, schedule.rounds, strict=True), 1):
        cells = re.split(r"  +", row.strip())
        assert cells[0] == str(number) and len(cells) == ranks + 1
        assert sum(cell.count(",") + 1 for cell in cells[1:] if cell != ".") == len(messages)


def test_the_drawing_of_a_ring():
    assert schedule_of("ring", 3).drawing() == (
        "round  rank 0    rank 1    rank 2\n"
        "    1  b0 > 1 +  b1 > 2 +  b2 > 0 +\n"
        "    2  b2 > 1 +  b0 > 2 +  b1 > 0 +\n"
        "    3  b1 > 1    b2 > 2    b0 > 0\n"
        "    4  b0 > 1    b1 > 2    b2 > 0"
    )  # fmt: skip


@pytest.mark.parametrize("make", [schedule_of, traffic])
def test_bad_arguments_are_refused(make):
    with pytest.raises(ArgumentError, match=r"^algorithm: expected one of ring, halving, tree, direct, got 'star'$"):
        make("star", 4)
    with pytest.raises(ArgumentError, match=r"^ranks: expected a number from 1 up, got 0$"):
        make("ring", 0)


def test_the_formulas_at_a_few_sizes():
    """Worked out by hand."""
    assert traffic("ring", 4) == Traffic(6, 24, 6) and traffic("halving", 4) == Traffic(4, 16, 6)
    assert traffic("halving", 5) == Traffic(6, 18, 8) and traffic("halving", 7) == Traffic(6, 22, 12)
    assert traffic("tree", 5) == Traffic(6, 8, 8) and traffic("direct", 3) == Traffic(1, 6, 6)
