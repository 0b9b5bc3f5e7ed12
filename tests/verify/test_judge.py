"""The judgement of made-up records: each mistake by its cause and first parameter, nothing of what is right."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest

from clcomm.base.console.finding import NOTE, PROBLEM
from clcomm.tools.verify.job import JobRecord
from clcomm.tools.verify.judge import judge, refusal
from clcomm.tools.verify.record import (
    BACKWARD,
    FORWARD,
    SKETCH,
    STEP,
    SYNC,
    Batch,
    Progress,
    RankRecord,
    Step,
    hash_of,
    read,
    read_progress,
    sketch_of,
)
from clcomm.tools.verify.watcher import CAUSES

NAMES = {"first.weight": 6, "first.bias": 3, "last.weight": 4}
RANKS, STEPS = 3, 4


def records(seed: int = 0) -> list[RankRecord]:
    """Return the records of a right training."""
    rng = np.random.default_rng(seed)
    ranks = [
        RankRecord(rank, start=dict.fromkeys(NAMES, "0"), sizes=dict(NAMES), ended="steps") for rank in range(RANKS)
    ]
    for index in range(STEPS):
        for rank in ranks:
            x = rng.standard_normal((4, 2))
            local = {name: rng.standard_normal(size) for name, size in NAMES.items()}
            own = dict.fromkeys(NAMES, str(index))
            rank.steps.append(Step(
                batches=[Batch.of([x])], local=local, before=own, after=dict.fromkeys(NAMES, str(index + 1)),
                options={"lr of group 0": 0.1}, events=[FORWARD, BACKWARD, STEP], buffers={"mean": "0"},
                is_complete=True,
            ))  # fmt: skip
    reduce(ranks, lambda own, _: np.mean(own, 0))
    return ranks


def reduce(ranks: list[RankRecord], of: Callable[[list[np.ndarray], int], np.ndarray], *names: str) -> None:
    """Let all ranks see a function of the ranks' gradients and of the rank."""
    for steps in zip(*(rank.steps for rank in ranks), strict=True):
        for name in names or NAMES:
            for rank, step in enumerate(steps):
                step.seen[name] = of([each.local[name] for each in steps], rank)


def test_records_come_whole_from_their_files_without_a_pickle(tmp_path) -> None:
    made = records(3)
    made[1].steps[0].options = {"betas": (0.9, 0.999), "lr": float("inf"), "fused": None, "foreach": np.float32(1)}
    made[1].steps[0].clipped = {"first.bias": np.array([np.nan, -0.0, np.inf])}
    for record in made[:2]:
        record.write(tmp_path)
        record.write_progress(tmp_path)
    assert all(json.loads(path.read_text()) for path in tmp_path.iterdir())
    found, options = read(tmp_path, 3), {"betas": [0.9, 0.999], "lr": float("inf"), "fused": None}
    assert found[1].steps[0].options.items() >= options.items() and found[2] == RankRecord(2)
    for ours, theirs in zip(made[:2], found, strict=False):
        for step, other in zip(ours.steps, theirs.steps, strict=True):
            for arrays in ("local", "seen", "clipped"):
                sent, came = ({name: each.tobytes() for name, each in getattr(whose, arrays).items()}
                                  for whose in (step, other))  # fmt: skip
                assert sent == came
                setattr(step, arrays, {})
                setattr(other, arrays, {})
            step.options = other.options = {}
        assert ours == theirs
    assert read_progress(tmp_path, 3) == [Progress(True, "steps", STEPS, False)] * 2 + [Progress()]


def own(gradients: list[np.ndarray], rank: int) -> np.ndarray:
    return gradients[rank]


def part(ranks: list[RankRecord], first: int = 0) -> None:
    """Let the parameters differ after a step and from then on."""
    for rank in ranks:
        for step in rank.steps[first:]:
            step.after = {name: f"{value} of {rank.rank}" for name, value in step.after.items()}
        for step in rank.steps[first + 1 :]:
            step.before = {name: f"{value} of {rank.rank}" for name, value in step.before.items()}


