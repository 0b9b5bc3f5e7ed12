"""The native engine's modules as replicas: gradients and parameters live in the memory that is reduced."""

from __future__ import annotations

import numpy as np
import pytest

from clcomm import Communicator, Synchronizer
from clcomm.base.errors import ArgumentError, MismatchError
from clcomm.base.flat_space.layout import FlatLayout
from clcomm.engine import Generator, Linear, Module, Parameter, Tensor
from clcomm.optim import SGD
from clcomm.sync.adapters import adapter_of
from clcomm.sync.adapters.adapter import FlatArrays
from clcomm.sync.adapters.native import NativeAdapter


class Net(Module):
    """Two layers; the second is used only when asked, so that its gradients can be missing."""

    def __init__(self, seed=0):
        rng = Generator(seed)
        self.first = Linear(4, 3, rng=rng)
        self.second = Linear(3, 2, rng=rng)

    def forward(self, x, both=True):
        x = self.first(x)
        return self.second(x) if both else x


def batch(rows, start=0):
    return np.arange(start, start + rows * 4, dtype=np.float32).reshape(rows, 4) / 10


def aligned(nbytes):
    """Return bytes that start at a multiple of 4096, as the Communicator's do."""
    memory = np.zeros(nbytes + 4096, np.uint8)
    start = -memory.ctypes.data % 4096
    return memory[start : start + nbytes]


@pytest.fixture
def space():
    """A module bound to flat arrays: (module, adapter, layout, arrays)."""
    module = Net()
    adapter = NativeAdapter(module)
    layout = FlatLayout(adapter.specs)
    arrays = FlatArrays(*(aligned(layout.span) for _ in range(3)))
    adapter.attach(layout, arrays)
    return module, adapter, layout, arrays


def test_specs_are_the_modules_parameters_in_its_order():
    specs = adapter_of(Net()).specs
    assert [(s.name, s.shape) for s in specs] == [
        ("first.weight", (3, 4)),
        ("first.bias", (3,)),
        ("second.weight", (2, 3)),
        ("second.bias", (2,)),
    ]


def test_attaching_keeps_values_and_moves_them_into_the_arrays(space):
    module, adapter, layout, arrays = space
    adapter.pull_parameters()
    for name, value in Net().state_dict().items():
        np.testing.assert_array_equal(layout.view(arrays.params, name), value)
        np.testing.assert_array_equal(module.state_dict()[name], value)


def test_pushed_parameters_are_those_the_kernels_read(space):
    module, adapter, layout, arrays = space
    layout.view(arrays.params, "first.weight")[...] = 0
    layout.view(arrays.params, "first.bias")[...] = 5
    adapter.push_parameters()
    np.testing.assert_array_equal(module(Tensor(batch(2)), both=False).numpy(), np.full((2, 3), 5))


def test_pulled_gradients_are_the_backwards_and_zero_where_missing(space):
    module, adapter, layout, arrays = space
    arrays.grads[:] = 255
    module(Tensor(batch(2)), both=False).sum().backward()
    for bucket in layout.buckets(None):
        adapter.pull_gradients(bucket)
    np.testing.assert_allclose(layout.view(arrays.grads, "first.weight"), np.tile(batch(2).sum(0), (3, 1)))
    np.testing.assert_array_equal(layout.view(arrays.grads, "first.bias"), [2, 2, 2])
    assert not layout.view(arrays.grads, "second.weight").any()


def test_pushed_gradients_are_those_the_optimizer_reads(space):
    module, adapter, layout, arrays = space
    before = module.state_dict()
    module(Tensor(batch(2))).sum().backward()
    for bucket in layout.buckets(1 << 20):
        adapter.pull_gradients(bucket)
        arrays.reduced[bucket.start : bucket.stop].view(np.float32)[...] = 0.5
        adapter.push_gradients(bucket)
    np.testing.assert_array_equal(module.second.bias.grad.numpy(), [0.5, 0.5])
    SGD(module, lr=1.0).step()
    for name, value in module.state_dict().items():
        np.testing.assert_allclose(value, before[name] - 0.5, rtol=1e-6)


def test_a_frozen_parameter_is_extra_state():
    module, other = Net(), Net(seed=1)
    for net in (module, other):
        net.first.bias.requires_grad = False
    adapter = NativeAdapter(module)
    assert "first.bias" not in [s.name for s in adapter.specs]
    state = adapter.extra_state()
    assert state.keys() == {"first.bias"}
    trained = other.first.weight.numpy()
    NativeAdapter(other).load_extra_state(state)
    np.testing.assert_array_equal(other.first.bias.numpy(), module.first.bias.numpy())
    np.testing.assert_array_equal(other.first.weight.numpy(), trained)


