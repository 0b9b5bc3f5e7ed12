"""Update the figures of docs/reports.md: `python -m benchmarks.example_report`, `make example-report`.

Runs the training that the page describes, on 4 ranks, and puts each part of its report below its mark in the page.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.workers import mpi_launch

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reports.md"
RANKS = 4
ARGUMENTS = ("--bucket-size", "256KiB", "--check-replicas", "100", "--quiet")
_MARK = re.compile(r"<!-- report: (?P<part>.+?) -->\n```\n(?:.*?\n)??```\n", re.DOTALL)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = f"{folder}/run.json"
        train = [*mpi_launch(RANKS), sys.executable, "-m", "examples.mnist", *ARGUMENTS, "--report", run]
        subprocess.run(train, check=True)
        show = [sys.executable, "-m", "clcomm", "report", run]
        environment = {**os.environ, "COLUMNS": "120"}
        shown = subprocess.run(show, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    PAGE.write_text(filled(PAGE.read_text(), shown.stdout))


def filled(page: str, report: str) -> str:
    """Return the page with the report's parts below its marks; a missing part is reported in its place."""
    parts = {text.split("\n", 1)[0]: text for text in report.rstrip().split("\n\n")}
    first = next(iter(parts))

    def part(mark: re.Match[str]) -> str:
        name = mark["part"]
        text = parts.get(first if name == "first" else name, "(nothing, in this run)")
        lines = "\n".join(line.rstrip() for line in text.splitlines())
        return f"<!-- report: {name} -->\n```\n{lines}\n```\n"

    return _MARK.sub(part, page)


if __name__ == "__main__":
    main()
