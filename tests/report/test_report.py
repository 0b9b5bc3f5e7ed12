"""What a report says: its figures are those of the files, its sums come out, every form of it is whole."""

from __future__ import annotations

import csv
import io
import json
import re

import pytest
from rich.console import Console

from benchmarks import example_report
from clcomm import cli
from clcomm.costmodel import Cost
from clcomm.errors import ArgumentError, DataError
from clcomm.report import plain, sentences
from clcomm.report.axes import CALLS, SIZE, TIME, log_ticks, size_text, size_ticks, time_text
from clcomm.report.costs import Costs, own_costs
from clcomm.report.html import as_html
from clcomm.report.model import Report, build
from clcomm.report.reading import read_runs
from clcomm.report.shapes import MOST_SHOWN, Bars, Column, Distribution, Points, Table
from clcomm.report.terminal import show
from clcomm.stats import Collective, CommStats, Phase
from tests.report.runs import LAYOUT, STEPS, apart, document, written
from training.metrics import WARM_UP_STEPS


@pytest.fixture
def report(tmp_path) -> Report:
    return build(read_runs(written(tmp_path, [document()])))


def reported(tmp_path, **figures) -> Report:
    return build(read_runs(written(tmp_path, [document(**figures)])))


def table(report: Report, key: str) -> Table:
    return next(each for each in report.tables if each.key == key)


# --- figures ---


def test_lizardists_figures(report):
    assert [row["value"] for row in table(report, "gradients").rows] == [165538, 5 * STEPS, STEPS * 827688]


def test_buckets_bytes_are_the_layouts_and_the_operations(report):
    buckets = table(report, "buckets").rows
    assert [row["bytes"] for row in buckets] == [STEPS * sum(bucket) for bucket in LAYOUT]
    (gradients,) = (row for row in table(report, "operations").rows if row["label"] == "gradients")
    assert sum(row["bytes"] for row in buckets) == gradients["bytes"]
    for name in ("seconds", "pack_s", "wait_s", "transfer_s", "unpack_s"):
        assert sum(row[name] for row in buckets) == pytest.approx(gradients[name])
    assert all(row["ok"] == "yes" for row in table(report, "checks").rows)


def test_sums_that_do_not_come_out_are_shown(tmp_path):
    checks = table(reported(tmp_path, layout=[[1000], [2000], [3000], [4000], [5000]]), "checks").rows
    assert [row["ok"] for row in checks] == ["NO", "yes"]


def test_parts_of_a_step_that_are_counted_twice_are_shown(tmp_path):
    report = of_events(tmp_path, Phase("forward_backward", 0.0, 6.5e-3), Phase("optimizer", 0.0, 6e-4))
    (row,) = table(report, "checks").rows
    assert (row["check"], row["is"], row["ok"]) == ("the parts of a step are a whole step, in %", 103, "NO")


def test_the_parts_of_a_step_add_up_to_it(report):
    *parts, whole = table(report, "step").rows
    assert sum(row["mean_s"] for row in parts) == pytest.approx(whole["mean_s"]) == pytest.approx(7e-3)
    assert sum(row["share"] for row in parts) == pytest.approx(1.0)
    found = {row["part"]: row["mean_s"] for row in parts}
    assert found["forward and backward"] == pytest.approx(4e-3) and found["wait for data"] == pytest.approx(1e-4)
    assert found["pack"] == pytest.approx(5 * 4e-6) and found["unpack"] == pytest.approx(5 * 3e-6)


def test_hidden_communication_is_no_part_of_a_step(tmp_path):
    report = reported(tmp_path, overlap=True)
    (gradients,) = (row for row in table(report, "operations").rows if row["label"] == "gradients")
    assert gradients["hidden_s"] == pytest.approx(0.75 * gradients["seconds"], rel=1e-6)
    parts = {row["part"]: row["mean_s"] for row in table(report, "step").rows}
    exposed_s = parts["wait for ranks"] + parts["move and add"]
    assert exposed_s == pytest.approx(gradients["exposed_s"] / STEPS)
    assert 0 < parts["wait for ranks"] == pytest.approx(gradients["wait_s"] / STEPS)
    assert all(row["ok"] == "yes" for row in table(report, "checks").rows)
    assert "latency and bandwidth of this run" in {each.what for each in report.left_out}
    assert "75% of communication was hidden behind computing, 25% was exposed." in report.headline


