"""Runs drawn from parts that are known: what takes one rank longer, and what a step of each rank consists of."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any

from clcomm.comm.stats.comm_stats import Collective, CommStats, Phase
from clcomm.insight.report.record import run_document

SIZES = (40, 5_632, 802_816)
STEPS = 30
LONGER_S = 3e-3
#: What a cause makes longer, and what the report's sentence says of it.
CAUSES = {
    "loader": "its loader is slow, it waits {own} of a step for data, the others {others}",
    "kernels": "its kernels take {own} of a step, the others' {others}",
    "launches": "its Python and launches take {own} of a step, the others' {others}",
    "core": "other processes run on its core, it was ready to run without one for {own} of a step",
    "optimizer": "optimizer takes it {own} of a step, the others {others}",
    "rest": "the rest takes it {own} of a step, the others {others}",
}


@dataclass(frozen=True)
class Case:
    """A run to draw: its ranks, which of them is slow and why ("" for none), and how gradients travel."""

    ranks: int
    cause: str = ""
    slow: int = 0
    overlap: bool = False
    compressed: bool = False
    transport: str = "shared"
    joins: bool = False
    cores: int = 8
    seed: int = 0

    @property
    def is_told(self) -> bool:
        """Whether waiting is told from moving: not in the background through MPI."""
        return not (self.overlap and self.transport == "mpi")


@dataclass
class Rank:
    """A rank's stats as its observers are told, and beside them the same seconds by part, added up here."""

    case: Case
    rank: int
    stats: CommStats = field(init=False)
    parts: dict[str, float] = field(default_factory=dict)
    hidden_s: float = 0.0
    training_s: float = 0.0
    core_s: float = 0.0

    def __post_init__(self) -> None:
        self.stats = CommStats(self.case.ranks)

    def add(self, part: str, seconds: float) -> None:
        self.parts[part] = self.parts.get(part, 0.0) + seconds

    def phase(self, name: str, seconds: float, communication_s: float = 0.0, bucket: int = -1) -> None:
        label = "gradients" if bucket >= 0 else ""
        self.stats.phase_finished(Phase(name, 0.0, seconds, label, bucket, communication_s))


def own_work(case: Case, rank: int, rng: random.Random) -> dict[str, float]:
    """Return what a rank does in a step before it is ready to reduce."""
    work = {"loader": 1e-4, "kernels": 3e-3, "launches": 8e-4, "core": 5e-5, "optimizer": 3e-4, "rest": 2e-4}
    work = {name: seconds * rng.uniform(0.98, 1.02) for name, seconds in work.items()}
    if case.cause and rank == case.slow:
        work[case.cause] += LONGER_S
    return work


def drawn(case: Case) -> tuple[dict[str, Any], list[Rank]]:
    """Return a run's document, as JSON gives it back, and what its ranks did."""
    rng, ranks = random.Random(repr(case)), [Rank(case, rank) for rank in range(case.ranks)]
    for step in range(STEPS):
        works = [own_work(case, each.rank, rng) for each in ranks]
        lengths = [sum(work.values()) for work in works]
        last = max(range(case.ranks), key=lengths.__getitem__)
        late_s = max(lengths) - sorted(lengths)[-2] if case.ranks > 1 else 0.0
        for each, work, length in zip(ranks, works, lengths, strict=True):
            take_step(each, work, max(lengths) - length, last if case.ranks > 1 else -1, late_s, step, rng)
    records = [record_of(case, each) for each in ranks]
    figures = {
        "model": "convnet", "dataset": "mnist", "batch_size": 32, "bucket_size": 1 << 20, "steps": STEPS,
        "images_per_s": 1e4, "layout": [[size] for size in SIZES], "settings": {"transport": case.transport},
    }  # fmt: skip
    return json.loads(json.dumps(run_document(records, **figures))), ranks


