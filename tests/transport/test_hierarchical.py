"""A Communicator and a Synchronizer on several hosts, simulated on one machine."""

from __future__ import annotations

import numpy as np
import pytest

from clcomm import Communicator, Synchronizer
from clcomm.base.errors import MismatchError
from clcomm.comm.transport import hierarchical, mpi_communicators, mpi_runtime
from clcomm.comm.transport import host_memory as memory_module
from tests.numpy_models import set_gradients, small_model
from tests.transport.references import LAYOUTS, drawn, folded, layout_hosts, pretended_host, same_bits

pytestmark = pytest.mark.mpi(min_size=3)
SIZES = (1, 17, 4097, 70_001)


@pytest.fixture(params=LAYOUTS)
def hosts(request, monkeypatch):
    """Simulate several hosts for Communicators; return the ranks of each."""
    monkeypatch.setattr(mpi_communicators, "host_of", lambda comm: pretended_host(request.param, comm))
    return layout_hosts(request.param, mpi_runtime.world().Get_size())


@pytest.fixture
def comm(hosts, request):
    made = Communicator()
    yield made
    if not request.node.has_failed:
        made.finalize()


def test_everyone_knows_where_it_is(comm, hosts):
    own = hosts[comm.host]
    assert comm.hosts == len(hosts) == 2
    assert own[comm.local_rank] == comm.rank
    assert comm.local_size == len(own)
    common = comm.allocate_common(8).view(np.int64)
    if comm.local_rank == 0:
        common[0] = comm.host + 1
    comm.barrier()
    assert common[0] == comm.host + 1, "one memory a host"
    assert not comm.is_common(common), "but not one for all"


@pytest.mark.parametrize("op", ["sum", "mean", "max"])
@pytest.mark.parametrize("size", SIZES)
def test_every_way_to_all_reduce_gives_the_same_bits(comm, hosts, op, size):
    own, common = comm.allocate(4 * size).view(np.float32), comm.allocate_common(4 * size).view(np.float32)
    prepared = comm.all_reduce_init(own, op, out=common)
    for turn in range(3):
        rows = [drawn(rank, size, "float32", turn) for rank in range(comm.size)]
        expected = folded(rows, op, hosts)
        own[:] = rows[comm.rank]
        comm.barrier()
        prepared()
        assert same_bits(common.copy(), expected)
        assert same_bits(comm.all_reduce(rows[comm.rank].copy(), op), expected), "memory from elsewhere"
        assert same_bits(comm.all_reduce_async(rows[comm.rank].copy(), op).wait(), expected)
        comm.all_reduce(own, op, out=common)
        assert same_bits(common.copy(), expected)
        assert same_bits(own, rows[comm.rank])
        comm.barrier()
        comm.all_reduce_async(own, op, out=common).wait()
        assert same_bits(common.copy(), expected)
        assert same_bits(comm.all_reduce(own, op).copy(), expected), "in place"
        comm.barrier()


def test_what_reduces_equal_arrays_is_made_once(comm, monkeypatch):
    made, create = [], hierarchical._Reduction.__init__
    monkeypatch.setattr(
        hierarchical._Reduction, "__init__", lambda self, *settings: made.append(settings) or create(self, *settings)
    )
    own, common = comm.allocate(64).view(np.float32), comm.allocate_common(64).view(np.float32)
    own[:] = comm.rank
    for op, times in (("sum", 1), ("sum", 1), ("max", 2), ("sum", 2)):
        comm.all_reduce(own, op, out=common)
        comm.barrier()
        comm.all_reduce_async(own, op, out=common).wait()
        assert len(made) == times
        comm.barrier()
    comm.all_reduce(own[:8], out=common[:8])
    assert len(made) == 3
    assert (common[:8] == comm.size * (comm.size - 1) / 2).all()


def test_blocks_gathered_in_place_reach_the_other_hosts(comm):
    for memory in (
        comm.allocate(8 * comm.size),
        comm.allocate_common(8 * comm.size),
        np.zeros(8 * comm.size, np.uint8),
    ):
        values = memory.view(np.int64)
        values[comm.rank] = comm.rank + 5
        comm.barrier()
        comm.all_gather_in_place(values)
        assert values.tolist() == [rank + 5 for rank in range(comm.size)]


