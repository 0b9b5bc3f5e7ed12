"""Jobs with logical shards that are killed again and again, and go on with other numbers of ranks: the bits at the end.

`python -m tests.faults.killed_shards 100` kills that many times, one rank with SIGKILL at a drawn moment; each start
has a drawn number of ranks, from one to four. A run's parameters and optimizer have to have the bits of one rank that
nobody disturbed. A second number is the seed. tests/faults/test_killed_shards.py does one run.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from clcomm.checkpoint import load
from tests.faults.launch import ROOT, clean_environment, mpiexec

RANKS = range(1, 5)
OPTIONS = (
    "--model", "mlp", "--data", "digits", "--batch-size", "8", "--logical-shards", "8", "--optimizer", "adam",
    "--clip-norm", "1", "--epochs", "6", "--checkpoint-every", "5", "--augment", "--no-eval", "--quiet",
)  # fmt: skip
#: Seconds after a start in which ranks are killed: from MPI's start to the last steps.
LATEST_KILL_S = 6.0
#: More than a start takes on a busy machine: what a hang is told by.
LIMIT_S = 250.0


def digest(file: Path) -> str:
    """Return the hash of a checkpoint's parameters and optimizer state."""
    found = load(file)
    state = {**found.group("parameter"), **{f"optimizer/{n}": array for n, array in found.group("optimizer").items()}}
    return hashlib.sha256(b"".join(np.ascontiguousarray(state[name]).tobytes() for name in sorted(state))).hexdigest()


def start(file: Path, ranks: int) -> subprocess.Popen[bytes]:
    """Start the job, from its checkpoint if there is one."""
    resume = ("--resume",) if file.exists() else ()
    command = [mpiexec(), "-n", str(ranks), sys.executable, "-m", "examples.mnist", *OPTIONS]
    return subprocess.Popen(
        [*command, "--checkpoint", str(file), *resume], cwd=ROOT, env=clean_environment(OMP_NUM_THREADS="1"),
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip


def ranks_of(file: Path) -> list[int]:
    """Return the processes of the ranks that write a checkpoint."""
    processes = (entry for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return sorted(int(entry.name) for entry in processes if _is_rank(entry, file))


def _is_rank(process: Path, file: Path) -> bool:
    try:
        is_python = os.path.samefile(process / "exe", sys.executable)
        return is_python and os.fsencode(file) in (process / "cmdline").read_bytes().split(b"\0")
    except OSError:  # it has ended
        return False


def killed_run(folder: Path, kills: int, drawn: random.Random) -> tuple[str, int]:
    """Return the hash that a run ends with, and how often a rank of it was killed."""
    file, killed = folder / "run.npz", 0
    while True:
        job = start(file, drawn.choice(RANKS))
        until = time.monotonic() + drawn.uniform(0.2, LATEST_KILL_S)
        while killed < kills and job.poll() is None and time.monotonic() < until:
            time.sleep(0.02)
        victims = ranks_of(file) if killed < kills and job.poll() is None else []
        if victims:
            os.kill(drawn.choice(victims), signal.SIGKILL)
            killed += 1
        _, said = job.communicate(timeout=LIMIT_S)
        if job.returncode == 0:
            return digest(file), killed
        if not victims:
            raise AssertionError(f"exit code {job.returncode}: {said.decode()}")


def main(kills: int, seed: int) -> int:
    drawn, wrong, done, runs = random.Random(seed), 0, 0, 0
    with tempfile.TemporaryDirectory() as name:
        undisturbed, _ = killed_run(Path(name), 0, random.Random(1))
    while done < kills:
        with tempfile.TemporaryDirectory() as name:
            found, killed = killed_run(Path(name), min(kills - done, drawn.randint(1, 4)), drawn)
        done, runs, wrong = done + killed, runs + 1, wrong + (found != undisturbed)
        print(f"run {runs}: {killed} kills, {'the undisturbed bits' if found == undisturbed else found}", flush=True)
    print(f"{done} kills in {runs} runs on 1 to {max(RANKS)} ranks; runs that ended with other bits: {wrong}")
    return wrong


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 20, int(sys.argv[2]) if len(sys.argv) > 2 else 0) > 0)