def take_step(
    each: Rank, work: dict[str, float], wait_s: float, last: int, late_s: float, step: int, rng: random.Random
) -> None:
    """Let a rank work, wait for the others in the first collective, and reduce."""
    case = each.case
    moving = {True: "compress, move and add", False: "move and add"}[case.compressed]
    moving = moving if case.ranks > 1 else "communication"
    computing_s = work["kernels"] + work["launches"]
    for part, seconds in (("wait for data", work["loader"]), ("forward and backward", computing_s),
                          ("optimizer", work["optimizer"]), ("wait for a core", work["core"]),
                          ("the rest", work["rest"])):  # fmt: skip
        each.add(part, seconds)
    each.core_s += work["core"]
    within_s, exposed_all_s = 0.0, 0.0  # of communication: in backward, and in all
    if case.joins:
        agreeing_s = 2e-5
        each.stats.collective_finished(
            Collective("all_reduce", "checks", 16, wait_s + agreeing_s, case.transport, step, wait_s=wait_s)
        )
        each.add("wait for ranks", wait_s)
        each.add("checks and join", agreeing_s)
        exposed_all_s, wait_s = wait_s + agreeing_s, 0.0
    for bucket, size in enumerate(SIZES):
        transfer_s = (2e-5 + size * 3e-10) * rng.uniform(0.9, 1.1)
        exposed_s = transfer_s + (wait_s if bucket == 0 else 0.0)
        hidden_s = transfer_s * 4 if case.overlap else 0.0
        told_s = exposed_s - transfer_s if case.is_told else None
        each.stats.collective_finished(Collective(
            "all_reduce", "gradients", size, exposed_s + hidden_s, case.transport, step * len(SIZES) + bucket,
            wire_nbytes=size // 2 if case.compressed else None, bucket=bucket, wait_s=told_s,
            exposed_s=exposed_s if case.overlap else None, last_rank=last, late_s=late_s if bucket == 0 else 0.0,
        ))  # fmt: skip
        for name, seconds in (("pack", 4e-6), ("unpack", 3e-6)):
            each.phase(name, seconds, bucket=bucket)
            each.add(name, seconds)
        if case.is_told:
            each.add("wait for ranks", exposed_s - transfer_s)
            each.add(moving, transfer_s)
        else:
            each.add("wait or move", exposed_s)
        each.hidden_s += hidden_s
        exposed_all_s += exposed_s + 7e-6
        within_s += exposed_s + 7e-6 if case.overlap and bucket == 0 else 0.0
    each.phase("data", work["loader"])
    each.phase("forward_backward", computing_s + work["core"] + within_s, within_s)
    each.phase("sync", exposed_all_s - within_s, exposed_all_s - within_s)
    each.phase("optimizer", work["optimizer"])
    step_s = sum(work.values()) + exposed_all_s
    each.phase("step", step_s, exposed_all_s)
    each.training_s += step_s


def record_of(case: Case, each: Rank) -> dict[str, Any]:
    waits = {"data": 0.0, "forward_backward": each.core_s, "sync": 1.0, "optimizer": 0.0}
    longer_s = {name: LONGER_S if case.cause == name and case.slow == each.rank else 0.0 for name in CAUSES}
    return {
        "run": "5eed", "rank": each.rank, "host": 0, "host_name": "north", "cpus": f"0-{case.cores - 1}",
        "sums": "device", "device_in_caller": True, "peak_rss_bytes": 150 << 20, "device_peak_bytes": 13 << 20,
        "steps": STEPS, "training_s": each.training_s, "data_wait_s": each.parts["wait for data"],
        "cpu_s": each.training_s, "core_waits_s": waits, "kernel_step_s": 3e-3 + longer_s["kernels"],
        "launch_step_s": 8e-4 + longer_s["launches"], "step_p50_s": 7e-3, "replica_checks": 1, "replica_mismatches": 0,
        "stats": each.stats.state(),
    }  # fmt: skip
