"""DeepSpeed's all-reduce in shared memory, in place (its csrc/cpu/comm/shm.cpp, built with g++ and ninja when loaded).

Ranks spin while they wait. Each copies its tensor into a shared buffer of its own, which is one of two used in turn;
below 1 MiB every rank then sums all buffers itself, above it each sums a slice and copies the others' out.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from shutil import which


def missing() -> str:
    """Return what it needs and this machine lacks, or ""."""
    modules = [name for name in ("torch", "deepspeed", "ninja") if find_spec(name) is None]
    compilers = [] if which("c++") or which("g++") else ["a C++ compiler"]
    return ", ".join([*modules, *compilers])


def main() -> None:
    import torch

    from benchmarks.all_reduce.in_place import place, serve_in_place

    directory, rank, ranks = place()
    torch.set_num_threads(1)
    # It reads these names from the environment; the last two name the shared memory, which it does not remove.
    job = Path(directory).name
    os.environ |= {"LOCAL_SIZE": str(ranks), "MASTER_ADDR": "localhost", "MASTER_PORT": job}
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

    ShareMemCommBuilder().load().initialize(ranks, rank)
    try:
        serve_in_place(torch.ops.deepspeed.inference_all_reduce_)
    finally:
        for left in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer*{job}*"):
            left.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
