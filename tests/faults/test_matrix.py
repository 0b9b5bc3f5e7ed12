"""A sample of the fault matrix, one case of each mechanism; `make faults` runs all."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.faults.cases import SAMPLE, Case, all_cases
from tests.faults.matrix import run_case

CASES = {case.name: case for case in all_cases()}


@pytest.mark.parametrize("case", [CASES[name] for name in SAMPLE], ids=SAMPLE)
def test_a_fault_ends_as_it_has_to(case: Case, tmp_path: Path) -> None:
    outcome = run_case(case, tmp_path)
    assert outcome.problems == [], outcome.said


def test_the_matrix_has_enough_cases_each_once() -> None:
    names = Counter(case.name for case in all_cases())
    assert len(names) >= 120 and set(names.values()) == {1}
