"""SyncBatchNorm against PyTorch's batch norm of all ranks' samples."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from tests.horovod.values import tensor_of  # noqa: E402

pytestmark = pytest.mark.mpi(min_size=1)


@pytest.mark.parametrize("shape", [(5, 3), (2, 3, 4), (3, 2, 4, 4)])
@pytest.mark.parametrize("affine", [True, False])
def test_synchronised_batch_norm_is_that_of_the_whole_batch(hvd, shape, affine):
    whole = [tensor_of(rank, (shape[0] + rank, *shape[1:]), torch.float64) for rank in range(hvd.size())]
    ours = hvd.SyncBatchNorm(shape[1], affine=affine).double()
    kind = {2: torch.nn.BatchNorm1d, 3: torch.nn.BatchNorm1d, 4: torch.nn.BatchNorm2d}[len(shape)]
    theirs = kind(shape[1], affine=affine).double()
    for _ in range(2):
        own = whole[hvd.rank()].clone().requires_grad_()
        everyone = torch.cat(whole).requires_grad_()
        found, expected = ours(own), theirs(everyone)
        found.pow(3).sum().backward()
        expected.pow(3).sum().backward()
    first = sum(shape[0] + rank for rank in range(hvd.rank()))
    rows = slice(first, first + shape[0] + hvd.rank())
    torch.testing.assert_close(found, expected[rows])
    torch.testing.assert_close(own.grad, everyone.grad[rows])
    torch.testing.assert_close(ours.running_mean, theirs.running_mean)
    torch.testing.assert_close(ours.running_var, theirs.running_var)
    ours.eval(), theirs.eval()
    torch.testing.assert_close(ours(own), theirs(own))
