"""Work, futures and messages: what runs beside the program, and in which order."""

from __future__ import annotations

import cProfile
import threading
from contextlib import nullcontext
from datetime import timedelta

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import torch.distributed as dist  # noqa: E402

from clcomm.base.errors import ClcommError, MismatchError  # noqa: E402
from tests.test_gradient_path import FILES, WAITING, traced  # noqa: E402
from tests.torch.references import drawn, folded, same  # noqa: E402

pytestmark = pytest.mark.mpi(min_size=1)


def everyone(length, seed=0):
    return [drawn(rank, (length,), torch.float32, seed) for rank in range(dist.get_world_size())]


def test_many_at_once_are_waited_for_in_any_order(world):
    lengths = [1, 3000, 40_000, 5, 1_200_000] * 3
    rows = [everyone(length, seed) for seed, length in enumerate(lengths)]
    tensors = [each[dist.get_rank()].clone() for each in rows]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    order = list(range(len(works)))
    for at in order[dist.get_rank() :] + order[: dist.get_rank()]:  # another order on each rank
        assert works[at].wait()
        assert works[at].is_completed() and works[at].is_success()
        assert same(tensors[at], folded(rows[at], "SUM"))


@pytest.mark.timeout(60)
def test_a_profiled_program_goes_on(world):
    """Unlike with an interpreter that a collective leaves looking for exceptions from other threads."""
    profile = cProfile.Profile()
    for _ in range(2):
        profile.runcall(dist.all_reduce, torch.ones(3))


@pytest.mark.mpi(min_size=2)
def test_an_all_reduce_crosses_few_files(world):
    tensor = torch.ones(1000)
    crossed = [set(traced(lambda: dist.all_reduce(tensor)).files) - WAITING for _ in range(5)]
    assert min(map(len, crossed)) == FILES["dist.all_reduce"]  # the first ones get memory


def test_groups_may_start_in_different_orders(groups):
    pair = [groups["world"][1], groups["again"][1]]
    for turn in range(20):
        mine = pair if (turn + dist.get_rank()) % 2 else pair[::-1]
        tensors = {id(group): torch.ones(10_000) for group in pair}
        works = [dist.all_reduce(tensors[id(group)], group=group, async_op=True) for group in mine]
        for work in works:
            work.wait()
        assert all((tensor == dist.get_world_size()).all() for tensor in tensors.values())


def test_blocking_ones_follow_those_that_were_started(world):
    rows = everyone(50_000)
    first, second = rows[dist.get_rank()].clone(), torch.ones(3)
    work = dist.all_reduce(first, async_op=True)
    dist.all_reduce(second)
    assert work.is_completed()
    assert same(first, folded(rows, "SUM")) and (second == dist.get_world_size()).all()


def test_futures_chain_and_their_callbacks_may_communicate(world):
    """As PowerSGD's hook does: a callback waits for another all-reduce of the same group."""
    size = dist.get_world_size()

    def halve(future):
        (tensor,) = future.value()
        return tensor / 2

    def reduce_again(future):
        return dist.all_reduce(future.value(), async_op=True).get_future().wait()[0]

    chains = []
    for turn in range(10):
        future = dist.all_reduce(torch.full((5,), float(turn)), async_op=True).get_future()
        chains.append(future.then(halve).then(reduce_again))
    for turn, chain in enumerate(chains):
        assert (chain.wait() == turn * size / 2 * size).all()


def test_a_work_has_its_outputs(world):
    tensor = torch.ones(3)
    work = dist.all_reduce(tensor, async_op=True)
    assert work.get_future().wait()[0] is not None
    assert work.result()[0] is tensor
    assert work.exception() is None
    work.synchronize()


