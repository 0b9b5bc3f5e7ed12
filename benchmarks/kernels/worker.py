"""A worker of one system, whose cases the parent times one after another."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.kernels.cases import Case
from benchmarks.workers import serve

#: Runs a case a given number of times and returns when all runs are complete.
Runner = Callable[[int], None]


def work(make: Callable[[Case], Runner | None], device: str = "") -> None:
    """Answer {"case": a Case as dict, "repeats": n} with {"wall": s, "cpu": s, "device": its name}.

    Or with {} where `make` returns None.
    """
    current: dict[str, Any] = {}

    def handle(request: dict[str, Any]) -> dict[str, Any]:
        case = Case(**request["case"])
        if current.get("name") != case.name:  # the previous case releases its memory first
            current.clear()
            current.update(name=case.name, runner=make(case))
        runner = current["runner"]
        if runner is None:
            return {}
        wall, cpu = time.perf_counter(), time.process_time()
        runner(request["repeats"])
        return {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu, "device": device}

    serve(sys.argv[1], 0, handle)
