"""Traces as users make them: an option of an example, and what is left of a job that was killed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from clcomm.base.errors import ArgumentError
from clcomm.tools.cli import main
from tests.faults.launch import HUNG_S, clean_environment, mpiexec
from tests.trace import killed, rules

ROOT = Path(__file__).resolve().parents[2]
COUNTERS = ("loss", "images/s", "bytes")
SYNTHETIC = ["examples.mnist", "--data", "synthetic", "--model", "mlp", "--quiet"]


def run(ranks: int, module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [mpiexec(), "-n", str(ranks), sys.executable, "-m", module, *arguments], env=clean_environment(),
        capture_output=True, text=True, timeout=HUNG_S, check=False, stdin=subprocess.DEVNULL, cwd=ROOT,
    )  # fmt: skip


def test_a_training_run_with_everything_in_it(tmp_path):
    path = tmp_path / "trace.json.gz"
    saved = str(tmp_path / "saved.npz")
    ended = run(
        2, *SYNTHETIC, "--max-steps", "6", "--bucket-size", "256KiB", "--checkpoint", saved, "--trace", str(path)
    )
    assert ended.returncode == 0, ended.stderr
    trace = rules.load(path)
    for rank in range(2):
        names = [event["name"] for event in rules.on_thread(trace, "steps", rank)]
        assert names.count("step") == names.count("forward_backward") == names.count("optimizer") == 6
        assert {"epoch", "checkpoint", "evaluate"} <= set(names)
        assert len(rules.on_thread(trace, "data", rank)) >= 6
        buckets = [
            e for e in rules.on_thread(trace, "communication", rank) if e["name"].startswith("all_reduce bucket")
        ]
        assert len(buckets) == 12 and all("flow_in" in event for event in buckets)
        inner = [e["name"] for e in rules.on_thread(trace, "communication", rank)]
        assert inner.count("wait") + inner.count("came last") == inner.count("transfer")
        steps = [e["args"] for e in rules.on_thread(trace, "steps", rank) if e["name"] == "step"]
        assert [(each["step"], each["epoch"]) for each in steps] == [(number, 1) for number in range(1, 7)]
        assert [e["args"]["step"] for e in buckets] == [number for number in range(1, 7) for _ in range(2)]
        assert all(e["args"]["algbw GB/s"] > 0 for e in buckets)
        of_rank = [e for e in trace["traceEvents"] if e["ph"] == "C" and e["pid"] == 1000 + rank]
        values = {name: [e["args"]["of this rank"] for e in of_rank if e["name"] == name] for name in COUNTERS}
        assert values["loss"] == [each["loss"] for each in steps]
        assert values["images/s"] == [each["images/s"] for each in steps]
        whole = [
            e["args"]["bytes"] for e in rules.on_thread(trace, "communication", rank) if "bytes" in e.get("args", ())
        ]
        assert values["bytes"][-1] == sum(whole)
        kernels = {event["name"] for event in rules.on_thread(trace, "device", rank)}
        assert "gemm" in kernels and any(name.startswith("sgd") for name in kernels)


def test_what_a_run_reports_as_hidden_is_what_its_trace_shows(tmp_path):
    report, path = tmp_path / "report.json", tmp_path / "trace.json"
    ended = run(
        2, *SYNTHETIC, "--max-steps", "6", "--no-eval", "--bucket-size", "64KiB", "--overlap", "on",
        "--report", str(report), "--trace", str(path),
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    trace, records = rules.load(path), json.loads(report.read_text())["ranks"]
    for rank, record in enumerate(records):
        reported_ns = sum(tally["hidden_ns"] for tally in record["stats"]["tallies"])
        assert reported_ns > 0
        assert abs(rules.hidden_ns(rules.on_thread(trace, "communication", rank)) / reported_ns - 1) < 0.001


def test_a_bad_limit_is_one_line(tmp_path):
    ended = run(2, *SYNTHETIC, "--trace", str(tmp_path / "trace.json"), "--trace-limit", "much")
    assert ended.returncode == 2
    assert ended.stderr.startswith("clcomm: --trace-limit: expected a positive number of bytes")
    assert ended.stderr.count("\n") == 1


def test_a_killed_job_leaves_a_trace_of_all_ranks(tmp_path, capsys):
    path = tmp_path / "trace.json"
    ended = run(2, "tests.trace.killed", str(path))
    assert ended.returncode != 0
    assert not path.exists()
    assert main(["trace", str(path)]) == 0
    assert (
        capsys.readouterr().out == f"{path}: written from the parts of rank 0, 1; open it at https://ui.perfetto.dev\n"
    )
    trace = rules.load(path)
    for rank in range(2):
        assert len(rules.on_thread(trace, "steps", rank)) >= killed.STEPS - 1
    with pytest.raises(ArgumentError):
        main(["trace"])
