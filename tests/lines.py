"""Lines of each package beside its budget: `python -m tests.lines`, which `make lint` runs, fails over one of them.

tests/lines.txt has the budgets: a folder and its most lines of Python, OpenCL C, JavaScript and CSS, those of the
folders in it included. A change that needs more pays by what it makes needless, or raises the budget where all see it.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUDGETS = ROOT / "tests" / "lines.txt"
COUNTED = (".py", ".cl", ".js", ".css")


def budgets() -> dict[str, int]:
    """Return the most lines of each folder."""
    rows = (line.split() for line in BUDGETS.read_text().splitlines())
    return {folder: int(most) for folder, most in rows}


def lines_in(folder: Path) -> int:
    """Return the lines of the sources in a folder and in those within it."""
    sources = (path for path in folder.rglob("*") if path.suffix in COUNTED and "_build" not in path.parts)
    return sum(path.read_bytes().count(b"\n") for path in sources)


def main() -> int:
    found = {folder: lines_in(ROOT / folder) for folder in budgets()}
    over = [folder for folder, most in budgets().items() if found[folder] > most]
    for folder, most in budgets().items():
        print(f"{folder:24}{found[folder]:>8,} of {most:>7,}{'  over its budget' * (folder in over)}")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
