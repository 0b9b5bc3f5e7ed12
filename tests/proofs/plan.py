"""Drawn jobs under drawn limits of memory: whether each fits is what training/plan.py says, and its peak within 5%.

    python -m tests.proofs.plan CASES SEED

The limit is that of a memory cgroup (version 1, whose folder has to be writable), which ends a job that holds more;
the peak is the cgroup's own, which counts the launcher, all ranks and what the kernel holds for them. Limits lie from
5.5% to 45% above or below the forecast; between, a plan says "perhaps". Half of the jobs are tried on at most 2 ranks,
as a plan of many ranks is on 4; what has more runs once without a limit, so that the kernel that sums so many ranks'
gradients is built. A line for each case, then what they came to; exits with 1 if a case was judged wrongly.
"""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from clcomm.comm.costs.jobs import Job
from clcomm.insight.report.forecasting import optimizer_buffers, workload_of
from clcomm.jobs.launch.mpiexec import find_mpiexec
from training.plan import program_of, try_way
from training.planning import MARGIN, NO, YES, Way, parse_way, peak_of

CGROUPS = Path("/sys/fs/cgroup/memory")
PAGES = sorted((Path(__file__).parents[2] / "docs").glob("*.md"))
STEPS, LIMIT_S, LIMITS, NO_LIMIT = 16, 240.0, 4, 1 << 50
POLICIES = ("local", "diloco", "streaming", "sparseloco", "noloco")


class Outcome(NamedTuple):
    """How a job ended under a limit; peak_nbytes: None where the limit was reached."""

    survived: bool
    peak_nbytes: int | None


def run_limited(program: Sequence[str], ranks: int, limit: int) -> Outcome:
    """Run a job in a cgroup of its own."""
    group, mpiexec = CGROUPS / f"clcomm-plan-{os.getpid()}", find_mpiexec()
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(limit))
        enter = ["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh"]
        process = subprocess.Popen(
            [*enter, *mpiexec.command(ranks, "", ""), sys.executable, *program], stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
            env={**os.environ, **mpiexec.environment()},
        )  # fmt: skip
        with suppress(subprocess.TimeoutExpired):
            process.wait(LIMIT_S)
        ended = process.poll() == 0
        events = dict(line.split() for line in (group / "memory.oom_control").read_text().splitlines())
        peak, reached = int((group / "memory.max_usage_in_bytes").read_text()), int(events["oom_kill"])
        return Outcome(ended and not reached, None if reached else peak)
    finally:
        _empty(group)


def _empty(group: Path) -> None:
    """End what is left in a cgroup, and remove it."""
    for _ in range(100):
        for pid in (group / "cgroup.procs").read_text().split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), 9)
        try:
            group.rmdir()
            return
        except OSError:
            time.sleep(0.1)


def drawn(random: random.Random, text: str) -> tuple[str, int, int, list[Way]]:
    """Return a model, ranks, how many of them are tried, and the ways: plain data parallelism and another.

    text: the file that a GPT reads.
    """
    ranks, most = random.choice([1, 2, 3, 4, 4]), random.choice([2, 4])
    if random.random() < 0.6:
        heads = random.choice([2, 4])
        model = (
            f"gpt:layers={random.randint(1, 4)},width={heads * random.choice([16, 32, 48, 64])},heads={heads},"
            f"context={random.choice([32, 64, 128])},batch_size={random.randint(2, 16)},"
            f"optimizer={random.choice(['adamw', 'sgd'])},"
            f"text={text},epochs=99"
        )
    else:
        kind = random.choice(["mlp", "convnet", "lenet"])
        model = f"{kind}:batch_size={random.choice([16, 64, 128, 256])},optimizer={random.choice(['adam', 'sgd'])}"
    kinds = [["zero1", "zero2", "zero3"], [f"{policy}:h=50" for policy in POLICIES]]
    if model.startswith("gpt"):
        kinds += [["recompute", "zero3+recompute"], [f"pp{stages}" for stages in (2, 3, 4) if ranks % stages == 0]]
        kinds += [["tp2"], ["pp2", "pp2+recompute"]] if ranks % 2 == 0 else []
        kinds += [["tp2+pp2"]] if ranks == 4 else []
    other = random.choice(random.choice([each for each in kinds if each]))
    return model, ranks, most, [parse_way("dp")] + ([parse_way(other)] if ranks > 1 else [])


def main() -> int:
    cases, seed = int(sys.argv[1]), sys.argv[2]
    with tempfile.TemporaryDirectory(prefix="clcomm-plan-") as folder:
        text = Path(folder, "pages.txt")  # long enough for epochs of more than STEPS
        text.write_text("".join(page.read_text(encoding="utf-8") for page in PAGES), encoding="utf-8")
        return prove(cases, seed, str(text))


def prove(cases: int, seed: str, text: str) -> int:
    draws, wrong, judged, errors = random.Random(f"plan {seed}"), 0, 0, []
    while judged < cases:
        model, ranks, most, ways = drawn(draws, text)
        program, buffers = program_of(model), 0
        for way in ways:
            tried = try_way(program, way, ranks, STEPS, most)
            if isinstance(tried, str):
                print(f"{model} {way.name}: {tried}", flush=True)
                break
            if not buffers:
                buffers = optimizer_buffers(tried.analysis, workload_of(tried.analysis)) or 0
            peak, _ = peak_of(way, tried, buffers, Job(1, ranks))
            asked = [*program, *way.options_for(STEPS), "--max-steps", str(STEPS)]
            few = way.ranks_tried(ranks, most)
            if ranks > few:
                run_limited(asked, ranks, NO_LIMIT)
            for _ in range(LIMITS):
                away = 1.1 * MARGIN + 0.4 * draws.random() ** 2
                limit = round(peak * (1 + away if draws.random() < 0.5 else 1 - away))
                said = YES if peak * (1 + MARGIN) <= limit else NO
                found = run_limited(asked, ranks, limit)
                right = found.survived if said == YES else found.peak_nbytes is None  # not by another end
                judged, wrong = judged + 1, wrong + (not right)
                ended = "ran" if found.survived else "ended"
                if found.survived and found.peak_nbytes:
                    errors.append(peak / found.peak_nbytes - 1)
                    ended += f", {errors[-1]:+.1%}"
                print(
                    f"{judged} {model.partition(',text')[0]} {way} on {ranks}, tried on {few}: {peak >> 20} MiB, "
                    f"limit {limit >> 20}: {said}, {ended}{'' if right else '  WRONG'}", flush=True,
                )  # fmt: skip
    off = sorted(map(abs, errors))
    print(
        f"{judged} cases, {wrong} judged wrongly; peaks of {len(off)} that ran: median {statistics.median(off):.1%}, "
        f"largest {off[-1]:.1%} from the forecast, {sum(each > MARGIN for each in off)} beyond {MARGIN:.0%}"
    )
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