def test_a_sharded_update_communicates_in_the_optimizers_step(tmp_path):
    whole = document(2)
    for number, each in enumerate(whole["ranks"]):
        stats = CommStats(2)
        for _ in range(STEPS):
            stats.collective_finished(Collective("reduce_scatter", "gradients", 4000, 3e-3, "shared", 1, wait_s=1e-3))
            stats.collective_finished(Collective("all_gather", "parameters", 4000, 1e-3, "shared", 2))
            stats.phase_finished(Phase("optimizer", 0.0, 5e-3, communication_s=4e-3))
        whole["ranks"][number] = {**each, "stats": stats.state()}
    rows = table(build(read_runs(written(tmp_path, [whole]))), "step").rows
    assert {row["part"]: 1e3 * row["mean_s"] for row in rows} == pytest.approx(
        {"wait for data": 0.1, "wait for ranks": 1, "move and add": 3, "optimizer": 1, "computing and the rest": 1.9,
         "a whole step": 7}
    )  # fmt: skip


def joined(**figures):
    """A run of ranks with uneven inputs: before each reduction they say how many samples they bring, and wait there."""
    whole = document(2, **figures)
    for number, each in enumerate(whole["ranks"]):
        stats = CommStats(2)
        for _ in range(STEPS):
            stats.collective_finished(Collective("all_reduce", "checks", 16, 2e-3, "shared", 1, wait_s=1.5e-3))
            stats.collective_finished(Collective("all_reduce", "gradients", 4000, 1e-3, "shared", 2, wait_s=5e-4))
            stats.phase_finished(Phase("forward_backward", 0.0, 3e-3))
            stats.phase_finished(Phase("optimizer", 0.0, 5e-4))
        whole["ranks"][number] = {**each, "stats": stats.state()}
    return whole


def test_what_ranks_agree_on_in_a_step_is_a_part_of_it(tmp_path):
    report = build(read_runs(written(tmp_path, [joined()])))
    assert {row["part"]: 1e3 * row["mean_s"] for row in table(report, "step").rows} == pytest.approx(
        {"wait for data": 0.1, "forward and backward": 3, "checks and join": 2, "wait for ranks": 0.5,
         "move and add": 0.5, "optimizer": 0.5, "the rest": 0.4, "a whole step": 7}
    )  # fmt: skip
    begin = f"Synchronisation took {3 / 7:.1%} of a step, 3 ms: 67% waiting for other ranks, 33% moving and adding data"
    assert any(line.startswith(begin) for line in report.headline)
    assert [row["wait_step_s"] for row in table(report, "ranks").rows] == pytest.approx([2e-3, 2e-3])


def test_what_ranks_agree_on_in_the_optimizers_step_is_no_part_of_the_optimizer(tmp_path):
    whole = document(2)
    for number, each in enumerate(whole["ranks"]):
        stats = CommStats(2)
        for _ in range(STEPS):
            stats.collective_finished(Collective("all_gather", "checks", 16, 3e-4, "shared", 1))
            stats.phase_finished(Phase("optimizer", 0.0, 5e-4, communication_s=3e-4))
        whole["ranks"][number] = {**each, "stats": stats.state()}
    found = {row["part"]: row["mean_s"] for row in table(build(read_runs(written(tmp_path, [whole]))), "step").rows}
    assert (found["checks and join"], found["optimizer"]) == pytest.approx((3e-4, 2e-4))


def of_events(tmp_path, *events, ranks=2, in_caller=True, **figures):
    """The report of ranks that were told these events in each of their steps."""
    whole = document(ranks, **figures)
    for number, each in enumerate(whole["ranks"]):
        stats = CommStats(ranks)
        for _ in range(STEPS):
            for event in events:
                (stats.phase_finished if isinstance(event, Phase) else stats.collective_finished)(event)
        whole["ranks"][number] = {**each, "device_in_caller": in_caller, "stats": stats.state()}
    return build(read_runs(written(tmp_path, [whole])))


