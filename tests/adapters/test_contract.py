"""What the Synchronizer promises of every library's models, on any number of ranks."""

from __future__ import annotations

import os
import sys

import numpy as np
import pytest

from clcomm import Communicator, Synchronizer, clip_grad_norm
from clcomm.base.errors import ArgumentError, MismatchError
from clcomm.sync.adapters import adapter_of
from tests.adapters.libraries import LIBRARIES, SHAPES, library, rounded
from tests.faults.launch import finish, start
from tests.helpers import one_line
from tests.numpy_models import values

ON_RANKS = pytest.mark.mpi(min_size=1)
FREEZING = pytest.mark.parametrize("lib", [name for name in LIBRARIES if LIBRARIES[name].freezes], indirect=True)

KEEPING = pytest.mark.parametrize("lib", [name for name in LIBRARIES if LIBRARIES[name].keeps], indirect=True)


@pytest.fixture(params=list(LIBRARIES))
def lib(request):
    return library(request.param)


@pytest.fixture
def comm(request):
    made = Communicator()
    yield made
    if not request.node.has_failed:
        made.finalize()


def drawn(rank: int, seed: int = 0, dtype: str = "float32") -> dict[str, np.ndarray]:
    """Return a rank's gradients, of sizes so different that the order of a sum shows, as far as the dtype has them."""
    wide = {name: values(seed + n, rank, shape, "float64") / 1e2 for n, (name, shape) in enumerate(SHAPES.items())}
    if dtype == "float16":  # no mean of which is subnormal: tinygrad's kernels make these zero
        wide = {name: np.round(gradient * 1024) / 1024 for name, gradient in wide.items()}
    return {name: rounded(gradient, dtype) for name, gradient in wide.items()}


def mean(gradients: list[np.ndarray], dtype: str = "float32") -> np.ndarray:
    """Return the mean of all ranks' by the formula: summed in rank order, divided, rounded once."""
    total = gradients[0].copy()
    for gradient in gradients[1:]:
        total += gradient
    return rounded(total / total.dtype.type(len(gradients)), dtype)


def assert_bits(got, expected, name: str = "") -> None:
    assert got is not None and got.dtype == expected.dtype, name
    assert got.tobytes() == expected.tobytes(), f"{name}: {got} is not {expected}"


@ON_RANKS
@pytest.mark.parametrize("lib, dtype", [(n, each) for n in LIBRARIES for each in LIBRARIES[n].dtypes], indirect=["lib"])
@pytest.mark.parametrize("bucket_size", ["64", "1MiB", None])
def test_broadcast_and_mean_to_the_bit_in_every_dtype(lib, comm, dtype, bucket_size):
    model = lib.model(dtype, scale=comm.rank + 0.1)
    sync = Synchronizer(comm, use_bucketing=bucket_size is not None, bucket_size=bucket_size)
    sync.broadcast_parameters(model, root=comm.size - 1)
    for name, shape in SHAPES.items():
        assert_bits(lib.values(model, name), rounded(np.full(shape, np.float32(comm.size - 1 + 0.1)), dtype), name)
    for step in range(2):
        lib.backward(model, drawn(comm.rank, step, dtype))
        sync.sync_gradients(model)
        everyone = [drawn(rank, step, dtype) for rank in range(comm.size)]
        for name in SHAPES:
            assert_bits(lib.gradient(model, name), mean([each[name] for each in everyone], dtype), name)
        sync.models.of(model).space.adapter.drop_gradients()


@ON_RANKS
def test_gradients_accumulate_without_sync_and_are_clipped_together(lib, comm):
    model, sync = lib.model(), Synchronizer(comm)
    sync.broadcast_parameters(model)
    with sync.no_sync():
        lib.backward(model, drawn(comm.rank, 0))
        sync.sync_gradients(model)
    assert_bits(lib.gradient(model, "first"), drawn(comm.rank, 0)["first"])
    lib.backward(model, drawn(comm.rank, 7))
    sync.sync_gradients(model)
    sums = [{name: drawn(rank, 0)[name] + drawn(rank, 7)[name] for name in SHAPES} for rank in range(comm.size)]
    means = {name: mean([each[name] for each in sums]) for name in SHAPES}
    for name in SHAPES:
        assert_bits(lib.gradient(model, name), means[name], name)
    norm = np.sqrt(sum(np.square(each, dtype=np.float64).sum() for each in means.values()))
    assert clip_grad_norm(sync, model, norm / 4) == pytest.approx(norm)
    for name in SHAPES:
        np.testing.assert_allclose(lib.gradient(model, name), means[name] / 4, rtol=1e-5)
        rows = comm.all_gather(lib.gradient(model, name))
        assert (rows == rows[0]).all(), name


@ON_RANKS
def test_a_gradient_that_some_ranks_miss_counts_as_zero_and_one_that_all_miss_stays_so(lib, comm):
    model, sync = lib.model(), Synchronizer(comm)
    if comm.rank == comm.size - 1:
        lib.backward(model, {"second": np.arange(7, dtype=np.float32)})
    sync.sync_gradients(model)
    assert_bits(lib.gradient(model, "second"), np.arange(7, dtype=np.float32) / np.float32(comm.size))
    for name in ("first", "third"):
        if lib.misses:
            assert lib.gradient(model, name) is None, name
        else:
            assert_bits(lib.gradient(model, name), np.zeros(SHAPES[name], np.float32), name)


