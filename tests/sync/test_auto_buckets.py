"""bucket_size="auto": no result changes, all ranks agree, and the decision is reported."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from clcomm import Communicator, Synchronizer
from clcomm.base.errors import ArgumentError
from clcomm.comm.costs import costfile
from clcomm.comm.costs.model import Cost, Fit, MeasuredFit
from clcomm.comm.transport import mpi_communicators
from clcomm.sync.auto_buckets import TUNING, starting_cost
from tests.helpers import Recorder
from tests.numpy_models import Model, set_gradients, values
from tests.transport.references import pretended_host

STEPS = 220


def layered() -> Model:
    """Return a model of many tensors, so that sizes make different buckets."""
    shapes = {f"layer{n}.{kind}": shape for n in range(4) for kind, shape in (("w", (40, 50)), ("b", (50,)))}
    return Model((name, values(n, 0, shape)) for n, (name, shape) in enumerate(shapes.items()))


@pytest.fixture(autouse=True)
def no_stored_fits(monkeypatch, tmp_path):
    monkeypatch.setenv("CLCOMM_CACHE_DIR", str(tmp_path))


def decide(comm, **options):
    """Run a model's synchronisations until the bucket size is decided; return Synchronizer and model."""
    model, sync = layered(), Synchronizer(comm, bucket_size="auto", **options)
    for step in range(STEPS):
        if sync.decisions():
            return sync, model
        set_gradients(model, comm.rank, step)
        sync.sync_gradients(model)
    raise AssertionError("no decision")


def test_no_bit_changes_during_tuning(comm):
    tuned, plain = layered(), layered()
    auto, fixed = Synchronizer(comm, bucket_size="auto"), Synchronizer(comm, bucket_size="1MiB")
    for step in range(STEPS):
        for model, sync in ((tuned, auto), (plain, fixed)):
            set_gradients(model, comm.rank, step)
            sync.sync_gradients(model)
        assert tuned.gradient_bits() == plain.gradient_bits()
    assert len(auto.decisions()) == 1 and fixed.decisions() == ()


def test_all_ranks_decide_alike_and_keep_it(several):
    sync, model = decide(several)
    (decision,) = sync.decisions()
    assert several.all_gather_object(decision.as_dict()) == [decision.as_dict()] * several.size
    assert decision.what == "bucket_size" and 2 <= len(decision.evidence) <= 6
    assert all(trial.measured_s > 0 and trial.predicted_s > 0 and trial.steps >= 9 for trial in decision.evidence)
    default, *others = decision.evidence
    last = [trial.name for trial in others if trial.steps == default.steps]
    is_default = "within the noise" in decision.reason or "far behind" in decision.reason
    assert decision.chosen in ([default.name] if is_default else last)
    plan = sync.bucket_plan(model)
    for step in range(5):
        set_gradients(model, several.rank, step)
        sync.sync_gradients(model)
    assert sync.bucket_plan(model) == plan and len(sync.decisions()) == 1


def test_a_size_that_is_given_later_holds(several):
    sync, model = decide(several)
    early = Synchronizer(several, bucket_size="auto")  # while it looks
    for each in (sync, early):
        each.sync_gradients(model)
        each.bucket_size = 9000
        several.add_observer(seen := Recorder())
        each.sync_gradients(model)
        several.remove_observer(seen)
        assert [event.nbytes for event in seen.events if event.label == "gradients"] == [8400, 8200, 8200, 8000]


def test_the_stats_buckets_are_those_of_the_choice(several):
    trying, model = Synchronizer(several, bucket_size="auto"), layered()
    for step in range(5):
        set_gradients(model, several.rank, step)
        trying.sync_gradients(model)
        assert several.stats.as_dict()["buckets"] == [] and not trying.decisions()
    sync, model = decide(several)
    before = sync.get_communication_stats()["total_allreduce_calls"]
    plan = sync.bucket_plan(model)
    for step in range(4):
        set_gradients(model, several.rank, step)
        sync.sync_gradients(model)
    rows = [row for row in several.stats.as_dict()["buckets"] if row["label"] == "gradients"]
    assert [(row["bucket"], row["calls"], row["bytes"]) for row in rows] == [
        (bucket.index, 4, 4 * bucket.nbytes) for bucket in plan
    ]
    assert sync.get_communication_stats()["total_allreduce_calls"] == before + 4 * len(plan)
    sync.bucket_size = 4000  # cut anew by hand
    set_gradients(model, several.rank, 0)
    sync.sync_gradients(model)
    assert {row["calls"] for row in several.stats.as_dict()["buckets"]} == {1}


@pytest.mark.mpi(min_size=2)
def test_the_decision_is_logged_once_on_rank_0(auto, caplog):
    with caplog.at_level(logging.INFO, logger="clcomm"):
        sync, _ = decide(auto)
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("bucket_size: ")]
    assert lines == ([str(sync.decisions()[0])] if auto.rank == 0 else [])


def test_a_world_of_one_has_nothing_to_try():
    sync, _ = decide(Communicator(transport="solo"))
    assert sync.decisions()[0].at_step == 0 and len(sync.decisions()[0].evidence) == 1


