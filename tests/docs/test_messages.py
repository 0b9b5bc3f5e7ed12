"""docs/troubleshooting.md: every message that the code can raise is in one of its lists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import numpy as np
import pytest

from clcomm import ClcommError, Communicator, Synchronizer
from clcomm.base.units import parse_size
from clcomm.engine import Linear
from clcomm.optim import SGD
from docs.extensions import messages, troubleshooting

PAGE = Path(__file__).resolve().parents[2] / "docs" / "troubleshooting.md"


def test_every_message_is_in_one_list() -> None:
    assert len(messages.messages()) > 600
    assert troubleshooting.uncovered(PAGE.read_text()) == []


def test_each_list_has_a_section_that_says_what_to_do() -> None:
    sections = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)[1:]
    with_lists = [section for section in sections if "```{messages}" in section]
    assert len(with_lists) == len(troubleshooting.lists(PAGE.read_text()))
    for section in with_lists:
        _, _, text = section.partition("\n")
        assert len(text.split("```{messages}")[0].split()) > 20, section


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: parse_size("1 apple"),
        lambda: Communicator(bucket_size=0),
        lambda: Communicator(transport="pigeon"),
        lambda: Synchronizer(Communicator(), zero=4),
        lambda: Synchronizer(Communicator(), shards=4, zero=2),
        lambda: Synchronizer(Communicator(), compression="zip"),
        lambda: Communicator().all_reduce([1.0]),
        lambda: Communicator().all_reduce(np.ones(3), "median"),
        lambda: SGD(Linear(2, 2), 0.1, nesterov=True),
        lambda: Linear(2, 3)(np.ones((4, 2))),
    ],
)
def test_a_raised_message_is_known(wrong) -> None:
    with pytest.raises(ClcommError) as caught:
        wrong()
    patterns = [re.escape(each.text).replace(messages.ANY, ".*") for each in messages.messages() if len(each.text) > 12]
    assert any(re.fullmatch(pattern, str(caught.value)) for pattern in patterns), str(caught.value)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("raise ArgumentError('a: expected b, got c')", ["a: expected b, got c"]),
        ("raise ArgumentError(f'{name}: expected {x!r}' f', got {y}; z')", ["…: expected …, got …; z"]),
        ("raise errors.DataError('p' + text + 'q')", ["p…q"]),
        ("raise DataError('one' if x else f'two {y}')", ["one", "two …"]),
        ("def f():\n  text = f'in {n}'\n  if x: text = 'out'\n  raise DataError(text)", ["in …", "out"]),
        ("problem = f'{path}: expected a file, got {kind}'", ["…: expected a file, got …"]),
        ('"""Docs: expected a, got b."""\nraise ValueError("unknown")', []),
    ],
)
def test_planted_messages_are_found(source: str, found: list[str]) -> None:
    tree = ast.parse(source)
    calls = messages._calls(tree, {"ArgumentError", "DataError"})
    texts = {text for function, call in calls for text in messages._texts(call, function)}
    assert texts | set(messages._formed(tree)) == set(found)


def test_a_file_belongs_to_the_innermost_place() -> None:
    places = ["clcomm/tools/commands", "clcomm/tools/commands/run.py", "models"]
    found = [
        troubleshooting.place_of(file, places)
        for file in ("clcomm/tools/commands/run.py", "clcomm/tools/commands/x.py", "m.py")
    ]
    assert found == ["clcomm/tools/commands/run.py", "clcomm/tools/commands", ""]
    shared = PAGE.read_text() + "\n```{messages}\n:from: models\n```\n"
    assert "models: in several lists" in troubleshooting.uncovered(shared)


def test_a_message_without_a_list_is_reported() -> None:
    page = PAGE.read_text().replace("clcomm/base/units.py", "clcomm/gone.py")
    wrong = troubleshooting.uncovered(page)
    assert any(line.startswith("clcomm/base/units.py: in no list") for line in wrong)
    assert "clcomm/gone.py: no messages" in wrong
