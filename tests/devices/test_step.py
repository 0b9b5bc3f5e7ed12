"""Steps on several devices: one device on the same samples, and as many ranks, end with the same parameters."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clcomm import Communicator, Synchronizer
from clcomm.devices import data_parallel_step, prepare_replicas, shard_batch, sync_grads
from clcomm.distributed_optimizer import DistributedOptimizer
from clcomm.engine import BatchNorm1d, CrossEntropyLoss, Dropout, Linear, Sequential, Tensor, no_grad
from clcomm.errors import ArgumentError
from clcomm.netcl import autograd
from clcomm.netcl import nn as netcl_nn
from clcomm.optim import SGD, AdamW, RMSProp
from tests.devices.several import (
    CLASSES,
    FEATURES,
    Network,
    batch_of,
    bits,
    queues,
    require_close,
    sgd,
    sub_devices,
    train,
    train_alone,
)
from tests.helpers import cpu_device, one_line

OPTIMIZERS = {
    "sgd": sgd,
    "nesterov": lambda params: SGD(params, 0.05, momentum=0.9, nesterov=True),
    "adamw": lambda params: AdamW(params, 1e-3, eps=1e-4),
    "rmsprop": lambda params: RMSProp(params, 1e-3, eps=1e-3),
}


@st.composite
def cases(draw):
    """Devices, samples of each, and those that leave out a layer."""
    count = draw(st.integers(1, 4))
    sizes = draw(st.lists(st.integers(0, 6), min_size=count, max_size=count).filter(any))
    skips = draw(st.sets(st.integers(0, count - 1)))
    return (
        count,
        draw(st.sampled_from(["cpu", "gpu", "mixed"])),
        sizes,
        skips,
        draw(st.sampled_from(sorted(OPTIMIZERS))),
    )


@settings(max_examples=16)
@given(case=cases())
def test_devices_equal_one_device_on_the_same_samples(case):
    count, kind, sizes, skips, optimizer = case
    batches = [batch_of(sum(sizes), step) for step in range(4)]
    replicas, model, losses = train(queues(count, kind), batches, sizes, skips, OPTIMIZERS[optimizer])
    expected, expected_losses = train_alone(batches, sizes, skips, OPTIMIZERS[optimizer])
    require_close(model, expected)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-6)
    assert all(bits(params) == bits(replicas[0]) for params in replicas)


@pytest.mark.parametrize("count", [1, 2])
def test_sub_devices_equal_one_device(count):
    if cpu_device("cpu").compute_units < count:
        pytest.skip("the CPU has too few compute units")
    batches = [batch_of(9, step) for step in range(4)]
    replicas, model, _ = train(sub_devices(count), batches)
    require_close(model, train_alone(batches, [9 // count + (i < 9 % count) for i in range(count)])[0])
    assert all(bits(params) == bits(replicas[0]) for params in replicas)


def test_without_sizes_the_first_shards_are_larger():
    assert [len(part) for part in shard_batch(np.arange(11), 4)] == [3, 3, 3, 2]
    parts = shard_batch(np.arange(5), 3, [0, 4, 1])
    assert [part.tolist() for part in parts] == [[], [0, 1, 2, 3], [4]]


def test_a_device_without_samples_computes_nothing():
    called = []
    devices = queues(3)
    model = Network(devices[0])
    replicas = prepare_replicas(model, devices)

    def forward(device, x, y, params):
        called.append((devices.index(device), x.shape[0]))
        return CrossEntropyLoss()(model(x), y)

    optimizers = [sgd(params) for params in replicas]
    data_parallel_step(forward, replicas, optimizers, batch_of(5, 0), sizes=[2, 0, 3])
    assert called == [(0, 2), (2, 3)]
    before = bits(replicas[1])
    assert math.isnan(data_parallel_step(forward, replicas, optimizers, batch_of(0, 0), sizes=[0, 0, 0]))
    assert len(called) == 2 and bits(replicas[1]) != before  # momentum moves them on


def test_hooks_are_called_in_their_places():
    devices, calls = queues(2), []
    model = Network(devices[0])
    replicas = prepare_replicas(model, devices)
    optimizers = [sgd(params) for params in replicas]

    def forward(device, x, y, params):
        calls.append("forward")
        with autograd.Tape() as tape:
            loss = autograd.cross_entropy(model(x), y)
        return loss, tape

    def synced(given):
        same = [a.grad.numpy().tobytes() == b.grad.numpy().tobytes() for a, b in zip(*given, strict=True)]
        calls.append(f"synced {all(same)}")

    data_parallel_step(
        forward, replicas, optimizers, batch_of(5, 0), pre_shard_hook=lambda x, y: calls.append(f"{len(x)} {len(y)}"),
        post_sync_hook=synced, post_step_hook=lambda index: calls.append(f"step {index}"),
    )  # fmt: skip
    assert calls == ["5 5", "forward", "forward", "synced True", "step 0", "step 1"]


def test_parameters_alone_are_enough_and_forward_may_use_them():
    devices = queues(3)
    model, batches = Network(devices[0]), [batch_of(7, step) for step in range(3)]
    replicas = prepare_replicas(model.parameters(), devices)
    optimizers = [sgd(params) for params in replicas]

    def forward(device, x, y, params):
        assert all(parameter.device is device for parameter in params)
        w1, b1, w2, b2, w3, b3 = params
        hidden = ((x @ w1.T + b1).tanh() @ w2.T + b2).relu()
        return CrossEntropyLoss()(hidden @ w3.T + b3, y)

    for batch in batches:
        data_parallel_step(forward, replicas, optimizers, batch)
    require_close(model, train_alone(batches, [3, 2, 2])[0])


def test_buffers_and_random_numbers_are_each_device_s_own():
    devices = queues(3)
    layers = Linear(FEATURES, 64, device=devices[0]), BatchNorm1d(64, device=devices[0]), Dropout(0.5)
    model = Sequential(*layers, Linear(64, CLASSES, device=devices[0]))
    replicas = prepare_replicas(model, devices)
    seen, means = [], []

    def forward(device, x, y, params):
        with no_grad():
            seen.append(layers[2](Tensor(np.ones(64, np.float32), device)).numpy().tobytes())
        loss = CrossEntropyLoss()(model(x), y)
        means.append((layers[1].running_mean.numpy().tobytes(), int(layers[1].num_batches_tracked.item())))
        return loss

    optimizers = [sgd(params) for params in replicas]
    for step in range(2):
        data_parallel_step(forward, replicas, optimizers, batch_of(12, step))
    assert len(set(seen)) == 6 and len({mean for mean, _ in means}) == 6
    assert [count for _, count in means] == [1, 1, 1, 2, 2, 2]
    assert layers[1].running_mean.numpy().tobytes() == means[3][0]  # the model has the first device's
    assert all(bits(params) == bits(replicas[0]) for params in replicas)


def test_freezing_between_steps_holds_on_all_devices():
    devices = queues(2)
    model = Network(devices[0])
    replicas = prepare_replicas(model, devices)
    optimizers = [sgd(params) for params in replicas]

    def forward(device, x, y, params):
        return CrossEntropyLoss()(model(x), y)

    data_parallel_step(forward, replicas, optimizers, batch_of(6, 0))
    model.first.weight.requires_grad = False
    before = [params[0].numpy().tobytes() for params in replicas]
    data_parallel_step(forward, replicas, optimizers, batch_of(6, 1))
    assert [params[0].numpy().tobytes() for params in replicas] == before
    assert bits(replicas[0]) == bits(replicas[1])


def test_netcl_s_program_trains():
    """The steps of netcl's documentation, with its imports changed."""
    device_queues = list(queues(2))
    net = netcl_nn.Sequential(
        netcl_nn.Linear(device_queues[0], FEATURES, 16), netcl_nn.ReLU(), netcl_nn.Linear(device_queues[0], 16, CLASSES)
    )
    replicas = prepare_replicas(net.parameters(), device_queues)
    optimizers = [AdamW(params, lr=1e-2) for params in replicas]

    def forward_fn(queue, xb, yb, params):
        with autograd.Tape() as tape:
            loss = netcl_nn.cross_entropy(net(xb), yb)
        return loss, tape

    losses = [
        data_parallel_step(
            forward_fn=forward_fn, param_replicas=replicas, optimizers=optimizers, batch=batch_of(16, 0)
        )
        for _ in range(60)
    ]  # fmt: skip
    assert losses[-1] < 0.5 * losses[0]


