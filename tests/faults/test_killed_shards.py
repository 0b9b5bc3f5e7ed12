"""A job with logical shards whose ranks are killed, and that goes on with others, has the undisturbed bits."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.faults.killed_shards import killed_run


@pytest.mark.slow  # test_replaced_ranks.py has the fact too
def test_a_killed_run_ends_with_the_undisturbed_bits(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    undisturbed = killed_run(tmp_path / "whole", 0, random.Random(1))
    killed = killed_run(tmp_path / "killed", 3, random.Random(5))
    assert (undisturbed.kills, killed.digest) == (0, undisturbed.digest) and killed.kills >= 3
