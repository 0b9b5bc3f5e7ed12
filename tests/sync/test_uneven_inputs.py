"""Uneven inputs: N ranks equal one rank with all samples, and no rank waits for one without batches."""

from __future__ import annotations

import numpy as np
import pytest

from clcomm import Communicator, Synchronizer, clip_grad_norm
from clcomm.base.errors import ArgumentError
from clcomm.engine import CrossEntropyLoss, Tensor
from clcomm.optim import SGD
from clcomm.sync.distributed_optimizer import DistributedOptimizer
from models import MLP
from tests.helpers import cpu_device, one_line
from tests.numpy_models import set_gradients, small_model
from training.options import TrainingOptions

SHAPE = (1, 6, 6)


def job_of(comm, sharded=False, **options):
    """Return device, model, Synchronizer and optimizer, alike on all ranks."""
    device = cpu_device("cpu")
    model = MLP(SHAPE, 10, device=device, seed=3)
    sync = Synchronizer(comm, **options)
    optimizer = SGD(model, 0.05, momentum=0.9, weight_decay=1e-3)
    if sharded:
        optimizer = DistributedOptimizer(optimizer, sync)
    sync.broadcast_parameters(model)
    return device, model, sync, optimizer


def batches_of(rank: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return a rank's batches: rank 0 has one, each further rank two more, all of different sizes."""
    rng = np.random.default_rng(rank)
    sizes = rng.integers(1, 9, 1 + 2 * rank)
    return [
        (rng.standard_normal((n, *SHAPE)).astype(np.float32), rng.integers(0, 10, n).astype(np.int32)) for n in sizes
    ]


def train(comm, batches, clip=None, sharded=False, **options):
    """Train on one rank's batches within a join, and return the parameters and the synchronisations."""
    device, model, sync, optimizer = job_of(comm, sharded, **options)
    loss_fn = CrossEntropyLoss()
    steps = []

    def step() -> None:
        if clip is not None:
            clip_grad_norm(sync, model, clip)
        optimizer.step()
        optimizer.zero_grad()
        steps.append(1)

    with sync.join(model, step):
        for images, labels in batches:
            loss_fn(model(Tensor(images, device)), Tensor(labels, device)).backward()
            sync.sync_gradients(model, samples=len(labels))
            step()
    return {name: value.copy() for name, value in model.state_dict().items()}, len(steps)


def bits(state) -> dict:
    return {name: value.tobytes() for name, value in state.items()}


def test_a_rank_without_any_batch_takes_part(several):
    batches = [] if several.rank == 0 else batches_of(several.rank)
    ours, steps = train(several, batches)
    assert steps == 1 + 2 * (several.size - 1)
    assert several.all_gather_object(bits(ours)) == [bits(ours)] * several.size


def test_with_even_batches_no_bit_changes(comm):
    model, plain, sync = small_model(), small_model(), Synchronizer(comm)
    with sync.join(model, lambda: None):
        for step in range(3):
            set_gradients(model, comm.rank, step)
            sync.sync_gradients(model, samples=7)
            set_gradients(plain, comm.rank, step)
            Synchronizer(comm).sync_gradients(plain)
            assert model.gradient_bits() == plain.gradient_bits()


def test_samples_weigh_without_a_join_too(comm):
    model, sync = small_model(), Synchronizer(comm)
    set_gradients(model, comm.rank)
    own = [parameter.grad.astype(np.float64) for parameter in model.parameters.values()]
    everyone = comm.all_gather_object(own)
    counts = np.arange(comm.size) * 3 + 1
    sync.sync_gradients(model, samples=3 * comm.rank + 1)
    for index, parameter in enumerate(model.parameters.values()):
        weights = (counts / counts.sum()).reshape(-1, *[1] * parameter.grad.ndim)
        terms = weights * np.stack([gradients[index] for gradients in everyone])
        bound = (comm.size + 2) * 2.0**-24 * np.abs(terms).sum(0)
        assert (np.abs(parameter.grad - terms.sum(0)) <= bound + 1e-30).all()


def test_nan_without_samples_does_no_harm(several):
    model, sync = small_model(), Synchronizer(several, check_finite=True)
    set_gradients(model, 5)
    expected = model.gradient_bits()
    if several.rank == 0:
        model["b1"].grad[...] = np.nan
    sync.sync_gradients(model, samples=0 if several.rank == 0 else 2)
    for parameter, before in zip(model.parameters.values(), expected, strict=True):
        np.testing.assert_allclose(parameter.grad.ravel(), np.frombuffer(before, np.float32), rtol=1e-6)


def test_samples_are_wanted_within_a_join(comm):
    model, sync = small_model(), Synchronizer(comm)
    with pytest.raises(ArgumentError) as caught, sync.join(model, lambda: None):
        sync.sync_gradients(model)
    assert one_line(caught) == "samples: expected this rank's number of samples within join(), got None"
    sync.sync_gradients(model)


@pytest.mark.parametrize("samples", [-1, float("nan"), float("inf"), "8", True])
def test_numbers_of_samples_that_are_none(comm, samples):
    with pytest.raises(ArgumentError) as caught:
        Synchronizer(comm).sync_gradients(small_model(), samples=samples)
    assert one_line(caught) == f"samples: expected this rank's number of samples, from 0 up, got {samples!r}"


def test_overlap_is_refused_in_options():
    with pytest.raises(ArgumentError) as caught:
        TrainingOptions(uneven_inputs="join", overlap="on")
    assert one_line(caught) == "--uneven-inputs join: expected no --overlap on with it; use one of the two"
    TrainingOptions(uneven_inputs="join")


def test_joins_do_not_nest(comm):
    model, sync = small_model(), Synchronizer(comm)
    with (
        pytest.raises(ArgumentError, match="join: expected to be entered once"),
        sync.join(model, lambda: None),
        sync.join(model, lambda: None),
    ):
        pass


def test_after_an_exception_nobody_is_waited_for():
    model, sync = small_model(), Synchronizer(Communicator(transport="solo"))
    with pytest.raises(KeyError), sync.join(model, lambda: None):
        raise KeyError
    with sync.join(model, lambda: None):
        pass
