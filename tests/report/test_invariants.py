"""Runs with drawn options: whatever a run is told, the figures of its report agree with each other and with counts."""

from __future__ import annotations

import io
import json
import os
import random
from typing import Any

import pytest
from rich.console import Console

from clcomm import Communicator
from clcomm.base.errors import ArgumentError
from clcomm.comm.stats.comm_stats import CommStats, bus_factor
from clcomm.insight.report.recording import Run, parse
from clcomm.insight.report.report import build
from clcomm.insight.report.step_parts import parts_of
from tests.report.conftest import table
from training import command_line
from training.data.datasets import load_synthetic
from training.options import TrainingOptions
from training.session import Session

#: What is drawn for each option; the first stands for most of the runs.
CHOICES: dict[str, list[str]] = {
    "--transport": ["auto", "mpi"],
    "--overlap": ["off", "on", "auto"],
    "--compression": ["none", "fp16", "int8", "topk:0.05", "powersgd:2"],
    "--grad-accumulation": ["1", "3"],
    "--uneven-inputs": ["pad", "join"],
    "--bucket-size": ["4KiB", "1MiB", "auto"],
    "--no-bucketing": ["", "yes"],
    "--zero": ["0", "1", "2", "3"],
    "--clip-norm": ["", "1.0"],
    "--check-replicas": ["0", "5"],
}
STEPS, SAMPLES = 30, 700
DRAWS = 400 if os.environ.get("CLCOMM_REPORT_FAMILY") else 10
#: Clocks are read one after the other: what is read first may miss so much a step.
NEAR_S = 2e-4 * STEPS
INNER = ("data", "forward_backward", "sync", "loss", "clipping", "optimizer")


def arguments(seed: int) -> list[str]:
    rng, found = random.Random(seed), []
    for option, values in CHOICES.items():
        value = rng.choice(values) if rng.random() < 0.5 else values[0]
        found += [option] if value == "yes" else [option, value] if value else []
    return found


def trained(comm: Communicator, chosen: list[str], name: str) -> dict[str, Any] | None:
    """Return the document that rank 0 of a short run writes, on every rank; None where options exclude each other."""
    words = [
        *chosen, "--model", "mlp", "--batch-size", "8", "--max-steps", str(STEPS), "--no-eval", "--quiet",
        "--data", "synthetic", "--device", "cpu", "--report", name,
    ]  # fmt: skip
    try:
        options = TrainingOptions(**vars(command_line.parser("test", "", TrainingOptions).parse_args(words)))
        session = Session(options, comm, load_synthetic(SAMPLES, 16, shape=(1, 8, 8)), Console(file=io.StringIO()))
        for _ in session.steps():
            pass
        result = session.finish()
    except ArgumentError:
        return None
    return json.loads(json.dumps(comm.broadcast_object(result.as_report(options, comm, "synthetic"))))


def check_phases(document: dict[str, Any]) -> None:
    """What is communicated in a phase is in the phase around it, and no phase is longer than that."""
    rows = {row["phase"]: row for row in document["communication"]["phases"] if not row["label"]}
    step, inner = rows["step"], [rows[name] for name in INNER if name in rows]
    assert step["calls"] == document["steps"]
    assert all(0 <= row["communication_s"] <= row["seconds"] + 1e-9 for row in rows.values())
    assert sum(row["seconds"] for row in inner) <= step["seconds"] + NEAR_S
    within_s = sum(row["communication_s"] for row in inner)
    assert step["communication_s"] == pytest.approx(within_s, abs=NEAR_S)
    assert rows["epoch"]["communication_s"] >= step["communication_s"] - NEAR_S
    for record in document["ranks"]:
        own = {row[0]: row[4] * 1e-9 for row in record["stats"]["phases"] if not row[1]}
        assert own["step"] == pytest.approx(record["training_s"]) and record["cpu_s"] > 0
        assert own["data"] == pytest.approx(record["data_wait_s"], abs=NEAR_S)
        waits = record["core_waits_s"] or {}
        assert all(0 <= seconds <= own[name] + 1e-6 for name, seconds in waits.items())


