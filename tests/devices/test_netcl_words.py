"""netcl's words beyond its lists: a model with its optimizer and loss, the default device, and workers."""

from __future__ import annotations

import operator
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest

import clcomm.netcl.autograd as ag
from clcomm.base.errors import ArgumentError
from clcomm.engine import Tensor, default_device
from clcomm.netcl.distributed import DeviceManager, broadcast_params, data_parallel_step, prepare_replicas
from clcomm.netcl.nn import Linear
from clcomm.optim import SGD
from clcomm.parallel.devices import prepare_replicas as prepare_lists
from tests.devices.several import OPTIMIZERS, Network, batch_of, bits, queues, require_close, sgd, train_alone
from tests.helpers import cpu_device, one_line


def cross_entropy(logits, y):
    return ag.cross_entropy(logits, y)


@pytest.mark.parametrize("tape", [{}, {"tape_factory": ag.Tape}], ids=["no_tape", "tape"])
@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_a_model_with_its_optimizer_trains_as_on_one_device(name, replay, tape):
    batches = [batch_of(12, step) for step in range(4)]
    model = Network(cpu_device("cpu"))
    replicas = prepare_replicas(model, OPTIMIZERS[name](model), n_replicas=4, devices=list(queues(4)))
    losses = [data_parallel_step(replicas, batch, loss_fn=cross_entropy, replay=replay, **tape) for batch in batches]
    expected, alone = train_alone(batches, [3] * 4, optimizer=OPTIMIZERS[name])
    np.testing.assert_allclose(losses, alone, rtol=1e-5)
    require_close(model, expected, 1e-5)
    assert len({tuple(bits(each)) for each in replicas}) == 1


def test_an_optimizers_groups_are_each_devices():
    def grouped(model):
        heads = [*model.last.parameters()]
        others = [*model.first.parameters(), *model.middle.parameters()]
        return SGD([{"params": heads, "lr": 0.3, "momentum": 0.5}, {"params": others}], 0.1)

    batches = [batch_of(6, step) for step in range(3)]
    model = Network(cpu_device("cpu"))
    replicas = prepare_replicas(model, grouped(model), devices=list(queues(2)))
    for batch in batches:
        data_parallel_step(replicas, batch, loss_fn=cross_entropy)
    require_close(model, train_alone(batches, [3, 3], optimizer=grouped)[0])
    assert bits(replicas[0]) == bits(replicas[1])


def test_broadcast_params_takes_replicas_alone_or_lists():
    model = Network(cpu_device("cpu"))
    replicas = prepare_replicas(model, sgd(model), devices=list(queues(3)))
    for way in (lambda: broadcast_params(replicas), lambda: broadcast_params(None, replicas)):
        replicas[2][1].copy_from(np.full(replicas[2][1].shape, 7.0, np.float32))
        assert bits(replicas[0]) != bits(replicas[2])
        way()
        assert bits(replicas[0]) == bits(replicas[1]) == bits(replicas[2])


def stepped(model):
    optimizer, (x, y) = sgd(model), batch_of(4, 0)
    ag.cross_entropy(model(Tensor(x, cpu_device("cpu"))), y).backward()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: prepare_replicas(m, sgd(m), n_replicas=3, devices=list(queues(2))), "n_replicas: expected 2, the"),
        (lambda m: prepare_replicas(m, list(queues(2)), n_replicas=2), "opt: expected an optimizer with n_replicas"),
        (lambda m: prepare_replicas([*m.parameters()], sgd(m)), "params: expected the model with an optimizer"),
        (lambda m: prepare_replicas(m, stepped(m), devices=list(queues(2))), "optimizer: expected one before its"),
        (
            lambda m: data_parallel_step(prepare_lists(m, queues(2)), batch_of(4, 0), loss_fn=cross_entropy),
            "replicas: expected optimizers with loss_fn",
        ),
        (lambda m: data_parallel_step(m, loss_fn=cross_entropy), "expected replicas and a batch with loss_fn, got 1"),
    ],
)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(ArgumentError, match=message) as caught:
        call(Network(cpu_device("cpu")))
    one_line(caught)


def test_the_default_device_is_the_processs_own():
    own = DeviceManager.default()
    assert own is default_device() is DeviceManager.default("auto") is DeviceManager.default(None)
    named = DeviceManager.default("cpu")
    assert named is DeviceManager.default("cpu") and named.kind == "cpu"
    for queue in (None, own, own.queue):
        assert Linear(queue, 2, 3).weight.device is own
    assert Linear(named.queue, 2, 3).weight.device is named


def test_workers_do_what_comes_through_a_pipe():
    """The function of the last piece of work raises."""
    work = [(repr, ()), (getattr, ("kind",)), (getattr, ("nothing",))]
    environment = {**os.environ, "NETCL_DEVICE": "cpu"}
    command = [sys.executable, "-m", "clcomm.netcl.distributed.replica"]
    sent = b"".join(map(pickle.dumps, work)) + pickle.dumps((print_device, ()))
    ended = subprocess.run(command, input=sent, env=environment, capture_output=True, timeout=60, check=True)
    results, at = [], 0
    while at < len(ended.stdout):
        results.append(pickle.loads(ended.stdout[at:]))
        at += len(pickle.dumps(results[-1]))
    kinds = [kind for kind, _ in results]
    assert kinds == ["result", "result", "error", "result"]
    assert results[0][1].startswith("Device(cpu") and results[1][1] == "cpu" and "nothing" in results[2][1]
    assert b"printed by the work" in ended.stderr


def print_device(device):
    print("printed by the work", flush=True)
    return operator.attrgetter("compute_units")(device) > 0


def test_a_worker_whose_device_is_not_there_says_so():
    environment = {**os.environ, "NETCL_DEVICE": "gpu:9"}
    environment.pop("CLCOMM_DEVICE", None)
    command = [sys.executable, "-m", "clcomm.netcl.distributed.replica"]
    ended = subprocess.run(command, input="", env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2 and "gpu:9" in ended.stderr and "Traceback" not in ended.stderr, ended.stderr


def test_every_module_and_name_that_its_pages_show():
    from clcomm.netcl.distributed import collectives, data_parallel, device_manager, trainer

    assert {"all_reduce", "broadcast", "scatter", "gather"} <= {*dir(collectives)}
    assert {"shard_batch", "replicate_params", "sync_grads", "broadcast_params"} <= {*dir(data_parallel)}
    assert device_manager.DeviceManager is DeviceManager and trainer.data_parallel_step is data_parallel_step
    x = ag.tensor(np.arange(3, dtype=np.float32), requires_grad=True)
    (x * x).sum().backward()
    assert ag.tensor(x) is x and x.grad.to_host().tolist() == [0.0, 2.0, 4.0]
