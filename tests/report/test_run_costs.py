"""What a call costs: fitted to a run's own buckets, beside the ceiling, and the bucket sizes it advises."""

from __future__ import annotations

import pytest

from clcomm.comm.costs.model import Cost
from clcomm.insight.report.recording import read_runs
from clcomm.insight.report.report import build
from clcomm.insight.report.run_costs import Costs, own_costs
from tests.report.conftest import reported, table
from tests.report.runs import document, written


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


@pytest.mark.parametrize("how", ["overlapped", "compressed"])
def test_no_bucket_size_is_advised_where_calls_were_no_plain_ones(tmp_path, how):
    whole = document(overlap=how == "overlapped")
    for record in whole["ranks"] if how == "compressed" else []:
        for tally in record["stats"]["tallies"]:
            tally["wire_nbytes"] //= 2
    report = build(read_runs(written(tmp_path, [whole])))
    assert not any(each.key == "advice" for each in report.tables)
    assert {"other bucket sizes", "latency and bandwidth of this run"} <= {each.what for each in report.left_out}


def rows_of_calls(sizes, seconds, **others):
    return [
        {"calls": 20, "bytes": 20 * nbytes, "wire_bytes": 20 * nbytes, "average_bytes_per_call": nbytes, "wait_s": 0.0,
         "hidden_s": 0.0, "seconds": 20 * each, "p50_s": each, **others}
        for nbytes, each in zip(sizes, seconds, strict=True)
    ]  # fmt: skip


def test_what_cannot_be_fitted_is_refused_in_words():
    sizes, even = (1000, 4000, 16000, 64000), (1.1e-5, 1.4e-5, 2.6e-5, 7.4e-5)
    found = own_costs(rows_of_calls(sizes, even))
    assert isinstance(found, Costs) and found.cost.beta_s_per_byte == pytest.approx(1e-9, rel=1e-3)
    few = own_costs(rows_of_calls((5672, 802816, 19200), (1.2e-4, 1.38e-4, 1.34e-4)))
    assert few == (
        "it needs buckets of 4 different sizes or more, this run had 3; a smaller --bucket-size, or --no-bucketing, "
        "has more"
    )
    flat = "time does not follow size: a byte's cost does not differ from zero with 95% confidence"
    assert own_costs(rows_of_calls(sizes, (1.2e-4, 1.4e-4, 1.1e-4, 1.3e-4))) == flat
    assert own_costs(rows_of_calls(sizes, (2e-5, 1.5e-5, 1.4e-5, 1.2e-5))) == flat  # larger ones were faster
    uneven = own_costs(rows_of_calls(sizes, (1.1e-5, 9e-5, 1.2e-5, 3e-4)))
    assert uneven == "time does not follow size: half of the buckets differ from the fit by 116% or more"
    assert "gradients were compressed" in own_costs(rows_of_calls(sizes, even, wire_bytes=7))
    assert "overlapped with computing" in own_costs(rows_of_calls(sizes, even, hidden_s=1e-4))


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