# --- ranks ---


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("kind", ["cpu", "gpu"])
@pytest.mark.parametrize("uneven", [False, True])
def test_ranks_with_several_devices_equal_one_device(kind, uneven):
    comm = Communicator()
    count = 2
    sizes = [[3 + uneven * (rank + 2 * index) for index in range(count)] for rank in range(comm.size)]
    if uneven and comm.size > 1:
        sizes[-1] = [0, 0]
    parts = [[batch_of(sum(own), step, rank) for rank, own in enumerate(sizes)] for step in range(4)]
    joined = [tuple(np.concatenate(column) for column in zip(*each, strict=True)) for each in parts]
    replicas, model, _ = train(
        queues(count, kind), [each[comm.rank] for each in parts], sizes[comm.rank],
        synchronizer=Synchronizer(comm, bucket_size=128), seed=comm.rank,
    )  # fmt: skip
    require_close(model, train_alone(joined, [size for own in sizes for size in own])[0])
    everyone = comm.all_gather_object([bits(params) for params in replicas])
    assert all(each == everyone[0][0] for own in everyone for each in own)


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("sizes", [(4, 4, 4, 4), (5, 0, 3, 9)])
def test_as_many_ranks_have_the_same_bits_as_devices(sizes):
    comm = Communicator()
    sizes = sizes[: comm.size]
    batches = [batch_of(sum(sizes), step) for step in range(3)]
    mine = [tuple(shard_batch(array, comm.size, sizes)[comm.rank] for array in batch) for batch in batches]
    _, spread, _ = train(queues(1), mine, [sizes[comm.rank]], synchronizer=Synchronizer(comm))
    _, local, _ = train(queues(comm.size), batches, sizes)
    assert bits(spread.parameters()) == bits(local.parameters())


# --- errors ---


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
        (([], devices), "params: expected at least one parameter, got none"),
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
