"""The device of a rank, timed, in a process of its own: a driver with a damaged cache may crash it, or hang.

`python -m clcomm.doctor.opencl_probe LOCAL_RANK LOCAL_SIZE CORES` prints the facts as JSON.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

#: The product of two matrices of so many rows and columns is timed, in windows of at least so long.
SIDE, WINDOWS, WINDOW_S = 512, 5, 0.06


def main(local_rank: int, local_size: int, cores: int) -> dict[str, Any]:
    """Return the platforms, devices, the rank's device and how fast it multiplies; "reason": why there is none."""
    from clcomm.engine import selection
    from clcomm.engine.device import Device
    from clcomm.errors import ClcommError

    found: dict[str, object] = {"platforms": [], "devices": [], "device": "", "reason": ""}
    try:
        selection.prepare_environment(cores)
        candidates = selection.candidates()
        found["platforms"] = sorted({each.cl_device.platform.name.strip() for each in candidates})
        found["devices"] = [[each.label, each.cl_device.name.strip()] for each in candidates]
        chosen = selection.choose(None, local_rank)
        device = Device(chosen.cl_device)
        found |= {"device": chosen.label, "name": device.name, "driver": device.driver, "kind": device.kind,
                  "units": device.compute_units, "flops": multiplications(device)}  # fmt: skip
    except ClcommError as error:
        found["reason"] = str(error)
    return found


def multiplications(device: Any) -> float:
    """Return a device's floating-point operations a second in products of matrices: the median of WINDOWS windows."""
    import numpy as np

    from clcomm.engine import Tensor

    rng = np.random.default_rng(0)
    a, b = (Tensor(rng.standard_normal((SIDE, SIDE), np.float32), device) for _ in range(2))

    def run(count: int) -> float:
        device.finish()
        began_s = time.perf_counter()
        for _ in range(count):
            a @ b
        device.finish()
        return (time.perf_counter() - began_s) / count

    run(1)  # builds
    count = max(1, round(WINDOW_S / run(2)))
    return 2.0 * SIDE**3 / statistics.median(run(count) for _ in range(WINDOWS))


if __name__ == "__main__":
    print(json.dumps(main(*map(int, sys.argv[1:]))), flush=True)
