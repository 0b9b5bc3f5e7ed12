"""The differences between two runs, and which of them are more than noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from clcomm.base.errors import DataError
from clcomm.base.units import format_size
from clcomm.comm.costs.estimates import Estimate
from clcomm.comm.stats.comm_stats import MOST_TALLIES
from clcomm.insight.report.documents import Document
from clcomm.insight.report.record import COMPARISON_FORMAT
from clcomm.insight.report.recording import Run, read
from clcomm.insight.report.report import MACHINE, provenance
from clcomm.insight.report.schema import checked_comparison, checked_run
from clcomm.sync.synchronizer import GRADIENTS

_Z = 1.96  # standard errors around a normal distribution's mean that enclose 95% of it
#: Figures that are compared beside the settings.
_COMPARED_FIGURES = ("clcomm", "world_size", "hosts", "model", "engine", "dataset", "batch_size", "bucket_size")
#: Settings that one of these figures replaces.
_REPLACED_SETTINGS = ("model", "engine", "data", "batch_size", "bucket_size", "no_bucketing")


@dataclass(frozen=True)
class Subject:
    """A run to compare: its file, its variant's name in a comparison, and its figures.

    `reference` is the variant that its `step_ratio` refers to.
    """

    path: str
    variant: str
    run: Run
    estimates: dict[str, Estimate]
    reference: str = ""

    @property
    def name(self) -> str:
        return f"{self.path}: {self.variant}" if self.variant else self.path


class Change(NamedTuple):
    """A figure of two runs as text, its change, and whether that exceeds noise.

    `values` are the figures as read: numbers, Estimates or text. `relative` is the change as a share of the former
    figure, None if that is zero or no number.
    """

    figure: str
    before: str
    after: str
    change: str = ""
    verdict: str = ""
    values: tuple[object, object] = (None, None)
    relative: float | None = None

    @property
    def texts(self) -> tuple[str, ...]:
        return self[:5]


def pairs(paths: Sequence[str]) -> list[tuple[Subject, Subject]]:
    """Return the pairs of runs to compare: the reference, and the run that is compared with it.

    The reference is the first file's run; for a single file of a comparison it is the comparison's reference. A
    variant is compared with the first file's variant of the same name, if any. Raises DataError, which names
    the file, if one cannot be read or there is nothing to compare.
    """
    files = [_subjects(path) for path in paths]
    (first, reference), others = files[0], files[1:]
    if not others:
        found = [(reference, subject) for subject in first if subject is not reference]
    else:
        by_variant = {subject.variant: subject for subject in first}
        found = [
            (by_variant.get(subject.variant, reference), subject) for subjects, _ in others for subject in subjects
        ]
    if not found:
        raise DataError(f"{paths[0]}: expected another run to compare it with; name two files, or a comparison's")
    return found


def _subjects(path: str) -> tuple[list[Subject], Subject]:
    """Return a file's runs, and the one with which other files' runs are compared by default."""
    try:
        document = read(path, _checked)
    except DataError as error:
        raise DataError(f"{path}: {error}") from None
    if "runs" not in document:
        only = Subject(path, "", _run(document), document["intervals"] or {})
        return [only], only
    estimates = {
        name: {figure: each for figure, each in figures.items() if each is not None}
        for name, figures in document["variants"].items()
    }
    reference = document["reference"]
    found = {name: Subject(path, name, _run(run), estimates[name], reference) for name, run in document["runs"].items()}
    return list(found.values()), found[reference]


def _checked(document: Document) -> Document:
    return checked_comparison(document) if document.get("format") == COMPARISON_FORMAT else checked_run(document)


def _run(document: Document) -> Run:
    return Run({name: value for name, value in document.items() if name != "ranks"}, document["ranks"])


def settings_changed(before: Subject, after: Subject) -> list[Change]:
    first, second = _settings(before.run), _settings(after.run)
    names = dict.fromkeys([*first, *second])
    return _different(names, first, second)


def machine_changed(before: Subject, after: Subject) -> list[Change]:
    """Return the differences between the two runs' machines, as far as both files describe them."""
    first, second = (provenance(subject.run) for subject in (before, after))
    known = [name for name in MACHINE if first.get(name) and second.get(name)]
    return _different(known, first, second)


def _different(names: Iterable[str], first: dict[str, str], second: dict[str, str]) -> list[Change]:
    texts = ((name, first.get(name, "-"), second.get(name, "-")) for name in names)
    return [Change(name, old, new, values=(old, new)) for name, old, new in texts if old != new]


def _settings(run: Run) -> dict[str, str]:
    found = {name: "-" if run.figures[name] is None else str(run.figures[name]) for name in _COMPARED_FIGURES}
    size = run.figures["bucket_size"]
    found["bucket_size"] = "none" if size is None else format_size(size)
    settings = run.figures["settings"] or {}
    return found | {name: value for name, value in settings.items() if name not in _REPLACED_SETTINGS}


def figures_changed(before: Subject, after: Subject) -> list[Change]:
    """Return the changes in speed, communication, bytes and accuracy, for the figures that both runs have."""
    ratio = _paired_ratio(before, after)
    found: list[Change | None] = [_ratio_changed(ratio)] if ratio else []
    for name, estimate_of, write in _MEASURED:
        change = _change(name, write, estimate_of(before), estimate_of(after))
        found.append(change._replace(verdict=_verdict_of(ratio)) if change and ratio and name in _OF_STEPS else change)
    found += [_counted(name, count_of(before), count_of(after)) for name, count_of in _COUNTED]
    found += [_accuracy_changed(before.run, after.run)]
    return [change for change in found if change is not None]


def _paired_ratio(before: Subject, after: Subject) -> Estimate | None:
    """Return a variant's step time over its reference's in the same round; None if the two runs did not alternate."""
    took_turns = before.path == after.path and before.variant == after.reference != after.variant
    return after.estimates.get("step_ratio") if took_turns else None


