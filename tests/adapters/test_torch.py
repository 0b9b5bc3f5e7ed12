"""PyTorch modules as replicas: dtypes, missing and odd gradients, buffers, and the mean over ranks."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from clcomm import Communicator, Synchronizer  # noqa: E402
from clcomm.base.errors import ArgumentError  # noqa: E402
from clcomm.sync.adapters import adapter_of  # noqa: E402
from clcomm.sync.adapters.torch import TorchAdapter  # noqa: E402


class Mixed(torch.nn.Module):
    """One parameter of each dtype, with values that narrow dtypes round or overflow easily."""

    def __init__(self):
        super().__init__()
        self.f64 = torch.nn.Parameter(torch.tensor([1 / 3, 2.0], dtype=torch.float64))
        self.f32 = torch.nn.Parameter(torch.tensor([[0.1, -0.0]], dtype=torch.float32))
        self.f16 = torch.nn.Parameter(torch.tensor([6e-8, 65504.0, 0.1], dtype=torch.float16))
        self.bf16 = torch.nn.Parameter(torch.tensor([1e-40, 3e38, -0.1], dtype=torch.bfloat16))
        self.c64 = torch.nn.Parameter(torch.tensor([1 + 2j, -3j], dtype=torch.complex64))
        self.scalar = torch.nn.Parameter(torch.tensor(4.0))


def bits(tensor):
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()


def small_net(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2), torch.nn.Flatten(), torch.nn.Linear(8, 3)
    )


def pull_all(space):
    for bucket in space.buckets:
        space.adapter.pull_gradients(bucket)


def push_all(space):
    for bucket in space.buckets:
        space.adapter.push_gradients(bucket)


def test_specs_use_float32_for_narrow_dtypes_and_pairs_for_complex():
    specs = {s.name: (s.shape, s.dtype) for s in adapter_of(Mixed()).specs}
    assert specs == {
        "f64": ((2,), "float64"),
        "f32": ((1, 2), "float32"),
        "f16": ((3,), "float32"),
        "bf16": ((3,), "float32"),
        "c64": ((2, 2), "float32"),
        "scalar": ((), "float32"),
    }


def test_parameters_of_every_dtype_come_back_bit_for_bit(attach):
    model, expected = Mixed(), Mixed()
    space = attach(TorchAdapter(model))
    space.adapter.pull_parameters()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    space.adapter.push_parameters()
    for (name, got), wanted in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert bits(got) == bits(wanted), name


def test_every_bfloat16_survives_the_flat_space(attach):
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    every = every[torch.isfinite(every)]
    model = torch.nn.ParameterList([torch.nn.Parameter(every.clone())])
    space = attach(TorchAdapter(model))
    space.adapter.pull_parameters()
    space.adapter.push_parameters()
    assert bits(model[0]) == bits(every)


def test_gradients_of_every_dtype_are_pulled_and_pushed(attach):
    model = Mixed()
    sum(parameter.abs().double().sum() for parameter in model.parameters()).backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    space = attach(TorchAdapter(model))
    pull_all(space)
    space.arrays.reduced[:] = space.arrays.grads
    for parameter in model.parameters():
        parameter.grad.zero_()
    push_all(space)
    for name, parameter in model.named_parameters():
        assert parameter.grad.dtype == parameter.dtype
        assert bits(parameter.grad) == bits(expected[name]), name


def test_transposed_expanded_and_sparse_gradients_are_read_in_order(attach):
    model = torch.nn.ParameterDict({name: torch.zeros(2, 3) for name in ("transposed", "expanded", "sparse")})
    model["transposed"].grad = torch.arange(6.0).reshape(3, 2).T
    model["expanded"].grad = torch.tensor([1.0, 2.0, 3.0]).expand(2, 3)
    model["sparse"].grad = torch.sparse_coo_tensor([[1, 1], [0, 0]], [4.0, 5.0], (2, 3), check_invariants=False)
    expected = {"transposed": [[0, 2, 4], [1, 3, 5]], "expanded": [[1, 2, 3]] * 2, "sparse": [[0] * 3, [9, 0, 0]]}
    space = attach(TorchAdapter(model))
    pull_all(space)
    for name, values in expected.items():
        np.testing.assert_array_equal(space.layout.view(space.arrays.grads, name), values)
    space.arrays.reduced[:] = space.arrays.grads
    push_all(space)
    for name, values in expected.items():
        np.testing.assert_array_equal(model[name].grad.numpy(), values)


def test_channels_last_weights_keep_their_meaning(attach):
    model = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    expected = model.weight.detach().clone(memory_format=torch.contiguous_format).numpy()
    space = attach(TorchAdapter(model))
    space.adapter.pull_parameters()
    np.testing.assert_array_equal(space.layout.view(space.arrays.params, "weight"), expected)
    space.adapter.push_parameters()
    np.testing.assert_array_equal(model.weight.detach().numpy(), expected)


def test_averaged_gradients_may_lie_in_read_only_memory(attach):
    model = small_net()
    space = attach(TorchAdapter(model))
    space.layout.view(space.arrays.reduced, "3.bias")[...] = 2
    space.arrays.reduced.flags.writeable = False
    space.adapter.attach(space.layout, space.arrays)
    push_all(space)
    np.testing.assert_array_equal(model[3].bias.grad.numpy(), [2, 2, 2])


def test_frozen_parameters_and_buffers_are_extra_state_bit_for_bit():
    model = small_net()
    model[0].requires_grad_(False)
    model[0].to(torch.bfloat16)
    model.register_buffer("mask", torch.tensor([True, False]))
    model[1].running_mean += 0.3
    adapter = TorchAdapter(model)
    assert [s.name for s in adapter.specs] == ["1.weight", "1.bias", "3.weight", "3.bias"]
    state = adapter.extra_state()
    frozen = {"0.weight", "0.bias", "mask", "1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert state.keys() == frozen
    expected = bits(model[0].weight)
    other = small_net(seed=1)
    other[0].requires_grad_(False)
    other[0].to(torch.bfloat16)
    other.register_buffer("mask", torch.tensor([False, False]))
    TorchAdapter(other).load_extra_state(state)
    assert bits(other[0].weight) == expected
    assert other.mask.tolist() == [True, False]
    np.testing.assert_array_equal(other[1].running_mean.numpy(), model[1].running_mean.numpy())


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: torch.nn.ReLU(), "at least one parameter"),
        (lambda: torch.nn.LazyLinear(3), "run one batch"),
        (lambda: torch.nn.Linear(2, 2, device="meta"), "meta device"),
        (lambda: torch.nn.ParameterList([torch.zeros(2).to(torch.float8_e5m2)]), "float8_e5m2"),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_modules_that_cannot_be_averaged_are_refused_in_one_line(build, message):
    with pytest.raises(ArgumentError, match=message) as error:
        adapter_of(build())
    assert "\n" not in str(error.value)


@pytest.mark.mpi(min_size=1)
def test_buffers_follow_the_root():
    comm = Communicator()
    model = small_net(seed=comm.rank)
    model[1].running_mean += comm.rank
    model[1].num_batches_tracked += comm.rank
    model[0].bias.requires_grad_(False)
    Synchronizer(comm).broadcast_parameters(model)
    expected = small_net(seed=0)
    for name, value in expected.state_dict().items():
        assert bits(model.state_dict()[name]) == bits(value), name
