"""The table of policies, from reports of runs that are done: the best rate of each, its bytes, and the bars."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import policies
from benchmarks.harness import Report

#: Loss, operation and bytes of a run of 10 steps on 4 ranks, by policy and rate.
RUNS = {
    ("none", 0.001): (2.0, "all_reduce", 40_000), ("none", 0.002): (1.8, "all_reduce", 40_000),
    ("diloco:h=100", 0.001): (1.818, "all_reduce", 400), ("diloco:h=100", 0.002): (1.9, "all_reduce", 400),
    ("demo:32", 0.001): (1.9, "all_reduce", 1_000), ("demo:32", 0.002): (2.1, "all_reduce", 1_000),
}  # fmt: skip


def test_the_best_rate_of_each_policy_is_compared_with_plains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for (policy, rate), (loss, operation, nbytes) in RUNS.items():
        size = 40_000 if policy.startswith("demo") else nbytes
        rows = [
            {"operation": operation, "label": "gradients", "wire_bytes": nbytes, "bytes": size},
            {"operation": "broadcast", "label": "parameters", "wire_bytes": 9, "bytes": 9},
        ]
        report = {"test_loss": loss, "steps": 10, "communication": {"operations": rows}}
        (tmp_path / f"{policy}-{rate:g}-2000-4-3.json").write_text(json.dumps(report))
    given = ["--kept", str(tmp_path), "--rates", "0.001", "0.002", "--policies", "diloco:h=100", "demo:32"]
    monkeypatch.setattr(sys, "argv", ["policies", *given])
    reports: list[Report] = []
    monkeypatch.setattr(policies.harness, "conclude", lambda report, console, record: reports.append(report))
    policies.main()
    assert reports[0].grids[0].rows == [
        ("none", "0.002", "1.8000", "1.000x", "6,000", "1/1"),
        ("diloco:h=100", "0.001", "1.8180", "1.010x", "60", "1/100"),
        ("demo:32", "0.001", "1.9000", "1.056x", "300", "1/20"),
    ]
    assert [(bar.what, bar.reached) for bar in reports[0].bars] == [
        ("diloco:h=100: held-out loss to plain", True), ("diloco:h=100: bytes to plain", True),
        ("demo:32: held-out loss to plain", False),
    ]  # fmt: skip
