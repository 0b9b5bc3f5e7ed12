"""The charts of a report, one function each; None where a run has nothing to draw."""

from __future__ import annotations

from functools import partial

from clcomm.comm.stats.tally import Histogram
from clcomm.insight.report import last_steps, run_costs
from clcomm.insight.report.chart_kinds import Bars, Chart, Curve, Curves, Distribution, Points, Stretch, Timeline
from clcomm.insight.report.elements import MOST_SHOWN, PAINTS, count
from clcomm.insight.report.last_steps import Span, flattened, uncovered
from clcomm.insight.report.run_costs import Analysis, mean_step, mean_step_by_rank, per_call
from clcomm.insight.report.step_parts import (
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
from clcomm.sync.clipping import CLIPPING
from clcomm.sync.synchronizer import GRADIENTS

_MOST_BINS = 24


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


def step_chart(analysis: Analysis) -> Chart | None:
    parts = mean_step(analysis)
    if not parts:
        return None
    names, values = zip(*parts, strict=True)
    return Bars("Where a step goes", names, ["a mean step"], [[s * 1e3 for s in values]], "ms")


def ranks_chart(analysis: Analysis) -> Chart | None:
    names = [name for name, _ in mean_step(analysis)]
    if not names or len(analysis.run.ranks) < 2:
        return None
    bars = [f"rank {record['rank']}" for record in analysis.run.ranks]
    values = [[parts.get(name, 0.0) * 1e3 for name in names] for parts in mean_step_by_rank(analysis)]
    return Bars("Where a step goes, by rank", names, bars, values, "ms", "a mean step")


def buckets_chart(analysis: Analysis) -> Chart | None:
    rows = [per_call(row) for row in analysis.buckets]
    parts = [
        (PACK, "pack_mean_s"), (WAIT, "wait_mean_s"), (analysis.moving, "transfer_mean_s"),
        (EITHER, "wait_unknown_mean_s"), (UNPACK, "unpack_mean_s"), (HIDDEN, "hidden_mean_s"),
    ]  # fmt: skip
    shown = [(part, key) for part, key in parts if any(row[key] for row in rows)]
    if not shown:
        return None
    values = [[row[key] * 1e3 for _, key in shown] for row in rows]
    names = [f"bucket {row['bucket']}" for row in rows]
    return Bars("Reducing, by bucket", [part for part, _ in shown], names, values, "ms", "a mean call")


def late_chart(analysis: Analysis) -> Chart | None:
    late = {row["rank"]: row["share"] * 100 for row in analysis.counts["stragglers"]}
    if not late:
        return None
    ranks = [record["rank"] for record in analysis.run.ranks]
    values = [[late.get(rank, 0.0)] for rank in ranks]
    even_share = ("an even share", 100 / analysis.run.world_size)
    bars = [f"rank {rank}" for rank in ranks]
    return Bars(
        "Who came last", ["came last"], bars, values, "%", "of all collectives whose last rank is known", even_share
    )


def history_chart(analysis: Analysis) -> Chart | None:
    history = analysis.run.figures["history"]
    if history is None or not history["loss"]:
        return None
    steps_a_point = history["steps_a_point"]
    steps = [history["first_step"] + steps_a_point * (index + 0.5) - 0.5 for index in range(len(history["loss"]))]
    curves = [Curve("loss", history["loss"]), Curve("step (ms)", history["step_ms"])]
    if analysis.several:
        curves.append(Curve("communication in it (ms)", history["communication_ms"]))
    note = "of rank 0" if steps_a_point == 1 else f"of rank 0, means of {steps_a_point} steps"
    return Curves("Step by step", steps, curves, note)


def distribution(analysis: Analysis) -> Chart | None:
    tallies = [tally for key, tally in analysis.stats.tallies.items() if key[:2] == ("all_reduce", GRADIENTS)]
    row = analysis.reductions
    if not row["calls"]:
        return None
    whole = Histogram()
    for tally in tallies:
        whole.merge(tally.histogram)
    edges, counts = whole.coarse(_MOST_BINS)
    marks = [("p50", row["p50_s"]), ("p95", row["p95_s"]), ("p99", row["p99_s"])]
    return Distribution("How long gradient all-reduces took", edges, counts, marks, "calls of all ranks, log scale")


def cost_chart(analysis: Analysis) -> Chart | None:
    if not isinstance(analysis.own_costs, run_costs.Costs) or analysis.own_costs.fit is None:
        return None
    points = analysis.own_costs.fit.points
    low, high = min(nbytes for nbytes, _ in points), max(nbytes for nbytes, _ in points)
    sizes = [low * (high / low) ** (i / 24) for i in range(25)]
    line = [(nbytes, float(analysis.own_costs.cost.seconds(nbytes))) for nbytes in sizes]
    return Points("Time of an all-reduce by size", points, line, "this run's buckets, and the fit")


ALL = (
    timeline_chart, step_chart, history_chart, ranks_chart, late_chart, buckets_chart, distribution, cost_chart,
)  # fmt: skip
