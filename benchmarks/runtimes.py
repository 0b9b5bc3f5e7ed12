"""`python -m benchmarks.runtimes [LIBRARY...]`: this CPU's OpenCL runtimes side by side, on one thread.

PoCL from PyPI, Intel's runtime where it is installed, and other drivers by their library, such as a newer PoCL's.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path

from benchmarks import harness
from benchmarks.harness import Grid, Ratio, Report
from benchmarks.kernels.__main__ import Results, measure
from benchmarks.kernels.cases import Case, make_cases
from benchmarks.workers import Job
from clcomm.engine import intel_runtime

PROGRAM = "benchmarks.runtimes"
WHEEL, INTEL = "PyPI's PoCL", "Intel's"
_KINDS, _SIDES, _BATCHES = ("gemm", "conv", "block", "step", "memory"), (512, 1024), (64,)


def main() -> None:
    parser = harness.parser(PROGRAM, "OpenCL runtimes of one CPU, on one thread.", windows=9, window_s=0.05)
    parser.add_argument("libraries", nargs="*", metavar="LIBRARY", help="of a further driver, as .icd files name it")
    harness.add_clock(parser)
    options, console = parser.parse_args(), harness.make_console()
    for library in options.libraries:
        if not Path(library).is_file():
            parser.error(f"LIBRARY: expected a driver's file, got {library!r}")
    report = Report("OpenCL runtimes on one thread", harness.command_line(PROGRAM))
    with ExitStack() as stack:
        jobs = {
            name: stack.enter_context(Job("benchmarks.kernels.engine", mpi=False, environment=environment))
            for name, environment in stack.enter_context(runtimes(options.libraries))
        }
        cases = [case for case in make_cases(_KINDS, _BATCHES, _SIDES) if is_shown(case)]
        with console.status("starting") as status:
            results: Results = {}
            for number, case in enumerate(cases):
                status.update(f"{case.name} ({number + 1} of {len(cases)})")
                results[case.name] = measure(case, jobs, options)
        for name, job in jobs.items():
            report.notes.append(f"{name}: {job.ask(case=asdict(cases[0]), repeats=1)[0]['device']}")
    fill(report, cases, results, list(jobs))
    harness.conclude(report, console, options.record)


def is_shown(case: Case) -> bool:
    """Return whether a case is in the table: of the products those that fill a core."""
    return case.kind != "gemm" or case.sizes["k"] == case.sizes["m"]


@contextmanager
def runtimes(libraries: list[str]) -> Iterator[list[tuple[str, dict[str, str]]]]:
    """Yield each runtime's name and the variables that select it."""
    one_core = {"CLCOMM_DEVICE": ""}
    found = [(WHEEL, one_core)]
    if intel_runtime.library():
        found.append((INTEL, {"CLCOMM_DEVICE": "intel"}))
    with tempfile.TemporaryDirectory(prefix="clcomm-bench-") as folder:
        for number, library in enumerate(libraries):
            vendors = Path(folder, str(number))
            vendors.mkdir()
            path = Path(library).resolve()
            (vendors / "driver.icd").write_text(f"{path}\n")
            # Its own libraries lie beside it where it was unpacked, not installed.
            beside = os.pathsep.join(filter(None, (str(path.parent), os.environ.get("LD_LIBRARY_PATH"))))
            own = {"OCL_ICD_VENDORS": str(vendors), "LD_LIBRARY_PATH": beside, "POCL_CACHE_DIR": f"{vendors}/cache"}
            found.append((path.name, one_core | own))
        yield found


def fill(report: Report, cases: list[Case], results: Results, names: list[str]) -> None:
    """Add a table of speeds, with each further runtime's ratio to the first."""
    first, *others = names
    grid = Grid("GFLOP/s (memory: GB/s)", ("case", first, *(each for name in others for each in (name, f"to {first}"))))
    for case in cases:
        samples = results[case.name]
        cells = [f"{samples[first].median:.1f}"]
        for name in others:
            cells += [f"{samples[name].median:.1f}", str(Ratio.of(samples[name], samples[first]))]
        grid.add(case.name, *cells)
    report.grids.append(grid)


if __name__ == "__main__":
    main()
