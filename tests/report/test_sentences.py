"""A report in words: its headline, decisions and notes, and why something is left out."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from clcomm.comm.stats.comm_stats import Collective, CommStats, Phase
from clcomm.insight.report import sentences
from clcomm.insight.report.recording import read_runs
from clcomm.insight.report.report import build
from tests.report.conftest import joined, of_events, reported, table
from tests.report.runs import apart, document, written
from training.metrics import WARM_UP_STEPS


def test_trouble_comes_first(tmp_path):
    whole = document()
    whole["ranks"][1]["replica_mismatches"] = 2
    whole["ranks"][2]["stats"]["tallies"][0]["failures"] = 3
    report = build(read_runs(written(tmp_path, apart(whole)[:3])))
    assert report.headline[:3] == [
        "1 rank of 4 missing here: 3; all figures are of the others.",
        "3 calls failed.",
        "The replicas differed 2 times: do not trust the trained parameters.",
    ]


def test_it_is_said_which_steps_the_speed_leaves_out(tmp_path):
    assert sentences.WARM_UP_STEPS == WARM_UP_STEPS == 10
    report = reported(tmp_path)
    line = "60 steps, 7 ms each on average of all, 18,000 images/s without the first 10, test accuracy 98.33%."
    assert line in report.headline
    assert [tile.caption for tile in report.tiles[:2]] == ["images/s without the first 10", "a mean step of all"]
    whole = document()
    for record in whole["ranks"]:
        record.update(steps=10, training_s=0.07)
    headline = build(read_runs(written(tmp_path, [whole]))).headline
    assert "10 steps, 7 ms each on average of all, 18,000 images/s, test accuracy 98.33%." in headline


@pytest.mark.parametrize("cold", [1, 10])
def test_the_first_steps_are_in_no_mean_share_or_cause(tmp_path, cold):
    """They build kernels: 300 ms each, in forward, in the wait for data and in the reductions."""
    plain, whole = document(2), document(2)
    for record in whole["ranks"]:
        for first in (True, False):
            stats = CommStats.merged([record["stats"]], 2) if not first else CommStats(2)
            for _ in range(cold):
                stats.phase_finished(Phase("forward_backward", 0.0, 0.1))
                stats.collective_finished(Collective("all_reduce", "gradients", 4, 0.1, "shared", 1, wait_s=0.05))
            if first:
                record["cold"] = {
                    "steps": cold, "training_s": 0.3 * cold, "data_wait_s": 0.1 * cold, "core_waits_s": None,
                    "stats": stats.state(),
                }  # fmt: skip
        record.update(stats=stats.state(), steps=record["steps"] + cold)
        record.update(training_s=record["training_s"] + 0.3 * cold, data_wait_s=record["data_wait_s"] + 0.1 * cold)
    found, expected = (build(read_runs(written(tmp_path, [each]))) for each in (whole, plain))
    without = f" without the first{f' {cold}' if cold > 1 else ''}"
    assert found.headline[0].startswith(f"{60 + cold} steps, 7 ms each on average{without}, ")
    assert found.tiles[1].caption == f"a mean step{without}"
    rows, plain_rows = (
        [(row["part"], round(row["mean_s"], 9)) for row in table(each, "step").rows] for each in (found, expected)
    )
    assert rows == plain_rows
    assert [line for line in found.headline if "largest part of a step is" in line] == [
        line for line in expected.headline if "largest part of a step is" in line
    ]


def test_ranks_that_come_alike_are_not_blamed(tmp_path):
    whole = document()
    for record in whole["ranks"]:
        record["stats"]["late"] = [[rank, 45, 45 * 10**5, 2 * 10**5] for rank in range(4)]
        record["stats"]["tallies"] = whole["ranks"][0]["stats"]["tallies"]
    (line,) = (s for s in build(read_runs(written(tmp_path, [whole]))).headline if "last" in s)
    assert line == "No rank stands out: the last one arrived on average 0.1 ms after the second-to-last."


def test_decisions_are_shown_as_they_print(tmp_path):
    trial = {"name": "1 MiB", "measured_s": 0.001, "predicted_s": None, "steps": 5}
    decision = {"what": "bucket size", "chosen": "1 MiB", "measures": "step", "evidence": [trial], "at_step": 50}
    (row,) = table(reported(tmp_path, decisions=[decision]), "decisions").rows
    assert row["decision"] == "bucket size: 1 MiB, chosen at step 50 by step: 1 MiB (1.000 ms)"
    decision["evidence"].append({"name": "8 KiB", "measured_s": 0.0009, "predicted_s": 0.002, "steps": 3})
    (row,) = table(reported(tmp_path, decisions=[decision]), "decisions").rows
    told = "1 MiB (1.000 ms in 5 steps), 8 KiB (0.900 ms in 3 steps, predicted 2.000 ms)"
    assert row["decision"].endswith(f"by step: {told}")


def test_notes_name_only_columns_that_are_there(tmp_path):
    report = build(read_runs(written(tmp_path, [joined()])))
    assert [table(report, key).note for key in ("operations", "ranks")] == [
        "Per rank; times in ms: total to move in all, percentiles of single calls; bandwidths in GB/s (10^9 bytes).",
        "Times in ms of a mean step. Cores busy: processor time of all of a rank's threads in steps, over the time of "
        "these steps.",
    ]
    whole = document(1)
    for record in whole["ranks"]:
        record["stats"].update(phases=[], late=[])
        record["cpu_s"] = None
        for tally in record["stats"]["tallies"]:
            tally["wait_ns"] = 0
    alone = build(read_runs(written(tmp_path, [whole])))
    assert [table(alone, key).note for key in ("operations", "buckets", "ranks")] == [
        "Per rank; times in ms: total in all, percentiles of single calls.",
        "Per rank; times in ms, percentiles of single calls. Buckets are numbered in the order of backward.",
        "Times in ms of a mean step.",
    ]


def test_what_is_not_known_is_left_out_with_a_reason(tmp_path):
    whole = document(layout=None, training_s=None)
    whole["ceilings"] = []
    for record in whole["ranks"]:
        record["training_s"] = None
        record["stats"]["late"] = []
        for tally in record["stats"]["tallies"]:
            tally.update(wait_ns=0, wait_unknown_ns=tally["ns"])
            tally["bucket"] = min(tally["bucket"], 0) if tally["label"] != "gradients" else tally["bucket"]
    report = build(read_runs(written(tmp_path, [whole])))
    left_out = {each.what: each.why for each in report.left_out}
    assert set(left_out) >= {
        "share of a step", "wait for ranks", "who came last", "percent of the ceiling", "other bucket sizes"
    }  # fmt: skip
    assert "mpiexec -n 4 clcomm tune" in left_out["percent of the ceiling"]
    assert not {"step", "stragglers", "advice"} & {each.key for each in report.tables}


def test_a_sharded_update_says_why_it_has_no_buckets(tmp_path):
    report = of_events(tmp_path, Collective("reduce_scatter", "gradients", 4000, 3e-3, "shared", 1, wait_s=1e-3))
    left_out = {each.what: each.why for each in report.left_out}
    assert left_out["gradient all-reduce, buckets"] == "a sharded update reduces and scatters all gradients at once"
    assert left_out["latency and bandwidth of this run"] == "there are no buckets to fit it to"


def test_one_rank_misses_nothing(tmp_path):
    whole = document(1)
    whole["ceilings"] = []
    assert build(read_runs(written(tmp_path, [whole]))).left_out == []


def test_what_moving_costs_has_at_most_three_digits_in_its_unit():
    rng, seconds = np.random.default_rng(0), {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
    number = r"(\d{1,3}|\d{1,2}\.\d{1,2}|0\.\d{1,5}) (ns|us|ms|s)"
    for alpha_s, beta_s in 10.0 ** rng.uniform((-8, -12), (1, -4), (300, 2)):
        cost = SimpleNamespace(alpha_s=alpha_s, beta_s_per_byte=beta_s)
        chosen = SimpleNamespace(is_good=True, current_buckets=3, recommendation=SimpleNamespace(best=None))
        facts = cast(Any, SimpleNamespace(advice=chosen, costs=SimpleNamespace(cost=cost)))
        found = re.match(rf"Moving costs {number} a call and {number} a KiB: ", sentences.advice(facts))
        assert found, sentences.advice(facts)
        call, call_unit, kib, kib_unit = found.groups()
        assert float(call) * seconds[call_unit] == pytest.approx(alpha_s, rel=5e-3)
        assert float(kib) * seconds[kib_unit] == pytest.approx(1024 * beta_s, rel=5e-3)


@pytest.mark.parametrize(
    ("batch_size", "ending"), [(8, "; a larger batch than 8 shares them among more samples"), (None, "")]
)
def test_launches_that_outlast_the_kernels_say_what_a_batch_has_to_do_with_it(tmp_path, batch_size, ending):
    whole = document(batch_size=batch_size)
    for record in whole["ranks"]:
        record["kernel_step_s"] = 1e-3
    report = build(read_runs(written(tmp_path, [whole])))
    what = f"Python and launches in forward and backward, with 1 ms of kernels a step{ending}: 4 ms, "
    assert sum(what in line for line in report.headline) == 1
