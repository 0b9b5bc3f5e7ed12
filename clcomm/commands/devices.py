"""`clcomm devices`: the OpenCL devices of this machine, and the one that a rank takes."""

from __future__ import annotations

import argparse
from typing import Any

from clcomm.commands.command import Command
from clcomm.console.table import Column, TextTable
from clcomm.engine import selection, tuning
from clcomm.units import format_size

COLUMNS = (
    Column("  device", right=False), Column("name", right=False), Column("platform", right=False),
    Column("driver", right=False), Column("units"), Column("memory"), Column("kernels", right=False),
)  # fmt: skip
#: Columns to leave out, in this order, where the terminal is too narrow.
_DROPPED_FIRST = ("platform", "kernels", "driver", "memory", "units")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device", metavar="NAME", help="mark what a rank given this takes: gpu, gpu:1, cpu, part of a name"
    )


def run(options: argparse.Namespace) -> None:
    """Print the devices and mark this rank's; raises DeviceError if there are none, or none that --device names."""
    rank, size = selection.local_place()
    selection.prepare_environment(selection.core_share(size))
    taken = selection.choose(options.device, rank)
    rows = [row(candidate, candidate == taken) for candidate in selection.candidates()]
    print(TextTable(COLUMNS, rows, dropped_first=_DROPPED_FIRST))
    print(f"* what local rank {rank} of {size} takes; ranks of a host take the devices of one kind in turn")


def row(candidate: selection.Candidate, is_taken: bool) -> tuple[str, ...]:
    """Return a device's cells, in the order of COLUMNS; a mark before the device that this rank takes."""
    device: Any = candidate.cl_device
    return (
        f"{'*' if is_taken else ' '} {candidate.label}",
        device.name.strip(),
        device.platform.name.strip(),
        device.driver_version.strip(),
        str(device.max_compute_units),
        format_size(device.global_mem_size),
        "tuned" if tuning.is_stored(device, candidate.kind) else "built-in sizes",
    )


COMMAND = Command(
    "devices",
    "list the OpenCL devices and which one a rank takes",
    "List the OpenCL devices of this machine: kind and index, name, driver, compute units, memory.",
    add_arguments,
    run,
)
