"""Overlap: buckets begin during backward, with the same bits as without; calls that would spoil them are refused."""

from __future__ import annotations

import gc
import time
import weakref

import numpy as np
import pytest

from clcomm import Communicator, Synchronizer
from clcomm.base.errors import ArgumentError, NonFiniteError
from clcomm.comm.transport import mpi_communicators, mpi_failures
from clcomm.engine import CrossEntropyLoss, Replay, Tensor
from clcomm.sync import elastic
from tests.helpers import Recorder, one_line
from tests.sync import overlap_sides
from tests.sync.overlap_sides import KINDS, Net, batch, begun, side_of, trained
from tests.transport.references import pretended_host

#: (use_bucketing, bucket_size, first_bucket_size, split_tensors)
CUTS = [
    (True, "1MiB", None, False), (True, 700, 64, True), (False, "1MiB", None, False),
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_the_bits_are_those_without_overlap_however_buckets_are_cut(comm, device, monkeypatch, kind):
    expected, _ = trained(kind, comm, device, monkeypatch)
    for use_bucketing, size, first, split in CUTS:
        options = {"use_bucketing": use_bucketing, "bucket_size": size}
        options |= {"first_bucket_size": first, "split_tensors": split, "overlap": True}
        assert trained(kind, comm, device, monkeypatch, **options)[0] == expected, options


@pytest.mark.parametrize("kind", KINDS)
def test_accumulated_micro_batches_have_the_bits_without_overlap(comm, device, monkeypatch, kind):
    options = {"micro_batches": 3, "bucket_size": 1500}
    expected, _ = trained(kind, comm, device, monkeypatch, **options)
    assert trained(kind, comm, device, monkeypatch, overlap=True, **options)[0] == expected


@pytest.mark.parametrize("kind", KINDS)
def test_a_compressed_bucket_has_the_bits_without_overlap(comm, device, monkeypatch, kind):
    options = {"compression": "powersgd:2", "bucket_size": 1500}
    expected, _ = trained(kind, comm, device, monkeypatch, **options)
    assert trained(kind, comm, device, monkeypatch, overlap=True, **options)[0] == expected


@pytest.mark.mpi(min_size=2)
def test_shared_memory_and_mpi_have_the_same_bits_with_overlap(device, monkeypatch):
    results = []
    for transport in ("auto", "mpi"):
        with Communicator(transport=transport) as comm:
            results.append(trained("native", comm, device, monkeypatch, bucket_size=1500, overlap=True)[0])
    assert results[0] == results[1]


@pytest.mark.parametrize("kind", ["native", "torch"])
def test_buckets_begin_in_backward_and_are_counted_alike(comm, device, monkeypatch, kind):
    if kind == "native" and not device.runs_in_caller:
        pytest.skip("this device queues its kernels")
    side, sync = begun(kind, comm, device, steps=3, bucket_size=1500, overlap=True)
    seen = Recorder()
    comm.add_observer(seen)
    side.backward(3)
    backward_ended_s = time.perf_counter()
    sync.sync_gradients(side.model)
    comm.remove_observer(seen)
    # One that is looked at early may be known to be done before those that were begun before it.
    events = sorted((event for event in seen.events if event.label == "gradients"), key=lambda event: event.bucket)
    assert [event.bucket for event in events] == [bucket.index for bucket in sync.bucket_plan(side.model)]
    assert [event.nbytes for event in events] == [bucket.nbytes for bucket in sync.bucket_plan(side.model)]
    assert all(0 <= event.exposed_s <= event.seconds for event in events)
    assert len(events) > 1 and all(event.began_s - event.queued_s < backward_ended_s for event in events)


@pytest.mark.parametrize("kind", ["native", "torch"])
def test_a_second_backward_before_the_synchronisation_is_refused(comm, device, monkeypatch, kind):
    monkeypatch.setattr(device, "runs_in_caller", True)
    side, _ = begun(kind, comm, device, steps=3, overlap=True)
    side.backward(3)
    with pytest.raises(ArgumentError) as caught:
        side.backward(4)
    assert (
        "as its all-reduce is in flight; with overlap, put all micro-batches but the last into no_sync()"
        in one_line(caught)
    )


@pytest.mark.parametrize("kind", ["native", "torch"])
def test_a_dropped_synchronizer_begins_nothing(comm, device, monkeypatch, kind):
    """Neither on its own nor beside the one that takes its place, whose averages are the same."""
    expected = trained(kind, comm, device, monkeypatch)[0]
    side, sync = begun(kind, comm, device, steps=2, overlap=True)
    del sync
    seen = Recorder()
    comm.add_observer(seen)
    for step in range(2):
        side.backward(step)
    assert not [event for event in seen.events if event.label == "gradients"]
    comm.remove_observer(seen)
    side = side_of(kind, device, comm.rank)
    for steps in (range(3), range(3, 5)):
        sync = Synchronizer(comm, overlap=True)  # the one before is dropped
        sync.broadcast_parameters(side.model)
        for step in steps:
            side.backward(100 * step + 99, whole=step != 3)
            sync.sync_gradients(side.model)
            side.update()
    assert side.bits() == expected


def test_a_device_that_computes_by_itself_takes_any_number_of_backwards(comm, device, monkeypatch):
    """The second one may add to a bucket that it does not complete: then the first one's mark is not its end."""
    results = []
    monkeypatch.setattr(device, "runs_in_caller", False)
    for overlap in (False, True):
        side, sync = begun("native", comm, device, bucket_size=1500, overlap=overlap)
        for step in range(4):
            side.backward(step)
            side.backward(step + 50, whole=step % 2 == 0)
            sync.sync_gradients(side.model)
            side.update()
        results.append(side.bits())
    assert results[0] == results[1]


def test_gradients_on_their_way_are_not_forgotten_or_stepped_with(comm, device, monkeypatch):
    monkeypatch.setattr(device, "runs_in_caller", True)
    side, sync = begun("native", comm, device, steps=2, overlap=True)
    side.backward(2)
    for refused in (side.optimizer.zero_grad, side.optimizer.step):
        with pytest.raises(ArgumentError, match=r"^gradient: expected sync_gradients\(\) after the last backward"):
            refused()
    sync.sync_gradients(side.model)
    side.update()


@pytest.mark.parametrize("kind", ["native", "torch"])
def test_gradients_on_their_way_to_lost_ranks_are_dropped(device, monkeypatch, kind):
    """The interrupted step is repeated among the ranks that are left: here this one, which was alone before too."""
    results = []
    monkeypatch.setattr(device, "runs_in_caller", True)
    monkeypatch.setattr(mpi_failures, "survivors", lambda comm: comm)
    for is_lost in (False, True):
        comm = Communicator(transport="solo")
        side, sync = begun(kind, comm, device, steps=3, bucket_size=1500, overlap=True)
        if is_lost:
            side.backward(3)
            sync = Synchronizer(elastic.survivors_of(comm), overlap=True)
            side.optimizer.zero_grad()
        for step in (3, 4, 5):
            side.backward(step)
            sync.sync_gradients(side.model)
            side.update()
        results.append(side.bits())
    assert results[0] == results[1]


@pytest.mark.parametrize("kind", ["native", "torch"])
def test_a_gradient_that_is_not_finite_is_found_with_overlap_too(comm, device, kind):
    side, sync = begun(kind, comm, device, steps=2, bucket_size=1500, overlap=True, check_finite=True)
    bias = dict(side.model.named_parameters())["third.bias"]
    if kind == "torch":
        with side.torch.no_grad():
            bias[0] = float("nan")
    else:
        bias.copy_from(np.array([np.nan, 0, 0], np.float32))
    side.backward(2)
    with pytest.raises(NonFiniteError):
        sync.sync_gradients(side.model)


@pytest.mark.parametrize("kind", ["native", "torch"])
def test_a_step_that_is_passed_over_for_a_gradient_that_is_not_finite_spoils_no_other(comm, device, monkeypatch, kind):
    def spoilt(rank: int, step: int):
        x, y = batch(rank, step)
        return (x * np.float32("nan") if step == 2 and rank == 0 else x), y

    monkeypatch.setattr(overlap_sides, "batch", spoilt)
    results = []
    for overlap in (False, True):
        side, sync = begun(kind, comm, device, steps=2, bucket_size=1500, overlap=overlap, check_finite=True)
        side.backward(2)
        with pytest.raises(NonFiniteError):
            sync.sync_gradients(side.model)
        side.optimizer.zero_grad()
        for step in (3, 4):
            side.backward(step)
            sync.sync_gradients(side.model)
            side.update()
        results.append(side.bits())
    assert results[0] == results[1]


def test_an_exception_in_backward_may_be_passed_over_when_its_step_is_synchronised(comm, device):
    results = []
    for overlap in (False, True):
        side, sync = begun("torch", comm, device, steps=3, bucket_size=100, overlap=overlap)

        def fail(_):
            raise RuntimeError("out of memory")

        if comm.rank == 0:
            with side.model.second.weight.register_hook(fail), pytest.raises(RuntimeError):
                side.backward(3)
        else:
            side.backward(3)
        sync.sync_gradients(side.model)
        side.optimizer.zero_grad()
        for step in (4, 5):
            side.backward(step)
            sync.sync_gradients(side.model)
            side.update()
        results.append(side.bits())
    assert results[0] == results[1]


@pytest.mark.parametrize("kind", ["native", "torch"])
def test_a_model_is_followed_for_the_synchronizer_that_used_it_last(comm, device, kind):
    results = []
    for overlap in (False, True):
        side, first = begun(kind, comm, device, steps=3, bucket_size=1500, overlap=overlap)
        plain, other = Synchronizer(comm), Synchronizer(comm, overlap=overlap, bucket_size=700)
        for turn, sync in enumerate((plain, other, first, plain, first)):
            sync.broadcast_parameters(side.model)
            for step in range(3):
                side.backward(10 * turn + step)
                sync.sync_gradients(side.model)
                side.update()
        results.append(side.bits())
    assert results[0] == results[1]


def test_a_model_of_pytorch_that_was_followed_is_no_lasting_garbage(comm, device):
    side, sync = begun("torch", comm, device, steps=3, overlap=True)
    model = weakref.ref(side.model)
    del side, sync
    gc.collect()
    assert model() is None


def test_ranks_whose_backward_differs_still_agree(comm, device, monkeypatch):
    """A rank without the second layer's gradients begins its bucket in sync_gradients."""
    results = []
    for overlap in (False, True):
        side, sync = begun("native", comm, device, bucket_size=1500, overlap=overlap)
        for step, bucket_size in enumerate((1500, 1500, 1500, 700, 1500, "1MiB", 700)):
            side.backward(step, whole=(step + comm.rank) % 2 == 0)
            sync.bucket_size = bucket_size  # other buckets are agreed on while ranks have begun different ones
            sync.sync_gradients(side.model, use_bucketing=step != 4)
            side.update()
        results.append(side.bits())
    assert results[0] == results[1]


def test_a_replayed_function_of_two_backwards_runs_as_it_is(comm, device):
    """Where its first backward completes a bucket a replay could not know that the second adds to it."""
    net, loss_fn = Net(device), CrossEntropyLoss()
    net.flat_space()

    def twice(x, y):
        for _ in range(2):
            loss_fn(net(x), y).backward()

    sync, run = Synchronizer(comm, overlap=True), Replay(twice)
    sync.broadcast_parameters(net)
    x, y = (Tensor(array, device) for array in batch(comm.rank, 0))
    for _ in range(2):
        net.zero_grad()
        with sync.no_sync():
            run(x, y)
        sync.sync_gradients(net)
    for _ in range(2):
        net.zero_grad()
        with sync.no_sync():
            run(x, y)
    assert run.refusal == "it runs backward more than once"


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("layout", ["halves", "first-alone"])
def test_between_hosts_the_bits_are_those_without_overlap(device, monkeypatch, layout):
    results = []
    for options in ({}, {"overlap": True, "bucket_size": 1500}, {"overlap": True, "use_bucketing": False}):
        monkeypatch.setattr(mpi_communicators, "host_of", lambda comm: pretended_host(layout, comm))
        with Communicator() as comm:
            assert comm.hosts == 2
            results += [trained(kind, comm, device, monkeypatch, **options)[0] for kind in ("native", "queued")]
    assert all(result == results[0] for result in results)
