"""`python -m benchmarks.peers`: images/s of this project and its peers, in alternating windows.

Every system trains the same model from the same initial values on the same batches, prepared in host memory as
normalised float32; a step is forward, backward, averaging over the ranks, and plain SGD. Before anything is timed,
all have to reach the same loss in the same steps.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import harness
from benchmarks.harness import Bar, Grid, Ratio, Report, Samples
from benchmarks.machine import cores, describe_machine, describe_versions
from benchmarks.peers.batches import default_data, write_batches
from benchmarks.peers.example import Example
from benchmarks.peers.systems import (
    GLOO_DDP,
    INTEL,
    NETCL,
    NETCL_HELPED,
    OURS,
    OURS_ALONE,
    OURS_ON_INTEL,
    OURS_SHARDED,
    PEERS,
    System,
    calibrate,
    start,
)
from clcomm.base.errors import MismatchError
from clcomm.comm.watch import run

PROGRAM = "benchmarks.peers"
#: The bars against the best peer, by model at batch 64, elsewhere to be ahead; and against netcl.
BEST_PEER_TARGETS = {"convnet": 3.0, "mlp": 2.5}
NETCL_TARGET = 30.0
#: The least speed of the example that a user starts, as a share of our loop here.
EXAMPLE_TARGET = 0.9
_CHECK_STEPS, _LOSS_TOLERANCE = 10, 1e-3


def main() -> None:
    options, console = parse(), harness.make_console()
    report, speeds = Report("images per second beside the peers", harness.command_line(PROGRAM)), list[str]()
    for model in options.model:
        for batch in options.batch:
            samples = measure(options, model, batch, report, console)
            if GLOO_DDP in samples:
                ours = samples[OURS]
                speeds.append(f"{model} {ours.median:,.0f}, {Ratio.of(ours, samples[GLOO_DDP])}")
    harness.conclude(report, console, options.record)
    if options.row:
        console.print(row(options.ranks, speeds), highlight=False)


def parse() -> argparse.Namespace:
    parser = harness.parser(PROGRAM, "This project beside its peers.", windows=5, window_s=2.0)
    parser.add_argument("--model", nargs="+", choices=("convnet", "mlp"), default=["convnet"])
    parser.add_argument("--batch", nargs="+", type=harness.positive, default=[64], help="of a rank; default: 64")
    parser.add_argument("--ranks", type=harness.positive, default=4, help="default: %(default)s")
    parser.add_argument(
        "--peers", nargs="*", choices=(*PEERS, INTEL), default=list(PEERS),
        help="default: ddp lizardist netcl; intel: this project there too"
    )  # fmt: skip
    parser.add_argument("--data", default=default_data(), help="as for the examples; default here: %(default)s")
    parser.add_argument("--example", action="store_true", help=f"measure `{Example.name}` too")
    parser.add_argument("--row", action="store_true", help="print this machine's row for docs/benchmarks.md")
    parser.add_argument(
        "--torch-threads", nargs="+", type=harness.positive, default=sorted({1, cores()}), metavar="N",
        help="threads a rank to try for PyTorch; each system keeps its fastest; default: %(default)s",
    )  # fmt: skip
    return parser.parse_args()


def row(ranks: int, speeds: list[str]) -> str:
    """Return this machine's line for the table of docs/benchmarks.md: images/s and the ratio to DDP, by model."""
    versions = describe_versions(("pocl-binary-distribution", "intel-opencl-rt", "torch"))
    cells = (describe_machine(), str(ranks), "; ".join(speeds), versions, date.today().isoformat())
    return f"this machine's row for docs/benchmarks.md:\n| {' | '.join(cells)} |"


def measure(
    options: argparse.Namespace, model: str, batch: int, report: Report, console: Console
) -> dict[str, Samples]:
    """Measure one model at one batch size, add the results to the report, and return images/s by system."""
    with tempfile.TemporaryDirectory(prefix="clcomm-bench-") as folder:
        path = Path(folder, "batches.npz")
        shape = write_batches(path, options.data, options.ranks, batch, lambda line: None)
        arguments = ["--model", model, "--batches", str(path), "--shape", *map(str, shape)]
        with (
            console.status(f"starting {model}, batch {batch}") as status,
            start(options.peers, options.ranks, batch, arguments) as systems,
        ):
            status.update("checking that all do the same")
            losses = check_same_work(systems)
            status.update("choosing threads")
            choose_threads(systems, options.torch_threads, options.window_s)
            calibrate(systems, options.window_s)
            measures = {system.name: system.images_per_s for system in systems}
            if options.example:
                example = Example(model, options.data, options.ranks, batch, options.window_s)
                measures[example.name] = example.images_per_s
            samples = harness.alternate(
                measures,
                options.windows,
                show=lambda line: status.update(f"{model}, batch {batch}: {line}"),
            )
    title = f"{model}, {options.ranks} ranks, batch {batch} a rank, {options.data}"
    report.grids.append(table(title, systems, samples))
    if options.example:
        report.grids[-1].add(*example_row(options.ranks, batch, samples))
    report.notes.append(f"{title}: loss after {_CHECK_STEPS} steps {losses}")
    report.bars += bars(model, batch, options.ranks, systems, samples)
    return samples


