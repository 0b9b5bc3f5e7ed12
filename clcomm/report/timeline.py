"""The timeline chart of the last steps of a run, with a row per rank."""

from __future__ import annotations

from functools import partial

from clcomm.clipping import CLIPPING
from clcomm.report import last_steps
from clcomm.report.analysis import Analysis
from clcomm.report.chart_kinds import Stretch, Timeline
from clcomm.report.colours import PAINTS
from clcomm.report.elements import MOST_SHOWN, count
from clcomm.report.last_steps import Span, flattened, uncovered
from clcomm.report.step_parts import (
    COMPUTING,
    DATA,
    DEVICE,
    EITHER,
    HIDDEN,
    OPTIMIZER,
    OTHER_LABELS,
    PACK,
    REST,
    UNPACK,
    WAIT,
)


def timeline_chart(analysis: Analysis) -> Timeline | None:
    """Return the timeline of all ranks with one in their file."""
    records = [record for record in analysis.run.ranks if record["timeline"]][:MOST_SHOWN]
    if not records:
        return None
    origin = min(span.begin_ns for record in records for span in record["timeline"])
    stretches, behind, steps = [], [], []
    for row, record in enumerate(records):
        part_of = partial(_part_of, analysis, record["device_in_caller"] is False)

        def stretch(span: Span, row: int = row) -> Stretch:
            return Stretch(row, span.kind, span.bucket, (span.begin_ns - origin) / 1e6, (span.end_ns - origin) / 1e6)

        spans: list[Span] = record["timeline"]
        stretches += [stretch(span) for span in flattened(spans, part_of)]
        exposed = [span for span in spans if span.kind in (last_steps.WAIT, last_steps.MOVE, last_steps.EITHER)]
        hidden = [span._replace(kind=HIDDEN) for span in spans if span.kind == last_steps.HIDDEN]
        behind += [stretch(part) for span in hidden for part in uncovered(span, exposed)]
        steps += [(row, (span.begin_ns - origin) / 1e6) for span in spans if span.kind == last_steps.STEP]
    shown = {each.part for each in [*stretches, *behind]}
    most_steps = max(sum(1 for row, _ in steps if row == each) for each in range(len(records)))
    return Timeline(
        f"The last {count(most_steps, 'step')} of each rank" if most_steps > 1 else "The last step of each rank",
        [f"rank {record['rank']}" for record in records],
        [part for part in PAINTS if part in shown],
        stretches, behind, steps, max(each.end_ms for each in stretches), "ms since the first of them began",
    )  # fmt: skip


def _part_of(analysis: Analysis, computes_apart: bool, kind: str) -> str:
    """Return the part of a step that a span belongs to."""
    rest = DEVICE if computes_apart and kind in ("sync", "loss") else REST
    names = {
        "data": DATA, "forward_backward": COMPUTING, "clipping": CLIPPING, "optimizer": OPTIMIZER,
        last_steps.WAIT: WAIT, last_steps.MOVE: analysis.moving, last_steps.EITHER: EITHER, "pack": PACK,
        "unpack": UNPACK, **OTHER_LABELS,
    }  # fmt: skip
    return names.get(kind, rest)
