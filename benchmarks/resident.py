"""Run a module as `python -m` does, and write this process's start and memory: a worker of benchmarks.startup.

`python -m benchmarks.resident DIRECTORY MODULE [ARGUMENT ...]`
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from pathlib import Path

from training.first_steps import process_age_s

#: Fields of /proc/self/status, in kB: the peak of all resident pages, and the resident pages at the end, by kind.
FIELDS = ("VmHWM", "RssAnon", "RssFile", "RssShmem")


def memory() -> dict[str, float]:
    """Return each field in MB (10^6 bytes)."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    found = {key: value.split()[0] for key, _, value in (line.partition(":") for line in lines) if key in FIELDS}
    return {key: int(value) * 1024 / 1e6 for key, value in found.items()}


def main() -> None:
    directory, module, *arguments = sys.argv[1:]
    began = time.time() - process_age_s()
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        Path(directory, f"memory-{os.getpid()}.json").write_text(
            json.dumps({**memory(), "began": began}), encoding="utf-8"
        )


if __name__ == "__main__":
    main()
