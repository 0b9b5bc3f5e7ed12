"""The tables of a report, one function each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from clcomm.base.units import format_size
from clcomm.comm.stats.comm_stats import MOST_TALLIES
from clcomm.comm.stats.events import Row
from clcomm.comm.stats.table import named
from clcomm.insight.report import run_costs
from clcomm.insight.report.elements import Column, Table, count, with_values, written
from clcomm.insight.report.run_costs import (
    Analysis,
    hidden_by_rank_s,
    mean_step,
    mean_step_by_rank,
    per_call,
    rank_rows,
)
from clcomm.insight.report.step_parts import HIDDEN, PART_KEYS
from clcomm.sync.synchronizer import GRADIENTS

_TIMES = (
    Column("pack_s", "pack", "ms"), Column("wait_s", "wait", "ms"), Column("transfer_s", "move", "ms"),
    Column("wait_unknown_s", "wait+move", "ms"), Column("unpack_s", "unpack", "ms"), Column("hidden_s", "hidden", "ms"),
)  # fmt: skip
_BANDWIDTHS = Column("algbw_bytes_per_s", "algbw", "gb_s"), Column("busbw_bytes_per_s", "busbw", "gb_s")
_CALLS = (
    Column("p50_s", "p50", "ms"), Column("p95_s", "p95", "ms"), Column("p99_s", "p99", "ms"),
    Column("max_s", "max", "ms"), *_BANDWIDTHS, Column("ceiling_share", "of ceiling", "share"),
    Column("failures", "failed"),
)  # fmt: skip


def lizardist_table(analysis: Analysis) -> Table:
    row = analysis.reductions
    whole = [("Total bytes reduced", "bytes"), ("Total bytes sent", "wire_bytes")][0 if analysis.compressed else 1 :]
    rows = [
        {"figure": "Average bytes/call", "value": round(row["average_bytes_per_call"])},
        {"figure": "Total all-reduce calls", "value": row["calls"]},
        *({"figure": name, "value": row[key]} for name, key in whole),
    ]
    columns = [Column("figure", "", "text"), Column("value", "per rank")]
    note = "What each rank handed to all-reduce."
    if analysis.compressed:
        note = "What each rank handed to all-reduce; total bytes are after compression, bytes/call before it."
    return Table("gradients", "Gradient all-reduce", columns, rows if row["calls"] else [], note)


def step_table(analysis: Analysis) -> Table:
    parts = mean_step(analysis)
    whole = analysis.per_step(analysis.training_s) or 0.0
    rows: list[Row] = [{"part": what, "mean_s": s, "share": s / whole} for what, s in parts]
    rows += [{"part": "a whole step", "mean_s": whole, "share": 1.0}] if rows else []
    columns = [Column("part", "", "text"), Column("mean_s", "ms", "ms"), Column("share", "share", "share")]
    hidden = " Communication that is hidden behind computing takes none of it." if analysis.reducing["hidden_s"] else ""
    return Table(
        "step", "Where a step goes", columns, rows, f"A mean step of a mean rank{_without_first(analysis)}.{hidden}"
    )


def _without_first(analysis: Analysis) -> str:
    cold = analysis.cold_steps
    return f", without the first {f'{cold} steps' if cold > 1 else 'step'}" if cold else ""


def _with_ceiling(analysis: Analysis, row: Row) -> Row:
    share = None
    if analysis.ceiling and row["operation"] == "all_reduce" and row["label"] == GRADIENTS and row["calls"]:
        share = analysis.ceiling.seconds(row["average_bytes_per_call"]) / row["mean_s"] if row["mean_s"] else None
    return {**row, "ceiling_share": share}


def operations_table(analysis: Analysis) -> Table:
    def is_rare(row: Row) -> bool:
        return int(row["calls"]) < (analysis.all_steps or 0)

    counted = [{**row, "label": named(row)} for row in analysis.counts["operations"]]
    rows = sorted(counted, key=lambda row: (is_rare(row), -row["seconds"], row["operation"], row["label"]))
    rare = [row for row in rows if is_rare(row)]
    columns = [
        Column("operation", "operation", "text"), Column("label", "label", "text"), Column("calls", "calls"),
        Column("bytes", "bytes"), *([Column("wire_bytes", "on the wire")] if analysis.compressed else []),
        Column("seconds", "total", "whole_ms"),
        *(column._replace(kind="whole_ms") for column in _TIMES), *_CALLS,
    ]  # fmt: skip
    rows = [_blank_zeros(analysis, _with_ceiling(analysis, row)) for row in rows]
    note = f"Per rank; times in ms: {_first_to_last(_TIMES, rows, 'total')} in all, percentiles of single calls"
    note += "; bandwidths in GB/s (10^9 bytes)." if with_values(_BANDWIDTHS, rows) else "."
    note += _wait_or_move_note(rows)
    rare_ms = written(sum(row["seconds"] for row in rare), "whole_ms")
    folded_as = f"{count(len(rare), 'operation')} called less than once a step: {rare_ms} ms in all"
    return Table("operations", "Operations", columns, rows, note, len(rare), folded_as)


def _first_to_last(columns: Sequence[Column], rows: list[Row], before: str = "") -> str:
    """Return the headings of adjacent columns with values as a range, "wait to move"; it starts at `before`."""
    headings = [each for each in (before, *(column.heading for column in with_values(columns, rows))) if each]
    return " to ".join(dict.fromkeys((headings[0], headings[-1]))) if headings else ""


def _blank_zeros(analysis: Analysis, row: Row) -> Row:
    """Return the row with None for zero parts, and for moving data in a world of one."""
    suffixes = ("_s", "_mean_s", "_step_s")
    blank = {f"{name[:-2]}{suffix}" for name in (*PART_KEYS, "hidden_s") for suffix in suffixes} | {"failures"}
    alone = set() if analysis.several else {f"transfer{suffix}" for suffix in suffixes}
    return {name: None if name in alone or (name in blank and not value) else value for name, value in row.items()}


def _wait_or_move_note(rows: list[Row]) -> str:
    """Return a note on the column "wait+move", "" if it is empty."""
    is_there = any(row["wait_unknown_s"] for row in rows)
    return " wait+move is either; the transport does not report which." if is_there else ""


def buckets_table(analysis: Analysis) -> Table:
    rows = [_blank_zeros(analysis, per_call(_with_ceiling(analysis, row))) for row in analysis.buckets]
    parts = [Column(f"{column.key[:-2]}_mean_s", column.heading, "ms") for column in _TIMES]
    columns = [
        Column("bucket", "bucket"), Column("operation", "operation", "text"), Column("calls", "calls"),
        Column("average_bytes_per_call", "size", "size"), Column("bytes", "bytes"), *parts, *_CALLS,
    ]  # fmt: skip
    mean = _first_to_last(parts, rows)
    note = f"Per rank; times in ms{f', {mean} of a mean call' if mean else ''}, percentiles of single calls. "
    note += f"Buckets are numbered in the order of backward.{_wait_or_move_note(rows)}"
    others = analysis.reductions["calls"] - sum(row["calls"] for row in rows)
    if rows and others:
        which = f"of buckets past the first {MOST_TALLIES}" if analysis.overflows else "before these were the buckets"
        note += f" {count(others, 'call')} {which} {'is' if others == 1 else 'are'} not listed."
    return Table("buckets", "Buckets", columns, rows, note)


def step_ranks_table(analysis: Analysis) -> Table:
    names = [name for name, _ in mean_step(analysis)]
    rows = [
        {"rank": record["rank"], **{_key(name): s for name, s in parts.items()}, "step_s": sum(parts.values()),
         "hidden_step_s": hidden_s or None}
        for record, parts, hidden_s in zip(
            analysis.run.ranks, mean_step_by_rank(analysis), hidden_by_rank_s(analysis), strict=True
        )
    ]  # fmt: skip
    columns = [Column("rank", "rank"), *(Column(_key(name), name, "ms") for name in names)]
    columns += [Column("step_s", "a whole step", "ms"), Column("hidden_step_s", HIDDEN, "ms")]
    note = "A mean step of each rank, in ms."
    if any(row["hidden_step_s"] for row in rows):
        note += " Hidden communication goes on behind computing and takes none of it."
    return Table("step_ranks", "Where a step goes, by rank", columns, rows if names and len(rows) > 1 else [], note)


def _key(part: str) -> str:
    return f"{part.replace(',', '').replace(' ', '_')}_step_s"


def ranks_table(analysis: Analysis) -> Table:
    rows = [_blank_zeros(analysis, row) for row in rank_rows(analysis)]
    hosts = len({record["host_name"] for record in analysis.run.ranks})
    columns = [
        Column("rank", "rank"), *([Column("host_name", "host", "text")] if hosts > 1 else []),
        Column("cpus", "CPUs", "text"), Column("steps", "steps"), Column("step_s", "a whole step", "ms"),
        Column("cpu_share", "cores busy", "ratio"), Column("last_share", "came last", "share"),
        Column("mean_late_s", "late by", "ms"), Column("failures", "failed"),
        Column("peak_rss_bytes", "peak memory", "size"), Column("device_peak_bytes", "device", "size"),
    ]  # fmt: skip
    note = "Times in ms of a mean step."
    if any(row["cpu_share"] is not None for row in rows):
        note += " Cores busy: processor time of all of a rank's threads in steps, over the time of these steps."
    return Table("ranks", "Ranks", columns, rows, note)


def stragglers_table(analysis: Analysis) -> Table:
    rows = sorted(analysis.counts["stragglers"], key=lambda row: (-row["last"], row["rank"]))
    columns = [
        Column("rank", "rank"), Column("last", "came last"), Column("share", "share", "share"),
        Column("mean_late_s", "late by", "ms"), Column("max_late_s", "at most", "ms"), Column("late_s", "in all", "ms"),
    ]  # fmt: skip
    note = "How often a rank came last, and by how much after the one before it, in ms."
    return Table("stragglers", "Who came last", columns, rows, note)


def cost_table(analysis: Analysis) -> Table:
    rows = []
    for each in (analysis.own_costs, analysis.stored_costs()):
        if isinstance(each, run_costs.Costs):
            cost, beta = each.cost, each.cost.beta_s_per_byte
            rows.append({
                "source": each.source, "alpha_s": cost.alpha_s, "beta_s_per_byte": beta,
                "bytes_per_s": 1 / beta if beta > 1e-300 else None,
                "median_error": each.fit.median_error if each.fit else None,
            })  # fmt: skip
    columns = [
        Column("source", "an all-reduce costs", "text"), Column("alpha_s", "alpha", "time"),
        Column("beta_s_per_byte", "beta a KiB", "time_per_kib"), Column("bytes_per_s", "1/beta GB/s", "gb_s"),
        Column("median_error", "median error", "share"),
    ]  # fmt: skip
    return Table("cost", "Latency and bandwidth", columns, rows, "A call of n bytes takes alpha + beta n.")


def advice_table(analysis: Analysis) -> Table:
    rows = []
    if analysis.advice:
        for candidate in analysis.advice.recommendation.candidates:
            is_own = run_costs.is_current(candidate, analysis.layout)
            words = ["this run's"] if is_own else []
            words += ["fastest"] if candidate == analysis.advice.recommendation.best else []
            rows.append({
                "bucket_size": analysis.run.figures["bucket_size"] if is_own else candidate.bucket_size,
                "buckets": len(candidate.buckets),
                "largest_bytes": max(candidate.buckets), "predicted_s": candidate.seconds, "remark": ", ".join(words),
            })  # fmt: skip
    rows = [{**row, "bucket_size": row["bucket_size"] or "per tensor"} for row in rows]
    columns = [
        Column("bucket_size", "bucket size", "size"), Column("buckets", "buckets"),
        Column("largest_bytes", "largest", "size"), Column("predicted_s", "predicted ms a step", "ms"),
        Column("remark", "", "text"),
    ]  # fmt: skip
    note = (
        "Predicted time of a step's all-reduces with other bucket sizes, by the cost above, without overlap. "
        "Of sizes that make the same buckets one is shown: this run's, or the smallest."
    )
    return Table("advice", "Bucket sizes", columns, rows, note)


def health_table(analysis: Analysis) -> Table:
    records, overhead = analysis.run.ranks, analysis.counts["stats_overhead"]
    device = [record["device_peak_bytes"] for record in records if record["device_peak_bytes"]]
    memory = [record["peak_rss_bytes"] for record in records if record["peak_rss_bytes"]]
    checks = [record["replica_checks"] for record in records if record["replica_checks"] is not None]
    mismatches = [record["replica_mismatches"] or 0 for record in records]
    failed = sum(row["failures"] for row in analysis.counts["operations"])
    rows = [
        ("failed calls, all ranks", f"{failed:,}"),
        ("comparisons of replicas", f"{max(checks):,}, {max(mismatches):,} found a difference" if checks else ""),
        ("peak memory of a rank", _span(memory)),
        ("peak device memory of a rank", _span(device)),
        ("counting an event", f"{overhead['event_s'] * 1e6:.2f} us" if overhead["events"] else ""),
        ("counting all of a rank's events", f"{overhead['seconds'] * 1e3:.2f} ms" if overhead["events"] else ""),
    ]
    columns = [Column("what", "", "text"), Column("value", "", "text")]
    return Table("health", "Health", columns, [{"what": what, "value": value} for what, value in rows if value])


def _span(sizes: list[int]) -> str:
    low, high = (format_size(size) for size in (min(sizes), max(sizes))) if sizes else ("", "")
    return low if low == high else f"{low} to {high}"


def checks_table(analysis: Analysis) -> Table:
    """Return the figures that had to be equal to others and are not: an error of the report."""
    # Each synchronisation reduces one bucket 0.
    rows, synchronisations = [], sum(row["calls"] for row in analysis.buckets if row["bucket"] == 0)
    if analysis.layout and synchronisations and not analysis.run.figures["pipeline"]:  # stages have other layouts
        plan_bytes, reduced = sum(map(sum, analysis.layout)), analysis.reductions["bytes"]
        if not analysis.overflows:  # then calls without a bucket came before these buckets
            before = reduced - sum(row["bytes"] for row in analysis.buckets)
            synchronisations += round(before / plan_bytes)
        expected = plan_bytes * synchronisations
        rows.append(("gradients' bytes are the layout's, times synchronisations", reduced, expected))
    if parts := mean_step(analysis):  # measured separately, except for the rest, which is at least 0
        share = sum(seconds for _, seconds in parts) / (analysis.per_step(analysis.training_s) or math.inf)
        rows.append(("the parts of a step, in % of it", round(100 * share), 100))
    columns = [Column("check", "", "text"), Column("is", "is"), Column("expected", "expected")]
    wrong = [{"check": check, "is": found, "expected": wanted} for check, found, wanted in rows if found != wanted]
    return Table("checks", "WARNING: sums that do not come out", columns, wrong)


def decisions_table(analysis: Analysis) -> Table:
    rows = [{"decision": line} for line in analysis.run.figures["decisions"]]
    return Table("decisions", "Decisions", [Column("decision", "", "text")], rows, "What was chosen, and why.")


def pipeline_table(analysis: Analysis) -> Table:
    """Return what each rank of a pipeline has; no rows without stages."""
    found = analysis.run.figures["pipeline"]
    columns = [
        Column("rank", "rank of pp"), Column("layers", "layers", "text"),
        Column("parameter_nbytes", "parameters", "size"), Column("activation_nbytes", "activations at most", "size"),
    ]  # fmt: skip
    if not found:
        return Table("pipeline", "Stages", columns, [])
    starts, ranks = found["first_layers"], len(found["parameter_bytes"])
    ends = [*(f"{first} to {following - 1}" for first, following in pairwise(starts)), f"from {starts[-1]}"]
    rows = [
        {"rank": rank, "layers": ", ".join(ends[rank::ranks]), "parameter_nbytes": nbytes, "activation_nbytes": kept}
        for rank, (nbytes, kept) in enumerate(
            zip(found["parameter_bytes"], found["peak_activation_bytes"], strict=True)
        )
    ]
    idle = "" if found["bubble"] is None else f"ranks were idle for {found['bubble']:.0%} of it, and would be "
    note = (
        f"{found['schedule']}, {found['micro_batches']} micro-batches a step; {idle}"
        f"{found['bubble_by_formula']:.0%} by the formula for equal stages."
    )
    return Table("pipeline", "Stages", columns, rows, note)


ALL = (
    lizardist_table, step_table, step_ranks_table, pipeline_table, operations_table, buckets_table, ranks_table,
    stragglers_table, cost_table, advice_table, health_table, checks_table, decisions_table,
)  # fmt: skip
