"""What does not fit in a step on several devices is refused in one line."""

from __future__ import annotations

import numpy as np
import pytest

from clcomm import Communicator, Synchronizer
from clcomm.base.errors import ArgumentError
from clcomm.engine import CrossEntropyLoss, Tensor
from clcomm.parallel.devices import data_parallel_step, prepare_replicas, sync_grads
from clcomm.sync.distributed_optimizer import DistributedOptimizer
from tests.devices.several import FEATURES, Network, batch_of, queues, sgd
from tests.helpers import one_line


def step_with(replicas, forward=None, optimizers=None, batch=None, **arguments):
    model = replicas.model

    def plain(device, x, y, params):
        return CrossEntropyLoss()(model(x), y)

    optimizers = [sgd(params) for params in replicas] if optimizers is None else optimizers
    batch = batch_of(6, 0) if batch is None else batch
    return data_parallel_step(forward or plain, replicas, optimizers, batch, **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch": batch_of(1, 0)}, "batch: expected at least 2 samples, one for each device, got 1; "),
        ({"batch": (np.zeros((4, FEATURES)), np.zeros(3, int))}, "batch: expected arrays of equal length, got 4 and 3"),
        ({"batch": np.zeros((4, FEATURES))}, "batch: expected arrays such as (images, labels), got ndarray"),
        ({"sizes": [6]}, "sizes: expected 2 numbers from 0 up that add up to 6 samples, got [6]"),
        ({"sizes": [7, -1]}, "sizes: expected 2 numbers from 0 up that add up to 6 samples, got [7, -1]"),
        ({"sizes": [3, 4]}, "sizes: expected 2 numbers from 0 up that add up to 6 samples, got [3, 4]"),
        ({"sizes": [1.5, 4.5]}, "sizes: expected 2 numbers from 0 up that add up to 6 samples, got [1.5, 4.5]"),
        ({"optimizers": [None]}, "optimizers: expected one for each of 2 devices, got 1"),
        (
            {"forward": lambda device, x, y, params: 1.0},
            "forward_fn: expected a loss of one element, or (loss, tape), ",
        ),
        ({"forward": lambda device, x, y, params: x @ params[0].T}, "forward_fn: expected a loss of one element"),
        (
            {"forward": lambda device, x, y, params: Tensor(1.0, device, requires_grad=True) * 1.0},
            "forward_fn: expected a loss of the parameters of param_replicas",
        ),
    ],
)
def test_arguments_that_do_not_fit(arguments, message):
    devices = queues(2)
    replicas = prepare_replicas(Network(devices[0]), devices)
    with pytest.raises(ArgumentError) as caught:
        step_with(replicas, **arguments)
    assert one_line(caught).startswith(message)


def test_a_loss_on_another_device_is_refused():
    devices = queues(2)
    model, other = Network(devices[0]), Network(devices[0], 1)
    replicas = prepare_replicas(model, devices)

    def forward(device, x, y, params):
        return CrossEntropyLoss()(other(Tensor(x.numpy(), devices[0])), y.numpy())

    with pytest.raises(ArgumentError) as caught:
        step_with(replicas, forward)
    assert one_line(caught).startswith("forward_fn: expected a loss of the parameters of param_replicas")
    other = model
    with pytest.raises(ArgumentError) as caught:
        step_with(replicas, lambda device, x, y, params: Network(devices[0])(Tensor(x.numpy(), devices[0])).mean())
    assert "forward_fn: expected" in one_line(caught)


def test_what_cannot_be_replicated():
    devices = queues(2)
    model = Network(devices[0])
    cases = [
        ((model, devices[::-1]), "params[0]: expected it on the first of the queues, "),
        ((model, []), "queues: expected at least one Device, got none"),
        ((model, ["cpu"]), "queues[0]: expected a Device, got str; see DeviceManager"),
        ((model, [devices[0], devices[0]]), "queues[1]: expected each Device once, got "),
        (([], devices), "params: expected at least one Parameter, got none"),
        (([np.zeros(3)], devices), "params[0]: expected a Parameter, got ndarray"),
        ((model.parameters(), devices, Synchronizer(Communicator(transport="solo"))), "params: expected the module"),
    ]
    for arguments, message in cases:
        with pytest.raises(ArgumentError) as caught:
            prepare_replicas(*arguments)
        assert one_line(caught).startswith(message)
    for given_replicas in ([list(model.parameters())], None):
        with pytest.raises(ArgumentError) as caught:
            sync_grads(given_replicas)
        assert one_line(caught).startswith("param_replicas: expected what prepare_replicas returned, got ")


def test_what_would_be_wrong_in_silence_is_refused():
    devices = queues(2)
    solo = Communicator(transport="solo")
    model = Network(devices[0])
    model.first.weight.requires_grad = False
    replicas = prepare_replicas(model, devices)
    model.first.weight.requires_grad = True
    with pytest.raises(ArgumentError) as caught:
        step_with(replicas)
    assert one_line(caught).startswith("params[0]: expected requires_grad as it was in prepare_replicas, got it set")

    model = Network(devices[0])
    replicas = prepare_replicas(model, devices)
    Synchronizer(solo).broadcast_parameters(model)
    with pytest.raises(ArgumentError) as caught:
        step_with(replicas)
    assert "got them moved by another Synchronizer" in one_line(caught)

    model = Network(devices[0])
    synchronizer = Synchronizer(solo)
    replicas = prepare_replicas(model, devices, synchronizer)
    optimizers = [DistributedOptimizer(sgd(model), synchronizer), sgd(replicas[1])]
    with pytest.raises(ArgumentError) as caught:
        step_with(replicas, optimizers=optimizers)
    assert one_line(caught).startswith("optimizers: expected none that is a DistributedOptimizer with several devices")

    model = Network(devices[0])
    replicas = prepare_replicas(model, devices, Synchronizer(solo, overlap=True))
    with pytest.raises(ArgumentError) as caught:
        step_with(replicas)
    assert one_line(caught).startswith("samples: expected None with overlap")

    with pytest.raises(ArgumentError) as caught:
        sync_grads(replicas, [1, 2, 3])
    assert one_line(caught).startswith("samples: expected a number from 0 up for each of 2 devices")
