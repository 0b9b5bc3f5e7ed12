"""`python -m benchmarks.ops.chains`: chains of elementwise operations, fused and not, beside PyTorch's.

On one thread, forward and backward, by the same code under both libraries' names; the engine's ways are replayed, as in
the Trainer. PyTorch's compiler, with `--compiled`, needs a C++ compiler and takes seconds a case.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

from benchmarks import harness
from benchmarks.harness import Bar, Grid, Ratio, Report
from benchmarks.workers import Job
from clcomm.comm.watch import run

PROGRAM = "benchmarks.ops.chains"
FUSED, ALONE, TORCH, COMPILED = "fused", "one by one", "PyTorch", "compiled"
SIZES = {"4 KiB": 1 << 10, "256 KiB": 1 << 16, "4 MiB": 1 << 20, "64 MiB": 1 << 24}
COLUMNS = 1024
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class Chain(NamedTuple):
    """A chain of a tensor and of others: "row" is a vector, "whole" a tensor of its shape."""

    function: Callable[..., Any]  # of the library, the tensor and the others
    others: tuple[str, ...] = ()


def _gelu(torch: Any, x: Any) -> Any:
    return 0.5 * x * (1.0 + torch.tanh(0.7978845608 * (x + 0.044715 * x * x * x)))


def _huber(torch: Any, x: Any, y: Any) -> Any:
    size = torch.abs(x - y)
    return torch.where(size < 1.0, 0.5 * size * size, size - 0.5)


def _selu(torch: Any, x: Any) -> Any:
    return 1.0507009873554805 * torch.where(x > 0.0, x, 1.6732632423543772 * (torch.exp(x) - 1.0))


def _ten(torch: Any, x: Any, y: Any) -> Any:
    size = torch.sqrt(x * x + y * y + 1.0)
    return torch.exp(-size) * torch.sigmoid(x) + 0.5 * torch.tanh(y) / size


#: By name.
CHAINS = {
    "GELU by tanh": Chain(_gelu),
    "x sigmoid(1.702 x)": Chain(lambda torch, x: x * torch.sigmoid(1.702 * x)),
    "swish gate": Chain(lambda torch, x, y: x * torch.sigmoid(x) * y, ("whole",)),
    "layer scale, residual": Chain(lambda torch, x, y, scale: x + scale * y, ("whole", "row")),
    "bias, ReLU, residual": Chain(lambda torch, x, y, bias: torch.relu(x + bias) + y, ("whole", "row")),
    "Huber by hand": Chain(_huber, ("whole",)),
    "SELU by hand": Chain(_selu),
    "two lerps": Chain(lambda torch, x, y: (x + 0.3 * (y - x)) + 0.6 * (x * y - (x + 0.3 * (y - x))), ("whole",)),
    "ten operations": Chain(_ten, ("whole",)),
}


def main() -> None:
    options, console = parse(), harness.make_console()
    report = Report(
        "chains of elementwise operations on one thread, forward and backward", harness.command_line(PROGRAM)
    )
    ratios: dict[str, float] = {}
    with ExitStack() as stack, console.status("starting") as status:
        ours, theirs = (
            stack.enter_context(Job("benchmarks.ops.worker", library, mpi=False, environment=_ONE_THREAD))
            for library in ("clcomm", "torch")
        )
        jobs = {FUSED: ours, ALONE: ours, TORCH: theirs, **({COMPILED: theirs} if options.compiled else {})}
        for size in options.size:
            others = [way for way in jobs if way != FUSED]
            grid = Grid(size, ("chain", *(f"{way}, us" for way in jobs), *(f"fused to {way}" for way in others)))
            for name in options.only:
                status.update(f"{name}, {size}")
                samples = harness.measured(jobs, options, name=name, size=size)
                found = {way: Ratio.of(samples[FUSED], samples[way]) for way in others}
                grid.add(name, *(f"{1e6 / samples[way].median:.1f}" for way in jobs), *map(str, found.values()))
                ratios[f"{name}, {size}"] = found[TORCH].value
            report.grids.append(grid)
    slowest = min(ratios, key=lambda name: ratios[name])
    report.bars.append(Bar(f"the slowest of {len(ratios)} beside PyTorch ({slowest})", ratios[slowest], 1.0))
    harness.conclude(report, console, options.record)


def parse() -> argparse.Namespace:
    parser = harness.parser(PROGRAM, "Chains of elementwise operations beside PyTorch's.", windows=7, window_s=0.02)
    parser.add_argument("--only", nargs="+", choices=list(CHAINS), default=list(CHAINS), metavar="CHAIN",
        help="default: all")  # fmt: skip
    parser.add_argument("--size", nargs="+", choices=list(SIZES), default=list(SIZES), metavar="SIZE",
        help=f"of {', '.join(SIZES)}; default: all")  # fmt: skip
    parser.add_argument("--compiled", action="store_true", help="also torch.compile, where it works")
    harness.add_clock(parser)
    return parser.parse_args()


if __name__ == "__main__":
    run(main)
