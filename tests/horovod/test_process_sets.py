"""Process sets are worlds of their own, and what may be asked of the world."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from clcomm.errors import ArgumentError, MismatchError  # noqa: E402
from tests.helpers import one_line  # noqa: E402

pytestmark = pytest.mark.mpi(min_size=1)


def test_a_process_set_is_a_world_of_its_own(hvd):
    halves = [[rank for rank in range(hvd.size()) if rank % 2 == parity] for parity in (0, 1)]
    sets = [hvd.add_process_set(ranks) for ranks in halves if ranks]
    mine = next(each for each in sets if each.included())
    ranks = mine.ranks
    assert (mine.size(), mine.rank()) == (len(ranks), ranks.index(hvd.rank()))
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
    assert all(hvd.remove_process_set(each) for each in sets) and not hvd.remove_process_set(mine)
    with pytest.raises(ArgumentError):
        hvd.allreduce(own, process_set=mine)


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
