"""Lines of code of each package beside its last value: `python -m tests.lines`, part of `make lint`, fails on a rise.

A line counts if it holds code: no blank line, no comment, no docstring. tests/lines.txt has the values: a folder, its
lines of Python, OpenCL C, JavaScript and CSS, those of the folders in it included. They only fall, in the sum of clcomm
above all: what needs more pays by what it makes needless, in the same change. `python -m tests.lines --lower` writes
the values that have fallen.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUDGETS = ROOT / "tests" / "lines.txt"
COUNTED = (".py", ".cl", ".js", ".css")
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def budgets() -> dict[str, int]:
    """Return the most lines of each folder."""
    rows = (line.split() for line in BUDGETS.read_text().splitlines())
    return {folder: int(most) for folder, most in rows}


def lines_in(folder: Path) -> int:
    """Return the lines of code of the sources in a folder and in those within it."""
    sources = (path for path in folder.rglob("*") if path.suffix in COUNTED and "_build" not in path.parts)
    return sum(code_lines(path.read_text(encoding="utf-8"), path.suffix) for path in sources)


def code_lines(text: str, suffix: str) -> int:
    """Return the lines of a source that hold code."""
    left_out: set[int] = set()
    if suffix == ".py":
        comment = "#"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
                left_out.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    else:
        comment, text = "//", re.sub(r"/\*.*?\*/", lambda found: "\n" * found[0].count("\n"), text, flags=re.DOTALL)
    lines = enumerate(text.splitlines(), 1)
    return sum(bool(line.strip()) and not line.lstrip().startswith(comment) and i not in left_out for i, line in lines)


def main(lower: bool = False) -> int:
    most = budgets()
    found = {folder: lines_in(ROOT / folder) for folder in most}
    for folder in most:
        print(f"{folder:24}{found[folder]:>8,} of {most[folder]:>7,}{'  too many' * (found[folder] > most[folder])}")
    if lower:
        BUDGETS.write_text("".join(f"{folder} {min(found[folder], most[folder])}\n" for folder in most))
    return 1 if any(found[folder] > most[folder] for folder in most) else 0


if __name__ == "__main__":
    sys.exit(main("--lower" in sys.argv[1:]))
