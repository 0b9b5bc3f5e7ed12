"""Weights & Biases keeps a run in a directory, without a server; its own code reads it."""

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
BLOCK = 1 << 15


def train(*words: str) -> None:
    """Train on two ranks. Rank 1 waits while rank 0 imports wandb, for long on a busy machine: not a stall."""
    ended = subprocess.run(
        [mpiexec(), "-n", "2", sys.executable, "-m", "examples.mnist", *WORDS, *words],
        env=clean_environment(CLCOMM_STALL_WARNING_S="250"), capture_output=True, text=True, timeout=2 * HUNG_S,
        check=False, stdin=subprocess.DEVNULL, cwd=ROOT,
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (0, "")


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
    if find_spec("wandb") is None:
        pytest.skip("wandb is not installed; pip install -e '.[wandb]'")
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


def require_run(points: list[dict[str, object]], settings: dict[str, object]) -> None:
    assert (settings["model"], settings["lr"]) == ("mlp", 0.0625)
    steps = [point for point in points if "train/loss" in point]
    assert steps and all("speed/step_ms" in point for point in steps)
    assert any("test/accuracy" in point for point in points)
