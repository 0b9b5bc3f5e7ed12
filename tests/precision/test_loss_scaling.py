"""Loss scaling: PyTorch's scales on the same overflows, the unscaled run's bits, and decisions that all ranks share."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from clcomm import GradScaler, Synchronizer, clip_grad_norm
from clcomm.base.errors import ArgumentError
from clcomm.engine import CrossEntropyLoss, Parameter, Replay, Tensor
from clcomm.engine.nn.module import Module
from clcomm.optim import SGD
from tests.helpers import cpu_device, one_line
from tests.sharded_jobs import SHAPE, Job, discrete
from tests.training.trainers import assert_same_bits


class ScaledJob(Job):
    """A job whose losses are scaled; `bad` steps have a gradient with Inf or NaN on one rank."""

    def __init__(self, *args, bad=(), max_norm=None, scaling=(), **options):
        super().__init__(*args, **options)
        self.bad, self.max_norm = set(bad), max_norm
        self.scaler = GradScaler(self.sync, **dict(scaling))
        self.scales, self.taken = [], []

    def backward(self, number, micro=0, share=1.0):
        rng = np.random.default_rng([number, self.comm.rank, micro])
        images = rng.standard_normal((3, *SHAPE)).astype(np.float32)
        labels = Tensor(rng.integers(0, 10, 3).astype(np.int32), self.device)
        if number in self.bad and self.comm.rank == number % self.comm.size:
            images[0, 0, 0, 0] = [np.inf, np.nan][number % 2]
        loss = CrossEntropyLoss()(self.model(Tensor(images, self.device)), labels)
        self.scaler.scale(loss).backward(share)

    def step(self, number, micro_batches=1):
        for micro in range(micro_batches):
            with self.sync.no_sync() if micro < micro_batches - 1 else contextlib.nullcontext():
                self.backward(number, micro, 1 / micro_batches)
                self.sync.sync_gradients(self.model)
        if self.max_norm is not None:
            self.scaler.unscale_(self.optimizer)
            clip_grad_norm(self.sync, self.model, self.max_norm)
        self.taken.append(self.scaler.step(self.optimizer))
        self.scaler.update()
        self.scales.append(self.scaler.get_scale())
        self.optimizer.zero_grad()


#: Powers of two scale without rounding.
SCALING = {"init_scale": 256.0, "growth_interval": 3}
WAYS = [{"sharded": False}, {"sharded": True}, {"zero": 2}, {"zero": 3, "precision": "bf16"}, {"precision": "fp16"},
        {"sharded": False, "overlap": True}]  # fmt: skip


@pytest.mark.sampled(9)
@pytest.mark.parametrize("max_norm", [None, 0.5])
@pytest.mark.parametrize("number", range(2 * len(WAYS)))
def test_steps_without_overflow_have_the_bits_without_scaling(comm, number, max_norm):
    options = WAYS[number // 2] | ({"make_device": discrete} if number % 2 else {})
    micro = 1 + number % 2
    plain = ScaledJob(comm, "adam", max_norm=max_norm, scaling={"enabled": False}, **options)
    scaled = ScaledJob(comm, "adam", max_norm=max_norm, scaling=SCALING, **options)
    assert_same_bits(scaled.run(5, micro_batches=micro), plain.run(5, micro_batches=micro))
    assert_same_bits(scaled.optimizer.state_dict(), plain.optimizer.state_dict())
    assert scaled.scales == [256, 256, 512, 512, 512] and plain.scales == [1] * 5
    scaled.sync.check_replicas(scaled.model)


@pytest.mark.sampled(9)
@pytest.mark.parametrize("max_norm", [None, 0.5])
@pytest.mark.parametrize("options", [*WAYS, {"compression": "fp16", "sharded": False}])
def test_a_step_that_overflows_on_one_rank_is_skipped_on_all(comm, options, max_norm):
    job = ScaledJob(comm, "momentum", bad=(1, 4), max_norm=max_norm, scaling=SCALING, **options)
    job.step(0)
    before, state = job.model.state_dict(), job.optimizer.state_dict()
    job.step(1)
    assert_same_bits(job.model.state_dict(), before)
    assert_same_bits(job.optimizer.state_dict(), state)
    job.run(5, 2)
    assert job.taken == [True, False, True, True, False, True, True]
    assert job.scales == [256, 128, 128, 128, 64, 64, 64]
    assert all(np.isfinite(values).all() for values in job.model.state_dict().values())
    assert job.optimizer.steps == 5
    job.sync.check_replicas(job.model)


def test_a_replayed_step_has_the_scale_of_its_time(comm):
    jobs = []
    for replays in (False, True):
        job = ScaledJob(comm, "momentum", False, scaling={"init_scale": 4.0, "growth_interval": 5}, precision="bf16")
        loss_fn = CrossEntropyLoss()

        def forward_backward(x, y, job=job, loss_fn=loss_fn):
            loss = loss_fn(job.model(x), y)
            job.scaler.scale(loss).backward()
            return loss

        run = Replay(forward_backward) if replays else forward_backward
        for number in range(12):
            rng = np.random.default_rng([number, comm.rank])
            images = Tensor(rng.standard_normal((3, *SHAPE)).astype(np.float32), job.device)
            run(images, Tensor(rng.integers(0, 10, 3).astype(np.int32), job.device))
            job.sync.sync_gradients(job.model)
            job.scaler.step(job.optimizer)
            job.scaler.update()
            job.optimizer.zero_grad()
        jobs.append(job)
    plain, replayed = jobs
    assert_same_bits(replayed.model.state_dict(), plain.model.state_dict())
    assert replayed.scaler.get_scale() == 16.0 and run.replayed > 2


class One(Module):
    """A model of one parameter."""

    def __init__(self, device):
        self.weight = Parameter(np.ones(3, np.float32), device)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(8))
def test_the_scale_is_pytorchs_on_the_same_overflows(comm, seed):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed; pip install -e '.[torch]'")
    rng = np.random.default_rng(seed)
    scaling = {
        "init_scale": float(2.0 ** rng.integers(-3, 126)), "growth_factor": float(rng.choice([2.0, 1.7, 8.0])),
        "backoff_factor": float(rng.choice([0.5, 0.3])), "growth_interval": int(rng.integers(1, 6)),
    }  # fmt: skip
    device = cpu_device("cpu")
    model, sync = One(device), Synchronizer(comm)
    sync.broadcast_parameters(model)
    ours, theirs = GradScaler(sync, **scaling), torch.amp.GradScaler("cpu", **scaling)
    optimizer, tensor = SGD(model, 0.125), torch.ones(3, requires_grad=True)
    reference = torch.optim.SGD([tensor], 0.125)
    for _ in range(30):
        gradient = rng.integers(-4, 5, 3).astype(np.float32)
        gradient[0] = rng.choice([gradient[0], np.inf, np.nan], p=[0.7, 0.2, 0.1])
        model.weight.grad = Tensor(gradient, device)
        sync.sync_gradients(model)
        tensor.grad = torch.from_numpy(gradient.copy())
        theirs.scale(torch.ones(()))  # PyTorch's makes its scale at the first use
        theirs.step(reference)
        theirs.update()
        ours.step(optimizer)
        ours.update()
        optimizer.zero_grad()
        assert ours.state_dict() == {name: pytest.approx(v, rel=0) for name, v in theirs.state_dict().items()}
        np.testing.assert_array_equal(model.weight.numpy(), tensor.detach().numpy())


def test_goes_on_from_its_state_with_the_bits_of_an_uninterrupted_run(comm):
    make = lambda: ScaledJob(comm, "adam", bad=(1, 4), scaling=SCALING, precision="bf16")  # noqa: E731
    whole, first, second = make(), make(), make()
    expected = whole.run(7)
    first.run(3)
    second.scaler.load_state_dict(first.scaler.state_dict())
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    second.model.load_state_dict(first.model.state_dict())
    assert_same_bits(second.run(4, 3), expected)
    assert second.scales == whole.scales[3:]
    assert second.scaler.state_dict() == whole.scaler.state_dict()


def test_calls_out_of_order_are_refused(comm):
    job = ScaledJob(comm)
    with pytest.raises(ArgumentError, match="update: expected step"):
        job.scaler.update()
    job.backward(0)
    job.sync.sync_gradients(job.model)
    job.scaler.unscale_(job.optimizer)
    with pytest.raises(ArgumentError, match="unscale_: expected one call"):
        job.scaler.unscale_(job.optimizer)
    job.scaler.step(job.optimizer)
    with pytest.raises(ArgumentError, match="step: expected update"):
        job.scaler.step(job.optimizer)


@pytest.mark.parametrize(
    ("given", "named"),
    [({"init_scale": 0}, "init_scale"), ({"init_scale": 1e39}, "init_scale"), ({"growth_factor": 1}, "growth_factor"),
     ({"backoff_factor": 1.0}, "backoff_factor"), ({"growth_interval": 0}, "growth_interval"),
     ({"growth_interval": True}, "growth_interval")],
)  # fmt: skip
def test_a_setting_outside_its_range_is_refused(comm, given, named):
    with pytest.raises(ArgumentError, match=f"^{named}: expected") as caught:
        GradScaler(Synchronizer(comm), **given)
    one_line(caught)


@pytest.mark.parametrize("options", [{"check_finite": True}, {"compression": "int8"}, {"compression": "topk:0.1"}])
def test_what_cannot_be_combined_is_refused(comm, options):
    with pytest.raises(ArgumentError, match=r"^sync: expected") as caught:
        GradScaler(Synchronizer(comm, **options))
    one_line(caught)
    GradScaler(Synchronizer(comm, **options), enabled=False)


def test_other_optimizers_and_states_are_refused(comm):
    scaler = GradScaler(Synchronizer(comm))
    with pytest.raises(ArgumentError, match=r"use torch\.amp\.GradScaler"):
        scaler.step(object())
    for state in ({}, {**scaler.state_dict(), "scale": -1.0}, {**scaler.state_dict(), "_growth_tracker": 0.5}):
        with pytest.raises(ArgumentError):
            scaler.load_state_dict(state)
    assert scaler.get_scale() == 2.0**16
