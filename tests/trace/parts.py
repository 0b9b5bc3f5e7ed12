"""Made-up records of ranks, and the trace that comes of their parts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from clcomm.comm.stats.events import Collective
from clcomm.insight.trace.merge import write_from_parts
from clcomm.insight.trace.part_file import PartWriter, part_path
from tests.trace import rules

HEADER = {
    "job": 1, "rank": 0, "world_size": 4, "host": "here", "device": "cpu", "began_ns": 0, "device_uncertainty_ns": 0,
}  # fmt: skip
CLOCK = (0, 0, 0, 0, 0)


def reduction(began_s: float, seconds: float, bucket: int = 0, **fields: object) -> Collective:
    event = Collective("all_reduce", "gradients", 1000, seconds, "shared", 1, bucket=bucket, began_s=began_s)
    return event._replace(**fields)


def parts_of(
    folder: Path, ranks: int, rows: Callable[[int], dict[str, list]], limit_bytes: int = 1 << 24
) -> dict[str, Any]:
    """Write the parts of several ranks, and the trace of them; return it, checked."""
    path = folder / "trace.json"
    for rank in range(ranks):
        writer = PartWriter(part_path(path, rank), {**HEADER, "rank": rank, "world_size": ranks})
        writer.append(**{"clocks": [CLOCK], **rows(rank)})
        writer.close()
    write_from_parts(path, limit_bytes)
    return rules.load(path)
