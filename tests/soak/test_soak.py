"""A long run holds at its end what it held near its start: memory, descriptors, threads, windows.

`make soak` runs 30 minutes on 8 ranks; the ordinary suite a few seconds on 4. CLCOMM_SOAK_S is how long,
CLCOMM_SOAK_RANKS on how many ranks.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.launch import HUNG_S, ROOT, memory_environment, mpiexec

SECONDS, RANKS = float(os.environ.get("CLCOMM_SOAK_S", "4")), int(os.environ.get("CLCOMM_SOAK_RANKS", "4"))
#: What memory may differ by: the allocator's arenas, and a checkpoint that is being written.
SPARE_BYTES = 4 << 20


@pytest.mark.timeout(SECONDS + 2 * HUNG_S)
def test_a_long_run_gathers_nothing(tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    command = [mpiexec(), "-n", str(RANKS), sys.executable, str(Path(__file__).with_name("train.py"))]
    done = subprocess.run(
        [*command, str(SECONDS), str(tmp_path)], env=memory_environment(), cwd=ROOT, text=True,
        capture_output=True, timeout=SECONDS + HUNG_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for rank in range(RANKS):
        samples = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        early, late = samples[len(samples) // 4 : len(samples) // 2 + 1], samples[-max(1, len(samples) // 4) :]
        print(f"rank {rank}: {len(samples)} rounds, {early[0]} then {late[-1]}")
        for what in ("descriptors", "threads", "windows"):
            # A sample may find a checkpoint's writer at work, with its file and its thread; what is lost stays lost.
            most = max(sample[what] for sample in early)
            assert statistics.median(sample[what] for sample in late) <= most, f"rank {rank}: {what}: {samples}"
        grown = statistics.median(s["memory"] for s in late) - statistics.median(s["memory"] for s in early)
        assert grown < SPARE_BYTES, f"rank {rank} grew by {grown} bytes"
    assert {path.name for path in tmp_path.iterdir()} == {
        "run.ckpt", "run.ckpt.1", *(f"rank-{rank}.json" for rank in range(RANKS))
    }  # fmt: skip
    assert not {name for name in set(os.listdir("/dev/shm")) - before if name.startswith("clcomm")}
