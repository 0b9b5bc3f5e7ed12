"""The parts of a step: what each of them is, what belongs to none, and that they add up to a whole step."""

from __future__ import annotations

import pytest

from clcomm.comm.stats.comm_stats import Collective, CommStats, Phase
from clcomm.insight.report.chart_kinds import Bars
from clcomm.insight.report.recording import read_runs
from clcomm.insight.report.report import build
from tests.report.conftest import joined, of_events, reported, table
from tests.report.runs import STEPS, document, written


def test_the_parts_of_a_step_add_up_to_it(report):
    *parts, whole = table(report, "step").rows
    assert sum(row["mean_s"] for row in parts) == pytest.approx(whole["mean_s"]) == pytest.approx(7e-3)
    assert sum(row["share"] for row in parts) == pytest.approx(1.0)
    found = {row["part"]: row["mean_s"] for row in parts}
    assert found["forward and backward"] == pytest.approx(4e-3) and found["wait for data"] == pytest.approx(1e-4)
    assert found["pack"] == pytest.approx(5 * 4e-6) and found["unpack"] == pytest.approx(5 * 3e-6)


def test_parts_of_a_step_that_are_counted_twice_are_shown(tmp_path):
    report = of_events(tmp_path, Phase("forward_backward", 0.0, 6.5e-3), Phase("optimizer", 0.0, 6e-4))
    (row,) = table(report, "checks").rows
    assert (row["check"], row["is"]) == ("the parts of a step, in % of it", 103)


def test_the_share_of_a_step_is_what_synchronising_took(report):
    (gradients,) = (row for row in table(report, "operations").rows if row["label"] == "gradients")
    (checks,) = (row for row in table(report, "operations").rows if row["label"] == "checks")
    took = gradients["seconds"] + gradients["pack_s"] + gradients["unpack_s"] + checks["seconds"]
    share = took / (STEPS * 7e-3)
    assert any(line.startswith(f"Synchronisation took {share:.1%} of a step") for line in report.headline)


def test_hidden_communication_is_no_part_of_a_step(tmp_path):
    report = reported(tmp_path, overlap=True)
    (gradients,) = (row for row in table(report, "operations").rows if row["label"] == "gradients")
    assert gradients["hidden_s"] == pytest.approx(0.75 * gradients["seconds"], rel=1e-6)
    parts = {row["part"]: row["mean_s"] for row in table(report, "step").rows}
    exposed_s = parts["wait for ranks"] + parts["move and add"]
    assert exposed_s == pytest.approx(gradients["exposed_s"] / STEPS)
    assert 0 < parts["wait for ranks"] == pytest.approx(gradients["wait_s"] / STEPS)
    assert not table(report, "checks").rows
    assert "latency and bandwidth of this run" in {each.what for each in report.left_out}
    assert "75% of communication was hidden behind computing, 25% was exposed." in report.headline


def test_clipping_is_a_part_of_its_own(tmp_path):
    report = of_events(tmp_path, Phase("clipping", 0.0, 4e-4, communication_s=1e-4), Phase("optimizer", 0.0, 5e-4))
    found = {row["part"]: row["mean_s"] for row in table(report, "step").rows}
    assert (found["clipping"], found["optimizer"]) == pytest.approx((3e-4, 5e-4))


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


def test_what_ranks_agree_on_in_a_step_is_a_part_of_it(tmp_path):
    report = build(read_runs(written(tmp_path, [joined()])))
    assert {row["part"]: 1e3 * row["mean_s"] for row in table(report, "step").rows} == pytest.approx(
        {"wait for data": 0.1, "forward and backward": 3, "checks and join": 0.5, "wait for ranks": 2,
         "move and add": 0.5, "optimizer": 0.5, "the rest": 0.4, "a whole step": 7}
    )  # fmt: skip
    begin = f"Synchronisation took {3 / 7:.1%} of a step, 3 ms: 67% waiting for other ranks, 17% moving and adding data"
    assert any(line.startswith(begin) for line in report.headline)
    assert [row["wait_for_ranks_step_s"] for row in table(report, "step_ranks").rows] == pytest.approx([2e-3, 2e-3])


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


def test_waiting_that_is_not_told_from_moving_is_claimed_to_be_neither(tmp_path):
    in_background = Collective(
        "all_reduce", "gradients", 827688, 4e-3, "mpi", 1, bucket=0, wait_s=None, exposed_s=1e-3
    )  # fmt: skip
    report = of_events(tmp_path, in_background, Phase("forward_backward", 0.0, 3e-3, communication_s=2e-4))
    parts = {row["part"]: 1e3 * row["mean_s"] for row in table(report, "step").rows}
    assert parts == pytest.approx(
        {"wait for data": 0.1, "forward and backward": 2.8, "wait or move": 1, "the rest": 3.1,
         "a whole step": 7}
    )  # fmt: skip
    for key, shown in (("operations", "wait_unknown_s"), ("buckets", "wait_unknown_mean_s")):
        found = table(report, key)
        assert {"wait", "move"}.isdisjoint(column.heading for column in found.columns)
        assert next(column for column in found.columns if column.key == shown).heading == "wait+move"
        assert "wait+move is either; the transport does not report which." in found.note
    headings = {column.heading for column in table(report, "step_ranks").columns}
    assert "wait or move" in headings and not {"wait for ranks", "move and add"} & headings
    told = "Synchronisation took 14.3% of a step, 1 ms."
    assert told in report.headline
    left_out = {each.what: each.why for each in report.left_out}
    assert "does not report waiting and moving data separately for background all-reduces" in left_out["wait for ranks"]
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
    found = [parts[name] for name in ("checks and join", "wait for ranks", "move and add", "optimizer")]
    assert found == pytest.approx([0.3, 1.2, 1, 0.5])
    assert any(line.startswith(f"Synchronisation took {2.5 / 7:.1%} of a step, 2.5 ms") for line in report.headline)


def test_compressing_is_named_where_it_is_in_the_time(tmp_path):
    report = of_events(
        tmp_path, Collective("all_reduce", "gradients", 4000, 2e-3, "shared", 1, wire_nbytes=100, wait_s=1e-3)
    )
    assert "compress, move and add" in {row["part"] for row in table(report, "step").rows}
    assert any("50% compressing, moving and adding data" in line for line in report.headline)
