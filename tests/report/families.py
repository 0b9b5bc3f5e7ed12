"""Runs of every kind that a report may be of, as drawn events: ranks, buckets, and what was switched on."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from clcomm.comm.stats.comm_stats import Collective, CommStats, Phase
from clcomm.insight.report.last_steps import LastSteps
from clcomm.insight.report.record import run_document
from clcomm.insight.report.recording import read_runs
from clcomm.insight.report.report import Report, build
from tests.report.runs import record
from training.history import StepHistory
from training.metrics import StepRecord


@dataclass(frozen=True)
class Kind:
    """What is special about a run; the defaults are an ordinary one in shared memory."""

    name: str
    steps: int = 40
    buckets: int = 4
    transport: str = "shared"
    knows_wait: bool = True
    overlap: bool = False
    wire: float = 1.0
    sharded: bool = False
    in_caller: bool = True
    scale: float = 1.0
    missing: bool = False
    timings_alone: bool = False
    loss: float = 2.3


KINDS = (
    Kind("ordinary"),
    Kind("per tensor", buckets=20),
    Kind("one bucket", buckets=1),
    Kind("overlap", overlap=True),
    Kind("overlap through MPI", overlap=True, transport="mpi", knows_wait=False),
    Kind("through MPI", transport="mpi", knows_wait=False),
    Kind("compression", wire=0.5),
    Kind("overlap and compression", overlap=True, wire=0.1),
    Kind("sharded optimizer", sharded=True),
    Kind("a device that computes by itself", in_caller=False),
    Kind("one step", steps=1),
    Kind("three steps", steps=3),
    Kind("long", steps=700),
    Kind("slow", scale=3000.0),
    Kind("fast", scale=0.002),
    Kind("a rank's file missing", missing=True),
    Kind("timings alone", timings_alone=True),
    Kind("loss that is no number", loss=float("nan")),
)


def reported(kind: Kind, ranks: int, folder: Path) -> Report:
    """Return the report of a run of a kind."""
    path = folder / "run.json"
    path.write_text(json.dumps(drawn(kind, ranks)))
    return build(read_runs([str(path)]))


def drawn(kind: Kind, ranks: int) -> dict[str, Any]:
    """Return a run's document, as JSON would give it back."""
    rng = np.random.default_rng([ranks, len(kind.name)])
    sizes = [int(size) for size in 10 ** rng.uniform(2, 6, kind.buckets)]
    records, histories = zip(*(_rank(kind, rank, ranks, sizes) for rank in range(ranks)), strict=True)
    kept = records[:-1] if kind.missing and ranks > 1 else records
    found = run_document(
        list(records), model="convnet", engine="native", dataset="mnist", batch_size=32, grad_accumulation=1,
        bucket_size=1 << 16, steps=kind.steps, images_per_s=18000.0, train_loss=0.25, test_accuracy=0.98,
        test_samples=10_000, step_ms={"p50": 7.0, "p95": 9.0}, layout=[[size] for size in sizes],
        history=histories[0],
    )  # fmt: skip
    found["ranks"] = [each for each in found["ranks"] if each["rank"] < len(kept)]
    if kind.timings_alone:
        for name in ("date", "history"):
            found.pop(name)
        for each in found["ranks"]:
            for name in ("timeline", "versions", "device", "driver", "cpus", "core_waits_s", "cpu_s"):
                each.pop(name)
    return json.loads(json.dumps(found, default=str).replace("NaN", "null"))


def _rank(kind: Kind, rank: int, ranks: int, sizes: list[int]) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return a rank's record and its history."""
    stats, last_steps, history = CommStats(ranks), LastSteps(), StepHistory()
    shared, own = np.random.default_rng(5), np.random.default_rng(rank)
    clock = 100.0
    began = clock
    for step in range(kind.steps):
        last = int(shared.integers(ranks))
        for event in _step(kind, clock, sizes, last, rank, own):
            for observer in (stats, last_steps):
                (observer.phase_finished if isinstance(event, Phase) else observer.collective_finished)(event)
        seconds = event.seconds
        clock += seconds * 1.01
        history.step_finished(StepRecord(step + 1, 0, 0, 32, kind.loss * 0.99**step, 0.1, seconds, 0.0))
    found = record(
        rank, ranks, stats, steps=kind.steps, training_s=clock - began, data_wait_s=kind.steps * kind.scale * 1e-4,
        device_in_caller=kind.in_caller, timeline=last_steps.texts(0), cpus=f"{rank}",
    )  # fmt: skip
    return found, history.as_dict()


def _step(
    kind: Kind, begin_s: float, sizes: list[int], last: int, rank: int, rng: np.random.Generator
) -> list[Collective | Phase]:
    """Return a step's events; its last one is the phase "step"."""
    ms = 1e-3 * kind.scale
    events: list[Collective | Phase] = [Phase("data", begin_s, 0.1 * ms)]
    computing_s = float(rng.uniform(3, 5)) * ms
    at = begin_s + 0.1 * ms
    events.append(Phase("forward_backward", at, computing_s))
    overlapped = at + computing_s / 2
    at += computing_s
    sync_from, number = at, len(sizes)
    for bucket, nbytes in enumerate(sizes):
        if not kind.overlap:
            events.append(Phase("pack", at, 0.02 * ms, "gradients", bucket))
            at += 0.02 * ms
        wait_s = 0.001 * ms if rank == last else float(rng.uniform(0.2, 1.5)) * ms
        move_s = 0.05 * ms + nbytes * 0.4e-9 * kind.scale
        events.append(_reduction(kind, bucket, nbytes, at, wait_s, move_s, last, overlapped))
        at += wait_s + move_s
        overlapped += computing_s / 2 / number
    events.append(Phase("sync", sync_from, at - sync_from, communication_s=at - sync_from))
    events.append(Phase("optimizer", at, 0.4 * ms))
    events.append(Phase("step", begin_s, at + 0.5 * ms - begin_s))
    return events


def _reduction(
    kind: Kind, bucket: int, nbytes: int, at: float, wait_s: float, move_s: float, last: int, hidden_from: float
) -> Collective:
    common: dict[str, Any] = {
        "bucket": bucket, "wire_nbytes": None if kind.wire == 1 else int(nbytes * kind.wire),
        "wait_s": wait_s if kind.knows_wait else None, "last_rank": last if kind.knows_wait else -1, "late_s": wait_s,
    }  # fmt: skip
    if kind.sharded:
        common["bucket"] = -1
    operation = "reduce_scatter" if kind.sharded else "all_reduce"
    if not kind.overlap:
        return Collective(operation, "gradients", nbytes, wait_s + move_s, kind.transport, 0, began_s=at, **common)
    waits = ((at, at + wait_s),) if kind.knows_wait else ()
    return Collective(
        operation, "gradients", nbytes, at + wait_s + move_s - hidden_from, kind.transport, 0, began_s=hidden_from,
        exposed_s=wait_s + move_s, exposed=((at, at + wait_s + move_s),), waits=waits, **common,
    )  # fmt: skip
