"""A rendezvous is a barrier whose waiting costs next to nothing."""

from __future__ import annotations

import time

import numpy as np
import pytest

from clcomm.base.errors import ArgumentError


def test_alone(comm):
    comm.rendezvous()
    comm.finalize()
    with pytest.raises(ArgumentError, match="expected an open one"):
        comm.rendezvous()


@pytest.mark.mpi(min_size=2)
def test_no_rank_returns_before_the_last_has_arrived(auto):
    auto.barrier()
    begin, spent = time.perf_counter(), time.process_time()
    if auto.rank == auto.size - 1:
        time.sleep(0.3)
    auto.rendezvous()
    spent, waited = time.process_time() - spent, time.perf_counter() - begin
    assert waited > 0.1
    assert max(auto.all_gather_object(spent / waited)) < 0.6, "a waiting rank leaves the cores to others"


@pytest.mark.mpi(min_size=2)
def test_pending_operations_complete_first(auto):
    array = np.full(1000, float(auto.rank))
    handle = auto.all_reduce_async(array)
    auto.rendezvous()
    handle.wait()
    assert (array == auto.size * (auto.size - 1) / 2).all()
