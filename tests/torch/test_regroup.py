"""Groups of the ranks that meet at a store: fewer, more again, in any order; and torchft's wrapper around them."""

from __future__ import annotations

from datetime import timedelta

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
import torch.distributed as dist  # noqa: E402

from clcomm.base.errors import ArgumentError, LaunchError  # noqa: E402
from clcomm.torch import GroupTimeoutError, group_of_store, launch  # noqa: E402

LONG = timedelta(seconds=100)
pytestmark = [pytest.mark.timeout(300)]


@pytest.fixture
def store(auto):
    """A store of all ranks, on rank 0."""
    port = 0
    if auto.rank == 0:
        made = dist.TCPStore("127.0.0.1", 0, None, True, LONG, wait_for_workers=False)
        port = made.port
    port = auto.broadcast_object(port)
    yield made if auto.rank == 0 else dist.TCPStore("127.0.0.1", port, None, False, LONG, wait_for_workers=False)
    auto.barrier()


@pytest.mark.mpi(min_size=2)
def test_ranks_leave_and_come_back(auto, store) -> None:
    for turn, size in enumerate((auto.size, auto.size - 1, auto.size)):
        if auto.rank < size:
            place = size - 1 - auto.rank  # another order than the world's
            group = group_of_store(dist.PrefixStore(str(turn), store), place, size, LONG)
            assert (group.rank(), group.size()) == (place, size)
            values = torch.tensor([float(place), 1.0])
            group.allreduce([values]).wait()
            assert values.tolist() == [size * (size - 1) / 2, size]
            own = torch.tensor([auto.rank])
            group.broadcast([own], 0).wait()
            assert own.item() == size - 1, "rank 0 of the group is the world's last"
            group.abort()


@pytest.mark.mpi(min_size=2)
def test_ranks_of_another_launch_are_refused_on_every_rank(auto, store, monkeypatch) -> None:
    if auto.rank == 0:
        monkeypatch.setattr(launch, "launch_of", lambda pid: "another")
    with pytest.raises(LaunchError, match=r"different ranks of one MPI launch, got the ranks .* of 2 launches"):
        group_of_store(dist.PrefixStore("x", store), auto.rank, auto.size, LONG)


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_does_not_come_is_named(auto, store) -> None:
    if auto.rank < auto.size - 1:
        with pytest.raises(GroupTimeoutError, match=rf"within 0.5 s, rank {auto.size - 1} did not come"):
            group_of_store(dist.PrefixStore("x", store), auto.rank, auto.size, timedelta(seconds=0.5))


def test_a_number_out_of_range_is_one_line() -> None:
    with pytest.raises(ArgumentError, match="rank: expected one from 0 up to world_size, which is 2, got 2"):
        group_of_store(dist.HashStore(), 2, 2)


@pytest.mark.mpi(min_size=2)
def test_torchfts_wrapper_reconfigures(auto, store) -> None:
    torchft = pytest.importorskip("torchft.process_group", reason="torchft is not installed")

    class ProcessGroupClcomm(torchft.ProcessGroupWrapper):
        def _create_pg(self, store, rank, world_size):
            return group_of_store(store, rank, world_size, LONG)

    group = ProcessGroupClcomm()
    address = auto.broadcast_object(f"127.0.0.1:{store.port}")
    for turn, size in enumerate((auto.size, auto.size - 1, auto.size)):
        if auto.rank < size:
            torchft.reconfigure_with_store(group, f"{address}/turn/{turn}", auto.rank, size, LONG)
            assert group.size() == size
            values = torch.full((5,), float(auto.rank))
            group.allreduce([values], dist.AllreduceOptions()).wait()
            assert values.tolist() == [size * (size - 1) / 2] * 5
    group.abort(errored=False)
