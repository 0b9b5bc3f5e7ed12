"""What the report says of ranks that wait: drawn runs whose parts are known, and short real runs that are slowed."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from clcomm.insight.report.chart_kinds import Bars
from clcomm.insight.report.elements import milliseconds
from clcomm.insight.report.formats import as_html, as_json
from clcomm.insight.report.recording import read_runs
from clcomm.insight.report.report import Report, build
from clcomm.insight.report.run_costs import Analysis
from clcomm.insight.report.step_parts import CORE, WAIT, parts_of
from clcomm.tools import cli
from tests.faults.launch import HUNG_S, clean_environment, mpiexec
from tests.report.conftest import table
from tests.report.drawn import CAUSES, SIZES, STEPS, Case, Rank, drawn
from tests.report.runs import written

SLOWED = Path(__file__).parent / "slowed.py"
#: All of the family, instead of a sample that takes seconds.
WHOLE = bool(os.environ.get("CLCOMM_REPORT_FAMILY"))


def family() -> list[Case]:
    """Return each cause on each rank of 2 to 4, with each way to synchronise; and runs that nothing slows, of 1 too."""
    ways = [
        {"overlap": overlap, "compressed": compressed, "transport": transport, "joins": joins}
        for overlap, compressed, transport, joins in itertools.product(
            (False, True), (False, True), ("shared", "mpi"), (False, True)
        )
        if not (overlap and joins)
    ]
    slowed = [
        Case(ranks, cause, slow, **way)
        for ranks in (2, 3, 4)
        for cause in CAUSES
        for slow in range(ranks)
        for way in ways
    ]
    return slowed + [Case(ranks, **way) for ranks in (1, 2, 3, 4) for way in ways]


CASES = family() if WHOLE else family()[::7]


def name_of(case: Case) -> str:
    ways = [way for way in ("overlap", "compressed", "joins") if getattr(case, way)]
    return "-".join(
        [f"{case.ranks}-ranks", f"{case.cause}@{case.slow}" if case.cause else "even", case.transport, *ways]
    )


@pytest.fixture(scope="module", params=CASES, ids=name_of)
def run(request, tmp_path_factory) -> tuple[Case, Report, list[Rank], dict]:
    document, ranks = drawn(request.param)
    report = build(read_runs(written(tmp_path_factory.mktemp("run"), [document])))
    return request.param, report, ranks, document


def sentences(report: Report) -> list[str]:
    """Return the headline sentence by sentence."""
    return [each for line in report.headline for each in re.split(r"(?<=[.])\s+(?=[A-Z])", line)]


def test_the_cause_is_named_in_the_first_three_sentences(run):
    case, report, ranks, document = run
    first = " ".join(sentences(report)[:3])
    if not case.cause:
        assert "keeps the others waiting" not in " ".join(report.headline)
        return
    key = {"kernels": "kernel_step_s", "launches": "launch_step_s"}.get(case.cause)
    part = {"loader": "wait for data", "core": "wait for a core", "rest": "the rest"}.get(case.cause, case.cause)
    values = [r[key] if key else each.parts[part] / STEPS for r, each in zip(document["ranks"], ranks, strict=True)]
    own = values.pop(case.slow)
    others = (sorted(values)[(len(values) - 1) // 2] + sorted(values)[len(values) // 2]) / 2
    said = CAUSES[case.cause].format(own=milliseconds(own), others=milliseconds(others))
    assert f"Rank {case.slow} keeps the others waiting: {said}" in first


def test_the_part_that_is_called_the_largest_is_it(run):
    """Of the ranks that no other cause names; larger parts that one explains are said to be left out."""
    case, report, ranks, _ = run
    (line,) = (each for each in sentences(report) if "largest part of a step is" in each)
    blamed = {case.slow} if "keeps the others waiting" in " ".join(report.headline) else set()
    others = [each for each in ranks if each.rank not in blamed]
    means = {name: sum(each.parts.get(name, 0.0) for each in others) / len(others) / STEPS for name in ranks[0].parts}
    begin = line.partition("largest part of a step is")[0]
    kept = {name: seconds for name, seconds in means.items() if name not in begin}
    assert milliseconds(max(kept.values())) in line
    assert all(seconds > max(kept.values()) for name, seconds in means.items() if name not in kept)
    assert begin == "The " or case.ranks > 1


def test_parts_of_each_rank_are_those_it_spent(run):
    """The same number under the same label: table of ranks, chart of ranks, table and chart of the mean step."""
    case, report, ranks, _ = run
    names = [row["part"] for row in table(report, "step").rows[:-1]]
    expected = {name: [each.parts.get(name, 0.0) / STEPS for each in ranks] for name in names}
    assert {name for each in ranks for name, seconds in each.parts.items() if seconds} == set(names)
    bars = {chart.title: chart for chart in report.charts if isinstance(chart, Bars)}
    for row in table(report, "step").rows[:-1]:
        values = expected[row["part"]]
        assert row["mean_s"] == pytest.approx(sum(values) / case.ranks, abs=2e-8)
    assert list(bars["Where a step goes"].parts) == names
    assert bars["Where a step goes"].values[0] == pytest.approx(
        [1e3 * row["mean_s"] for row in table(report, "step").rows[:-1]]
    )
    if case.ranks == 1:
        return
    by_rank = bars["Where a step goes, by rank"]
    assert list(by_rank.parts) == names
    for index, each in enumerate(ranks):
        assert by_rank.values[index] == pytest.approx([1e3 * expected[name][index] for name in names], abs=2e-5)
        assert sum(by_rank.values[index]) == pytest.approx(1e3 * each.training_s / STEPS, abs=1e-4)
    shown = table(report, "step_ranks")
    headings = [column.heading for column in shown.columns]
    assert headings == ["rank", *names, "a whole step", *(["hidden"] if case.overlap else [])]
    for index, row in enumerate(shown.rows):
        parts = [row[column.key] for column in shown.columns[1 : 1 + len(names)]]
        assert [1e3 * part for part in parts] == pytest.approx(by_rank.values[index])
        assert (row["hidden_step_s"] or 0.0) == pytest.approx(ranks[index].hidden_s / STEPS, abs=1e-8)


def test_shares_and_sums_come_out(run):
    case, report, ranks, _ = run
    *parts, whole = table(report, "step").rows
    assert sum(row["share"] for row in parts) == pytest.approx(1.0, abs=1e-5)
    assert whole["mean_s"] == pytest.approx(sum(each.training_s for each in ranks) / case.ranks / STEPS)
    assert not table(report, "checks").rows
    synchronising = ("checks and join", "pack", "unpack", "wait for ranks", "wait or move", "move and add",
                     "compress, move and add", "communication")  # fmt: skip
    took = sum(row["share"] for row in parts if row["part"] in synchronising)
    (told,) = (line for line in report.headline if line.startswith("Synchronisation took"))
    assert told.startswith(f"Synchronisation took {took:.1%} of a step")
    waited = {row["part"]: row["share"] for row in parts}.get("wait for ranks", 0.0)
    if waited > 0.01 * took and case.ranks > 1:
        assert f"{waited / took:.0%} waiting for other ranks" in told


def test_bars_of_buckets_hold_all_of_a_call(run):
    """What is hidden too: a bar is as long as the call, with packing and unpacking."""
    case, report, ranks, _ = run
    (chart,) = (chart for chart in report.charts if chart.title == "Reducing, by bucket")
    rows = table(report, "buckets").rows
    for row, values in zip(rows, chart.values, strict=True):
        whole_s = (row["seconds"] + row["pack_s"] + row["unpack_s"]) / row["calls"]
        assert sum(values) == pytest.approx(1e3 * whole_s)
    hidden_s = sum(each.hidden_s for each in ranks) / case.ranks
    drawn_s = sum(values[list(chart.parts).index("hidden")] for values in chart.values) if case.overlap else 0.0
    assert drawn_s == pytest.approx(1e3 * hidden_s / STEPS, abs=1e-4)
    assert not {"move and add", "compress, move and add", "communication"} & set(chart.parts) - {
        part for row in table(report, "step").rows for part in [row["part"]]
    }


def test_one_number_is_called_bytes_sent(run):
    case, report, _, _ = run
    figures = {row["figure"]: row["value"] for row in table(report, "gradients").rows}
    handed = STEPS * sum(SIZES)
    assert figures["Total all-reduce calls"] == STEPS * len(SIZES)
    (row,) = (row for row in table(report, "operations").rows if row["label"] == "gradients")
    if case.compressed:
        sent = STEPS * sum(size // 2 for size in SIZES)
        assert (
            (figures["Total bytes reduced"], figures["Total bytes sent"])
            == (handed, sent)
            == (row["bytes"], row["wire_bytes"])
        )
    else:
        assert figures["Total bytes sent"] == handed == row["bytes"] == row["wire_bytes"]


def test_every_form_says_the_same(run):
    """The page and JSON have the terminal's figures: both are made from one model, and none is left out."""
    _, report, _, _ = run
    found = json.loads(as_json(report))
    assert found["headline"] == report.headline
    assert found["tables"]["step"] == json.loads(json.dumps(list(table(report, "step").rows)))
    page = as_html(report)
    for chart in (chart for chart in report.charts if isinstance(chart, Bars)):
        assert all(part in page for part in chart.parts) and chart.title in page


