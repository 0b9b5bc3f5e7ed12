"""A sample of the fault matrix, one case of each mechanism; `make faults` runs all."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.faults.cases import SAMPLE
from tests.faults.file_jobs import forget_kernels
from tests.faults.launch import ROOT
from tests.faults.matrix import Outcome, every_case, run_case, undisturbed
from tests.faults.pace import Pace
from tests.faults.page import Row, page, section_of

#: Cases at a time: they mostly wait.
AT_ONCE = 3


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[Outcome]]]:
    """The outcomes of the cases that this run asks for, several at a time."""
    asked = [item.callspec.params["name"] for item in request.session.items
             if item.path == request.path and hasattr(item, "callspec")]  # fmt: skip
    undisturbed()
    cases = {case.name: case for case in every_case()}
    with Pace() as pace, ThreadPoolExecutor(AT_ONCE) as pool:
        yield {name: pool.submit(run_case, cases[name], tmp_path_factory.mktemp("fault"), pace) for name in asked}
    forget_kernels()


@pytest.mark.sampled(14)
@pytest.mark.parametrize("name", SAMPLE)
def test_a_fault_ends_as_it_has_to(name: str, outcomes: dict[str, Future[Outcome]]) -> None:
    outcome = outcomes[name].result()
    assert outcome.problems == [], outcome.output


def test_the_matrix_has_enough_cases_each_once() -> None:
    names = Counter(case.name for case in every_case())
    assert len(names) >= 300 and set(names.values()) == {1}


def test_the_tables_have_a_row_for_each_mechanism_of_the_matrix() -> None:
    written = (ROOT / "tests" / "proofs" / "faults.md").read_text()
    shown = re.findall(r"^\| (.+?) \| \d+ \|", written, re.MULTILINE)
    assert sorted(shown) == sorted({case.fault for case in every_case()})


def test_a_mechanism_s_row_has_its_exit_codes_and_the_message_of_most_cases() -> None:
    written = page("Faults", [
        Row("SIGTERM", 15, ""),
        Row("SIGTERM", 143, "clcomm: rank 1 | <5>"),
        Row("SIGTERM", 143, "clcomm: rank 1 | <6>"),
        Row("no number", 2, ""),
    ])  # fmt: skip
    assert "\n| SIGTERM | 3 | 15, 143 | `clcomm: rank 1 \\| <5>` |\n" in written
    assert "\n| no number | 1 | 2 |  |\n" in written and "4 cases, 2 mechanisms." in written
    assert section_of("SIGTERM") == "Signals" and section_of("no number") == "Options, files, disks and hosts"