@ON_RANKS
@FREEZING
def test_a_frozen_parameter_is_broadcast_and_not_averaged(lib, comm):
    model, sync = lib.model(scale=comm.rank + 1, frozen=True), Synchronizer(comm)
    sync.broadcast_parameters(model)
    assert (lib.values(model, "second") == 1).all()
    assert "second" not in [spec.name for spec in adapter_of(model).specs]


@pytest.mark.mpi(min_size=2)
@FREEZING
def test_ranks_that_freeze_differently_raise_on_every_rank(lib, comm):
    with pytest.raises(MismatchError, match="second") as caught:
        Synchronizer(comm).broadcast_parameters(lib.model(frozen=comm.rank == 1))
    assert len(set(comm.all_gather_object(one_line(caught)))) == 1


@ON_RANKS
def test_a_tied_parameter_counts_once_and_stays_tied(lib, comm):
    model, sync = lib.model(scale=comm.rank + 1, tied=True), Synchronizer(comm)
    assert len(adapter_of(model).specs) == len(SHAPES)
    sync.broadcast_parameters(model)
    if lib.ties:
        assert lib.parameter(model, "again") is lib.parameter(model, "first")
    lib.backward(model, {"first": np.full((5, 7), comm.rank, np.float32)})
    lib.backward(model, {"again": np.full((5, 7), comm.rank, np.float32)})
    sync.sync_gradients(model)
    assert_bits(lib.gradient(model, "again"), np.full((5, 7), comm.size - 1, np.float32))


@pytest.mark.mpi(min_size=2)
@KEEPING
@pytest.mark.parametrize("call", ["sync_gradients", "broadcast_parameters"])
def test_another_parameter_in_place_of_one_is_an_error_on_every_rank(lib, comm, call):
    model, sync = lib.model(), Synchronizer(comm)
    sync.broadcast_parameters(model)
    if comm.rank == 1:
        lib.add(model, "second", np.ones(7, np.float32), "float32")
    with pytest.raises(ArgumentError, match="'second': expected") as caught:
        getattr(sync, call)(model)
    assert len(set(comm.all_gather_object(one_line(caught)))) == 1


@ON_RANKS
def test_ragged_batches_weigh_by_their_samples(lib, comm):
    model, sync = lib.model(), Synchronizer(comm)
    sync.broadcast_parameters(model)
    lib.backward(model, drawn(comm.rank))
    sync.sync_gradients(model, samples=comm.rank + 1)
    counts = np.arange(1, comm.size + 1)
    for name in SHAPES:
        exact = sum(n * drawn(rank)[name].astype(np.float64) for rank, n in enumerate(counts)) / counts.sum()
        np.testing.assert_allclose(lib.gradient(model, name), exact, rtol=1e-5, atol=1e-6)


DEAD = """
from tests.adapters.libraries import library
from clcomm import Synchronizer
import numpy as np
lib = library({name!r})
comm = Communicator()
model, sync = lib.model(), Synchronizer(comm)
sync.broadcast_parameters(model)
for step in range(3):
    lib.backward(model, {{"second": np.ones(7, np.float32)}})
    if step == 1 and comm.rank == 1:
        failing()
        os._exit(7)
    sync.sync_gradients(model)
"""


def test_a_dead_rank_ends_the_job_in_one_line(lib, tmp_path, request):
    name = request.node.callspec.params["lib"]
    path = os.pathsep.join(["."] + [each for each in sys.path if each])
    ended = finish(start(tmp_path, DEAD.format(name=name), ranks=3, PYTHONPATH=path))
    assert ended.code
    assert len(ended.clcomm_lines()) == 1 and "rank 1 exited unexpectedly" in ended.err, ended.err


@ON_RANKS
def test_a_policy_leaves_gradients_alone_and_moves_all_ranks_by_the_mean_of_their_ways(lib, comm):
    """DiLoCo of rate 1 without momentum: after two steps of each rank the mean of their parameters, to the bit."""
    model, sync = lib.model(), Synchronizer(comm, policy="diloco:h=2,lr=1,momentum=0")
    sync.broadcast_parameters(model)
    space = sync.models.of(model).space
    for step in range(2):
        lib.backward(model, drawn(comm.rank, step))
        sync.sync_gradients(model)
        space.adapter.pull_parameters()
        for name in SHAPES:
            assert_bits(lib.gradient(model, name), drawn(comm.rank, step)[name], name)
            space.layout.view(space.arrays.params, name)[...] -= drawn(comm.rank, step)[name]
        space.adapter.push_parameters()
        space.adapter.drop_gradients()
        sync.finish_step(model)
    for name, shape in SHAPES.items():
        one = np.ones(shape, np.float32)
        ends = [one - drawn(rank, 0)[name] - drawn(rank, 1)[name] for rank in range(comm.size)]
        assert_bits(lib.values(model, name), one - mean([one - end for end in ends]), name)
