"""SyncBatchNorm: ranks with parts of a batch have the statistics and gradients of one rank with all of it."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from clcomm import Communicator
from clcomm.base.errors import ArgumentError
from clcomm.engine import (
    BatchNorm1d,
    BatchNorm2d,
    Conv2d,
    CrossEntropyLoss,
    Linear,
    ReLU,
    Replay,
    Sequential,
    Tensor,
    manual_seed,
)
from clcomm.engine.nn import Module
from clcomm.optim import SGD
from clcomm.parallel import DistributedDataParallel, Mesh, SyncBatchNorm
from clcomm.sync.distributed_optimizer import DistributedOptimizer
from models import ResNet
from tests.helpers import one_line

pytestmark = pytest.mark.mpi(min_size=1)


@pytest.fixture(params=["auto", "mpi"])
def ranks(request):
    comm = Communicator(transport=request.param)
    yield comm
    if not request.node.has_failed:
        comm.finalize()


def drawn(seed, shape) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32) * 2 + 1


def cases() -> list[dict]:
    """Draw shapes, settings and parts of every kind."""
    rng, found = np.random.default_rng(5), []
    for number in range(18):
        sides = tuple(int(n) for n in rng.integers(1, 5, (0, 1, 2, 3)[number % 4]))
        found.append({
            "channels": int(rng.integers(1, 7)), "sides": sides, "most": int(rng.integers(1, 5)), "seed": number,
            "settings": {
                "affine": bool(number % 3), "track_running_stats": number % 5 > 0, "eps": 0.01,
                "momentum": (0.1, None, 0.5)[number % 3],
            },
        })  # fmt: skip
    return found


@pytest.mark.parametrize("case", cases(), ids=lambda case: str(case["seed"]))
def test_ranks_normalise_as_one_rank_with_the_whole_batch(ranks, case):
    """Against float64: results, gradients and running statistics; ranks' parts of the batch differ in size."""
    channels, seed = case["channels"], case["seed"]
    counts = [1 + (seed + rank * case["most"]) % case["most"] for rank in range(ranks.size)]
    if sum(counts) * int(np.prod(case["sides"])) == 1:
        counts[0] += 1
    steps, settings = 2, case["settings"]
    layer = SyncBatchNorm(channels, **settings, comm=ranks)
    weight, bias = drawn([seed, 1], channels), drawn([seed, 2], channels)
    if settings["affine"]:
        layer.load_state_dict({**layer.state_dict(), "weight": weight, "bias": bias})
    means, variances = np.zeros(channels), np.ones(channels)
    begin, own = sum(counts[: ranks.rank]), counts[ranks.rank]
    for step in range(steps):
        x = drawn([seed, 3, step], (sum(counts), channels, *case["sides"]))
        up = drawn([seed, 4, step], x.shape)
        part = slice(begin, begin + own)
        given = Tensor(x[part], requires_grad=True)
        y = layer(given)
        for parameter in layer.parameters():
            parameter.grad = None
        y.backward(Tensor(up[part]))
        axes = (0, *range(2, x.ndim))
        wide = (channels,) + (1,) * (x.ndim - 2)
        exact, gradient = x.astype(np.float64), up.astype(np.float64)
        mean, variance = exact.mean(axes), exact.var(axes)
        scale = (1 / np.sqrt(variance + 0.01)).reshape(wide)
        normal = (exact - mean.reshape(wide)) * scale
        factor, shift = (weight.reshape(wide), bias.reshape(wide)) if settings["affine"] else (1.0, 0.0)
        np.testing.assert_allclose(y.numpy(), (normal * factor + shift)[part], rtol=1e-4, atol=2e-4)
        slopes = (gradient * normal).mean(axes).reshape(wide)
        dx = scale * factor * (gradient - gradient.mean(axes).reshape(wide) - normal * slopes)
        np.testing.assert_allclose(given.grad.numpy(), dx[part], rtol=1e-3, atol=1e-3)
        if settings["affine"]:  # of this rank's part: DistributedDataParallel averages them
            np.testing.assert_allclose(layer.bias.grad.numpy(), gradient[part].sum(axes), rtol=1e-3, atol=1e-3)
            expected = (gradient * normal)[part].sum(axes)
            np.testing.assert_allclose(layer.weight.grad.numpy(), expected, rtol=1e-3, atol=2e-3)
        share = 1 / (step + 1) if settings["momentum"] is None else settings["momentum"]
        means = (1 - share) * means + share * mean
        variances = (1 - share) * variances + share * exact.var(axes, ddof=1)
    if settings["track_running_stats"]:
        np.testing.assert_allclose(layer.running_mean.numpy(), means, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(layer.running_var.numpy(), variances, rtol=1e-4, atol=1e-4)
        assert layer.num_batches_tracked.numpy() == steps
        layer.eval()
        inner = np.sqrt(layer.running_var.numpy().astype(np.float64) + 0.01).reshape(wide)
        normal = (exact - layer.running_mean.numpy().reshape(wide)) / inner
        np.testing.assert_allclose(
            layer(Tensor(x[part])).numpy(), (normal * factor + shift)[part], rtol=1e-4, atol=1e-4
        )


def network() -> Module:
    manual_seed(3)  # earlier tests have drawn other numbers on each rank
    return Sequential(
        Conv2d(2, 4, 3, padding=1), BatchNorm2d(4), ReLU(),
        Sequential(Conv2d(4, 3, 3, 2), BatchNorm2d(3, momentum=None)), Flat(),
        Linear(12, 6), BatchNorm1d(6), ReLU(), Linear(6, 5),
    )  # fmt: skip


class Flat(Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], -1)


