"""`python -m benchmarks.kernels`: GFLOP/s of one thread by op and shape, beside PyTorch, NumPy and the core's peak.

With --device gpu that of a GPU, beside PyTorch's on it, where PyTorch has it, and its measured peak.
"""

from __future__ import annotations

import argparse
import math
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial

from rich.console import Console

from benchmarks import harness
from benchmarks.harness import Bar, Grid, Ratio, Report, Samples
from benchmarks.kernels import roofline
from benchmarks.kernels.cases import CUBES, GPU_CUBES, KINDS, Case, copy_of, make_cases
from benchmarks.kernels.peak import peak_of
from benchmarks.workers import Job
from clcomm.base.storage.files import write_whole
from clcomm.comm.watch import run

PROGRAM = "benchmarks.kernels"
OURS, TORCH, NUMPY = "clcomm", "PyTorch", "NumPy"
_MODULES = {OURS: "engine", TORCH: "pytorch", NUMPY: "numpy_blas"}
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
#: The least speed of each product, as a multiple of the other system's.
PRODUCT_TARGETS = {NUMPY: 0.9, TORCH: 0.85}
GPU_PEAK_TARGET, MEMORY_TARGET = 0.6, 0.8
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
    cases = make_cases(options.only, options.batch, options.side or (GPU_CUBES if options.on_gpu else CUBES))
    arguments = (options.device, "as gpu" if options.as_gpu else "") if options.device else ()
    results, devices = measure_all(cases, options, console, arguments, options.on_gpu)
    if options.device:
        report.title = "kernels on " + ", ".join(f"{device} ({name})" for name, device in devices.items())
    fill(report, cases, results, options.on_gpu)
    harness.conclude(report, console, options.record)
    if options.roofline:
        speeds = {name: samples[OURS].median for name, samples in results.items()}
        drawn = roofline.draw(roofline.points(cases, speeds), speeds[peak_of(False).name], speeds[copy_of().name])
        write_whole(options.roofline, drawn, "--roofline")


def measure_all(
    cases: list[Case], options: argparse.Namespace, console: Console, arguments: tuple[str, ...] = (),
    on_gpu: bool = False,
) -> tuple[Results, dict[str, str]]:  # fmt: skip
    """Return the GFLOP/s of the systems in `options.systems`, by case, and their devices; the peak is the first one."""
    results: Results = {}
    with ExitStack() as stack, console.status("starting") as status:
        jobs = {
            name: stack.enter_context(
                Job(f"benchmarks.kernels.{module}", *arguments, mpi=False, environment=_ONE_THREAD)
            )
            for name, module in _MODULES.items()
            if name in options.systems
        }
        for number, case in enumerate([peak_of(on_gpu), *([] if on_gpu else [copy_of()]), *cases]):
            status.update(f"{case.name} ({number} of {len(cases)})")
            results[case.name] = measure(case, jobs, options)
        answers = {name: job.ask(case=asdict(cases[0]), repeats=1)[0] for name, job in jobs.items()}
    return results, {name: answer["device"] for name, answer in answers.items() if answer}


def parse() -> argparse.Namespace:
    parser = harness.parser(PROGRAM, "Kernels and steps on one thread.", windows=25, window_s=0.02)
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS), help="kinds of cases; default: all")
    parser.add_argument("--batch", nargs="+", type=harness.positive, default=[16, 64, 256], help="default: 16 64 256")
    parser.add_argument(
        "--side", nargs="+", type=harness.positive,
        help=f"of square products; default: {' '.join(map(str, CUBES))}, on a GPU {' '.join(map(str, GPU_CUBES))}",
    )  # fmt: skip
    parser.add_argument("--device", help="a whole device, as CLCOMM_DEVICE names it; default: a core of the CPU")
    parser.add_argument("--as-gpu", action="store_true", help="a CPU --device runs the kernels of GPUs")
    parser.add_argument("--systems", nargs="+", choices=list(_MODULES), default=list(_MODULES), help="default: all")
    parser.add_argument("--roofline", metavar="FILE.svg", help="draw the speeds under the core's roofline")
    harness.add_clock(parser)
    options = parser.parse_args()
    if options.roofline and options.device:
        parser.error("--roofline: expected without --device, as the roof is that of a core")
    if options.as_gpu and not options.device:
        parser.error("--as-gpu: expected with --device, got no device; do: --device cpu --as-gpu")
    options.on_gpu = options.as_gpu or (options.device is not None and not options.device.startswith("cpu"))
    left_out = {OURS, NUMPY} if options.device else {OURS}
    options.systems = [OURS, *(name for name in options.systems if name not in left_out)]
    return options


