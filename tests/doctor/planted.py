"""Faults that are planted in namespaces of their own: run as a program, it prints the findings as JSON.

`unshare -rm python tests/doctor/planted.py FOLDER`: /dev/shm is full, and the cache directory is read-only.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def refusal() -> str:
    """Return why no namespaces can be made here; "" where they can."""
    if shutil.which("unshare") is None:
        return "unshare is not installed"
    done = subprocess.run(["unshare", "-rm", "true"], capture_output=True, text=True, check=False)
    return done.stderr.strip() if done.returncode else ""


def main(folder: str) -> None:
    """Plant both faults and print what the doctor finds of them."""
    for options, place in (("size=64k", "/dev/shm"), ("ro,size=64k", folder)):
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", place], check=True)
    Path("/dev/shm/filler").write_bytes(bytes(60 * 1024))
    os.environ["XDG_CACHE_HOME"] = folder
    os.environ.pop("POCL_CACHE_DIR", None)
    from clcomm.tools.doctor import caches, examine, limits, place
    from clcomm.tools.doctor.job import JobFacts

    probes = {"place": place.probe, "shared memory": limits.probe_shared_memory, "caches": caches.probe}
    found = examine.judge(JobFacts([examine.look(probes)], False), (limits.check_shared_memory, caches.check))
    print(json.dumps([finding.as_dict() for finding in found]))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main(sys.argv[1])
