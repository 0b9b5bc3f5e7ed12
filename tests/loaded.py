"""Run the tests that look at other processes beside four busy loops: `python -m tests.loaded [pytest's arguments]`.

They pass on a busy machine too, without a second run of a test. `make test-loaded` runs them three times.
"""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack

from tests.sampling import TIMED_FOLDERS

#: A loop that ends with the process that started it.
BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: sum(range(10**5))"
LOOPS, TIMES = 4, 3


def main(arguments: list[str]) -> int:
    """Return pytest's first exit code that is not 0, or 0."""
    folders = [f"tests/{name}" for name in TIMED_FOLDERS]
    command = [sys.executable, "-m", "pytest", "-p", "no:rerunfailures", "-x", *folders, *arguments]
    with ExitStack() as loops:
        for _ in range(LOOPS):
            loops.callback(subprocess.Popen([sys.executable, "-c", BUSY]).kill)
        return next((code for _ in range(TIMES) if (code := subprocess.run(command).returncode)), 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
