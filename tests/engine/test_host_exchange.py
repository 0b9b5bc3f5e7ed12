"""Tensors handed to other libraries and taken from them, on one memory."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from clcomm.base.errors import ArgumentError
from clcomm.base.host.arrays import aligned_empty
from clcomm.engine import Device, Linear, Tensor, default_device, from_dlpack
from tests.helpers import one_line

SHAPES = [(), (1,), (7,), (3, 5), (2, 3, 4, 5), (1, 1000), (33, 1)]


@pytest.fixture(autouse=True)
def on_the_host():
    if not default_device().shares_host_memory:
        pytest.skip("the device has memory of its own")


def values(shape, dtype, seed=0):
    drawn = np.random.default_rng([seed, *shape]).integers(-100, 100, shape)
    return (drawn / (7 if dtype == np.float32 else 1)).astype(dtype)


def importers():
    yield "array interface", np.asarray
    yield "numpy", np.from_dlpack
    try:
        import torch
    except ImportError:
        return
    yield "torch", lambda tensor: torch.from_dlpack(tensor).numpy()


IMPORTERS = dict(importers())


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("how", IMPORTERS)
def test_an_exported_tensor_is_one_memory_with_its_source(how, shape, dtype):
    expected = values(shape, dtype)
    tensor = Tensor(expected)
    array = IMPORTERS[how](tensor)
    assert array.shape == shape and array.dtype == dtype and array.tobytes() == expected.tobytes()
    tensor.copy_from(expected + 1)
    tensor.device.finish()
    assert array.tobytes() == (expected + 1).astype(dtype).tobytes()
    if array.flags.writeable:
        array[...] = 5
        assert (tensor.numpy() == 5).all()


@pytest.mark.parametrize("how", IMPORTERS)
def test_the_queue_is_finished_before_memory_is_seen(how):
    a = Tensor(values((300, 300), np.float32))
    b = a
    for _ in range(6):
        b = (b @ a) * 0.001
    assert IMPORTERS[how](b).tobytes() == b.numpy().tobytes()


@pytest.mark.parametrize("how", IMPORTERS)
def test_exported_memory_outlives_the_tensor(how):
    """Neither freed, nor given to another tensor by the pool, nor lost with a parameter that moves."""
    source = Tensor(values((64, 64), np.float32))
    pooled, whole = source + 1.0, Tensor(values((50,), np.float32, 1))
    layer = Linear(8, 8)
    kept = {name: IMPORTERS[how](t) for name, t in (("pooled", pooled), ("whole", whole), ("weight", layer.weight))}
    expected = {name: array.copy() for name, array in kept.items()}
    layer.flat_space()  # the weight moves there
    later = [Tensor(np.zeros((64, 64), np.float32)) + 2.0]
    del pooled, whole, layer
    gc.collect()
    for _ in range(50):
        later.append(later[-1] + 1.0)
    later[-1].numpy()
    for name, array in kept.items():
        assert np.array_equal(array, expected[name]), name


def test_an_exported_parameter_in_its_flat_space_shows_each_step():
    layer = Linear(4, 3)
    layer.flat_space()
    array = np.asarray(layer.weight)
    layer.weight.copy_from(np.full((3, 4), 2.0, np.float32))
    assert (array == 2).all() and np.shares_memory(array, np.asarray(layer.weight.detach()))


def test_a_gradient_is_exported_as_a_copy():
    layer = Linear(4, 3)
    layer.flat_space()
    layer(Tensor(np.ones((2, 4), np.float32))).sum().backward()
    array = np.asarray(layer.weight.grad)
    layer.weight.grad = None
    layer(Tensor(np.full((2, 4), 9.0, np.float32))).sum().backward()
    assert (array == 2).all()


@pytest.mark.parametrize("copy", [None, True, False])
@pytest.mark.parametrize("dtype", [np.float32, np.int32])
@pytest.mark.parametrize("shape", SHAPES)
def test_an_imported_array_shares_memory_unless_copied(shape, dtype, copy):
    array = aligned_empty(shape, dtype)
    array[...] = values(shape, dtype)
    tensor = from_dlpack(array, copy=copy)
    assert tensor.shape == shape and tensor.numpy().tobytes() == array.tobytes()
    before = array.copy()
    array[...] = 3
    assert np.array_equal(tensor.numpy(), before if copy else array)


def test_imported_memory_outlives_its_exporter():
    array = aligned_empty((100,), np.float32)
    array[...] = 4
    tensor = from_dlpack(array)
    del array
    gc.collect()
    [aligned_empty((100,), np.float32).fill(0) for _ in range(20)]
    assert (tensor.numpy() == 4).all()


def test_a_tensor_of_pytorch_goes_both_ways():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    theirs = torch.arange(12.0).reshape(3, 4)
    assert from_dlpack(theirs).numpy().tolist() == theirs.tolist()
    assert from_dlpack(theirs.T).numpy().tolist() == theirs.T.tolist()
    ours = Tensor(np.arange(6, dtype=np.float32))
    torch.from_dlpack(ours).add_(1)
    assert ours.numpy().tolist() == [1, 2, 3, 4, 5, 6]


def test_what_cannot_be_shared_is_an_error_of_one_line():
    cases = [
        (lambda: from_dlpack([1.0]), "from_dlpack: expected an object with __dlpack__, got list"),
        (lambda: from_dlpack(np.zeros(3)), "from_dlpack: expected float32 or int32, got float64; convert it first"),
    ]
    for call, message in cases:
        with pytest.raises(ArgumentError) as caught:
            call()
        assert one_line(caught) == message
    whole = aligned_empty((64,), np.float32)
    for part in (whole[1:], whole[::2]):
        with pytest.raises(ArgumentError, match="multiple of 128 bytes"):
            from_dlpack(part, copy=False)
        assert from_dlpack(part).shape == part.shape
    with pytest.raises((BufferError, ValueError)):
        Tensor([1.0]).__dlpack__(dl_device=(2, 0))


def test_a_device_with_memory_of_its_own_exports_nothing(monkeypatch):
    tensor = Tensor([1.0])
    monkeypatch.setattr(tensor.device, "shares_host_memory", False)
    with pytest.raises(BufferError, match="use numpy"):
        tensor.__dlpack_device__()
    with pytest.raises(BufferError, match="use numpy"):
        tensor.__dlpack__()
    assert not hasattr(tensor, "__array_interface__")
    assert isinstance(tensor.device, Device)
