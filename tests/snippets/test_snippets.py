"""A sample of the snippets that `make snippets` draws, and the differences on purpose."""

from __future__ import annotations

import os

import pytest

from tests.snippets.differences import DIFFERENCES, PAGE, with_section

#: Seeds of snippets about kinds that the engine does not have right yet.
OPEN = {1, 6, 16, 35, 38, 46, 53, 61, 63}
COUNT, FIRST = (int(os.environ.get(f"CLCOMM_SNIPPETS{name}", usual)) for name, usual in (("", "60"), ("_FROM", "0")))


@pytest.mark.timeout(600 + COUNT)
def test_no_drawn_snippet_has_other_values_than_pytorchs(torch):
    from tests.snippets.__main__ import searched

    seeds = [seed for seed in range(FIRST, FIRST + COUNT) if seed not in OPEN]
    counts, wrong = searched(seeds)
    assert wrong == []
    assert counts["same"] > 0.4 * COUNT, counts


@pytest.mark.parametrize("each", DIFFERENCES, ids=lambda each: each.text)
def test_what_is_different_on_purpose_is_different(torch, each):
    from tests.snippets.sides import SILENT, compared

    assert compared(each.example).kind == SILENT


def test_the_page_has_the_differences():
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_section(page)


def test_a_wrong_value_is_found_and_shortened(torch, monkeypatch):
    from clcomm.engine import Tensor
    from tests.snippets.sides import SILENT, compared, shrunk

    text = "a = torch.ones(2)\nfor n in range(2):\n    a = a + 1\n    b = a.exp()\nc = b.sum().item()"
    assert compared(text).kind == "same"
    monkeypatch.setattr(Tensor, "exp", lambda x: x * 3)
    assert compared(text).kind == SILENT
    short = shrunk(text, lambda shorter: compared(shorter).kind == SILENT)
    assert short == "a = torch.ones(2)\nfor n in range(2):\n    b = a.exp()"
