"""The Synchronizer on NumPy models: equal parameters, mean gradients, accumulation, counts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clcomm import Communicator, Synchronizer
from clcomm.base.errors import ArgumentError
from clcomm.engine import Linear
from clcomm.optim import SGD
from clcomm.sync.distributed_optimizer import DistributedOptimizer
from tests.helpers import one_line
from tests.numpy_models import Model, set_gradients, small_model, values
from tests.transport.references import folded


def mean_over_ranks(name_index: int, shape, size: int, dtype="float32", seed=100, without=()) -> np.ndarray:
    """Return what the gradient set by `set_gradients` has to become, its sum taken in rank order."""
    rows = [
        np.zeros(shape, dtype) if rank in without else values(seed + name_index, rank, shape, dtype)
        for rank in range(size)
    ]
    return folded(rows, "mean")


# --- parameters ---


def test_broadcast_gives_every_rank_roots_parameters(comm):
    for root in range(comm.size):
        model = small_model(comm.rank)
        arrays = [p.data for p in model.parameters.values()]
        Synchronizer(comm).broadcast_parameters(model, root=root)
        assert model.bits() == small_model(root).bits()
        assert all(p.data is a for p, a in zip(model.parameters.values(), arrays, strict=True)), "set in place"


def test_broadcast_takes_what_is_not_trained_along(comm):
    state = {"running_mean": np.full(3, comm.rank, np.float64), "batches": np.array(comm.rank)}
    model = Model([("w", np.zeros(2, np.float32))], state)
    Synchronizer(comm).broadcast_parameters(model, root=comm.size - 1)
    assert (model.state["running_mean"] == comm.size - 1).all()
    assert int(model.state["batches"]) == comm.size - 1


def test_broadcast_counts_the_parameters_own_bytes(comm):
    model = small_model(comm.rank)
    Synchronizer(comm).broadcast_parameters(model)
    assert comm.stats.total("broadcast", "parameters")["bytes"] == 4 * (5 * 7 + 7 + 7 * 300)


def test_several_models_each_have_their_space(comm):
    sync = Synchronizer(comm)
    for n in range(5):  # each dies here, and its id may come back
        model = Model([("w", np.full(n + 1, comm.rank, np.float32))])
        sync.broadcast_parameters(model)
        assert not model["w"].data.any()


# --- gradients ---


@pytest.mark.parametrize("options", [{}, {"use_bucketing": False}, {"bucket_size": 100}, {"bucket_size": "1KiB"}])
def test_gradients_become_their_mean(comm, options):
    model = small_model()
    assert_means(Synchronizer(comm, **options), model)


def assert_means(sync: Synchronizer, model: Model) -> None:
    """Synchronise twice, and compare the bits with those of the documented order."""
    for seed in (100, 200):
        set_gradients(model, sync.comm.rank, seed)
        sync.sync_gradients(model)
        for n, parameter in enumerate(model.parameters.values()):
            expected = mean_over_ranks(n, parameter.data.shape, sync.comm.size, seed=seed)
            assert parameter.grad.tobytes() == expected.tobytes()


def test_a_missing_gradient_counts_as_zero_whoever_misses_it_unless_all_do(comm):
    sync, model = Synchronizer(comm, bucket_size=200), small_model()
    last = comm.size - 1
    set_gradients(model, comm.rank, missing=["b1"] if comm.rank == last else ["w2"] if comm.rank == 0 else [])
    if comm.size == 1:
        set_gradients(model, 0, missing=["b1", "w2"])
    sync.sync_gradients(model)
    for n, (name, without) in enumerate({"w1": (), "b1": (last,), "w2": (0,)}.items()):
        if without and comm.size == 1:
            assert model[name].grad is None
            continue
        expected = mean_over_ranks(n, model[name].data.shape, comm.size, without=without)
        assert model[name].grad.tobytes() == expected.tobytes(), name


def test_a_gradient_that_all_miss_stays_so_and_stale_ones_do_not_come_back(comm):
    sync, model = Synchronizer(comm), small_model()
    set_gradients(model, comm.rank)
    sync.sync_gradients(model)
    set_gradients(model, comm.rank, missing=["w1", "b1", "w2"])
    sync.sync_gradients(model)
    assert all(p.grad is None for p in model.parameters.values())


@st.composite
def parameter_lists(draw):
    shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
    drawn = draw(st.lists(st.tuples(shapes, st.sampled_from(["float32", "float32", "float64", "float16"])), min_size=1,
                          max_size=8))  # fmt: skip
    return [(f"p{n}", *each) for n, each in enumerate(drawn)]


cuts = st.tuples(st.integers(1, 3000), st.none() | st.integers(1, 3000), st.booleans())


@given(parameter_lists(), st.lists(cuts, max_size=3), st.integers(0, 1000))
def _any_bucket_size_gives_the_same_bits(comm, parameters, drawn, seed):
    results = []
    for size, first, split in [(None, None, False), (1, None, False), *drawn, (1 << 20, 64, True)]:
        model = Model((name, np.zeros(shape, dtype)) for name, shape, dtype in parameters)
        missing = [name for n, (name, *_) in enumerate(parameters) if (seed + n + comm.rank) % 5 == 0]
        set_gradients(model, comm.rank, seed, missing)
        bucketing = size is not None
        sync = Synchronizer(comm, bucketing, bucket_size=size, first_bucket_size=first, split_tensors=split)
        sync.sync_gradients(model)
        results.append(model.gradient_bits())
    alike = all(result == results[0] for result in results)
    # All ranks fail or none does: hypothesis then takes them through the same examples.
    assert comm.all_gather_object((alike, results[0])) == [(True, results[0])] * comm.size


def test_bucketed_and_per_tensor_and_any_bucket_size_agree_to_the_last_bit(comm):
    _any_bucket_size_gives_the_same_bits(comm)


@pytest.mark.mpi(min_size=2)
def test_shared_memory_and_mpi_agree_to_the_last_bit():
    results = []
    for transport in ("auto", "mpi"):
        with Communicator(transport=transport) as comm:
            model = small_model()
            set_gradients(model, comm.rank)
            Synchronizer(comm, bucket_size=500).sync_gradients(model)
            results.append(model.gradient_bits())
    assert results[0] == results[1]


def test_the_way_may_change_from_call_to_call(comm):
    sync, model = Synchronizer(comm, use_bucketing=True), small_model()
    calls = []
    for use_bucketing, bucket_size in ((None, "1MiB"), (False, "1MiB"), (True, 150), (None, 200)):
        sync.bucket_size = 1 << 20 if bucket_size == "1MiB" else bucket_size
        before = comm.stats.total("all_reduce")["calls"]
        set_gradients(model, comm.rank)
        sync.sync_gradients(model, use_bucketing)
        calls.append(comm.stats.total("all_reduce")["calls"] - before)
        assert calls[-1] == len(sync.bucket_plan(model, use_bucketing))
    assert calls == [1, 3, 3, 2]


def test_a_smaller_first_bucket_and_split_tensors(comm):
    model = small_model()  # w1 5x7, b1 7, w2 7x300: 140, 28 and 8,400 bytes
    sync = Synchronizer(comm, bucket_size=4096, first_bucket_size=1024, split_tensors=True)
    assert [(b.nbytes, [s.name for s in b.ranges]) for b in sync.bucket_plan(model)] == [
        (4096, ["w2"]), (4096, ["w2"]), (376, ["w2", "b1", "w1"])
    ]  # fmt: skip
    assert_means(sync, model)


# --- accumulation ---


def test_no_sync_leaves_gradients_alone(comm):
    sync, model = Synchronizer(comm), small_model()
    set_gradients(model, comm.rank)
    before = model.gradient_bits()
    with sync.no_sync():
        sync.sync_gradients(model)
        with sync.no_sync():
            sync.sync_gradients(model)
        sync.sync_gradients(model)  # still within the outer block
    assert model.gradient_bits() == before
    assert comm.stats.total("all_reduce")["calls"] == 0
    sync.sync_gradients(model)
    assert comm.stats.total("all_reduce")["calls"] == 1


def test_no_sync_ends_with_an_exception_in_its_block(comm):
    sync, model = Synchronizer(comm), small_model()
    with pytest.raises(RuntimeError, match="out of batches"), sync.no_sync(), sync.no_sync():
        raise RuntimeError("out of batches")
    set_gradients(model, comm.rank)
    sync.sync_gradients(model)
    expected = mean_over_ranks(0, (5, 7), comm.size)
    assert model["w1"].grad.tobytes() == expected.tobytes()


# --- counts ---


def convnet() -> Model:
    """LizarDist's ConvNet: 8 tensors, 827,688 bytes."""
    shapes = [(16, 1, 3, 3), (16,), (32, 16, 3, 3), (32,), (128, 1568), (128,), (10, 128), (10,)]
    return Model((f"p{n}", np.zeros(shape, np.float32)) for n, shape in enumerate(shapes))


