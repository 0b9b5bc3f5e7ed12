"""Ranks of several libraries, and of several vendors' runtimes, that average the same parameters."""

from __future__ import annotations

import os
import sys

import numpy as np
import pytest

from clcomm import Communicator, Synchronizer, clip_grad_norm
from clcomm.engine import intel_runtime
from clcomm.errors import ArgumentError, MismatchError, NonFiniteError
from tests.adapters.libraries import SHAPES, library
from tests.adapters.test_contract import assert_bits, drawn, mean
from tests.faults.launch import finish, start
from tests.helpers import one_line

SEVERAL = pytest.mark.mpi(min_size=2)
PAIRS = [("clcomm", "tinygrad"), ("tinygrad", "clcomm"), ("clcomm", "numpy"), ("jax", "clcomm"), ("torch", "tinygrad")]


@pytest.fixture(params=PAIRS, ids="-".join)
def lib(request):
    """The library of this rank: ranks take the two in turn. All ranks skip where one is missing."""
    both = [library(name) for name in request.param]
    return both[Communicator().rank % 2]


@pytest.fixture
def comm(lib, request):
    made = Communicator()
    yield made
    if not request.node.has_failed:
        made.finalize()


@SEVERAL
@pytest.mark.parametrize("how", [{}, {"overlap": True, "bucket_size": 64}, {"use_bucketing": False}], ids=str)
def test_libraries_average_to_the_bit_and_stay_alike(lib, comm, how):
    model, sync = lib.model(scale=comm.rank + 1), Synchronizer(comm, **how)
    sync.broadcast_parameters(model)
    for step in range(4):  # after two of which the order of completion is known, or is not looked for any longer
        lib.backward(model, drawn(comm.rank, step))
        sync.sync_gradients(model)
        for name in SHAPES:
            assert_bits(lib.gradient(model, name), mean([drawn(r, step)[name] for r in range(comm.size)]), name)
        sync.models.of(model).space.adapter.drop_gradients()
    sync.check_replicas(model)


@SEVERAL
def test_libraries_clip_together_and_weigh_by_samples(lib, comm):
    model, sync = lib.model(), Synchronizer(comm)
    sync.broadcast_parameters(model)
    lib.backward(model, drawn(comm.rank))
    sync.sync_gradients(model, samples=comm.rank + 1)
    norms = comm.all_gather(np.array([clip_grad_norm(sync, model, 1e-3)]))
    assert len(np.unique(norms)) == 1
    for name in SHAPES:
        rows = comm.all_gather(lib.gradient(model, name))
        assert (rows == rows[0]).all(), name


@SEVERAL
@pytest.mark.parametrize("compression", ["fp16", "int8", "powersgd:2"])
def test_libraries_compress_to_the_same_bits(lib, comm, compression):
    model, sync = lib.model(), Synchronizer(comm, compression=compression)
    sync.broadcast_parameters(model)
    for step in range(2):
        lib.backward(model, drawn(comm.rank, step))
        sync.sync_gradients(model)
        for name in SHAPES:
            rows = comm.all_gather(lib.gradient(model, name))
            assert (rows == rows[0]).all(), name
            exact = mean([drawn(r, step)[name] for r in range(comm.size)])
            assert np.abs(rows[0] - exact).max() < 0.1 if compression == "fp16" else np.isfinite(rows).all()
        sync.models.of(model).space.adapter.drop_gradients()


@SEVERAL
def test_a_gradient_that_is_not_finite_raises_on_every_rank_of_either_library(lib, comm):
    model, sync = lib.model(), Synchronizer(comm, check_finite=True, bucket_size=64)
    sync.broadcast_parameters(model)
    lib.backward(model, {name: g * (np.nan if comm.rank == 1 else 1) for name, g in drawn(comm.rank).items()})
    with pytest.raises(NonFiniteError, match="rank 1") as caught:
        sync.sync_gradients(model)
    assert len(set(comm.all_gather_object(one_line(caught)))) == 1


@SEVERAL
@pytest.mark.parametrize("wrong", ["name", "shape", "dtype"])
def test_parameters_that_differ_between_libraries_raise_one_line_on_every_rank(lib, comm, wrong):
    model, others = lib.empty(), comm.all_gather_object("float64" in lib.dtypes).index(True) % 2
    for name, shape in SHAPES.items():
        differs = comm.rank % 2 == others and name == "second"
        called = "another" if differs and wrong == "name" else name
        lib.add(model, called, np.ones(shape if not (differs and wrong == "shape") else (8,), np.float32),
                "float64" if differs and wrong == "dtype" else "float32")  # fmt: skip
    with pytest.raises(MismatchError, match=r"'(second|another) \(") as caught:
        Synchronizer(comm).broadcast_parameters(model)
    assert len(set(comm.all_gather_object(one_line(caught)))) == 1


@SEVERAL
def test_logical_shards_which_promise_bits_are_refused_on_every_rank(lib, comm):
    model, sync = lib.model(), Synchronizer(comm, shards=2 * comm.size)
    with pytest.raises((MismatchError, ArgumentError), match="shards: expected") as caught:
        sync.broadcast_parameters(model)
    assert len(set(comm.all_gather_object(one_line(caught)))) == 1


VENDORS = """
import numpy as np
from clcomm.host.launcher import launched_rank
os.environ["CLCOMM_DEVICE"] = ("portable", "intel")[launched_rank() % 2]  # before OpenCL is loaded
from benchmarks.mixed_rank import hash_of
from clcomm import Synchronizer
from clcomm.engine import CrossEntropyLoss, Tensor, default_device
from clcomm.optim import SGD
from models import ConvNet

comm = Communicator()
model, sync = ConvNet(), Synchronizer(comm, shards={shards})
optimizer, loss_of = SGD(model.parameters(), lr=0.05, momentum=0.9), CrossEntropyLoss()
sync.broadcast_parameters(model)
draw = np.random.default_rng(comm.rank)
for step in range(4):
    images, labels = draw.standard_normal((4, 1, 28, 28)).astype(np.float32), draw.integers(0, 10, 4).astype(np.int32)
    optimizer.zero_grad()
    loss_of(model(Tensor(images)), Tensor(labels)).backward()
    sync.sync_gradients(model)
    optimizer.step()
platforms = comm.all_gather_object(default_device().cl_device.platform.name)
hashes = comm.all_gather_object(hash_of(sync, model))
if comm.rank == 0:
    print(len(set(platforms)), len(set(hashes)), len(hashes))
"""
INTEL = pytest.mark.skipif(intel_runtime.library() is None, reason="Intel's runtime is not installed; make intel")


def run_vendors(tmp_path, shards: str):
    path = os.pathsep.join(["."] + [each for each in sys.path if each])
    return finish(start(tmp_path, VENDORS.format(shards=shards), ranks=4, PYTHONPATH=path))


@INTEL
def test_pocl_and_intels_runtime_two_ranks_each_have_replicas_of_one_hash(tmp_path):
    ended = run_vendors(tmp_path, "None")
    assert ended.code == 0 and ended.out.split() == ["2", "1", "4"], ended.err


@INTEL
def test_runtimes_of_two_vendors_are_refused_with_logical_shards_in_one_line(tmp_path):
    ended = run_vendors(tmp_path, "8")
    (line,) = ended.clcomm_lines()
    assert ended.code and "shards: expected the same on every rank" in line and "Intel" in line, ended.err
