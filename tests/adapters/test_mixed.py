"""Ranks of several libraries, and of several vendors' runtimes, that average the same parameters."""

from __future__ import annotations

import os
import sys

import numpy as np
import pytest

from clcomm import Communicator, Synchronizer, clip_grad_norm
from clcomm.base.errors import ArgumentError, DivergenceError, MismatchError, NonFiniteError
from clcomm.engine import intel_runtime
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
@pytest.mark.parametrize("compression", ["fp16", "int8", "powersgd:2", "topk:0.2", "demo:8"])
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


OPTIMIZERS = {"sgd": ("SGD", {}), "momentum": ("SGD", {"momentum": 0.9}), "adam": ("Adam", {})}


@SEVERAL
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("engine_is", [0, 1])
def test_optimizers_of_two_libraries_step_to_the_same_bits_or_are_made_alike(torch, caplog, kind, engine_is):
    from clcomm import optim

    name, options = OPTIMIZERS[kind]
    comm = Communicator()
    is_engine = comm.rank % 2 == engine_is
    lib, source = library("clcomm" if is_engine else "torch"), optim if is_engine else torch.optim
    model, sync = lib.model(), Synchronizer(comm)
    optimizer = getattr(source, name)(model.parameters(), lr=0.05, **options)
    sync.broadcast_parameters(model)
    for step in range(2):
        optimizer.zero_grad()
        lib.backward(model, drawn(comm.rank, step))
        with caplog.at_level("WARNING", "clcomm"):
            sync.sync_gradients(model)
        assert sync.guard.divergences == 0 or step
        if step == 0:
            optimizer.step()
    sync.check_replicas(model)
    said = comm.broadcast_object(caplog.messages)
    assert len(said) == sync.guard.divergences
    assert all("NativeAdapter" in line and "TorchAdapter" in line and "go on with rank 0's" in line for line in said)


@SEVERAL
@pytest.mark.parametrize("every", [0, 3])
def test_ranks_of_another_kind_that_drift_are_compared_by_themselves_or_as_asked(caplog, monkeypatch, every):
    from clcomm.sync.adapters.numpy import NumpyAdapter

    comm, lib = Communicator(), library("numpy")
    monkeypatch.setattr(NumpyAdapter, "decides_bits", lambda _: [f"kind {comm.rank % 2}"])
    model, sync = lib.model(), Synchronizer(comm, check_replicas_every=every)
    sync.broadcast_parameters(model)
    with caplog.at_level("WARNING", "clcomm"):
        for step in range(every or 102):
            lib.backward(model, drawn(comm.rank, step))
            try:
                sync.sync_gradients(model)
            except DivergenceError as error:
                assert every and step == 1 and "NumpyAdapter, kind 1 on rank" in str(error)
                break
            assert sync.guard.divergences == (step > 0) + (step > 98)
            for name in SHAPES:
                values = lib.parameter(model, name).data
                values -= np.float32(0.1) * lib.gradient(model, name)
                if comm.rank % 2:
                    values[...] = np.nextafter(values, np.float32(9))
            sync.models.of(model).space.adapter.drop_gradients()
    assert len(comm.broadcast_object(caplog.messages)) == (not every)