def test_calls_from_several_threads_of_a_program(groups):
    """Each thread has a group of its own, so that each group's calls have one order."""
    results = {}

    def use(name):
        group = groups[name][1]
        for turn in range(30):
            tensor = torch.full((2000,), float(turn))
            dist.all_reduce(tensor, group=group)
            results[name, turn] = tensor

    threads = [threading.Thread(target=use, args=(name,)) for name in ("world", "again")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all((tensor == turn * dist.get_world_size()).all() for (_, turn), tensor in results.items())


# --- messages ---


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("length", [0, 1, 1000, 3_000_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool], ids=str)
def test_a_ring_of_messages(world, length, dtype):
    rank, size = dist.get_rank(), dist.get_world_size()
    received = torch.zeros(length, dtype=dtype)
    mine = drawn(rank, (length,), dtype)
    sent = dist.isend(mine, (rank + 1) % size, tag=3)
    got = dist.irecv(received, (rank - 1) % size, tag=3)
    got.wait()
    sent.wait()
    assert same(received, drawn((rank - 1) % size, (length,), dtype))


@pytest.mark.mpi(min_size=2)
def test_messages_match_by_tag(world):
    rank = dist.get_rank()
    if rank == 0:
        works = [dist.isend(torch.full((4,), float(tag)), 1, tag=tag) for tag in range(5)]
        for work in works:
            work.wait()
    elif rank == 1:
        for tag in (3, 0, 4, 1, 2):
            tensor = torch.zeros(4)
            assert dist.recv(tensor, 0, tag=tag) == 0
            assert (tensor == tag).all()


@pytest.mark.mpi(min_size=2)
def test_messages_from_any_rank(groups):
    for name in ("world", "even"):
        ranks, group = groups[name]
        if dist.get_rank() not in ranks or len(ranks) < 2:
            continue
        if dist.get_rank() == ranks[0]:
            senders = set()
            for _ in ranks[1:]:
                tensor = torch.zeros(3, 2)[:, 0]
                source = dist.recv(tensor, None, group, tag=1)
                assert (tensor == source).all()
                senders.add(source)
            assert senders == set(ranks[1:])
        else:
            dist.send(torch.full((3,), float(dist.get_rank())), ranks[0], group, tag=1)
        dist.barrier(group)


@pytest.mark.mpi(min_size=2)
def test_messages_beside_collectives(world):
    """A message that nobody waits for yet does not hold up a collective, and the other way round."""
    rank, size = dist.get_rank(), dist.get_world_size()
    received, mine = torch.zeros(500_000), torch.full((500_000,), float(rank))
    works = [dist.irecv(received, (rank - 1) % size), dist.isend(mine, (rank + 1) % size)]
    total = torch.ones(100_000)
    summed = dist.all_reduce(total, async_op=True)
    dist.barrier()
    for work in works:
        work.wait()
    summed.wait()
    assert (received == (rank - 1) % size).all() and (total == size).all()


@pytest.mark.mpi(min_size=2)
def test_batches_of_messages(world):
    rank, size = dist.get_rank(), dist.get_world_size()
    received = torch.zeros(7)
    batch = [
        dist.P2POp(dist.isend, torch.full((7,), float(rank)), (rank + 1) % size),
        dist.P2POp(dist.irecv, received, (rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    assert (received == (rank - 1) % size).all()


#: What rank 0 sends, and what rank 1 expects; n: a number of elements.
OTHER_KINDS = {
    "length": lambda n: (torch.ones(n), torch.zeros(n - 1)),
    "dtype": lambda n: (torch.ones(n, dtype=torch.int32), torch.zeros(n)),
    "shape": lambda n: (torch.ones(2, n // 2), torch.zeros(n // 2, 2)),
    "dimensions": lambda n: (torch.ones(*[1] * 60, n), torch.zeros(*[1] * 61, n)),
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("count", [6, 5000, 1 << 20])
@pytest.mark.parametrize("kind", OTHER_KINDS)
@pytest.mark.parametrize("source", [0, None], ids=["from rank 0", "from any rank"])
def test_a_message_of_another_kind_is_an_error_where_it_arrives(world, count, kind, source):
    """On the sender too if it is long. The next one arrives: what was refused has left nothing of itself on the way."""
    sent, expected = OTHER_KINDS[kind](count)
    refused = pytest.raises(MismatchError, match=r"recv: expected .* on rank 1, .* from rank 0; send and receive ")
    if dist.get_rank() == 0:
        with refused if sent.nbytes > 16 << 10 else nullcontext():
            dist.send(sent, 1, tag=9)
        dist.send(sent * 2, 1, tag=9)
    elif dist.get_rank() == 1:
        with refused:
            dist.recv(expected, source, tag=9)
        assert (expected == 0).all()
        received = torch.empty_like(sent)
        assert dist.recv(received, source, tag=9) == 0
        assert torch.equal(received, sent * 2)
    dist.barrier()


@pytest.mark.mpi(min_size=2)
def test_long_messages_under_one_tag_arrive_in_their_order(world):
    count, long = 8, 5000
    if dist.get_rank() == 0:
        for work in [dist.isend(torch.full((long,), float(each)), 1) for each in range(count)]:
            work.wait()
    elif dist.get_rank() == 1:
        tensors = [torch.zeros(long) for _ in range(count)]
        works = [dist.irecv(tensor, 0 if each % 2 else None) for each, tensor in enumerate(tensors)]
        for work in reversed(works):
            work.wait()
        assert [tensor.unique().tolist() for tensor in tensors] == [[float(each)] for each in range(count)]
    dist.barrier()


@pytest.mark.mpi(min_size=2)
def test_wait_with_a_time_limit(world):
    if dist.get_rank() == 1:
        tensor = torch.zeros(2)
        work = dist.irecv(tensor, 0, tag=5)
        with pytest.raises(ClcommError, match=r"recv from rank 0: not complete after 0.1 s"):
            work.wait(timedelta(seconds=0.1))
    dist.barrier()
    if dist.get_rank() == 0:
        dist.send(torch.ones(2), 1, tag=5)
    elif dist.get_rank() == 1:
        work.wait()
        assert (tensor == 1).all()
