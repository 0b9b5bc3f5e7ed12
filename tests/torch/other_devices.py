"""Tensors of another device than the CPU's: copied to the host and back, to the same bits, and counted."""

from __future__ import annotations

import gc
import threading
import warnings
from contextlib import contextmanager

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: E402

from clcomm import Communicator, Synchronizer  # noqa: E402
from clcomm.base.errors import ArgumentError  # noqa: E402
from clcomm.comm.tensors import background  # noqa: E402
from clcomm.sync.balance import Balancer  # noqa: E402
from clcomm.sync.sampler import BalancedSampler  # noqa: E402
from tests.helpers import one_line  # noqa: E402
from tests.torch.devices import IS_OPENCL, other_device  # noqa: E402
from tests.torch.references import all_gather_single, drawn, reduce_scatter_single  # noqa: E402

pytestmark = pytest.mark.mpi(min_size=1)
STEPS = 3


@pytest.fixture(scope="module")
def device(world):
    return other_device()


@pytest.fixture(params=["all", "first"])
def own_device(device, request):
    """The device on all ranks, or on the first alone, beside others' CPUs."""
    return device if request.param == "all" or dist.get_rank() == 0 else torch.device("cpu")


def everything(place, dtype):
    """Return the results of collectives on tensors at a place, on the host."""
    size, rank = dist.get_world_size(), dist.get_rank()
    own = drawn(rank, (2 * size, 3), dtype).to(place)
    results = {name: torch.zeros_like(own) for name in ("all_to_all", "scatter")}
    for op in ("SUM", "AVG", "MAX"):
        dist.all_reduce(results.setdefault(op, own.clone()), getattr(dist.ReduceOp, op))
    dist.reduce(results.setdefault("reduce", own.clone()), 0)
    dist.broadcast(results.setdefault("broadcast", own.clone()), size - 1)
    results |= {f"gather {at}": torch.zeros_like(own) for at in range(2 * size)}
    dist.all_gather([results[f"gather {at}"] for at in range(size)], own)
    gathered = [results[f"gather {size + at}"] for at in range(size)]
    dist.gather(own, gathered if rank == 0 else None, 0)
    all_gather_single(results.setdefault("whole", torch.zeros((2 * size * size, 3), dtype=dtype, device=place)), own)
    reduce_scatter_single(results.setdefault("block", torch.zeros((2, 3), dtype=dtype, device=place)), own)
    dist.all_to_all_single(results["all_to_all"], own)
    dist.scatter(results["scatter"], [own + each for each in range(size)] if rank == 0 else None, 0)
    return {name: tensor.cpu() for name, tensor in results.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=str)
def test_collectives_have_the_bits_of_the_cpu(own_device, dtype):
    expected = everything("cpu", dtype)
    for name, found in everything(own_device, dtype).items():
        assert torch.equal(found, expected[name]), name


def test_views_are_written_where_they_are(own_device):
    expected = torch.arange(24.0).view(4, 6)
    whole = expected.clone().to(own_device)
    for view in (expected[2], expected[:, 1]):
        view *= dist.get_world_size()
    for view in (whole[2], whole[:, 1]):
        dist.all_reduce(view)
    assert torch.equal(whole.cpu(), expected)


def test_calls_in_flight_keep_their_order(own_device):
    size = dist.get_world_size()
    tensor = torch.ones(1000).to(own_device)
    works = [dist.all_reduce(tensor, async_op=True) for _ in range(3)]
    future = works[-1].get_future().then(lambda done: done.value()[0].cpu()[0].item())
    assert future.wait() == size**3
    for work in works:
        work.wait()
    assert (tensor.cpu() == size**3).all()


@pytest.mark.mpi(min_size=2)
def test_messages(own_device):
    rank, size = dist.get_rank(), dist.get_world_size()
    given, taken = drawn(rank, (5, 2), torch.float32).to(own_device), torch.zeros(5, 2).to(own_device)
    to, source = (rank + 1) % size, (rank - 1) % size
    messages = [dist.P2POp(dist.isend, given, to), dist.P2POp(dist.irecv, taken, source)]
    for each in dist.batch_isend_irecv(messages):
        each.wait()
    assert torch.equal(taken.cpu(), drawn(source, (5, 2), torch.float32))