VENDORS = """
import numpy as np
from clcomm.base.host.launcher import launched_rank
os.environ["{variable}"] = {values}[launched_rank() % 2]  # before OpenCL is loaded
from benchmarks.mixed_rank import hash_of
from clcomm import Synchronizer
from clcomm.engine import CrossEntropyLoss, Tensor, default_device
from clcomm.optim import SGD
from clcomm.sync.sampler import BalancedSampler
from clcomm.sync.balance import Balancer
from models import ConvNet

STEPS, BATCH = 8, 8
comm, loss_of, draw = Communicator(), CrossEntropyLoss(), np.random.default_rng(0)
alone = Communicator(transport="solo")
count = STEPS * BATCH * comm.size
images, labels = draw.standard_normal((count, 1, 28, 28)).astype(np.float32), draw.integers(0, 10, count).astype("i4")

def trained(comm, batch, shards):
    model, sync = ConvNet(seed=1), Synchronizer(comm, shards=shards)
    optimizer, balancer = SGD(model.parameters(), lr=0.05), Balancer(comm, batch, window=2, window_s=0)
    sampler = BalancedSampler(count, comm.rank, comm.size, balancer.shares)
    sync.broadcast_parameters(model)
    for step in range(STEPS):
        own = sampler.batches(batch)[step]
        optimizer.zero_grad()
        loss_of(model(Tensor(images[own])), Tensor(labels[own])).backward()
        sync.sync_gradients(model, samples=len(own), of=sampler.samples_of_all(step, 1))
        optimizer.step()
        if balancer.step_finished(len(own), len(own) * (3.0 if comm.rank == comm.size - 1 else 1.0)):
            sampler.shares = balancer.shares
    return sync, model, balancer.shares

sync, model, shares = trained(comm, BATCH, {shards})
kinds = comm.all_gather_object(" ".join([default_device().cl_device.platform.name, default_device().cl_device.name]))
hashes = comm.all_gather_object(hash_of(sync, model))
if comm.rank == 0:
    _, expected, _ = trained(alone, BATCH * comm.size, None)
    pairs = [(a.numpy(), b.numpy()) for a, b in zip(model.parameters(), expected.parameters())]
    off = max(np.abs(a - b).max() / np.abs(b).max() for a, b in pairs)
    print(len(set(kinds)), len(set(hashes)), len(hashes), shares[-1] < BATCH < shares[0], off < 1e-4)
"""
STEPPED = """
import numpy as np
from clcomm.base.host.launcher import launched_rank
os.environ["{variable}"] = {values}[launched_rank() % 2]
from clcomm import Synchronizer, optim
from clcomm.engine import Tensor, default_device, nn
from benchmarks.mixed_rank import hash_of

comm, found = Communicator(), []
made = {{"SGD": {{"weight_decay": 0.01}}, "Adam": {{"weight_decay": 0.01}}, "AdamW": {{}},
        "RMSprop": {{"momentum": 0.9}}, "Adagrad": {{}}, "Adadelta": {{}}, "RAdam": {{}}}}
for name, options in [*made.items(), ("SGD", {{"momentum": 0.9, "nesterov": True}}), ("SGD", {{"momentum": 0.9}})]:
    model, sync = nn.Linear(37, 53), Synchronizer(comm, check_replicas_every=1)
    optimizer, draw = getattr(optim, name)(model.parameters(), lr=0.05, **options), np.random.default_rng(comm.rank)
    sync.broadcast_parameters(model)
    for step in range(20):
        optimizer.zero_grad()
        sum((p * Tensor(draw.standard_normal(p.shape).astype("f4"))).sum() for p in model.parameters()).backward()
        sync.sync_gradients(model)
        optimizer.step()
    found.append(len(set(comm.all_gather_object(hash_of(sync, model)))))
kinds = set(comm.all_gather_object(default_device().cl_device.name + default_device().driver))
if comm.rank == 0:
    print(len(kinds), set(found) == {{1}}, len(found))
"""
INTEL = pytest.mark.skipif(intel_runtime.library() is None, reason="Intel's runtime is not installed; make intel")


def run_vendors(tmp_path, variable: str, values: tuple[str, str], shards: str = "None", script: str = VENDORS):
    path = os.pathsep.join(["."] + [each for each in sys.path if each])
    script = script.format(variable=variable, values=values, shards=shards)
    return finish(start(tmp_path, script, ranks=4, PYTHONPATH=path))


def test_devices_of_unequal_speed_share_samples_and_have_replicas_of_one_hash(tmp_path):
    ended = run_vendors(tmp_path, "POCL_DEVICES", ("pthread", "basic"))
    assert ended.code == 0 and ended.out.split() == ["2", "1", "4", "True", "True"], ended.err


@INTEL
def test_pocl_and_intels_runtime_two_ranks_each_have_replicas_of_one_hash(tmp_path):
    ended = run_vendors(tmp_path, "CLCOMM_DEVICE", ("portable", "intel"))
    assert ended.code == 0 and ended.out.split() == ["2", "1", "4", "True", "True"], ended.err


@INTEL
def test_runtimes_of_two_vendors_are_refused_with_logical_shards_in_one_line(tmp_path):
    ended = run_vendors(tmp_path, "CLCOMM_DEVICE", ("portable", "intel"), "8")
    (line,) = ended.clcomm_lines()
    assert ended.code and "shards: expected the same on every rank" in line and "Intel" in line, ended.err


@pytest.mark.parametrize(
    ("variable", "values"),
    [("POCL_DEVICES", ("pthread", "basic")), pytest.param("CLCOMM_DEVICE", ("portable", "intel"), marks=INTEL)],
)
def test_optimizers_of_several_devices_step_to_the_same_bits(tmp_path, variable, values):
    ended = run_vendors(tmp_path, variable, values, script=STEPPED)
    assert ended.code == 0 and ended.out.split() == ["2", "True", "9"], ended.err
