"""Parameter groups: as one optimizer for each group, as PyTorch's, and divided between ranks; checkpoints of them."""

from __future__ import annotations

from copy import copy

import numpy as np
import pytest

from clcomm import Synchronizer
from clcomm.base.errors import ArgumentError
from clcomm.engine import CrossEntropyLoss, Parameter, Tensor
from clcomm.optim import SGD, Adadelta, Adagrad, Adam, AdamW, RMSProp
from clcomm.sync.distributed_optimizer import DistributedOptimizer
from models import MLP
from tests.sharded_jobs import SHAPE, cpu

#: For each optimizer its defaults, and what each of three groups has of its own.
CASES = {
    "sgd": (SGD, {"lr": 0.1}, [{}, {"lr": 0.02, "weight_decay": 0.1}, {"momentum": 0.9, "nesterov": True}]),
    "adam": (Adam, {}, [{"betas": (0.5, 0.9)}, {"lr": 0.05}, {"weight_decay": 0.3, "eps": 1e-3}]),
    "adamw": (AdamW, {"lr": 0.01}, [{}, {"weight_decay": 0.0}, {"lr": 0.1, "weight_decay": 0.2}]),
    "adadelta": (Adadelta, {}, [{"rho": 0.5}, {"lr": 0.05, "eps": 1e-3}, {"weight_decay": 0.3}]),
    "adagrad": (Adagrad, {}, [{"lr_decay": 0.5}, {"lr": 0.05}, {"weight_decay": 0.3}]),
    "rmsprop": (RMSProp, {}, [{"centered": True}, {"momentum": 0.5, "alpha": 0.9}, {"lr": 0.1, "weight_decay": 0.1}]),
}
SIZES = [7, 130, 1, 300, 5, 64]  # of the parameters; number i is in group i % 3


def parameters() -> list[Parameter]:
    rng = np.random.default_rng(0)
    return [Parameter(rng.standard_normal(size).astype(np.float32), cpu()) for size in SIZES]


def gradients(step: int) -> list[np.ndarray]:
    rng = np.random.default_rng(1 + step)
    return [rng.standard_normal(size).astype(np.float32) for size in SIZES]


def grouped(make, defaults, own, given):
    return make([{"params": given[at::3], **each} for at, each in enumerate(own)], **defaults)


def take_step(optimizers, given, step: int) -> None:
    for parameter, gradient in zip(given, gradients(step), strict=True):
        parameter.grad = Tensor(gradient, parameter.device)
    for optimizer in optimizers:
        optimizer.step()


@pytest.mark.parametrize("kind", CASES)
def test_as_pytorch(kind):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    make, defaults, own = CASES[kind]
    ours, theirs = parameters(), [torch.tensor(each.numpy(), requires_grad=True) for each in parameters()]
    names = {SGD: "SGD", RMSProp: "RMSprop"}
    optimizer = grouped(make, defaults, own, ours)
    reference = grouped(getattr(torch.optim, names.get(make, make.__name__)), defaults, own, theirs)
    for step in range(5):
        for tensor, gradient in zip(theirs, gradients(step), strict=True):
            tensor.grad = torch.tensor(gradient)
        take_step([optimizer], ours, step)
        reference.step()
        for groups in (optimizer.param_groups, reference.param_groups):
            groups[1]["lr"] *= 0.9
        for parameter, tensor in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(parameter.numpy(), tensor.detach().numpy(), rtol=3e-5, atol=3e-6)


@pytest.mark.parametrize("kind", CASES)
def test_a_checkpoint_continues_with_the_same_bits(kind):
    make, defaults, own = CASES[kind]
    ours, copies = parameters(), parameters()
    optimizer = grouped(make, defaults, own, ours)
    optimizer.param_groups[2]["lr"] = 0.07
    for step in range(3):
        take_step([optimizer], ours, step)
    for to, value in zip(copies, ours, strict=True):
        to.copy_from(value.numpy())
    resumed, twin = grouped(make, defaults, own, copies), copy(optimizer)
    resumed.load_state_dict(optimizer.state_dict())
    assert [dict(each.numbers) for each in resumed.param_groups] == [each.numbers for each in optimizer.param_groups]
    twin.param_groups[0]["lr"] = 0.5
    assert optimizer.param_groups[0]["lr"] != 0.5
    take_step([optimizer], ours, 3)
    take_step([resumed], copies, 3)
    assert all(a.numpy().tobytes() == b.numpy().tobytes() for a, b in zip(ours, copies, strict=True))


def test_a_state_of_other_groups_is_refused():
    make, defaults, own = CASES["adam"]
    state = grouped(make, defaults, own, parameters()).state_dict()
    given = parameters()
    others = [{"params": given[:1]}, {"params": given[1:3]}, {"params": given[3:]}]
    for other in (Adam(parameters()), Adam(others)):
        before = other.state_dict()
        with pytest.raises(ArgumentError, match="state_dict"):
            other.load_state_dict(state)
        assert all(before[name].tobytes() == value.tobytes() for name, value in other.state_dict().items())


