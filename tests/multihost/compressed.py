"""A job that averages gradients with several compressions; rank 0 prints as JSON how much came in from other hosts.

Shares: bytes that its host's network devices received, as multiples of the gradients' own.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from clcomm import Communicator, Synchronizer
from clcomm.comm.watch.endings import run
from tests.numpy_models import Model

SHAPE, STEPS = (512, 256), 20
SCHEMES = ("none", "fp16", "bf16", "int8", "powersgd:4")


def received() -> int:
    """Return the bytes that have come to this host."""
    devices = [device for device in Path("/sys/class/net").iterdir() if device.name != "lo"]
    return sum(int((device / "statistics" / "rx_bytes").read_text()) for device in devices)


def share(comm: Communicator, scheme: str) -> float:
    model, sync = Model([("w", np.zeros(SHAPE, np.float32))]), Synchronizer(comm, compression=scheme)
    gradient = np.random.default_rng(comm.rank).standard_normal(SHAPE, np.float32)
    model["w"].grad = gradient.copy()
    sync.sync_gradients(model)
    comm.barrier()
    before = received()
    for _ in range(STEPS):
        model["w"].grad = gradient.copy()
        sync.sync_gradients(model)
    return (received() - before) / STEPS / gradient.nbytes


def main() -> None:
    with Communicator() as comm:
        shares = {scheme: share(comm, scheme) for scheme in SCHEMES}
        if comm.rank == 0:
            print(json.dumps(shares))


if __name__ == "__main__":
    run(main)
