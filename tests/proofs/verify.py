"""`clcomm verify` of drawn trainings: planted mistakes have to be named, and right ones blamed for nothing.

`python -m tests.proofs.verify CASES SEED [API]`: CASES of each. Trainings whose ranks go on after the mistake share a
job for each number of ranks; the others have one of their own, by the command. Prints how many were judged rightly, and
each of the others.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from clcomm.base.console.finding import NOTE, PROBLEM
from clcomm.tools.verify.job import JobRecord
from clcomm.tools.verify.judge import judge, refusal
from clcomm.tools.verify.rank import install
from clcomm.tools.verify.record import read
from clcomm.tools.verify.watcher import Finished, Watcher
from tests.faults.launch import ROOT, clean_environment, mpiexec
from tests.proofs.training_scripts import HANGS, MISTAKES, NORMED, RIGHT, STEPS, place, train

MODELS = ("mlp", "norm", "dropout")
LIMIT_S = 900.0


@dataclass(frozen=True)
class Drawn:
    """One training."""

    api: str
    model: str
    variant: str
    seed: int
    ranks: int

    @property
    def is_right(self) -> bool:
        return self.variant in RIGHT[self.api]


def draw(cases: int, seed: int, apis: list[str], counts: tuple[int, ...], hang: bool) -> list[Drawn]:
    """Draw as many trainings with mistakes as right ones, all variants about equally often."""
    rng = np.random.default_rng(seed)
    drawn = []
    for table in (MISTAKES, RIGHT):
        every = [(api, variant) for api in apis for variant in table[api] if hang or variant not in HANGS]
        order = [int(each) for _ in range(-(-cases // len(every))) for each in rng.permutation(len(every))]
        for at in order[:cases]:
            api, variant = every[at]
            model = "norm" if variant in NORMED else str(rng.choice(MODELS))
            drawn.append(Drawn(api, model, variant, int(rng.integers(1 << 20)), int(rng.choice(counts))))
    return drawn


def causes_of(job: JobRecord) -> tuple[list[str], list[str]]:
    """Return the causes of problems and of notes."""
    found = judge(job)
    named = [[str(each.evidence.get("cause")) for each in found if each.level == level] for level in (PROBLEM, NOTE)]
    why = "" if named[0] else refusal(job)
    return [*named[0], *[f"refused: {why}"] * bool(why)], named[1]


def is_named(case: Drawn, problems: list[str], notes: list[str]) -> bool:
    if case.is_right:
        return not problems
    if case.variant == "buffers":
        return not problems and "buffers" in notes
    return problems == [case.variant]


# --- many trainings in one job ---


class _Current:
    """Stands for the Watcher of the training that runs."""

    def __init__(self) -> None:
        self.watcher: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.watcher, name)


def rank_main(folder: Path) -> None:
    """Train all cases of a job on this rank, each with a record of its own."""
    current: Any = _Current()
    install(current)

    def finish() -> None:
        raise Finished

    for index, given in enumerate(json.loads((folder / "cases").read_text())):
        case = Drawn(**given)
        own = folder / str(index)
        own.mkdir(exist_ok=True)
        rank, _ = place(case.api)
        current.watcher = Watcher(rank, STEPS, own, finish)
        current.watcher.write()
        try:
            train(case.api, case.model, case.variant, case.seed)
            current.watcher.write_pending("end")
        except Finished:
            pass
        except Exception as error:
            current.watcher.write_pending("error", f"{type(error).__name__}: {error}")
        if case.api == "hvd":
            import clcomm.horovod as hvd

            hvd.shutdown()


def run_together(cases: list[Drawn], folder: Path) -> list[JobRecord]:
    """Run trainings for one number of ranks in one job."""
    (folder / "cases").write_text(json.dumps([asdict(case) for case in cases]))
    ranks = cases[0].ranks
    command = [mpiexec(), "-n", str(ranks), sys.executable, "-m", "tests.proofs.verify", "--rank", str(folder)]
    environment = clean_environment(CLCOMM_REPLAY="0", OMP_NUM_THREADS="1")
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S,
                           check=False, stdin=subprocess.DEVNULL)  # fmt: skip
    if ended.returncode:
        print(ended.stdout[-2000:], ended.stderr[-3000:], file=sys.stderr)
    return [JobRecord(read(folder / str(index), ranks)) for index in range(len(cases))]


def run_alone(case: Drawn) -> tuple[list[str], list[str]]:
    """Run a training by the command, and return its causes."""
    words = [case.api, case.model, case.variant, str(case.seed)]
    command = [sys.executable, "-m", "clcomm", "verify", "-n", str(case.ranks), "--json", "--timeout", "20", "--steps",
               str(STEPS), "-m", "tests.proofs.training_scripts", *words]  # fmt: skip
    ended = subprocess.run(
        command, cwd=ROOT, env=clean_environment(OMP_NUM_THREADS="1"), capture_output=True, text=True, timeout=LIMIT_S,
        check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    if ended.returncode > 1:
        return [f"refused: {ended.stderr.strip()}"], []
    found = json.loads(ended.stdout)["findings"]
    named = [
        [str(each["evidence"].get("cause")) for each in found if each["level"] == level] for level in (PROBLEM, NOTE)
    ]
    assert ended.returncode == bool(named[0])
    return named[0], named[1]


def main(
    cases: int, seed: int, apis: list[str], counts: tuple[int, ...] = (2, 3), hang: bool = True
) -> dict[str, Any]:  # fmt: skip
    """Return how many trainings were judged rightly, of how many, and the others with what was found.

    counts: the numbers of ranks to draw from.
    hang: whether to draw mistakes after which ranks wait for each other.
    """
    drawn = draw(cases, seed, apis, counts, hang)
    results: list[tuple[Drawn, list[str], list[str]]] = []
    for ranks in counts:
        together = [case for case in drawn if case.ranks == ranks and case.variant not in HANGS]
        with tempfile.TemporaryDirectory() as name:
            if together:
                for case, job in zip(together, run_together(together, Path(name)), strict=True):
                    results.append((case, *causes_of(job)))
    results += [(case, *run_alone(case)) for case in drawn if case.variant in HANGS]
    judged = [(case, is_named(case, problems, notes), problems, notes) for case, problems, notes in results]
    summary: dict[str, Any] = {}
    for name, is_right in (("mistakes", False), ("right", True)):
        own = [named for case, named, _, _ in judged if case.is_right is is_right]
        summary[name] = [sum(own), len(own)]
    others = [f"{case}: {problems}, notes {notes}" for case, named, problems, notes in judged if not named]
    return {**summary, "others": others}


if __name__ == "__main__":
    if sys.argv[1] == "--rank":
        from clcomm.comm.watch import endings

        endings.run(lambda: rank_main(Path(sys.argv[2])))
    os.environ.setdefault("CLCOMM_DATA", "")
    print(json.dumps(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:] or [*MISTAKES]), indent=1))
