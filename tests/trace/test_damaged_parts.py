"""`clcomm trace` on parts that no rank wrote: one line, whatever is in them."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from clcomm.base.errors import ArgumentError
from clcomm.insight.trace.merge import write_from_parts
from clcomm.insight.trace.part_file import FORMAT, KINDS, part_path

DEEP = (1, 2, 50, 500, 990, 2000, 100_000)
JUNK = (None, True, -1, 10**400, 1e308, "text", "²", [], {}, [[]], [None], {"a": []}, [[1, "2", [3]]])


def written(tmp_path: Path, *lines: str) -> ArgumentError | list[int]:
    trace = tmp_path / "trace.json"
    part_path(trace, 0).write_text("\n".join(lines) + "\n")
    try:
        return write_from_parts(trace, 1 << 30)
    except ArgumentError as error:
        assert "\n" not in str(error) and str(trace) in str(error)
        assert not trace.exists()
        return error


@pytest.mark.parametrize("depth", DEEP)
@pytest.mark.parametrize("kind", KINDS)
def test_json_of_any_depth_is_one_line(tmp_path, depth, kind):
    header = json.dumps({"format": FORMAT, "rank": 0, "job": "x"})
    nested = "[" * depth + "]" * depth
    for row in (nested, f"[{nested}]", f'[["a", {nested}, 1, 2, 3, 4]]', f"[{{}}, {nested}]"):
        assert isinstance(written(tmp_path, header, f'{{"{kind}": {row}, "clocks": [[0, 0]]}}'), ArgumentError | list)
    assert isinstance(written(tmp_path, nested), ArgumentError)


def test_rows_of_any_kind_are_one_line(tmp_path):
    refused = 0
    for seed in range(400):
        draw = random.Random(seed)
        header = {"format": FORMAT, "rank": draw.choice([0, 0, 0, *JUNK]), "job": draw.choice(["x", *JUNK])}
        header |= {draw.choice(["size", "host", "device", "names"]): draw.choice(JUNK)}
        rows = {kind: [draw.choices(JUNK, k=draw.randint(0, 9)) for _ in range(2)] for kind in draw.sample(KINDS, 3)}
        rows |= {draw.choice(KINDS): draw.choice(JUNK)}
        refused += isinstance(written(tmp_path, json.dumps(header), json.dumps(rows)), ArgumentError)
    assert refused > 300
