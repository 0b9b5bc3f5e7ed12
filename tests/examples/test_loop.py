"""The training loop that the README shows, run as a user runs it."""

from __future__ import annotations

import re

import pytest

from tests.examples.test_examples import run

EPOCHS, SAMPLES, BATCH, BUCKETS = 20, 1500, 25, 2
GRADIENT_BYTES = 4 * (64 * 128 + 128 + 128 * 10 + 10)
LINE = re.compile(
    r"rank (\d) of (\d): test accuracy (\d+\.\d)% {'total_allreduce_calls': (\d+), 'total_bytes_sent': (\d+), "
    r"'average_bytes_per_call': ([\d.]+)}"
)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ranks", [0, 1, 2, 3, 4])
def test_every_rank_trains_the_same_model(ranks: int) -> None:
    pytest.importorskip("sklearn")
    found = [LINE.fullmatch(line) for line in run("examples.loop", ranks=ranks).splitlines()]
    size = max(ranks, 1)
    assert sorted((int(line[1]), int(line[2])) for line in found if line) == [(rank, size) for rank in range(size)]
    steps = EPOCHS * -(-SAMPLES // (BATCH * size))
    counts = str(BUCKETS * steps), str(steps * GRADIENT_BYTES), str(GRADIENT_BYTES / BUCKETS)
    assert {line.groups()[3:] for line in found if line} == {counts}
    (accuracy,) = {float(line[3]) for line in found if line}
    assert accuracy > 90
