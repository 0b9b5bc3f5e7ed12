"""Jobs with logical shards that `clcomm run --chaos` kills again and again: the bits at the end.

`python -m tests.faults.killed_shards 1000` kills that many times, one rank with SIGKILL in a drawn step or after drawn
seconds. Some jobs start again by themselves, on four ranks, from a checkpoint that was written in the background or
from the state in memory; others go on with drawn numbers of ranks, from one to four. A run's parameters and optimizer
have to have the bits of one that nobody disturbed. A second number is the seed. Each run prints the figures so far.
tests/faults/test_killed_shards.py does some.
"""

from __future__ import annotations

import hashlib
import random
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

from clcomm.jobs.checkpoint import load
from tests.faults.launch import ROOT, clean_environment
from tests.faults.pace import Pace

RANKS = 4
#: How a run goes on after a kill: the options for it.
WAYS = {"other ranks": (), "restarts": ("--restarts", "6"), "from memory": ("--min-ranks", str(RANKS))}
TRAINING = (
    "--model", "mlp", "--data", "digits", "--batch-size", "8", "--optimizer", "adam", "--clip-norm", "1",
    "--epochs", "6", "--checkpoint-every", "5", "--augment", "--no-eval", "--quiet",
)  # fmt: skip
OPTIONS = (*TRAINING, "--logical-shards", "8")
#: More than a job with all its restarts takes on a busy machine: what a hang is told by.
LIMIT_S = 500.0


class Killed(NamedTuple):
    """A run's end: its hash, how often a rank was killed, and, by way, seconds from a kill to the next step.

    The seconds are those of a machine of its own.
    """

    digest: str
    kills: int
    waits_s: dict[str, list[float]]


def digest(file: Path) -> str:
    """Return the hash of a checkpoint's parameters and optimizer state."""
    found = load(file)
    state = {**found.group("parameter"), **{f"optimizer/{n}": array for n, array in found.group("optimizer").items()}}
    return hashlib.sha256(b"".join(np.ascontiguousarray(state[name]).tobytes() for name in sorted(state))).hexdigest()


def start(file: Path, ranks: int, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the job, from its checkpoint if there is one, to its end."""
    job = ["-m", "examples.mnist", *OPTIONS, "--checkpoint", str(file), *["--resume"] * file.exists()]
    return subprocess.run(
        [sys.executable, "-m", "clcomm", "run", "-n", str(ranks), "--pause", "0", *options, *job],
        cwd=ROOT, env=clean_environment(OMP_NUM_THREADS="1"), stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=LIMIT_S, check=False,
    )  # fmt: skip


def killed_run(folder: Path, kills: int, drawn: random.Random) -> Killed:
    """Run a job to its end while about so many of its ranks are killed."""
    file, killed, waits_s = folder / "run.npz", 0, {way: list[float]() for way in WAYS}
    while True:
        way, options = drawn.choice(list(WAYS)), list[str]()
        if killed < kills:
            every = drawn.choice((f"{drawn.randint(4, 40)}", f"{drawn.uniform(1.5, 5.0):.3f}s"))
            options = [*WAYS[way], "--chaos", f"seed={drawn.getrandbits(32)},every={every}"]
        with Pace() as pace:
            ended = start(file, RANKS if WAYS[way] else drawn.randint(1, RANKS), *options)
        found = len(re.findall(r"chaos: fault \d+: kill ", ended.stderr))
        killed += found
        seconds = map(float, re.findall(r"chaos: step \d+ begins ([\d.]+) s", ended.stderr))
        waits_s[way] += [each / pace.slowdown() for each in seconds]
        if ended.returncode == 0:
            return Killed(digest(file), killed, waits_s)
        if not found:
            raise AssertionError(f"exit code {ended.returncode}: {ended.stderr}")


def percentile(values: list[float], share: int) -> float:
    """Return a percentile of values, 0 where there are fewer than two."""
    return statistics.quantiles(values, n=100, method="inclusive")[share - 1] if len(values) > 1 else 0.0


def described(seconds: list[float]) -> str:
    """Return p50, p95 and how many they are, in words."""
    return f"{percentile(seconds, 50):.2f} s p50, {percentile(seconds, 95):.2f} s p95 of {len(seconds)}"


def main(kills: int, seed: int) -> int:
    drawn, wrong, done, runs, waits_s = random.Random(seed), 0, 0, 0, {way: list[float]() for way in WAYS}
    with tempfile.TemporaryDirectory() as name:
        undisturbed = killed_run(Path(name), 0, drawn).digest
    while done < kills:
        with tempfile.TemporaryDirectory() as name:
            found = killed_run(Path(name), min(kills - done, drawn.randint(1, 12)), drawn)
        done, runs, wrong = done + found.kills, runs + 1, wrong + (found.digest != undisturbed)
        end = "the undisturbed bits" if found.digest == undisturbed else found.digest
        for way, waits in found.waits_s.items():
            waits_s[way] += waits
        so_far = "; ".join(f"{way}: {described(waits)}" for way, waits in waits_s.items() if waits)
        print(f"run {runs}: {found.kills} kills, {done} in all, {end}; to the next step {so_far or '-'}", flush=True)
    print(f"{done} kills in {runs} runs; runs that ended with other bits: {wrong}")
    return wrong


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 20, int(sys.argv[2]) if len(sys.argv) > 2 else 0) > 0)
