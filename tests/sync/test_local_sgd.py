"""Averages of parameters: the mean in rank order, and local SGD as one process computes it for all ranks."""

from __future__ import annotations

import numpy as np
import pytest

from clcomm import Communicator, Synchronizer
from clcomm.base.errors import ArgumentError
from clcomm.engine import CrossEntropyLoss, Tensor
from clcomm.optim import SGD
from clcomm.sync.distributed_optimizer import DistributedOptimizer
from models import MLP
from tests.helpers import cpu_device, one_line
from tests.numpy_models import small_model

SHAPE = (1, 4, 4)


def network():
    return MLP(SHAPE, 10, device=cpu_device("cpu"), seed=2)


def backward(model, rank, step):
    rng = np.random.default_rng([rank, step])
    images, labels = rng.standard_normal((5, *SHAPE)).astype(np.float32), rng.integers(0, 10, 5).astype(np.int32)
    device = cpu_device("cpu")
    CrossEntropyLoss()(model(Tensor(images, device)), Tensor(labels, device)).backward()


def local_steps(comm, steps, every, momentum):
    model, sync = network(), Synchronizer(comm)
    sync.broadcast_parameters(model)
    optimizer = SGD(model, 0.1, momentum=momentum)
    for step in range(steps):
        backward(model, comm.rank, step)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % every == 0:
            sync.average_parameters(model)
    return model.state_dict()


def test_averages_after_each_step_of_plain_sgd_are_those_of_gradients(comm):
    ours, model, sync = local_steps(comm, 6, 1, 0.0), network(), Synchronizer(comm)
    sync.broadcast_parameters(model)
    optimizer = SGD(model, 0.1)
    for step in range(6):
        backward(model, comm.rank, step)
        sync.sync_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    for name, value in model.state_dict().items():
        np.testing.assert_allclose(ours[name], value, rtol=2e-6, atol=2e-6)


def test_other_libraries_parameters_are_averaged_in_rank_order(comm):
    model = small_model()
    for index, parameter in enumerate(model.parameters.values()):
        parameter.data[...] = np.random.default_rng([comm.rank, index]).standard_normal(parameter.data.shape)
    everyone = comm.all_gather_object([parameter.data.copy() for parameter in model.parameters.values()])
    Synchronizer(comm).average_parameters(model)
    for index, parameter in enumerate(model.parameters.values()):
        total = everyone[0][index].copy()
        for each in everyone[1:]:
            total += each[index]
        assert parameter.data.tobytes() == (total / total.dtype.type(comm.size)).tobytes()


def test_a_divided_update_is_refused():
    comm = Communicator(transport="solo")
    model, sync = network(), Synchronizer(comm)
    DistributedOptimizer(SGD(model, 0.1), sync)
    with pytest.raises(ArgumentError) as caught:
        sync.average_parameters(model)
    assert one_line(caught).startswith("average_parameters: expected a model without a DistributedOptimizer")