def test_gradients_have_the_same_bits_for_every_bucket_size(comm, hosts):
    seen = []
    for bucket_size in (1, 2000, "1MiB", None):
        model = small_model()
        sync = Synchronizer(comm, bucket_size=bucket_size, use_bucketing=bucket_size is not None)
        sync.broadcast_parameters(model)
        set_gradients(model, comm.rank)
        sync.sync_gradients(model)
        seen.append(model.gradient_bits())
    replicas = [small_model() for _ in range(comm.size)]
    for rank, replica in enumerate(replicas):
        set_gradients(replica, rank)
    expected = [
        folded([replica[name].grad for replica in replicas], "mean", hosts).tobytes() for name in replicas[0].parameters
    ]
    assert all(bits == expected for bits in seen)


def test_transport_mpi_keeps_plain_rank_order(hosts):
    with Communicator(transport="mpi") as comm:
        rows = [drawn(rank, 5000, "float32") for rank in range(comm.size)]
        assert same_bits(comm.all_reduce(rows[comm.rank].copy(), "sum"), folded(rows, "sum"))


def test_without_room_on_one_host_all_fall_back_with_the_same_bits(hosts, monkeypatch, caplog):
    with Communicator() as comm:
        if comm.host == 1:
            monkeypatch.setattr(memory_module, "_free_shared_memory", lambda: 0)
        rows = [drawn(rank, 5000, "float32") for rank in range(comm.size)]
        array = comm.allocate(20_000).view(np.float32)
        assert not comm.world.shared.holds(array)
        array[:] = rows[comm.rank]
        assert same_bits(comm.all_reduce(array, "mean"), folded(rows, "mean", hosts))
        with Communicator() as second:  # it cannot be opened
            assert second.world.shared is None
            assert same_bits(second.all_reduce(rows[comm.rank].copy(), "sum"), folded(rows, "sum", hosts))
    assert ("/dev/shm has no room" in caplog.text) == (comm.rank == 0)


@pytest.mark.parametrize("dtype", ["float64", "int32"])
def test_arrays_that_differ_are_refused_on_every_rank_before_any_moves(comm, dtype):
    memory, out = comm.allocate(800), comm.allocate_common(800)
    last = comm.rank == comm.size - 1
    array, target = (m[:400].view(dtype if last else np.float32) for m in (memory, out))
    if dtype == "float64":
        array, target = (m[: 800 if last else 400].view(np.float32) for m in (memory, out))
    array[:] = 1
    texts = []
    for call in (comm.all_reduce, comm.all_reduce_init, lambda *a, **k: comm.all_reduce_async(*a, **k).wait()):
        with pytest.raises(
            MismatchError, match=r"expected the same (one with equal arrays|length and dtype) on every rank"
        ) as caught:
            call(array, "sum", out=target)
        texts.append(str(caught.value))
    with pytest.raises(MismatchError):
        comm.broadcast(array)
    assert not out.any()
    assert (array == 1).all()
    assert len({tuple(theirs) for theirs in comm.all_gather_object(texts)}) == 1
    good = memory[:400].view(np.float32)
    good[:] = 1
    assert (comm.all_reduce(good) == comm.size).all(), "and it works on"


@pytest.mark.parametrize("size", [10, 10_000])
def test_prepared_operations_in_different_orders_are_refused_everywhere(comm, size):
    arrays = [comm.allocate(4 * size).view(np.float32) for _ in range(2)]
    reductions = [comm.all_reduce_init(array, "sum") for array in arrays]
    for odd_one in (comm.rank == 1, comm.host == 1):
        with pytest.raises(MismatchError, match=r"prepared as number [12]\); .* prepared as number [12]\);"):
            reductions[1 if odd_one else 0]()
        reductions[0]()  # in step again
    with pytest.raises(MismatchError):
        reductions[0]() if comm.rank == 0 else comm.all_reduce(arrays[0])


def test_communicators_are_freed(hosts):
    """MPI has only about 2,000 of them; here each Communicator takes several."""
    for _ in range(3):
        with Communicator() as comm:
            comm.all_reduce(comm.allocate(4000).view(np.float32))
            shared = comm.world.shared
        from mpi4py import MPI

        assert shared.memory.comm == shared.second_host == MPI.COMM_NULL
        assert shared.peers is None or shared.peers.comm == shared.peers.background == MPI.COMM_NULL
