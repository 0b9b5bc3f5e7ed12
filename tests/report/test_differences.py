"""Runs compared: what is told as changed, what as noise, and which files are refused."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from clcomm import Synchronizer
from clcomm.base.errors import DataError
from clcomm.comm.stats.comm_stats import Collective, CommStats
from clcomm.comm.stats.events import NOW, Phase
from clcomm.insight.report import build, gather_records, read_runs, run_document
from clcomm.insight.report.differences import Change, figures_changed, pairs, settings_changed
from clcomm.tools import cli
from tests.numpy_models import Model
from tests.report.runs import LAYOUT, STEPS, document


def estimates(step_ms: float, spread: float = 0.0) -> dict[str, Any]:
    def around(value: float) -> dict[str, float]:
        return {"median": value, "low": value * (1 - spread), "high": value * (1 + spread)}

    return {"step_ms": around(step_ms), "communication_ms": around(step_ms / 4)}


def stored(path: Path, **figures: Any) -> str:
    path.write_text(json.dumps(document(2, **figures)))
    return str(path)


def stored_comparison(path: Path, step_ms: dict[str, float], spread: float = 0.01) -> str:
    """Write a comparison whose variants have these steps."""
    variants = {name: {**estimates(value, spread), "images_per_s": estimates(1e5 / value, spread)["step_ms"]}
                for name, value in step_ms.items()}  # fmt: skip
    runs = {name: document(2) for name in step_ms}
    text = {"format": "clcomm comparison", "schema": 1, "reference": "per tensor", "variants": variants, "runs": runs}
    path.write_text(json.dumps(text))
    return str(path)


def changes(first: str, second: str) -> dict[str, Change]:
    ((before, after),) = pairs([first, second])
    return {change.figure: change for change in figures_changed(before, after)}


def test_times_differ_where_their_intervals_do_not_touch(tmp_path: Path) -> None:
    base = stored(tmp_path / "a.json", intervals=estimates(10.0, 0.05))
    near = changes(base, stored(tmp_path / "b.json", intervals=estimates(10.9, 0.05)))
    far = changes(base, stored(tmp_path / "c.json", intervals=estimates(12.5, 0.05)))
    for name in ("steps/s", "step (ms)", "communicating in a step (ms)"):
        assert (near[name].verdict, far[name].verdict) == ("within noise", "more than noise")
    assert far["step (ms)"].texts == (
        "step (ms)", "10.000 (9.500-10.500)", "12.500 (11.875-13.125)", "+25.0%", "more than noise",
    )  # fmt: skip
    assert far["steps/s"].before == "100.00 (95.24-105.26)" and far["steps/s"].change == "-20.0%"


def test_without_intervals_nothing_is_said_about_noise(tmp_path: Path) -> None:
    found = changes(stored(tmp_path / "a.json"), stored(tmp_path / "b.json", step_ms={"p50": 14.0, "p95": 15.0}))
    assert found["step (ms)"].texts == ("step (ms)", "7.000", "14.000", "+100.0%", "no interval")
    assert "communicating in a step (ms)" not in found


def test_counts_are_exact(tmp_path: Path) -> None:
    other = document(2)
    for record in other["ranks"]:
        record["stats"]["tallies"] = [tally for tally in record["stats"]["tallies"] if tally["bucket"] < 4]
    (tmp_path / "b.json").write_text(json.dumps(other))
    found = changes(stored(tmp_path / "a.json"), str(tmp_path / "b.json"))
    assert found["all-reduces a step"].texts == ("all-reduces a step", "5", "4", "-20.0%", "exact")
    assert found["bytes a step"][1:3] == ("827,688", "827,048")
    same = changes(stored(tmp_path / "a.json"), stored(tmp_path / "c.json"))
    assert {same[name].verdict for name in ("all-reduces a step", "bytes a step")} == {"same"}


@pytest.mark.parametrize("tried", [0, 1, 17, STEPS])
def test_what_auto_tried_is_in_no_count_of_what_it_chose(tmp_path: Path, tried: int) -> None:
    whole = document(2)
    for number, each in enumerate(whole["ranks"]):
        stats = CommStats(2)
        for step in range(STEPS):
            if step == tried:
                stats.merge_buckets("gradients")
            for bucket, nbytes in enumerate([40] * 9 if step < tried else [sum(bucket) for bucket in LAYOUT]):
                stats.collective_finished(
                    Collective("all_reduce", "gradients", nbytes, 1e-3, "shared", 1, bucket=bucket)
                )
        whole["ranks"][number] = {**each, "stats": stats.state()}
    (tmp_path / "b.json").write_text(json.dumps(whole))
    found = changes(stored(tmp_path / "a.json"), str(tmp_path / "b.json"))
    expected = ("5", "827,688") if tried < STEPS else ("9", "360")
    assert (found["all-reduces a step"].after, found["bytes a step"].after) == expected


@pytest.mark.parametrize(
    ("accuracy", "samples", "verdict"),
    [(0.9833, 10_000, "same"), (0.9813, 10_000, "within noise"), (0.9783, 10_000, "more than noise"),
     (0.9783, 1000, "within noise"), (0.9, None, "no interval")],
)  # fmt: skip
def test_accuracies_differ_by_what_so_many_samples_can_tell(
    tmp_path: Path, accuracy: float, samples: int | None, verdict: str
) -> None:
    first = stored(tmp_path / "a.json", test_samples=samples)
    second = stored(tmp_path / "b.json", test_samples=samples, test_accuracy=accuracy)
    assert changes(first, second)["test accuracy"].verdict == verdict


def test_what_was_set_differently_is_told(tmp_path: Path) -> None:
    first = stored(tmp_path / "a.json", settings={"lr": 0.1, "bucket_size": "1MiB", "nesterov": False, "seed": 0})
    second = stored(tmp_path / "b.json", settings={"lr": 0.2, "nesterov": False, "seed": 0}, bucket_size=None)
    ((before, after),) = pairs([first, second])
    assert [change[:3] for change in settings_changed(before, after)] == [
        ("bucket_size", "16 KiB", "none"), ("lr", "0.1", "0.2"),
    ]  # fmt: skip
    assert settings_changed(before, before) == []


def test_a_comparison_is_compared_with_its_reference_and_with_another_by_name(tmp_path: Path) -> None:
    first = stored_comparison(tmp_path / "a.json", {"bucketed": 9.0, "per tensor": 10.0, "64KiB": 9.5})
    second = stored_comparison(tmp_path / "b.json", {"bucketed": 18.0, "per tensor": 20.0, "auto": 17.0})
    run = stored(tmp_path / "run.json")
    within = [(before.variant, after.variant) for before, after in pairs([first])]
    assert within == [("per tensor", "bucketed"), ("per tensor", "64KiB")]
    between = [(before.name, after.name) for before, after in pairs([first, second, run])]
    assert between == [
        (f"{first}: bucketed", f"{second}: bucketed"), (f"{first}: per tensor", f"{second}: per tensor"),
        (f"{first}: per tensor", f"{second}: auto"), (f"{first}: per tensor", run),
    ]  # fmt: skip
    before, after = pairs([first])[0]
    found = {change.figure: change for change in figures_changed(before, after)}
    assert found["images/s"].verdict == "more than noise" and found["step (ms)"].change == "-10.0%"


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(1.41, 2.96, "more than noise"), (0.98, 2.96, "within noise"), (None, None, "no interval")],
)
def test_runs_that_took_turns_are_judged_by_the_ratio_of_their_steps(
    tmp_path: Path, low: float | None, high: float | None, verdict: str
) -> None:
    path = Path(stored_comparison(tmp_path / "a.json", {"per tensor": 10.0, "mpi": 20.0}, spread=0.5))
    text = json.loads(path.read_text())
    text["variants"]["mpi"]["step_ratio"] = {"median": 2.04, "low": low, "high": high}
    text["variants"]["per tensor"]["step_ratio"] = {"median": 1.0, "low": 1.0, "high": 1.0}
    path.write_text(json.dumps(text))
    ((before, after),) = pairs([str(path)])
    found = {change.figure: change for change in figures_changed(before, after)}
    around = "" if low is None else f" ({low:.2f}-2.96)"
    assert found["step over the reference's"].texts == (
        "step over the reference's", "1", f"2.04{around}", "+104.0%", verdict,
    )  # fmt: skip
    assert {found[name].verdict for name in ("steps/s", "images/s", "step (ms)")} == {verdict}
    assert found["communicating in a step (ms)"].verdict == "within noise"  # of it no ratios are kept
    for before, after in pairs([str(path), str(path)]):  # of two files the runs did not take turns
        assert "step over the reference's" not in {change.figure for change in figures_changed(before, after)}


def test_a_variant_that_was_never_settled_has_no_times_of_its_own(tmp_path: Path) -> None:
    path = Path(stored_comparison(tmp_path / "a.json", {"per tensor": 10.0, "auto": 9.0}))
    text = json.loads(path.read_text())
    text["variants"]["auto"] = {"step_ms": None, "communication_ms": None, "images_per_s": None}
    path.write_text(json.dumps(text))
    ((before, after),) = pairs([str(path)])
    found = {change.figure: change for change in figures_changed(before, after)}
    assert not {"steps/s", "images/s", "step (ms)"} & set(found)  # the whole run's have the trials in them


def test_the_command_prints_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = stored(tmp_path / "a.json", intervals=estimates(10.0, 0.05), settings={"lr": 0.1})
    second = stored(tmp_path / "b.json", intervals=estimates(20.0, 0.05), settings={"lr": 0.2})
    assert cli.main(["compare", first, second]) == 0
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["lr", "0.1", "0.2"] in shown
    assert any(line[0] == "steps/s" and line[-4:] == ["-50.0%", "more", "than", "noise"] for line in shown if line)


def damaged() -> dict[str, Any]:
    whole = document(2, intervals=estimates(10.0))
    runs = {"per tensor": whole}
    variants = {"per tensor": {**estimates(9.0), "images_per_s": estimates(1.0)["step_ms"]}}
    comparison = {
        "format": "clcomm comparison", "schema": 1, "reference": "per tensor", "runs": runs, "variants": variants,
    }  # fmt: skip
    return {
        "no JSON": "LizarDist",
        "cut off": json.dumps(whole)[:-9],
        "foreign": json.dumps({"format": "other", "schema": 2}),
        "a list": "[1, 2]",
        "nothing": "",
        "interval": json.dumps({**whole, "intervals": {"step_ms": {"median": "fast"}}}),
        "settings": json.dumps({**whole, "settings": {"lr\u001b[2J": 1}}),
        "other schema": json.dumps({**comparison, "schema": 7}),
        "no runs": json.dumps({**comparison, "runs": {}}),
        "no such reference": json.dumps({**comparison, "reference": "bucketed"}),
        "a damaged run": json.dumps({**comparison, "runs": {"per tensor": {**whole, "ranks": []}}}),
        "a variant missing": json.dumps({**comparison, "variants": {}}),
        "runs that are none": json.dumps({**comparison, "runs": {"per tensor": 3}}),
        "runs that are a list": json.dumps({**comparison, "runs": [whole]}),
    }


@pytest.mark.parametrize("what", damaged())
def test_what_is_no_report_is_refused_by_name(tmp_path: Path, what: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(damaged()[what])
    with pytest.raises(DataError) as refused:
        pairs([stored(tmp_path / "good.json"), str(path)])
    assert str(refused.value).startswith(f"{path}: ") and "expected" in str(refused.value)
    assert "\n" not in str(refused.value) and str(refused.value).isprintable()


def test_what_is_not_there_or_not_enough(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No such file"):
        pairs([str(tmp_path / "none.json")])
    with pytest.raises(DataError, match="expected another run"):
        pairs([stored(tmp_path / "a.json")])


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("has_phases", [False, True])
def test_a_loop_of_ones_own_is_compared_by_its_warm_steps(
    comm: Any, has_phases: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two loops whose steps take 17 and 50 ms by a clock that counts them, after a slow start."""
    names = []
    for step_s in (0.017, 0.05):
        now = SimpleNamespace(s=100.0)
        monkeypatch.setattr("clcomm.comm.stats.steps.perf_counter", lambda now=now: now.s)
        monkeypatch.setattr(NOW, "stepped", set())
        comm.stats.reset()
        sync, model = Synchronizer(comm), Model([("w", np.zeros(8, np.float32))])
        for step in range(100):
            took_s = step_s + (0.0 if step else 3.0)
            now.s += took_s + 0.004 * has_phases  # between the phases
            model.parameters["w"].grad = np.ones(8, np.float32)
            sync.sync_gradients(model)
            if has_phases:
                comm.notify_phase(Phase("step", 0.0, took_s))
        names.append(str(tmp_path / f"{step_s}.json"))
        Path(names[-1]).write_text(json.dumps(run_document(gather_records(comm))))
    found = changes(*names)["step (ms)"]
    assert found.texts[1:] == ("17.000 (17.000-17.000)", "50.000 (50.000-50.000)", "+194.1%", "more than noise")
    assert cli.main(["compare", *names, "--fail-if-slower", "5%"]) == 3
    assert cli.main(["compare", *names[::-1], "--fail-if-slower", "5%"]) == 0
    assert "100 steps, 50 ms each on average without the first 10." in build(read_runs(names[1:])).headline
