"""Whose sums `clcomm bench` and `clcomm tune` measure: those of a rank's own device, as in training, or NumPy's."""

from __future__ import annotations

import argparse

from clcomm.communicator import Communicator
from clcomm.errors import ArgumentError, DeviceError
from clcomm.transport.reduction import Fold

#: What adds arrays up, in words.
SUMS = {"device": "each rank's own device", "numpy": "NumPy"}


def add_sums(parser: argparse.ArgumentParser) -> None:
    """Add the option that says what adds the ranks' arrays up."""
    parser.add_argument("--sums", choices=("device", "numpy"),
        help="what adds floats up in shared memory; default: the device, where one computes in the calling thread, "
        "as in training on it")  # fmt: skip


def agreed_fold(control: Communicator, sums: str | None) -> Fold | None:
    """Return what sums on this rank's device, None for NumPy, the same choice on every rank; collective.

    sums: "device", "numpy", or None: the device where every rank has one that computes in the calling thread. Raises
    ArgumentError on every rank for "device" where some rank has none.
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
    """Return what sums on the device that this rank would train on, or None and why there is nothing."""
    from clcomm.engine.device import Device  # here, because NumPy's sums need no engine
    from clcomm.engine.fold import Fold as DeviceFold

    try:
        device = Device.select(local_rank=control.local_rank, local_size=control.local_size, cores=control.cores)
    except (DeviceError, ImportError) as error:
        return None, str(error)
    fold = DeviceFold.on(device)
    return fold, "" if fold else f"{device.name} does not"
