"""Process sets are worlds of their own, and what may be asked of the world."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
MPI = pytest.importorskip("mpi4py.MPI", reason="no MPI library", exc_type=ImportError)

from clcomm.base.errors import ArgumentError, MismatchError  # noqa: E402
from tests.helpers import one_line  # noqa: E402

pytestmark = pytest.mark.mpi(min_size=1)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("given", ["numbers", "communicators"])
def test_a_process_set_is_a_world_of_its_own(hvd, given):
    """Of one communicator for each rank Horovod makes sets that differ by rank."""
    ranks = list(range(hvd.rank() % 2, hvd.size(), 2))
    if given == "numbers":
        sets = [hvd.add_process_set(range(parity, hvd.size(), 2)) for parity in (0, 1)]
    else:
        part = MPI.COMM_WORLD.Split(hvd.rank() % 2, hvd.rank())
        sets = [hvd.add_process_set(hvd.ProcessSet(part))]
        part.Free()  # Horovod's sets outlive it too
    mine = next(each for each in sets if each.included())
    assert (mine.ranks, mine.size(), mine.rank()) == (ranks, len(ranks), ranks.index(hvd.rank()))
    own = torch.tensor([float(hvd.rank())])
    assert hvd.allreduce(own, op=hvd.Sum, process_set=mine).item() == sum(ranks)
    assert hvd.allgather(own, process_set=mine).tolist() == ranks
    assert hvd.broadcast(own, ranks[-1], process_set=mine).item() == ranks[-1]
    assert hvd.allgather_object(hvd.rank(), process_set=mine) == ranks
    for other in sets:
        if other is not mine:
            with pytest.raises(ArgumentError) as caught:
                hvd.allreduce(own, process_set=other)
            assert "expected a call by its ranks" in one_line(caught)
    hvd.barrier(process_set=mine)
    for known in ([0], [1], range(0, hvd.size(), 2)):
        if set(known) in [set(range(parity, hvd.size(), 2)) for parity in (0, 1)]:
            with pytest.raises(ValueError, match="duplicate") as caught:
                hvd.add_process_set(known)
            assert len(set(hvd.allgather_object(one_line(caught)))) == 1
    assert all(hvd.remove_process_set(each) for each in sets) and not hvd.remove_process_set(mine)
    with pytest.raises(ArgumentError):
        hvd.allreduce(own, process_set=mine)
    assert hvd.add_process_set(range(0, hvd.size(), 2)).process_set_id is not None


@pytest.mark.mpi(min_size=2)
def test_operations_of_several_sets_are_under_way_together(hvd):
    """Every rank starts its operations in the program's order, and waits for them in its own."""
    sets = [hvd.add_process_set([0, rank]) for rank in range(1, hvd.size())] if hvd.size() > 2 else []
    mine = [hvd.global_process_set, *(each for each in sets if each.included()), hvd.global_process_set]
    own = torch.tensor([float(hvd.rank())])
    handles = [hvd.allreduce_async(own, op=hvd.Sum, process_set=each) for each in mine]
    handles += [hvd.allgather_async(own, process_set=each) for each in mine]
    order = list(range(len(handles)))[:: -1 if hvd.rank() % 2 else 1]
    for each in mine[1:]:
        hvd.barrier(process_set=each)
    for at in order:
        while hvd.rank() == 0 and not hvd.poll(handles[at]):
            pass
    found = {at: hvd.synchronize(handles[at]).tolist() for at in order}
    for at, each in enumerate(mine):
        assert (found[at], found[at + len(mine)]) == ([sum(each.ranks)], each.ranks)


def test_the_global_set_has_all_ranks(hvd):
    everyone = list(range(hvd.size()))
    assert hvd.global_process_set.ranks == everyone and hvd.rank() in hvd.global_process_set.ranks
    assert str(hvd.global_process_set) == f"ProcessSet(process_set_id=0, ranks={everyone}, mpi_comm=None)"
    with pytest.raises(ValueError, match="duplicate") as caught:
        hvd.add_process_set(everyone)
    one_line(caught)
    hvd.shutdown()
    assert hvd.global_process_set.ranks == []
    hvd.init()


@pytest.mark.mpi(min_size=2)
def test_ranks_that_add_different_sets_all_get_the_same_error(hvd):
    with pytest.raises(MismatchError) as caught:
        hvd.add_process_set([hvd.rank()])
    assert len(set(hvd.allgather_object(one_line(caught)))) == 1
    for wrong in (["a"], 1.5, "01"):
        with pytest.raises(ArgumentError) as caught:
            hvd.ProcessSet(wrong)
        assert "expected numbers of ranks" in one_line(caught)


def test_sets_may_be_announced(hvd):
    hvd.shutdown()
    with pytest.raises(ArgumentError) as caught:
        hvd.init(process_sets="static")
    assert "got 'static'" in one_line(caught)
    hvd.init(process_sets="dynamic")
    if hvd.size() > 1:
        added = hvd.ProcessSet([0])
        hvd.shutdown()
        hvd.init(process_sets=[added])
        assert added.size() == 1


def test_queries(hvd):
    assert hvd.is_initialized() and 0 <= hvd.rank() < hvd.size()
    assert (hvd.local_rank(), hvd.local_size()) == (hvd.rank(), hvd.size())
    assert (hvd.cross_rank(), hvd.cross_size(), hvd.is_homogeneous()) == (0, 1, True)
    assert hvd.mpi_built() and hvd.mpi_enabled() and not hvd.mpi_threads_supported()
    assert not any(each() for each in (hvd.gloo_built, hvd.gloo_enabled, hvd.nccl_built, hvd.ccl_built, hvd.cuda_built))
    hvd.init()  # a second one does nothing
    with pytest.raises(ArgumentError) as caught:
        hvd.run(lambda: None, np=3)
    assert one_line(caught).endswith("clcomm run -n 3 train.py")
