"""Agreement between ranks: drawn settings, and the error that every rank raises, against a search by columns."""

from __future__ import annotations

import random

import numpy as np
import pytest

from clcomm.base.errors import MismatchError, name_ranks
from clcomm.sync.agreement import all_alike, digest, require_agreement
from tests.helpers import one_line


def drawn(seed: int, ranks: int) -> list[list[str]]:
    """Return every rank's lines: mostly alike, of up to four, some ranks with fewer."""
    draw = random.Random(seed)
    lines = [f"entry {index}" for index in range(draw.randint(0, 4))]
    everyone = [list(lines) for _ in range(ranks)]
    for own in everyone:
        if lines and draw.random() < 0.4:
            own[draw.randrange(len(lines))] = draw.choice(["other", "another"])
        if lines and draw.random() < 0.2:
            own.pop()
    return everyone


def expected(everyone: list[list[str]]) -> str | None:
    """Return what the error says of the first entry in which ranks differ, None where none does."""
    for index in range(max(map(len, everyone))):
        column = [own[index] if index < len(own) else "nothing" for own in everyone]
        if len(set(column)) > 1:
            sides = {value: [rank for rank, theirs in enumerate(column) if theirs == value] for value in column}
            text = ", ".join(f"{value!r} on {name_ranks(ranks)}" for value, ranks in sides.items())
            return f"settings: expected the same on every rank, but entry {index} is {text}; do this"
    return None


def test_the_first_difference_is_named_on_every_rank(comm):
    differences = 0
    for seed in range(60):
        everyone = drawn(seed, comm.size)
        message = expected(everyone)
        if message is None:
            require_agreement(comm, "settings", everyone[comm.rank], "do this")
            continue
        differences += 1
        with pytest.raises(MismatchError) as caught:
            require_agreement(comm, "settings", everyone[comm.rank], "do this")
        assert one_line(caught) == message
    assert (differences > 0) == (comm.size > 1)


def test_a_digest_is_of_the_bits():
    values = [np.float32(0.0), np.float32(-0.0), np.float64(0.0), np.int32(0), np.arange(6), np.arange(7)]
    digests = [digest(np.atleast_1d(value)) for value in values]
    same = {(0, 3)}  # four bytes of zero
    for first in range(len(values)):
        for second in range(first):
            assert (digests[first] == digests[second]) == ((second, first) in same)
    assert digest(np.arange(6).reshape(2, 3)) == digests[4] == digest(np.arange(6).tobytes())


def test_rows_are_alike_where_each_is_the_first():
    rows = np.arange(12).reshape(1, 12).repeat(4, 0)
    assert all_alike(rows)
    for place in range(rows.size):
        changed = rows.copy()
        changed.reshape(-1)[place] += 1
        assert not all_alike(changed)
