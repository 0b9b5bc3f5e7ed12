"""Copies of modules, parameters, tensors and optimizers: separate memory, and the same further training."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

from clcomm import Communicator, Synchronizer
from clcomm.base.errors import ArgumentError
from clcomm.engine import Device, Linear, Module, Parameter, ReLU, Sequential, Tensor
from clcomm.engine import functional as F
from clcomm.optim import SGD
from clcomm.sync.distributed_optimizer import DistributedOptimizer
from tests.helpers import cpu_device, one_line
from tests.test_optim import CASES


def pickled(thing):
    return pickle.loads(pickle.dumps(thing))


class Net(Module):
    """Layers, a frozen parameter, a tied one, a plain tensor and plain values."""

    def __init__(self, device: Device):
        self.layers = Sequential(Linear(3, 4, device=device), ReLU(), Linear(4, 3, device=device))
        self.scale = Parameter(np.full(3, 0.5), device, requires_grad=False)
        self.tied = self.layers[2].bias
        self.mask, self.options = Tensor([1.0, 0.0, 1.0], device), {"rate": 0.1, "sizes": [1, 2]}

    def forward(self, x):
        return self.layers(x) * self.scale * self.mask + self.tied


def batch(device: Device, seed: int = 0) -> Tensor:
    return Tensor(np.random.default_rng(seed).standard_normal((5, 3)), device)


def train(model: Module, optimizer, device: Device, steps: int = 3, first: int = 0) -> list[bytes]:
    for step in range(first, first + steps):
        F.mse_loss(model(batch(device, step)), batch(device, step + 50)).backward()
        optimizer.step(), optimizer.zero_grad()
    return [parameter.numpy().tobytes() for parameter in model.parameters()]


@pytest.fixture(params=["cpu", "gpu"])
def device(request) -> Device:
    return cpu_device(request.param)


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, pickled])
@pytest.mark.parametrize("values", [[[1.5, -2.0]], 3.0, [[1], [2]]])
def test_tensors(device, make, values):
    tensor = Tensor(values, device, requires_grad=np.asarray(values).dtype.kind == "f")
    copied = make(tensor)
    assert (type(copied), copied.shape, copied.dtype) == (Tensor, tensor.shape, tensor.dtype)
    assert copied.requires_grad == tensor.requires_grad and copied.grad is None
    assert make is pickled or copied.device is device
    tensor.copy_from(np.zeros(tensor.shape))
    assert copied.numpy().tolist() == np.asarray(values).tolist()


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, pickled])
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("trained", [False, True])
def test_parameters_and_gradients(device, make, flat, trained):
    model = Linear(2, 2, device=device)
    if flat:
        model.flat_space()
    model(Tensor(np.ones((1, 2)), device)).sum().backward()
    model.weight.register_post_accumulate_grad_hook(lambda _: pytest.fail("a copy has no hooks"))
    model.weight.requires_grad = trained
    copied, gradient = make(model.weight), make(model.weight.grad)
    assert type(copied) is Parameter and copied.slot is None and copied.grad is None
    assert copied.requires_grad == trained and copied.numpy().tobytes() == model.weight.numpy().tobytes()
    assert type(gradient) is Tensor and gradient.numpy().tobytes() == model.weight.grad.numpy().tobytes()
    before = model.weight.numpy()
    copied.copy_from(np.zeros((2, 2))), gradient.copy_from(np.zeros((2, 2)))
    assert model.weight.numpy().tobytes() == before.tobytes() and model.weight.grad.numpy().all()


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, pickled])
def test_the_result_of_an_operation_is_refused(device, make):
    result = Tensor([1.0], device, requires_grad=True) * 2
    with pytest.raises(ArgumentError) as caught:
        make(result)
    assert one_line(caught) == "copy: expected a leaf, got the result of an operation; detach() it first"
    assert make(result.detach()).item() == 2


@pytest.mark.parametrize("make", [copy.deepcopy, pickled])
@pytest.mark.parametrize("trained", [0, 2], ids=["new", "trained"])
def test_deep_copies_of_modules(make, trained, device):
    if make is pickled and device is not cpu_device("cpu"):
        pytest.skip("what is pickled is loaded to the default device")
    model = Net(device)
    if trained:
        train(model, SGD(model, 0.1, momentum=0.9), device, trained)
    model.eval()
    copied = make(model)
    assert type(copied) is Net and not copied.training and not copied.layers[0].training
    assert [name for name, _ in copied.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert copied.tied is copied.layers[2].bias and copied.layers[2].bias is not model.layers[2].bias
    assert not copied.scale.requires_grad and copied.options == model.options
    assert copied.options is not model.options and copied.mask is not model.mask
    assert all(p.slot is None for p in copied.parameters())
    assert {n: v.tobytes() for n, v in copied.state_dict().items()} == {
        n: v.tobytes() for n, v in model.state_dict().items()
    }
    before = model.state_dict()
    own = copied.scale.device
    assert train(copied, SGD(copied, 0.1), own) != [value.tobytes() for value in before.values()]
    assert all(before[name].tobytes() == value.tobytes() for name, value in model.state_dict().items())
    assert train(model, SGD(model, 0.1), device) == [p.numpy().tobytes() for p in copied.parameters()]


def test_a_copy_of_a_module_shares_its_parameters_but_not_its_registry(device):
    model = Net(device)
    optimizer = SGD(model, 0.1)
    copied = copy.copy(model)
    assert list(copied.parameters()) == list(model.parameters())
    assert train(copied, optimizer, device) == [p.numpy().tobytes() for p in model.parameters()]
    assert copied.flat_space() is model.flat_space()
    del copied.tied
    assert "tied" in model._parameters


@pytest.mark.parametrize(("ours", "_", "options"), CASES, ids=lambda v: v if isinstance(v, str) else "")
@pytest.mark.parametrize("make", [copy.deepcopy, pickled])
@pytest.mark.parametrize("model_first", [True, False])
def test_a_model_and_its_optimizer_go_on_together(ours, _, options, make, model_first):
    device = cpu_device("cpu")
    model = Net(device)
    optimizer = ours(model, **{"lr": 0.05, **options})
    train(model, optimizer, device)
    model.layers[0].weight.requires_grad = False
    train(model, optimizer, device)
    together = make((model, optimizer) if model_first else (optimizer, model))
    other, resumed = together if model_first else together[::-1]
    assert resumed.space is not optimizer.space and resumed.steps == optimizer.steps
    for each in (model, other):
        each.layers[0].weight.requires_grad = True
    own = other.scale.device
    assert train(other, resumed, own, first=9) == train(model, optimizer, device, first=9)
    assert resumed.space is other.flat_space()
    states = [each.state_dict() for each in (optimizer, resumed)]
    assert {n: v.tobytes() for n, v in states[0].items()} == {n: v.tobytes() for n, v in states[1].items()}


def test_a_copy_of_an_optimizer_has_state_of_its_own(device):
    model = Net(device)
    optimizer = SGD(model, 0.1, momentum=0.9)
    train(model, optimizer, device)
    copied = copy.copy(optimizer)
    before = copied.state_dict()
    train(model, optimizer, device)
    after = copied.state_dict()
    assert copied.space is optimizer.space and optimizer.steps == copied.steps + 3
    assert {n: v.tobytes() for n, v in before.items()} == {n: v.tobytes() for n, v in after.items()}


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, pickled])
def test_what_belongs_to_a_process_says_so(make):
    comm = Communicator(transport="solo")
    sync, model = Synchronizer(comm), Linear(2, 2)
    sharded = DistributedOptimizer(SGD(model, 0.1), sync)
    for thing, name in ((comm, "Communicator"), (sync, "Synchronizer"), (sharded, "DistributedOptimizer")):
        with pytest.raises(ArgumentError, match=f"^{name}: expected to stay in its process"):
            make(thing)
    if make is pickled:
        with pytest.raises(ArgumentError, match=r"^Device: expected to be selected in each process"):
            make(cpu_device("cpu"))
    else:
        assert make(cpu_device("cpu")) is cpu_device("cpu")
