"""`python -m training.plan`: which strategies fit a host's memory, and which is fastest, before a run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from clcomm.base.console.option_types import whole_number
from clcomm.base.errors import ArgumentError
from clcomm.base.host import host_bytes, usable_cores
from clcomm.base.units import format_size, parse_size
from clcomm.tools.cli import run_alone
from clcomm.tools.commands import output
from clcomm.tools.commands.command import Command
from training import command

if TYPE_CHECKING:
    from clcomm.comm.costs.jobs import Job
    from clcomm.insight.report.report import LeftOut
    from training.planning import Row, TrialResult, Way

#: The examples by the model that they train: the module, and its options for that model and for a trial.
PROGRAMS = {
    "gpt": ("examples.gpt", ("--sample", "0")),
    **{name: ("examples.mnist", ("--model", name)) for name in ("mlp", "convnet", "lenet", "resnet")},
}
_STRATEGIES = ("dp", "zero1", "zero2", "zero3", "tp2", "pp2", "recompute", "diloco:h=50")
#: In these all kernels are built.
_BUILDING_STEPS = 3
#: With the 14th step of whole batches ends the first check of a step's recording, which has the most memory.
_LEAST_STEPS = 14
_LIMIT_S = 600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from clcomm.tools.commands.forecast import MOST_RANKS

    add = parser.add_argument
    add("--model", metavar="NAME:OPTIONS", help=f"{', '.join(PROGRAMS)}, with options of its example such as "
        "gpt:layers=4,width=256,batch_size=8")  # fmt: skip
    add("--ranks", type=whole_number(1, MOST_RANKS), help="of the job")
    add("--hosts", type=whole_number(1, MOST_RANKS), default=1, help="among which they are divided evenly; default: 1")
    add("--memory", help="of each host, for all of its ranks, such as 8GiB; default: this host's")
    add("--link", metavar="RATE,LATENCY", help="of each host of several, such as 100Gbit/s,2us")
    add("--strategies", nargs="+", default=None, metavar="NAME",
        help="dp, zero1 to zero3, tp2, pp2, tp2+pp2, recompute, zero3+recompute, diloco:h=50 or another policy; "
        f"default: those of {' '.join(_STRATEGIES)} that the ranks allow")  # fmt: skip
    add("--steps", type=whole_number(_LEAST_STEPS, 10_000), default=16, help="of each trial; default: %(default)s")
    output.add_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Try each strategy and write the plan. Raises ArgumentError, in one line, where none fits."""
    from clcomm.comm.costs.model import Cost
    from clcomm.insight.report.forecasting import parse_link
    from training.planning import parse_way, plan_of, rows_of

    job, form = _job(options), output.form_of(options)
    memory = host_bytes() if options.memory is None else parse_size(options.memory, "--memory")
    link = Cost(0.0, 0.0) if options.link is None else parse_link(options.link)
    program = program_of(options.model)
    ways = [parse_way(name) for name in options.strategies or _possible(job.ranks_per_host, options.model)]
    for way in ways:
        if job.ranks_per_host % way.division:
            ranks = job.ranks_per_host
            raise ArgumentError(
                f"--strategies: expected tp or pp of a number that divides a host's {ranks} ranks, got {way}"
            )
    tried, left = _trials(program, [parse_way("dp"), *ways], job.ranks_per_host, options)
    rows = [row for row in rows_of(tried, job, link) if row.way in ways]
    if not rows:
        raise ArgumentError("--strategies: expected one that the model has; " + "; ".join(map(": ".join, left)))

    def remedy(least: Row) -> str:
        return _remedy(least, tried, job, memory)

    output.write_report(plan_of(rows, left, job, memory, f"Plan of {options.model}", remedy), form, options.output)
    return 0


