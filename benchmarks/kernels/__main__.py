"""`python -m benchmarks.kernels`: GFLOP/s of one thread by op and shape, beside PyTorch, NumPy and the core's peak."""

from __future__ import annotations

import argparse
import math
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial

from rich.console import Console

from benchmarks import harness
from benchmarks.harness import Bar, Grid, Ratio, Report, Samples
from benchmarks.kernels.cases import KINDS, Case, make_cases
from benchmarks.kernels.peak import PEAK
from benchmarks.workers import Job
from clcomm.job import run

PROGRAM = "benchmarks.kernels"
OURS, TORCH, NUMPY = "clcomm", "PyTorch", "NumPy"
_MODULES = {OURS: "engine", TORCH: "pytorch", NUMPY: "numpy_blas"}
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
GEMM_TARGET = 0.9
#: The bars as multiples of PyTorch's speed, by case.
TORCH_TARGETS = {
    "conv2 forward+backward, batch 64": 0.9,
    "conv1 + ReLU + pool forward+backward, batch 64": 4.0,
    "convnet step, batch 64": 2.5,
}

Results = dict[str, dict[str, Samples]]


def main() -> None:
    options, console = parse(), harness.make_console()
    report = Report("kernels on one thread", harness.command_line(PROGRAM))
    cases = make_cases(options.only, options.batch)
    results = measure_all(cases, options, console)
    fill(report, cases, results)
    harness.conclude(report, console, options.record)


def measure_all(cases: list[Case], options: argparse.Namespace, console: Console) -> Results:
    """Return the GFLOP/s of the systems in `options.systems`, by case; the core's peak is the first one."""
    results: Results = {}
    with ExitStack() as stack, console.status("starting") as status:
        jobs = {
            name: stack.enter_context(Job(f"benchmarks.kernels.{module}", mpi=False, environment=_ONE_THREAD))
            for name, module in _MODULES.items()
            if name in options.systems
        }
        for number, case in enumerate([PEAK, *cases]):
            status.update(f"{case.name} ({number} of {len(cases)})")
            results[case.name] = measure(case, jobs, options)
    return results


def parse() -> argparse.Namespace:
    parser = harness.parser(PROGRAM, "Kernels and steps on one thread.", windows=5, window_s=0.1)
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS), help="kinds of cases; default: all")
    parser.add_argument("--batch", nargs="+", type=harness.positive, default=[16, 64, 256], help="default: 16 64 256")
    parser.add_argument("--systems", nargs="+", choices=list(_MODULES), default=list(_MODULES), help="default: all")
    harness.add_clock(parser)
    options = parser.parse_args()
    options.systems = [OURS, *(name for name in options.systems if name != OURS)]
    return options


def measure(case: Case, jobs: dict[str, Job], options: argparse.Namespace) -> dict[str, Samples]:
    """Return the GFLOP/s of every system that has the case, in alternating windows."""

    def seconds(name: str, repeats: int) -> float:
        return jobs[name].ask(case=asdict(case), repeats=repeats)[0].get(options.clock, math.nan)

    repeats: dict[str, int] = {}
    for name in jobs:
        if not math.isnan(seconds(name, 1)):  # the first run also builds
            repeats[name] = harness.repeats_for(seconds(name, 3) / 3, options.window_s, least=1)

    def speed(name: str) -> float:
        return case.flops * repeats[name] / seconds(name, repeats[name]) / 1e9

    return harness.alternate({name: partial(speed, name) for name in repeats}, options.windows)


def fill(report: Report, cases: list[Case], results: Results) -> None:
    """Add the figures to the report: a table for each kind of case."""
    peak = results[PEAK.name][OURS]
    report.notes.append(
        f"one core's measured peak: {peak.median:.1f} GFLOP/s ({peak.low:.1f}-{peak.high:.1f}), "
        f"{PEAK.name} in OpenCL; 'of peak' is clcomm's share of it"
    )
    for kind in dict.fromkeys(case.kind for case in cases):
        grid = Grid(f"GFLOP/s, {kind}", ("case", "ms", OURS, TORCH, NUMPY, "of peak", "to PyTorch", "to NumPy"))
        for case in cases:
            if case.kind == kind:
                add_row(grid, case, results[case.name], peak)
        report.grids.append(grid)
    report.bars = bars(cases, results)


def add_row(grid: Grid, case: Case, samples: dict[str, Samples], peak: Samples) -> None:
    """Append a case's medians and ratios."""
    ours = samples[OURS]
    medians = [f"{samples[name].median:.1f}" if name in samples else "" for name in (TORCH, NUMPY)]
    ratios = [str(Ratio.of(ours, samples[name])) if name in samples else "" for name in (TORCH, NUMPY)]
    time_ms = case.flops / ours.median / 1e6
    share = f"{ours.median / peak.median:.0%}"
    grid.add(case.name, f"{time_ms:.3f}", f"{ours.median:.1f}", *medians, share, *ratios)


def bars(cases: list[Case], results: Results) -> list[Bar]:
    """Return the bars: of products the worst one and how many reach it, of the rest each."""
    found: list[Bar] = []
    products = {
        case.name: Ratio.of(results[case.name][OURS], results[case.name][NUMPY]).value
        for case in cases
        if case.kind == "gemm" and NUMPY in results[case.name]
    }
    if products:
        worst = min(products, key=lambda name: products[name])
        reach = sum(value >= GEMM_TARGET for value in products.values())
        what = f"slowest of {len(products)} products against NumPy ({worst}; {reach} reach it)"
        found.append(Bar(what, products[worst], GEMM_TARGET))
    for name, target in TORCH_TARGETS.items():
        if TORCH in results.get(name, {}):
            found.append(
                Bar(f"{name}, against PyTorch", Ratio.of(results[name][OURS], results[name][TORCH]).value, target)
            )
    return found


if __name__ == "__main__":
    run(main)
