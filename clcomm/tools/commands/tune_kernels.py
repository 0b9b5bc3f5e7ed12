"""`clcomm tune-kernels`: measure the kernels' sizes on a device and store the fastest for later runs."""

from __future__ import annotations

import argparse

from clcomm.engine import autotune, selection, tuning
from clcomm.tools.commands.command import Command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", metavar="NAME", help="gpu, gpu:1, cpu, part of a name; default: what a rank takes")
    parser.add_argument("--reset", action="store_true", help="delete what is stored for the device")


def run(options: argparse.Namespace) -> None:
    """Measure the sizes and store the fastest, or with --reset delete the stored ones.

    Under mpiexec one rank of each host measures. Raises DeviceError if no device fits, ArgumentError if the table can't
    be written.
    """
    if selection.local_place()[0] != 0:
        return
    selection.prepare_environment(1, options.device)  # a CPU's sizes are those of one core
    candidate = selection.choose(options.device, 0)
    identity = tuning.Identity.of(candidate.cl_device, candidate.kind)
    if options.reset:
        print(f"{identity.path}: {'deleted' if tuning.forget(identity) else 'nothing is stored'}")
        return
    print(f"{candidate.label}: {identity.device}, driver {identity.driver}")
    chosen = tuning.defaults(candidate.cl_device)
    for chosen, trials in autotune.search(candidate.cl_device, candidate.kind):
        name = trials[0].name
        print(f"{name}: {', '.join(map(shown, trials))} -> {shown_value(getattr(chosen, name))}", flush=True)
    print(f"stored in {tuning.store(chosen, identity)}")


def shown(trial: autotune.SizeTrial) -> str:
    """Return a trial as text: its size, its time relative to the built-in size's, and its problem, if any."""
    words = [shown_value(trial.value)]
    words += [f"{trial.time:.2f}"] if trial.time is not None else []
    words += [f"({trial.problem})"] if trial.problem else []
    return " ".join(words)


def shown_value(value: tuning.Value) -> str:
    """Return a size as text: "16", or "8x4" for one of several numbers."""
    return str(value) if isinstance(value, int) else "x".join(map(str, value))


COMMAND = Command(
    "tune-kernels",
    "measure the kernels' sizes on a device and store the fastest",
    "Measure tile sizes and thresholds of the kernels on a device, and store the fastest for this device and driver "
    "version. Times are relative to the built-in size's. Results keep their bits.",
    add_arguments,
    run,
    (
        ("clcomm tune-kernels", "measure on this rank's device, and store the fastest sizes"),
        ("clcomm tune-kernels --device gpu:1", "the same for another device"),
    ),
)
