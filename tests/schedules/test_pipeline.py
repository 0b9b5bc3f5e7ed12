"""Pipeline schedules: complete, without deadlock at any speed, with the formula's bubble and few activations."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clcomm.base.errors import ArgumentError
from clcomm.base.schedules.pipeline import (
    GPIPE,
    INTERLEAVED,
    ONE_F_ONE_B,
    SCHEDULES,
    Action,
    PipelineSchedule,
    Slots,
    pipeline_schedule,
)
from tests.helpers import one_line


@st.composite
def schedules(draw) -> PipelineSchedule:
    name, ranks = draw(st.sampled_from(SCHEDULES)), draw(st.integers(1, 8))
    micro_batches = draw(st.integers(1, 20)) if name != INTERLEAVED else ranks * draw(st.integers(1, 4))
    return pipeline_schedule(name, ranks, micro_batches, draw(st.integers(2, 4)) if name == INTERLEAVED else 1)


@given(schedules())
def test_each_rank_runs_every_action_of_its_stages_once_and_micro_batches_in_order(schedule):
    for rank, actions in enumerate(schedule.actions):
        stages = range(rank, schedule.stages, schedule.ranks)
        assert len(actions) == len(set(actions))
        for stage, is_forward in itertools.product(stages, (True, False)):
            mine = [each.micro_batch for each in actions if (each.stage, each.is_forward) == (stage, is_forward)]
            assert mine == list(range(schedule.micro_batches))  # so that a channel's slots are used in turn
        assert {each.stage for each in actions} == set(stages)
        assert all(actions.index(Action(*each[:2], True)) < actions.index(each) for each in actions if not each[2])


@given(schedules(), st.sampled_from([(1.0, 1.0), (1.0, 2.0), (3.0, 2.0)]))
def test_stages_of_equal_work_idle_for_the_share_of_the_formula(schedule, times):
    table = schedule.timetable(lambda action: times[0] if action.is_forward else times[1])
    assert schedule.idle_share(table) == pytest.approx(schedule.bubble)
    with_slots = schedule.timetable(lambda action: times[0] if action.is_forward else times[1], schedule.slots)
    assert schedule.idle_share(with_slots) == pytest.approx(schedule.bubble)


@given(schedules(), st.randoms(use_true_random=False))
def test_ranks_of_any_speed_never_wait_for_each_other_for_ever(schedule, random):
    seconds = {action: random.uniform(0.01, 1) ** 3 for actions in schedule.actions for action in actions}
    table = schedule.timetable(seconds.__getitem__, schedule.slots)
    assert table.keys() == seconds.keys()
    for action, turn in table.items():
        assert all(table[needed].end <= turn.begin for needed in schedule.needs(action))
        assert turn.end - turn.begin == pytest.approx(seconds[action])
    for actions in schedule.actions:
        assert all(table[a].end <= table[b].begin for a, b in itertools.pairwise(actions))


def test_too_few_slots_are_found():
    schedule = pipeline_schedule(GPIPE, 2, 4)
    with pytest.raises(ArgumentError, match="every rank waits for another"):
        schedule.timetable(lambda action: 1.0, dict.fromkeys(range(2), Slots(2, 2)))


@given(st.integers(1, 8), st.integers(1, 20))
def test_one_f_one_b_keeps_the_activations_of_fewer_micro_batches(ranks, micro_batches):
    all_first, alternating = (pipeline_schedule(name, ranks, micro_batches) for name in (GPIPE, ONE_F_ONE_B))
    for rank in range(ranks):
        assert all_first.most_alive(rank) == micro_batches
        assert alternating.most_alive(rank) == min(micro_batches, ranks - rank)
        assert alternating.slots[rank].activations <= max(2, min(micro_batches, ranks - rank + 1))


def test_the_drawing_shows_who_runs_what_when():
    assert pipeline_schedule(ONE_F_ONE_B, 3, 3).drawing() == (
        "rank 0  F0 F1 F2 .  .  B0 .  B1 .  B2\n"
        "rank 1  .  F0 F1 .  B0 F2 B1 .  B2 .\n"
        "rank 2  .  .  F0 B0 F1 B1 F2 B2 .  ."
    )
    assert pipeline_schedule(INTERLEAVED, 2, 2, 2).drawing() == (
        "rank 0  F0a F1a F0b F1b .   B0b .   B1b B0a B1a\nrank 1  .   F0a F1a F0b B0b F1b B1b B0a B1a ."
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("zigzag", 2, 4), "schedule: expected one of gpipe, 1f1b, interleaved, got 'zigzag'"),
        (("1f1b", 2, 0), "micro_batches: expected a whole number of at least 1, got 0"),
        (("1f1b", 2, 2.0), "micro_batches: expected a whole number of at least 1, got 2.0"),
        (("gpipe", 2, 4, True), "chunks: expected a whole number of at least 1, got True"),
        (("gpipe", 2, 4, 2), "chunks: expected 1 with schedule gpipe, got 2"),
        (("interleaved", 2, 4, 1), "chunks: expected 2 or more stages a rank with schedule interleaved, got 1"),
        (("interleaved", 4, 6, 2), "micro_batches: expected a multiple of 4 ranks with schedule interleaved, got 6"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(given, message):
    with pytest.raises(ArgumentError) as caught:
        pipeline_schedule(*given)
    assert one_line(caught).startswith(message)