def measure(case: Case, jobs: dict[str, Job], options: argparse.Namespace) -> dict[str, Samples]:
    """Return the GFLOP/s of every system that has the case, in alternating windows."""

    def seconds(name: str, repeats: int) -> float:
        return jobs[name].ask(case=asdict(case), repeats=repeats)[0].get(options.clock, math.nan)

    repeats: dict[str, int] = {}
    for name in jobs:
        if not math.isnan(seconds(name, 1)):  # the first run also builds
            repeats[name] = harness.repeats_that_fill(partial(seconds, name), options.window_s)

    def speed(name: str) -> float:
        return case.flops * repeats[name] / seconds(name, repeats[name]) / 1e9

    return harness.alternate({name: partial(speed, name) for name in repeats}, options.windows)


def fill(report: Report, cases: list[Case], results: Results, on_gpu: bool) -> None:
    """Add the figures to the report: a table for each kind of case."""
    name = peak_of(on_gpu).name
    peak = results[name][OURS]
    report.notes.append(
        f"{'the GPU' if on_gpu else 'one core'}'s measured peak: {peak.median:.1f} GFLOP/s "
        f"({peak.low:.1f}-{peak.high:.1f}), {name} in OpenCL; 'of peak' is clcomm's share of it"
    )
    for kind in dict.fromkeys(case.kind for case in cases):
        of_memory = kind == "memory"
        unit, share = ("GB/s", "of a copy") if of_memory else ("GFLOP/s", "of peak")
        grid = Grid(f"{unit}, {kind}", ("case", "ms", OURS, TORCH, NUMPY, share, "to PyTorch", "to NumPy"))
        for case in cases:
            if case.kind == kind:
                add_row(grid, case, results[case.name], results[copy_of().name][OURS] if of_memory else peak)
        report.grids.append(grid)
    report.bars = gpu_bars(cases, results, peak) if on_gpu else bars(cases, results)
    report.bars += [] if on_gpu else memory_bars(cases, results)


def add_row(grid: Grid, case: Case, samples: dict[str, Samples], peak: Samples) -> None:
    """Append a case's medians and ratios."""
    ours = samples[OURS]
    medians = [f"{samples[name].median:.1f}" if name in samples else "" for name in (TORCH, NUMPY)]
    ratios = [str(Ratio.of(ours, samples[name])) if name in samples else "" for name in (TORCH, NUMPY)]
    time_ms = case.flops / ours.median / 1e6
    share = f"{ours.median / peak.median:.0%}"
    grid.add(case.name, f"{time_ms:.3f}", f"{ours.median:.1f}", *medians, share, *ratios)


def gpu_bars(cases: list[Case], results: Results, peak: Samples) -> list[Bar]:
    """Return the bar of the largest products, each way that their operands lie: their share of the peak."""
    largest = max((case.flops for case in cases if case.kind == "gemm"), default=0.0)
    return [
        Bar(f"{case.name}, of the peak", results[case.name][OURS].median / peak.median, GPU_PEAK_TARGET)
        for case in cases
        if case.kind == "gemm" and case.flops == largest
    ]


def memory_bars(cases: list[Case], results: Results) -> list[Bar]:
    """Return the bars of what its memory limits: the share of a copy's speed."""
    memory = [case.name for case in cases if case.kind == "memory"]
    copied = results[copy_of().name][OURS].median if memory else 1.0
    return [Bar(f"{name}, of a copy", results[name][OURS].median / copied, MEMORY_TARGET) for name in memory]


def bars(cases: list[Case], results: Results) -> list[Bar]:
    """Return the bars: of products the slowest beside each system and how many reach it, of the rest each."""
    found: list[Bar] = []
    for system, target in PRODUCT_TARGETS.items():
        products = {
            case.name: Ratio.of(results[case.name][OURS], results[case.name][system]).value
            for case in cases
            if case.kind == "gemm" and system in results[case.name]
        }
        if products:
            worst = min(products, key=lambda name: products[name])
            reach = sum(value >= target for value in products.values())
            what = f"slowest of {len(products)} products against {system} ({worst}; {reach} reach it)"
            found.append(Bar(what, products[worst], target))
    for name, target in TORCH_TARGETS.items():
        if TORCH in results.get(name, {}):
            found.append(
                Bar(f"{name}, against PyTorch", Ratio.of(results[name][OURS], results[name][TORCH]).value, target)
            )
    return found


if __name__ == "__main__":
    run(main)
