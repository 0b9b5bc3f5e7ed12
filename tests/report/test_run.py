"""A run's own files, from the ranks that wrote them: sums that come out, and the same whole in any order."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from clcomm import Communicator, Synchronizer
from clcomm.base.errors import ArgumentError
from clcomm.insight.report import build, gather_records, read_runs, run_document, write_document
from clcomm.insight.report.record import layout_of
from tests.numpy_models import Model

STEPS = 12
LATE_S = 0.03


@pytest.fixture
def place(comm, tmp_path) -> Path:
    """Return a directory that all ranks see."""
    return Path(comm.broadcast_object(str(tmp_path)))


def trained(comm: Communicator, tensors: int, elements: int):
    """Synchronise a model a few times; return its plan, each time by a clock of our own, and its parts' sum.

    Ranks come late in turns. So the others wait longer than a core that is taken from them between two parts costs.
    """
    model = Model((f"w{index}", np.ones(elements >> index, np.float32)) for index in range(tensors))
    for parameter in model.parameters.values():
        parameter.grad = np.full(parameter.data.shape, comm.rank, np.float32)
    sync = Synchronizer(comm, bucket_size="512KiB")
    sync.broadcast_parameters(model)
    plan = sync.bucket_plan(model)
    sync.sync_gradients(model)
    comm.stats.reset()
    measured, told = [], []
    for step in range(STEPS):
        comm.barrier()
        time.sleep(LATE_S if step % comm.size == comm.rank else 0)
        began = time.perf_counter()
        sync.sync_gradients(model)
        measured.append(time.perf_counter() - began)
        told.append(sum(comm.stats.total("all_reduce", "gradients")[f"{part}_s"] for part in PARTS))
    return plan, measured, [after - before for before, after in zip([0.0, *told], told, strict=False)]


PARTS = ("pack", "wait", "transfer", "unpack")


@pytest.mark.mpi(min_size=2)
def test_parts_add_up_to_what_a_clock_says_and_bytes_to_the_layout(auto):
    plan, measured, told = trained(auto, tensors=2, elements=1 << 21)
    shares = [part / whole for part, whole in zip(told, measured, strict=True)]
    assert max(shares) <= 1
    # A rank that loses its core between two parts loses that time to none of them: hence not of each step.
    assert max(shares) > 0.98
    counts = auto.stats.as_dict()
    buckets = [row for row in counts["buckets"] if row["label"] == "gradients"]
    assert [row["bytes"] for row in buckets] == [STEPS * bucket.nbytes for bucket in plan]
    assert [sum(each) for each in layout_of(plan)] == [bucket.nbytes for bucket in plan]
    (whole,) = (row for row in counts["operations"] if row["label"] == "gradients")
    for name in ("seconds", "pack_s", "wait_s", "transfer_s", "unpack_s", "bytes", "calls"):
        assert sum(row[name] for row in buckets) == pytest.approx(whole[name])


@pytest.mark.mpi(min_size=1)
def test_ranks_files_make_the_whole_that_one_file_is(comm, place):
    plan, measured, _ = trained(comm, tensors=4, elements=1 << 12)
    records = gather_records(comm, steps=STEPS, training_s=sum(measured))
    merged = comm.merged_stats().as_dict()
    document = run_document(records, model="arrays", steps=STEPS, layout=layout_of(plan), train_loss=float("nan"))
    write_document(str(place / "whole.json"), document, comm)
    write_document(str(place / "rank-{rank}.json"), {**document, "model": f"rank {comm.rank}'s own"}, comm)
    whole = read_runs([str(place / "whole.json")])
    parts = read_runs([str(place / f"rank-{rank}.json") for rank in reversed(range(comm.size))])
    assert parts.problems == [] and parts.ranks == whole.ranks and len(parts.ranks) == comm.size
    assert whole.stats().as_dict() == parts.stats().as_dict()
    gradients = [row for row in merged["operations"] if row["label"] == "gradients"]
    assert gradients == [row for row in whole.stats().as_dict()["operations"] if row["label"] == "gradients"]
    assert parts.figures["model"] == "rank 0's own"  # figures of the whole are those of rank 0
    report = build(whole)
    assert not any(table.key == "checks" for table in report.tables)
    assert str(comm.size) in report.title


@pytest.mark.mpi(min_size=1)
def test_a_file_that_cannot_be_written_is_an_error_on_every_rank(comm, place):
    (place / "file").write_text("")
    document = run_document(gather_records(comm))
    for name in ("file/run.json", "file/run-{rank}.json"):
        with pytest.raises(ArgumentError, match=r"^--report: expected a file to write, got "):
            write_document(str(place / name), document, comm)
