"""The order in which backward really completes gradients, and the buckets that follow from it."""

from __future__ import annotations

import numpy as np
import pytest

from clcomm import Synchronizer
from clcomm.engine import Linear, Module, Tensor
from clcomm.optim import SGD
from tests.transport.references import folded

#: With two weights of 256 bytes to a bucket.
AS_LAID_OUT = [["first.weight", "fourth.weight"], ["third.weight", "second.weight"]]
AS_COMPLETED = [["fourth.weight", "third.weight"], ["second.weight"], ["first.weight"]]


class Tied(Module):
    """Its first layer, the last to be complete, is registered last and so has the first place in the layout."""

    def __init__(self):
        self.second = Linear(8, 8, bias=False)
        self.third = Linear(8, 8, bias=False)
        self.fourth = Linear(8, 8, bias=False)
        self.first = Linear(8, 8, bias=False)

    def forward(self, x):
        return self.fourth(self.third(self.second(self.first(x))))


def native_step(model, rank: int) -> None:
    x = np.random.default_rng(rank).standard_normal((4, 8)).astype(np.float32)
    model(Tensor(x)).sum().backward()


@pytest.fixture
def tied_torch(torch):
    """The same in PyTorch."""

    class TiedTorch(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.second, self.third, self.fourth, self.first = (torch.nn.Linear(8, 8, bias=False) for _ in range(4))

        def forward(self, x):
            return self.fourth(self.third(self.second(self.first(x))))

    return TiedTorch


def torch_step(model, rank: int) -> None:
    import torch

    generator = torch.Generator().manual_seed(rank)
    model(torch.randn(4, 8, generator=generator)).sum().backward()


def gradients(model) -> dict[str, np.ndarray]:
    return {name: np.array(p.grad.numpy()) for name, p in model.named_parameters()}


def names(buckets) -> list[list[str]]:
    return [[place.name for place in bucket.ranges] for bucket in buckets]


@pytest.mark.parametrize(("kind", "step"), [("native", native_step), ("torch", torch_step)], ids=["native", "torch"])
def test_buckets_follow_what_the_first_backward_did(comm, request, kind, step):
    model = Tied() if kind == "native" else request.getfixturevalue("tied_torch")()
    sync = Synchronizer(comm, bucket_size=512)
    sync.broadcast_parameters(model)
    assert names(sync.bucket_plan(model)) == AS_LAID_OUT
    for _ in range(3):
        for parameter in model.parameters():
            parameter.grad = None
        step(model, comm.rank)
        own = gradients(model)
        sync.sync_gradients(model)
        for name, mean in gradients(model).items():
            assert mean.tobytes() == folded(comm.all_gather_object(own[name]), "mean").tobytes()
        assert names(sync.bucket_plan(model)) == AS_COMPLETED


@pytest.mark.mpi(min_size=2)
def test_ranks_that_saw_different_orders_take_rank_0s(several, torch, tied_torch):
    model, sync = tied_torch(), Synchronizer(several, bucket_size=256)
    sync.broadcast_parameters(model)
    x = torch.ones(2, 8)
    (model(x) if several.rank == 0 else model.first(model.second(model.third(model.fourth(x))))).sum().backward()
    sync.sync_gradients(model)
    assert names(sync.bucket_plan(model)) == [["fourth.weight"], ["third.weight"], ["second.weight"], ["first.weight"]]


def test_without_a_backward_to_follow_the_layouts_order_stays(comm):
    model, sync = Tied(), Synchronizer(comm, bucket_size=512)
    for _ in range(3):  # the model is first seen after its backward
        sync.sync_gradients(model)
    assert names(sync.bucket_plan(model)) == AS_LAID_OUT
    native_step(model, comm.rank)
    sync.sync_gradients(model)
    SGD(model, 0.1).step()
    assert names(sync.bucket_plan(model)) == AS_LAID_OUT
