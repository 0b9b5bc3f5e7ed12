"""A report's figures are those of the files, and its sums come out."""

from __future__ import annotations

import re

import pytest

from clcomm.comm.stats.comm_stats import Collective, CommStats
from clcomm.insight.report.recording import read_runs
from clcomm.insight.report.report import build
from tests.report.conftest import reported, table
from tests.report.runs import LAYOUT, STEPS, document, written


def test_lizardists_figures(report):
    assert [row["value"] for row in table(report, "gradients").rows] == [165538, 5 * STEPS, STEPS * 827688]


def test_buckets_bytes_are_the_layouts_and_the_operations(report):
    buckets = table(report, "buckets").rows
    assert [row["bytes"] for row in buckets] == [STEPS * sum(bucket) for bucket in LAYOUT]
    (gradients,) = (row for row in table(report, "operations").rows if row["label"] == "gradients")
    assert sum(row["bytes"] for row in buckets) == gradients["bytes"]
    for name in ("seconds", "pack_s", "wait_s", "transfer_s", "unpack_s"):
        assert sum(row[name] for row in buckets) == pytest.approx(gradients[name])
    assert not table(report, "checks").rows


def test_sums_that_do_not_come_out_are_shown(tmp_path):
    checks = table(reported(tmp_path, layout=[[1000], [2000], [3000], [4000], [5000]]), "checks").rows
    assert [row["expected"] for row in checks] == [STEPS * 15_000]


def test_calls_of_other_buckets_are_in_no_line_and_the_sums_come_out(tmp_path):
    whole = document(2)
    for number, each in enumerate(whole["ranks"]):
        stats = CommStats(2)
        for step in range(STEPS):
            if step == 20:
                stats.merge_buckets("gradients")
            for bucket, nbytes in enumerate([827688] if step < 20 else [sum(bucket) for bucket in LAYOUT]):
                stats.collective_finished(Collective("all_reduce", "gradients", nbytes, 1e-3, "shared", 1,
                                                     bucket=bucket, wait_s=1e-4))  # fmt: skip
        whole["ranks"][number] = {**each, "stats": stats.state()}
    report = build(read_runs(written(tmp_path, [whole])))
    buckets = table(report, "buckets")
    assert [row["calls"] for row in buckets.rows] == [STEPS - 20] * 5
    assert buckets.note.endswith(" 20 calls before these were the buckets are not listed.")
    assert not table(report, "checks").rows
    assert [row["value"] for row in table(report, "gradients").rows][1:] == [20 + 5 * (STEPS - 20), STEPS * 827688]


def test_each_rank_has_its_row_and_the_slow_one_shows(report):
    rows = table(report, "ranks").rows
    assert [row["rank"] for row in rows] == [0, 1, 2, 3]
    assert min(table(report, "step_ranks").rows, key=lambda row: row["wait_for_ranks_step_s"])["rank"] == 2
    assert max(rows, key=lambda row: row["last_share"])["rank"] == 2
    assert sum(row["last_share"] for row in rows) == pytest.approx(1.0)
    said = r"Rank 2 keeps the others waiting: .*; it arrived last in \d\d% of 300 collectives, on average 0\.\d+ ms"
    assert any(re.match(said, line) for line in report.headline)


def test_bandwidths_have_significant_digits_and_a_dash_where_nothing_moves(tmp_path):
    whole = document(2)
    stats = CommStats(2)
    for operation, nbytes, seconds in (("all_gather", 64, 1e-3), ("barrier", 0, 1e-3), ("broadcast", 10**9, 1e-3)):
        stats.collective_finished(Collective(operation, "mine", nbytes, seconds, "shared", 1))
    for record in whole["ranks"]:
        record["stats"] = stats.state()
    operations = table(build(read_runs(written(tmp_path, [whole]))), "operations")
    algbw = [column.key for column in operations.columns].index("algbw_bytes_per_s")
    shown = {row["operation"]: cells[algbw] for row, cells in zip(operations.rows, operations.cells(), strict=True)}
    assert shown == {"all_gather": "6.4e-05", "barrier": "-", "broadcast": "1,000"}
    alone = table(build(read_runs(written(tmp_path, [document(1)]))), "operations")
    assert not {"algbw", "busbw"} & {column.heading for column in alone.columns}


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_any_number_of_ranks(tmp_path, ranks):
    report = build(read_runs(written(tmp_path, [document(ranks)])))
    assert len(table(report, "ranks").rows) == ranks
    assert f"{ranks} rank{'s' if ranks > 1 else ''}" in report.title
