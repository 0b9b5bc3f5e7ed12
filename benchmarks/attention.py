"""`python -m benchmarks.attention`: attention and layer norm as GPT has them, and its step, beside PyTorch."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from benchmarks import harness
from benchmarks.harness import Bar, Grid, Ratio, Report
from benchmarks.kernels.__main__ import OURS, TORCH, Results, measure_all
from benchmarks.kernels.cases import Case
from benchmarks.kernels.peak import peak_of
from clcomm.comm.watch import run

PROGRAM = "benchmarks.attention"
TARGET = 1.0
_LAYER_NORM_FLOPS = 14  # for each element, forward and backward
#: The attention that the bar is about: 6 heads of 32 over 256 tokens, the GPT of the examples.
_GPT = (6, 256, 32)
#: Heads, tokens and the length of a key: longer contexts, longer keys, lengths that fill no vector.
_OTHERS = ((6, 64, 32), (6, 1024, 32), (4, 256, 64), (2, 256, 128), (4, 200, 20))


def main() -> None:
    options, console = parse(), harness.make_console()
    report = Report("attention and layer norm on one thread", harness.command_line(PROGRAM))
    cases = list(make_cases(options.batch))
    fill(report, cases, measure_all(cases, options, console)[0])
    harness.conclude(report, console, options.record)


def parse() -> argparse.Namespace:
    parser = harness.parser(PROGRAM, "Attention and layer norm with their gradients.", windows=9, window_s=0.1)
    parser.add_argument("--batch", type=harness.positive, default=8, help="default: 8")
    harness.add_clock(parser)
    options = parser.parse_args()
    options.systems = [OURS, TORCH]
    return options


def make_cases(batch: int) -> Iterator[Case]:
    """Yield GPT's attention and layer norm, then others."""
    heads, tokens, length = _GPT
    yield _attention("causal", batch, *_GPT)
    yield _layer_norm(batch * tokens, heads * length)
    yield _attention("full", batch, *_GPT)
    for sizes in _OTHERS:
        yield _attention("causal", batch, *sizes)
    yield _layer_norm(batch * tokens, 1000)
    yield _gpt(batch, *_GPT)


def _gpt(batch: int, heads: int, tokens: int, length: int) -> Case:
    sizes = {"vocabulary": 96, "context": tokens, "layers": 6, "width": heads * length, "heads": heads}
    width = sizes["width"]
    products = sizes["layers"] * 12 * width**2 + sizes["vocabulary"] * width
    flops = 6.0 * batch * tokens * products + sizes["layers"] * _attention("causal", batch, heads, tokens, length).flops
    return Case("gpt", f"step of GPT, batch {batch}", flops, {"batch": batch, **sizes}, passes="forward+backward")


def _attention(variant: str, batch: int, heads: int, tokens: int, length: int) -> Case:
    pairs = tokens * (tokens + 1) / 2 if variant == "causal" else tokens**2
    return Case(
        "attention",
        f"{variant} attention, {heads} heads of {length}, {tokens} tokens, batch {batch}",
        7 * 2.0 * batch * heads * pairs * length,  # two products forward, five backward
        {"batch": batch, "heads": heads, "tokens": tokens, "length": length},
        variant,
        "forward+backward",
    )


def _layer_norm(rows: int, columns: int) -> Case:
    flops = float(_LAYER_NORM_FLOPS * rows * columns)
    sizes = {"rows": rows, "columns": columns}
    return Case("layer norm", f"layer norm of {columns}, {rows} rows", flops, sizes, passes="forward+backward")


def fill(report: Report, cases: list[Case], results: Results) -> None:
    """Add the table, and as bars GPT's attention and layer norm."""
    grid = Grid("forward and backward, GFLOP/s", ("case", "ms", OURS, TORCH, "to PyTorch"))
    ratios = {case.name: Ratio.of(results[case.name][OURS], results[case.name][TORCH]) for case in cases}
    for case in cases:
        ours, theirs = (results[case.name][name].median for name in (OURS, TORCH))
        grid.add(
            case.name, f"{case.flops / ours / 1e6:.2f}", f"{ours:.1f}", f"{theirs:.1f}", str(ratios[case.name])
        )  # fmt: skip
    report.grids.append(grid)
    peak = results[peak_of(False).name][OURS].median
    report.notes.append(f"one core's measured peak: {peak:.1f} GFLOP/s, {peak_of(False).name} in OpenCL")
    report.bars += [Bar(case.name, ratios[case.name].value, TARGET) for case in cases[:2]]


if __name__ == "__main__":
    run(main)