def trained(place, **options):
    """Return the parameters of a small net, trained by DistributedDataParallel at a place, on the host."""
    torch.manual_seed(dist.get_rank())
    net = torch.nn.Sequential(torch.nn.Linear(12, 16), torch.nn.ReLU(), torch.nn.Linear(16, 5)).to(place)
    model = DDP(net, **options)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        images = drawn(dist.get_rank(), (4, 12), torch.float32, step).to(place)
        model(images).square().mean().backward()
        optimizer.step()
    return [each.detach().cpu() for each in net.parameters()]


@pytest.mark.parametrize("options", [{}, {"bucket_cap_mb": 0.0005, "gradient_as_bucket_view": True}], ids=str)
def test_ddp_trains_as_on_the_cpu(own_device, options):
    expected = trained("cpu")
    for found, right in zip(trained(own_device, **options), expected, strict=True):
        tolerance = 1e-5 if IS_OPENCL else 0  # its kernels add in another order
        torch.testing.assert_close(found, right, rtol=tolerance, atol=tolerance)


def test_shares_by_speed_train_as_one_rank_with_all_samples(own_device):
    batch, steps, comm = 8, 8, Communicator()
    images = drawn(0, (batch * steps * comm.size, 12), torch.float32)

    def train(comm, place, batch):
        torch.manual_seed(comm.rank)
        net, sync = torch.nn.Linear(12, 5).to(place), Synchronizer(comm)
        sync.broadcast_parameters(net)
        optimizer, balancer = torch.optim.SGD(net.parameters(), 0.1), Balancer(comm, batch, window=2, window_s=0)
        sampler = BalancedSampler(len(images), comm.rank, comm.size, balancer.shares)
        for step in range(steps):
            own = sampler.batches(batch)[step]
            optimizer.zero_grad()
            net(images[own].to(place)).square().mean().backward()
            sync.sync_gradients(net, samples=len(own), of=sampler.samples_of_all(step, 1))
            optimizer.step()
            if balancer.step_finished(len(own), len(own) * (3.0 if comm.rank == comm.size - 1 else 1.0)):
                sampler.shares = balancer.shares
        return [each.detach().cpu() for each in net.parameters()], balancer.shares

    found, shares = train(comm, own_device, batch)
    expected, _ = train(Communicator(transport="solo"), "cpu", batch * comm.size)
    assert comm.size == 1 or shares[-1] < batch < shares[0]
    for one, right in zip(found, expected, strict=True):
        torch.testing.assert_close(one, right, rtol=1e-5, atol=1e-5)
    everyone = comm.all_gather_object([each.numpy().tobytes() for each in found])
    assert everyone == everyone[:1] * comm.size
    comm.finalize()


def test_copies_are_counted(device, world):
    def counts():
        rows = world.communicator.stats.as_dict()["phases"]
        return {(each["phase"], each["label"]): each["calls"] for each in rows if each["phase"] in ("pack", "unpack")}

    before = counts()
    dist.all_reduce(torch.ones(3))
    assert counts() == before, "a copy on the CPU's side"
    tensor = torch.ones(3).to(device)
    dist.all_reduce(tensor)
    dist.all_gather([torch.zeros(3).to(device) for _ in range(dist.get_world_size())], tensor)
    trained(device)
    more = {key: count - before.get(key, 0) for key, count in counts().items()}
    if not IS_OPENCL:  # whose buckets are mapped
        assert more["pack", "gradients"] == more["unpack", "gradients"] == STEPS
    assert more["pack", f"from {device.type}"] >= 1
    assert more["unpack", f"to {device.type}"] >= dist.get_world_size()


@pytest.mark.skipif(IS_OPENCL, reason="its buckets are mapped")
def test_a_large_bucket_is_copied_once_each_way_through_memory_that_ranks_share(device, world, monkeypatch):
    def net(place):
        torch.manual_seed(0)
        return DDP(torch.nn.Linear(12, 4000).to(place))

    def step(model, number):
        model.zero_grad()
        model(drawn(dist.get_rank(), (4, 12), torch.float32, number).to(model.device)).square().mean().backward()

    model, right = net(device), net("cpu")
    for number in range(12):
        step(model, number)
    staged, copy = [], background.copy_values
    monkeypatch.setattr(background, "copy_values", lambda to, source: staged.append(to) or copy(to, source))
    step(model, 50)
    step(right, 50)
    assert torch.equal(model.module.weight.grad.cpu(), right.module.weight.grad)
    assert not world.communicator.shares_memory or sum(each.nbytes > 4096 for each in staged) <= 2
    rooms = world._moves.copies._rooms
    del model
    gc.collect()
    assert all(storage.expired() for storage, room in rooms.values() if room.numel() > 4096)


