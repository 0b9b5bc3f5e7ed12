"""Tensors in memory that the ranks share: moved in place, reduced in place, with the bits of copied ones."""

from __future__ import annotations

import gc

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import torch.distributed as dist  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: E402

import clcomm.torch  # noqa: E402
from clcomm.base.errors import ArgumentError, MismatchError  # noqa: E402
from clcomm.comm.tensors import background, collectives, sharing  # noqa: E402
from clcomm.torch.process_group import ClcommProcessGroup  # noqa: E402

pytestmark = pytest.mark.mpi(min_size=1)
DTYPES = [torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8]


@pytest.fixture
def group(world, monkeypatch):
    """A group whose memory for copies is small, so that tensors of a few thousand elements go through it in pieces."""
    monkeypatch.setattr(background, "LEAST_BYTES", 4096)
    for module in (background, collectives):
        monkeypatch.setattr(module, "MOST_BYTES", 16384)
    monkeypatch.setattr(sharing, "LEAST_BYTES", 256)
    group = dist.new_group(list(range(dist.get_world_size())))
    yield group
    dist.destroy_process_group(group)


def shares(group) -> bool:
    return clcomm.torch.communicator(group).shares_memory


def is_held(tensor, group) -> bool:
    return are_held(tensor.data_ptr(), tensor.nbytes, clcomm.torch.communicator(group))


def are_held(address, nbytes, comm) -> bool:
    memory = comm.memory.of_host
    return memory is not None and memory.holds_at(address, nbytes)


def rank_values(rank: int, length: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype.is_floating_point:
        return torch.randn(length, generator=generator, dtype=dtype)
    return torch.randint(0, 9, (length,), generator=generator, dtype=dtype)


def in_rank_order(op, length, dtype, seed):
    """The result, from all ranks' values: left to right."""
    total = rank_values(0, length, dtype, seed)
    for rank in range(1, dist.get_world_size()):
        total = op(total, rank_values(rank, length, dtype, seed))
    return total


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["sum", "max"])
@settings(max_examples=12, deadline=None, derandomize=True, database=None)
@given(length=st.sampled_from([1, 63, 1000, 2500, 4097, 20000]), holders=st.integers(0, 15), seed=st.integers(0, 99))
def test_any_ranks_may_hold_their_tensor(request, kind, dtype, length, holders, seed):
    """Ranks whose tensor is in shared memory reduce with ranks that copy theirs; the bits are those of rank order."""
    group = request.getfixturevalue("group")
    values = rank_values(dist.get_rank(), length, dtype, seed)
    place = clcomm.torch.empty(length, dtype=dtype, group=group)
    holds = bool(holders >> dist.get_rank() & 1)
    tensor = place.copy_(values) if holds else values
    dist.all_reduce(tensor, dist.ReduceOp.SUM if kind == "sum" else dist.ReduceOp.MAX, group)
    assert tensor.equal(in_rank_order(torch.add if kind == "sum" else torch.maximum, length, dtype, seed))
    assert is_held(tensor, group) == (holds and shares(group))


def test_share_moves_storages_in_place(group):
    torch.manual_seed(dist.get_rank())
    layers = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 20)).double()
    layers[1].weight.data = layers[0].weight.data.view(-1)[:600].view(20, 30)  # two parameters of one storage
    half = layers[0].bias.data[::2]
    before = [each.detach().clone() for each in layers.parameters()]
    assert clcomm.torch.share(*layers.parameters(), group=group) == shares(group)
    for each, old in zip(layers.parameters(), before, strict=True):
        assert each.equal(old)
        assert is_held(each, group) == shares(group)
    layers[0].bias.data.fill_(7)
    assert half.eq(7).all() and layers[1].weight.data_ptr() == layers[0].weight.data_ptr()
    dist.all_reduce(layers[0].bias.data, group=group)
    assert half.eq(7 * dist.get_world_size()).all()
    layers(torch.ones(3, 40).double()).sum().backward()
    torch.optim.SGD(layers.parameters(), lr=0.1).step()
    assert clcomm.torch.share(*layers.parameters(), group=group) == shares(group)  # once more


def test_shared_memory_cannot_be_resized_away(group):
    tensor = torch.ones(500)
    if clcomm.torch.share(tensor, group=group):
        with pytest.raises(RuntimeError, match="not resizable"):
            tensor.untyped_storage().resize_(0)


