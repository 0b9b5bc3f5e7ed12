"""Times collectives and checks their results, for `clcomm bench` and `clcomm tune`.

A barrier precedes each timed call, and the slowest rank's time counts: seconds are reduced with max over the ranks,
call by call, before any median is taken. A time therefore includes how far apart the ranks leave the barrier. Calls are
timed in several windows, in which the cases to compare alternate; each window starts with an untimed call, the first
with `warmup` more.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

import numpy as np

from clcomm.base.errors import ArgumentError, DeviceError
from clcomm.comm.communicator import Communicator
from clcomm.comm.stats.comm_stats import Collective, bus_factor
from clcomm.comm.transport.mpi_runtime import Intracomm
from clcomm.comm.transport.reduction import Fold
from clcomm.insight.measure.collective_cases import CASES, AllReduceCase, Case


class MeasuredTransport:
    """A Communicator under its requested transport's name; `moved_by` is the transport that moved the data.

    Args:
        comm: an MPI communicator; None: the world.
        fold: sums floats in shared memory; None: NumPy does.
    """

    def __init__(self, transport: str, comm: Intracomm | None = None, fold: Fold | None = None):
        self.name, self.moved_by, self.fold = transport, "", fold
        self.comm = Communicator(comm, transport=transport, observers=[self])
        self.comm.fold_with(fold)

    def collective_finished(self, event: Collective) -> None:
        if event.nbytes:
            self.moved_by = event.transport


@dataclass(frozen=True)
class TimingSchedule:
    """`calls` timed calls in each of `windows` windows, after `warmup` calls of each case."""

    calls: int = 5
    windows: int = 4
    warmup: int = 3


class Timeable(Protocol):
    """An operation for `time_calls`."""

    def once(self) -> object: ...


def time_calls(cases: Sequence[Timeable], control: Communicator, schedule: TimingSchedule) -> np.ndarray:
    """Return the slowest rank's seconds of each timed call: (cases, windows x calls), the same on all ranks.

    `control` spans the measuring ranks; its barrier precedes each call, and it reduces the maxima.
    """
    seconds = np.empty((len(cases), schedule.windows * schedule.calls))
    for case in cases:
        for _ in range(schedule.warmup):
            case.once()
    for window in range(schedule.windows):
        for case, its_seconds in zip(cases, seconds, strict=True):
            case.once()
            for call in range(window * schedule.calls, (window + 1) * schedule.calls):
                control.barrier()
                begin = time.perf_counter()
                case.once()
                its_seconds[call] = time.perf_counter() - begin
    return control.all_reduce(seconds, "max")


@dataclass(frozen=True)
class BenchRow:
    """A row of nccl-tests' columns over all timed calls; times in us, bandwidths in GB/s (10^9 bytes).

    `algbw` is bytes over the median time, `busbw` that times the share that crosses each rank's link. `wrong` counts
    the elements on all ranks that differ from the expected result. `moved_by` is the transport that was used, `sums`
    is "device", "numpy", or "none" where nothing is reduced.
    """

    operation: str
    transport: str
    moved_by: str
    bytes: int
    count: int
    dtype: str
    op: str
    sums: str
    min_us: float
    p50_us: float
    p99_us: float
    algbw_gb_s: float
    busbw_gb_s: float
    wrong: int

    @classmethod
    def of(cls, case: Case, target: MeasuredTransport, seconds: np.ndarray, wrong: int) -> BenchRow:
        median = float(np.median(seconds))
        algbw = case.nbytes / median / 1e9 if median else 0.0
        operation = "all_reduce" if isinstance(case, AllReduceCase) else case.operation
        return cls(
            case.operation, target.name, target.moved_by, case.nbytes, case.count, case.dtype.name,
            case.op if case.reduces else "none", _sums(case, target),
            float(seconds.min()) * 1e6, median * 1e6, float(np.percentile(seconds, 99, method="higher")) * 1e6,
            algbw, algbw * bus_factor(operation, case.comm.size), wrong,
        )  # fmt: skip

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def _sums(case: Case, target: MeasuredTransport) -> str:
    if not case.reduces:
        return "none"
    ops = {np.dtype(np.float32): ("sum", "mean"), np.dtype(np.float16): ("sum",)}.get(case.dtype, ())
    is_folded = isinstance(case, AllReduceCase) and case.op in ops
    in_memory = target.moved_by in ("shared", "hierarchical") and target.comm.local_size > 1
    return "device" if target.fold is not None and is_folded and in_memory else "numpy"


def measure(
    targets: Sequence[MeasuredTransport],
    control: Communicator,
    operation: str,
    nbytes: int,
    dtype: str,
    op: str,
    schedule: TimingSchedule,
) -> list[BenchRow]:
    """Time one operation at one size on each target in turn, check its results, and return a row for each target.

    Args:
        control: see `time_calls`.
        operation: a key of CASES.
        nbytes: rounded down to whole elements.
        op: the reduction, for operations that reduce.
    """
    cases = [CASES[operation](target.comm, nbytes, dtype, op) for target in targets]
    seconds = time_calls(cases, control, schedule)
    wrong = control.all_reduce(np.array([case.check() for case in cases], np.int64))
    return [
        BenchRow.of(case, target, its_seconds, int(its_wrong))
        for case, target, its_seconds, its_wrong in zip(cases, targets, seconds, wrong, strict=True)
    ]


def sizes_between(smallest: int, largest: int, factor: float) -> list[int]:
    """Return `smallest` and its multiples by powers of `factor`, up to `largest`."""
    if not 1 <= smallest <= largest:
        raise ArgumentError(f"--max: expected at least --min's {smallest} bytes, got {largest}")
    if not factor > 1:
        raise ArgumentError(f"--factor: expected a number above 1, got {factor:g}")
    sizes, size = [], float(smallest)
    while size <= largest:
        sizes.append(int(size))
        size *= factor
    return sorted(set(sizes))


# --- The --sums option of `clcomm bench` and `clcomm tune`: sums on each rank's device, or by NumPy. ---


def add_sums_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sums", choices=("device", "numpy"),
        help="what sums floats in shared memory; default: the device, where it computes in the calling thread, "
        "as training does")  # fmt: skip


def agreed_fold(control: Communicator, sums: str | None) -> Fold | None:
    """Return the fold of this rank's device, or None for NumPy, the same choice on every rank; collective.

    Args:
        sums: "device", "numpy", or None: the device if every rank has one that computes in the calling thread.

    Raises ArgumentError on every rank, for "device" where some rank has no such device.
    """
    fold, problem = (None, "as asked") if sums == "numpy" else _own_fold(control)
    problems = {rank: text for rank, text in enumerate(control.all_gather_object(problem)) if text}
    if sums == "device" and problems:
        rank, text = next(iter(problems.items()))
        raise ArgumentError(
            f"--sums: expected every rank's device to compute in the calling thread, but on rank {rank}: {text}; "
            "use --sums numpy"
        )
    return None if problems else fold


def _own_fold(control: Communicator) -> tuple[Fold | None, str]:
    """Return the fold of the device that this rank would train on, or None and the reason."""
    from clcomm.engine.device import Device  # imported here: NumPy's sums need no engine
    from clcomm.engine.fold import DeviceFold

    try:
        device = Device.select(local_rank=control.local_rank, local_size=control.local_size, cores=control.cores)
    except (DeviceError, ImportError) as error:
        return None, str(error)
    fold = DeviceFold.on(device)
    return fold, "" if fold else f"{device.name} does not"
