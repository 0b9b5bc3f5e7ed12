"""Parameters that a synchronisation overwrites between forward and backward, whose gradients would be of others."""

from __future__ import annotations

import numpy as np
import pytest

from clcomm import Communicator, Synchronizer
from clcomm.base.errors import ArgumentError
from clcomm.engine import Linear, Sequential, Tanh, Tensor
from clcomm.engine import functional as F
from clcomm.engine.parameter import Parameter
from clcomm.optim import SGD
from clcomm.parallel.devices.manager import DeviceManager
from clcomm.parallel.devices.replicas import replicate_params

ROWS = np.linspace(-1.0, 1.0, 12, dtype=np.float32).reshape(4, 3)


def model_of(rank: int) -> Sequential:
    rng = np.random.default_rng(rank)
    model = Sequential(Linear(3, 5), Tanh(), Linear(5, 2))
    for parameter in model.parameters():
        parameter.copy_from(rng.normal(size=parameter.shape))
    return model


def by_broadcast(sync: Synchronizer, model: Sequential) -> None:
    sync.broadcast_parameters(model, sync.comm.size - 1)


def by_average(sync: Synchronizer, model: Sequential) -> None:
    sync.average_parameters(model)


def by_repair(sync: Synchronizer, model: Sequential) -> None:
    sync.check_replicas(model)


def by_policy(sync: Synchronizer, model: Sequential) -> None:
    sync.finish_step(model)


WAYS = {
    "broadcast": (by_broadcast, {}), "average": (by_average, {"check_start": False}),
    "repair": (by_repair, {"check_start": False, "on_divergence": "rebroadcast"}),
    "local": (by_policy, {"policy": "local:h=1"}), "diloco": (by_policy, {"policy": "diloco:h=1"}),
    "sparseloco": (by_policy, {"policy": "sparseloco:h=1,share=0.5,bits=2"}),
    "streaming": (by_policy, {"policy": "streaming:h=1,fragments=1,delay=0,bits=32,alpha=0"}),
    "noloco": (by_policy, {"policy": "noloco:h=1"}),
}  # fmt: skip


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("way", "precision"), [*((way, "float32") for way in WAYS), ("broadcast", "bf16"), ("average", "bf16")]
)
def test_a_synchronisation_between_forward_and_backward_is_an_error_in_backward(way, precision):
    write, settings = WAYS[way]
    with Communicator() as comm:
        sync = Synchronizer(comm, precision=precision, **settings)
        model = model_of(0 if "policy" in settings else comm.rank)
        optimizer = SGD(model, 0.1)
        if "policy" in settings:
            sync.broadcast_parameters(model)
            F.mse_loss(model(Tensor(ROWS)), Tensor(np.full((4, 2), comm.rank, np.float32))).backward()
            sync.sync_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
        else:
            sync.average_parameters(model)  # the memory is the Communicator's from here on
            model[0].weight.copy_from(np.full((5, 3), 1 + (comm.rank == 0)))
        loss = model(Tensor(ROWS)).sum()
        before = [each.numpy() for each in model.parameters()]
        write(sync, model)
        changed = any((each.numpy() != old).any() for each, old in zip(model.parameters(), before, strict=True))
        assert any(comm.all_gather_object(changed)), "the test's own condition"
        with pytest.raises(
            ArgumentError, match=r"was overwritten after it \(by an optimizer's step, a synchronisation"
        ):
            loss.backward()
        model(Tensor(ROWS)).sum().backward()  # the next step is as ever
        assert all(np.isfinite(each.grad.numpy()).all() for each in model.parameters())


def test_a_write_stays_known_where_the_parameters_move_to_other_memory():
    with Communicator() as comm:
        model = model_of(0)
        loss = model(Tensor(ROWS)).sum()
        model[2].weight.copy_from(np.zeros((2, 5)))
        Synchronizer(comm, check_start=False).average_parameters(model_of(1))
        model.flat_space().rebind(*(np.zeros(model.flat_space().layout.span, np.uint8) for _ in range(3)))
        with pytest.raises(ArgumentError, match="was overwritten after it"):
            loss.backward()


def test_copies_on_other_devices_know_of_what_the_first_one_gives_them():
    devices = DeviceManager(["cpu", "cpu"]).devices
    replicas = replicate_params([Parameter(np.float32([1.0, 2.0]), devices[0])], devices)
    (other,) = replicas[1]
    loss = (other * other).sum()
    replicas.copy_first()
    with pytest.raises(ArgumentError, match="was overwritten after it"):
        loss.backward()