def test_waiting_that_is_not_told_from_moving_is_claimed_to_be_neither(tmp_path):
    in_background = Collective(
        "all_reduce", "gradients", 827688, 4e-3, "mpi", 1, bucket=0, wait_s=None, exposed_s=1e-3
    )  # fmt: skip
    report = of_events(tmp_path, in_background, Phase("forward_backward", 0.0, 3e-3, communication_s=2e-4))
    parts = {row["part"]: 1e3 * row["mean_s"] for row in table(report, "step").rows}
    assert parts == pytest.approx(
        {"wait for data": 0.1, "forward and backward": 2.8, "exposed communication": 1, "the rest": 3.1,
         "a whole step": 7}
    )  # fmt: skip
    for key, shown in (("operations", "untold_s"), ("buckets", "untold_mean_s"), ("ranks", "untold_step_s")):
        found = table(report, key)
        assert {"wait", "move"}.isdisjoint(column.heading for column in found.columns)
        assert next(column for column in found.columns if column.key == shown).heading == "wait+move"
        assert "wait+move is either: the transport does not tell which." in found.note
    told = "Synchronisation took 14.3% of a step, 1 ms."
    assert told in report.headline
    left_out = {each.what: each.why for each in report.left_out}
    assert "does not tell waiting from moving data in what goes on in the background" in left_out["wait for ranks"]
    assert {part for chart in report.charts if isinstance(chart, Bars) for part in chart.parts} & {"wait or move"}


def test_a_device_that_computes_by_itself_is_waited_for(tmp_path):
    phases = [
        Phase("forward_backward", 0.0, 1e-3), Phase("sync", 0.0, 3e-3, communication_s=1e-3), Phase("loss", 0.0, 5e-4),
    ]  # fmt: skip
    found = []
    for in_caller in (False, True, None):
        report = of_events(
            tmp_path, Collective("all_reduce", "gradients", 4000, 1e-3, "shared", 1), *phases, in_caller=in_caller
        )
        parts = {row["part"]: 1e3 * row["mean_s"] for row in table(report, "step").rows}
        found.append((parts["forward and backward"], parts.get("wait for the device", 0), parts["the rest"]))
    assert found == [pytest.approx(expected) for expected in ((1, 2.5, 2.4), (1, 0, 4.9), (1, 0, 4.9))]


def test_checks_before_the_first_step_are_no_part_of_one(tmp_path):
    checks = Collective("all_gather", "checks", 16, 1e-3, "shared", 1, wait_s=8e-4)
    reduction = Collective("all_reduce", "gradients", 4000, 1e-3, "shared", 2)
    whole = document(2)
    for number, each in enumerate(whole["ranks"]):
        stats = CommStats(2)
        stats.collective_finished(checks._replace(seconds=STEPS * 1e-3, wait_s=STEPS * 8e-4))  # waits for an import
        for _ in range(STEPS):
            stats.collective_finished(checks)
            stats.collective_finished(reduction)
            stats.phase_finished(Phase("sync", 0.0, 3e-3, communication_s=2e-3))
            stats.phase_finished(Phase("optimizer", 0.0, 1e-3, communication_s=5e-4))  # a barrier's
        whole["ranks"][number] = {**each, "stats": stats.state()}
    report = build(read_runs(written(tmp_path, [whole])))
    parts = {row["part"]: 1e3 * row["mean_s"] for row in table(report, "step").rows}
    assert (parts["checks and join"], parts["move and add"], parts["optimizer"]) == pytest.approx((1.5, 1, 0.5))
    assert any(line.startswith(f"Synchronisation took {2.5 / 7:.1%} of a step, 2.5 ms") for line in report.headline)


def test_compressing_is_named_where_it_is_in_the_time(tmp_path):
    report = of_events(
        tmp_path, Collective("all_reduce", "gradients", 4000, 2e-3, "shared", 1, wire_nbytes=100, wait_s=1e-3)
    )
    assert "compress, move and add" in {row["part"] for row in table(report, "step").rows}
    assert any("50% compressing, moving and adding data" in line for line in report.headline)


