"""`python -m training.plan`: what it takes from trials, what it prints, and what it refuses."""

from __future__ import annotations

import json
import sys

import pytest

from clcomm.base.errors import ArgumentError
from clcomm.comm.costs.jobs import Job
from clcomm.comm.costs.model import Cost
from clcomm.insight.report.recording import read_runs
from clcomm.insight.report.run_costs import Analysis, mean_step
from clcomm.insight.report.step_parts import CORE
from clcomm.jobs.launch.keeper import kept_job
from tests.report.runs import LAYOUT, document, written
from training import plan
from training.plan import enough_steps, program_of, try_way
from training.planning import (
    MARGIN,
    NO,
    PERHAPS,
    YES,
    TrialResult,
    most_ranks,
    parse_way,
    peak_of,
    plan_of,
    rows_of,
)
from training.trial import HostMemory, Trial, try_job

MIB = 1 << 20
#: Of 4 ranks of the ConvNet: 100 MiB each, 10 MiB more of the first, 4 MiB in common beside windows, 40 MiB of data.
WINDOWS = 4 * 2 * 829_440 + 829_440
HELD = HostMemory(410 * MIB + 4 * 829_440, WINDOWS + 4 * MIB, 40 * MIB, 100 * MIB + 829_440)
LINK = Cost(1e-5, 1e-9)


def trials(tmp_path, *names: str, held: HostMemory = HELD) -> dict:
    analysis = Analysis(read_runs(written(tmp_path, [document()])))
    return {parse_way(name): TrialResult(analysis, held) for name in names}


def planned(tmp_path, memory: int, *names: str, ranks: int = 4):
    tried, job = trials(tmp_path, *names), Job(1, ranks)
    rows = rows_of(tried, job, LINK)
    return plan_of(rows, [], job, memory, "Plan", lambda row: f"{row.way} would")


def test_a_plan_of_the_tried_ranks_is_what_they_held(tmp_path):
    ((way, tried),) = trials(tmp_path, "dp").items()
    assert sum(map(sum, LAYOUT)) < 829_440  # the flat space is padded
    peak, model = peak_of(way, tried, 1, Job(1, 4))
    assert abs(peak - HELD.nbytes) <= 4 and model == pytest.approx(4 * 3 * 829_440 + 829_440, rel=1e-3)


def test_more_ranks_have_what_another_has(tmp_path):
    ((way, tried),) = trials(tmp_path, "dp").items()
    more = peak_of(way, tried, 1, Job(1, 16))[0] - peak_of(way, tried, 1, Job(1, 4))[0]
    assert more == pytest.approx(12 * (101 * MIB + 3 * 829_440), rel=1e-3)  # a rank, its part of MPI, and its model


def test_zero_divides_the_model_alone(tmp_path):
    tried = trials(tmp_path, "dp", "zero1")
    plain, divided = (peak_of(way, each, 1, Job(1, 64)) for way, each in tried.items())
    assert divided[1] == pytest.approx(64 * 829_440 + 3 * 829_440, rel=0.02)
    assert plain[1] - divided[1] == pytest.approx(126 * 829_440, rel=0.02)


@pytest.mark.parametrize(("share", "fits"), [(1 + MARGIN, YES), (1.02, PERHAPS), (0.97, PERHAPS), (0.94, NO)])
def test_a_strategy_fits_with_a_margin(tmp_path, share, fits):
    (row,) = rows_of(trials(tmp_path, "dp"), Job(1, 4), LINK)
    assert row.fits(1 + round(row.peak_nbytes * share)) == fits


def test_the_fastest_that_fits_comes_first(tmp_path):
    report = planned(tmp_path, 900 * MIB, "dp", "zero2", "diloco:h=50")
    assert [row["name"] for row in report.tables[0].rows] == ["diloco:h=50", "dp", "zero2"]
    assert report.headline[0].startswith("diloco:h=50: ") and "It is the fastest, and fits." in report.headline[0]
    assert report.tables[0].rows[1]["why"].endswith(" slower, 0 B less")


def test_where_none_fits_one_line_says_what_would(tmp_path):
    with pytest.raises(
        ArgumentError, match=r"\A--memory: expected 4\d\d.\d MiB or more a host for 4 ranks there \((dp|zero2), the "
        r"least of 2 strategies\), got 100 MiB; \1 would\Z",
    ):  # fmt: skip
        planned(tmp_path, 100 * MIB, "dp", "zero2")