def _ratio_changed(ratio: Estimate) -> Change:
    return Change(
        "step over the reference's", "1", ratio.text(2), f"{ratio.median - 1:+.1%}", _verdict_of(ratio),
        (Estimate(1.0), ratio), ratio.median - 1,
    )  # fmt: skip


def _verdict_of(ratio: Estimate) -> str:
    """Return the verdict on two runs' steps from their ratio, in which load that slows a whole round cancels out."""
    if ratio.low is None or ratio.high is None:
        return "no interval"
    return "within noise" if ratio.low <= 1 <= ratio.high else "more than noise"


def _change(
    name: str, write: Callable[[Estimate], str], before: Estimate | None, after: Estimate | None
) -> Change | None:
    if before is None or after is None:
        return None
    verdict = {True: "more than noise", False: "within noise", None: "no interval"}[after.differs_from(before)]
    relative = _relative(before.median, after.median)
    return Change(name, write(before), write(after), _signed(relative), verdict, (before, after), relative)


def _counted(name: str, before: float | None, after: float | None) -> Change | None:
    if before is None or after is None:
        return None
    verdict = "exact" if before != after else "same"
    relative = _relative(before, after)
    old, new = (f"{value:,.0f}" if value == int(value) else f"{value:,.2f}" for value in (before, after))
    return Change(name, old, new, _signed(relative), verdict, (before, after), relative)


def _relative(before: float, after: float) -> float | None:
    return after / before - 1 if before else None


def _signed(relative: float | None) -> str:
    return "" if relative is None else f"{relative:+.1%}"


def _accuracy_changed(before: Run, after: Run) -> Change | None:
    """Compare accuracies as shares of samples drawn at random (the normal approximation of the binomial)."""
    first, second = before.figures["test_accuracy"], after.figures["test_accuracy"]
    if first is None or second is None:
        return None
    verdict = "no interval"
    if before.figures["test_samples"] and after.figures["test_samples"]:
        parts = ((first, before.figures["test_samples"]), (second, after.figures["test_samples"]))
        error = math.sqrt(sum(share * (1 - share) / samples for share, samples in parts))
        verdict = "more than noise" if abs(second - first) > _Z * error else "within noise"
        verdict = "same" if first == second else verdict
    points = f"{100 * (second - first):+.2f} points"
    return Change("test accuracy", f"{first:.2%}", f"{second:.2%}", points, verdict, (first, second))


def step_change(before: Subject, after: Subject) -> Change:
    """Return the change of a step's time; for runs that alternated, of the ratio to the reference.

    Raises DataError without an interval to judge it by.
    """
    found = {change.figure: change for change in figures_changed(before, after)}
    change = found.get("step over the reference's") or found.get("step (ms)")
    if change is None or change.verdict == "no interval":
        missing = after if before.estimates.get("step_ms", Estimate(0.0)).has_interval else before
        steps = missing.run.figures["steps"] or 0
        got = (
            f"a run of {steps}, which is too short" if steps else 'none; comm.phase("step") makes a loop\'s steps known'
        )
        raise DataError(f"{missing.name}: expected intervals of a step's time, which take 34 steps, got {got}")
    return change


# --- a subject's figures; None if it has none ---


def _measured(subject: Subject, name: str, value: float | None) -> Estimate | None:
    """Return the estimate of a figure; of a run without one, unless it is a variant, its value without an interval."""
    alone = None if subject.variant or value is None else Estimate(value)
    return subject.estimates.get(name, alone)


def _step_ms(subject: Subject) -> Estimate | None:
    return _measured(subject, "step_ms", (subject.run.figures["step_ms"] or {}).get("p50"))


def _steps_per_s(subject: Subject) -> Estimate | None:
    step_ms = _step_ms(subject)
    return step_ms.rate_of(1e3) if step_ms is not None and step_ms.median else None


def _per_step(key: str) -> Callable[[Subject], float | None]:
    def count_of(subject: Subject) -> float | None:
        """Return the count for the run's final buckets, without those that "auto" tried before."""
        steps, stats = subject.run.figures["steps"], subject.run.stats()
        rows = [row for row in stats.as_dict()["buckets"] if row["label"] == GRADIENTS]
        synchronisations = sum(row["calls"] for row in rows if row["bucket"] == 0)
        if synchronisations and len(stats.tallies) < MOST_TALLIES:
            return float(sum(row[key] for row in rows) / synchronisations)
        return float(stats.total("all_reduce", GRADIENTS)[key] / steps) if steps else None

    return count_of


#: Measured figures: name, the estimate of a subject, and the estimate as text.
_MEASURED: Sequence[tuple[str, Callable[[Subject], Estimate | None], Callable[[Estimate], str]]] = (
    ("steps/s", _steps_per_s, lambda found: found.text(2)),
    ("images/s", lambda of: _measured(of, "images_per_s", of.run.figures["images_per_s"]), lambda found: found.text(0)),
    ("step (ms)", _step_ms, lambda found: found.text(3)),
    ("communicating in a step (ms)", lambda of: of.estimates.get("communication_ms"), lambda found: found.text(3)),
    ("a step's reductions alone (ms)", lambda of: of.estimates.get("alone_ms"), lambda found: found.text(3)),
)
#: Figures that follow from a step's time.
_OF_STEPS = ("steps/s", "images/s", "step (ms)")
#: Counted figures: name, and the count of a subject.
_COUNTED: Sequence[tuple[str, Callable[[Subject], float | None]]] = (
    ("all-reduces a step", _per_step("calls")),
    ("bytes a step", _per_step("bytes")),
    ("bytes a step on the wire", _per_step("wire_bytes")),
)