def test_calls_of_other_buckets_are_in_no_line_and_the_sums_come_out(tmp_path):
    whole = document(2)
    for number, each in enumerate(whole["ranks"]):
        stats = CommStats(2)
        for step in range(STEPS):
            if step == 20:
                stats.start_buckets_anew("gradients")
            for bucket, nbytes in enumerate([827688] if step < 20 else [sum(bucket) for bucket in LAYOUT]):
                stats.collective_finished(Collective("all_reduce", "gradients", nbytes, 1e-3, "shared", 1,
                                                     bucket=bucket, wait_s=1e-4))  # fmt: skip
        whole["ranks"][number] = {**each, "stats": stats.state()}
    report = build(read_runs(written(tmp_path, [whole])))
    buckets = table(report, "buckets")
    assert [row["calls"] for row in buckets.rows] == [STEPS - 20] * 5
    assert buckets.note.endswith(" 20 calls before these were the buckets are in no line here.")
    assert [row["ok"] for row in table(report, "checks").rows] == ["yes", "yes"]
    assert [row["value"] for row in table(report, "gradients").rows][1:] == [20 + 5 * (STEPS - 20), STEPS * 827688]


def test_a_sharded_update_says_why_it_has_no_buckets(tmp_path):
    report = of_events(tmp_path, Collective("reduce_scatter", "gradients", 4000, 3e-3, "shared", 1, wait_s=1e-3))
    left_out = {each.what: each.why for each in report.left_out}
    assert left_out["gradient all-reduce, buckets"] == "a sharded update reduces and scatters all gradients at once"
    assert left_out["latency and bandwidth of this run"] == "there are no buckets to fit it to"


def test_one_rank_misses_nothing(tmp_path):
    whole = document(1)
    whole["ceilings"] = []
    assert build(read_runs(written(tmp_path, [whole]))).left_out == []


def test_each_rank_has_its_row_and_the_slow_one_shows(report):
    rows = table(report, "ranks").rows
    assert [row["rank"] for row in rows] == [0, 1, 2, 3]
    assert min(rows, key=lambda row: row["wait_step_s"])["rank"] == 2
    assert max(rows, key=lambda row: row["last_share"])["rank"] == 2
    assert sum(row["last_share"] for row in rows) == pytest.approx(1.0)
    assert any(re.match(r"Rank 2 came last in \d\d% of 300 collectives, 0\.\d+ ms after", s) for s in report.headline)


def test_ranks_that_come_alike_are_not_blamed(tmp_path):
    whole = document()
    for record in whole["ranks"]:
        record["stats"]["late"] = [[rank, 45, 45 * 10**5, 2 * 10**5] for rank in range(4)]
    (line,) = (s for s in build(read_runs(written(tmp_path, [whole]))).headline if "last" in s)
    assert line == "No rank stands out: the last one came 0.1 ms after the one before it on average."


def test_the_share_of_a_step_is_what_synchronising_took(report):
    (gradients,) = (row for row in table(report, "operations").rows if row["label"] == "gradients")
    (checks,) = (row for row in table(report, "operations").rows if row["label"] == "checks")
    took = gradients["seconds"] + gradients["pack_s"] + gradients["unpack_s"] + checks["seconds"]
    share = took / (STEPS * 7e-3)
    assert any(line.startswith(f"Synchronisation took {share:.1%} of a step") for line in report.headline)


def test_latency_and_bandwidth_are_found_again_and_advice_follows(report):
    own, stored = table(report, "cost").rows
    assert own["alpha_s"] == pytest.approx(20e-6, rel=0.1) and own["beta_s_per_byte"] == pytest.approx(4e-10, rel=0.1)
    assert (stored["alpha_s"], stored["bytes_per_s"]) == (15e-6, pytest.approx(1 / 0.3e-9))
    candidates = {row["remark"]: row for row in table(report, "advice").rows if row["remark"]}
    assert candidates["fastest"]["buckets"] == 1 and candidates["this run's"]["buckets"] == 5
    expected = 5 * own["alpha_s"] + 827688 * own["beta_s_per_byte"]
    assert candidates["this run's"]["predicted_s"] == pytest.approx(expected)
    assert any("--bucket-size 1MiB should take" in line for line in report.headline)