def check_same_work(systems: list[System]) -> str:
    """Train each a few steps and compare the losses; MismatchError where systems of as many ranks disagree."""
    losses: dict[int, dict[str, float]] = {}
    for system in systems:
        losses.setdefault(system.ranks, {})[system.name] = system.window(_CHECK_STEPS)["loss"]
    for group in losses.values():
        first = next(iter(group.values()))
        for name, loss in group.items():
            if not math.isclose(loss, first, rel_tol=_LOSS_TOLERANCE):
                raise MismatchError(f"{name}: expected the loss {first:.6f} as {next(iter(group))} has, got {loss:.6f}")
    return ", ".join(f"{next(iter(group.values())):.5f} on {ranks} rank(s)" for ranks, group in losses.items())


def choose_threads(systems: list[System], choices: list[int], window_s: float) -> None:
    """Set each PyTorch system to the number of threads that is fastest in a short window."""
    for system in systems:
        if "threads" not in system.settings or len(choices) < 2:
            continue
        speeds: dict[int, float] = {}
        for threads in choices:
            system.settings["threads"] = threads
            seconds = system.window(5)["seconds"] / 5
            speeds[threads] = system.window(harness.repeats_for(seconds, window_s / 2))["images_per_s"]
        system.settings["threads"] = max(speeds, key=lambda threads: speeds[threads])


def table(title: str, systems: list[System], samples: dict[str, Samples]) -> Grid:
    """Return all systems' speeds, and ours over theirs."""
    grid = Grid(title, ("system", "ranks", "threads", "images/s", "min-max", "ms a step", "clcomm is (range)"))
    names = [system.name for system in systems]
    for system in systems:
        mine = samples[system.name]
        ours = OURS_ALONE if system.ranks == 1 and OURS_ALONE in names else OURS
        grid.add(
            system.name, str(system.ranks), str(system.settings.get("threads", "")), f"{mine.median:,.0f}",
            f"{mine.low:,.0f}-{mine.high:,.0f}", f"{1e3 * system.ranks * system.batch / mine.median:.2f}",
            "" if system.name == ours else str(Ratio.of(samples[ours], mine)),
        )  # fmt: skip
    return grid


def example_row(ranks: int, batch: int, samples: dict[str, Samples]) -> tuple[str, ...]:
    """Return the example's row of the table."""
    mine = samples[Example.name]
    speeds = f"{mine.median:,.0f}", f"{mine.low:,.0f}-{mine.high:,.0f}", f"{1e3 * ranks * batch / mine.median:.2f}"
    return Example.name, str(ranks), "", *speeds, str(Ratio.of(samples[OURS], mine))


def bars(model: str, batch: int, ranks: int, systems: list[System], samples: dict[str, Samples]) -> list[Bar]:
    """Return the bars with their figures."""
    result: list[Bar] = []
    not_peers: Any = (OURS, OURS_SHARDED, OURS_ALONE, OURS_ON_INTEL, NETCL, NETCL_HELPED)
    peers = [system.name for system in systems if system.name not in not_peers]
    label = f"{model}, batch {batch}"
    if peers:
        best = harness.best_of(samples, peers)
        target = BEST_PEER_TARGETS[model] if batch == 64 else 1.0
        ours = harness.best_of(samples, [name for name in (OURS, OURS_SHARDED) if name in samples])
        value = Ratio.of(samples[ours], samples[best]).value
        result.append(Bar(f"{label}, {ranks} ranks, {ours} against the best peer ({best})", value, target))
    if Example.name in samples and batch == 64:
        value = Ratio.of(samples[Example.name], samples[OURS]).value
        result.append(Bar(f"{label}, {ranks} ranks, {Example.name} against clcomm's loop here", value, EXAMPLE_TARGET))
    if NETCL in samples:
        value = Ratio.of(samples[OURS_ALONE if ranks > 1 else OURS], samples[NETCL]).value
        result.append(Bar(f"{label}, 1 rank, against {NETCL}", value, NETCL_TARGET))
    return result


if __name__ == "__main__":
    run(main)
