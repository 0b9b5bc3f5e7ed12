"""A report's tables, one function each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from clcomm.report import costs
from clcomm.report.facts import Facts, hidden_step_s, per_call, rank_parts, rank_rows, step_parts
from clcomm.report.parts import HIDDEN, PART_KEYS
from clcomm.report.shapes import Column, Table, count, with_values, written
from clcomm.stats import MOST_TALLIES
from clcomm.synchronizer import GRADIENTS
from clcomm.units import format_size

_TIMES = (
    Column("pack_s", "pack", "ms"), Column("wait_s", "wait", "ms"), Column("transfer_s", "move", "ms"),
    Column("untold_s", "wait+move", "ms"), Column("unpack_s", "unpack", "ms"), Column("hidden_s", "hidden", "ms"),
)  # fmt: skip
_BANDWIDTHS = Column("algbw_bytes_per_s", "algbw", "gb_s"), Column("busbw_bytes_per_s", "busbw", "gb_s")
_CALLS = (
    Column("p50_s", "p50", "ms"), Column("p95_s", "p95", "ms"), Column("p99_s", "p99", "ms"),
    Column("max_s", "max", "ms"), *_BANDWIDTHS, Column("ceiling_share", "of ceiling", "share"),
    Column("failures", "failed"),
)  # fmt: skip


def lizardist_table(facts: Facts) -> Table:
    row = facts.reductions
    whole = [("Total bytes reduced", "bytes"), ("Total bytes sent", "wire_bytes")][0 if facts.compressed else 1 :]
    rows = [
        {"figure": "Average bytes/call", "value": round(row["average_bytes_per_call"])},
        {"figure": "Total all-reduce calls", "value": row["calls"]},
        *({"figure": name, "value": row[key]} for name, key in whole),
    ]
    columns = [Column("figure", "", "text"), Column("value", "per rank")]
    note = "LizarDist's three figures."
    if facts.compressed:
        note = "LizarDist's three figures, and what compression makes of the bytes: bytes/call are those reduced."
    return Table("gradients", "Gradient all-reduce", columns, rows if row["calls"] else [], note)


def step_table(facts: Facts) -> Table:
    parts = step_parts(facts)
    whole = facts.per_step(facts.training_s) or 0.0
    rows: list[dict[str, Any]] = [{"part": what, "mean_s": s, "share": s / whole} for what, s in parts]
    rows += [{"part": "a whole step", "mean_s": whole, "share": 1.0}] if rows else []
    columns = [Column("part", "", "text"), Column("mean_s", "ms", "ms"), Column("share", "share", "share")]
    hidden = " What computing hides of communication takes none of it." if facts.reducing["hidden_s"] else ""
    return Table("step", "Where a step goes", columns, rows, f"A mean step of a mean rank.{hidden}")


def _with_ceiling(facts: Facts, row: dict[str, Any]) -> dict[str, Any]:
    share = None
    if facts.ceiling and row["operation"] == "all_reduce" and row["label"] == GRADIENTS and row["calls"]:
        share = facts.ceiling.seconds(row["average_bytes_per_call"]) / row["mean_s"] if row["mean_s"] else None
    return {**row, "ceiling_share": share}


def operations_table(facts: Facts) -> Table:
    def is_rare(row: dict[str, Any]) -> bool:
        return row["calls"] < (facts.steps or 0)

    counted = facts.counts["operations"]
    rows = sorted(counted, key=lambda row: (is_rare(row), -row["seconds"], row["operation"], row["label"]))
    rare = [row for row in rows if is_rare(row)]
    columns = [
        Column("operation", "operation", "text"), Column("label", "label", "text"), Column("calls", "calls"),
        Column("bytes", "bytes"), *([Column("wire_bytes", "on the wire")] if facts.compressed else []),
        Column("seconds", "total", "whole_ms"),
        *(column._replace(kind="whole_ms") for column in _TIMES), *_CALLS,
    ]  # fmt: skip
    rows = [_blank_zeros(facts, _with_ceiling(facts, row)) for row in rows]
    note = f"Per rank; times in ms: {_first_to_last(_TIMES, rows, 'total')} in all, percentiles of single calls"
    note += "; bandwidths in GB/s (10^9 bytes)." if with_values(_BANDWIDTHS, rows) else "."
    note += _untold(rows)
    rare_ms = written(sum(row["seconds"] for row in rare), "whole_ms")
    folded_as = f"{count(len(rare), 'operation')} of the start, the end and now and then: {rare_ms} ms in all"
    return Table("operations", "Operations", columns, rows, note, len(rare), folded_as)


def _first_to_last(columns: Sequence[Column], rows: list[dict[str, Any]], before: str = "") -> str:
    """Return the headings of adjacent columns that have values as people name a range; `before` stands before them."""
    headings = [each for each in (before, *(column.heading for column in with_values(columns, rows))) if each]
    return " to ".join(dict.fromkeys((headings[0], headings[-1]))) if headings else ""


def _blank_zeros(facts: Facts, row: dict[str, Any]) -> dict[str, Any]:
    """Leave out parts that are nothing, and moving where there is nobody to move to; columns without any vanish."""
    suffixes = ("_s", "_mean_s", "_step_s")
    blank = {f"{name[:-2]}{suffix}" for name in (*PART_KEYS, "hidden_s") for suffix in suffixes} | {"failures"}
    alone = set() if facts.several else {f"transfer{suffix}" for suffix in suffixes}
    return {name: None if name in alone or (name in blank and not value) else value for name, value in row.items()}


def _untold(rows: list[dict[str, Any]], key: str = "untold_s") -> str:
    """Return what the column "wait+move" is, where there is one."""
    return " wait+move is either: the transport does not tell which." if any(row[key] for row in rows) else ""


def buckets_table(facts: Facts) -> Table:
    rows = [_blank_zeros(facts, per_call(_with_ceiling(facts, row))) for row in facts.buckets]
    parts = [Column(f"{column.key[:-2]}_mean_s", column.heading, "ms") for column in _TIMES]
    columns = [
        Column("bucket", "bucket"), Column("operation", "operation", "text"), Column("calls", "calls"),
        Column("average_bytes_per_call", "size", "size"), Column("bytes", "bytes"), *parts, *_CALLS,
    ]  # fmt: skip
    mean = _first_to_last(parts, rows)
    note = f"Per rank; times in ms{f', {mean} of a mean call' if mean else ''}, percentiles of single calls. "
    note += f"Buckets are numbered in the order of backward.{_untold(rows)}"
    others = facts.reductions["calls"] - sum(row["calls"] for row in rows)
    if rows and others:
        whose = f"of buckets past the first {MOST_TALLIES}" if facts.overflows else "before these were the buckets"
        note += f" {count(others, 'call')} {whose} {'is' if others == 1 else 'are'} in no line here."
    return Table("buckets", "Buckets", columns, rows, note)


def step_ranks_table(facts: Facts) -> Table:
    names = [name for name, _ in step_parts(facts)]
    rows = [
        {"rank": record["rank"], **{_key(name): s for name, s in parts.items()}, "step_s": sum(parts.values()),
         "hidden_step_s": hidden_s or None}
        for record, parts, hidden_s in zip(facts.run.ranks, rank_parts(facts), hidden_step_s(facts), strict=True)
    ]  # fmt: skip
    columns = [Column("rank", "rank"), *(Column(_key(name), name, "ms") for name in names)]
    columns += [Column("step_s", "a whole step", "ms"), Column("hidden_step_s", HIDDEN, "ms")]
    note = "A mean step of each rank, in ms."
    if any(row["hidden_step_s"] for row in rows):
        note += " What is hidden goes on behind computing and takes none of it."
    return Table("step_ranks", "Where a step goes, by rank", columns, rows if names and len(rows) > 1 else [], note)


def _key(part: str) -> str:
    """Return what a part of a step is called in JSON."""
    return f"{part.replace(',', '').replace(' ', '_')}_step_s"


def ranks_table(facts: Facts) -> Table:
    rows = [_blank_zeros(facts, row) for row in rank_rows(facts)]
    hosts = len({record["host_name"] for record in facts.run.ranks})
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


def stragglers_table(facts: Facts) -> Table:
    rows = sorted(facts.counts["stragglers"], key=lambda row: (-row["last"], row["rank"]))
    columns = [
        Column("rank", "rank"), Column("last", "came last"), Column("share", "share", "share"),
        Column("mean_late_s", "late by", "ms"), Column("max_late_s", "at most", "ms"), Column("late_s", "in all", "ms"),
    ]  # fmt: skip
    note = "How often a rank came last, and by how much after the one before it, in ms."
    return Table("stragglers", "Who came last", columns, rows, note)


def cost_table(facts: Facts) -> Table:
    rows = []
    for each in (facts.own_costs, facts.stored_costs()):
        if isinstance(each, costs.Costs):
            cost, bandwidth = each.cost, each.cost.beta_s_per_byte
            rows.append({
                "source": each.source, "alpha_s": cost.alpha_s, "beta_s_per_byte": bandwidth,
                "bytes_per_s": 1 / bandwidth if bandwidth > 1e-300 else None,
                "median_error": each.fit.median_error if each.fit else None,
            })  # fmt: skip
    columns = [
        Column("source", "an all-reduce costs", "text"), Column("alpha_s", "alpha", "time"),
        Column("beta_s_per_byte", "beta a KiB", "time_per_kib"), Column("bytes_per_s", "1/beta GB/s", "gb_s"),
        Column("median_error", "median error", "share"),
    ]  # fmt: skip
    return Table("cost", "Latency and bandwidth", columns, rows, "A call of n bytes takes alpha + beta n.")


def advice_table(facts: Facts) -> Table:
    rows = []
    if facts.advice:
        for candidate in facts.advice.recommendation.candidates:
            is_own = costs.is_current(candidate, facts.layout)
            words = ["this run's"] if is_own else []
            words += ["fastest"] if candidate == facts.advice.recommendation.best else []
            rows.append({
                "bucket_size": facts.run.figures["bucket_size"] if is_own else candidate.bucket_size,
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
        "What a step's all-reduces would take with other bucket sizes, by the cost above; nothing overlapped. "
        "Of sizes that make the same buckets one is shown: this run's, or the smallest."
    )
    return Table("advice", "Bucket sizes", columns, rows, note)


def health_table(facts: Facts) -> Table:
    records, overhead = facts.run.ranks, facts.counts["stats_overhead"]
    device = [record["device_peak_bytes"] for record in records if record["device_peak_bytes"]]
    memory = [record["peak_rss_bytes"] for record in records if record["peak_rss_bytes"]]
    checks = [record["replica_checks"] for record in records if record["replica_checks"] is not None]
    mismatches = [record["replica_mismatches"] or 0 for record in records]
    failed = sum(row["failures"] for row in facts.counts["operations"])
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


def checks_table(facts: Facts) -> Table:
    """Return the sums that have to come out: a report whose parts do not add up says so itself."""
    rows, first = [], sum(row["calls"] for row in facts.buckets if row["bucket"] == 0)
    if facts.layout and first:  # whatever the plan, each synchronisation reduces one bucket 0
        whole, calls = sum(map(sum, facts.layout)), first
        if not facts.overflows:  # then what is in no bucket was reduced before these were the buckets
            before = facts.reductions["bytes"] - sum(row["bytes"] for row in facts.buckets)
            calls += round(before / whole)
        expected = whole * calls
        rows.append(("gradients' bytes are the layout's, times synchronisations", facts.reductions["bytes"], expected))
    if parts := step_parts(facts):  # each measured on its own, but for the rest, which is not below nothing
        of_step = sum(seconds for _, seconds in parts) / (facts.per_step(facts.training_s) or math.inf)
        rows.append(("the parts of a step are a whole step, in %", round(100 * of_step), 100))
    columns = [
        Column("check", "", "text"),
        Column("is", "is"),
        Column("expected", "expected"),
        Column("ok", "", "text"),
    ]
    kept = [{"check": c, "is": i, "expected": e, "ok": "yes" if i == e else "NO"} for c, i, e in rows]
    return Table("checks", "Sums", columns, kept)


def decisions_table(facts: Facts) -> Table:
    rows = [{"decision": line} for line in facts.run.figures["decisions"]]
    return Table("decisions", "Decisions", [Column("decision", "", "text")], rows, "What was chosen, and why.")


ALL = (
    lizardist_table, step_table, step_ranks_table, operations_table, buckets_table, ranks_table, stragglers_table,
    cost_table, advice_table, health_table, checks_table, decisions_table,
)  # fmt: skip
