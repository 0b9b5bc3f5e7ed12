"""Optimizers that share parameters: PyTorch's results."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from clcomm import Communicator, GradScaler, Synchronizer
from clcomm.base.errors import ArgumentError
from clcomm.engine import Linear, Module, Parameter, ReLU, Sequential, Tensor
from clcomm.engine.nn.init import Generator
from clcomm.optim import SGD, Adadelta, Adagrad, Adam, AdamW, RAdam, RMSProp
from clcomm.sync.distributed_optimizer import DistributedOptimizer
from tests.sharded_jobs import cpu

KINDS = [
    (SGD, "SGD", {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1, "dampening": 0.5}),
    (Adam, "Adam", {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True}),
    (AdamW, "AdamW", {"lr": 0.01, "weight_decay": 0.1}),
    (RAdam, "RAdam", {"lr": 0.01}),
    (RMSProp, "RMSprop", {"lr": 0.01, "centered": True, "momentum": 0.5}),
    (Adadelta, "Adadelta", {"lr": 0.5}),
    (Adagrad, "Adagrad", {"lr": 0.05, "lr_decay": 0.1}),
]
SIZES = [7, 130, 1, 300]
#: The parameters of each optimizer: neighbours share one or all.
OWN = [(0, 1), (2, 3), (0, 1, 2, 3), (1, 3)]


def values(step: int) -> list[np.ndarray]:
    rng = np.random.default_rng(step)
    return [rng.standard_normal(size).astype(np.float32) for size in SIZES]


@pytest.mark.parametrize(("ours", "theirs", "options"), KINDS, ids=lambda v: v if isinstance(v, str) else "")
def test_each_optimizer_has_its_own_state_and_its_own_gradients(device, ours, theirs, options):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    parameters = [Parameter(value, device) for value in values(0)]
    twins = [torch.nn.Parameter(torch.tensor(value)) for value in values(0)]
    optimizers, others = [], []
    for step in range(1, 30):
        if step % 3 == 1 and len(optimizers) < len(OWN):  # flat spaces that are in use become one
            optimizers.append(ours([parameters[i] for i in OWN[len(optimizers)]], **options))
            others.append(getattr(torch.optim, theirs)([twins[i] for i in OWN[len(others)]], **options))
        rng = np.random.default_rng([step, 1])
        at, given = rng.integers(len(optimizers)), rng.random(len(SIZES)) < 0.7
        given[list(OWN[at])] = True
        for number, gradient in enumerate(values(step)):
            if given[number]:
                twins[number].grad, parameters[number].grad = torch.tensor(gradient), Tensor(gradient, device)
        optimizers[at].step(), others[at].step()
        to_none = bool(rng.integers(2))
        optimizers[at].zero_grad(to_none), others[at].zero_grad(to_none)
        assert [p.grad is None for p in parameters] == [p.grad is None for p in twins]
    for parameter, twin in zip(parameters, twins, strict=True):
        np.testing.assert_allclose(parameter.numpy(), twin.detach().numpy(), rtol=2e-5, atol=2e-6)


def pair(device) -> tuple[Module, Module, Module]:
    """Return a generator, a discriminator, and the module that has both."""
    rng = Generator(3)
    first = Sequential(Linear(4, 6, device=device, rng=rng), ReLU())
    second = Sequential(Linear(6, 1, device=device, rng=rng))
    return first, second, Sequential(first, second)


def test_a_module_of_all_shares_gives_them_their_names(device):
    first, second, both = pair(device)
    one, two = Adam(first), Adam(second)
    three = Adam(itertools.chain(first.parameters(), second.parameters()))
    assert first[0].weight.slot.space is second[0].weight.slot.space is three.space
    x = Tensor(np.ones((2, 4)), device)
    for optimizer in (one, two, three):
        both(x).sum().backward()
        optimizer.step()
        assert not optimizer.is_alone or optimizer is three
        optimizer.zero_grad()
    assert both.flat_space() is three.space
    assert {place.name for place in three.space.layout.ranges} == set(both.state_dict())
    assert one.space is two.space is three.space
    saved = one.state_dict()
    again = pair(device)
    resumed = Adam(again[0])
    Adam(again[1]), Adam(again[2])
    again[2].flat_space()
    resumed.step()  # has no gradient
    resumed.zero_grad()
    resumed.load_state_dict(saved)
    assert resumed.steps == 1 and {**resumed.state_dict()}.keys() == saved.keys()
    assert all(np.array_equal(saved[name], value) for name, value in resumed.state_dict().items())


def test_what_cannot_be_shared_is_refused(device):
    first, second, _ = pair(device)
    Adam(first), Adam(second)
    Adam([*first.parameters(), *second.parameters()])
    with pytest.raises(ArgumentError, match="some are in a flat space with others; give all of a model's together"):
        first.flat_space()
    with Communicator() as comm:
        if comm.size == 1:
            third, fourth, whole = pair(device)
            sync = Synchronizer(comm)
            sync.broadcast_parameters(whole)
            whole(Tensor(np.ones((2, 4)), device)).sum().backward()
            sync.sync_gradients(whole)
            one, other = SGD(third, 0.1), SGD(fourth, 0.1)
            for use in (lambda: DistributedOptimizer(one, sync), lambda: GradScaler(sync).step(other)):
                with pytest.raises(ArgumentError, match="optimizer: expected one with all of a model's trainable"):
                    use()


@pytest.mark.mpi(min_size=1)
def test_ranks_train_with_shared_parameters_as_one():
    """The mean of the ranks' gradients is that of one rank with all samples; the module of both is synchronised."""
    device = cpu()
    with Communicator() as comm:
        results = []
        for ranks, own in ((1, range(comm.size)), (comm.size, [comm.rank])):
            first, second, both = pair(device)
            optimizers = [SGD(first, 0.05, momentum=0.9), SGD(second, 0.05, momentum=0.9)]
            optimizers.append(SGD([*first.parameters(), *second.parameters()], 0.02, momentum=0.5))
            sync = Synchronizer(comm) if ranks > 1 else None
            if sync is not None:
                sync.broadcast_parameters(both)
            for step in range(6):
                optimizer = optimizers[step % 3]
                optimizer.zero_grad(), both.zero_grad()
                for rank in own:
                    rng = np.random.default_rng([step, rank])
                    result = both(Tensor(rng.standard_normal((3, 4)).astype(np.float32), device))
                    (result * result).mean().backward(1.0 / len(own))
                if sync is not None:
                    sync.sync_gradients(both)
                optimizer.step()
            results.append({name: value.numpy() for name, value in both.named_parameters()})
        alone, together = results
        for name, value in alone.items():
            np.testing.assert_allclose(together[name], value, rtol=1e-5, atol=1e-6)
        if comm.size > 1:
            with pytest.raises(ArgumentError, match="give all of a model's together"):
                sync.sync_gradients(first)


@pytest.mark.mpi(min_size=1)
def test_models_whose_memory_is_shared_already_are_refused():
    """The Synchronizer would go on averaging the memory that their parameters leave."""
    with Communicator() as comm:
        first, second, both = pair(cpu())
        sync = Synchronizer(comm)
        for model in (first, second):
            sync.broadcast_parameters(model)
        for given in (both, [*first.parameters(), *second.parameters()]):
            with pytest.raises(ArgumentError, match="an optimizer of several models before their memory is shared"):
                SGD(given, 0.1)
        assert first.flat_space() is first[0].weight.slot.space
