"""`python -m benchmarks.slow_link`: seconds to a held-out loss over a slow link, plain data parallel and policies.

The GPT example trains with nanoGPT's settings for computers without a GPU on two hosts made of network namespaces, with
a cable of a rate, a delay, jitter and loss between them, from the same seed under each policy until its held-out loss
is low enough. What a policy does to give all ranks the same parameters before an evaluation counts; evaluations, the
start and the first broadcast do not, for any. One run is made after the other; with --kept those that are done are not
repeated.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from contextlib import nullcontext
from pathlib import Path

from benchmarks import harness, results_file
from benchmarks.harness import Bar, Grid, Report
from benchmarks.policies import PLAIN, how
from benchmarks.workers import ROOT
from clcomm.base.errors import ArgumentError, LaunchError
from clcomm.comm.watch import run
from tests.multihost.cable import Link
from tests.multihost.two_hosts import TwoHosts, add_link, environment, link_of, refusal

PROGRAM = "benchmarks.slow_link"
POLICIES = ("diloco:h=25", "streaming:h=25", "sparseloco:h=5", "noloco:h=25", "demo:32")
#: Of an ordinary line to a home, and a round trip of 100 ms.
LINK = Link(delay_ms=50.0, rate_mbit=10.0)
#: How many times sooner than plain data parallel a policy is to reach the loss.
TARGET = 20.0
_LIMIT_S = 3600.0

#: Points of a run: steps, held-out loss, seconds, of them waiting in collectives and with a core, load of the machine.
Course = list[dict[str, float]]


def main() -> None:
    options, console = parse(), harness.make_console()
    report = Report("seconds to a held-out loss over a slow link", harness.command_line(PROGRAM))
    kept = nullcontext(options.kept) if options.kept else tempfile.TemporaryDirectory(prefix="clcomm-bench-")
    courses: dict[str, Course] = {}
    with console.status("training") as status, kept as folder:
        for policy in (PLAIN, *options.policies):
            status.update(f"training: {policy}")
            courses[policy] = train(options, Path(folder), policy)
    for loss in options.losses:
        compare(options, courses, loss, report)
    loads = [point["load"] for course in courses.values() for point in course]
    report.notes.append(f"load average of the machine meanwhile: {min(loads):.1f} to {max(loads):.1f}")
    harness.conclude(report, console, options.record)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"python -m {PROGRAM}", description="Seconds to a loss over a slow link.", allow_abbrev=False
    )
    parser.add_argument("--hosts", type=harness.positive, nargs=2, default=(2, 2), help="ranks; default: 2 2")
    parser.add_argument("--policies", nargs="+", default=POLICIES, metavar="POLICY", help="default: %(default)s")
    parser.add_argument("--rate", type=float, default=2e-3, help="of learning; default: %(default)s")
    parser.add_argument(
        "--losses", nargs="+", type=float, default=(2.9, 2.8), help="training ends at the least; default: %(default)s"
    )
    parser.add_argument("--every", type=harness.positive, default=25, help="steps to a test; default: %(default)s")
    parser.add_argument("--windows", type=harness.positive, default=256, help="tested; default: %(default)s")
    parser.add_argument("--steps", type=harness.positive, default=500, help="at most; default: %(default)s")
    parser.add_argument("--bucket-size", metavar="SIZE", help="of all runs; default: the example's")
    add_link(parser, LINK)
    parser.add_argument("--kept", metavar="FOLDER", help="with the courses of runs; those that are there count")
    parser.add_argument(
        "--record", action="store_true", help=f"keep the results in benchmarks/{results_file.RESULTS.name}"
    )
    return parser.parse_args()


def train(options: argparse.Namespace, folder: Path, policy: str) -> Course:
    """Return a run's course, trained now unless the folder has it.

    Raises ArgumentError where two hosts cannot be made, LaunchError with the output of a run that fails.
    """
    link = link_of(options)
    buckets = ["--bucket-size", options.bucket_size] if options.bucket_size else []
    numbers = *options.hosts, options.every, options.rate, *link
    name = "-".join([policy, *(f"{each:g}" for each in numbers), *buckets[1:]])
    file = (folder / f"{name}.json").absolute()
    if not file.exists():
        reason = refusal()
        if reason:
            raise ArgumentError(f"two hosts cannot be made here: {reason}")
        given = [str(file), str(min(options.losses)), str(options.every), str(options.windows)]
        example = ["--preset", "nanogpt-cpu", "--quiet", "--lr", f"{options.rate:g}", "--max-steps", str(options.steps)]
        with TwoHosts(link) as hosts:
            arguments = ["-m", f"{PROGRAM}_rank", *given, *example, *buckets, *how(policy)]
            done = subprocess.run(
                hosts.command(tuple(options.hosts), arguments), cwd=ROOT, env=environment(), stdin=subprocess.DEVNULL,
                capture_output=True, text=True, timeout=_LIMIT_S, check=False,
            )  # fmt: skip
        if done.returncode:
            raise LaunchError(f"{policy} ended with exit code {done.returncode}:\n{done.stderr.strip()}")
    course: Course = json.loads(file.read_text(encoding="utf-8"))
    return course


def compare(options: argparse.Namespace, courses: dict[str, Course], loss: float, report: Report) -> None:
    """Compare the policies' way to a loss with plain data parallel's."""
    ends = {policy: next((each for each in course if each["loss"] <= loss), None) for policy, course in courses.items()}
    title = f"to a held-out loss of {loss:g}, {' + '.join(map(str, options.hosts))} ranks, {link_of(options)}"
    title += f", buckets of {options.bucket_size}" if options.bucket_size else ""
    grid = Grid(title, ("policy", "steps", "seconds", "of it waiting", "ms a step", "of it computing", "sooner"))
    plain = ends[PLAIN]
    for policy, end in ends.items():
        if end is None:
            grid.add(policy, f"over {courses[policy][-1]['steps']}", *["not reached"] * 2, "", "", "")
            continue
        sooner = plain["seconds"] / end["seconds"] if plain else float("nan")
        steps, each_ms = end["steps"], 1e3 / end["steps"]
        times = f"{end['seconds']:.1f}", f"{end['waited_s']:.1f}"
        per_step = f"{end['seconds'] * each_ms:.0f}", f"{end['processor_s'] * each_ms:.0f}"
        grid.add(policy, f"{steps:g}", *times, *per_step, f"{sooner:.1f}x")
        if policy != PLAIN:
            report.bars.append(Bar(f"{policy}: to a loss of {loss:g} sooner than {PLAIN}", sooner, TARGET))
    report.grids.append(grid)


if __name__ == "__main__":
    run(main)