@pytest.mark.parametrize(("own", "shown"), [(8192, "8 KiB"), (16384, "16 KiB"), (12000, "11.7 KiB")])
def test_the_runs_own_size_is_shown_where_others_make_the_same_buckets(tmp_path, own, shown):
    advice = table(reported(tmp_path, bucket_size=own), "advice")
    rows = [dict(zip([column.key for column in advice.columns], cells, strict=True)) for cells in advice.cells()]
    assert [row["bucket_size"] for row in rows] == ["per tensor", "1 KiB", shown, "32 KiB", "1 MiB"]
    assert [row["remark"] for row in rows] == ["", "", "this run's", "", "fastest"]


def test_a_run_per_tensor_is_shown_as_one(tmp_path):
    layout = [[nbytes] for nbytes in (40, 5120, 512, 802816, 128, 18432, 64, 576)]
    (row,) = (row for row in table(reported(tmp_path, bucket_size=None, layout=layout), "advice").rows
              if row["remark"] == "this run's")  # fmt: skip
    assert row["bucket_size"] == "per tensor"


def rows_of_calls(sizes, seconds, **others):
    return [
        {"calls": 20, "bytes": 20 * nbytes, "wire_bytes": 20 * nbytes, "average_bytes_per_call": nbytes, "wait_s": 0.0,
         "hidden_s": 0.0, "seconds": 20 * each, "p50_s": each, **others}
        for nbytes, each in zip(sizes, seconds, strict=True)
    ]  # fmt: skip


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


def test_what_cannot_be_fitted_is_refused_in_words():
    sizes, even = (1000, 4000, 16000, 64000), (1.1e-5, 1.4e-5, 2.6e-5, 7.4e-5)
    found = own_costs(rows_of_calls(sizes, even))
    assert isinstance(found, Costs) and found.cost.beta_s_per_byte == pytest.approx(1e-9, rel=1e-3)
    few = own_costs(rows_of_calls((5672, 802816, 19200), (1.2e-4, 1.38e-4, 1.34e-4)))
    assert few == (
        "it needs buckets of 4 different sizes or more, this run had 3; a smaller --bucket-size, or --no-bucketing, "
        "has more"
    )
    flat = "time does not follow size: a byte's cost cannot be told from nothing, with 95% confidence"
    assert own_costs(rows_of_calls(sizes, (1.2e-4, 1.4e-4, 1.1e-4, 1.3e-4))) == flat
    assert own_costs(rows_of_calls(sizes, (2e-5, 1.5e-5, 1.4e-5, 1.2e-5))) == flat  # larger ones were faster
    assert "gradients were compressed" in own_costs(rows_of_calls(sizes, even, wire_bytes=7))
    assert "went on behind computing" in own_costs(rows_of_calls(sizes, even, hidden_s=1e-4))


@pytest.mark.parametrize("how", ["overlapped", "compressed"])
def test_no_bucket_size_is_advised_where_calls_were_no_plain_ones(tmp_path, how):
    whole = document(overlap=how == "overlapped")
    for record in whole["ranks"] if how == "compressed" else []:
        for tally in record["stats"]["tallies"]:
            tally["wire_nbytes"] //= 2
    report = build(read_runs(written(tmp_path, [whole])))
    assert not any(each.key == "advice" for each in report.tables)
    assert {"other bucket sizes", "latency and bandwidth of this run"} <= {each.what for each in report.left_out}


def test_the_share_of_the_ceiling(report):
    (gradients,) = (row for row in table(report, "operations").rows if row["label"] == "gradients")
    assert gradients["ceiling_share"] == pytest.approx(Cost(15e-6, 0.3e-9).seconds(827688 / 5) / gradients["mean_s"])


def test_what_tune_measured_with_other_sums_is_no_ceiling(tmp_path):
    whole = document()
    for record in whole["ranks"]:
        record["sums"] = "numpy"
    report = build(read_runs(written(tmp_path, [whole])))
    assert "of ceiling" not in {column.heading for column in table(report, "operations").columns}
    assert [row["source"] for row in table(report, "cost").rows] == ["fitted to this run's buckets"]
    left_out = {each.what: each.why for each in report.left_out}
    assert left_out["percent of the ceiling"] == (
        "`clcomm tune` measured sums by each rank's own device, this run's were by NumPy; "
        "`mpiexec -n 4 clcomm tune --sums numpy` measures such calls"
    )