@pytest.mark.parametrize(
    ("options", "calls", "average"),
    [({}, 235, 827_688), ({"use_bucketing": False}, 1880, 103_461), ({"bucket_size": "256KiB"}, 705, 275_896)],
)
def test_lizardists_published_counts(options, calls, average):
    with Communicator(transport="solo") as comm:
        sync, model = Synchronizer(comm, **options), convnet()
        sync.broadcast_parameters(model)
        for _ in range(235):
            sync.sync_gradients(model)
        assert sync.get_communication_stats() == comm.get_bucket_stats() == {
            "total_allreduce_calls": calls,
            "total_bytes_sent": 194_506_680,
            "average_bytes_per_call": average,
        }  # fmt: skip


def test_own_traffic_is_told_apart_from_the_users(comm):
    sync, model = Synchronizer(comm), small_model()
    comm.all_reduce(np.zeros(1000))
    sync.sync_gradients(model)
    assert sync.get_communication_stats()["total_bytes_sent"] == 4 * (5 * 7 + 7 + 7 * 300)
    assert comm.get_bucket_stats()["total_allreduce_calls"] == 2


# --- settings ---


def test_settings_come_from_the_communicator_unless_given():
    with Communicator(transport="solo", bucket_size="4MiB", use_bucketing=False) as comm:
        sync = Synchronizer(comm)
        assert (sync.bucket_size, sync.use_bucketing) == (4 << 20, False)
        sync = Synchronizer(comm, True, bucket_size="64KiB")
        assert (sync.bucket_size, sync.use_bucketing) == (64 << 10, True)
        sync.bucket_size = "2MiB"
        for wrong in (0, -5, None, 2.5, "auto", "much"):
            with pytest.raises(ArgumentError) as caught:
                sync.bucket_size = wrong
            assert one_line(caught).startswith("bucket_size: expected a positive number of bytes")
        assert sync.bucket_size == 2 << 20


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"bucket_size": 0},
            "bucket_size: expected a positive number of bytes such as 1048576, '1MiB' or '256KiB', got 0",
        ),
        ({"check_replicas_every": -1}, "check_replicas_every: expected a number of steps, 0 for never, got -1"),
        (
            {"first_bucket_size": "none"},
            "first_bucket_size: expected a positive number of bytes such as 1048576, '1MiB' or '256KiB', got 'none'",
        ),
        (
            {"split_tensors": True, "compression": "fp16"},
            "split_tensors: expected False with a compression or a hook, which need whole tensors",
        ),
        (
            {"check_replicas_every": "often"},
            "check_replicas_every: expected a number of steps, 0 for never, got 'often'",
        ),
    ],
)
def test_refused_settings(options, message):
    with Communicator(transport="solo") as comm, pytest.raises(ArgumentError) as caught:
        Synchronizer(comm, **options)
    assert one_line(caught) == message


