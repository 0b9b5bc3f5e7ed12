"""A step's work in Python grows with the number of parameters, not with its square: counted in lines of code."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import numpy as np
import pytest

from clcomm import Communicator, Synchronizer
from clcomm.comm.collectives.in_flight import ExposedTime
from clcomm.engine import Module, Parameter, Tensor
from clcomm.optim import Adam
from clcomm.sync.distributed_optimizer import DistributedOptimizer
from tests.sharded_jobs import cpu


class Many(Module):
    """Parameters of one element."""

    def __init__(self, count: int):
        for index in range(count):
            setattr(self, f"p{index}", Parameter(np.ones(1, np.float32), cpu()))

    def forward(self, x: Tensor) -> Tensor:
        for parameter in self.parameters():
            x = x + parameter
        return x.sum()


def lines_of(function: Any) -> int:
    """Return how many lines of Python a function runs, each turn of a loop counted."""
    lines = 0

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return lines


def lines_of_a_step(count: int, stage: int, **options: Any) -> int:
    """Return the lines of a step on one rank, per tensor, once nothing is new any more."""
    with Communicator(transport="solo", use_bucketing=False) as comm:
        model = Many(count)
        sync = Synchronizer(comm, zero=stage or 1, **options)
        optimizer = DistributedOptimizer(Adam(model), sync) if stage else Adam(model)
        sync.broadcast_parameters(model)

        def step() -> None:
            model(Tensor(np.ones(1, np.float32), cpu())).backward()
            sync.sync_gradients(model)
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(3):
            step()
        return lines_of(step)


@pytest.mark.parametrize(("stage", "options"), [(0, {"overlap": True}), (0, {}), (1, {}), (2, {}), (3, {})])
def test_a_step_of_eight_times_the_parameters_runs_eight_times_the_lines(stage, options):
    few, many = 25, 200
    assert lines_of_a_step(many, stage, **options) <= 1.2 * many / few * lines_of_a_step(few, stage, **options)


def test_taking_a_span_does_not_look_at_those_behind_it():
    lines = []
    for count in (10, 1000):
        times = ExposedTime()
        for index in range(count):
            times.add(float(index), index + 0.5)
        lines.append(lines_of(partial(times.take, 0.0, 1.0)))
        assert times.take(1.0, 2.25) == ((1.0, 1.5), (2.0, 2.25))
    assert lines[0] == lines[1]