def test_what_is_not_known_is_left_out_with_a_reason(tmp_path):
    whole = document(layout=None, training_s=None)
    whole["ceilings"] = []
    for record in whole["ranks"]:
        record["training_s"] = None
        record["stats"]["late"] = []
        for tally in record["stats"]["tallies"]:
            tally.update(wait_ns=0, untold_ns=tally["ns"])
            tally["bucket"] = min(tally["bucket"], 0) if tally["label"] != "gradients" else tally["bucket"]
    report = build(read_runs(written(tmp_path, [whole])))
    left_out = {each.what: each.why for each in report.left_out}
    assert set(left_out) >= {
        "share of a step", "wait for ranks", "who came last", "percent of the ceiling", "other bucket sizes"
    }  # fmt: skip
    assert "mpiexec -n 4 clcomm tune" in left_out["percent of the ceiling"]
    assert not {"step", "stragglers", "advice"} & {each.key for each in report.tables}


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


def test_trouble_comes_first(tmp_path):
    whole = document()
    whole["ranks"][1]["replica_mismatches"] = 2
    whole["ranks"][2]["stats"]["tallies"][0]["failures"] = 3
    report = build(read_runs(written(tmp_path, apart(whole)[:3])))
    assert report.headline[:3] == [
        "1 rank of 4 missing here: 3; all figures are of the others.",
        "3 calls failed.",
        "The replicas differed 2 times: do not trust what they learned.",
    ]


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
        "Times in ms of a mean step, collectives to move while synchronising. The rank that waits least is the slow "
        "one.",
    ]
    whole = document(1)
    for record in whole["ranks"]:
        record["stats"].update(phases=[], late=[])
        for tally in record["stats"]["tallies"]:
            tally["wait_ns"] = 0
    alone = build(read_runs(written(tmp_path, [whole])))
    assert [table(alone, key).note for key in ("operations", "buckets", "ranks")] == [
        "Per rank; times in ms: total in all, percentiles of single calls.",
        "Per rank; times in ms, percentiles of single calls. Buckets are numbered in the order of backward.",
        "Times in ms of a mean step, collectives while synchronising.",
    ]


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_any_number_of_ranks(tmp_path, ranks):
    report = build(read_runs(written(tmp_path, [document(ranks)])))
    assert len(table(report, "ranks").rows) == ranks
    assert f"{ranks} rank{'s' if ranks > 1 else ''}" in report.title


# --- forms ---


def shown(report: Report, width: int = 120) -> str:
    text = io.StringIO()
    show(report, Console(width=width, file=text, highlight=False))
    return text.getvalue()


def test_the_page_that_reads_a_report_takes_its_parts_from_one(report):
    page = example_report.PAGE.read_text()
    filled = example_report.filled(page, shown(report))
    parts = re.findall(r"<!-- report: (.*) -->\n```\n(.*)\n", filled)
    titles = {table.title for table in report.tables} | {"first"}
    assert {name for name, _ in parts} <= titles | {"Left out"}
    assert all(line == (report.title if name == "first" else name) for name, line in parts if name in titles)
    assert example_report.filled(filled, shown(report)) == filled  # taken again it is replaced, and nothing else
    assert re.sub(r"```.*?```", "", filled, flags=re.DOTALL) == re.sub(r"```.*?```", "", page, flags=re.DOTALL)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_terminal_shows_every_cell_at_any_width(report, width):
    text = shown(report, width)
    assert max(len(line) for line in text.splitlines()) <= width
    words = " ".join(text.split())
    assert all(" ".join(line.split()) in words for line in report.headline)
    for each in report.tables:
        assert each.title in text
        numbers = [index for index, column in enumerate(each.columns) if column.kind != "text"]
        assert all(row[index] in text for row in each.cells() for index in numbers)
        assert all(word in text for row in each.cells() for cell in row for word in cell.split())


