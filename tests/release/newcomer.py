"""Types what README and tutorial say: `python -m tests.release.newcomer`; `make newcomer`.

Every command of both pages runs in their order, in a clone of its own with a new environment, an empty HOME and hardly
a variable, but with pip's cache. Each has to end with code 0 and to print the lines that the page shows below it.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
#: Seconds that all of it may take before it counts as hanging.
LIMIT_S = 900.0
#: Commands that the pages name and that are not for this test, with the reason.
LEFT = {
    "make test": "runs by itself",
    "make bench-quick": "is a measurement of minutes, and needs PyTorch",
}
#: Settings of this machine that a newcomer's machine has too, or does not need.
KEPT = ("PATH", "LANG", "CLCOMM_DATA", "PIP_", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE")
#: A line before each command's output.
_MARK = "@@ command"


class Command(NamedTuple):
    """A command line, and the lines that the page shows as its output."""

    line: str
    shown: tuple[str, ...] = ()


def commands(page: str) -> list[Command]:
    """Return a page's commands: its blocks of sh, code in the text that starts a program, and programs to save.

    A block of text is what the command above it prints. A block of Python whose first line names a file is saved.
    """
    found: list[Command] = []
    inline = r"`((?:make|mpiexec) [^`\n]+)`"
    for language, block, typed in re.findall(rf"(?ms)^```(\w*)\n(.*?)^```$|{inline}", page):
        name = re.match(r"# (\w+\.py)\n", block)
        if typed:
            found += [Command(typed)] if typed not in LEFT else []
        elif language == "sh":
            found += [Command(line.split("  #")[0].rstrip()) for line in block.splitlines()]
        elif language == "text":
            found[-1] = Command(found[-1].line, tuple(block.splitlines()))
        elif language == "python" and name is not None:
            found.append(Command(f"printf %s {shlex.quote(block)} > {name[1]}"))
    return found


def script(typed: Sequence[Command], clone_from: str) -> str:
    """Return a bash script that types the commands, announces each, and ends at the first that fails."""
    lines = ["set -o pipefail"]
    for number, (line, _) in enumerate(typed):
        line = line.replace("ADDRESS-OF-THIS-PAGE", shlex.quote(clone_from))
        lines += [f"echo '{_MARK}' {number}", line, 'code=$?; [ "$code" = 0 ] || exit "$code"']
    return "\n".join(lines)


def differences(typed: Sequence[Command], printed: str, code: int) -> list[str]:
    """Return a line for each command that failed, did not run, or did not print the lines that the page shows."""
    parts = re.split(rf"(?m)^{_MARK} (\d+)$\n?", printed)
    outputs = {int(number): output for number, output in zip(parts[1::2], parts[2::2], strict=True)}
    found = []
    for number, (line, shown) in enumerate(typed):
        output = outputs.get(number)
        short = line if len(line) < 80 else f"{line[:70]} …"
        if output is None:
            found.append(f"{short}: did not run")
        elif code and number == max(outputs):
            found.append(f"{short}: exit code {code}\n{output[-2000:]}")
        else:
            found += [f"{short}: no line {each!r}" for each in shown if each not in output.splitlines()]
    return found


def main() -> int:
    """Type both pages' commands, print what is different, and return 1 if something is."""
    with tempfile.TemporaryDirectory(prefix="clcomm-newcomer-") as folder:
        home = Path(folder) / "home"
        (home / "tutorial").mkdir(parents=True)
        typed = [*commands((ROOT / "README.md").read_text()), Command(f"cd {home / 'tutorial'}")]
        typed += commands((ROOT / "docs" / "tutorial.md").read_text())
        began = time.monotonic()
        done = subprocess.run(
            ["bash", "-c", script(typed, str(ROOT))], env=_environment(home), cwd=home, timeout=LIMIT_S, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
    wrong = differences(typed, done.stdout, done.returncode)
    print("\n".join([*wrong, f"{len(typed)} commands, {len(wrong)} not as written, {time.monotonic() - began:.0f} s"]))
    return bool(wrong)


def _environment(home: Path) -> Mapping[str, str]:
    found = subprocess.run([sys.executable, "-m", "pip", "cache", "dir"], capture_output=True, text=True, check=True)
    environment = {name: value for name, value in os.environ.items() if name.startswith(KEPT)}
    environment |= {"HOME": str(home), "PIP_CACHE_DIR": found.stdout.strip(), "PYTHONUNBUFFERED": "1"}
    config = Path.home() / ".config" / "pip" / "pip.conf"
    return environment | ({"PIP_CONFIG_FILE": str(config)} if config.exists() else {})


if __name__ == "__main__":
    sys.exit(main())
