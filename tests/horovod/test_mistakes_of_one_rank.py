"""A mistake of one rank in a call of Horovod's is raised on every rank of its process set."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from clcomm.errors import ArgumentError  # noqa: E402
from tests.helpers import one_line  # noqa: E402

pytestmark = pytest.mark.mpi(min_size=2)


def mistakes(hvd, is_odd):
    def either(right, wrong):
        return wrong if is_odd else right

    x, n = torch.ones(hvd.size(), 2), hvd.size()
    lazy = torch.nn.LazyLinear(2).weight
    return {
        "splits": lambda: hvd.alltoall(x, splits=either([1] * n, [2] * n)),
        "rows": lambda: hvd.alltoall(either(x, torch.ones(()))),
        "root": lambda: hvd.broadcast(x, either(0, n)),
        "op": lambda: hvd.allreduce(x, op=either(hvd.Sum, "sum")),
        "no tensor": lambda: hvd.allreduce(either(x, [1.0])),
        "sparse op": lambda: hvd.synchronize(hvd.sparse_allreduce_async(x.to_sparse(), op=either(hvd.Sum, hvd.Max))),
        "gather": lambda: hvd.allgather(either(x, None)),
        "scatter": lambda: hvd.reducescatter(either(x, torch.ones(()))),
        "lazy": lambda: hvd.broadcast_parameters({"weight": either(x, lazy)}, 0),
        "object": lambda: hvd.allgather_object(either(1, lambda: None)),
        "optimizer": lambda: hvd.DistributedOptimizer(
            torch.optim.SGD([torch.nn.Parameter(x.clone())], 0.1), op=either(hvd.Sum, hvd.Max)
        ),
    }


@pytest.mark.parametrize("place", [0, -1])
def test_a_mistake_of_one_rank_is_raised_on_all(hvd, place):
    odd = range(hvd.size())[place]
    for name, call in mistakes(hvd, hvd.rank() == odd).items():
        with pytest.raises(ArgumentError) as caught:
            call()
        said = hvd.allgather_object(one_line(caught))
        assert set(said) == {said[0]} and said[0].endswith(f"(on rank {odd})"), name
        assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [hvd.size()] * 2, name
