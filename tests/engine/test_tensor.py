"""Tensors: accepted values, conversions back, errors."""

from __future__ import annotations

import copy
import gc
import weakref

import numpy as np
import pyopencl as cl
import pytest
from hypothesis import given
from hypothesis.extra.numpy import array_shapes

from clcomm.base.errors import ArgumentError
from clcomm.base.host.arrays import aligned_empty
from clcomm.engine import FlatSpace, Parameter, Tensor


@given(shape=array_shapes(min_dims=0, max_dims=5, max_side=5))
def test_values_survive_the_round_trip(device, shape):
    values = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    tensor = Tensor(values, device)
    assert (tensor.shape, tensor.numel(), tensor.nbytes, tensor.ndim) == (shape, values.size, values.nbytes, len(shape))
    assert tensor.numpy().tobytes() == values.tobytes()


@pytest.mark.parametrize(("values", "dtype"), [
    ([1.5, 2.5], "float32"), (np.float64([1, 2]), "float32"), (np.float16(3), "float32"), ([1, 2], "int32"),
    (np.uint8([0, 255]), "int32"), (np.int64([-5, 7]), "int32"),
])  # fmt: skip
def test_dtypes(device, values, dtype):
    tensor = Tensor(values, device)
    assert tensor.dtype == dtype
    assert np.array_equal(tensor.numpy(), np.asarray(values))


def test_strided_and_fortran_arrays(device):
    values = np.arange(24, dtype=np.float32).reshape(4, 6)
    for view in (values.T, values[::2, ::3], values[:, ::-1], np.asfortranarray(values)):
        assert np.array_equal(Tensor(view, device).numpy(), view)


def test_nan_payloads_and_denormals_are_kept(device):
    values = np.array([0x7FC00001, 0xFF800000, 0x00000001, 0x80000000], np.uint32).view(np.float32)
    assert Tensor(values, device).numpy().tobytes() == values.tobytes()


def test_a_tensor_from_a_tensor_is_a_copy(device):
    first = Tensor([1.0, 2.0], device)
    second = Tensor(first, device)
    first.copy_from([3.0, 4.0])
    assert second.numpy().tolist() == [1, 2]


@pytest.mark.parametrize(("values", "message"), [
    (["a"], "expected numbers, got dtype <U1"),
    ([1 + 2j], "expected numbers, got dtype complex128"),
    ([2**40], "integers must fit int32"),
])  # fmt: skip
def test_refuses(device, values, message):
    with pytest.raises(ArgumentError, match=message):
        Tensor(values, device)


def test_tensors_may_have_no_elements(device):
    for values in (np.zeros((3, 0), np.float32), np.zeros(0, np.int32), np.zeros((0, 2), bool)):
        x = Tensor(values, device)
        assert (x.shape, x.dtype, x.numel()) == (values.shape, values.dtype, 0)
        for each in (x, copy.deepcopy(x), x.clone(), x.view(-1).view(*values.shape)):
            assert each.numpy().tolist() == values.tolist()
        x.copy_from(values)
    with pytest.raises(ArgumentError, match=r"Parameter: expected one element or more, got shape \(0, 2\)"):
        Parameter(np.zeros((0, 2)), device)


def test_a_boolean_alone_has_no_dimension(device):
    assert Tensor(True, device).shape == () and Tensor(np.bool_(False), device).item() is False


def test_item_len_bool_repr(device):
    assert Tensor([[2.5]], device).item() == 2.5
    assert Tensor(7, device).item() == 7
    assert len(Tensor(np.zeros((4, 2)), device)) == 4
    assert Tensor(1.0, device) and not Tensor(0.0, device)
    assert repr(Tensor([1.0, 2.0], device, requires_grad=True)) == "Tensor([1., 2.], float32, requires_grad=True)"
    with pytest.raises(ArgumentError, match=r"item: expected a tensor of one element, got shape \(2,\)"):
        Tensor([1.0, 2.0], device).item()
    with pytest.raises(TypeError):
        len(Tensor(1.0, device))


def test_copy_from_checks_the_shape(device):
    with pytest.raises(ArgumentError, match=r"copy_from: expected an array of shape \(2,\), got \(3,\)"):
        Tensor([1.0, 2.0], device).copy_from(np.zeros(3))


