"""The report of `clcomm compare`: sentences, tables and charts, and JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from clcomm.comm.costs.estimates import Estimate
from clcomm.comm.stats.events import Row
from clcomm.insight.report.chart_kinds import Intervals
from clcomm.insight.report.differences import Change, Subject, figures_changed, machine_changed, settings_changed
from clcomm.insight.report.elements import Column, Table
from clcomm.insight.report.report import Report, provenance

FORMAT, SCHEMA = "clcomm compare", 1
Pairs = Sequence[tuple[Subject, Subject]]
#: Times and speeds to draw: the estimate's name, its title and its unit.
_DRAWN = (
    ("step_ms", "A step", "ms"),
    ("communication_ms", "Communicating in a step", "ms"),
    ("alone_ms", "A step's reductions alone", "ms"),
    ("images_per_s", "Images", "images/s"),
)


def warnings(pairs: Pairs) -> list[str]:
    """Return a line with the differences for each pair of runs on different machines."""
    found = []
    for before, after in pairs:
        if changes := machine_changed(before, after):
            what = "; ".join(f"{each.figure} {each.before} and {each.after}" for each in changes)
            found.append(f"{after.name}, against {before.name}: the machines differ, and times with them: {what}")
    return list(dict.fromkeys(found))


def comparison_report(pairs: Pairs) -> Report:
    """Return a report of the changes in each pair."""
    pairs = _shortly_named(pairs)
    subjects = _subjects(pairs)
    first = pairs[0][0].name
    title = f"{pairs[0][1].name}, against {first}" if len(pairs) == 1 else f"{len(pairs)} runs, against {first}"
    found: list[Table] = []
    for number, (before, after) in enumerate(pairs, 1):
        which = f": {after.name}, against {before.name}" if len(pairs) > 1 else ""
        changed = (
            ("settings", "What was set differently", settings_changed(before, after)),
            ("figures", "Figures", figures_changed(before, after)),
        )
        found += [_table(f"{key}-{number}", f"{name}{which}", changes) for key, name, changes in changed if changes]
    found.append(Table("provenance", "What ran, and where", *_side_by_side(subjects)))
    headline = [f"Warning: {line}." for line in warnings(pairs)] + [_sentence(*pair) for pair in pairs]
    charts = [chart for drawn in _DRAWN if (chart := _chart(subjects, *drawn)) is not None]
    return Report(title, {}, [], headline, found, list(charts), [])


def _shortly_named(pairs: Pairs) -> Pairs:
    """Return the pairs with file names in place of paths, if these are unique."""
    paths = {subject.path for pair in pairs for subject in pair}
    if len({Path(path).name for path in paths}) < len(paths):
        return pairs
    return [(_without_folder(before), _without_folder(after)) for before, after in pairs]


def _without_folder(subject: Subject) -> Subject:
    return replace(subject, path=Path(subject.path).name)


def _subjects(pairs: Pairs) -> list[Subject]:
    return list({subject.name: subject for pair in pairs for subject in pair}.values())


def _side_by_side(subjects: Sequence[Subject]) -> tuple[list[Column], list[Row]]:
    known = {subject.name: provenance(subject.run) for subject in subjects}
    names = dict.fromkeys(name for each in known.values() for name in each)
    rows = [
        {"what": name, **{f"run-{number}": each.get(name, "") for number, each in enumerate(known.values())}}
        for name in names
        if any(each.get(name) for each in known.values())
    ]
    columns = [Column("what", "", "text")]
    return [*columns, *(Column(f"run-{number}", name, "text") for number, name in enumerate(known))], rows


def _table(key: str, title: str, changes: Sequence[Change]) -> Table:
    columns = [
        Column("figure", "", "text"), Column("before", "before", "right"), Column("after", "after", "right"),
        Column("change", "change", "right"), Column("verdict", "", "text"),
    ]  # fmt: skip
    rows = [{column.key: getattr(change, column.key) for column in columns} for change in changes]
    return Table(key, title, columns, rows).filled()


def _sentence(before: Subject, after: Subject) -> str:
    """Return the change of a step's time as a sentence."""
    found = {change.figure: change for change in figures_changed(before, after)}
    step = found.get("step over the reference's") or found.get("step (ms)")
    times = found.get("step (ms)")
    if step is None or times is None or step.relative is None:
        return f"{after.name}: a step's time is not known."
    direction = "longer" if step.relative > 0 else "shorter"
    known = {"no interval": "too few steps to know whether that is noise"}.get(step.verdict, step.verdict)
    return (
        f"{after.name}: a step takes {abs(step.relative):.1%} {direction} than with {before.name}, {known}: "
        f"{times.after} ms against {times.before} ms."
    )


def _chart(subjects: Sequence[Subject], figure: str, title: str, unit: str) -> Intervals | None:
    points = []
    for subject in subjects:
        estimate = subject.estimates.get(figure)
        if estimate is None and figure == "images_per_s" and subject.run.figures["images_per_s"]:
            estimate = Estimate(subject.run.figures["images_per_s"])
        if estimate is not None:
            points.append((subject.variant or subject.path, *estimate))
    return Intervals(title, points, unit, "median and its 95% interval") if points else None


def as_json(pairs: Pairs) -> str:
    """Return the changes in each pair as JSON; docs/reports.md names the fields."""
    document = {
        "format": FORMAT,
        "schema": SCHEMA,
        "warnings": warnings(pairs),
        "pairs": [
            {
                "before": _named(before),
                "after": _named(after),
                "machine": [_changed(change) for change in machine_changed(before, after)],
                "settings": [_changed(change) for change in settings_changed(before, after)],
                "figures": [
                    {**_changed(change), "relative": change.relative, "verdict": change.verdict}
                    for change in figures_changed(before, after)
                ],
            }
            for before, after in pairs
        ],
    }
    return json.dumps(document, indent=1, allow_nan=False) + "\n"


def _named(subject: Subject) -> Row:
    return {"file": subject.path, "variant": subject.variant or None, "provenance": provenance(subject.run)}


def _changed(change: Change) -> dict[str, object]:
    before, after = (each.as_dict() if isinstance(each, Estimate) else each for each in change.values)
    return {"figure": change.figure, "before": before, "after": after}
