"""The systems that take turns, their jobs, and one window of one of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from benchmarks import harness
from benchmarks.workers import Job

OURS, OURS_SHARDED, OURS_ALONE = "clcomm", "clcomm, sharded update", "clcomm, 1 rank"
GLOO_DDP = "PyTorch DDP, gloo"
NETCL, NETCL_HELPED = "netcl as published", "netcl under clcomm's adapter"
OURS_ON_INTEL = "clcomm, Intel's OpenCL"
PEERS = ("ddp", "lizardist", "netcl")
#: Ourselves on Intel's runtime, where that is installed and asked for.
INTEL = "intel"


@dataclass
class System:
    """A job with settings; several systems may share a job, as they never run at once."""

    name: str
    job: Job
    batch: int
    settings: dict[str, Any] = field(default_factory=dict)
    steps: int = 0

    @property
    def ranks(self) -> int:
        return self.job.ranks

    def window(self, steps: int | None = None) -> dict[str, Any]:
        """Run a window; return its images/s over all ranks and the mean loss of the last step."""
        steps = steps or self.steps
        answers = self.job.ask(steps=steps, settings=self.settings)
        seconds = max(a["stop"] for a in answers) - min(a["start"] for a in answers)
        return {
            "images_per_s": self.ranks * self.batch * steps / seconds,
            "seconds": seconds,
            "loss": sum(a["loss"] for a in answers) / len(answers),
        }

    def images_per_s(self) -> float:
        """Run a window of the calibrated length and return the speed."""
        return self.window()["images_per_s"]


@contextmanager
def start(peers: list[str], ranks: int, batch: int, arguments: list[str]) -> Iterator[list[System]]:
    """Start every job that the chosen peers need, beside ours, and end them all afterwards."""
    with ExitStack() as stack:

        def job(module: str, size: int = ranks, mpi: bool = True, *more: str) -> Job:
            return stack.enter_context(Job(f"benchmarks.peers.{module}", *arguments, *more, ranks=size, mpi=mpi))

        systems = [System(OURS, job("engine"), batch)]
        if ranks > 1:
            systems.append(System(OURS_SHARDED, job("engine", ranks, True, "--sharded"), batch))
        if INTEL in peers:
            systems.append(System(OURS_ON_INTEL, job("engine", ranks, True, "--device", INTEL), batch))
        if "ddp" in peers:
            systems.append(System(GLOO_DDP, job("ddp", mpi=False), batch, {"threads": 1}))
        if "lizardist" in peers:
            shared = job("lizardist")
            for name, bucketing in (("LizarDist, per tensor", False), ("LizarDist, bucketed", True)):
                systems.append(System(name, shared, batch, {"threads": 1, "bucketing": bucketing}))
        if "netcl" in peers:
            if ranks > 1:
                systems.append(System(OURS_ALONE, job("engine", 1, mpi=False), batch))
            alone = job("netcl", 1, mpi=False)
            systems.append(System(NETCL, alone, batch, {"as_published": True}))
            systems.append(System(NETCL_HELPED, alone, batch))
        yield systems


def calibrate(systems: list[System], window_s: float) -> None:
    """Set the steps of each system so that they fill a window."""
    for system in systems:
        trial = system.window(5)["seconds"] / 5
        trial = system.window(harness.repeats_for(trial, window_s / 4))["images_per_s"]
        system.steps = harness.repeats_for(system.ranks * system.batch / trial, window_s)
