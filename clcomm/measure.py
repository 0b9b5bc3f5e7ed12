"""Times collectives and checks what they return: what `clcomm bench` and `clcomm tune` measure with.

A barrier goes before each timed call, and of each call the slowest rank's time counts: seconds are reduced with max
over the ranks, call by call, before any median is taken. So a time includes how far apart the ranks leave the barrier.
Calls come in several windows, and cases to compare take turns window by window; each window begins with a call that
does not count, the first one with more.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np

from clcomm.collective_cases import CASES, AllReduce, Case
from clcomm.communicator import Communicator
from clcomm.errors import ArgumentError
from clcomm.stats import Collective, bus_factor
from clcomm.transport.reduction import Fold


class Lane:
    """A Communicator to measure, under the name of the transport that was asked for.

    fold: what makes sums of floats in shared memory; None: NumPy.
    """

    def __init__(self, transport: str, comm: Any = None, fold: Fold | None = None):
        self.name, self.moved_by, self.fold = transport, "", fold
        self.comm = Communicator(comm, transport=transport, observers=[self])
        self.comm.fold_with(fold)

    def collective_finished(self, event: Collective) -> None:
        """Note which transport moved the data."""
        if event.nbytes:
            self.moved_by = event.transport


@dataclass(frozen=True)
class Schedule:
    """How often: `calls` timed calls in each of `windows` windows, after `warmup` calls of each case."""

    calls: int = 5
    windows: int = 4
    warmup: int = 3


class Timed(Protocol):
    """What can be timed."""

    def once(self) -> object: ...


def time_calls(cases: Sequence[Timed], control: Communicator, schedule: Schedule) -> np.ndarray:
    """Return seconds of each timed call, those of the slowest rank: (cases, windows x calls), the same on all ranks.

    control: the ranks that measure together; its barrier goes before each call, and it takes the maxima.
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
class Row:
    """One line of nccl-tests' columns; times in us, bandwidths in GB/s (10^9 bytes), over all timed calls.

    algbw is bytes over the median time, busbw that times the share that crosses each rank's link. `wrong` counts
    elements, on all ranks, that differ from what the ranks' formula gives. `moved_by` is the transport that was used,
    `sums` what reduced: "device" or "numpy", "none" where nothing is reduced.
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
    def of(cls, case: Case, lane: Lane, seconds: np.ndarray, wrong: int) -> Row:
        """Return the line of one case, given its calls' seconds."""
        median = float(np.median(seconds))
        algbw = case.nbytes / median / 1e9 if median else 0.0
        operation = "all_reduce" if isinstance(case, AllReduce) else case.operation
        return cls(
            case.operation, lane.name, lane.moved_by, case.nbytes, case.count, case.dtype.name,
            case.op if case.reduces else "none", _sums(case, lane),
            float(seconds.min()) * 1e6, median * 1e6, float(np.percentile(seconds, 99, method="higher")) * 1e6,
            algbw, algbw * bus_factor(operation, case.comm.size), wrong,
        )  # fmt: skip

    def as_dict(self) -> dict[str, Any]:
        """Return the columns by name, ready for JSON."""
        return asdict(self)


def _sums(case: Case, lane: Lane) -> str:
    if not case.reduces:
        return "none"
    ops = {np.dtype(np.float32): ("sum", "mean"), np.dtype(np.float16): ("sum",)}.get(case.dtype, ())
    is_folded = isinstance(case, AllReduce) and case.op in ops
    in_memory = lane.moved_by in ("shared", "hierarchical") and lane.comm.local_size > 1
    return "device" if lane.fold is not None and is_folded and in_memory else "numpy"


def measure(
    lanes: Sequence[Lane], control: Communicator, operation: str, nbytes: int, dtype: str, op: str, schedule: Schedule
) -> list[Row]:
    """Time one operation at one size through each lane in turn, check what it returns, and return a row for each."""
    cases = [CASES[operation](lane.comm, nbytes, dtype, op) for lane in lanes]
    seconds = time_calls(cases, control, schedule)
    wrong = control.all_reduce(np.array([case.check() for case in cases], np.int64))
    return [
        Row.of(case, lane, its_seconds, int(its_wrong))
        for case, lane, its_seconds, its_wrong in zip(cases, lanes, seconds, wrong, strict=True)
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
