"""A worker on a device of its own, as netcl starts them: NETCL_DEVICE=gpu:1 python -m clcomm.netcl.distributed.replica.

It reads pickled pairs of a function and its arguments from its standard input, calls the function with its Device and
these, and writes to its standard output, pickled, ("result", what it returned) or ("error", the error's text). The end
of the input ends it. What the functions print goes to standard error.

A worker knows nothing of others: for gradients that are averaged between processes start ranks, with mpiexec.
"""

from __future__ import annotations

import os
import pickle
import sys
from typing import BinaryIO

from clcomm.base.errors import DeviceError
from clcomm.netcl import DeviceManager


def serve(work: BinaryIO, results: BinaryIO) -> None:
    """Do the work that comes through a pipe until it ends; errors of a function are results."""
    device = DeviceManager.default()
    while work.peek(1):  # type: ignore[attr-defined]
        try:
            function, arguments = pickle.load(work)
            outcome = pickle.dumps(("result", function(device, *arguments)))
        except Exception as error:
            outcome = pickle.dumps(("error", f"{type(error).__name__}: {error}"))
        results.write(outcome)
        results.flush()


def main() -> int:
    if sys.stdin.isatty():
        print("replica: expected work through a pipe, got a terminal; see docs/several-devices.md", file=sys.stderr)
        return 2
    with os.fdopen(os.dup(1), "wb") as results:
        os.dup2(2, 1)
        try:
            serve(sys.stdin.buffer, results)
        except DeviceError as error:
            print(f"replica: {error}", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
