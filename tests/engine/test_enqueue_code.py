"""Kernel objects of one kernel share the code that PyOpenCL generates for it, and queue it as before."""

from __future__ import annotations

import numpy as np
import pyopencl as cl
import pytest
from pyopencl import invoker

from clcomm.engine import memory
from clcomm.engine.ops.elements import TABLE


def test_code_is_generated_once_and_only_when_it_is_called(device, monkeypatch):
    kernel, made = device.kernel(TABLE["square"].file(), "each_square"), []
    generate = invoker._generate_enqueue_and_set_args_module
    monkeypatch.setattr(
        invoker, "_generate_enqueue_and_set_args_module", lambda *key: made.append(key) or generate(*key)
    )
    copies = [cl.Kernel(kernel.program, kernel.function_name) for _ in range(20)]
    assert made == []
    buffer, out = device.upload(np.float32([3, -4])), np.empty(2, np.float32)
    for copy in copies[:2]:
        copy(device.queue, *device.grid(2), buffer, buffer, np.int32(2))
    device.read(buffer, out)
    assert out.tolist() == [81, 256] and len(made) <= 1  # none where another device's kernel was called


def test_other_ways_of_generating_it_are_left_alone(monkeypatch):
    monkeypatch.delattr(invoker, "generate_enqueue_and_set_args")
    memory.share.__wrapped__()
    assert not hasattr(invoker, "generate_enqueue_and_set_args")


@pytest.mark.parametrize("named", [False, True])
def test_arguments_that_cannot_be_compared_are_generated_each_time(monkeypatch, named):
    calls = []
    monkeypatch.setattr(invoker, "generate_enqueue_and_set_args", lambda *args, **named: calls.append((args, named)))
    memory.share.__wrapped__()
    for _ in range(2):
        invoker.generate_enqueue_and_set_args(*() if named else ({},), **{"arg_types": {}} if named else {})
    assert len(calls) == 2