def _job(options: argparse.Namespace) -> Job:
    """Return the planned job; ArgumentError for options that do not tell it."""
    from clcomm.comm.costs.jobs import Job

    if options.model is None or options.ranks is None:
        raise ArgumentError("plan: expected --model NAME:OPTIONS and --ranks N, such as --model gpt:layers=4 --ranks 4")
    if options.hosts > 1 and options.link is None:
        raise ArgumentError(f"--hosts {options.hosts}: expected --link RATE,LATENCY too, such as 100Gbit/s,2us")
    if options.ranks % options.hosts:
        raise ArgumentError(f"--ranks: expected a multiple of the {options.hosts} hosts, got {options.ranks}")
    return Job(options.hosts, options.ranks // options.hosts)


def _trials(
    program: Sequence[str], ways: Sequence[Way], ranks_per_host: int, options: argparse.Namespace
) -> tuple[dict[Way, TrialResult], list[LeftOut]]:
    """Return each way's trial, and why others have none; ArgumentError where the first, plain one, has none."""
    from clcomm.insight.report.report import LeftOut

    tried: dict[Way, TrialResult] = {}
    left = []
    for way in dict.fromkeys(ways):
        print(f"clcomm: trying {way}", file=sys.stderr)
        found = try_way(program, way, ranks_per_host, options.steps)
        if not isinstance(found, str):
            tried[way] = found
        elif way == ways[0]:
            raise ArgumentError(f"--model {options.model}: {found}")
        else:
            left.append(LeftOut(way.name, found))
    return tried, left


def _remedy(least: Row, tried: dict[Way, TrialResult], job: Job, memory: int) -> str:
    """Return what would fit, where the way that needs least does not."""
    from training.planning import MARGIN, buffers_of, most_ranks, peak_of

    of = least.way, tried[least.way], buffers_of(tried)
    most = most_ranks(*of, job, memory)
    if most:
        return f"{most} ranks a host would fit"
    fewest = job._replace(ranks_per_host=least.way.division)
    alone = format_size(peak_of(*of, fewest)[0] * (1 + MARGIN))
    return f"no number of ranks would, as {fewest.ranks_per_host} a host needs {alone}: a smaller batch or model would"


def _possible(ranks: int, model: str) -> Sequence[str]:
    """Return the names of the usual strategies that so many ranks of a host can follow."""
    is_gpt = model.partition(":")[0] == "gpt"
    halves = is_gpt and ranks % 2 == 0
    possible = {"tp2": halves, "pp2": halves, "recompute": is_gpt, "dp": True}
    return [name for name in _STRATEGIES if possible.get(name, ranks > 1)]


def program_of(text: str) -> list[str]:
    """Return the arguments of `python` that train the model of "gpt:layers=4,width=256"; ArgumentError for others."""
    name, _, settings = text.partition(":")
    if name not in PROGRAMS:
        raise ArgumentError(f"--model: expected one of {', '.join(PROGRAMS)}, with options, got {text!r}")
    module, own = PROGRAMS[name]
    words: list[str] = []
    for part in filter(None, settings.split(",")):
        key, equals, value = part.partition("=")
        words += ["--" + key.replace("_", "-"), *([value] if equals else [])]
    return ["-m", module, *own, "--no-eval", "--quiet", *words]


def try_way(
    program: Sequence[str], way: Way, ranks_per_host: int, steps: int, most: int | None = None
) -> TrialResult | str:
    """Return what a trial of a strategy showed on this host; or in one line why there is none.

    As many cores are used for each rank as on the planned host, if that has as many as this one. A first trial builds
    kernels, which takes memory that a run with built ones does not need.
    """
    from clcomm.insight.report.recording import read_runs
    from clcomm.insight.report.run_costs import Analysis
    from clcomm.jobs.launch.keeper import kept_job
    from training.planning import TrialResult
    from training.trial import try_job

    ranks, cores = way.ranks_tried(ranks_per_host, most), len(usable_cores())
    used = min(cores, max(1, round(ranks * cores / ranks_per_host)))
    slowdown = max(1.0, ranks_per_host / cores) / max(1.0, ranks / used)

    def attempt(number: int) -> TrialResult | str:
        asked = [*program, *way.options_for(number), "--max-steps", str(number), "--report", report]
        trial = try_job(keeper, asked, ranks, used, _LIMIT_S)
        if trial.problem:
            return trial.problem.removeprefix("clcomm: ")
        return TrialResult(Analysis(read_runs([report])), trial.peak, slowdown, ranks > used)

    with kept_job() as keeper:
        report = str(keeper.folder / "report.json")
        first = attempt(max(_BUILDING_STEPS, way.least_steps))
        if isinstance(first, str):
            return first
        return attempt(max(enough_steps(steps, first.analysis.run.figures["epoch_steps"]), way.least_steps))


def enough_steps(steps: int, epoch_steps: int) -> int:
    """Return the steps of a trial in which so many have whole batches: an epoch's last one may be smaller."""
    return max(steps, _LEAST_STEPS + -(-_LEAST_STEPS // max(1, epoch_steps - 1)))


COMMAND = Command(
    "plan",
    "find the strategies that fit a host's memory, the fastest first",
    "Try data parallelism, ZeRO, tensor parallelism, pipelines and policies on few ranks for a few steps each, and say "
    "of a job with more ranks what it would hold of each host's memory at most, how long a step would take, and which "
    "strategy is the fastest that fits. docs/plan.md says how far that can be trusted.",
    add_arguments,
    run,
    (
        (
            "python -m training.plan --model gpt:layers=6,width=384 --ranks 16 --memory 8GiB",
            "16 ranks on one host with 8 GiB",
        ),
        ("python -m training.plan --model convnet:batch_size=256 --ranks 4 --strategies dp zero3", "of two strategies"),
    ),
)
main = partial(command.run, COMMAND)


if __name__ == "__main__":
    run_alone(main)
