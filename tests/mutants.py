"""Draw one-line changes over comm, sync and the engine's table, and count those that tests find: `make mutants`.

Each change is planted alone into a copy of the tree. It is found if a file of the tests for its folder fails or takes
too long, plain or on three ranks; those run first that name what was changed. The seed and the score are printed, and
each change that no test found. `python -m tests.mutants --help` has the options.
"""

from __future__ import annotations

import argparse
import ast
import io
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.caches import CACHES
from tests.faults.launch import mpiexec
from tests.sampling import is_about_ranks

ROOT = Path(__file__).resolve().parents[1]
#: What is changed, and the tests for it; the first that fits.
TESTS = {
    "clcomm/comm/transport": ("tests/transport", "tests/collectives", "tests/test_communicator.py"),
    "clcomm/comm/collectives": ("tests/collectives", "tests/transport", "tests/test_communicator.py", "tests/job"),
    "clcomm/comm/costs": ("tests/costs", "tests/schedules", "tests/measure"),
    "clcomm/comm/stats": ("tests/stats", "tests/collectives"),
    "clcomm/comm/tensors": ("tests/tensors", "tests/torch", "tests/collectives"),
    "clcomm/comm/watch": ("tests/job", "tests/faults"),
    "clcomm/comm": ("tests/test_communicator.py", "tests/collectives"),
    "clcomm/sync/adapters": ("tests/adapters",),
    "clcomm/sync/compression": ("tests/compression", "tests/sync"),
    "clcomm/sync/policies": ("tests/sync", "tests/training"),
    "clcomm/sync/zero": ("tests/zero", "tests/test_distributed_optimizer*.py"),
    "clcomm/sync": ("tests/sync", "tests/test_*.py", "tests/zero", "tests/compression", "tests/precision"),
    "clcomm/engine/ops": ("tests/engine", "tests/families"),
}
#: The files of functions that are expressions, whose texts are changed too.
TABLE = re.compile(r"\bof_elements\(")
SWAPS = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "+": "-", "-": "+", "*": "+", "//": "*",
    "/": "*", "%": "+", "+=": "-=", "-=": "+=", "and": "or", "or": "and", "True": "False", "False": "True",
    "min": "max", "max": "min", "any": "all", "all": "any", "break": "continue", "not": "",
}  # fmt: skip
#: Seconds that a file of tests may take, plain and on ranks.
LIMIT_S = 300
PYTEST = (
    "-m", "pytest", "-q", "-x", "-o", "timeout=100", "-p", "no:cacheprovider", "-p", "no:xdist",
    "-p", "no:rerunfailures",
)  # fmt: skip


class Change(NamedTuple):
    """Another text for a line of a file; `within` is the function or class that it is in."""

    path: str
    line: int
    before: str
    after: str
    within: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line} in {self.within}\n  - {self.before.strip()}\n  + {self.after.strip()}"


