"""The table of stats: each operation with its units, within the width there is."""

from __future__ import annotations

import os

import pytest
from rich.console import Console

from clcomm.comm.stats.comm_stats import CommStats
from tests.stats_events import event, stats_of


def rendered(stats):
    with open(os.devnull, "w") as nowhere:
        console = Console(width=200, record=True, file=nowhere)
        console.print(stats.table())
    return console.export_text()


def test_the_table_shows_every_operation_with_its_units():
    text = rendered(stats_of([event(0.0015, 827_688, label="gradients")] * 235 + [event(0.001, 0, "barrier")]))
    assert "all_reduce gradients" in text
    assert "235" in text
    assert "194,506,680" in text
    assert "827,688" in text
    for heading in ("calls", "bytes/call", "p95", "algbw", "busbw", "failed", "ms", "GB/s"):
        assert heading in text
    assert "0.552" in text  # 827,688 bytes in 1.5 ms
    assert "0.828" in text  # times 2 * 3 / 4


def test_the_table_has_three_significant_digits_and_a_dash_where_nothing_moves():
    text = rendered(stats_of([event(0.0102, 8, "broadcast"), event(4.56e-7, 1 << 20), event(0.001, 0, "barrier")]))
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line.strip()}
    total, algbw = rows["operation"].index("total"), -3
    assert (rows["broadcast"][total], rows["broadcast"][algbw]) == ("10.2", "7.84e-07")
    assert (rows["all_reduce"][total], rows["all_reduce"][algbw]) == ("0.000456", "2,300")
    assert rows["barrier"].count("-") == 2


def test_an_empty_table_renders():
    assert "operation" in rendered(CommStats())


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_a_narrow_table_keeps_to_its_width(width):
    slow = event(0.1, 1000, "broadcast", label="parameters")
    stats = stats_of([event(0.0015, 827_688, label="gradients")] * 235 + [slow])
    with open(os.devnull, "w") as nowhere:
        console = Console(width=width, record=True, file=nowhere)
        console.print(stats.table())
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= width and not any("…" in line for line in lines)
    heading, row = lines[1].split(), next(line for line in lines if "235" in line)
    assert row.startswith("all_reduce gradients")
    missing = " ".join(lines).partition("no room for ")[2]
    for column, least in (("calls", 40), ("total", 40), ("bytes", 60), ("bytes/call", 60), ("max", 80), ("algbw", 120)):
        assert (column in heading) == (width >= least) == (column not in missing.replace(",", "").split())