def test_memory_is_freed_when_no_tensor_uses_it(group):
    comm = clcomm.torch.communicator(group)
    tensor = torch.ones(5000)
    clcomm.torch.share(tensor, group=group)
    address, nbytes, view = tensor.data_ptr(), tensor.nbytes, tensor[10:]
    del tensor
    comm.allocate(8)
    assert are_held(address, nbytes, comm) == shares(group)
    view += 1
    dist.all_reduce(view, group=group)
    assert view.eq(2 * dist.get_world_size()).all()
    del view
    gc.collect()
    comm.allocate(8)
    assert not are_held(address, nbytes, comm)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: torch.from_numpy(torch.ones(50).numpy()), "NumPy"),
        (lambda: torch.ones(5, 5).to_sparse(), "dense tensor on cpu"),
        (lambda: torch.ones(5, device="meta"), "on meta"),
        (lambda: [1.0], "a tensor, got list"),
    ],
)
def test_what_cannot_be_moved_is_refused_on_every_rank(group, make, expected):
    last = dist.get_rank() == dist.get_world_size() - 1
    if expected == "NumPy" and not shares(group):
        return
    with pytest.raises(ArgumentError, match=expected) as raised:
        clcomm.torch.share(torch.ones(9), make() if last else torch.ones(50), group=group)
    assert "\n" not in str(raised.value) and "tensors[1]" in str(raised.value)


def test_different_sizes_are_an_error_of_one_line(group):
    if dist.get_world_size() == 1:
        return
    with pytest.raises(MismatchError, match="bytes on rank 0") as raised:
        clcomm.torch.share(torch.ones(100 + (dist.get_rank() == 1)), group=group)
    assert "\n" not in str(raised.value)
    tensor = torch.ones(4)
    dist.all_reduce(tensor, group=group)
    assert tensor.eq(dist.get_world_size()).all()


def trained(group, steps=20, moves=True, **options):
    """Return a model trained with DDP, and whether its gradients' buckets are in shared memory after each step."""
    assert isinstance(group, ClcommProcessGroup)
    group._moves._lasting._wanted = moves
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(30, 60), nn.Tanh(), nn.Linear(60, 60), nn.Tanh(), nn.Linear(60, 60), nn.Linear(60, 5))
    model = DDP(net, process_group=group, bucket_cap_mb=0.01, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator, held = torch.Generator().manual_seed(dist.get_rank()), []
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(6, 30, generator=generator)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        held.append([is_held(each.grad, group) for each in model.parameters()])
    return model, held


@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_as_bucket_view": True}, {"gradient_as_bucket_view": True, "find_unused_parameters": True}],
    ids=str,
)
def test_buckets_move_and_no_bit_changes(group, options):
    copied, stayed = trained(group, moves=False, **options)
    moved, held = trained(group, **options)
    for mine, theirs in zip(moved.parameters(), copied.parameters(), strict=True):
        assert mine.equal(theirs) and mine.grad.equal(theirs.grad)
    assert not any(any(each) for each in stayed)
    if options.get("gradient_as_bucket_view"):  # else gradients are copies of the bucket's
        assert not any(held[0]) and all(held[-1]) == shares(group)


def test_ranks_that_have_joined_reduce_with_moved_buckets(group):
    model, _ = trained(group, gradient_as_bucket_view=True)
    optimizer, size = torch.optim.SGD(model.parameters(), lr=0.1), dist.get_world_size()
    with model.join():
        for _ in range(1 + dist.get_rank()):
            optimizer.zero_grad()
            model(torch.ones(6, 30)).square().mean().backward()
            optimizer.step()
    mine = torch.cat([each.detach().reshape(-1) for each in model.parameters()])
    everyone = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(everyone, mine, group=group)
    assert all(each.equal(mine) for each in everyone)


@pytest.mark.parametrize("when", [1, 2])
def test_a_buffer_that_numpy_uses_stays(group, when):
    """Moving it would leave NumPy's array on memory that is free."""
    model = DDP(nn.Linear(40, 40), process_group=group, gradient_as_bucket_view=True)
    arrays = []
    for step in range(9):
        model(torch.ones(2, 40)).sum().backward()
        if step == when:  # the buckets were made anew; before and after it is known that they last
            arrays = [each.grad.numpy() for each in model.parameters()]
    assert not any(is_held(each.grad, group) for each in model.parameters())
    for array, each in zip(arrays, model.parameters(), strict=True):
        assert array.ctypes.data == each.grad.data_ptr()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("before", range(5))
def test_ranks_compare_at_the_same_all_reduces_after_an_error(group, before):
    """Ranks that were elsewhere when an all-reduce failed have taken part in one less."""
    rank, size, tensor = dist.get_rank(group), dist.get_world_size(group), torch.ones(100)
    for _ in range(before):
        dist.all_reduce(tensor.fill_(1), group=group)
    for _ in range(3):
        with pytest.raises(MismatchError):
            dist.all_reduce(tensor, group=group) if rank else dist.broadcast(tensor, 0, group=group)
    for number in range(80):
        dist.all_reduce(tensor.fill_(number), group=group)
        assert tensor.eq(size * number).all()


def test_a_buffer_that_does_not_last_stays(group):
    """A communication hook's own tensors are new in each step."""

    def hook(_, bucket):
        own = bucket.buffer() / dist.get_world_size()
        seen.append(own)
        return dist.all_reduce(own, group=group, async_op=True).get_future().then(lambda done: done.value()[0])

    seen: list = []
    model = DDP(nn.Linear(40, 40), process_group=group)
    model.register_comm_hook(None, hook)
    for _ in range(9):
        seen.clear()
        model(torch.ones(2, 40)).sum().backward()
    assert not is_held(seen[0], group)
