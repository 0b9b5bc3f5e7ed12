"""Whether to overlap: as set, where it is possible, or as the first steps show."""

from __future__ import annotations

import pytest

from clcomm import Communicator, Synchronizer
from clcomm.base.errors import ArgumentError
from clcomm.optim import SGD
from clcomm.sync import auto_buckets
from clcomm.sync.distributed_optimizer import DistributedOptimizer
from tests.helpers import one_line
from tests.sync.overlap_sides import begun, side_of, trained


def test_auto_decides_at_once_where_nothing_can_be_gained(comm, device, monkeypatch):
    """One rank, or ranks of one core each whose kernels run in the calling thread."""
    monkeypatch.setattr(comm, "cores", 1)
    monkeypatch.setattr(device, "runs_in_caller", True)
    _, sync = trained("native", comm, device, monkeypatch, overlap="auto", steps=3)
    (decision,) = sync.decisions()
    assert (decision.what, decision.chosen, decision.evidence) == ("overlap", "off", ())
    assert str(decision).startswith("overlap: off, chosen at step 2 without measuring: ")


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind", ["queued", "torch"])
def test_auto_measures_both_and_keeps_one_on_all_ranks_with_the_same_bits(several, device, monkeypatch, kind):
    monkeypatch.setattr(several, "cores", 2)
    expected, _ = trained(kind, several, device, monkeypatch, steps=34)
    monkeypatch.setattr(several, "cores", 2)
    bits, sync = trained(kind, several, device, monkeypatch, steps=34, overlap="auto")
    assert bits == expected
    (decision,) = sync.decisions()
    assert several.all_gather_object(decision) == [decision] * several.size
    off, on = decision.evidence
    assert (off.name, on.name, off.steps, on.steps) == ("off", "on", 12, 12)
    assert "overlap was faster in " in decision.reason
    assert decision.chosen == ("off" if "within the noise" in decision.reason else "on")
    assert decision.chosen == "off" or on.measured_s < 0.98 * off.measured_s


@pytest.fixture
def few_trials(monkeypatch):
    monkeypatch.setattr(auto_buckets, "_MOST_CANDIDATES", 3)
    monkeypatch.setattr(auto_buckets, "_FIRST_ROUND_TURNS", 1)
    monkeypatch.setattr(auto_buckets, "_LAST_ROUND_TURNS", 2)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind", ["native", "queued", "torch"])
def test_sizes_are_tried_with_overlap_and_no_bit_changes(several, device, monkeypatch, few_trials, kind):
    bits, sync = trained(kind, several, device, monkeypatch, steps=35, overlap=True, bucket_size="auto")
    assert bits == trained(kind, several, device, monkeypatch, steps=35)[0]
    (decision,) = sync.decisions()
    assert several.all_gather_object(decision) == [decision] * several.size
    assert (decision.what, decision.measures) == ("bucket_size", "time of a step with overlap")
    assert decision.chosen in [trial.name for trial in decision.evidence if trial.steps >= 3]
    assert len(decision.evidence) > 1 and all(trial.predicted_s is None for trial in decision.evidence)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind", ["queued", "torch"])
def test_the_best_sizes_of_both_ways_are_compared_and_the_one_kept_is_reported(
    several, device, monkeypatch, few_trials, kind
):
    monkeypatch.setattr(several, "cores", 2)
    bits, sync = trained(kind, several, device, monkeypatch, steps=90, overlap="auto", bucket_size="auto")
    assert bits == trained(kind, several, device, monkeypatch, steps=90)[0]
    overlap, size = sync.decisions()
    assert several.all_gather_object((overlap, size)) == [(overlap, size)] * several.size
    assert (overlap.what, size.what, len(overlap.evidence)) == ("overlap", "bucket_size", 2)
    assert size.measures == ("time of a step with overlap" if overlap.chosen == "on" else "time in synchronisation")
    assert size.at_step < overlap.at_step


@pytest.mark.parametrize("kind", ["native", "torch"])
@pytest.mark.mpi(min_size=2)
def test_auto_is_off_where_backwards_accumulate_outside_no_sync(several, device, monkeypatch, kind):
    monkeypatch.setattr(several, "cores", 2)
    results = []
    for overlap in (False, "auto"):
        side, sync = begun(kind, several, device, overlap=overlap)
        for step in range(4):
            side.backward(step)
            side.backward(50 + step)
            sync.sync_gradients(side.model)
            side.update()
        results.append(side.bits())
    assert results[0] == results[1]
    assert "several backwards came before a synchronisation" in str(sync.decisions()[0])


@pytest.mark.parametrize("setting", ["on", None, 2])
def test_refused_settings(setting):
    with Communicator(transport="solo") as comm, pytest.raises(ArgumentError) as caught:
        Synchronizer(comm, overlap=setting)
    assert one_line(caught) == f"overlap: expected True, False or 'auto', got {setting!r}"


def test_gradients_that_are_weighed_and_overlap_exclude_each_other(comm, device):
    for setting, refused in ((True, True), ("auto", False)):
        side, sync = begun("torch", comm, device, overlap=setting)
        side.backward(0)
        if refused:
            with pytest.raises(ArgumentError, match=r"^samples: expected None with overlap, .*; use overlap=False$"):
                sync.sync_gradients(side.model, samples=4)
        else:
            sync.sync_gradients(side.model, samples=4)


def test_a_sharded_update_and_overlap_exclude_each_other(comm, device):
    side = side_of("native", device, comm.rank)
    with pytest.raises(ArgumentError) as caught:
        DistributedOptimizer(SGD(side.model, 0.1), Synchronizer(comm, overlap=True))
    assert one_line(caught) == "sync: expected one without overlap for a sharded update, got overlap=True"
    sync = Synchronizer(comm, overlap="auto")
    sync.broadcast_parameters(side.model)
    optimizer = DistributedOptimizer(SGD(side.model, 0.1), sync)
    for step in range(3):
        side.backward(step)
        sync.sync_gradients(side.model)
        optimizer.step()
        optimizer.zero_grad()
    assert [decision.chosen for decision in sync.decisions()] == ["off"]