def test_markdown_has_all_tables_and_no_live_markup(tmp_path):
    text = plain.as_markdown(reported(tmp_path, model="a|b *c* <d>"))
    assert text.startswith("# a\\|b \\*c\\* \\<d\\> on mnist, 4 ranks\n")
    blocks = re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE)
    assert len(blocks) >= 9
    for block in blocks:
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}) == 1


def test_json_is_whole_and_plain(report):
    found = json.loads(plain.as_json(report))
    assert (found["format"], found["schema"], found["headline"]) == ("clcomm report", 1, report.headline)
    assert found["tables"]["buckets"] == json.loads(json.dumps(table(report, "buckets").rows))
    assert {chart["kind"] for chart in found["charts"]} == {"bars", "distribution", "points"}


def test_csv_has_every_value(tmp_path):
    report = reported(tmp_path, decisions=[])
    rows = list(csv.DictReader(plain.as_csv(report).splitlines()))
    sizes = {row["row"]: row["value"] for row in rows if row["table"] == "buckets" and row["field"] == "bytes"}
    assert sizes == {str(index): str(STEPS * sum(bucket)) for index, bucket in enumerate(LAYOUT)}
    assert {row["table"] for row in rows} == {each.key for each in report.tables}


def test_a_spreadsheet_takes_no_text_for_a_formula():
    hostile = Table("t", "T", [Column("a", "A", "text")], [{"a": "=1+1"}, {"a": "@x"}, {"a": "fine"}])
    lines = plain.as_csv(Report("t", {}, [], [], [hostile], [], [])).splitlines()
    assert lines[1:] == ["t,0,a,'=1+1", "t,1,a,'@x", "t,2,a,fine"]


def test_html_escapes_what_files_say(tmp_path):
    page = as_html(reported(tmp_path, model="<script>alert(1)</script>", dataset='"><img src=x>'))
    assert "<script" not in page and "<img" not in page and "&lt;script&gt;" in page


def test_long_tables_say_what_they_leave_out():
    long = Table("t", "T", [Column("n", "N")], [{"n": number} for number in range(MOST_SHOWN + 1)])
    assert (
        len(long.cells()) == MOST_SHOWN
        and long.left_out == f"{MOST_SHOWN} of {MOST_SHOWN + 1} rows; JSON and CSV have all."
    )


def test_charts_hold_what_the_tables_say(report):
    bars = {chart.title: chart for chart in report.charts if isinstance(chart, Bars)}
    ranks = table(report, "ranks").rows
    for row, values in zip(ranks, bars["Synchronising, by rank"].values, strict=True):
        parts = (row[f"{name}_step_s"] for name in ("pack", "wait", "transfer", "unpack"))
        assert values == pytest.approx([1e3 * part for part in parts])
    (times,) = (chart for chart in report.charts if isinstance(chart, Distribution))
    assert sum(times.counts) == 4 * 5 * STEPS and len(times.edges_s) == len(times.counts) + 1 <= 25
    (points,) = (chart for chart in report.charts if isinstance(chart, Points))
    assert [nbytes for nbytes, _ in points.points] == [sum(bucket) for bucket in LAYOUT]


@pytest.mark.parametrize(("low", "high"), [(1e-7, 1e2), (2e-5, 3e-4), (1e-3, 6e-3)])
def test_ticks_are_few_round_and_inside(low, high):
    ticks = log_ticks(low, high)
    assert len(ticks) <= 7 and all(low * 0.999 <= tick <= high * 1.001 for tick in ticks)
    assert all(re.fullmatch(r"[125]0{0,2} [mu]?s", time_text(tick)) or tick < 1e-6 for tick in ticks)
    assert log_ticks(1e-3, 1e-3) == [1e-3]
    assert size_ticks(1000, 5000) == [1024.0, 2048.0, 4096.0] and len(size_ticks(1, 1 << 40)) <= 7


@pytest.mark.parametrize("most", [5, 7])
@pytest.mark.parametrize(("low", "high"), [(1.2e-4, 1.38e-4), (1.1e-3, 1.9e-3), (9e-5, 9.2e-5), (6e-4, 1.9e-3)])
def test_less_than_a_decade_has_ticks_too(low, high, most):
    ticks = log_ticks(low, high, most)
    assert 2 <= len(ticks) <= most and all(low * 0.999 <= tick <= high * 1.001 for tick in ticks)
    assert len({time_text(tick) for tick in ticks}) == len(ticks)


