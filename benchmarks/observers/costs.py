"""The processor time of one event, which other programs hardly change: the least of several rounds."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from clcomm import Communicator
from clcomm.comm.stats.comm_stats import CommStats
from clcomm.comm.stats.events import Collective, Phase
from clcomm.engine import Device
from clcomm.insight.trace import Trace
from clcomm.insight.trace.part_file import PartWriter

_EVENTS, _ROUNDS = 2_000, 5
_ROOMY = "4GiB"


def event_costs() -> dict[str, float]:
    """Return seconds by kind of event and observer; a trace's include writing to its part file."""
    comm = Communicator(transport="solo")
    comm.remove_observer(comm.stats)
    costs = {"phase, no observer": _each(lambda: _phases(comm))}
    costs |= _observed("stats", CommStats())
    with tempfile.TemporaryDirectory(prefix="clcomm-bench-") as folder:
        device = Device.select("cpu", cores=1)
        plain = _each(lambda: _launches(device))
        with Trace(comm, Path(folder, "events.json"), limit=_ROOMY) as trace:
            comm.remove_observer(trace)
            costs |= _observed("trace", trace)
        with Trace(comm, Path(folder, "kernels.json"), device=device, limit=_ROOMY) as trace:
            costs["kernel, trace"] = max(0.0, _each(lambda: _launches(device, trace)) - plain)
        kept = _kept(PartWriter(Path(folder, "part"), {}))
    return costs | {f"{kind}, trace": costs[f"{kind}, trace"] + seconds for kind, seconds in kept.items()}


def _events() -> tuple[list[Collective], list[Phase]]:
    collectives = [
        Collective(
            "all_reduce", "gradients", 827_688, 0.0021, "shared", number, bucket=0, began_s=0.003 * number,
            wait_s=0.0004, last_rank=2, late_s=0.0003,
        )
        for number in range(_EVENTS)
    ]  # fmt: skip
    return collectives, [Phase("forward_backward", 0.003 * number, 0.0028) for number in range(_EVENTS)]


def _observed(name: str, observer: CommStats | Trace) -> dict[str, float]:
    collectives, phases = _events()

    def notify(receive: Callable[[Any], None], events: Sequence[Any]) -> None:
        for event in events:
            receive(event)

    return {
        f"collective, {name}": _each(lambda: notify(observer.collective_finished, collectives)),
        f"phase, {name}": _each(lambda: notify(observer.phase_finished, phases)),
    }


def _kept(part: PartWriter) -> dict[str, float]:
    collectives, phases = _events()
    kernels = [("convolve_relu_pool", (64, 4), number * 10**6, number * 10**6 + 999_999) for number in range(_EVENTS)]
    costs = {
        "collective": _each(lambda: part.append(collectives=collectives)),
        "phase": _each(lambda: part.append(phases=phases)),
        "kernel": _each(lambda: part.append(kernels=kernels)),
    }
    part.close()
    return costs


def _phases(comm: Communicator) -> None:
    for _ in range(_EVENTS):
        with comm.phase("step"):
            pass


def _launches(device: Device, trace: Trace | None = None) -> None:
    """Queue small kernels as a replayed step does, 25 a step."""
    kernel: Any = device.kernel("elementwise", "fill")
    size = np.int32(64)
    kernel.set_args(device.allocate(256), np.float32(0), size)
    launches = [(kernel, *device.grid(64))] * 25
    for _ in range(_EVENTS // len(launches)):
        device.launch_all(launches)
        device.finish()
        if trace is not None:
            trace.phase_finished(Phase("step", 1.0, 0.005))


def _each(run: Callable[[], None]) -> float:
    """Return the seconds of processor time that one of the events of `run` takes."""
    best = float("inf")
    for _ in range(_ROUNDS):
        begin = time.process_time()
        run()
        best = min(best, time.process_time() - begin)
    return best / _EVENTS