@pytest.mark.parametrize(("ranks", "cores"), [(2, 1), (4, 2), (4, 3), (3, 2)])
def test_more_ranks_than_cores_are_named(tmp_path, ranks, cores):
    document, _ = drawn(Case(ranks, cores=cores))
    told = sentences(build(read_runs(written(tmp_path, [document]))))[:3]
    begin = f"More ranks than cores: {ranks} ranks share {cores} core{'' if cores == 1 else 's'}, so they take turns;"
    assert any(line.startswith(begin) for line in told)
    document, _ = drawn(Case(ranks, cores=ranks))
    assert "More ranks" not in " ".join(build(read_runs(written(tmp_path, [document]))).headline)


def test_ranks_bound_to_one_core_are_named(tmp_path):
    """There are cores enough, and two ranks were bound to the same one."""
    document, _ = drawn(Case(4))
    for record, cpus in zip(document["ranks"], ("0", "1", "1", "2-3"), strict=True):
        record["cpus"] = cpus
    told = sentences(build(read_runs(written(tmp_path, [document]))))[:3]
    assert any(line.startswith("More ranks than cores: ranks 1 and 2 share 1 core") for line in told)


@pytest.mark.parametrize("last", [0.0, 0.6, 1.0])
def test_a_rank_that_comes_last_waits_for_a_core_in_collectives_not_for_others(tmp_path, last):
    document, _ = drawn(Case(3))
    analysis = Analysis(read_runs(written(tmp_path, [document])))
    record, stats = analysis.by_rank[0]
    before = parts_of(record, stats, analysis.moving)
    held_s = before[WAIT] / 2
    found = parts_of({**record, "core_waits_s": {"sync": held_s}}, stats, analysis.moving, last)
    assert (found[CORE], found[WAIT]) == pytest.approx((last * held_s, before[WAIT] - last * held_s))
    assert sum(found.values()) == pytest.approx(sum(before.values()))


