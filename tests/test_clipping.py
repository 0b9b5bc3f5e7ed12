"""Clipping by the global norm: PyTorch's values, the same bits on every rank, with a sharded update too."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import numpy as np
import pytest

from clcomm import Synchronizer, clip_grad_norm
from clcomm.base.errors import ArgumentError
from clcomm.engine import Tensor
from clcomm.sync import model_ranks
from models import MLP
from tests.helpers import cpu_device, one_line
from tests.numpy_models import Model, set_gradients, small_model

SHAPE = (1, 8, 8)


def alike(comm, value) -> bool:
    return comm.all_gather_object(value) == [value] * comm.size


def averaged(comm, **options):
    """Return a model with the ranks' mean gradients, and its Synchronizer."""
    model, sync = small_model(), Synchronizer(comm, **options)
    set_gradients(model, comm.rank)
    sync.sync_gradients(model)
    return model, sync


@pytest.mark.parametrize("max_norm", [1e-3, 1.0, 1e6])
def test_norm_and_gradients_are_those_of_float64(comm, max_norm):
    model, sync = averaged(comm)
    means = [parameter.grad.astype(np.float64) for parameter in model.parameters.values()]
    expected = np.sqrt(sum((mean**2).sum() for mean in means))
    norm = clip_grad_norm(sync, model, max_norm)
    assert norm == pytest.approx(expected, rel=1e-12) and alike(comm, norm)
    factor = min(1.0, max_norm / (expected + 1e-6))
    for mean, parameter in zip(means, model.parameters.values(), strict=True):
        np.testing.assert_allclose(parameter.grad, mean * factor, rtol=3e-7)
    assert alike(comm, model.gradient_bits())


