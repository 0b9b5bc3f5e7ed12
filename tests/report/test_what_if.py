"""`clcomm report --what-if`: delays that were planted in simulated runs and removed again, beside what it predicts."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace

import pytest

from clcomm.comm.stats.comm_stats import Collective, CommStats, Phase
from clcomm.insight.report.record import run_document
from clcomm.insight.report.recording import Run
from clcomm.insight.report.run_costs import Analysis
from clcomm.insight.report.schema import checked_run
from clcomm.insight.report.what_if import sentence, table, what_ifs
from clcomm.tools import cli
from tests.report.runs import document, record, written

STEPS, COLD = 100, 10
LAYOUT = [[600_000], [200_000], [27_688]]
MOVES_S = tuple(20e-6 + sum(bucket) * 0.4e-9 for bucket in LAYOUT)


class Simulated:
    """A run whose ranks meet at each bucket, from a seed; `plant` has what a rank's step takes longer, by part.

    Attributes:
        training_s: of the steps after the first ten.
    """

    def __init__(self, seed: int, ranks: int, plant: dict[tuple[str, int], float], share: float = 1.0):
        rng, delays = random.Random(seed), random.Random(seed + 1)
        stats = [CommStats(ranks) for _ in range(ranks)]
        spent, data, self.records, cold = [0.0] * ranks, [0.0] * ranks, [], []
        for step in range(STEPS):
            if step == COLD:
                cold = [
                    {"steps": COLD, "training_s": spent[r], "data_wait_s": data[r], "core_waits_s": None,
                     "stats": stats[r].state()} for r in range(ranks)
                ]  # fmt: skip
            hit = delays.random() < share
            own = {
                (part, rank): mean * rng.lognormvariate(0, 0.03) + (plant.get((part, rank), 0.0) if hit else 0.0)
                for part, mean in (("data", 2e-4), ("forward_backward", 4e-3))
                for rank in range(ranks)
            }
            clock = [own["data", rank] + own["forward_backward", rank] for rank in range(ranks)]
            arrived = list(clock)
            for bucket, move_s in enumerate(MOVES_S):
                order = sorted(range(ranks), key=lambda rank: clock[rank])
                last, late_s = order[-1], clock[order[-1]] - clock[order[-2]]
                for rank in range(ranks):
                    wait_s = clock[last] - clock[rank]
                    stats[rank].collective_finished(
                        Collective(
                            "all_reduce", "gradients", sum(LAYOUT[bucket]), wait_s + move_s, "shared", step,
                            bucket=bucket, wait_s=wait_s, last_rank=last, late_s=late_s,
                        )
                    )  # fmt: skip
                clock = [clock[last] + move_s] * ranks
            for rank in range(ranks):
                stats[rank].phase_finished(Phase("data", 0.0, own["data", rank]))
                stats[rank].phase_finished(Phase("forward_backward", 0.0, own["forward_backward", rank]))
                stats[rank].phase_finished(Phase("sync", 0.0, clock[rank] - arrived[rank]))
                spent[rank] += clock[rank]
                data[rank] += own["data", rank]
        self.training_s = spent[0] - cold[0]["training_s"]
        records = [
            record(r, ranks, stats[r], steps=STEPS, training_s=spent[r], data_wait_s=data[r], cold=cold[r])
            for r in range(ranks)
        ]  # fmt: skip
        whole = json.loads(json.dumps(run_document(records, steps=STEPS, layout=LAYOUT)))
        checked = checked_run(whole)
        self.analysis = Analysis(Run({k: v for k, v in checked.items() if k != "ranks"}, checked["ranks"]))


def predicted_s(run: Simulated, change: str) -> float:
    saved_s = {each.change: each.saved_s for each in what_ifs(run.analysis)}[change]
    return run.training_s - saved_s * (STEPS - COLD)


@pytest.mark.parametrize("seed", range(200))
def test_a_planted_delay_that_is_removed_again_saves_what_was_predicted(seed):
    """One rank computes longer, in all steps or in some, or its loader is slow, or that of all ranks."""
    drawn = random.Random(seed)
    ranks, share, kind = drawn.randint(2, 8), drawn.choice((1.0, 0.1, 0.3)), drawn.choice(("rank", "loader", "loaders"))
    slow, late_s = drawn.randrange(ranks), drawn.uniform(5e-3, 2e-2)
    plant = {
        "rank": {("forward_backward", slow): late_s}, "loader": {("data", slow): late_s},
        "loaders": {("data", rank): late_s for rank in range(ranks)},
    }[kind]  # fmt: skip
    slowed, healthy = Simulated(seed, ranks, plant, share), Simulated(seed, ranks, {})
    if kind == "loaders":  # with no wait at all: what is left of the healthy run's is known
        expected_s = healthy.training_s - (STEPS - COLD) * 2e-4
        found_s = predicted_s(slowed, "without waits for data")
    else:
        expected_s, found_s = healthy.training_s, predicted_s(slowed, f"without rank {slow}'s delay")
    assert found_s == pytest.approx(expected_s, rel=0.05)
    assert slowed.training_s > 1.01 * expected_s


def test_the_largest_change_is_told_of_the_whole_run():
    slowed, healthy = (Simulated(3, 4, {("forward_backward", 2): late_s}) for late_s in (0.9, 0.0))
    assert 80 < slowed.training_s < 90
    line = sentence(slowed.analysis)
    assert line.startswith("Without rank 2's delay 90 steps would take ")
    left_s = float(line.split(" would take ")[1].split(" ")[0]) / 1e3
    assert left_s == pytest.approx(healthy.training_s, rel=0.05) and line.endswith(f", not {slowed.training_s:.2f} s.")


def changes_of(**figures: object) -> dict[str, float]:
    """Return the savings in a step of 20 ms on two ranks, the second of which waits 2 ms for the first."""
    records = []
    for rank, compute_s in enumerate((0.016, 0.014)):
        stats = CommStats(2)
        for step in range(10):
            for bucket, nbytes in enumerate((4_000, 40_000, 400_000, 1_556_000)):
                wait_s = 0.002 if (rank, bucket) == (1, 0) else 0.0
                seconds = 5e-4 + nbytes * 1e-9 + wait_s
                stats.collective_finished(
                    Collective("all_reduce", "gradients", nbytes, seconds, "mpi", step, bucket=bucket, wait_s=wait_s)
                )
            stats.phase_finished(Phase("forward_backward", 0.0, compute_s))
        usual = {"steps": 10, "training_s": 0.2, "data_wait_s": 0.0, "launch_step_s": None, "kernel_step_s": None}
        records.append(record(rank, 2, stats, **{**usual, "cold": None, **figures}))
    whole = json.loads(json.dumps(run_document(records, layout=[[4_000], [40_000], [400_000], [1_556_000]])))
    checked = checked_run(whole)
    return {each.change: each.saved_s for each in what_ifs(Analysis(Run(checked, checked["ranks"])))}


def test_what_the_slowest_rank_saves_is_what_the_step_saves():
    """Launches of 6 ms leave 10 and 8 ms of computing; 4 ms of waiting for a core as much less."""
    assert changes_of()["without rank 0's delay"] == pytest.approx(0.002)
    assert changes_of(launch_step_s=0.006)["without Python and launches"] == pytest.approx(0.006)
    cores = changes_of(core_waits_s={"forward_backward": 0.04})
    assert cores["with a core for each rank"] == pytest.approx(0.004)


def test_buckets_and_bandwidth_save_what_calls_and_bytes_cost():
    found = changes_of()
    assert found["with twice the bandwidth"] == pytest.approx(0.001, rel=0.01)
    assert found["with buckets of 2 MiB"] == pytest.approx(3 * 5e-4, rel=0.01)


def test_the_command_adds_a_table_and_a_sentence(tmp_path, capsys):
    (name,) = written(tmp_path, [document()])
    found = []
    for options in ([], ["--what-if"]):
        assert cli.main(["report", name, "--format", "json", *options]) == 0
        found.append(SimpleNamespace(**json.loads(capsys.readouterr().out)))
    plain, asked = found
    assert "what_if" not in plain.tables and asked.headline[:-1] == plain.headline
    rows = asked.tables["what_if"]
    assert rows[0]["change"] == "without rank 2's delay" and " would take " in asked.headline[-1]
    assert [row["saved_s"] for row in rows] == sorted((row["saved_s"] for row in rows), reverse=True)


def test_a_run_whose_steps_were_not_timed_has_no_what_if():
    whole = document()
    for each in whole["ranks"]:
        each["training_s"] = None
    checked = checked_run(whole)
    analysis = Analysis(Run(checked, checked["ranks"]))
    assert what_ifs(analysis) == [] and not table(analysis).rows and not sentence(analysis)
