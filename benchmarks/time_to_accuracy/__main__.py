"""`python -m benchmarks.time_to_accuracy`: seconds from the shell prompt to a test accuracy, beside PyTorch DDP.

Both train the same model from the same initial values with the same optimizer, batches and order, evaluate the test set
at the same steps, and end once it reaches the target. Kernels are in PoCL's cache, Python's files are compiled. DDP's
ranks are started directly, without torchrun's launcher. Starts take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.harness import Bar, Grid, Ratio, Report, alternate
from benchmarks.time_to_accuracy.course import add_options
from benchmarks.workers import ROOT, mpi_launch
from clcomm.base.errors import LaunchError
from clcomm.comm.watch import run

PROGRAM = "benchmarks.time_to_accuracy"
OURS, DDP = "clcomm", "PyTorch DDP, gloo"
#: Our seconds over DDP's.
TARGET = 0.5
_LIMIT_S = 600.0


def main() -> None:
    options, console = parse(), harness.make_console()
    report = Report(f"time to {options.target:.0%} test accuracy", harness.command_line(PROGRAM))
    ends: dict[str, list[dict[str, Any]]] = {OURS: [], DDP: []}
    with console.status("training") as status:
        measures = {
            OURS: lambda: _timed(start_ours, options, ends[OURS]),
            DDP: lambda: _timed(start_ddp, options, ends[DDP]),
        }
        samples = alternate(measures, options.windows, show=status.update)
    title = f"{options.model}, {options.ranks} ranks, batch {options.batch_size} a rank, shell to shell"
    grid = Grid(title, ("system", "seconds", "min-max", "steps", "accuracy"))
    for name, found in samples.items():
        last = ends[name][-1]
        grid.add(name, f"{found.median:.2f}", f"{found.low:.2f}-{found.high:.2f}", str(last["steps"]),
                 f"{last['accuracy']:.2%}")  # fmt: skip
    report.grids.append(grid)
    missed = [name for name in ends if min(end["accuracy"] for end in ends[name]) < options.target]
    report.notes += [f"{name} did not reach the target" for name in missed]
    ratio = Ratio.of(samples[OURS], samples[DDP])
    report.notes.append(f"{OURS} over {DDP}: {ratio}")
    if not missed:
        report.bars.append(Bar(f"time to {options.target:.0%}", ratio.value, TARGET, " of DDP's", at_least=False))
    harness.conclude(report, console, options.record)


def parse() -> argparse.Namespace:
    parser = harness.parser(PROGRAM, "From the shell prompt to a test accuracy.", windows=3, window_s=0)
    add_options(parser)
    parser.add_argument("--ranks", type=harness.positive, default=4, help="default: %(default)s")
    return parser.parse_args()


def _timed(start: Any, options: argparse.Namespace, ends: list[dict[str, Any]]) -> float:
    begin = time.perf_counter()
    ends.append(start(options))
    return time.perf_counter() - begin


def start_ours(options: argparse.Namespace) -> dict[str, Any]:
    """Run our job to its end and return rank 0's result."""
    command = [*mpi_launch(options.ranks), sys.executable, "-m", f"{PROGRAM}.native", *_course(options)]
    return _result([_popen(command)])


def start_ddp(options: argparse.Namespace) -> dict[str, Any]:
    """Run DDP's processes to their end and return rank 0's result."""
    command = [sys.executable, "-m", f"{PROGRAM}.ddp", *_course(options)]
    with tempfile.TemporaryDirectory(prefix="clcomm-bench-") as folder:
        shared = {"STORE": str(Path(folder, "store")), "WORLD_SIZE": str(options.ranks)}
        return _result([_popen(command, RANK=str(rank), **shared) for rank in range(options.ranks)])


def _course(options: argparse.Namespace) -> list[str]:
    given = {name: getattr(options, name) for name in ("model", "data", "batch_size", "target", "every")}
    return [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", str(value))]


def _popen(command: list[str], **more: str) -> subprocess.Popen:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return subprocess.Popen(
        command, cwd=ROOT, env={**environment, **more}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def _result(processes: list[subprocess.Popen]) -> dict[str, Any]:
    """Return the line of JSON that one of the processes prints. LaunchError where one fails or none prints it."""
    try:
        outputs = [process.communicate(timeout=_LIMIT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, outputs, strict=True):
        if process.returncode:
            raise LaunchError(f"{PROGRAM}: a process ended with exit code {process.returncode}:\n{errors.strip()}")
    lines = [line for out, _ in outputs for line in out.splitlines() if line.startswith("{")]
    if len(lines) != 1:
        raise LaunchError(f"{PROGRAM}: expected one line of results, got {len(lines)}")
    return json.loads(lines[0])


if __name__ == "__main__":
    run(main)
