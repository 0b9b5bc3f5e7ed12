"""PyTorch's gradients: a family of training loops against one process that averages by the formula."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from clcomm import Communicator  # noqa: E402
from tests.adapters.torch_loops import OPTIMIZERS, Net, assert_same_bits, ours, reference  # noqa: E402

pytestmark = pytest.mark.mpi(min_size=1)

CASES = list(
    itertools.product(
        (True, False),  # set_to_none
        (1, 3),  # backwards for a step
        (False, True),  # overlap
        (None, "64", "1MiB"),  # bucket size, None: per tensor
        (torch.float32, torch.float64),
        (False, True),  # clip
        tuple(OPTIMIZERS),
    )
)
SAMPLE = [CASES[at] for at in np.random.default_rng(15).permutation(len(CASES))[:40]]


@pytest.mark.sampled(20)
@pytest.mark.parametrize("set_to_none, parts, overlap, bucket, dtype, clip, optimizer", SAMPLE)
def test_loops_have_the_bits_of_the_formula(set_to_none, parts, overlap, bucket, dtype, clip, optimizer):
    comm = Communicator()

    def make():
        return Net(dtype)

    settings = {"overlap": overlap, "use_bucketing": bucket is not None, "bucket_size": bucket}
    found = ours(comm, make, optimizer, set_to_none, parts, clip, settings=settings)
    assert_same_bits(found, reference(make, comm.size, optimizer, set_to_none, parts, clip))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("set_to_none, parts", [(True, 1), (True, 2), (False, 1)])
def test_sparse_narrow_complex_and_channels_last_gradients(set_to_none, parts, overlap):
    comm = Communicator()

    def make():
        return Net(exotic=True)

    found = ours(comm, make, "sgd", set_to_none, parts, False, settings={"overlap": overlap, "bucket_size": "256"})
    wanted = reference(make, comm.size, "sgd", set_to_none, parts, False)
    for (name, got), expected in zip(found[0].named_parameters(), wanted[0].parameters(), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-2 if name == "narrow" else 1e-5, atol=1e-6, msg=name)


@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_graph_of_gradients_may_be_created():
    comm = Communicator()
    found = ours(comm, Net, "sgd", True, 1, False, create_graph=True)
    assert_same_bits(found, reference(Net, comm.size, "sgd", True, 1, False))
    found[0].zero_grad()
