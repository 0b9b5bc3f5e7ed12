"""examples.tabular as a user runs it: every table, on any number of ranks."""

from __future__ import annotations

import re

import pytest

from tests.examples.test_examples import launch, run

pytest.importorskip("sklearn", reason="scikit-learn is not installed")

#: Of each table: rows that train, columns, and a score that any of these runs exceeds.
TABLES = {"breast_cancer": (455, 30, 94), "diabetes": (354, 10, 0.2), "iris": (120, 4, 86), "wine": (142, 13, 86)}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("data", "ranks"), [("breast_cancer", 0), ("breast_cancer", 4), ("diabetes", 3), ("iris", 2), ("wine", 3)]
)
def test_the_network_learns_the_table(data: str, ranks: int) -> None:
    rows, columns, least = TABLES[data]
    lines = run("examples.tabular", "--data", data, ranks=ranks).splitlines()
    (found,) = (re.fullmatch(r"(\w+): (\d+) rows of (\d+) columns; test (accuracy|R\^2) ([\d.]+)%?", x) for x in lines)
    assert found is not None, lines
    assert found.groups()[:3] == (data, str(rows), str(columns))
    assert found[4] == ("R^2" if data == "diabetes" else "accuracy")
    assert float(found[5]) > least


def test_another_table_is_refused_in_one_line() -> None:
    done = launch("examples.tabular", "--data", "boston", ranks=2)
    assert done.returncode != 0
    assert done.stderr.startswith("clcomm: argument --data: invalid choice: 'boston' ")
    assert done.stderr.endswith("; see python -m examples.tabular --help\n") and done.stderr.count("\n") == 1