@pytest.mark.mpi(min_size=2)
def test_the_communicators_setting_is_taken(auto):
    comm = Communicator(auto.comm, bucket_size="auto")
    assert comm.bucket_size == 1 << 20
    model, sync = layered(), Synchronizer(comm)
    while not sync.decisions():
        set_gradients(model, comm.rank)
        sync.sync_gradients(model)
    comm.finalize()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(("compression", "tries"), [("fp16", True), ("int8", False), ("topk:0.1", False)])
def test_with_compression_sizes_are_tried_only_where_results_stay(auto, compression, tries):
    sync, _ = decide(auto, compression=compression)
    assert (len(sync.decisions()[0].evidence) > 1) == tries


@pytest.mark.mpi(min_size=2)
def test_per_tensor_is_left_alone(auto):
    model, sync = layered(), Synchronizer(auto, use_bucketing=False, bucket_size="auto")
    for step in range(5):
        set_gradients(model, auto.rank, step)
        sync.sync_gradients(model)
    assert len(sync.bucket_plan(model)) == 8 and sync.decisions() == ()


@pytest.mark.mpi(min_size=2)
def test_each_model_has_its_own(auto):
    one, other = layered(), Model([("w", np.zeros((30, 30), np.float32))])
    sync = Synchronizer(auto, bucket_size="auto")
    for step in range(STEPS):
        for model in (one, other):
            set_gradients(model, auto.rank, step)
            sync.sync_gradients(model)
    assert len(sync.decisions()) == 2


@pytest.mark.mpi(min_size=2)
def test_a_stored_fit_is_the_start(auto):
    auto.fold_with(None)
    stored = [MeasuredFit(name, auto.size, 1, Fit(Cost(1e-3, 2e-9), 0.0, 0.0, ())) for name in ("shared", "mpi")]
    if auto.rank == 0:
        costfile.store(stored)
    sync = Synchronizer(auto)
    cost = starting_cost(auto, sync.models.of(layered()).space)
    assert cost(1000) == pytest.approx(1e-3 + 2e-6)
    assert auto.stats.total("all_reduce", TUNING)["calls"] == 0


@pytest.mark.mpi(min_size=3)
def test_a_stored_fit_of_the_whole_job_on_several_hosts_is_the_start(monkeypatch):
    monkeypatch.setattr(mpi_communicators, "host_of", lambda comm: pretended_host("first-alone", comm))
    with Communicator() as comm:
        comm.fold_with(None)
        if comm.rank == 0:
            costfile.store([MeasuredFit("hierarchical", comm.size, 2, Fit(Cost(1e-3, 2e-9), 0.0, 0.0, ()))])
        cost = starting_cost(comm, Synchronizer(comm).models.of(layered()).space)
        assert cost(1000) == pytest.approx(1e-3 + 2e-6)
        assert comm.stats.total("all_reduce", TUNING)["calls"] == 0


@pytest.mark.mpi(min_size=2)
def test_a_stored_fit_of_other_sums_is_reported_and_measured_instead(auto, caplog):
    auto.fold_with(None)
    if auto.rank == 0:
        costfile.store([MeasuredFit("shared", auto.size, 1, Fit(Cost(1e3, 0.0), 0.0, 0.0, ()), "device")])
    cost = starting_cost(auto, Synchronizer(auto).models.of(layered()).space)
    assert cost(1 << 10) < 1e3 and auto.sums == "numpy"
    told = "clcomm tune measured sums by each rank's own device, here they are by NumPy: measured anew"
    assert (told in caplog.text) == (auto.rank == 0)
    auto.fold_with(lambda rows, out, divisor: None)
    assert auto.sums == "device" and starting_cost(auto, Synchronizer(auto).models.of(layered()).space)(1 << 10) == 1e3


@pytest.mark.mpi(min_size=2)
def test_a_damaged_store_is_reported_and_measured_instead(auto, caplog):
    if auto.rank == 0:
        path = costfile.path_of_host()
        path.parent.mkdir(parents=True)
        path.write_text("{")
    model, sync = layered(), Synchronizer(auto)
    cost = starting_cost(auto, sync.models.of(model).space)
    assert cost(1 << 20) >= cost(1 << 10) > 0
    assert auto.all_gather_object(cost(1 << 16)) == [cost(1 << 16)] * auto.size
    assert auto.stats.total("all_reduce", TUNING)["calls"] > 0
    assert ("writes it again" in caplog.text) == (auto.rank == 0)


def test_measuring_leaves_the_averages_which_a_queued_update_may_still_read(several, monkeypatch):
    model, sync = layered(), Synchronizer(several)
    set_gradients(model, several.rank)
    sync.sync_gradients(model)
    space = sync.models.of(model).space
    set_gradients(model, several.rank, 1)
    space.adapter.pull_gradients(sync.bucket_plan(model)[0])  # the next ones, whose mean is another
    before, read = space.arrays.reduced.copy(), []

    class Queued:
        """The update of a device that has not come to it yet."""

        def wait(self) -> None:
            read.append(space.arrays.reduced.copy())

    monkeypatch.setattr(space.adapter, "mark", Queued)
    several.barrier()
    starting_cost(several, space)
    assert several.stats.total("all_reduce", TUNING)["calls"] > 0
    (seen,) = read
    assert before.any() and seen.tobytes() == before.tobytes() == space.arrays.reduced.tobytes()


def test_other_words_are_refused(comm):
    with pytest.raises(ArgumentError, match="bucket_size: expected a positive number of bytes"):
        Synchronizer(comm, bucket_size="automatic")
