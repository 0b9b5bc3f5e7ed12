"""A job with logical shards that is killed twice, and goes on with other numbers of ranks, has the undisturbed bits."""

from __future__ import annotations

import random
from pathlib import Path

from tests.faults.killed_shards import killed_run


def test_a_killed_run_ends_with_the_undisturbed_bits(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    undisturbed, none = killed_run(tmp_path / "whole", 0, random.Random(1))
    found, kills = killed_run(tmp_path / "killed", 2, random.Random(5))
    assert (none, found) == (0, undisturbed) and kills