@pytest.mark.parametrize(("low", "high"), [(5000, 8000), (802816, 827688), (1000, 2100)])
def test_sizes_close_to_each_other_have_ticks_too(low, high):
    ticks = size_ticks(low, high, 5)
    assert 2 <= len(ticks) <= 6 and all(low <= tick <= high for tick in ticks)
    assert len({size_text(tick) for tick in ticks}) == len(ticks)


def test_axes_have_names(report):
    page = as_html(report)
    assert [page.count(f">{name}</text>") for name in (TIME, SIZE, CALLS)] == [2, 1, 1]


# --- the command ---


def test_the_command_writes_every_form(tmp_path, capsys):
    names = written(tmp_path, apart(document(2)))
    for ending, begin in {
        "md": b"# convnet",
        "json": b"{",
        "csv": b"table,",
        "html": b"<!DOCTYPE",
        "txt": b"convnet",
    }.items():
        out = tmp_path / f"report.{ending}"
        assert cli.main(["report", *names, "-o", str(out)]) == 0
        assert out.read_bytes().startswith(begin)
    assert cli.main(["report", *names]) == 0
    assert capsys.readouterr().out == (tmp_path / "report.txt").read_text()
    assert cli.main(["report", *names, "--format", "markdown"]) == 0
    assert capsys.readouterr().out == (tmp_path / "report.md").read_text()


@pytest.mark.parametrize(("columns", "width"), [("80", 80), ("60", 60), ("10", 40), ("0", 120), ("wide", 120)])
def test_columns_says_how_wide_a_line_may_be(tmp_path, capsys, monkeypatch, columns, width):
    monkeypatch.setenv("COLUMNS", columns)
    (name,) = written(tmp_path, [document(2)])
    assert cli.main(["report", name]) == 0
    shown = capsys.readouterr().out
    assert width - 20 < max(map(len, shown.splitlines())) <= width
    assert cli.main(["report", name, "-o", str(tmp_path / "report.txt")]) == 0
    assert (tmp_path / "report.txt").read_text() == shown


def test_the_command_names_what_it_leaves_out(tmp_path, capsys):
    (tmp_path / "bad.json").write_text("{")
    assert cli.main(["report", str(tmp_path / "bad.json"), *written(tmp_path, [document(2)])]) == 1
    shown = capsys.readouterr()
    (line,) = shown.err.splitlines()
    assert line.startswith(f"clcomm: left out {tmp_path}/bad.json: expected JSON") and "convnet" in shown.out
    with pytest.raises(DataError, match=r"\A[^\n]*bad\.json: expected JSON[^\n]*\Z"):
        cli.main(["report", str(tmp_path / "bad.json")])


def test_an_unknown_ending_is_refused_and_markdown_has_a_short_name(tmp_path, capsys):
    (name,) = written(tmp_path, [document(2)])
    out = tmp_path / "report.pdf"
    with pytest.raises(ArgumentError, match=r"\A-o: expected a name that ends in one of \.md, .*report\.pdf.*\Z"):
        cli.main(["report", name, "-o", str(out)])
    assert not out.exists()
    assert cli.main(["report", name, "--format", "json", "-o", str(out)]) == 0 and out.read_text().startswith("{")
    assert cli.main(["report", name, "--format", "md"]) == 0
    assert capsys.readouterr().out.startswith("# convnet")


def test_a_picture(tmp_path):
    (name,) = written(tmp_path, [document(2)])
    with pytest.raises(ArgumentError, match=r"--format png: needs -o"):
        cli.main(["report", name, "--format", "png"])
    pytest.importorskip("matplotlib", reason="matplotlib is not installed; pip install 'clcomm[plot]'")
    assert cli.main(["report", name, "-o", str(tmp_path / "charts.png")]) == 0
    assert (tmp_path / "charts.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ArgumentError, match=r"-o: expected a file to write"):
        cli.main(["report", name, "-o", str(tmp_path / "missing" / "charts.png")])