@pytest.mark.parametrize("max_norm", [0.5, 1e9])
def test_is_what_pytorch_does(comm, max_norm):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed; pip install -e '.[torch]'")
    sync, model = Synchronizer(comm), torch.nn.Sequential(torch.nn.Linear(9, 33), torch.nn.Linear(33, 5))
    sync.broadcast_parameters(model)
    inputs = np.random.default_rng(comm.rank).standard_normal((6, 9)).astype(np.float32)
    model(torch.from_numpy(inputs)).square().sum().backward()
    sync.sync_gradients(model)
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    copies = [torch.nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for copy, gradient in zip(copies, gradients, strict=True):
        copy.grad = gradient
    expected = torch.nn.utils.clip_grad_norm_(copies, max_norm)
    assert clip_grad_norm(sync, model, max_norm) == pytest.approx(expected.item(), rel=1e-6)
    for parameter, copy in zip(model.parameters(), copies, strict=True):
        torch.testing.assert_close(parameter.grad, copy.grad, rtol=1e-6, atol=0)


def test_kernels_that_may_still_read_the_averages_are_waited_for(comm, monkeypatch):
    device, sync = cpu_device("cpu"), Synchronizer(comm)
    model = MLP(SHAPE, 10, device=device)
    sync.broadcast_parameters(model)
    model(Tensor(np.full((2, *SHAPE), comm.rank + 1, np.float32), device)).sum().backward()
    sync.sync_gradients(model)
    averages, seen = sync.models.of(model).space.arrays.reduced, []
    before = averages.copy()
    monkeypatch.setattr(device, "finish", lambda: seen.append(averages.copy()))
    clip_grad_norm(sync, model, 1e-3)
    assert seen[0].tobytes() == before.tobytes() != averages.tobytes()


@pytest.mark.parametrize("options", [{"bucket_size": 1}, {"bucket_size": 300}, {"use_bucketing": False}])
def test_buckets_change_no_bit(comm, options):
    whole, sync = averaged(comm, bucket_size="1MiB")
    parts, other = averaged(comm, **options)
    assert clip_grad_norm(sync, whole, 0.1) == clip_grad_norm(other, parts, 0.1)
    assert whole.gradient_bits() == parts.gradient_bits()


def test_dtypes_may_mix(comm):
    model = Model([("a", np.zeros(200)), ("b", np.zeros((3, 5), np.float32))])
    sync = Synchronizer(comm)
    set_gradients(model, comm.rank)
    sync.sync_gradients(model)
    expected = np.sqrt(sum((p.grad.astype(np.float64) ** 2).sum() for p in model.parameters.values()))
    assert clip_grad_norm(sync, model, 1e-2) == pytest.approx(expected, rel=1e-12)
    after = np.sqrt(sum((p.grad.astype(np.float64) ** 2).sum() for p in model.parameters.values()))
    assert after == pytest.approx(1e-2, rel=1e-5) and alike(comm, model.gradient_bits())


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_no_number_spreads_as_in_pytorch(comm, value):
    model, sync = averaged(comm)
    model["b1"].grad[...] = 1.0
    if comm.rank == 0:
        model["b1"].grad[3] = value
    sync.sync_gradients(model)
    norm = clip_grad_norm(sync, model, 1.0)
    assert np.isnan(norm) if np.isnan(value) else norm == np.inf
    assert np.isnan(model["b1"].grad[3])
    if np.isnan(value):
        assert np.isnan(model["w1"].grad).all()
    else:
        assert (model["w1"].grad == 0).all()


@pytest.mark.parametrize("max_norm", [0, -1.0, np.inf, np.nan, "1"])
def test_other_norms_are_refused(comm, max_norm):
    model, sync = averaged(comm)
    with pytest.raises(ArgumentError) as caught:
        clip_grad_norm(sync, model, max_norm)
    assert one_line(caught) == f"max_norm: expected a number above 0, got {max_norm!r}"


def test_the_norm_of_complex_gradients_has_both_their_parts(comm):
    model, sync = Model([("w", np.zeros(4, np.complex64))]), Synchronizer(comm)
    model["w"].grad = np.full(4, 3 + 4j, np.complex64)
    sync.sync_gradients(model)
    assert clip_grad_norm(sync, model, 1.0) == 10
    np.testing.assert_allclose(model["w"].grad, np.full(4, 0.3 + 0.4j), rtol=1e-6)


_SWITCHES = """
import os
import pathlib

import numpy as np

from clcomm.sync.model_ranks import sum_of_squares


def switches():
    status = [pathlib.Path(task, "status").read_text() for task in pathlib.Path("/proc/self/task").iterdir()
              if task.name != str(os.getpid())]
    return sum(int(line.split()[1]) for text in status for line in text.splitlines() if "ctxt_switches" in line)


parts = [np.ones(size, dtype) for dtype in "efd" for size in (1, 1 << 10, 1 << 14, 20_000, 1 << 16, 300_000)]
switches()
before = switches()
sums = [sum_of_squares(part) for part in parts for _ in range(10)]
assert sums == [part.size for part in parts for _ in range(10)]
print(len(os.listdir("/proc/self/task")), switches() - before)
"""


def test_no_other_thread_takes_part_in_the_norm():
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "4"}
    run = subprocess.run([sys.executable, "-c", _SWITCHES], capture_output=True, text=True, env=environment, check=True)
    threads, switches = map(int, run.stdout.split())
    if threads == 1:
        pytest.skip("NumPy's BLAS has no threads here")
    assert switches < 30  # those that are just starting may wake up on a busy machine; with BLAS there are 60 and more


@pytest.mark.parametrize("dtype", ["e", "f", "d"])
def test_sums_of_squares_over_sizes_are_those_of_exact_arithmetic(dtype):
    rng = np.random.default_rng(7)
    for size in [1, 2, 3, 7, 8, 127, 128, 129, 16_383, 16_384, 16_385, 40_000, *rng.integers(1, 70_000, 20)]:
        part = (rng.standard_normal(size) * 10.0 ** rng.integers(-3, 4)).astype(dtype)
        exact = math.fsum(float(value) ** 2 for value in part)
        assert model_ranks.sum_of_squares(part) == pytest.approx(exact, rel=1e-14)
