"""The outcomes of one pytest run: what failed, and what was skipped and why, in a file; of ranks, on the terminal."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pytest

#: Why pytest-mpi skips, without ranks, what the runs on several ranks run.
FOR_RANKS = "need --with-mpi option to run"


@dataclass
class Outcomes:
    """What became of a run's tests; `skipped` has a reason for each test, or file whose tests share one."""

    passed: int = 0
    failed: list[str] = field(default_factory=list)
    again: list[str] = field(default_factory=list)  # what failed once, and ran again
    skipped: dict[str, str] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1))

    @classmethod
    def read(cls, path: Path) -> Outcomes:
        return cls(**json.loads(path.read_text()))


class Recorder:
    """A pytest plugin that writes a run's outcomes; of pytest-xdist's processes, the one that has the others."""

    def __init__(self, path: Path):
        self.path, self.outcomes = path, Outcomes()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._note(report)
        self.outcomes.passed += report.when == "call" and report.passed

    def _note(self, report: pytest.CollectReport | pytest.TestReport) -> None:
        if report.failed and report.nodeid not in self.outcomes.failed:  # a test and its fixture may both fail
            self.outcomes.failed.append(report.nodeid)
        elif report.outcome == "rerun":
            self.outcomes.again.append(report.nodeid)
        elif report.skipped and not hasattr(report, "wasxfail"):
            reason = report.longrepr[2].removeprefix("Skipped: ")
            if reason != FOR_RANKS:
                self.outcomes.skipped[report.nodeid] = reason

    def pytest_sessionfinish(self) -> None:
        self.outcomes.write(self.path)


class FailuresOfRank:
    """pytest's terminal reporter on another rank than 0, which prints the dots and the summary: its failures, at once.

    rank: its name. everything: the reporter in whose place it is.
    """

    def __init__(self, rank: int, everything: pytest.TerminalReporter):
        self.rank, self._tw = rank, everything._tw  # where pytest-timeout writes

    def pytest_runtest_logreport(self, report: pytest.CollectReport | pytest.TestReport) -> None:
        if report.failed:
            captured = "".join(f"\n-- {name} --\n{text}" for name, text in report.sections)
            self._show(f"FAILED {report.nodeid} ({report.when})\n{report.longreprtext}{captured}")

    pytest_collectreport = pytest_runtest_logreport

    def pytest_internalerror(self, excrepr: object) -> None:
        self._show(f"INTERNAL ERROR\n{excrepr}")

    def _show(self, text: str) -> None:
        self._tw.write(f"\nrank {self.rank}: {text}\n", flush=True)


def among(items: list[pytest.Item], names: set[str]) -> list[pytest.Item]:
    """Return the items that the names contain, be it themselves or their files."""
    return [item for item in items if item.nodeid in names or item.nodeid.partition("::")[0] in names]
