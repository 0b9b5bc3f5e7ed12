"""Adasum as a policy: the published formula for each tensor, whatever the buckets and the library."""

from __future__ import annotations

import numpy as np
import pytest

from clcomm import Communicator, Synchronizer
from clcomm.base.errors import ArgumentError
from clcomm.engine import Linear
from clcomm.optim import SGD
from clcomm.sync.distributed_optimizer import DistributedOptimizer
from tests.helpers import cpu_device, one_line
from tests.numpy_models import set_gradients, small_model


def combined(everyone):
    """Return the ranks' adaptive sum in float64: pairs at a distance of 1, 2, 4, ..., the rest beyond 2^k first."""
    vectors = [each.astype(np.float64).ravel() for each in everyone]
    paired = 1 << (len(vectors).bit_length() - 1)
    for rank in range(paired, len(vectors)):
        vectors[rank - paired] = pair(vectors[rank - paired], vectors[rank])
    vectors = vectors[:paired]
    while len(vectors) > 1:
        vectors = [pair(*vectors[index : index + 2]) for index in range(0, len(vectors), 2)]
    return vectors[0].reshape(everyone[0].shape)


def pair(a, b):
    dot, of_a, of_b = a @ b, a @ a, b @ b
    return (1 - dot / (2 * of_a) if of_a else 1) * a + (1 - dot / (2 * of_b) if of_b else 1) * b


@pytest.mark.parametrize("options", [{}, {"bucket_size": 40}, {"use_bucketing": False}, {"overlap": True}], ids=str)
def test_each_tensor_is_combined_by_the_formula(comm, options):
    model, plain = small_model(), small_model()
    sync, reference = Synchronizer(comm, combination="adasum", **options), Synchronizer(comm, combination="adasum")
    assert sync.compression == "adasum"
    for step in range(2):
        set_gradients(model, comm.rank, step)
        set_gradients(plain, comm.rank, step)
        own = [parameter.grad.copy() for parameter in model.parameters.values()]
        everyone = comm.all_gather_object(own)
        sync.sync_gradients(model)
        reference.sync_gradients(plain)
        for index, parameter in enumerate(model.parameters.values()):
            expected = combined([each[index] for each in everyone])
            np.testing.assert_allclose(parameter.grad, expected, rtol=1e-5, atol=1e-6 * np.abs(expected).max())
        assert model.gradient_bits() == plain.gradient_bits()
    bits = model.gradient_bits()
    assert comm.all_gather_object(bits) == [bits] * comm.size


def test_equal_gradients_keep_their_values(comm):
    layer = Linear(3, 2, device=cpu_device("cpu"))
    sync = Synchronizer(comm, combination="adasum")
    sync.broadcast_parameters(layer)
    layer.weight.grad, layer.bias.grad = layer.weight.detach(), layer.bias.detach()
    sync.sync_gradients(layer)
    np.testing.assert_allclose(layer.weight.grad.numpy(), layer.weight.numpy(), rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"combination": "median"}, "combination: expected one of mean, adasum, got 'median'"),
        ({"combination": "adasum", "compression": "fp16"}, "combination: expected 'mean' with compression "),
        ({"combination": "adasum", "algorithm": "ring"}, "combination: expected 'mean' with compression "),
        (
            {"combination": "adasum", "split_tensors": True},
            "split_tensors: expected False with a compression or a hook",
        ),
    ],
)
def test_settings_that_do_not_go_together(options, message):
    with pytest.raises(ArgumentError) as caught:
        Synchronizer(Communicator(transport="solo"), **options)
    assert one_line(caught).startswith(message)


def test_what_is_no_mean_has_no_weights_and_no_sharded_update():
    comm = Communicator(transport="solo")
    model, sync = small_model(), Synchronizer(comm, combination="adasum")
    with pytest.raises(ArgumentError) as caught:
        sync.sync_gradients(model, samples=3)
    assert one_line(caught) == "samples: expected None with combination='adasum', which is no mean over samples"
    layer = Linear(3, 2, device=cpu_device("cpu"))
    with pytest.raises(ArgumentError) as caught:
        DistributedOptimizer(SGD(layer, 0.1), sync)
    one_line(caught)
