"""A mistake is one line and harms nothing; ranks that differ all get the same one."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from clcomm.base.errors import ArgumentError, MismatchError  # noqa: E402
from tests.helpers import one_line  # noqa: E402

pytestmark = pytest.mark.mpi(min_size=1)


def mistakes(hvd):
    return {
        "no tensor": (lambda: hvd.allreduce([1.0]), "expected a torch.Tensor, got list"),
        "sparse": (lambda: hvd.allreduce(torch.eye(2).to_sparse()), "expected a dense tensor"),
        "no list": (lambda: hvd.grouped_allreduce(torch.ones(2)), "expected a list of tensors, got Tensor"),
        "op": (lambda: hvd.allreduce(torch.ones(2), op="sum"), "expected hvd.Average"),
        "adasum of integers": (
            lambda: hvd.allreduce(torch.ones(2).int(), op=hvd.Adasum),
            "needs a real floating dtype",
        ),
        "quarter precision": (lambda: hvd.allreduce(torch.ones(2).to(torch.float8_e5m2)), "that can be summed"),
        "complex halves": (lambda: hvd.allreduce(torch.zeros(2, dtype=torch.complex32)), "that can be summed"),
        "root": (lambda: hvd.broadcast(torch.ones(2), 99), "root_rank: expected one of the ranks"),
        "splits": (lambda: hvd.alltoall(torch.ones(4), splits=[9] * hvd.size()), "splits: expected"),
        "number": (lambda: hvd.alltoall(torch.tensor(1.0)), "expected a first dimension that"),
        "scatter a number": (lambda: hvd.reducescatter(torch.tensor(1.0)), "expected at least one dimension"),
        "scatter adasum": (lambda: hvd.reducescatter(torch.ones(2), op=hvd.Adasum), "expected another than Adasum"),
    }


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("kind", sorted(mistakes(None)))
def test_a_mistake_is_one_line_and_harms_nothing(hvd, kind):
    call, said = mistakes(hvd)[kind]
    with pytest.raises(ArgumentError) as caught:
        call()
    assert said in one_line(caught)
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [hvd.size()] * 2


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    "kind", ["shape", "dimensions", "group", "adasum", "dtype", "operation", "name", "rows", "columns", "root"]
)
def test_ranks_that_differ_all_get_the_same_error(hvd, kind):
    is_odd = hvd.rank() == hvd.size() - 1
    calls = {
        "shape": lambda: hvd.allreduce(torch.ones(4 + is_odd)),
        "dimensions": lambda: hvd.allreduce(torch.ones((2, 3) if is_odd else (3, 2))),
        "group": lambda: hvd.grouped_allreduce([torch.ones(4 - is_odd), torch.ones(4 + is_odd)]),
        "adasum": lambda: hvd.grouped_allreduce([torch.ones(4 - is_odd), torch.ones(4 + is_odd)], op=hvd.Adasum),
        "columns": lambda: hvd.alltoall(torch.ones(2 * hvd.size(), 2 + is_odd)),
        "dtype": lambda: hvd.allreduce(torch.ones(4, dtype=torch.float64 if is_odd else torch.float32)),
        "operation": lambda: hvd.allgather(torch.ones(4)) if is_odd else hvd.allreduce(torch.ones(4)),
        "name": lambda: hvd.allreduce(torch.ones(4), name="a" if is_odd else "b"),
        "rows": lambda: hvd.allgather(torch.ones(4, 2 + is_odd)),
        "root": lambda: hvd.broadcast(torch.ones(4), int(is_odd)),
    }
    with pytest.raises(MismatchError) as caught:
        calls[kind]()
    texts = hvd.allgather_object(one_line(caught))
    assert len(set(texts)) == 1
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [hvd.size()] * 2