def sources() -> Iterator[str]:
    """Yield the files that are changed."""
    for folder in ("clcomm/comm", "clcomm/sync", "clcomm/engine/ops"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if folder != "clcomm/engine/ops" or TABLE.search(path.read_text(encoding="utf-8")):
                yield path.relative_to(ROOT).as_posix()


def changes_of(path: str) -> Iterator[Change]:
    """Yield every change of a file."""
    text = (ROOT / path).read_text(encoding="utf-8")
    lines, tree = text.splitlines(), ast.parse(text)
    names, left_out = [""] * (len(lines) + 2), set[int]()
    for node in ast.walk(tree):  # inner ones come later
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            within = f"{names[node.lineno]}.{node.name}".lstrip(".")
            names[node.lineno : node.end_lineno + 1] = [within] * (node.end_lineno - node.lineno + 1)
        elif isinstance(node, (ast.Raise, ast.Import, ast.ImportFrom, ast.AnnAssign)):
            left_out.update(range(node.lineno, node.end_lineno + 1))

    def changed(row: int, start: int, stop: int, new: str) -> Change:
        line = lines[row - 1]
        return Change(path, row, line, line[:start] + new + line[stop:], names[row])

    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and node.lineno == node.end_lineno:
            yield changed(node.lineno, node.col_offset, node.end_col_offset, "pass")
    before = ""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        (row, start), (_, stop), new = token.start, token.end, SWAPS.get(token.string)
        if token.type == tokenize.NUMBER and token.string.isdigit():
            new = str(int(token.string) + 1)
        elif token.string in "*/-" and (before in ("", "(", ",", "[", "=", "lambda", "return", "in")):
            new = None  # of `*args`, and signs
        elif token.type == tokenize.STRING and "of_elements" in lines[row - 1] and token.end[0] == row:
            for place in re.finditer(r"[-+*/<>]", token.string):
                yield changed(row, start + place.start(), start + place.end(), SWAPS[place[0]])
        if new is not None and row not in left_out:
            yield changed(row, start, stop, new)
        before = token.string


def tests_of(change: Change, most: int) -> list[Path]:
    """Return the files of tests that are tried: those first that name what was changed and what few others name."""
    folder = next(folder for folder in TESTS if change.path.startswith(folder))
    scores: dict[Path, float] = {}
    for number, place in enumerate(TESTS[folder]):
        for file in (ROOT / place).glob("test_*.py") if "." not in place else ROOT.glob(place):
            scores.setdefault(file, -number)
    texts = {file: file.stem.replace("_", " ") + file.read_text(encoding="utf-8") for file in scores}
    stem = Path(change.path).stem
    parts = {part.lower() for part in re.findall("[A-Za-z][a-z]{3,}", change.within)}
    for word in {*change.within.split("."), *parts, stem, *stem.split("_")} - {"", "__init__", "init", "mpi"}:
        holding = [file for file, text in texts.items() if re.search(rf"(\b|_){re.escape(word)}s?(\b|_)", text)]
        for file in holding:
            scores[file] += 10 / len(holding) + 3 * (word in file.stem)
    return sorted(scores, key=lambda file: -scores[file])[:most]


class Copy:
    """A copy of the tree, with the suite's caches; a file of tests that fails without a change says nothing."""

    def __init__(self, root: Path):
        self.root, self._is_sound = root, dict[Path, bool]()
        shutil.copytree(ROOT, root, ignore=shutil.ignore_patterns(".*", "__pycache__"))
        CACHES.mkdir(exist_ok=True)
        (root / CACHES.name).symlink_to(CACHES)

    def finder_of(self, change: Change, most: int) -> str:
        """Return the file of tests that finds a change, or ""."""
        for file in tests_of(change, most):
            target = self.root / change.path
            lines = (text := target.read_text(encoding="utf-8")).split("\n")
            lines[change.line - 1] = change.after
            target.write_text("\n".join(lines), encoding="utf-8")
            try:
                passes = self._passes(file)
            finally:
                target.write_text(text, encoding="utf-8")
            if not passes:
                if file not in self._is_sound:
                    self._is_sound[file] = self._passes(file)
                if self._is_sound[file]:
                    return file.name
        return ""

    def _passes(self, file: Path) -> bool:
        own = [sys.executable, *PYTEST, str(file.relative_to(ROOT))]
        ranks = [mpiexec(), "-n", "3", sys.executable, "-m", "mpi4py", *own[1:], "--with-mpi"]
        for command in [own, ranks] if is_about_ranks(file) else [own]:
            limited = ["timeout", "--kill-after", "10", str(LIMIT_S), *command]
            environment = {**os.environ, "PYTHONPATH": str(self.root), "OMP_NUM_THREADS": "1"}
            if subprocess.run(limited, cwd=self.root, env=environment, capture_output=True).returncode not in (0, 5):
                return False
        return True


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--count", type=int, default=300, help="changes")
    parser.add_argument("--files", type=int, default=8, help="files of tests to try for each")
    parser.add_argument("--within", default="", help="part of the paths of what is changed")
    options = parser.parse_args(arguments)
    everything = [change for path in sources() if options.within in path for change in changes_of(path)]
    drawn = random.Random(options.seed).sample(everything, min(options.count, len(everything)))
    print(f"Seed {options.seed}: {len(drawn)} of {len(everything):,} changes", flush=True)
    survived = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(Path(folder) / "tree")
        for number, change in enumerate(drawn, 1):
            finder = copy.finder_of(change, options.files)
            print(f"{number}: {change}\n  {finder or 'NOT FOUND'}", flush=True)
            survived += [change] * (not finder)
    print(*survived, f"{100 * (1 - len(survived) / len(drawn)):.0f} % of {len(drawn)} changes were found", sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
