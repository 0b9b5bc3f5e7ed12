"""Wrong elements are seen: the ranks' formula against what transports give, whole ones and broken ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clcomm import Communicator
from clcomm.insight.measure import bench
from clcomm.insight.measure.collective_cases import CASES, PERIOD, expected_reduction, rank_values, wrong_elements
from clcomm.insight.measure.timing import MeasuredTransport, TimingSchedule, measure

SHORT = TimingSchedule(calls=1, windows=2, warmup=1)


@given(st.sets(st.integers(0, 999), max_size=30), st.integers(0, 500), st.integers(0, 1000))
def test_wrong_elements_are_counted(places, first, size):
    period = rank_values(3, np.dtype(np.int64))
    array = np.array([period[(first + index) % PERIOD] for index in range(size)], np.int64)
    inside = [place for place in places if place < size]
    array[inside] += 1
    assert wrong_elements(array, period, first) == len(inside)


def test_nan_is_wrong():
    period = rank_values(0, np.dtype(np.float32))
    array = period.copy()
    array[5] = np.nan
    assert wrong_elements(array, period) == 1


@pytest.mark.parametrize("dtype", bench.DTYPES)
@pytest.mark.parametrize("op", ["sum", "min", "max"])
def test_expected_values_are_those_of_all_ranks(op, dtype):
    ranks = [((7 * np.arange(PERIOD) + 31 * rank) % 97).astype(dtype) for rank in range(5)]
    reduce = {"sum": np.add, "min": np.minimum, "max": np.maximum}[op].reduce
    np.testing.assert_array_equal(expected_reduction(5, op, np.dtype(dtype)), reduce(ranks, axis=0, dtype=dtype))


def test_a_mean_is_the_sum_divided():
    np.testing.assert_array_equal(
        expected_reduction(3, "mean", np.dtype(np.float32)),
        expected_reduction(3, "sum", np.dtype(np.float32)) / np.float32(3),
    )


@pytest.mark.sampled(40)
@pytest.mark.parametrize("dtype", ["float32", "float16", "uint8"])
@pytest.mark.parametrize("operation", CASES)
def test_nothing_is_wrong_where_nothing_is_broken(operation, dtype, comm):
    for nbytes in (1, 1000, 100_000):
        case = CASES[operation](comm, nbytes, dtype)
        case.once()
        assert case.check() == 0
        assert case.count % (comm.size if case.parted else 1) == 0
        assert case.nbytes == case.count * np.dtype(dtype).itemsize >= min(nbytes, 1)


class Broken:
    """Stands in for a Communicator whose last rank gets some elements of each result wrong."""

    def __init__(self, comm, spoil):
        self._comm, self._spoil = comm, spoil

    def __getattr__(self, name):
        attribute = getattr(self._comm, name)
        if name not in ("all_reduce", "broadcast", "all_gather", "reduce_scatter"):
            return attribute

        def call(*arguments, **keywords):
            result = attribute(*arguments, **keywords)
            if self._comm.rank == self._comm.size - 1:
                self._spoil(result.reshape(-1))
            return result

        return call


def one_off(values):
    values[3] += 1


def shifted(values):
    values[1:] = values[:-1].copy()


@pytest.fixture(params=["alone", pytest.param("ranks", marks=pytest.mark.mpi(min_size=2))])
def target():
    made = MeasuredTransport("mpi")
    yield made
    made.comm = None  # not closed: after a failure other ranks may be elsewhere


@pytest.mark.parametrize("operation", ["all_reduce", "broadcast", "all_gather", "reduce_scatter"])
def test_a_broken_transport_is_caught(operation, target):
    control, real = Communicator(transport="mpi"), target.comm
    target.comm = Broken(real, one_off)
    (row,) = measure([target], control, operation, 4096, "float32", "sum", SHORT)
    assert row.wrong == 1
    target.comm = Broken(real, shifted)
    (row,) = measure([target], control, operation, 4096, "float32", "sum", SHORT)
    assert row.wrong >= 4096 // 4 // real.size // 2


@pytest.mark.mpi(min_size=1)
def test_a_transport_that_does_nothing_is_caught(auto):
    case = CASES["all_reduce"](auto, 4096)
    case.once = lambda: None
    assert case.check() > 1000


@pytest.mark.parametrize("operation", CASES)
def test_results_of_an_earlier_call_are_wrong(operation, comm):
    """A transport that now and then does nothing may leave what the call before it has left."""
    case = CASES[operation](comm, 4096)
    earlier = case.once()
    case.once = lambda: earlier
    received = comm.size - 1 if operation == "broadcast" else 1
    assert comm.all_reduce(np.array([case.check()])) >= 900 * received
