"""Errors' common words: how a message names ranks."""

from __future__ import annotations

import re

import pytest

from clcomm.errors import name_ranks


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "rank 3"), ([0, 2], "ranks 0 and 2"), ([0, 1, 3], "ranks 0, 1 and 3"), (range(2, 4), "ranks 2 and 3"),
        (range(8), "ranks 0, 1, 2, 3, 4, 5, 6 and 7"), (range(9), "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 1 more"),
    ],
)  # fmt: skip
def test_ranks_in_words(ranks, text):
    assert name_ranks(ranks) == text


@pytest.mark.parametrize("most", [1, 2, 3, 8])
def test_every_rank_is_named_or_counted(most):
    for count in range(1, 25):
        ranks = [3 * rank + 1 for rank in range(count)]
        text = name_ranks(ranks, most)
        more = re.search(r" and (\d+) more$", text)
        named = [int(number) for number in re.findall(r"\d+", text[: more.start()] if more else text)]
        assert named == ranks[: len(named)] and len(named) + (int(more[1]) if more else 0) == count
        assert len(named) == (most if more else count) and bool(more) == (count > most)
        assert text.startswith("ranks " if count > 1 else "rank ")
