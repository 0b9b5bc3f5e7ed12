"""horovodrun's options in `clcomm run`, and their equivalents; docs/horovod.md lists them."""

from __future__ import annotations

import argparse
import os
from typing import Any

#: Options that set a variable of Horovod's on all ranks, which clcomm/horovod/environment.py explains.
VARIABLES = {
    "--timeline-filename": "HOROVOD_TIMELINE",
    "--fusion-threshold-mb": "HOROVOD_FUSION_THRESHOLD",
    "--cycle-time-ms": "HOROVOD_CYCLE_TIME",
    "--cache-capacity": "HOROVOD_CACHE_CAPACITY",
    "--autotune-log-file": "HOROVOD_AUTOTUNE_LOG",
    "--stall-check-warning-time-seconds": "HOROVOD_STALL_CHECK_TIME_SECONDS",
    "--stall-check-shutdown-time-seconds": "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
    "--log-level": "HOROVOD_LOG_LEVEL",
    "--thread-affinity": "HOROVOD_THREAD_AFFINITY",
}
#: The same without a value, and the variable's.
SWITCHES = {
    "--verbose": ("HOROVOD_LOG_LEVEL", "info"),
    "--no-stall-check": ("HOROVOD_STALL_CHECK_DISABLE", "1"),
    "--timeline-mark-cycles": ("HOROVOD_TIMELINE_MARK_CYCLES", "1"),
    "--autotune": ("HOROVOD_AUTOTUNE", "1"),
    "--hierarchical-allreduce": ("HOROVOD_HIERARCHICAL_ALLREDUCE", "1"),
    "--hierarchical-allgather": ("HOROVOD_HIERARCHICAL_ALLGATHER", "1"),
    "--torus-allreduce": ("HOROVOD_TORUS_ALLREDUCE", "1"),
    "--mpi-threads-disable": ("HOROVOD_MPI_THREADS_DISABLE", "1"),
}
#: Options that are named as ignored, with how many values they have.
IGNORED = {
    "--min-np": 1, "--min-num-proc": 1, "--max-np": 1, "--max-num-proc": 1, "--slots-per-host": 1,
    "--host-discovery-script": 1, "--elastic-timeout": 1, "--reset-limit": 1, "--blacklist-cooldown-range": 2,
    "--start-timeout": 1, "--network-interface": 1, "--network-interfaces": 1, "--ssh-port": 1,
    "--ssh-identity-file": 1, "--mpi-args": 1, "--binding-args": 1, "--config-file": 1, "--num-nccl-streams": 1,
    "--gloo-timeout-seconds": 1, "--autotune-warmup-samples": 1, "--autotune-steps-per-sample": 1,
    "--autotune-bayes-opt-max-samples": 1, "--autotune-gaussian-process-noise": 1, "--disable-cache": 0, "--tcp": 0,
    "--gloo": 0, "--mpi": 0, "--jsrun": 0, "--no-autotune": 0, "--stall-check": 0, "--no-timeline-mark-cycles": 0,
    "--no-hierarchical-allreduce": 0, "--no-hierarchical-allgather": 0, "--no-torus-allreduce": 0,
    "--no-mpi-threads-disable": 0, "--log-with-timestamp": 0, "--log-without-timestamp": 0,
    "--prefix-output-with-timestamp": 0, "-p": 1, "-i": 1,
}  # fmt: skip


class _Set(argparse.Action):
    """An option that sets a variable on all ranks; `const`: its name, and its value if the option has none."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: str | None = None) -> None:
        name, value = self.const[0], values or self.const[1]
        if option == "--fusion-threshold-mb" and value.isdecimal():
            value = str(int(value) << 20)
        namespace.env = [*(namespace.env or ()), (name, value)]


class _Ignore(argparse.Action):
    """An option without effect, reported once."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: str | None = None) -> None:
        namespace.ignored = [*(namespace.ignored or ()), option]


def add_arguments(group: argparse._ArgumentGroup) -> None:
    """Add the options, hidden from `clcomm run --help`."""
    for option, name in VARIABLES.items():
        group.add_argument(option, action=_Set, const=(name, ""), help=argparse.SUPPRESS, dest="env")
    for option, const in SWITCHES.items():
        group.add_argument(option, action=_Set, const=const, nargs=0, help=argparse.SUPPRESS, dest="env")
    for option, values in IGNORED.items():
        nargs = None if values == 1 else values
        group.add_argument(option, action=_Ignore, nargs=nargs, help=argparse.SUPPRESS, dest="ignored")
    group.add_argument("-cb", "--check-build", action="store_true", help=argparse.SUPPRESS)


def without_python(job: list[str]) -> tuple[list[str], bool]:
    """Return a job such as `python -u train.py` without its interpreter, and whether it is a module."""
    if not job or not os.path.basename(job[0]).startswith("python") or job[0].endswith(".py"):
        return job, False
    rest = job[2:] if job[1:2] == ["-u"] else job[1:]
    return (rest[1:], True) if rest[:1] == ["-m"] else (rest, False)