def change(ranks: list[RankRecord], variant: str) -> None:
    """Plant a mistake."""
    last, size = ranks[-1], len(ranks)
    if variant in ("no-sync", "late-sync"):
        reduce(ranks, own)
        part(ranks)
        for step in last.steps if variant == "late-sync" else ():
            step.events.append(SYNC)
    elif variant == "left-out":
        reduce(ranks, own, "last.weight")
        part(ranks)
    elif variant in ("sum", "divided-twice"):
        factor = size if variant == "sum" else 1 / size
        reduce(ranks, lambda gradients, _: factor * np.mean(gradients, 0))
    elif variant == "clip":
        reduce(
            ranks, lambda gradients, _: np.mean([each / np.linalg.norm(each) for each in gradients], 0), "last.weight"
        )
        for rank in ranks:
            for step in rank.steps:
                step.local, step.seen = ({"last.weight": each["last.weight"]} for each in (step.local, step.seen))
    elif variant == "start":
        last.start = {**last.start, "first.bias": "1"}
        for step in last.steps:
            step.before = {**step.before, "first.bias": "other"}
            step.after = {**step.after, "first.bias": "other"}
    elif variant == "model":
        last.sizes = {**NAMES, "last.weight": 5}
    elif variant == "options":
        last.steps[2].options = {"lr of group 0": 0.2}
        part(ranks, 2)
    elif variant == "state":
        last.steps[0].state = {"last.weight": "1"}
        part(ranks)
    elif variant == "same-data":
        for rank in ranks:
            for step, first in zip(rank.steps, ranks[0].steps, strict=True):
                step.batches = first.batches
    elif variant == "overlap":
        last.steps[3].batches, last.steps[1].batches = ranks[0].steps[1].batches, ranks[0].steps[2].batches
    elif variant == "unequal-batches":
        for step in last.steps:
            step.batches = [Batch.of([np.random.default_rng(id(step)).standard_normal((12, 2))])]
    elif variant == "zero-grad":
        last.steps[1].carried = ["last.weight", "first.bias"]
    elif variant == "skipped-step":
        last.steps[1].events = [FORWARD, BACKWARD, BACKWARD, STEP]
        part(ranks, 1)
    elif variant == "unused":
        del last.steps[1].local["first.bias"]
        part(ranks, 1)
    elif variant == "replicas":
        part(ranks, 2)
    elif variant == "apart":
        reduce(ranks, lambda gradients, rank: np.mean(gradients, 0) + rank * np.ones_like(gradients[0]), "first.bias")
        part(ranks)
    elif variant == "weights":
        reduce(ranks, lambda gradients, _: sum(gradients[1:], 3 * gradients[0]) / (size + 2))
    elif variant == "mismatch":
        last.ended, last.error = "error", "MismatchError: sync_gradients: expected the same call on all ranks"
        last.steps[-1].is_complete = False
    else:
        assert variant == "hang"
        for rank in ranks:
            rank.ended = ""


#: The parameter that is to be named first.
FIRST = {"left-out": "last.weight", "start": "first.bias", "zero-grad": "first.bias", "unused": "first.bias",
         "apart": "first.bias", "state": "last.weight", "clip": "last.weight", "model": "last.weight",
         "no-sync": "first.weight", "late-sync": "first.weight", "sum": "first.weight",
         "replicas": "first.weight"}  # fmt: skip


@pytest.mark.parametrize("variant", CAUSES)
def test_a_mistake_is_named_alone_with_its_first_parameter_and_a_remedy(variant):
    ranks = records()
    change(ranks, variant)
    problems = [each for each in judge(JobRecord(ranks, variant == "hang")) if each.level == PROBLEM]
    assert [each.evidence["cause"] for each in problems] == [variant]
    assert problems[0].evidence["first"] == FIRST.get(variant, problems[0].evidence["first"])
    assert problems[0].remedy and "\n" not in problems[0].what + problems[0].remedy


@pytest.mark.parametrize("second", ["no-sync", "sum", "options"])
def test_reading_the_same_data_hides_no_other_mistake(second):
    ranks = records()
    for variant in ("overlap", second):
        change(ranks, variant)
    problems = [each.evidence["cause"] for each in judge(JobRecord(ranks)) if each.level == PROBLEM]
    assert problems == ["overlap", second]


def test_a_batch_without_a_backward_tells_of_a_skipped_step_where_the_library_stops_the_ranks():
    ranks = records()
    for rank in ranks:
        rank.steps[-1].is_complete, rank.ended, rank.error = False, "error", "MismatchError: broadcast, all_reduce"
    ranks[1].steps[-1].events = [FORWARD, FORWARD]
    problems = [each.evidence["cause"] for each in judge(JobRecord(ranks)) if each.level == PROBLEM]
    assert problems == ["skipped-step"]


