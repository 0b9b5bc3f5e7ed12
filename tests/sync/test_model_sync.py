"""Each model of a Synchronizer has plans, bucket sizes, overlap and an order of its own; settings hold for all."""

from __future__ import annotations

import pytest

from clcomm import Synchronizer
from tests.numpy_models import Model, set_gradients, values
from tests.sync.overlap_sides import begun


def model_of(tensors: int) -> Model:
    return Model((f"w{n}", values(n, 0, (10, 10 + n))) for n in range(tensors))


def synchronised(sync: Synchronizer, models: list[Model], steps: int) -> list[list[bytes]]:
    """Return the bits of the models' gradients after each step, in which each model is synchronised once."""
    bits = []
    for step in range(steps):
        for model in models:
            set_gradients(model, sync.comm.rank, step)
            sync.sync_gradients(model)
            bits.append(model.gradient_bits())
    return bits


def test_a_models_means_do_not_depend_on_the_other_models(comm):
    together = [model_of(count) for count in (1, 3, 8)]
    found = synchronised(Synchronizer(comm, bucket_size=900), together, 4)
    for place, count in enumerate((1, 3, 8)):
        alone = synchronised(Synchronizer(comm, bucket_size=900), [model_of(count)], 4)
        assert found[place::3] == alone


def cut(tensors: list[int], bucket_size: int) -> list[int]:
    """Return buckets' bytes, filled from the last tensor to the first."""
    buckets = [0]
    for nbytes in reversed(tensors):
        if buckets[-1] and buckets[-1] + nbytes > bucket_size:
            buckets.append(0)
        buckets[-1] += nbytes
    return buckets


def test_a_bucket_size_that_is_set_holds_for_every_model(comm):
    models = [model_of(count) for count in (2, 6)]
    tensors = [[4 * 10 * (10 + n) for n in range(count)] for count in (2, 6)]
    sync = Synchronizer(comm)
    for size in (1 << 20, 500, 1000, 2000):
        sync.bucket_size = size
        synchronised(sync, models, 1)
        plans = [[bucket.nbytes for bucket in sync.bucket_plan(model)] for model in models]
        assert plans == [cut(each, size) for each in tensors]
    sync.use_bucketing = False
    assert [len(sync.bucket_plan(model)) for model in models] == [2, 6]


@pytest.mark.mpi(min_size=2)
def test_a_size_that_was_found_for_one_model_is_not_taken_for_another(auto):
    tuned, other = model_of(1), model_of(6)
    sync = Synchronizer(auto, bucket_size="auto")
    while not sync.decisions():
        synchronised(sync, [tuned], 1)
    (decision,) = sync.decisions()
    expected = Synchronizer(auto, bucket_size="auto").bucket_plan(other)
    assert sync.bucket_plan(other) == expected and decision.what == "bucket_size"


@pytest.mark.parametrize("kind", ["native", "torch"])
def test_an_order_is_that_of_its_own_model(comm, device, kind):
    sides = [begun(kind, comm, device) for _ in range(2)]
    sync = Synchronizer(comm)
    models = [side.model for side, _ in sides]
    for model in models:
        sync.broadcast_parameters(model)
        assert sync.models.of(model).completion_order == ()
    sides[0][0].backward(0)
    sync.sync_gradients(models[0])
    first = sync.models.of(models[0]).completion_order
    assert sorted(first) == sorted(name for name, _ in models[0].named_parameters())
    assert first[0].startswith("third") and first[-1].startswith("first")
    assert sync.models.of(models[1]).completion_order == ()


def test_a_model_that_is_first_seen_while_gradients_accumulate_is_paused_too(comm, device):
    """Two backwards in `no_sync()` are no reason against overlap, and leave the bits as they are without it."""
    results = []
    for overlap in (False, "auto"):
        side, _ = begun("torch", comm, device)
        sync = Synchronizer(comm, overlap=overlap)
        with sync.no_sync():
            sync.broadcast_parameters(side.model)
            side.backward(0)
            side.backward(1)
        for step in range(2, 6):
            side.backward(step)
            sync.sync_gradients(side.model)
            side.update()
        results.append(side.bits())
        assert not any("several backwards" in str(decision) for decision in sync.decisions())
    assert results[0] == results[1]
