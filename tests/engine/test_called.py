"""Functions of compiled kernels that Python calls: what they own and release, and what is launched instead."""

from __future__ import annotations

import gc
import sys
import weakref

import numpy as np
import pytest

from clcomm.base.host.arrays import aligned_empty
from clcomm.comm.transport.fused import POLLS, RANK, STATE, STRIDE, TAG
from clcomm.engine import host_kernels
from clcomm.engine.fold import COUNT, DeviceFold
from tests.calling_thread import pass_in_the_calling_thread
from tests.helpers import cpu_device

STRIDE_WORDS = 40


class Row(np.ndarray):
    """An array that can be watched."""


def prepared(size=5, shares=False):
    """Return an all-reduce of two ranks of which the other one has arrived already, twice; its words, rows and sum."""
    rows = [aligned_empty((size,), np.float32) for _ in range(2)]
    for row in rows:
        row[:] = 1.5
    out, call = aligned_empty((size,), np.float32), aligned_empty((32,), np.int64)
    cells = aligned_empty((2, STRIDE_WORDS), np.int64)
    call[:] = cells[:] = 0
    cells[1, 0], cells[1, 3:5] = 2, (9, 1)
    call[[TAG, POLLS, RANK, STRIDE]] = 9, 3, 0, STRIDE_WORDS
    run = DeviceFold(cpu_device("cpu")).with_rendezvous(
        [row.view(Row) for row in rows], out, 1, slice(0, size), cells, call, shares
    )
    return run, call, out


def test_in_the_calling_thread():
    pass_in_the_calling_thread(cpu_device("cpu"), __file__, "not calling_thread")


@pytest.fixture
def is_called():
    device = cpu_device("cpu")
    if not (device.takes_addresses and device.runs_in_caller and host_kernels.is_supported()):
        pytest.skip("this device launches its kernels; see test_in_the_calling_thread")


@pytest.mark.usefixtures("is_called")
def test_calls_leave_no_references_behind():
    run, call, out = prepared()
    assert not hasattr(run, "__code__"), "it is launched"
    run()
    assert (call[STATE], call[COUNT], out.tolist()) == (0, 5, [3.0] * 5)
    words = run.__self__
    before = sys.getrefcount(words)
    results = [run() for _ in range(10)]
    held = sys.getrefcount(words)
    assert {id(result) for result in results} == {id(words)}
    del results
    after = sys.getrefcount(words)
    assert (held, after) == (before + 10, before)


@pytest.mark.usefixtures("is_called")
def test_memory_lives_as_long_as_the_function_and_no_longer():
    run, _, _ = prepared()
    used = [weakref.ref(each) for each in run.__self__.used if isinstance(each, Row)]
    gc.collect()
    assert len(used) == 2 and all(each() is not None for each in used)
    del run
    gc.collect()
    assert [each() for each in used] == [None, None]


@pytest.mark.usefixtures("is_called")
@pytest.mark.parametrize("refusal", ["interpreter", "layout", "library"])
def test_what_cannot_be_called_is_launched(monkeypatch, refusal):
    if refusal == "interpreter":
        monkeypatch.setattr(host_kernels.platform, "python_implementation", lambda: "another")
    elif refusal == "layout":
        monkeypatch.setattr(host_kernels, "DATA", 24)
    else:
        monkeypatch.setattr(host_kernels, "_definition_of", lambda address: None)
    run, call, out = prepared()
    assert hasattr(run, "__code__")
    run()
    assert (call[STATE], out.tolist()) == (0, [3.0] * 5)


def test_an_address_outside_a_library_is_refused():
    assert host_kernels.function(aligned_empty((1,), np.int64).ctypes.data, aligned_empty((32,), np.int64), []) is None