def trained(model, batches, comm=None, replayed=False):
    """Return the losses of steps on these batches, of this rank's parts with `comm`, and the final state."""
    ddp = model if comm is None else DistributedDataParallel(model, comm, broadcast_buffers=False)
    optimizer, loss_fn, losses = SGD(model, 0.05, momentum=0.9), CrossEntropyLoss(), []

    def forward_backward(x, y):
        loss = loss_fn(model(x), y)
        loss.backward()
        return loss

    step = Replay(forward_backward) if replayed else forward_backward
    for x, y in batches:
        part = slice(None)
        if comm is not None:
            each = len(x) // comm.size
            part = slice(comm.rank * each, (comm.rank + 1) * each)
        losses.append(step(Tensor(x[part]), Tensor(y[part])).item())
        if comm is not None:
            ddp.finish_grad_sync()
        optimizer.step()
        optimizer.zero_grad()
    if replayed and comm is not None:
        assert step.refusal is None and step.replayed > len(batches) // 2
    return losses, model.state_dict()


@pytest.mark.sampled(6)
@pytest.mark.parametrize("replayed", [False, True])
@pytest.mark.parametrize("make", [network, lambda: ResNet((2, 6, 6), 5, (1, 1), 4, seed=2)], ids=["layers", "resnet"])
def test_a_converted_model_trains_as_one_rank_with_the_whole_batch(ranks, make, replayed):
    model = make()
    alone = copy.deepcopy(model)
    before = model.state_dict()
    converted = SyncBatchNorm.convert_sync_batchnorm(model, ranks)
    assert converted is model and list(model.state_dict()) == list(before)
    kinds = [type(each) for _, each in model.named_modules()]
    assert SyncBatchNorm in kinds and BatchNorm2d not in kinds and BatchNorm1d not in kinds
    rng = np.random.default_rng(8)
    batches = [(drawn([9, n], (12, 2, 6, 6)), rng.integers(0, 5, 12).astype(np.int32)) for n in range(24)]
    expected, state = trained(alone, batches)
    losses, found = trained(model, batches, ranks, replayed)
    mean = ranks.all_reduce(np.array(losses), "mean")
    np.testing.assert_allclose(mean, expected, rtol=2e-3)
    for name, value in found.items():
        np.testing.assert_allclose(value, state[name], rtol=5e-3, atol=2e-3, err_msg=name)
    everyone = ranks.all_gather_object({name: value.tobytes() for name, value in found.items()})
    assert everyone == everyone[:1] * ranks.size


def uneven(ranks: int, step: int) -> list[int]:
    """Return each rank's samples of a step; rank 0's are as many in all, so that its recordings serve all."""
    return [
        3 if rank == 0 else 1 + (3 * rank + step + rank * step) % 5 + 4 * (rank == ranks - 1) for rank in range(ranks)
    ]