def test_another_modules_layout_is_refused():
    adapter = NativeAdapter(Net())
    layout = FlatLayout(reversed(adapter.specs))
    with pytest.raises(ArgumentError, match="layout"):
        adapter.attach(layout, FlatArrays(*(aligned(layout.span) for _ in range(3))))


def test_a_module_without_parameters_is_refused():
    with pytest.raises(ArgumentError, match="at least one"):
        adapter_of(Module())


@pytest.mark.parametrize("before", [True, False], ids=["frozen", "unfrozen"])
@pytest.mark.parametrize("overlap", [False, True])
def test_what_is_trained_may_not_change_after_the_first_synchronisation(before, overlap):
    module, sync = Net(), Synchronizer(Communicator(transport="solo"), overlap=overlap)
    module.first.bias.requires_grad = before
    for _ in range(3):
        module(Tensor(batch(2))).sum().backward()
        sync.sync_gradients(module)
        module.flat_space().zero_grad()
    module.first.bias.requires_grad = not before
    module(Tensor(batch(2))).sum().backward()
    with pytest.raises(ArgumentError, match=r"^parameter 'first\.bias': expected requires_grad to stay .*; freeze or"):
        sync.sync_gradients(module)


class Counting(Module):
    """A frozen parameter, a trained one, a buffer of the state and another."""

    def __init__(self, value: float):
        self.layer = Linear(2, 1, rng=Generator(0))
        self.frozen = Parameter([value], requires_grad=False)
        self.register_buffer("total", Tensor([value]))
        self.register_buffer("scratch", Tensor(np.int32(value)), persistent=False)

    def forward(self, x):
        return self.layer(x)


@pytest.mark.mpi(min_size=2)
def test_buffers_are_broadcast_with_the_parameters_and_again_on_request():
    comm = Communicator()
    model, sync = Counting(comm.rank + 1.0), Synchronizer(comm)
    sync.broadcast_parameters(model, root=1)
    assert [model.total.item(), model.scratch.item(), model.frozen.item()] == [2, 2, 2]
    model.total.copy_from([comm.rank + 5.0])
    sync.broadcast_parameters(model)
    assert model.total.item() == 5
    model.total.copy_from([comm.rank + 7.0])
    model.scratch.copy_from(np.int32(comm.rank))
    sync.broadcast_buffers(model, root=1)
    assert [model.total.item(), model.scratch.item()] == [8, 1]
    comm.finalize()


class Holding(Module):
    """Buffers of many dtypes, shapes and sizes."""

    SIZES = ((), (3,), (5, 7), (300, 1000), (1,))

    def __init__(self, value):
        self.layer = Linear(2, 2)
        for number, shape in enumerate(self.SIZES):
            dtype = np.float32 if number % 2 else np.int32
            self.register_buffer(f"held{number}", Tensor(np.full(shape, value + number, dtype)))

    def forward(self, x):
        return self.layer(x)


@pytest.mark.mpi(min_size=2)
def test_small_buffers_travel_together():
    comm = Communicator()
    model, sync = Holding(10 * comm.rank), Synchronizer(comm)
    for root, send in ((1, sync.broadcast_parameters), (0, sync.broadcast_buffers), (1, sync.broadcast_buffers)):
        for number, (_, held) in enumerate(model.named_buffers()):
            held.copy_from(np.full(held.shape, 10 * comm.rank + number, held.dtype))
        before = comm.stats.total("broadcast")["calls"]
        send(model, root)
        for number, (_, held) in enumerate(model.named_buffers()):
            assert (held.numpy() == 10 * root + number).all()
        # The parameters; the buffer of more than 1 MiB; all others.
        assert comm.stats.total("broadcast")["calls"] - before == 2 + (send == sync.broadcast_parameters)
    comm.finalize()


@pytest.mark.mpi(min_size=2)
def test_ranks_with_other_buffers_are_a_mismatch():
    comm = Communicator()
    model = Counting(1.0)
    if comm.rank == 1:
        model.register_buffer("extra", Tensor([1.0]))
    with pytest.raises(MismatchError, match="buffers and frozen parameters"):
        Synchronizer(comm).broadcast_parameters(model)
    comm.finalize()