@pytest.mark.parametrize(("change", "message"), [
    (lambda p: SGD([{"params": p, "decay": 0.1}], lr=1), "param_groups: expected one of lr, .*, got 'decay'"),
    (lambda p: SGD([{"params": p, "lr": -1}], lr=1), "lr: expected a number of at least 0, got -1"),
    (lambda p: SGD([{"lr": 1}], lr=1), 'params: expected dicts with "params" for all groups'),
    (lambda p: SGD([{"params": p}, *p], lr=1), 'params: expected dicts with "params" for all groups, got Parameter'),
    (lambda p: SGD([{"params": p}, {"params": p[:1]}], lr=1), "params: expected each parameter in one group"),
    (lambda p: SGD(p, lr=1).add_param_group({"params": p[:1]}), "params: expected each parameter in one group"),
    (lambda p: SGD(p, lr=1).param_groups[0].update(rate=1), "param_groups: expected one of lr, .*, got 'rate'"),
    (lambda p: SGD(p, lr=1).param_groups[0].update(lr="fast"), "lr: expected a number of at least 0, got 'fast'"),
    (lambda p: SGD(p, lr=1).param_groups[0].update(params=p), "param_groups: expected one of lr, .*, got 'params'"),
    (lambda p: Adam(p, betas=(0.9,)), "betas: expected two numbers"),
])  # fmt: skip
def test_bad_use_is_one_line(change, message):
    with pytest.raises(ArgumentError, match=message) as caught:
        change(parameters())
    assert "\n" not in str(caught.value)


# --- several ranks ---


class Job:
    """A model with biases in a group without decay and at a rate of its own; stage 0 of ZeRO is plain."""

    def __init__(self, comm, kind: str, stage: int, **options):
        self.comm, self.model = comm, MLP(SHAPE, 10, device=cpu(), seed=comm.rank)
        self.sync = Synchronizer(comm, zero=stage or 1, bucket_size="2KiB", **options)
        make, defaults, own = CASES[kind]
        biases = [p for name, p in self.model.named_parameters() if name.endswith("bias")]
        weights = [p for name, p in self.model.named_parameters() if not name.endswith("bias")]
        self.optimizer = make([{"params": weights, **own[2]}, {"params": biases, **own[1]}], **defaults)
        if stage:
            self.optimizer = DistributedOptimizer(self.optimizer, self.sync)
        self.sync.broadcast_parameters(self.model)

    def run(self, *steps: int) -> dict[str, bytes]:
        for step in steps:
            self.optimizer.param_groups[1]["lr"] = 0.01 / (1 + step)
            rng = np.random.default_rng([step, self.comm.rank])
            images = Tensor(rng.standard_normal((3, *SHAPE)).astype(np.float32), cpu())
            labels = Tensor(rng.integers(0, 10, 3).astype(np.int32), cpu())
            CrossEntropyLoss()(self.model(images), labels).backward()
            self.sync.sync_gradients(self.model)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return {name: value.tobytes() for name, value in self.model.state_dict().items()}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("kind", CASES)
def test_a_sharded_update_of_groups_has_the_bits_of_a_plain_one(comm, kind, stage):
    plain, sharded = Job(comm, kind, 0), Job(comm, kind, stage)
    assert sharded.run(0, 1) == plain.run(0, 1)
    states = sharded.optimizer.state_dict(), plain.optimizer.state_dict()
    assert {name: value.tobytes() for name, value in states[0].items()} == {
        name: value.tobytes() for name, value in states[1].items()
    }
    with pytest.raises(ArgumentError, match="param_groups: expected all before the DistributedOptimizer is made"):
        sharded.optimizer.add_param_group({"params": [Parameter([1.0], cpu())]})
    resumed = Job(comm, kind, stage)
    resumed.model.load_state_dict(plain.model.state_dict())
    comm.barrier()
    resumed.optimizer.load_state_dict(states[1])
    assert resumed.run(2) == plain.run(2)


@pytest.mark.mpi(min_size=2)
def test_groups_of_an_adaptive_sum(comm):
    job = Job(comm, "sgd", 0, combination="adasum")
    weights, biases = job.optimizer.param_groups
    weights["nesterov"], weights["momentum"] = False, 0.0
    rng = np.random.default_rng(comm.rank)
    job.model(Tensor(rng.standard_normal((3, *SHAPE)).astype(np.float32), cpu())).sum().backward()
    job.sync.sync_gradients(job.model)
    expected = {}
    for group in (weights, biases):
        for parameter in group["params"]:
            value, gradient = (each.numpy().astype(np.float64) for each in (parameter, parameter.grad))
            expected[parameter] = value - group["lr"] * (gradient + group["weight_decay"] * value)
    job.optimizer.step()
    for parameter, value in expected.items():
        np.testing.assert_allclose(parameter.numpy(), value, rtol=1e-5, atol=1e-6)
