"""Sums over work-groups: their order, the same with sub-groups and without, and drivers that claim too much."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from clcomm.engine import Tensor, sub_groups
from clcomm.engine import functional as F
from clcomm.engine.device import Device
from clcomm.engine.sub_groups import tree_sum

SHAPES = [(1, 1), (3, 5), (7, 63), (7, 64), (5, 65), (2, 1000), (30, 300)]


def twins(device: Device) -> list[Device]:
    """Return the device with the kernels of GPUs, as it is and without sub-groups."""
    made = [Device(device.cl_device, kind="gpu") for _ in range(2)]
    made[1].sub_groups = 0
    return made


def results(device: Device, shape: tuple[int, int]) -> list[bytes]:
    rng = np.random.default_rng(shape[1])
    host, other = rng.standard_normal((2, *shape)).astype(np.float32)
    host[0, 0], other[0] = 0.0, -0.0
    targets, found = rng.integers(0, shape[1], shape[0]).astype(np.int32), []
    for op in (
        F.softmax, F.log_softmax, lambda x: F.sum(x, 1), lambda x: F.mse_loss(x, Tensor(other, device)),
        lambda x: F.cross_entropy(x, Tensor(targets, device)), lambda x: F.log_softmax(x * 0.0),
    ):  # fmt: skip
        x = Tensor(host, device, requires_grad=True)
        y = op(x)
        y.backward(Tensor(rng.standard_normal(y.shape).astype(np.float32), device))
        found += [y.numpy().tobytes(), x.grad.numpy().tobytes()]
    return found


@pytest.mark.parametrize("shape", SHAPES)
def test_sub_groups_change_no_bit(device, shape):
    own, without = twins(device)
    if not own.sub_groups:
        pytest.skip("a device without sub-groups; Intel's OpenCL runtime has one")
    assert results(own, shape) == results(without, shape)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_is_summed_in_the_documented_order(device, shape):
    for own in twins(device):
        host = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
        group, (rows, columns) = own.row_group, shape
        padded = np.zeros((rows, -(-columns // group) * group), np.float32)
        padded[:, :columns] = host
        partial = np.zeros((rows, group), np.float32)
        for run in padded.reshape(rows, -1, group).swapaxes(0, 1):  # an item takes every group-th element
            partial += run
        assert F.sum(Tensor(host, own), 1).numpy().tolist() == [tree_sum(row) for row in partial]


class Claiming:
    """A queue whose device lists extensions."""

    def __init__(self, queue, extensions):
        self.queue = queue
        self.context = SimpleNamespace(devices=[SimpleNamespace(extensions=extensions)])


def test_extensions_that_are_not_listed_are_not_used(device):
    assert sub_groups.working(Claiming(device.queue, "cl_khr_fp64"), 64) == 0


def test_what_a_driver_lists_is_used_if_its_sums_have_the_right_bits(device, monkeypatch):
    tried = []

    def summed(queue, values, number):
        tried.append(number)
        return tree_sum(values) + np.float32(number == 1)

    monkeypatch.setattr(sub_groups, "_summed", summed)
    queue = Claiming(device.queue, "cl_intel_subgroups cl_khr_subgroup_shuffle")
    assert sub_groups.working(queue, 64) == 2 and tried == [1, 2]
    assert sub_groups.working(Claiming(device.queue, "cl_khr_subgroup_shuffle"), 64) == 0


def test_functions_that_a_driver_lists_but_lacks_are_not_used(device, monkeypatch):
    import pyopencl as cl

    def missing(*_):
        raise cl.RuntimeError("sub_group_shuffle_xor is not declared")

    monkeypatch.setattr(sub_groups, "_summed", missing)
    assert sub_groups.working(Claiming(device.queue, "cl_khr_subgroup_shuffle"), 64) == 0