def test_fewer_ranks_may_fit(tmp_path):
    ((way, tried),) = trials(tmp_path, "dp").items()
    assert most_ranks(way, tried, 1, Job(1, 16), round(HELD.nbytes * (1 + MARGIN)) + 99) == 4
    assert most_ranks(way, tried, 1, Job(1, 16), 50 * MIB) == 0


def test_ranks_that_share_a_core_compute_longer(tmp_path):
    alone = rows_of(trials(tmp_path, "dp"), Job(1, 4), LINK)[0]
    tried = {way: each._replace(slowdown=3.0) for way, each in trials(tmp_path, "dp").items()}
    shared = rows_of(tried, Job(1, 4), LINK)[0]
    assert shared.step_s - shared.exposed_s == pytest.approx(3 * (alone.step_s - alone.exposed_s))


def test_waits_for_a_core_count_where_ranks_of_the_trial_shared_it(tmp_path):
    given, way = document(), parse_way("dp")
    for record in given["ranks"]:
        record["core_waits_s"] = {"forward_backward": 0.02}
    analysis = Analysis(read_runs(written(tmp_path, [given])))
    alone, shared = (
        rows_of({way: TrialResult(analysis, HELD, shared=each)}, Job(1, 4), LINK)[0] for each in (False, True)
    )
    assert dict(mean_step(analysis))[CORE] > 0
    assert shared.step_s - alone.step_s == pytest.approx(dict(mean_step(analysis))[CORE])


def test_stages_have_parts_of_the_model_as_large_as_theirs(tmp_path):
    """Of 2 replicas in 2 stages, of which the second has half of the first one's parameters."""
    stages = {
        "schedule": "1f1b", "micro_batches": 4, "chunks": 1, "first_layers": [0, 3], "bubble": 0.3,
        "parameter_bytes": [829_440, 414_720], "peak_activation_bytes": [5, 6], "bubble_by_formula": 0.2,
    }  # fmt: skip
    tried = TrialResult(Analysis(read_runs(written(tmp_path, [document(pipeline=stages)]))), HELD)
    way = parse_way("pp2")
    assert (way.options, way.division, way.ranks_tried(6)) == (("--pp", "2"), 2, 4)
    peak, model = peak_of(way, tried, 1, Job(1, 4))
    assert abs(peak - HELD.nbytes) <= 4  # what it held, whatever stages have
    assert model == pytest.approx(0.75 * 4 * 3.5 * 829_440, rel=1e-3)  # the mean is for the 2 replicas of a host
    more = peak_of(way, tried, 1, Job(1, 8))[0] - peak
    assert more == pytest.approx(HELD.own + HELD.common - 0.75 * 2 * 829_440, rel=1e-3)  # means of gradients are there


@pytest.mark.parametrize(
    "text",
    [
        "",
        "tp",
        "tp1",
        "zero4",
        "zero0",
        "pp1",
        "ddp",
        "diloco2",
        "zero4+recompute",
        "tp2+pp1",
        "tp2+pp2+pp2",
        "pp2+tp2",
        "tp2+diloco:h=5",
        "diloco:h=5+recompute",
        "recompute+dp",
    ],
)
def test_other_strategies_are_refused(text):
    with pytest.raises(ArgumentError, match=r"\A--strategies: expected (dp, |no policy )[^\n]*\Z"):
        parse_way(text)


def test_activations_are_computed_again_alone_and_with_others():
    assert parse_way("recompute").options == ("--recompute",)
    way = parse_way("zero2+recompute")
    assert (way.name, way.zero, way.options) == ("zero2+recompute", 2, ("--zero", "2", "--recompute"))


def test_ranks_divide_layers_and_stages():
    way = parse_way("tp2+pp3")
    assert (way.name, way.options, way.division) == ("tp2+pp3", ("--tp", "2", "--pp", "3"), 6)
    assert (way.ranks_tried(12), way.ranks_tried(12, 2)) == (6, 6)
    assert parse_way("tp2+pp2+recompute").options == ("--tp", "2", "--pp", "2", "--recompute")
    assert [parse_way("dp").ranks_tried(4, most) for most in (None, 2)] == [4, 2]


def test_a_policy_is_tried_with_an_exchange():
    way = parse_way("diloco:h=50,lr=0.5")
    assert way.policy_every == 50 and way.options_for(16) == ("--policy", "diloco:h=15,lr=0.5,momentum=0.9")
    assert way.least_steps == 3 and parse_way("streaming:h=50,fragments=6").least_steps == 7


