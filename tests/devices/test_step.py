"""Steps on several devices end with the parameters of one device on the same samples, and with one another's bits."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clcomm.engine import BatchNorm1d, CrossEntropyLoss, Dropout, Linear, Sequential, Tensor, no_grad
from clcomm.netcl import autograd
from clcomm.netcl import nn as netcl_nn
from clcomm.optim import AdamW
from clcomm.parallel.devices import data_parallel_step, prepare_replicas, shard_batch, sync_grads
from tests.devices.several import (
    CLASSES,
    FEATURES,
    OPTIMIZERS,
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
from tests.helpers import cpu_device


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
    assert len(called) == 2 and bits(replicas[1]) == before  # as in a process whose backward did not run


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


def test_a_backward_on_the_first_device_leaves_the_mean_to_the_others():
    """Their optimizers may still read it then: a device without samples is not waited for."""
    devices = queues(2)
    model, (x, y) = Network(devices[0]), batch_of(4, 0)
    replicas = prepare_replicas(model, devices)

    def backward():
        CrossEntropyLoss()(model(Tensor(x, devices[0])), Tensor(y, devices[0])).backward()

    backward()
    sync_grads(replicas)
    mean = [parameter.grad.numpy() for parameter in replicas[1]]
    model.zero_grad()
    backward()
    devices[0].finish()
    for parameter, expected in zip(replicas[1], mean, strict=True):
        np.testing.assert_array_equal(parameter.grad.numpy(), expected)


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


@pytest.mark.parametrize("kind", ["cpu", "gpu", "mixed"])
@pytest.mark.parametrize("sizes", [[4, 4, 4], [7, 0, 5]])
def test_replayed_steps_have_the_bits_of_others(kind, sizes):
    """Each device replays its own recording, of its own parameters."""
    devices, found = queues(3, kind), []
    for replay in (False, True):
        model, loss_fn = Network(devices[0]), CrossEntropyLoss()
        replicas = prepare_replicas(model, devices)
        optimizers = [sgd(params) for params in replicas]

        def forward(device, x, y, params, model=model, loss_fn=loss_fn):
            return loss_fn(model(x), y)

        losses = [
            data_parallel_step(forward, replicas, optimizers, batch_of(12, step), sizes=sizes, replay=replay)
            for step in range(14)
        ]
        found.append((losses, [bits(params) for params in replicas]))
        if replay:
            runs = {index: each.replayed for index, (_, each) in replicas.recorded.items()}
            assert runs.keys() == {index for index, size in enumerate(sizes) if size}
            assert min(runs.values()) >= 10, [each.refusal for _, each in replicas.recorded.values()]
    assert found[0] == found[1]