def test_requires_grad_only_on_float_leaves(device):
    with pytest.raises(ArgumentError, match="requires_grad: expected a float32 tensor, got int32"):
        Tensor([1, 2], device, requires_grad=True)
    result = Tensor([1.0], device, requires_grad=True) * 2
    with pytest.raises(ArgumentError, match="requires_grad: expected a leaf"):
        result.requires_grad = False


def test_grad_checks_the_shape(device):
    for leaf in (Tensor([1.0, 2.0], device, requires_grad=True), Parameter([1.0, 2.0], device)):
        with pytest.raises(ArgumentError, match=r"grad: expected shape \(2,\), got \(3,\)"):
            leaf.grad = Tensor(np.zeros(3), device)
        leaf.grad = Tensor([5.0, 6.0], device)
        (leaf * 1.0).backward(1.0)
        assert leaf.grad.numpy().tolist() == [6, 7]


def test_arrays_on_the_left_are_refused_by_name(device):
    with pytest.raises(ArgumentError, match=r"expected a Tensor.*, got ndarray"):
        np.zeros(2) + Tensor([1.0, 2.0], device)


def test_a_tensor_may_lie_in_the_memory_of_an_aligned_array(device):
    array = aligned_empty((3, 5), np.float32)
    array[...] = np.arange(15, dtype=np.float32).reshape(3, 5)
    tensor = Tensor(array, device, copy=False)
    if device.shares_host_memory:
        tensor.copy_from(array + 1)
        device.finish()
    np.testing.assert_array_equal(tensor.numpy(), array)


def test_values_are_copied_where_memory_cannot_be_shared(device):
    raw = aligned_empty((16,), np.float32)
    for array in (raw[1:9], np.frombuffer(bytes(32), np.float32)):  # not aligned; read-only
        tensor = Tensor(array, device, copy=False)
        tensor.copy_from(np.ones(8, np.float32))
        np.testing.assert_array_equal(tensor.numpy(), np.ones(8))
        assert array is not raw and (not array.flags.writeable or not (array == 1).all())


def test_memory_of_a_dropped_tensor_stays_while_kernels_use_it(device):
    total = Tensor(np.zeros(4096, np.float32), device)
    for value in range(200):
        array = aligned_empty((4096,), np.float32)
        array[...] = value
        total = total + Tensor(array, device, copy=False)
        del array
    np.testing.assert_array_equal(total.numpy(), np.full(4096, sum(range(200)), np.float32))


def _in_a_space(array: np.ndarray, device) -> FlatSpace:
    space = FlatSpace([("w", Parameter(np.zeros(array.size, np.float32), device))])
    whole = array.view(np.uint8)
    space.rebind(whole, *(aligned_empty(whole.shape, np.uint8) for _ in range(2)))
    return space


#: What lies on an array of the host's, and the buffer that kernels get of it.
ON_TOP = {
    "a tensor": lambda array, device: Tensor(array, device, copy=False).buffer,
    "a part": lambda array, device: Tensor(array, device, copy=False).buffer.get_sub_region(0, array.nbytes // 2),
    "an alias": lambda array, device: Tensor(array, device, copy=False).alias((2, array.size // 2)).buffer,
    "parameters": lambda array, device: _in_a_space(array, device).params,
    "a parameter": lambda array, device: _in_a_space(array, device).parameters[0].buffer,
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("what", list(ON_TOP))
@pytest.mark.parametrize("queued", [1, 50])
def test_host_memory_stays_while_kernels_are_queued_on_it(device, what, queued):
    """Even after all buffers on it are released; and no longer than needed."""
    if not device.shares_host_memory or device.runs_in_caller:
        pytest.skip("kernels on host memory are done when they are launched")
    array = aligned_empty((1024,), np.float32)
    buffer = ON_TOP[what](array, device)
    memory, gate = weakref.ref(array.base), cl.UserEvent(device.context)
    gc.collect()
    device.finish()
    cl.enqueue_barrier(device.queue, wait_for=[gate])
    for value in range(queued):
        device.launch(device.kernel("elementwise", "fill"), *device.grid(512), buffer, float(value), 512)
    del array, buffer
    gc.collect()
    kept = memory()
    gate.set_status(cl.command_execution_status.COMPLETE)
    assert kept is not None
    device.finish()
    first = np.frombuffer(kept, np.uint8)[-kept.ctypes.data % 4096 :][:2048].view(np.float32)
    assert (first == queued - 1).all()
    del kept, first
    gc.collect()
    assert memory() is None
