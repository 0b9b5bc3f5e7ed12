"""`clcomm forecast`: what it takes from a run's report, what it prints, and what it refuses."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from clcomm.base.errors import ArgumentError, DataError
from clcomm.comm.costs.jobs import SELDOM, Strategy
from clcomm.comm.stats.comm_stats import Collective, CommStats
from clcomm.insight.report.forecasting import parse_link, parse_strategy, workload_of
from clcomm.insight.report.recording import read_runs
from clcomm.insight.report.run_costs import Analysis, mean_step
from clcomm.insight.report.step_parts import COMPUTING, EITHER, WAIT
from clcomm.tools import cli
from tests.report.runs import LAYOUT, document, written

ASKED = ["--hosts", "16", "--link", "10Gbit/s,5us"]


def analysis_of(tmp_path, **figures) -> Analysis:
    return Analysis(read_runs(written(tmp_path, [document(**figures)])))


@pytest.mark.parametrize(
    ("text", "alpha_s", "bytes_per_s"),
    [("100Gbit/s,2us", 2e-6, 12.5e9), ("1 gbit/s, 0.05ms", 5e-5, 125e6), ("10Mbit/s,100ms", 0.1, 1.25e6),
     ("1.5GB/s,300ns", 3e-7, 1.5e9), ("8bit/s,1s", 1.0, 1.0)],
)  # fmt: skip
def test_a_link_has_a_rate_and_a_latency(text, alpha_s, bytes_per_s):
    link = parse_link(text)
    assert link.alpha_s == pytest.approx(alpha_s) and 1 / link.beta_s_per_byte == pytest.approx(bytes_per_s)


@pytest.mark.parametrize(
    "text", ["", "100Gbit/s", "2us,100Gbit/s", "0Gbit/s,2us", "1e3Gbit,2us", "nanGbit/s,1us", "-1Gbit/s,2us"]
)
def test_another_link_is_refused_in_one_line(text):
    with pytest.raises(
        ArgumentError, match=r"\A--link: expected a rate \(in bit/s, .*such as 100Gbit/s,2us, got [^\n]*\Z"
    ):
        parse_link(text)


def test_strategies_are_those_whose_traffic_a_report_tells():
    assert parse_strategy("dp") == Strategy() and parse_strategy("diloco:h=20") == Strategy(SELDOM, 20)
    for text in ("tp2", "pp4", "streaming", "sparseloco:h=3", "", "none"):
        with pytest.raises(
            ArgumentError, match=r"\A--strategy: expected dp, zero3, local:h=8 or diloco:h=50, got [^\n]*\Z"
        ):
            parse_strategy(text)


def test_a_rank_computes_what_is_neither_waiting_nor_moving(tmp_path):
    analysis = analysis_of(tmp_path)
    work, parts = workload_of(analysis), dict(mean_step(analysis))
    communicated_s = sum(parts.get(name, 0.0) for name in (WAIT, EITHER, analysis.moving))
    assert work.compute_s == pytest.approx(sum(parts.values()) - communicated_s)
    assert work.forward_s + work.backward_s == pytest.approx(parts[COMPUTING]) == pytest.approx(4e-3)
    assert work.buckets == tuple(map(sum, LAYOUT)) and not work.overlap
    assert work.tensors == tuple(n for bucket in LAYOUT for n in bucket)[::-1]
    assert workload_of(analysis_of(tmp_path, overlap=True)).overlap
    assert workload_of(analysis, overlap=True).overlap


def rows_of(tmp_path, capsys, *options, **figures) -> SimpleNamespace:
    (name,) = written(tmp_path, [document(**figures)])
    assert cli.main(["forecast", name, *ASKED, *options, "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    return SimpleNamespace(headline=found["headline"], **found["tables"])


def test_the_job_and_its_neighbours_are_forecast(tmp_path, capsys):
    found = rows_of(tmp_path, capsys)
    assert [row["way"] for row in found.ways] == ["hierarchical", "plain", "ring"]
    assert {(row["ranks"], row["hosts"]) for row in found.ways} == {(64, 16)}
    assert [row["ranks"] for row in found.jobs] == [8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096]
    assert found.ways[0] == found.jobs[3]
    for row in found.jobs:
        assert row["exposed_s"] == pytest.approx(row["step_s"] * (1 - row["efficiency"]))
    # Parameters, gradients, their means and SGD's momentum, each as large as the model.
    assert 4 * 827_688 <= found.jobs[-1]["state_nbytes"] < 4.1 * 827_688


def test_fewer_ranks_of_a_host_need_no_local_cost(tmp_path, capsys):
    found = rows_of(tmp_path, capsys, "--ranks-per-host", "1", overlap=True)
    assert [row["way"] for row in found.ways] == ["hierarchical", "plain", "ring"]
    assert all(row["exposed_s"] < row["communication_s"] for row in found.ways)


def test_zero_3_divides_the_model_and_diloco_the_time(tmp_path, capsys):
    plain, zero, seldom = (
        rows_of(tmp_path, capsys, "--ranks-per-host", "1", "--strategy", each, layout=[8 * [4096]] * 16).ways[-1]
        for each in ("dp", "zero3", "diloco:h=10")
    )
    assert zero["state_nbytes"] < plain["state_nbytes"] / 4
    assert zero["exposed_s"] == pytest.approx(1.5 * plain["exposed_s"])
    assert seldom["exposed_s"] < plain["exposed_s"] / 10 and seldom.get("best") is None


@pytest.mark.parametrize(
    ("options", "figures", "error", "message"),
    [
        (["--hosts", "4096"], {}, ArgumentError, r"\A--hosts: expected up to 4,096 ranks in all, got 16,384\Z"),
        ([], {"layout": None}, DataError, r"\Aexpected a report with its plan of buckets[^\n]*\Z"),
        ([], {"hosts": 2}, DataError, r"\A--ranks-per-host 2: [^\n]*not known: the run had several hosts; [^\n]*\Z"),
        ([], {"settings": {"policy": "local:h=8"}}, DataError, r"\A[^\n]*none, [^\n]*got --policy local:h=8; [^\n]*\Z"),
        (["--ranks-per-host", "2"], {"ranks": 1}, DataError, r"\A--ranks-per-host 2: [^\n]*had one rank; [^\n]*\Z"),
    ],
)  # fmt: skip
def test_what_is_refused(tmp_path, options, figures, error, message):
    (name,) = written(tmp_path, [document(**figures)])
    with pytest.raises(error, match=message):
        cli.main(["forecast", name, *ASKED, *options])


def test_the_job_and_its_link_have_to_be_named(tmp_path):
    (name,) = written(tmp_path, [document()])
    for given in ([], ASKED[:2], ASKED[2:]):
        with pytest.raises(ArgumentError, match=r"\Aforecast: expected --hosts N and --link RATE,LATENCY[^\n]*\Z"):
            cli.main(["forecast", name, *given])


def test_a_doubtful_local_cost_is_refused(tmp_path):
    whole = document(overlap=True)  # whose own calls tell no cost
    whole["ceilings"][0]["median_error"] = 0.7
    (name,) = written(tmp_path, [whole])
    with pytest.raises(DataError, match=r"\A[^\n]*differs from its fit by 70% or more; measure again; [^\n]*\Z"):
        cli.main(["forecast", name, *ASKED])


@pytest.mark.parametrize("layout", [[[4096] * 8], [[4096] * 8] * 3])
def test_a_run_forecasts_its_own_buckets_by_their_own_times(tmp_path, capsys, layout):
    whole = document(layout=layout)
    whole["ceilings"], nbytes = [], sum(layout[0])
    for record in whole["ranks"]:
        stats = CommStats(4)
        for number in range(40 * len(layout)):
            stats.collective_finished(Collective("all_reduce", "gradients", nbytes, 3e-3, "shared", 1,
                                                 bucket=number % len(layout), wait_s=1e-3))  # fmt: skip
        record["stats"] = stats.state()
    (name,) = written(tmp_path, [whole])
    assert cli.main(["forecast", name, "--hosts", "1", "--link", "1Gbit/s,5us", "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (row,) = found["tables"]["ways"]
    assert row["communication_s"] == pytest.approx(2e-3 * len(layout)) and row.get("best") is None
    assert "other bucket sizes and ways" in {each["what"] for each in found["left_out"]}
    for other in (["--strategy", "zero3"], ["--ranks-per-host", "3"]):
        with pytest.raises(DataError, match=r"\A--ranks-per-host \d: [^\n]*not known: it needs buckets of 4[^\n]*\Z"):
            cli.main(["forecast", name, *ASKED, *other])
