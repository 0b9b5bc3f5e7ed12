"""The suite's own caches: kernels and measurements that another job builds, or damages, must not fail a test.

Python's compiled files are among them where the user wants none: the suite starts Python more than a thousand times.
"""

from __future__ import annotations

import os
from pathlib import Path

#: Kept between runs, since building every kernel takes minutes; `make clean` removes it.
CACHES = Path(__file__).resolve().parents[1] / ".test-caches"
#: The variables that name the caches of PoCL, of clcomm, and of anything else that follows the XDG specification.
VARIABLES = {"XDG_CACHE_HOME": CACHES, "POCL_CACHE_DIR": CACHES / "pocl"}


def use_own_caches() -> None:
    """Point every cache variable below `CACHES`, for this process's children too; call it before OpenCL is loaded."""
    os.environ.pop("CLCOMM_CACHE_DIR", None)
    for name, directory in VARIABLES.items():
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.environ[name] = str(directory)
    if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
        os.environ["PYTHONPYCACHEPREFIX"] = str(CACHES / "python")