def test_what_is_no_model_is_refused(comm):
    with pytest.raises(ArgumentError) as caught:
        Synchronizer(comm).sync_gradients({"w": np.zeros(3)})
    assert one_line(caught).startswith("model: expected ")
    assert one_line(caught).endswith("got dict")


# --- communication alone ---


@pytest.mark.parametrize("use_bucketing", [True, False])
def test_reductions_alone_count_and_change_nothing(comm, use_bucketing):
    model, sync = small_model(0), Synchronizer(comm, use_bucketing)
    reduce = sync.models.of(model).reductions()
    set_gradients(model, comm.rank)
    sync.sync_gradients(model)
    gradients = {name: parameter.grad.copy() for name, parameter in model.parameters.items()}
    before = comm.stats.total("all_reduce", "gradients")["calls"]
    for _ in range(3):
        reduce()
    buckets = len(sync.bucket_plan(model))
    assert comm.stats.total("all_reduce", "gradients")["calls"] == before + 3 * buckets
    for name, parameter in model.parameters.items():
        np.testing.assert_array_equal(parameter.grad, gradients[name], strict=True)


def test_a_sharded_update_has_no_reductions_in_buckets(comm, device):
    model, sync = Linear(3, 2, device=device), Synchronizer(comm)
    DistributedOptimizer(SGD(model, 0.1), sync)
    with pytest.raises(ArgumentError) as caught:
        sync.models.of(model).reductions()
    assert "model: expected one whose gradients are reduced in buckets" in one_line(caught)