def right(ranks: list[RankRecord], variant: str) -> None:
    """Change a training so that it stays right."""
    steps = [step for rank in ranks for step in rank.steps]
    if variant == "weighted":
        change(ranks, "unequal-batches")
        reduce(ranks, lambda gradients, _: np.average(gradients, 0, [4, 4, 12]))
    elif variant == "clipped":
        for step in steps:
            step.clipped = step.seen
            step.seen = {name: 0.5 * each for name, each in step.seen.items()}
    elif variant == "the loss divided by the ranks, and a sum":
        for step in steps:
            step.factor = 1 / RANKS
        reduce(ranks, lambda gradients, _: np.sum(gradients, 0))
    elif variant == "micro-batches":
        for step in steps:
            step.factor, step.events = 1 / RANKS, [*[BACKWARD] * RANKS, STEP]
    elif variant == "half precision":
        reduce(ranks, lambda gradients, _: np.mean([each.astype(np.float16) for each in gradients], 0, np.float64))
    elif variant == "a lossy compression":
        reduce(ranks, lambda gradients, _: np.where(np.arange(len(gradients[0])) % 2, np.mean(gradients, 0), 0.0))
    elif variant == "a layer that some ranks don't use":
        for step in ranks[1].steps:
            step.local["last.weight"] = np.zeros(4)
        reduce(ranks, lambda gradients, _: np.mean(gradients, 0))
        for step in ranks[1].steps:
            del step.local["last.weight"]
    elif variant == "an order anew in each epoch":
        ranks[1].steps[3].batches, ranks[0].steps[3].batches = ranks[0].steps[0].batches, ranks[0].steps[0].batches
    elif variant == "made alike after a first forward":
        ranks[1].start = dict.fromkeys(NAMES, "1")
    elif variant == "buffers of its own":
        ranks[1].steps[2].buffers = {"mean": "1"}
    elif variant == "sharded":
        for rank in ranks:
            rank.hides_gradients = True
        for step in steps:
            step.seen = {}
    else:
        assert variant == "local SGD"
        for rank in ranks:
            rank.averages_parameters = True
        reduce(ranks, own)


RIGHT = (
    "weighted", "clipped", "the loss divided by the ranks, and a sum", "micro-batches", "half precision",
    "a lossy compression", "a layer that some ranks don't use", "an order anew in each epoch",
    "made alike after a first forward", "buffers of its own", "sharded", "local SGD",
)  # fmt: skip
NOTED = {"a lossy compression", "a layer that some ranks don't use", "buffers of its own", "local SGD"}


@pytest.mark.parametrize("variant", RIGHT)
def test_a_right_training_is_not_blamed(variant):
    ranks = records()
    right(ranks, variant)
    job = JobRecord(ranks)
    found = judge(job)
    assert [each for each in found if each.level == PROBLEM] == [] and refusal(job) == ""
    assert any(each.level == NOTE for each in found) == (variant in NOTED)


@pytest.mark.parametrize("seed", range(20))
def test_no_right_training_of_many_is_blamed(seed):
    assert all(each.level not in (PROBLEM, NOTE) for each in judge(JobRecord(records(seed))))


def test_what_cannot_be_judged_is_said_in_one_line():
    nothing = JobRecord([RankRecord(0), RankRecord(1)])
    assert refusal(nothing) == "no optimizer step was seen; it knows those of torch.optim and clcomm.optim"
    failed = records()
    failed[1].error = "ValueError: no such file"
    assert refusal(JobRecord(failed)) == "the script ended with ValueError: no such file on rank 1"
    divided = records()
    divided[0].refusal = "its ranks hold parts of the model"
    assert refusal(JobRecord(divided)) == "its ranks hold parts of the model"
    assert all(each.level != PROBLEM for each in judge(nothing))
    late = JobRecord([RankRecord(0), RankRecord(1)], is_stuck=True)
    assert refusal(late).endswith("clcomm.optim in time") and all(each.level != PROBLEM for each in judge(late))
    joined = records()
    joined[0].joins, joined[0].steps = True, joined[0].steps[:2]
    assert all(each.level == "ok" for each in judge(JobRecord(joined, is_stuck=True)))


def test_sketches_are_linear_and_small():
    one, other = np.random.default_rng(0).standard_normal((2, 50, 100))
    assert sketch_of(one).size == SKETCH
    np.testing.assert_allclose(sketch_of(one + 2 * other), sketch_of(one) + 2 * sketch_of(other), atol=1e-10)
    assert sketch_of(np.float32(3.0)).tolist() == [3.0]


def test_hashes_tell_values_shapes_and_dtypes_apart():
    arrays = [np.zeros(4), np.zeros((2, 2)), np.zeros(4, np.int64), np.zeros(4, np.float32), np.ones(4), np.zeros(0)]
    assert len({hash_of(each) for each in arrays}) == len(arrays)
    assert hash_of(np.arange(6.0)[::2]) == hash_of(np.array([0.0, 2.0, 4.0]))
