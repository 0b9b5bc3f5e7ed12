"""The --sums option of `clcomm bench` and `clcomm tune`: sums on each rank's device, as in training, or by NumPy."""

from __future__ import annotations

import argparse

from clcomm.base.errors import ArgumentError, DeviceError
from clcomm.comm.communicator import Communicator
from clcomm.comm.transport.reduction import Fold


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
