"""All-reduces by `clcomm.base.schedules`: the sum of all ranks, with as many messages and bytes as the formulas say."""

from __future__ import annotations

import numpy as np
import pytest

from clcomm import Synchronizer
from clcomm.base.errors import ArgumentError, MismatchError
from clcomm.base.host.arrays import BFLOAT16
from clcomm.base.schedules import ALGORITHMS, schedule_of
from clcomm.comm.costs.forecast import traffic
from tests.helpers import Recorder, one_line
from tests.numpy_models import Model
from tests.transport.references import FOLDS, drawn, same_bits

pytestmark = pytest.mark.mpi(min_size=1)
SIZES = (0, 1, 7, 1000, 40_001)


def by_schedule(algorithm: str, rows: list[np.ndarray], op: str) -> np.ndarray:
    """Return what rank 0 ends with: the reference for the bits."""
    schedule, fold = schedule_of(algorithm, len(rows)), FOLDS[op]
    now, bounds = [row.copy() for row in rows], schedule.bounds(rows[0].size)
    for messages in schedule.rounds:
        before = [row.copy() for row in now]
        for receiver in range(len(rows)):
            incoming = [each for each in messages if each.receiver == receiver]
            if not incoming:
                continue
            part = slice(bounds[incoming[0].first], bounds[incoming[0].last])
            values = {each.sender: before[each.sender][part] for each in incoming}
            if incoming[0].adds:
                values[receiver] = before[receiver][part]
            ordered = [values[rank] for rank in sorted(values)]
            total = ordered[0].copy()
            for other in ordered[1:]:
                total = fold(total, other)
            now[receiver][part] = total
    assert all(same_bits(row, now[0]) for row in now)
    return now[0] / now[0].dtype.type(len(rows)) if op == "mean" else now[0]


@pytest.mark.sampled(50)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("op", FOLDS)
@pytest.mark.parametrize("size", SIZES)
def test_the_result_is_the_schedule_s_on_every_rank(auto, algorithm, op, size):
    for dtype in ("float32", "float64", "int32"):
        if op == "mean" and dtype == "int32":
            continue
        rows = [drawn(rank, size, dtype) for rank in range(auto.size)]
        expected = by_schedule(algorithm, rows, op)
        out = np.empty_like(rows[0])
        assert same_bits(auto.all_reduce(rows[auto.rank], op, out=out, algorithm=algorithm), expected)
        in_place = rows[auto.rank].copy()
        auto.all_reduce(in_place, op, algorithm=algorithm)
        common = auto.allocate_common(max(1, out.nbytes))[: out.nbytes].view(dtype)
        auto.all_reduce(rows[auto.rank], op, out=common, algorithm=algorithm)
        auto.barrier()
        assert same_bits(in_place, expected) and same_bits(np.array(common), expected)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("transport_size", SIZES)
def test_counted_messages_and_bytes_equal_the_formula(comm, algorithm, transport_size):
    seen = Recorder()
    comm.add_observer(seen)
    source = np.ones((transport_size,), np.float32)
    for _ in range(3):
        comm.all_reduce(source, "max", algorithm=algorithm, label="x")
    row = comm.stats.total("all_reduce", "x")
    expected = traffic(algorithm, comm.size)
    sent = comm.all_reduce(np.array([row["messages"], row["message_bytes"]]))
    assert sent.tolist() == [3 * expected.messages, 3 * expected.volume * source.nbytes]
    assert ("messages" in str(comm.stats.table(width=200))) == (row["messages"] > 0)
    assert row["transport"] == algorithm and row["calls"] == 3 and row["bytes"] == row["wire_bytes"]
    merged = comm.merged_stats().total("all_reduce", "x")
    assert merged["messages"] * comm.size == pytest.approx(3 * expected.messages)
    events = [event for event in seen.events if event.label == "x"]
    own = [sum(each.sender == comm.rank for each in sent_) for sent_ in schedule_of(algorithm, comm.size).rounds]
    assert [event.messages for event in events] == [sum(own)] * 3


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_rounds_are_phases(auto, algorithm):
    phases = []
    observer = Recorder()
    observer.phase_finished = phases.append
    auto.add_observer(observer)
    auto.all_reduce(np.ones(100), algorithm=algorithm)
    rounds = schedule_of(algorithm, auto.size).rounds
    sending = [number for number, sent in enumerate(rounds, 1) if any(each.sender == auto.rank for each in sent)]
    assert [(phase.name, phase.label, dict(phase.figures)["round"]) for phase in phases] == [
        ("round", algorithm, number) for number in sending
    ]


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint16", "float16", "complex64", BFLOAT16], ids=str)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_other_dtypes(auto, algorithm, dtype):
    ones = np.ones((3, 5), dtype)
    result = auto.all_reduce(ones.copy(), algorithm=algorithm).astype(np.complex64)
    assert (result == (1 if dtype == "bool" else auto.size)).all()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("bucketing", [{}, {"bucket_size": 40}, {"use_bucketing": False}], ids=str)
def test_a_synchronizer_averages_by_an_algorithm(auto, algorithm, bucketing):
    rng = [np.random.default_rng(rank) for rank in range(auto.size)]
    gradients = [{name: each.standard_normal(7) for name in "abc"} for each in rng]
    model = Model([(name, np.zeros(7)) for name in "abc"])
    sync = Synchronizer(auto, algorithm=algorithm, **bucketing)
    sync.broadcast_parameters(model)
    auto.stats.reset()
    for name in "abc":
        model[name].grad = gradients[auto.rank][name].copy()
    sync.sync_gradients(model)
    for name in "abc":
        assert np.allclose(model[name].grad, sum(each[name] for each in gradients) / auto.size, rtol=1e-12, atol=1e-12)
    row = auto.stats.total("all_reduce", "gradients")
    sent = auto.all_reduce(np.array([row["messages"]]))
    assert sent[0] == traffic(algorithm, auto.size).messages * row["calls"]
    assert row["calls"] == len(sync.bucket_plan(model)) and row["bytes"] == row["wire_bytes"] == 3 * 7 * 8
    assert sync.compression == f"none, by {algorithm}"


@pytest.mark.mpi(min_size=2)
def test_ranks_with_different_algorithms_get_an_error(several):
    with pytest.raises(MismatchError, match="expected the same one with equal arrays") as caught:
        several.all_reduce(np.ones(3), algorithm="ring" if several.rank == 0 else "tree")
    one_line(caught)
    several.all_reduce(np.ones(3), algorithm="ring")
    with pytest.raises(MismatchError):
        Synchronizer(several, algorithm="ring" if several.rank == 0 else "tree").sync_gradients(
            Model([("a", np.zeros(3))])
        )


def test_bad_arguments_are_refused(auto):
    unknown = r"^algorithm: expected one of ring, halving, tree, direct, got 'star'$"
    with pytest.raises(ArgumentError, match=unknown):
        auto.all_reduce(np.ones(3), algorithm="star")
    with pytest.raises(ArgumentError, match=unknown):
        Synchronizer(auto, algorithm="star")
    with pytest.raises(ArgumentError, match=r"^algorithm: expected None with compression fp16, got 'ring'$"):
        Synchronizer(auto, algorithm="ring", compression="fp16")
    with pytest.raises(ArgumentError, match=r"^op: expected one of"):
        auto.all_reduce(np.ones(3), "avg", algorithm="ring")
