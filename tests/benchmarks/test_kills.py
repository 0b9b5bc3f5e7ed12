"""The figures of `benchmarks.kills` from events, and both kinds of ranks' state."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch
from torch.nn.functional import cross_entropy

from benchmarks.kills import clcomm_rank, sides, task
from benchmarks.kills.outcome import Outcome, percentile
from benchmarks.kills.task import ENDS, STEP, STEP_SAMPLES, Event, Events, Task


def steps(*given: tuple[float, int], rank: int = 0, samples: int = STEP_SAMPLES) -> list[Event]:
    return [Event(at_s, rank, 1, STEP, step, samples, "-") for at_s, step in given]


def test_a_kill_costs_what_is_not_spent_on_new_steps():
    before = steps((10.0, 1), (11.0, 2), (12.0, 3))
    again = steps((14.0, 3), (15.0, 4), (16.0, 5), (17.0, 6), rank=1)  # step 3 once more, from a copy of step 2
    found = Outcome.of([*before, *again, Event(17.1, 1, 1, ENDS, 6, 0, "a")], [12.5])
    assert found.next_step_s == [2.5], "step 3 was done before"
    assert found.lost_s == [pytest.approx(17.0 - 12.5 - 3)]
    assert (found.steps, found.lost_samples, found.samples, found.digests) == (6, 0, 6 * STEP_SAMPLES, {"a"})


def test_each_kill_has_the_time_until_the_next():
    events = steps(*((float(step), step) for step in range(1, 5)), (9.0, 5), (10.0, 6), (15.0, 7))
    found = Outcome.of(events, [4.0, 10.5])
    assert found.next_step_s == [5.0, 4.5] and found.lost_s == pytest.approx([6.5 - 2, 4.5 - 1])


def test_samples_are_lost_that_no_rank_has_contributed():
    full, half = steps((1.0, 1), (2.0, 2)), steps((3.0, 3), rank=1, samples=STEP_SAMPLES // 2)
    seen_by_two = steps((4.0, 4), rank=0, samples=STEP_SAMPLES // 4) + steps((4.0, 4), rank=1)
    assert Outcome.of([*full, *half, *seen_by_two], [2.5]).lost_samples == STEP_SAMPLES // 2


def test_the_moments_of_kills_follow_from_the_seed():
    first, again, other = (list(itertools.islice(sides.drawn_kills(seed, 15.0, 4), 200)) for seed in (1, 1, 2))
    assert first == again != other
    assert all(7.5 <= distance_s <= 22.5 for distance_s, _ in first) and {rank for _, rank in first} == {0, 1, 2, 3}


def test_percentiles_of_few_values():
    assert (percentile([], 95), percentile([3.0], 95), percentile([1.0, 3.0], 50)) == (0.0, 3.0, 2.0)


def test_events_are_read_as_they_were_written(tmp_path: Path):
    given, written = Task(tmp_path, 7, 0.5), task.Written(tmp_path)
    assert written.look().events == [] and given.words() == [str(tmp_path), "7", "0.5"]
    for rank in range(2):
        Events(given, rank).note(STEP, 3, 64, "abc")
    with open(tmp_path / task.EVENTS, "a") as file:
        file.write("12.5 0 77 st")
        file.flush()
        assert [each[1:] for each in written.look().events] == [
            (rank, os.getpid(), STEP, 3, 64, "abc") for rank in (0, 1)
        ]
        file.write("ep 4 64 -\n")
    assert written.look().events[2:] == [(12.5, 0, 77, STEP, 4, 64, "-")]
    assert written.counts == {STEP: 3} and written.stepping == {0: 77, 1: os.getpid()}
    assert len(written.look().events) == 3


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> str:
    for step in steps:
        inputs, targets = task.batch(step, range(task.SHARDS))
        cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return task.digest(model, optimizer)


def test_a_copied_state_goes_on_with_the_same_bits():
    model = task.network()
    optimizer = task.adam(model)
    train(model, optimizer, range(2))
    copy = task.state_of(model, optimizer)
    expected = train(model, optimizer, range(2, 4))
    other = task.network()
    others = task.adam(other)
    clcomm_rank.load(copy, other, others)
    assert train(other, others, range(2, 4)) == expected != train(other, others, range(4, 5))
