"""Times a newcomer's path: `python -m tests.release.newcomer`; `make newcomer`.

The README's way in a clean environment: a clone, then `make mnist`, with an empty HOME and hardly a variable, but with
pip's cache of what was installed before. It fails unless an epoch was trained within LIMIT_S.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 120.0
#: A fifth of the epochs of the bundled digits, or an epoch of MNIST, has been trained.
EPOCH = re.compile(r"epoch (\d+): mean training loss")
#: Settings of this machine that a newcomer's machine has too, or does not need.
KEPT = ("PATH", "LANG", "CLCOMM_DATA", "PIP_", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE")


def commands(clone: Path) -> list[list[str]]:
    """Return what the README's reader types; a clone of this repository stands for that of the published one."""
    return [["git", "clone", "--quiet", str(ROOT), str(clone)], ["make", "-C", str(clone), "mnist", "RANKS=2"]]


def main() -> int:
    """Run both commands, print what each took, and return 1 if that was too long."""
    with tempfile.TemporaryDirectory(prefix="clcomm-newcomer-") as folder:
        home = Path(folder) / "home"
        home.mkdir()
        environment = {name: value for name, value in os.environ.items() if name.startswith(KEPT)}
        environment |= {"HOME": str(home), "PIP_CACHE_DIR": _pip_cache(), "PYTHONUNBUFFERED": "1"}
        config = Path.home() / ".config" / "pip" / "pip.conf"
        environment |= {"PIP_CONFIG_FILE": str(config)} if config.exists() else {}
        began, trained_s = time.monotonic(), 0.0
        for command in commands(Path(folder) / "clcomm"):
            command_began = time.monotonic()
            process = subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=home
            )
            assert process.stdout is not None
            said = []
            for line in process.stdout:
                said.append(line)
                if EPOCH.search(line) and not trained_s:
                    trained_s = time.monotonic() - began
                    print(f"first trained epoch after {trained_s:.1f} s: {line.strip()}", flush=True)
            if process.wait():
                print("".join(said[-20:]))
                return 1
            print(f"{' '.join(command[:2])} … took {time.monotonic() - command_began:.1f} s", flush=True)
    print(f"{trained_s:.1f} s of {LIMIT_S:.0f} s" if trained_s else "no epoch was trained")
    return 0 if 0 < trained_s <= LIMIT_S else 1


def _pip_cache() -> str:
    found = subprocess.run([sys.executable, "-m", "pip", "cache", "dir"], capture_output=True, text=True, check=True)
    return found.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
