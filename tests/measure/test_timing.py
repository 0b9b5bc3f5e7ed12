"""How collectives are timed: sizes, turns, the slowest rank of each call, and the columns' arithmetic."""

from __future__ import annotations

import numpy as np
import pytest

from clcomm import Communicator
from clcomm.base.errors import ArgumentError
from clcomm.base.schedules import ALGORITHMS
from clcomm.engine.fold import DeviceFold
from clcomm.insight.measure.collective_cases import CASES
from clcomm.insight.measure.timing import (
    BenchRow,
    MeasuredTransport,
    TimingSchedule,
    measure,
    sizes_between,
    time_calls,
)
from tests.helpers import cpu_device, one_line

SHORT = TimingSchedule(calls=1, windows=2, warmup=1)


def test_sizes_are_multiples_by_the_factor():
    assert sizes_between(256, 4096, 4) == [256, 1024, 4096]
    assert sizes_between(100, 400, 1.5) == [100, 150, 225, 337]
    assert sizes_between(7, 7, 2) == [7]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((512, 256, 2), "--max: expected at least --min's 512 bytes, got 256"),
        ((1, 2, 1.0), "--factor: expected a number above 1, got 1"),
        ((1, 2, float("nan")), "--factor: expected a number above 1, got nan"),
    ],
)
def test_sizes_that_make_no_range_are_refused(arguments, problem):
    with pytest.raises(ArgumentError) as caught:
        sizes_between(*arguments)
    assert one_line(caught) == problem


def test_columns_follow_from_the_seconds():
    target = MeasuredTransport("solo")
    case = CASES["all_reduce"](target.comm, 4000)
    seconds = np.array([3e-6, 1e-6, 2e-6, 9e-6])
    case.comm.size = 4  # as if there were four
    row = BenchRow.of(case, target, seconds, 5)
    assert (row.bytes, row.count, row.dtype, row.op, row.wrong) == (4000, 1000, "float32", "sum", 5)
    assert (row.min_us, row.p50_us, row.p99_us) == pytest.approx((1, 2.5, 9))
    assert (row.algbw_gb_s, row.busbw_gb_s) == pytest.approx((1.6, 2.4))


def test_of_each_call_the_slowest_rank_counts_and_cases_take_turns():
    order = []

    class Timed:
        def __init__(self, name):
            self.name = name

        def once(self):
            order.append(self.name)

    class Control:
        def barrier(self):
            order.append("|")

        def all_reduce(self, seconds, op):
            assert op == "max"
            return seconds + 1  # as if another rank had been a second slower

    seconds = time_calls([Timed("a"), Timed("b")], Control(), TimingSchedule(calls=2, windows=2, warmup=1))
    assert "".join(order) == "ab" + "a|a|ab|b|b" * 2
    assert seconds.shape == (2, 4)
    assert ((seconds >= 1) & (seconds < 2)).all()


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("transport", ["shared", "mpi", "solo", "auto"])
@pytest.mark.parametrize("op", ["mean", "min"])
def test_every_transport_measures_every_operation(transport, op):
    target, control = MeasuredTransport(transport), Communicator(transport="mpi")
    for operation in CASES:
        (row,) = measure([target], control, operation, 50_000, "float64", op, SHORT)
        assert row.wrong == 0
        assert 0 < row.min_us <= row.p50_us <= row.p99_us
        assert row.busbw_gb_s <= row.algbw_gb_s * 2
        assert row.transport == transport
        algorithm = operation.removeprefix("all_reduce_")
        assert row.moved_by == algorithm if algorithm in ALGORITHMS else row.moved_by in ("shared", "mpi", "solo")
    target.comm.finalize()
    control.finalize()


class Counted:
    """A device's sums, counted as they are made."""

    def __init__(self):
        self.made, self._fold = 0, DeviceFold(cpu_device("cpu"))

    def __call__(self, rows, out, divisor):
        prepared = self._fold(rows, out, divisor)

        def run():
            self.made += 1
            prepared()

        return None if prepared is None else run


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("nbytes", [256, 500_000])
@pytest.mark.parametrize(
    ("transport", "operation", "dtype", "op", "sums"),
    [
        ("shared", "all_reduce", "float32", "sum", "device"),
        ("auto", "all_reduce_init", "float32", "mean", "device"),
        ("shared", "all_reduce", "float16", "sum", "device"),
        ("shared", "all_reduce", "float16", "mean", "numpy"),
        ("shared", "all_reduce", "float32", "min", "numpy"),
        ("shared", "all_reduce", "float64", "sum", "numpy"),
        ("shared", "reduce_scatter", "float32", "sum", "numpy"),
        ("mpi", "all_reduce", "float32", "sum", "numpy"),
        ("shared", "broadcast", "float32", "sum", "none"),
    ],
)
def test_a_row_says_what_made_its_sums(transport, operation, dtype, op, sums, nbytes):
    fold = Counted()
    target, control = MeasuredTransport(transport, fold=fold), Communicator(transport="mpi")
    (row,) = measure([target], control, operation, nbytes, dtype, op, SHORT)
    assert (row.sums, row.wrong) == (sums, 0)
    assert (fold.made > 0) == (sums == "device")
    target.comm.finalize()
    control.finalize()
