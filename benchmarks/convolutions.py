"""`python -m benchmarks.convolutions`: convolutions as ResNets have them, forward and backward, beside PyTorch."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from benchmarks import harness
from benchmarks.harness import Bar, Grid, Ratio, Report
from benchmarks.kernels.__main__ import OURS, TORCH, Results, measure_all
from benchmarks.kernels.cases import Case
from benchmarks.kernels.peak import peak_of
from clcomm.comm.watch import run

PROGRAM = "benchmarks.convolutions"
TARGET = 0.7
#: kernel, stride, channels, side and outputs of each layer, padded by half its kernel; from a stem to the last stage.
_LAYERS = (
    (7, 2, 3, 224, 64), (3, 1, 3, 32, 64), (7, 1, 16, 28, 32), (5, 1, 32, 28, 64), (5, 2, 32, 28, 64),
    (3, 1, 16, 56, 16), (3, 1, 64, 56, 64), (3, 1, 128, 28, 128), (3, 1, 256, 14, 256), (3, 1, 256, 7, 256),
    (3, 2, 64, 56, 128), (3, 2, 128, 28, 256), (3, 2, 256, 14, 256),
    (1, 1, 64, 56, 64), (1, 1, 64, 56, 256), (1, 1, 256, 28, 64), (1, 1, 256, 14, 256), (1, 1, 256, 7, 256),
    (1, 2, 64, 56, 128), (1, 2, 128, 28, 256), (1, 2, 256, 14, 256),
)  # fmt: skip
_KERNELS = (1, 3, 5, 7)
_LARGE_SIDE = 128  # images from which only the smallest batch is measured


def main() -> None:
    options, console = parse(), harness.make_console()
    report = Report("convolutions on one thread", harness.command_line(PROGRAM))
    cases = list(make_cases(options.batch, options.kernel))
    fill(report, cases, measure_all(cases, options, console)[0])
    harness.conclude(report, console, options.record)


def parse() -> argparse.Namespace:
    parser = harness.parser(PROGRAM, "Convolutions with their gradients on one thread.", windows=3, window_s=0.1)
    parser.add_argument("--batch", nargs="+", type=harness.positive, default=[4, 16], help="default: 4 16")
    parser.add_argument(
        "--kernel", nargs="+", type=int, choices=(1, 3, 5, 7), default=[1, 3, 5, 7], help="default: all"
    )
    harness.add_clock(parser)
    options = parser.parse_args()
    options.systems = [OURS, TORCH]
    return options


def make_cases(batches: Sequence[int], kernels: Sequence[int]) -> Iterator[Case]:
    """Yield the layers with these kernels at each batch size, large images at the smallest one alone."""
    for kernel, stride, channels, side, outputs in _LAYERS:
        for batch in batches if side < _LARGE_SIDE else [min(batches)]:
            if kernel in kernels:
                yield _case(kernel, stride, channels, side, outputs, batch)


def _case(kernel: int, stride: int, channels: int, side: int, outputs: int, batch: int) -> Case:
    out_side = (side + 2 * (kernel // 2) - kernel) // stride + 1
    flops = 2.0 * batch * outputs * out_side**2 * channels * kernel**2
    first = channels == 3  # images, whose gradient is not needed
    return Case(
        "conv",
        f"{kernel}x{kernel} / {stride}, {channels} to {outputs}, {side} x {side}, batch {batch}",
        flops * (2 if first else 3),  # each gradient is as much work as the forward pass
        {"batch": batch, "channels": channels, "side": side, "outputs": outputs, "kernel": kernel, "stride": stride},
        passes="forward+backward",
        first=first,
    )


def fill(report: Report, cases: list[Case], results: Results) -> None:
    """Add the table, and the slowest case as a bar."""
    peak = results[peak_of(False).name][OURS].median
    grid = Grid(
        "forward and backward, GFLOP/s; kernel / stride, channels to outputs, size of the images",
        ("case", "MFLOP", "ms", OURS, TORCH, "of peak", "to PyTorch"),
    )
    ratios = {case.name: Ratio.of(results[case.name][OURS], results[case.name][TORCH]) for case in cases}
    for case in cases:
        ours, theirs = (results[case.name][name].median for name in (OURS, TORCH))
        grid.add(
            case.name, f"{case.flops / 1e6:.0f}", f"{case.flops / ours / 1e6:.2f}", f"{ours:.1f}", f"{theirs:.1f}",
            f"{ours / peak:.0%}", str(ratios[case.name]),
        )  # fmt: skip
    worst = min(ratios, key=lambda name: ratios[name].value)
    reach = sum(ratio.value >= TARGET for ratio in ratios.values())
    report.grids.append(grid)
    report.notes.append(f"one core's measured peak: {peak:.1f} GFLOP/s, {peak_of(False).name} in OpenCL")
    report.bars.append(Bar(f"slowest of {len(cases)} ({worst}; {reach} reach it)", ratios[worst].value, TARGET))


if __name__ == "__main__":
    run(main)
