"""`clcomm devices`: the OpenCL devices of this machine, and this rank's."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from clcomm.base.console.table import TextColumn, TextTable
from clcomm.base.units import format_size
from clcomm.engine import autotune, selection, tuning
from clcomm.engine.device import Device
from clcomm.tools.commands.command import Command

COLUMNS = (
    TextColumn("  device", right=False), TextColumn("name", right=False), TextColumn("platform", right=False),
    TextColumn("driver", right=False), TextColumn("units"), TextColumn("memory"), TextColumn("kernels", right=False),
)  # fmt: skip
#: Columns to leave out, in this order, where the terminal is too narrow.
_DROPPED_FIRST = ("platform", "kernels", "driver", "memory", "units")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device", metavar="NAME", help="mark what a rank given this takes: gpu, gpu:1, cpu, part of a name"
    )


def run(options: argparse.Namespace) -> None:
    """Print the devices and mark this rank's; raises DeviceError if there are none, or none that --device names.

    Several runtimes' devices for one CPU are timed.
    """
    rank, size = selection.local_place()
    cores = selection.core_share(size)
    selection.prepare_environment(cores, every=True)
    taken, found = selection.choose(options.device, rank), selection.candidates()
    print(TextTable(COLUMNS, [row(candidate, candidate == taken) for candidate in found], dropped_first=_DROPPED_FIRST))
    print(f"* what local rank {rank} of {size} takes; ranks of a host take the devices of one kind in turn")
    cpus = [candidate for candidate in found if candidate.kind == "cpu" and not candidate.is_simulator]
    if len(cpus) > 1:
        print(comparison(cpus, autotune.training_rates([Device(each.cl_device) for each in cpus]), max(cores, 1)))


def comparison(cpus: Sequence[selection.DeviceCandidate], rates: Sequence[float], cores: int) -> str:
    """Compare the images per second of one CPU's devices, in two sentences."""
    each = ", ".join(f"{cpu.label} {rate:,.0f} images/s" for cpu, rate in zip(cpus, rates, strict=True))
    rate, fastest = max(zip(rates, cpus, strict=True), key=lambda pair: pair[0])
    gain = rate / sorted(rates)[-2]
    on = f"on {cores} core" + ("s" if cores > 1 else "")
    return (
        f"a small ConvNet's gradients {on}: {each}; {fastest.label} ({fastest.cl_device.platform.name.strip()}) is "
        f"{gain:.2f}x as fast\nCLCOMM_DEVICE or --device chooses another, such as CLCOMM_DEVICE={cpus[-1].label}"
    )


def row(candidate: selection.DeviceCandidate, is_taken: bool) -> tuple[str, ...]:
    """Return a device's cells, in the order of COLUMNS; a mark before this rank's device."""
    device = candidate.cl_device
    return (
        f"{'*' if is_taken else ' '} {candidate.label}",
        device.name.strip(),
        device.platform.name.strip(),
        device.driver_version.strip(),
        str(selection.compute_units(device)),
        format_size(device.global_mem_size),
        "tuned" if tuning.is_stored(device, candidate.kind) else "built-in sizes",
    )


COMMAND = Command(
    "devices",
    "list the OpenCL devices and which one a rank takes",
    "List the OpenCL devices of this machine: kind and index, name, driver, compute units, memory.",
    add_arguments,
    run,
    (
        ("clcomm devices", "list the devices; * marks the one that is taken"),
        ("clcomm devices --device gpu:1", "say which one a rank takes that is given this"),
    ),
)