def test_mpi_on_one_host_suggests_shared_memory(run):
    case, report, _, _ = run
    told = "All ranks are on one host, and gradients went through MPI: --transport shared reduces them in its memory."
    assert (told in report.headline) == (case.transport == "mpi" and case.ranks > 1)


# --- real runs ---


@pytest.mark.parametrize(
    ("cause", "ranks", "said"),
    [
        ("loader", 3, "Rank 2 keeps the others waiting: its loader is slow, it waits"),
        (
            "core",
            2,
            "Rank 1 keeps the others waiting: other processes run on its core, it was ready to run without one",
        ),
        ("crowd", 4, "More ranks than cores: 4 ranks share 2 cores, so they take turns; "),
    ],
)
def test_a_real_run_names_its_cause(tmp_path, capsys, cause, ranks, said):
    """Where others keep rank 0's core busy too, ranks wait for cores in turns: the report names cores, and no rank."""
    causes = (said, "Other processes run on the ranks' cores: ") if cause == "core" else said
    if len(os.sched_getaffinity(0)) < 2 or not os.path.exists("/proc/thread-self/schedstat"):
        pytest.skip("needs two cores, and a Linux that says how long threads wait for them")
    for attempt in range(5):  # other programs may take the cores: then that is the cause
        headline = headline_of_a_run(tmp_path / f"{attempt}.json", capsys, cause, ranks)
        first = [each for line in headline for each in re.split(r"(?<=[.])\s+(?=[A-Z])", line)][:3]
        if any(sentence.startswith(causes) for sentence in first):
            return
    pytest.fail(f"expected {causes!r} in one of five runs, got {headline}")


def headline_of_a_run(report, capsys, cause, ranks):
    """Return the first sentences of the report of a job whose last rank is slowed by a cause."""
    ended = subprocess.run(
        [mpiexec(), "-n", str(ranks), sys.executable, str(SLOWED), cause, str(ranks - 1), str(report),
         "--max-steps", "30"],
        env=clean_environment(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1"), capture_output=True, text=True,
        timeout=2 * HUNG_S, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert cli.main(["report", str(report), "--format", "json"]) == 0
    return json.loads(capsys.readouterr().out)["headline"]
