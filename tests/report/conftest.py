"""Reports of runs that never were."""

from __future__ import annotations

import pytest

from clcomm.comm.stats.comm_stats import Collective, CommStats, Phase
from clcomm.insight.report.elements import Table
from clcomm.insight.report.recording import read_runs
from clcomm.insight.report.report import Report, build
from tests.report.runs import STEPS, document, written


@pytest.fixture
def report(tmp_path) -> Report:
    return build(read_runs(written(tmp_path, [document()])))


def reported(tmp_path, **figures) -> Report:
    return build(read_runs(written(tmp_path, [document(**figures)])))


def table(report: Report, key: str) -> Table:
    return next((each for each in report.tables if each.key == key), Table(key, "", [], []))


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