def check_operations(document: dict[str, Any]) -> None:
    """Parts of an operation add up to it, and bandwidths are its bytes over its time, or null where nothing moves."""
    stats, ranks = document["communication"], document["world_size"]
    for row in [*stats["operations"], *stats["buckets"]]:
        parts_s = row["wait_s"] + row["transfer_s"] + row["wait_unknown_s"]
        assert row["exposed_s"] == pytest.approx(parts_s, abs=1e-9)
        assert row["seconds"] == pytest.approx(row["exposed_s"] + row["hidden_s"], abs=1e-9)
        assert min(row[name] for name in ("wait_s", "transfer_s", "wait_unknown_s", "hidden_s", "exposed_s")) >= -1e-9
        if ranks == 1 or not row["bytes"]:
            assert row["algbw_bytes_per_s"] is row["busbw_bytes_per_s"] is None
        else:
            algbw = row["bytes"] / row["seconds"]
            assert row["algbw_bytes_per_s"] == pytest.approx(algbw)
            assert row["busbw_bytes_per_s"] == pytest.approx(algbw * bus_factor(row["operation"], ranks))
    whole = [row for row in stats["operations"] if row["label"] == "gradients"]
    parts = [row for row in stats["buckets"] if row["label"] == "gradients"]
    for name in ("calls", "bytes", "wire_bytes", "seconds", "wait_s", "pack_s"):
        assert sum(row[name] for row in parts) <= sum(row[name] for row in whole) * (1 + 1e-9) + 1e-9


def check_counts(document: dict[str, Any], chosen: list[str]) -> None:
    """Gradients' bytes are the layout's, once a step; they are sent as they are, or fewer where compressed."""
    stats, steps = document["communication"], document["steps"]
    rows = [row for row in stats["operations"] if row["label"] == "gradients"]
    whole = sum(map(sum, document["layout"]))
    if chosen[chosen.index("--zero") + 1] == "0":
        assert sum(row["bytes"] for row in rows) == steps * whole
        tried = chosen[chosen.index("--bucket-size") + 1] == "auto"  # other sizes in the first steps
        assert tried or sum(row["calls"] for row in rows) == steps * len(document["layout"])
        ended_with = [row for row in stats["buckets"] if row["label"] == "gradients"]
        assert len(ended_with) in (0, len(document["layout"]))
    compressed = chosen[chosen.index("--compression") + 1] != "none"
    for row in rows:
        assert row["wire_bytes"] == row["bytes"] or (compressed and row["wire_bytes"] < row["bytes"])
    first, share = document["ranks"][0], document["overhead_share"]
    if share is not None:
        assert share == pytest.approx(min(1.0, first["launch_step_s"] / first["step_p50_s"]))


def check_report(document: dict[str, Any]) -> None:
    """The page's sums come out, and its parts are those of its ranks."""
    checked = parse(json.dumps(document).encode())
    run = Run({name: value for name, value in checked.items() if name != "ranks"}, checked["ranks"])
    report = build(run)
    *parts, whole = table(report, "step").rows
    cold = [record["cold"] for record in document["ranks"]]
    if document["steps"] == cold[0]["steps"]:  # then none is left out
        cold = [{"steps": 0, "training_s": 0.0} for _ in cold]
    warm = document["steps"] - cold[0]["steps"]
    pairs = zip(document["ranks"], cold, strict=True)
    warm_s = [record["training_s"] - each["training_s"] for record, each in pairs]
    assert whole["mean_s"] * warm == pytest.approx(sum(warm_s) / document["world_size"])
    # A time slice between two readings of clocks is much of a few warm steps, and little of all.
    assert sum(row["share"] for row in parts) == pytest.approx(1.0, abs=0.02 + NEAR_S / min(warm_s))
    for record in checked["ranks"]:
        own = parts_of(record, CommStats.merged([record["stats"]], document["world_size"]), "moving")
        assert sum(own.values()) == pytest.approx(record["training_s"], rel=0.02)
    if document["world_size"] == 1:
        assert not {"wait for ranks", "move and add"} & {row["part"] for row in parts}
        return
    shown = table(report, "step_ranks")
    for column, row in zip(shown.columns[1:], parts, strict=False):
        assert column.heading == row["part"]
        mean_s = sum(each[column.key] for each in shown.rows) / len(shown.rows)
        assert mean_s == pytest.approx(row["mean_s"], abs=1e-9)


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("seed", range(DRAWS))
def test_figures_agree_whatever_the_options(seed: int, tmp_path) -> None:
    chosen = arguments(seed)
    comm = Communicator(
        bucket_size=chosen[chosen.index("--bucket-size") + 1], transport=chosen[chosen.index("--transport") + 1]
    )
    document = trained(comm, chosen, str(tmp_path / "run.json"))
    comm.finalize()
    if document is None:
        return
    assert document["world_size"] == comm.size
    check_phases(document)
    check_operations(document)
    check_counts(document, chosen)
    check_report(document)