def clipped_alone(model, largest: float) -> float:
    """Clip one rank's gradients; return their norm before."""
    gradients = [each.grad for each in model.parameters()]
    norm = np.sqrt(sum((each.numpy().astype(np.float64) ** 2).sum() for each in gradients))
    for each in gradients:
        each.copy_from((each.numpy() * min(1.0, largest / (norm + 1e-6))).astype(np.float32))
    return norm


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("way", ["plain", "replayed", "zero", "accumulated", "clipped"])
def test_batches_of_other_sizes_weigh_the_ranks_as_one_rank_with_all_samples(ranks, way):
    model, steps, parts = network(), 20, 2 if way == "accumulated" else 1
    alone, rng = copy.deepcopy(model), np.random.default_rng(11)
    model = SyncBatchNorm.convert_sync_batchnorm(model, ranks)
    ddp = DistributedDataParallel(model, ranks, broadcast_buffers=False, zero=int(way == "zero"))
    optimizers = [SGD(each, 0.05, momentum=0.9) for each in (alone, model)]
    if way == "zero":
        optimizers[1] = DistributedOptimizer(optimizers[1], ddp.synchronizer)
    loss_fn = CrossEntropyLoss()

    def forward_backward(x, y):
        loss_fn(model(x), y).backward(1 / parts)

    run = Replay(forward_backward) if way == "replayed" else forward_backward
    for step in range(steps):
        counts = uneven(ranks.size, step % 4)
        if step > 3 and step % 3:
            ddp.expect_samples(counts[ranks.rank])
        else:  # what was expected is one step's
            counts = [3] * ranks.size
        for part in range(parts):
            x, y = drawn([12, step, part], (sum(counts), 2, 6, 6)), rng.integers(0, 5, sum(counts)).astype(np.int32)
            loss_fn(alone(Tensor(x)), Tensor(y)).backward(1 / parts)
            own = slice(sum(counts[: ranks.rank]), sum(counts[: ranks.rank + 1]))
            run(Tensor(x[own]), Tensor(y[own]))
        ddp.finish_grad_sync()
        if way == "clipped":
            assert ddp.clip_grad_norm(0.5) == pytest.approx(clipped_alone(alone, 0.5), rel=1e-3)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    expected, found = alone.state_dict(), model.state_dict()
    for name, value in found.items():
        apart = np.linalg.norm(value.astype(np.float64) - expected[name])
        assert apart <= 1e-4 * max(np.linalg.norm(expected[name]), 0.1), (name, apart)  # biases before batch norm are 0
    everyone = ranks.all_gather_object({name: value.tobytes() for name, value in found.items()})
    assert everyone == everyone[:1] * ranks.size


@pytest.mark.mpi(min_size=2)
def test_samples_that_come_after_backward_are_refused_on_every_rank_where_they_differ(ranks):
    model = SyncBatchNorm.convert_sync_batchnorm(network(), ranks)
    ddp, plain = DistributedDataParallel(model, ranks), DistributedDataParallel(network(), ranks)

    def step(of, count: int, samples: float | None) -> str:
        CrossEntropyLoss()(of(Tensor(drawn([13, ranks.rank], (count, 2, 6, 6)))), Tensor(np.zeros(count, np.int32))
                           ).backward()  # fmt: skip
        try:
            of.finish_grad_sync(samples=samples)
        except ArgumentError as error:
            return str(error)
        return ""

    sizes = [2 + rank for rank in range(ranks.size)]
    text = step(ddp, sizes[ranks.rank], sizes[ranks.rank])
    assert text == (
        "samples: expected them before backward, by expect_samples(), as SyncBatchNorm's backward adds up the ranks' "
        f"gradients, got {', '.join(map(str, sizes))} on ranks 0 to {ranks.size - 1} after it"
    )
    assert step(ddp, 3, 3) == step(ddp, sizes[ranks.rank], None) == step(plain, sizes[ranks.rank], ranks.rank + 1) == ""
    with pytest.raises(ArgumentError, match="samples: expected some on every rank with SyncBatchNorm") as caught:
        ddp.expect_samples(ranks.rank)
    one_line(caught)
    ddp.expect_samples(2)
    assert "samples: expected None after expect_samples()" in step(ddp, 2, 2)
    model.eval()  # nothing is mixed
    ddp.finish_grad_sync()
    assert step(ddp, sizes[ranks.rank], sizes[ranks.rank]) == ""


@pytest.mark.mpi(min_size=4)
def test_a_mesh_normalises_along_its_data_parallel_axis():
    with Communicator() as comm:
        mesh = Mesh(comm, dp=-1, tp=2)
        layer = SyncBatchNorm(3, comm=mesh["dp"])
        group = mesh.coordinates["tp"]
        parts = [drawn([group, rank], (2, 3, 4)) for rank in range(mesh.shape["dp"])]
        y = layer(Tensor(parts[mesh.coordinates["dp"]]))
        x = np.concatenate(parts).astype(np.float64)
        normal = (x - x.mean((0, 2), keepdims=True)) / np.sqrt(x.var((0, 2), keepdims=True) + 1e-5)
        own = slice(2 * mesh.coordinates["dp"], 2 * mesh.coordinates["dp"] + 2)
        np.testing.assert_allclose(y.numpy(), normal[own], rtol=1e-4, atol=1e-4)


def test_bad_use_is_refused(ranks):
    with pytest.raises(ArgumentError) as caught:
        SyncBatchNorm(3, comm="dp")
    assert one_line(caught) == "comm: expected a Communicator, such as mesh['dp'], got str"
    layer = SyncBatchNorm(3, comm=ranks)
    with pytest.raises(ArgumentError, match="SyncBatchNorm: expected x of 2 or 3 or 4 or 5 dimensions with 3 channels"):
        layer(Tensor(np.ones((2, 4), np.float32)))
    single = SyncBatchNorm.convert_sync_batchnorm(BatchNorm1d(3), ranks)
    assert isinstance(single, SyncBatchNorm)
    if ranks.size == 1:
        with pytest.raises(ArgumentError, match="expected more than one element a channel"):
            single(Tensor(np.ones((1, 3), np.float32)))
