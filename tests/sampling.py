"""What a run of the whole suite leaves out, so that it ends in time; CLCOMM_ALL_CASES=1 leaves out nothing.

Files, folders and `-k` on pytest's command line name what to run: then every case of it runs.
"""

from __future__ import annotations

import os
import re
import sys
import zlib
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import pytest

_Value = TypeVar("_Value")

#: The most cases of a test in a run of the whole suite, without a mark of its own; and on several ranks, all together.
MOST_CASES, MOST_CASES_ON_RANKS = 3, 2
#: The same in folders and files whose tests start jobs, or compute for seconds.
MOST_SLOW_CASES = 1
SLOW = tuple(
    f"tests/{name}" for name in (
        "benchmarks/", "console/", "deploy/", "docs/", "doctor/", "examples/", "families/", "faults/", "fuzz/",
        "launch/", "measure/", "multihost/", "oclgrind/", "parallel/", "proofs/", "report/test_planted_causes",
        "report/test_wait_causes", "engine/test_tuning", "torch/test_jobs", "torch/test_other_devices", "top/",
        "trace/", "training/test_engines", "zero/test_memory",
    )
)  # fmt: skip
#: Folders whose tests look at what other processes do meanwhile: a busy machine may be late.
TIMED_FOLDERS = ("doctor", "faults", "job", "launch", "multihost", "report", "top", "verify")
#: From how many cases on a test's cases are divided between numbers of ranks.
DIVIDED_FROM = 2
#: Where one of four such cases runs: half of them on two ranks, which take least time.
NUMBERS = (2, 3, 2, 4)
#: The folders with the files that take longest.
LONGEST = ("tests/families/", "tests/oclgrind/", "tests/faults/", "tests/examples/", "tests/launch/")


def is_whole_suite(config: pytest.Config) -> bool:
    """Return whether this run, or the one whose worker this process is, was asked for no particular tests."""
    if hasattr(config, "workerinput"):
        return config.workerinput["is_whole_suite"]
    named = config.args_source is not pytest.Config.ArgsSource.TESTPATHS or config.option.keyword
    return not named and not runs_all_cases()


#: A file with tests that are about ranks has the mark, or asks for a fixture whose parameters have it.
_ABOUT_RANKS = re.compile(r"mark\.mpi|^def test_\w+\([^)]*\b(comm|several|bench)\b", re.MULTILINE)


def is_about_ranks(path: Path) -> bool:
    """Return whether a file of tests may have some that run under mpiexec."""
    return _ABOUT_RANKS.search(path.read_text(encoding="utf-8")) is not None


def runs_all_cases() -> bool:
    """Return whether CLCOMM_ALL_CASES asks for every case."""
    return os.environ.get("CLCOMM_ALL_CASES") == "1"


def some(values: Sequence[_Value], count: int) -> Sequence[_Value]:
    """Return so many of a test's values, evenly spread, or all of them where every case is to run."""
    return values if runs_all_cases() else [values[index * len(values) // count] for index in range(count)]


def sampled(items: list[pytest.Item], most: int = MOST_CASES) -> list[pytest.Item]:
    """Return the items without slow tests, and without a test's cases beyond the number that it may have.

    Which of them stay follows from their names, so that every parameter's values have their chance.
    """
    tests = defaultdict(list)
    for item in items:
        tests[_test_of(item)].append(item)
    left_out = set()
    for cases in tests.values():
        left_out.update(sorted(cases, key=_draw)[_most_cases(cases[0], most) :])
    return [item for item in items if item not in left_out]


def _most_cases(item: pytest.Item, most: int) -> int:
    if item.get_closest_marker("slow") is not None:
        return 0
    mark = item.get_closest_marker("sampled")
    if mark is not None and mark.args[0] is None:
        return sys.maxsize
    usual = MOST_SLOW_CASES if item.nodeid.startswith(SLOW) else most
    return usual if mark is None else min(mark.args[0], usual)


def divided(items: list[pytest.Item], ranks: int) -> list[pytest.Item]:
    """Return the items that run on so many ranks: each case of a test of several on either 2, 3 or 4.

    What needs four ranks always has them.
    """
    cases: dict[str, int] = defaultdict(int)
    for item in items:
        cases[_test_of(item)] += 1

    def runs(item: pytest.Item) -> bool:
        needs_four = item.get_closest_marker("mpi").kwargs.get("min_size", 1) > 3
        if needs_four or ranks not in NUMBERS or cases[_test_of(item)] < DIVIDED_FROM:
            return True
        return NUMBERS[_draw(item) % len(NUMBERS)] == ranks

    return [item for item in items if runs(item)]


def longest_first(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return the items with the files first that take longest, so that no process ends with one of them alone."""
    return sorted(items, key=lambda item: not item.nodeid.startswith(LONGEST))


def _test_of(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def _draw(item: pytest.Item) -> int:
    return zlib.crc32(item.nodeid.encode())
