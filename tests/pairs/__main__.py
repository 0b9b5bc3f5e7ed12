"""Run every pair of levels on 8 ranks, and write the table of pairs; or named settings alone. `make pairs` starts it.

mpiexec -n 8 python -m tests.pairs [--seed 1] [--page FILE] [--keep FILE [--limit-s 600]] ["dp=3,zero=1" ...]

With --keep each outcome is kept in a file, and a job that did not end goes on from there when it is started again: a
setting that had begun then counts as wrong. After --limit-s the job ends between two settings, with exit code 3.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from clcomm import Communicator
from tests.pairs.declared import declared
from tests.pairs.factors import MOST_RANKS, Setting, setting_of, words
from tests.pairs.outcome import WRONG, Outcome, outcome_of
from tests.pairs.page import page_of, refused_of
from tests.pairs.search import Levels, search


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.pairs")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--page", type=Path)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--limit-s", type=float, default=math.inf)
    parser.add_argument("settings", nargs="*")
    options = parser.parse_args()
    world = Communicator(stall_warning_s=40, timeout_s=80)

    def tell(line: str) -> None:
        if world.rank == 0:
            print(line, flush=True)

    def run_anew(setting: Setting) -> Outcome:
        return outcome_of(setting, world)

    run = run_anew if options.keep is None else _kept(options.keep, world, options.limit_s, run_anew)
    for text in options.settings:
        setting = setting_of(dict(each.split("=") for each in text.split(",") if each))
        tell(f"{words(setting)}:")
        found = run(setting)
        tell(f"   {found.kind} {found.text}")
    if options.settings:
        return 0
    tell(f"seed {options.seed}, up to {min(world.size, MOST_RANKS)} ranks")
    began_s = time.perf_counter()
    known: list[Levels] = [*declared()]
    if options.page is not None and options.page.exists():
        known += (each for each in refused_of(options.page.read_text(encoding="utf-8")) if each not in known)
    findings = search(run, options.seed, min(world.size, MOST_RANKS), tell, known)
    tell(f"{findings.settings} settings, {len(findings.right)} pairs right, {time.perf_counter() - began_s:.0f} s")
    for cause, text in findings.wrong.items():
        tell(f"WRONG {', '.join(map(' '.join, sorted(cause)))}: {text}")
    if options.page is not None and world.rank == 0:
        options.page.write_text(page_of(findings, options.seed), encoding="utf-8")
    return 1 if findings.wrong else 0


def _kept(
    path: Path, world: Communicator, limit_s: float, run: Callable[[Setting], Outcome]
) -> Callable[[Setting], Outcome]:
    """Return what runs a setting unless the file has its outcome, and ends the job after limit_s; collective."""
    began_s = time.perf_counter()
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    known = {each["setting"]: Outcome(each["kind"], each["text"]) for each in map(json.loads, lines)}
    world.barrier()  # all have read it

    def note(setting: Setting, outcome: Outcome) -> None:
        if world.rank == 0:
            with path.open("a", encoding="utf-8") as file:
                print(json.dumps({"setting": words(setting), **asdict(outcome)}), file=file)

    def run_or_read(setting: Setting) -> Outcome:
        if words(setting) not in known:
            if world.broadcast_object(time.perf_counter() - began_s > limit_s):
                sys.exit(3)
            note(setting, Outcome(WRONG, "did not end"))
            known[words(setting)] = outcome = run(setting)
            note(setting, outcome)
        return known[words(setting)]

    return run_or_read


if __name__ == "__main__":
    sys.exit(main())