def test_copies_of_parameters_and_buffers_are_counted(own_device):
    comm = Communicator()

    def counts():
        return {each["phase"]: each["calls"] for each in comm.stats.as_dict()["phases"]}

    sync, model = Synchronizer(comm), torch.nn.BatchNorm1d(3).to(own_device)
    sync.broadcast_parameters(model)
    after = counts()
    sync.broadcast_buffers(model)
    more = {name: count - after[name] for name, count in counts().items()}
    if own_device.type == "cpu":
        assert not after and not more
    else:  # the root has nothing to load
        others = int(comm.rank != 0)
        assert after["pack"] >= 2 and after["unpack"] == 1 + others
        assert more == {"pack": 1, "unpack": others}
    comm.finalize()


@pytest.mark.skipif(not IS_OPENCL, reason="no pytorch_ocl")
def test_opencl_memory_that_the_host_shares_is_not_copied(device, world):
    before = world.communicator.stats.as_dict()["phases"]
    whole = torch.arange(24.0).to(device)
    dist.all_reduce(whole[6:12])
    dist.broadcast(whole, dist.get_world_size() - 1)
    expected = torch.arange(24.0)
    expected[6:12] *= dist.get_world_size()
    assert torch.equal(whole.cpu(), expected)
    assert world.communicator.stats.as_dict()["phases"] == before


@pytest.mark.parametrize("as_output", [False, True])
def test_a_rank_whose_tensor_has_no_values(world, as_output):
    own = torch.ones(3)
    wrong = torch.empty(3, device="meta") if dist.get_rank() == dist.get_world_size() - 1 else torch.empty(3)
    with pytest.raises(ArgumentError) as caught:
        if as_output:
            dist.all_gather([wrong] * dist.get_world_size(), own)
        else:
            dist.all_reduce(wrong)
    assert "got one on meta; it has no values: use to_empty(device='cpu')" in one_line(caught)
    dist.all_reduce(own)
    assert (own == dist.get_world_size()).all()


@pytest.mark.skipif(IS_OPENCL, reason="pytorch_ocl copies by itself")
def test_a_rank_whose_device_has_no_host_copies(device):
    tensor, is_last = torch.ones(3), dist.get_rank() == dist.get_world_size() - 1
    own = tensor.to(device) if is_last else tensor

    def missing(*_):
        raise NotImplementedError("no kernel copies it. Some advice follows")

    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as it takes another kernel's place
        library.impl("_copy_from", missing, "PrivateUse1")
    try:
        with pytest.raises(ArgumentError) as caught:
            dist.all_reduce(own)
    finally:
        library._destroy()
    expected = "tensor: expected a device whose tensors PyTorch copies to the host, got private:0: no kernel copies it"
    assert expected in one_line(caught)
    dist.all_reduce(own)
    assert (own.cpu() == dist.get_world_size()).all()


@pytest.mark.skipif(IS_OPENCL, reason="pytorch_ocl has no streams")
def test_copies_are_in_the_callers_stream(device, monkeypatch):
    """A CUDA stream is a thread's own: the group's thread would copy before the caller's kernels have run."""
    current, seen = threading.local(), []

    @contextmanager
    def stream(chosen):
        before, current.stream = getattr(current, "stream", 0), chosen
        yield
        current.stream = before

    module = getattr(torch, device.type)
    monkeypatch.setattr(module, "current_stream", lambda _: getattr(current, "stream", 0), raising=False)
    monkeypatch.setattr(module, "stream", stream, raising=False)
    tensor = torch.ones(3).to(device)
    moves = dist.group.WORLD._moves
    copies = moves.copies.on_host
    monkeypatch.setattr(
        moves.copies, "on_host",
        lambda *args, **named: seen.append((threading.get_ident(), current.stream)) or copies(*args, **named),
    )  # fmt: skip
    with stream(7):
        dist.all_reduce(tensor, async_op=True).wait()
    ((thread, used),) = seen
    assert thread != threading.get_ident() and used == 7