@pytest.mark.parametrize(
    ("options", "what"),
    [([], "plan: expected --model"), (["--model", "gpt", "--ranks", "4", "--hosts", "2"], "--hosts 2: expected --link"),
     (["--model", "gpt", "--ranks", "3", "--hosts", "2", "--link", "1Gbit/s,1us"], "--ranks: expected a multiple"),
     (["--model", "bert", "--ranks", "2"], "--model: expected one of gpt"),
     (["--model", "gpt", "--ranks", "3", "--strategies", "tp2"], "--strategies: expected tp or pp of a"),
     (["--model", "gpt", "--ranks", "3", "--strategies", "pp2"], "--strategies: expected tp or pp of a")],
)  # fmt: skip
def test_options_that_tell_no_job_are_refused(options, what):
    with pytest.raises(ArgumentError, match=rf"\A{what}[^\n]*\Z"):
        plan.main(options)


def test_a_model_s_options_are_those_of_its_example():
    assert program_of("mlp:width=3,no_bucketing")[:4] == ["-m", "examples.mnist", "--model", "mlp"]
    assert program_of("mlp:batch_size=3,no_bucketing")[-3:] == ["--batch-size", "3", "--no-bucketing"]


def tried(*words: object) -> Trial:
    with kept_job() as keeper:
        return try_job(keeper, *words)


def test_a_trial_counts_what_processes_hold_and_share():
    hold = f"import time; held = bytearray({64 * MIB}); time.sleep(0.5)"
    empty, full = (tried(["-c", text], 2, 2, 60.0) for text in ("import time; time.sleep(0.5)", hold))
    assert not full.problem and full.peak.own - empty.peak.own == pytest.approx(2 * 64 * MIB, rel=0.03)
    common = (
        "import mmap, os, time; from mpi4py import MPI; comm = MPI.COMM_WORLD\n"
        f"window = MPI.Win.Allocate_shared({64 * MIB} if comm.rank == 0 else 0, 1, comm=comm)\n"
        "memory = window.Shared_query(0)[0]; memory[:] = bytes(len(memory)); time.sleep(0.5); comm.Barrier()"
    )
    shared = tried(["-c", common], 2, 2, 60.0)
    assert not shared.problem and 64 * MIB <= shared.peak.common < 100 * MIB  # once, and what MPI has


@pytest.mark.parametrize("asked", [14, 16, 40])
def test_a_trial_of_short_epochs_has_as_many_steps_of_whole_batches(asked):
    """The first check of a step's recording, which has the most memory, ends with the 14th of them."""
    for epoch_steps in range(1, 60):
        steps = enough_steps(asked, epoch_steps)
        smaller = steps // epoch_steps if epoch_steps > 1 else 0
        assert steps >= asked and steps - smaller >= 14
    assert enough_steps(16, 8) == 16 and enough_steps(14, 2) == 28


def test_a_trial_that_fails_says_why():
    assert tried(["-c", "import sys; sys.exit('clcomm: no file')"], 1, 1, 60.0).problem == "clcomm: no file"
    assert tried(["-c", "import time; time.sleep(60)"], 1, 1, 0.2).problem == "took longer than 0.2 s"


def test_a_model_is_planned_and_its_run_holds_that(capsys, tmp_path):
    model, file = "mlp:data=synthetic,batch_size=256", tmp_path / "plan.json"
    given = ["--ranks", "2", "--strategies", "dp", "--steps", "14", "--memory", "4GiB", "-o", str(file)]
    assert plan.main(["--model", model, *given]) == 0
    assert "trying dp" in capsys.readouterr().err
    (row,) = json.loads(file.read_text())["tables"]["plan"]
    assert row["fits"] == YES and row["step_s"] > 0
    peaks = []
    for _ in range(3):  # where other programs have the cores a look may come after the peak
        again = try_way(program_of(model), parse_way("dp"), 2, 14)
        assert not isinstance(again, str)
        peaks.append(again.peak.nbytes)
        if row["peak_nbytes"] == pytest.approx(peaks[-1], rel=2 * MARGIN):
            break
    assert row["peak_nbytes"] == pytest.approx(peaks[-1], rel=2 * MARGIN), peaks
    wrong = try_way(program_of("mlp:batch_size=0"), parse_way("dp"), 2, 14)
    assert isinstance(wrong, str) and "--batch-size" in wrong and sys.executable not in wrong
