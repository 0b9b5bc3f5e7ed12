"""Trackers keep a run in a directory, without a server; their own code reads it."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.faults.launch import HUNG_S, ROOT, clean_environment, mpiexec

WORDS = ("--data", "synthetic", "--model", "mlp", "--max-steps", "24", "--epochs", "1", "--lr", "0.0625", "--quiet")
READ_TRACKIO = """
import json, trackio
(run,) = trackio.Api().runs("clcomm")
print(json.dumps([trackio.sqlite_storage.SQLiteStorage.get_logs("clcomm", run.name), run.config]))
"""
READ_MLFLOW = """
import json, sys
from mlflow import MlflowClient
client = MlflowClient(sys.argv[1])
(run,) = client.search_runs([client.get_experiment_by_name("clcomm").experiment_id])
points = {}
for tag in run.data.metrics:
    for metric in client.get_metric_history(run.info.run_id, tag):
        points.setdefault(metric.step, {})[tag] = metric.value
print(json.dumps([list(points.values()), run.data.params, run.info.status]))
"""

BLOCK = 1 << 15


def require(module: str) -> None:
    if find_spec(module) is None:
        pytest.skip(f"{module} is not installed; pip install 'clcomm[{module}]'")


def train(*words: str) -> None:
    """Train on two ranks. Rank 1 waits while rank 0 imports the tracker, for long on a busy machine: not a stall."""
    ended = subprocess.run(
        [mpiexec(), "-n", "2", sys.executable, "-m", "examples.mnist", *WORDS, *words],
        env=clean_environment(CLCOMM_STALL_WARNING_S="250"), capture_output=True, text=True, timeout=2 * HUNG_S,
        check=False, stdin=subprocess.DEVNULL, cwd=ROOT,
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (0, "")


def test_trackio_reads_a_run(tmp_path: Path) -> None:
    require("trackio")
    train("--trackio", str(tmp_path))
    read = subprocess.run(
        [sys.executable, "-c", READ_TRACKIO], env=clean_environment(TRACKIO_DIR=str(tmp_path)), capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    points, settings = json.loads(read.stdout.splitlines()[-1])
    require_run(points, settings)


def log_records(data: bytes) -> Iterator[bytes]:
    """Yield the records of a file in LevelDB's log format after wandb's header of 7 bytes.

    A block of 32 KiB has parts, each with a checksum of 4 bytes, its length, and its kind: 1 a whole record, 2 its
    first part, 3 one in between, 4 its last.
    """
    at, record = 7, b""
    while at + 7 <= len(data):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


def test_weights_and_biases_reads_a_run(tmp_path: Path) -> None:
    require("wandb")
    train("--wandb", str(tmp_path))
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    points, settings = [], {}
    for data in log_records(path.read_bytes()):
        record = Record.FromString(data)
        if record.HasField("history"):
            items = record.history.item
            points.append({"".join(each.nested_key) or each.key: json.loads(each.value_json) for each in items})
        if record.HasField("run"):
            settings = {each.key: json.loads(each.value_json) for each in record.run.config.update}
    require_run(points, settings)


def test_mlflow_reads_a_run(tmp_path: Path) -> None:
    require("mlflow")
    train("--mlflow", str(tmp_path))
    read = subprocess.run(
        [sys.executable, "-c", READ_MLFLOW, tmp_path.as_uri()], env=clean_environment(MLFLOW_ALLOW_FILE_STORE="true"),
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    points, settings, status = json.loads(read.stdout.splitlines()[-1])
    require_run(points, {"model": settings["model"], "lr": float(settings["lr"])})
    assert status == "FINISHED"


def require_run(points: list[dict[str, object]], settings: dict[str, object]) -> None:
    assert (settings["model"], settings["lr"]) == ("mlp", 0.0625)
    steps = [point for point in points if "train/loss" in point]
    assert steps and all("speed/step_ms" in point for point in steps)
    assert any("test/accuracy" in point for point in points)
