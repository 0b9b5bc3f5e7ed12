"""`python -m benchmarks.observers`: the cost of observing a training step, by the stats, always on, and by a trace.

The bars take the processor time of an event, with nothing else running, times the events of a step. Beside that,
windows of steps with no observer, with the stats, and with stats and a trace take turns: on a quiet machine they show
the same, on a busy one mostly its noise.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial

from benchmarks import harness
from benchmarks.harness import Bar, Grid, Ratio, Report, Samples
from benchmarks.observers.costs import event_costs
from benchmarks.workers import Job
from clcomm.comm.watch import run

PROGRAM = "benchmarks.observers"
WATCHERS = {"none": "none", "stats": "stats", "trace": "stats and trace"}
#: The largest share of a step, in percent.
TARGETS = {"stats": 1.0, "trace": 5.0}


def main() -> None:
    options, console = parse(), harness.make_console()
    report = Report("cost of stats and of a trace", harness.command_line(PROGRAM))
    with console.status("single events"):
        costs = event_costs()
    grid = Grid("An event, processor time", ("event, observer", "us"))
    for name, seconds in costs.items():
        grid.add(name, f"{seconds * 1e6:.2f}")
    report.grids.append(grid)
    for ranks in options.ranks:
        arguments = ["--model", options.model, "--batch", str(options.batch)]
        with Job("benchmarks.observers.worker", *arguments, ranks=ranks) as job, console.status("") as status:
            add_steps(report, options, job, costs, status.update)
    report.notes.append("a trace's file is written after the last step, which is in none of these")
    harness.conclude(report, console, options.record)


def parse() -> argparse.Namespace:
    parser = harness.parser(PROGRAM, "Cost of stats and of a trace in a training step.", windows=9, window_s=0.5)
    parser.add_argument("--model", choices=("convnet", "mlp"), default="convnet", help="default: %(default)s")
    parser.add_argument("--batch", type=harness.positive, default=32, help="of a rank; default: %(default)s")
    parser.add_argument("--ranks", type=harness.positive, nargs="+", default=[1, 4], help="default: 1 4")
    return parser.parse_args()


def add_steps(
    report: Report, options: argparse.Namespace, job: Job, costs: dict[str, float], show: Callable[[str], None]
) -> None:
    """Add the table of windows on a job's ranks, and the bars."""
    ranks = job.ranks
    events = job.ask()[0]
    trial = job.ask(watchers="none", steps=10)
    steps = harness.repeats_for(trial[0]["wall"], options.window_s)
    walls: dict[str, list[float]] = {watchers: [] for watchers in WATCHERS}

    def window(watchers: str) -> float:
        answers = job.ask(watchers=watchers, steps=steps)
        walls[watchers].append(statistics.mean(answer["wall"] for answer in answers))
        return statistics.mean(answer["cpu"] for answer in answers)

    processor = harness.alternate({name: partial(window, name) for name in WATCHERS}, options.windows, show=show)
    clock = {name: Samples(tuple(values[-options.windows :])) for name, values in walls.items()}
    counted = ", ".join(f"{kind}s: {number}" for kind, number in sorted(events.items()))
    title = f"{options.model}, ranks: {ranks}, batch {options.batch} a rank; in a step {counted}"
    grid = Grid(title, ("watching", "step ms", "ratio", "processor ms", "ratio", "events us", "share"))
    for name, label in WATCHERS.items():
        spent_s = sum(number * costs.get(f"{kind}, {name}", 0.0) for kind, number in events.items())
        share = spent_s / processor["none"].median
        grid.add(
            label,
            *(cell for figures in (clock, processor) for cell in _against_none(figures, name)),
            f"{spent_s * 1e6:.1f}", f"{share:.2%}",
        )  # fmt: skip
        if name in TARGETS and options.model == "convnet":
            report.bars.append(Bar(f"ranks: {ranks}, {name}", 100 * share, TARGETS[name], "%", at_least=False))
    report.grids.append(grid)


def _against_none(figures: dict[str, Samples], name: str) -> tuple[str, str]:
    return f"{figures[name].median * 1e3:.3f}", str(Ratio.of(figures[name], figures["none"]))


if __name__ == "__main__":
    run(main)
