"""Runs that never were, with everything in them that a report can show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from clcomm.comm.stats.comm_stats import Collective, CommStats, Phase
from clcomm.insight.report.record import run_document

#: Bytes of each bucket's tensors.
LAYOUT = [[40, 5120, 512], [802816], [128], [18432], [64, 576]]
SLOW_RANK, STEPS = 2, 60
VERSIONS = {"clcomm": "0", "Python": "3.12.1", "MPI": "MPICH 5.0.2", "numpy": "2", "mpi4py": "4", "pyopencl": "2026"}


def stats_of_rank(rank: int, ranks: int, *, steps: int = STEPS, overlap: bool = False) -> CommStats:
    """Return a rank's stats: rank 2 comes last in most reductions, so the others wait for it."""
    rng, own, stats = np.random.default_rng(7), np.random.default_rng(rank), CommStats(ranks)
    sizes, share = [sum(bucket) for bucket in LAYOUT], 4 if overlap else 1
    for step in range(steps):
        for bucket, nbytes in enumerate(sizes):
            late_s = float(rng.lognormal(-8, 0.5))
            last = min(SLOW_RANK, ranks - 1) if rng.random() < 0.7 else int(rng.integers(ranks))
            wait_s = 2e-6 if rank == last else late_s + float(own.lognormal(-10, 0.3))
            seconds = wait_s + 20e-6 + nbytes * 0.4e-9 * float(own.lognormal(0, 0.1))
            stats.collective_finished(
                Collective(
                    "all_reduce", "gradients", nbytes, seconds, "shared", step * len(sizes) + bucket, bucket=bucket,
                    wait_s=wait_s / share, exposed_s=seconds / share if overlap else None, last_rank=last,
                    late_s=late_s,
                )
            )  # fmt: skip
            stats.phase_finished(Phase("pack", 0.0, 4e-6, "gradients", bucket))
            stats.phase_finished(Phase("unpack", 0.0, 3e-6, "gradients", bucket))
        stats.phase_finished(Phase("forward_backward", 0.0, 4e-3))
        stats.phase_finished(Phase("optimizer", 0.0, 2e-4))
    stats.collective_finished(Collective("broadcast", "parameters", 827688, 0.001, "shared", 0))
    stats.collective_finished(Collective("all_gather", "checks", 64, 2e-5, "mpi", 1))
    return stats


def record(rank: int, ranks: int, stats: CommStats, **figures: Any) -> dict[str, Any]:
    """Return a rank's record."""
    steps = STEPS
    usual = {
        "run": "5eed", "rank": rank, "host": 0, "host_name": "north", "cpus": "0-7", "sums": "device",
        "device_in_caller": True, "cpu_s": steps * 6e-3, "core_waits_s": None,
        "device": "cpu basic", "driver": "pocl 7", "versions": dict(VERSIONS), "timeline": None,
        "kernel_step_s": 3e-3, "launch_step_s": 5e-4,
        "peak_rss_bytes": (150 + rank) << 20,
        "device_peak_bytes": 13 << 20, "steps": steps, "training_s": steps * 7e-3, "data_wait_s": steps * 1e-4,
        "step_p50_s": 7e-3, "replica_checks": 6, "replica_mismatches": 0,
    }  # fmt: skip
    return {**usual, **figures, "stats": stats.state()}


def document(ranks: int = 4, **figures: Any) -> dict[str, Any]:
    """Return a whole run's document, as JSON would give it back."""
    overlap = figures.pop("overlap", False)
    records = [record(rank, ranks, stats_of_rank(rank, ranks, overlap=overlap)) for rank in range(ranks)]
    usual = {
        "model": "convnet", "engine": "native", "dataset": "mnist", "batch_size": 32, "grad_accumulation": 1,
        "bucket_size": 16384, "steps": STEPS, "images_per_s": 18000.0, "train_loss": 0.2, "test_accuracy": 0.9833,
        "test_loss": 0.05, "step_ms": {"p50": 7.0, "p95": 9.0}, "training_s": 0.42, "data_wait_s": 0.006,
        "overhead_share": 0.1, "optimizer_state_bytes": 829440, "layout": LAYOUT,
    }  # fmt: skip
    found = run_document(records, **{**usual, **figures})
    found["ceilings"] = [
        {"transport": "shared", "sums": "device", "alpha_s": 15e-6, "beta_s_per_byte": 0.3e-9, "median_error": 0.1}
    ]
    return json.loads(json.dumps(found))


def apart(whole: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a document for each rank."""
    return [{**whole, "ranks": [each]} for each in whole["ranks"]]


def written(folder: Path, documents: list[dict[str, Any]]) -> list[str]:
    """Write documents to files and return their names."""
    names = [str(folder / f"run-{number}.json") for number in range(len(documents))]
    for name, content in zip(names, documents, strict=True):
        Path(name).write_text(json.dumps(content))
    return names
