"""Horovod's calls on tensors of another device than the CPU's: the bits of the CPU, there, and copies are counted."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from clcomm.horovod import world  # noqa: E402
from tests.horovod.values import folded, same_bits, tensor_of  # noqa: E402
from tests.torch.devices import IS_OPENCL, other_device  # noqa: E402

pytestmark = pytest.mark.mpi(min_size=1)
SHAPE = (8, 3)


@pytest.fixture(scope="module")
def device():
    return other_device()


@pytest.fixture(params=["all", "last"])
def own_device(hvd, device, request):
    """The device on all ranks, or on the last alone, beside others' CPUs."""
    return device if request.param == "all" or hvd.rank() == hvd.size() - 1 else torch.device("cpu")


def copies():
    """Return the numbers of copies from the device and to it."""
    rows = world.communicator().stats.as_dict()["phases"]
    return [sum(row["calls"] for row in rows if row["phase"] == phase) for phase in ("pack", "unpack")]


def calls(hvd):
    """Return calls on a tensor that give one tensor or several."""
    first = {
        "allreduce": lambda x: hvd.allreduce(x, op=hvd.Sum, name="x"),
        "allreduce_": lambda x: hvd.allreduce_(x.clone()),
        "async": lambda x: hvd.synchronize(hvd.allreduce_async(x, op=hvd.Max)),
        "async_": lambda x: hvd.synchronize(hvd.allreduce_async_(x.clone())),
        "grouped": lambda x: hvd.grouped_allreduce([x, x + 1])[1],
        "allgather": hvd.allgather,
        "broadcast": lambda x: hvd.broadcast(x, 0),
        "broadcast_": lambda x: hvd.broadcast_(x.clone(), hvd.size() - 1),
        "reducescatter": lambda x: hvd.reducescatter(x, op=hvd.Sum),
    }
    splits = [2] * (hvd.size() - 1) + [SHAPE[0] - 2 * (hvd.size() - 1)]
    return first | {"alltoall": lambda x: hvd.alltoall(x, splits)[0]}


def test_calls_have_the_bits_of_the_cpu(hvd, own_device):
    own = tensor_of(hvd.rank(), SHAPE, torch.float32, 1)
    for name, call in calls(hvd).items():
        expected, before = call(own), copies()
        found = call(own.to(own_device))
        packed, unpacked = (now - then for now, then in zip(copies(), before, strict=True))
        assert found.device.type == own_device.type and same_bits(found.cpu(), expected), name
        tensors = 0 if own_device.type == "cpu" else 2 if name == "grouped" else 1
        assert (packed, unpacked) == (tensors, tensors), name


def test_gradients_flow_through(hvd, own_device):
    own = tensor_of(hvd.rank(), SHAPE, torch.float32, 2)
    weights = tensor_of(hvd.rank(), SHAPE, torch.float32, 3)
    leaf = own.to(own_device).requires_grad_()
    (hvd.allreduce(leaf, op=hvd.Sum) * weights.to(own_device)).sum().backward()
    everyone = [tensor_of(rank, SHAPE, torch.float32, 3) for rank in range(hvd.size())]
    assert same_bits(leaf.grad.cpu(), folded(everyone, "Sum"))


def trained(hvd, place, **options):
    """Return the parameters of a small net on a device, trained with Horovod's optimizer, on the host."""
    torch.manual_seed(hvd.rank())
    net = torch.nn.Linear(12, 5).to(place)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    hvd.broadcast_parameters(net.state_dict(), 0)
    optimizer = hvd.DistributedOptimizer(optimizer, net.named_parameters(), **options)
    for step in range(3):
        optimizer.zero_grad()
        images = tensor_of(hvd.rank(), (4, 12), torch.float32, step).to(place)
        net(images).square().mean().backward()
        optimizer.step()
    return [each.detach().cpu() for each in net.parameters()]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("op", ["Average", "Adasum"])
def test_optimizers_train_as_on_the_cpu(hvd, own_device, op):
    expected, before = trained(hvd, "cpu", op=getattr(hvd, op)), copies()
    for found, right in zip(trained(hvd, own_device, op=getattr(hvd, op)), expected, strict=True):
        tolerance = 1e-5 if IS_OPENCL else 0  # its kernels add in another order
        torch.testing.assert_close(found, right, rtol=tolerance, atol=tolerance)
    if own_device.type != "cpu":
        assert all(now - then >= 5 for now, then in zip(copies(), before, strict=True)), "3 steps and the parameters"


@pytest.mark.mpi(min_size=2)
def test_ranks_without_roots_device_get_its_optimizers_state(hvd, own_device):
    net = torch.nn.Linear(3, 2).to(own_device)
    optimizer = torch.optim.SGD(net.parameters(), 0.1 * (hvd.rank() + 1), momentum=0.9)
    net(torch.full((1, 3), 1.0 + hvd.rank()).to(own_device)).sum().backward()
    optimizer.step()
    root = hvd.size() - 1
    hvd.broadcast_optimizer_state(optimizer, root)
    state = optimizer.state[net.weight]["momentum_buffer"]
    assert state.device.type == own_device.type and (state.cpu() == 1.0 + root).all()
    assert optimizer.param_groups[0]["lr"] == 0.1 * (root + 1)
